package raftfsm

import (
	"fmt"
	"slices"
	"strings"
)

// Phase is where a binding is in its life.
type Phase string

// The phases, in order.
const (
	PhaseUnbound   Phase = "unbound"   // no provider: see Refusal
	PhaseWaiting   Phase = "waiting"   // its provider's node has not staged a credential
	PhaseStaged    Phase = "staged"    // sealed credential in the log
	PhaseMinted    Phase = "minted"    // exists, and a login with it worked
	PhaseDelivered Phase = "delivered" // a login from the consumer's node worked, files are written
	PhaseInUse     Phase = "in-use"    // proven as its module asks
)

// Phase computes the binding's phase. In-use holds as long as one credential is
// proven: a rotation does not take it back.
func (b Binding) Phase() Phase {
	if b.Provider == "" {
		return PhaseUnbound
	}
	phase := PhaseWaiting
	for _, c := range b.Credentials {
		p := PhaseStaged
		switch {
		case c.proven(b.Proof):
			p = PhaseInUse
		case c.Delivered:
			p = PhaseDelivered
		case c.Minted:
			p = PhaseMinted
		}
		if p.Rank() > phase.Rank() {
			phase = p
		}
	}
	return phase
}

// Rank orders the phases: unbound is 0, in-use 5.
func (p Phase) Rank() int {
	return slices.Index([]Phase{PhaseUnbound, PhaseWaiting, PhaseStaged, PhaseMinted, PhaseDelivered, PhaseInUse}, p)
}

func (c Credential) proven(proof string) bool {
	switch {
	case !c.Delivered:
		return false
	case proof == ProofDelivered:
		return true
	case proof == ProofHealth:
		return c.Healthy
	}
	return c.Seen
}

// update stores b, and the time when its phase last changed.
func (t *tx) update(b Binding) {
	old, was := t.Bindings[b.ID()]
	b.Since = since(old.Since, t.h.Time, was && old.Phase() == b.Phase())
	put(t, t.Bindings, b.ID(), b)
}

// unbind ends a binding at once. Its logins become a Withdrawal, which the
// provider's node works off by itself.
func (t *tx) unbind(id, why string) {
	b := t.Bindings[id]
	drop(t, t.Bindings, id)
	t.withdraw(b)
	if b.Provider != "" {
		t.event("%s is withdrawn from %s: %s", id, b.Provider, why)
	}
	t.release(b.Resource)
}

func (t *tx) withdraw(b Binding) {
	if len(b.Credentials) == 0 {
		return
	}
	put(t, t.Withdrawals, fmt.Sprintf("%s#%d", b.ID(), t.Index), Withdrawal{
		Binding: b.ID(), Provider: b.Provider, Kind: b.Kind, Resource: b.Resource, Credentials: b.Credentials, Since: t.h.Time,
	})
}

// mintAnew gives every binding of the assignment a new credential: the old ones
// are sealed to a node that it has left.
func (t *tx) mintAnew(assignment string) {
	for _, id := range t.bindingsOf(assignment) {
		b := t.Bindings[id]
		t.withdraw(b)
		b.Credentials, b.AtConsumer, b.AtProvider = nil, nil, nil
		t.update(b)
	}
}

// release forgets a resource that nothing refers to and that never existed.
func (t *tx) release(resource string) {
	res, ok := t.Resources[resource]
	if !ok || res.Made {
		return
	}
	for _, b := range t.Bindings {
		if b.Resource == resource {
			return
		}
	}
	for _, w := range t.Withdrawals {
		if w.Resource == resource {
			return
		}
	}
	drop(t, t.Resources, resource)
}

func (s *State) bindingsOf(assignment string) []string {
	var out []string
	for _, id := range sorted(s.Bindings) {
		if s.Bindings[id].Consumer == assignment {
			out = append(out, id)
		}
	}
	return out
}

// ConsumersOf lists the bindings that are bound to the assignment.
func (s *State) ConsumersOf(assignment string) []string {
	var out []string
	for _, id := range sorted(s.Bindings) {
		if s.Bindings[id].Provider == assignment {
			out = append(out, id)
		}
	}
	return out
}

// Retained lists the resources that hold data and that no binding refers to.
func (s *State) Retained() []string {
	used := map[string]bool{}
	for _, b := range s.Bindings {
		used[b.Resource] = true
	}
	var out []string
	for _, id := range sorted(s.Resources) {
		if s.Resources[id].Made && !used[id] {
			out = append(out, id)
		}
	}
	return out
}

// refuseIfConsumed refuses to remove a provider that a consumer is bound to,
// other than those that leave with it.
func (t *tx) refuseIfConsumed(a Assignment, leaving ...string) *Rejection {
	var bound []string
	for _, id := range t.ConsumersOf(a.Name) {
		if !slices.Contains(leaving, t.Bindings[id].Consumer) {
			bound = append(bound, id)
		}
	}
	if len(bound) > 0 {
		return reject("still-consumed", "", fmt.Sprintf("%s is the provider of %s", a.Name, strings.Join(bound, ", ")), "remove or re-bind them first")
	}
	return nil
}

// removeAssignment ends what runs, what it consumed and what it held.
func (t *tx) removeAssignment(name string) {
	for _, id := range t.bindingsOf(name) {
		t.unbind(id, "its consumer was removed")
	}
	for _, id := range sorted(t.Withdrawals) {
		if w := t.Withdrawals[id]; w.Provider == name {
			drop(t, t.Withdrawals, id)
			t.event("logins of %s were left behind at %s, which is removed", w.Binding, name)
		}
	}
	node := t.NodeName(t.Assignments[name].Node)
	drop(t, t.Assignments, name)
	for _, seat := range sorted(t.Seats) {
		if s := t.Seats[seat]; s.Holder == name {
			t.name(s, "")
		}
	}
	for _, id := range sorted(t.Providers) {
		if strings.HasPrefix(id, name+"/") {
			drop(t, t.Providers, id)
		}
	}
	t.event("%s removed from %s", name, node)
}

func (t *tx) remove(c Remove) *Rejection {
	t.Mesh.Changed = t.Index
	switch c.What {
	case WhatSeat:
		if _, ok := t.Seats[c.Name]; !ok {
			return t.unknown(c, sorted(t.Seats))
		}
		drop(t, t.Seats, c.Name)
		t.event("seat %s removed", c.Name)
		return nil
	case WhatAssignment:
		a, ok := t.Assignments[c.Name]
		if !ok {
			return t.unknown(c, sorted(t.Assignments))
		}
		if a.Rule {
			return reject("by-rule", "", fmt.Sprintf("%s comes from the assignment of %s to all nodes and would come back", a.Name, a.Module), "remove the module, or assign it to the nodes by name")
		}
		return t.removeAll([]string{c.Name})
	case WhatModule:
		if _, ok := t.Modules[c.Name]; !ok {
			return t.unknown(c, sorted(t.Modules))
		}
		var names []string
		for _, name := range sorted(t.Assignments) {
			if t.Assignments[name].Module == c.Name {
				names = append(names, name)
			}
		}
		if r := t.removeAll(names); r != nil {
			return r
		}
		drop(t, t.Everywhere, c.Name)
		drop(t, t.Modules, c.Name)
		t.event("module %s removed", c.Name)
		return nil
	}
	return reject("bad-kind", "", fmt.Sprintf("%q is nothing to remove", clip(c.What)), "write module, assignment or seat")
}

func (t *tx) removeAll(names []string) *Rejection {
	for _, name := range names {
		if r := t.refuseIfConsumed(t.Assignments[name], names...); r != nil {
			return r
		}
		for _, id := range sorted(t.Withdrawals) {
			if w := t.Withdrawals[id]; w.Provider == name {
				return reject("still-withdrawing", "", fmt.Sprintf("%s has logins of %s to withdraw first", name, w.Binding), "they go by themselves once its service answers; meshd bindings shows what holds them up")
			}
		}
	}
	for _, name := range names {
		t.removeAssignment(name)
	}
	return nil
}

func (t *tx) unknown(c Remove, all []string) *Rejection {
	r := reject("no-"+c.What, "", fmt.Sprintf("there is no %s %q", c.What, clip(c.Name)), "meshd "+c.What+"s lists them")
	r.Candidates = nearest(c.Name, all)
	return r
}
