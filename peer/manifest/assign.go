package manifest

import (
	"fmt"
	"slices"

	"meshd/raftfsm"
)

func (r *reader) seat(v value) {
	s := raftfsm.Seat{Scope: raftfsm.ScopeMesh}
	path := "seat/" + v.entries[0].value.text
	r.keys(v, path, "", map[string]take{
		"seat": func(v value, _ string) {
			r.name(&s.Name, "seat")(v, "seat")
			r.places[path] = v.place()
			r.once("seat "+clip(s.Name), v.place())
		},
		"scope":    r.oneOf(&s.Scope, raftfsm.ScopeMesh, raftfsm.ScopeNode),
		"delivers": r.name(&s.Delivers, "kind"),
		"verbs":    r.names(&s.Verbs, "verb"),
		"holder":   r.assignment(&s.Want),
		"failover": r.oneOf(&s.Failover, "auto", "manual"),

		"idempotent": r.names(&s.Idempotent, "verb"),
	})
	if s.Scope == raftfsm.ScopeNode {
		for _, key := range []string{"delivers", "holder", "failover", "idempotent"} {
			if e, ok := v.entry(key); ok {
				r.report(e.at, fmt.Sprintf("%q is for a seat with one holder, and %s has scope: node: every node that runs a claimant serves it", key, clip(s.Name)), "leave it out, or write scope: mesh")
			}
		}
	} else if s.Failover == "" {
		// Answers out of another machine's data are worse than none.
		s.Failover = "auto"
		if s.Delivers != "" {
			s.Failover = "manual"
		}
	}
	r.docs.Seats = append(r.docs.Seats, s)
}

func (r *reader) assign(v value) {
	var a raftfsm.Assign
	path := fmt.Sprintf("assign/%d", len(r.docs.Assigns))
	at := v.entries[0].value.place()
	r.places[path] = at
	var on string
	r.keys(v, path, "", map[string]take{
		"assign":    r.name(&a.Module, "module"),
		"node":      r.node(&on),
		"nodes":     r.nodes(&a),
		"as":        r.name(&a.As, "assignment"),
		"bind":      r.bind(&a.Bind),
		"default":   r.defaults(&a.Default),
		"exclusive": r.flag(&a.Exclusive),
		"address":   r.address(&a.Address),
		"env":       r.env(&a.Env),
		"health":    r.health(&a.Health),
		"limits":    r.limits(&a.Limits),
	})
	one, hasNode := v.entry("node")
	many, hasNodes := v.entry("nodes")
	as, hasAs := v.entry("as")
	switch {
	case hasNode && hasNodes:
		r.report(many.at, "an assignment has node or nodes, not both", "keep one of the two")
	case !hasNode && !hasNodes:
		r.report(at, "the assignment names no node", "write node: NAME, nodes: [NAME, ...] or nodes: all")
	case hasAs && hasNodes && (a.All || len(many.value.items) > 1):
		r.report(as.at, `"as" names one assignment, and this is one on each of several nodes`, "write an assign document for each node, or leave as out")
	}
	if hasNode {
		a.Nodes = []string{on}
		r.places[path+"/nodes/0"] = one.value.place()
	}
	r.unique(a, at)
	r.docs.Assigns = append(r.docs.Assigns, a)
	r.later = append(r.later, func() {
		i := slices.IndexFunc(r.docs.Modules, func(m raftfsm.Module) bool { return m.Name == a.Module })
		if i < 0 { // in the mesh already; its node says what does not fit
			r.environment(v, raftfsm.Module{}, false)
			return
		}
		r.environment(v, r.docs.Modules[i], true)
	})
}

// unique refuses a second document for the same assignment.
func (r *reader) unique(a raftfsm.Assign, at place) {
	switch {
	case a.As != "":
		r.once("assignment "+clip(a.As), at)
	case a.All:
		r.once("the assignment of "+clip(a.Module)+" to all nodes", at)
	}
	for i, on := range a.Nodes {
		if a.As == "" && on != "" && !slices.Contains(a.Nodes[:i], on) {
			r.once("assignment "+clip(a.Module)+"@"+clip(on), at)
		}
	}
}

// all is the word for every node.
const all = "all"

func (r *reader) node(into *string) take {
	return func(v value, path string) {
		if v.text == all {
			r.report(v.place(), `"all" is no node`, "write nodes: all")
			return
		}
		r.name(into, "node")(v, path)
	}
}

func (r *reader) nodes(into *raftfsm.Assign) take {
	const ways = "write nodes: [NAME, ...] or nodes: all"
	return func(v value, path string) {
		switch {
		case v.sort == scalar && v.text == all:
			into.All = true
		case v.sort == scalar && raftfsm.CheckName("node", v.text) == nil:
			r.report(v.place(), `"nodes" must be a list, or the word all`, fmt.Sprintf("write nodes: [%s] or node: %[1]s", v.text))
		case v.sort == list && len(v.items) == 0:
			r.report(v.place(), `"nodes" is empty`, ways)
		default:
			r.setOf(&into.Nodes, ways, r.node)(v, path)
		}
	}
}

func (r *reader) bind(into *map[string]string) take {
	return func(v value, path string) {
		r.each(v, path, "write {REQUIREMENT: PROVIDER}", named("requirement"), func(name string, v value, path string) {
			var provider string
			r.assignment(&provider)(v, path)
			put(into, name, provider)
		})
	}
}

// defaults reads one kind or a list of them.
func (r *reader) defaults(into *[]string) take {
	return func(v value, path string) {
		if v.sort != scalar {
			r.names(into, "kind")(v, path)
			return
		}
		var kind string
		r.name(&kind, "kind")(v, path)
		*into = []string{kind}
	}
}
