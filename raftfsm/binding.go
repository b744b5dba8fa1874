package raftfsm

import (
	"fmt"
	"slices"
)

// Phase is where a binding is in its life: see the drawing in the package
// comment.
type Phase string

// The phases, in order.
const (
	PhaseUnbound   Phase = "unbound"   // no provider yet: see Refusal
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

// withdraw gives the binding's logins to the provider's node to be ended. A
// binding has logins once per entry, so the index makes the id unique.
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

// release forgets a resource that nothing refers to and that no generation was
// handed out on. One that had a login is kept for its numbers, and its data.
func (t *tx) release(resource string) {
	res, ok := t.Resources[resource]
	if !ok || res.Last > 0 {
		return
	}
	for _, b := range t.Bindings {
		if b.Resource == resource {
			return
		}
	}
	drop(t, t.Resources, resource)
}

// bindingsOf lists the bindings of the assignment: one for each requirement of
// its module, in order.
func (s *State) bindingsOf(assignment string) []string {
	var out []string
	for _, req := range sorted(s.Modules[s.Assignments[assignment].Module].Requires) {
		if id := BindingID(assignment, req); has(s.Bindings, id) {
			out = append(out, id)
		}
	}
	return out
}

// ConsumersOf lists the bindings that are bound to the assignment, in order.
func (s *State) ConsumersOf(assignment string) []string {
	var out []string
	for id, b := range s.Bindings {
		if b.Provider == assignment {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// Retained lists the resources that hold data and that no binding refers to, in
// order.
func (s *State) Retained() []string {
	used := map[string]bool{}
	for _, b := range s.Bindings {
		used[b.Resource] = true
	}
	var out []string
	for id, r := range s.Resources {
		if r.Made && !used[id] {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}
