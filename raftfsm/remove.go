package raftfsm

import (
	"fmt"
	"slices"
	"strings"
)

func (t *tx) remove(c Remove) *Rejection {
	t.Mesh.Changed = t.Index
	switch c.What {
	case WhatSeat:
		seat, ok := t.Seats[c.Name]
		if !ok {
			return t.unknown(c, sorted(t.Seats), "meshd seats")
		}
		t.leave(seat)
		drop(t, t.Seats, c.Name)
		t.event("seat %s removed", c.Name)
		return nil
	case WhatAssignment:
		a, ok := t.Assignments[c.Name]
		if !ok {
			return t.unknown(c, sorted(t.Assignments), "meshd status")
		}
		return t.removeAssignment(a)
	case WhatModule:
		if _, ok := t.Modules[c.Name]; !ok {
			return t.unknown(c, sorted(t.Modules), "meshd modules")
		}
		return t.removeModule(c.Name)
	}
	return reject("bad-what", "", fmt.Sprintf("%q is not a sort of thing that can be removed", clip(c.What)), "write meshd rm module, assignment or seat, and a name")
}

func (t *tx) unknown(c Remove, all []string, listing string) *Rejection {
	r := reject("no-"+c.What, "", fmt.Sprintf("there is no %s %q", c.What, clip(c.Name)), listing+" lists them")
	r.Candidates = nearest(c.Name, all)
	return r
}

// removeAssignment removes a. Where a `nodes: all` rule covers the node, what
// the written assignment had overridden comes back.
func (t *tx) removeAssignment(a Assignment) *Rejection {
	if a.Rule {
		return reject("by-rule", "", fmt.Sprintf("%s comes from the assignment of %s to all nodes, and would come back", a.Name, a.Module), "remove the module with meshd rm module "+a.Module+", and push it again to the nodes that should have it")
	}
	if r := t.refuseRemoval([]string{a.Name}); r != nil {
		return r
	}
	t.end([]string{a.Name})
	if rule, ok := t.Everywhere[a.Module]; ok && !a.Named {
		t.place(t.assignment(rule, a.Node, true), "")
	}
	return t.resolve()
}

func (t *tx) removeModule(module string) *Rejection {
	names := t.assignmentsOf(module)
	if r := t.refuseRemoval(names); r != nil {
		return r
	}
	t.end(names)
	drop(t, t.Everywhere, module)
	drop(t, t.Modules, module)
	t.event("module %s removed", module)
	return t.resolve()
}

// assignmentsOf lists the assignments of the module, in order.
func (s *State) assignmentsOf(module string) []string {
	var out []string
	for name, a := range s.Assignments {
		if a.Module == module {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// refuseRemoval refuses to remove providers that still have something to do.
func (t *tx) refuseRemoval(names []string) *Rejection {
	if r := t.refuseConsumed(names); r != nil {
		return r
	}
	for _, id := range sorted(t.Withdrawals) {
		if w := t.Withdrawals[id]; slices.Contains(names, w.Provider) {
			return reject("still-withdrawing", "", fmt.Sprintf("%s cannot be removed: it has logins of %s to end first", w.Provider, w.Binding), "they go by themselves once its service answers; meshd providers "+w.Provider+" shows what holds them up")
		}
	}
	return nil
}

// refuseConsumed refuses to remove providers that consumers are bound to, other
// than those that leave with them.
func (t *tx) refuseConsumed(leaving []string) *Rejection {
	for _, name := range leaving {
		var bound []string
		for _, id := range t.ConsumersOf(name) {
			if !slices.Contains(leaving, t.Bindings[id].Consumer) {
				bound = append(bound, id)
			}
		}
		if len(bound) > 0 {
			return reject("still-consumed", "", fmt.Sprintf("%s cannot be removed: it is the provider of %s", name, few(bound)), "remove those consumers first, or bind them to another provider and push")
		}
	}
	return nil
}

// end removes assignments: what they run, what they consume and what they hold.
// All the consuming ends first, so that logins left at a provider that leaves as
// well are seen, and not waited for for ever.
func (t *tx) end(names []string) {
	for _, name := range names {
		for _, id := range t.bindingsOf(name) {
			t.unbind(id, "its consumer was removed")
		}
	}
	for _, id := range sorted(t.Withdrawals) {
		if w := t.Withdrawals[id]; slices.Contains(names, w.Provider) {
			drop(t, t.Withdrawals, id)
			t.event("logins of %s were left behind at %s, which is removed", w.Binding, w.Provider)
		}
	}
	for _, name := range names {
		a := t.Assignments[name]
		for kind := range t.Modules[a.Module].Provides {
			drop(t, t.Providers, ProviderID(name, kind))
		}
		drop(t, t.Assignments, name)
		t.vacate(name)
		t.event("%s removed from %s", name, t.NodeName(a.Node))
	}
}

// few joins names for a sentence: the first five, and how many more there are.
func few(names []string) string {
	if len(names) > 5 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:5], ", "), len(names)-5)
	}
	return strings.Join(names, ", ")
}
