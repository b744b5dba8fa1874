package cli

import (
	"maps"
	"slices"
	"strings"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// sorted returns the keys in order.
func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// some is s, and never nil: JSON has [] for none, as scripts expect.
func some[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// nodesByName lists the members by name.
func nodesByName(o api.Overview) []raftfsm.Node {
	return slices.SortedFunc(maps.Values(o.State.Nodes), func(a, b raftfsm.Node) int { return strings.Compare(a.Name, b.Name) })
}

// cutProvider takes a provider's id apart.
func cutProvider(id string) (assignment, kind string) {
	assignment, kind, _ = strings.Cut(id, "/")
	return assignment, kind
}

// runs is the assignments of a module, in order.
func runs(o api.Overview, module string) []string {
	var out []string
	for _, name := range sorted(o.State.Assignments) {
		if o.State.Assignments[name].Module == module {
			out = append(out, name)
		}
	}
	return out
}
