package raftfsm

import (
	"fmt"
	"slices"
)

// invariants checks what the package comment promises of every state.
func invariants(s *State) error {
	for _, check := range []func(*State) error{bindingInvariants, resourceInvariants, seatInvariants, sessionInvariants, assignmentInvariants} {
		if err := check(s); err != nil {
			return err
		}
	}
	for id := range s.Nodes {
		if err := grantInvariants(s, s.Desired(id)); err != nil {
			return err
		}
	}
	if len(s.Events) > maxEvents || len(s.Tokens) > maxTokens || len(s.Parts) > maxOpenPushes {
		return fmt.Errorf("%d events, %d tokens, %d open pushes: one is over its bound", len(s.Events), len(s.Tokens), len(s.Parts))
	}
	return nil
}

func bindingInvariants(s *State) error {
	logins := map[string]string{}
	for id, b := range s.Bindings {
		a, ok := s.Assignments[b.Consumer]
		q, required := s.Modules[a.Module].Requires[b.Requirement]
		switch {
		case id != b.ID():
			return fmt.Errorf("binding %s has key %s", b.ID(), id)
		case !ok:
			return fmt.Errorf("binding %s has no consumer", id)
		case !required || q.Kind != b.Kind:
			return fmt.Errorf("binding %s of %s is not what its module requires", id, b.Kind)
		case (b.Provider == "") != (b.Refusal != "") || (b.Provider == "") != (b.Resource == "") || (b.Provider == "") != (b.Chosen == ""):
			return fmt.Errorf("binding %s is neither bound nor unbound: %+v", id, b)
		case b.Provider == "" && (len(b.Credentials) > 0 || b.Phase() != PhaseUnbound):
			return fmt.Errorf("binding %s is unbound and has a credential", id)
		case b.Provider == "" && b.Naming == "" && !a.Rule:
			return fmt.Errorf("binding %s names nothing, is not of nodes: all, and is unbound", id)
		case b.Provider == b.Consumer:
			return fmt.Errorf("binding %s is bound to itself", id)
		case b.Provider != "" && !s.provides(b.Provider, b.Kind):
			return fmt.Errorf("binding %s is bound to %s, which provides no %s", id, b.Provider, b.Kind)
		case len(b.Credentials) > 2:
			return fmt.Errorf("binding %s has %d credentials", id, len(b.Credentials))
		}
		if b.Provider == "" {
			continue
		}
		res, ok := s.Resources[b.Resource]
		if !ok || b.Resource != ResourceID(b.Provider, b.Kind, a.owner(), b.Requirement) {
			return fmt.Errorf("binding %s has resource %s, which is not its own or not there", id, b.Resource)
		}
		var last uint64
		for _, c := range b.Credentials {
			if c.Generation <= last || c.Generation > res.Last {
				return fmt.Errorf("binding %s has generation %d after %d, and %d were handed out", id, c.Generation, last, res.Last)
			}
			last = c.Generation
			if other, taken := logins[c.Login]; taken || len(c.Login) > 30 {
				return fmt.Errorf("login %s of %s is too long or that of %s", c.Login, id, other)
			}
			logins[c.Login] = id
			if c.Delivered && !c.Minted || c.Seen && !c.Minted || c.Healthy && !c.Delivered {
				return fmt.Errorf("credential %d of %s skipped a step: %+v", c.Generation, id, c)
			}
			if c.Minted && !res.Made {
				return fmt.Errorf("credential %d of %s is minted on a resource that was never made", c.Generation, id)
			}
		}
	}
	for id, w := range s.Withdrawals {
		if !s.provides(w.Provider, w.Kind) || len(w.Credentials) == 0 {
			return fmt.Errorf("withdrawal %s at %s can never end", id, w.Provider)
		}
		for _, c := range w.Credentials {
			if other, taken := logins[c.Login]; taken {
				return fmt.Errorf("login %s is withdrawn and in use by %s", c.Login, other)
			}
			logins[c.Login] = id
		}
	}
	return nil
}

func resourceInvariants(s *State) error {
	used, names := map[string]bool{}, map[string]string{}
	for _, b := range s.Bindings {
		used[b.Resource] = true
	}
	for id, r := range s.Resources {
		if id != ResourceID(r.Provider, r.Kind, r.Owner, r.Requirement) || len(r.Name) > 40 {
			return fmt.Errorf("resource %s is kept as %s, with name %s", ResourceID(r.Provider, r.Kind, r.Owner, r.Requirement), id, r.Name)
		}
		if other, taken := names[r.Name]; taken {
			return fmt.Errorf("resources %s and %s share the name %s", id, other, r.Name)
		}
		names[r.Name] = id
		if !used[id] && r.Last == 0 {
			return fmt.Errorf("resource %s is of no use to anything", id)
		}
	}
	for _, id := range s.Retained() {
		if used[id] {
			return fmt.Errorf("resource %s is retained and in use", id)
		}
	}
	return nil
}

func seatInvariants(s *State) error {
	delivered := map[string]string{}
	for name, seat := range s.Seats {
		switch {
		case seat.Holder != "" && !s.claims(seat.Holder, name):
			return fmt.Errorf("seat %s is held by %s, which does not claim it", name, seat.Holder)
		case seat.Holder != "" && seat.Scope != ScopeMesh:
			return fmt.Errorf("seat %s of scope %s has a holder", name, seat.Scope)
		case seat.Epoch>>48 != 0 && seat.Epoch>>48 != s.Mesh.Generation || seat.Epoch&(1<<48-1) > s.Index:
			return fmt.Errorf("seat %s has epoch %d at index %d", name, seat.Epoch, s.Index)
		}
		if other, taken := delivered[seat.Delivers]; taken && seat.Delivers != "" && seat.Scope == ScopeMesh {
			return fmt.Errorf("seats %s and %s both deliver %s", name, other, seat.Delivers)
		}
		if seat.Scope == ScopeMesh {
			delivered[seat.Delivers] = name
		}
	}
	return nil
}

func assignmentInvariants(s *State) error {
	defaults := map[string]string{}
	for name, a := range s.Assignments {
		m, ok := s.Modules[a.Module]
		if _, member := s.Nodes[a.Node]; !ok || !member || name != a.Name {
			return fmt.Errorf("assignment %s has no module or no node", name)
		}
		for _, kind := range a.Default {
			if other, taken := defaults[kind]; taken || !s.provides(name, kind) {
				return fmt.Errorf("%s is a default of %s, which it does not provide or %s is", name, kind, other)
			}
			defaults[kind] = name
			if all := s.ProvidersOf(kind); a.Exclusive && len(all) > 1 {
				return fmt.Errorf("%s is the exclusive provider of %s, and there are %v", name, kind, all)
			}
		}
		for req := range m.Requires {
			if !has(s.Bindings, BindingID(name, req)) {
				return fmt.Errorf("requirement %s of %s has no binding", req, name)
			}
		}
	}
	for module := range s.Everywhere {
		for id, n := range s.Nodes {
			if !has(s.Assignments, module+"@"+n.Name) {
				return fmt.Errorf("module %s is not on node %s, and is on all", module, id)
			}
		}
	}
	for id := range s.Providers {
		found := false
		for name, a := range s.Assignments {
			for kind := range s.Modules[a.Module].Provides {
				found = found || ProviderID(name, kind) == id
			}
		}
		if !found {
			return fmt.Errorf("provider %s has a status and is none", id)
		}
	}
	return nil
}

// grantInvariants checks that a node lets its assignments call what they list,
// and that it answers no seat that it neither holds nor, for a node seat, runs a
// claimant of.
func grantInvariants(s *State, d Desired) error {
	for _, g := range d.Grants {
		calls := s.Modules[s.Assignments[g.Assignment].Module].Calls
		for _, t := range g.Calls {
			if !slices.ContainsFunc(calls, func(c string) bool {
				p, ok := ParseTarget(c)
				return ok && slices.Contains(s.Targets(p), t)
			}) {
				return fmt.Errorf("%s may call %+v, which it does not list", g.Assignment, t)
			}
		}
	}
	for _, svc := range d.Seats {
		if seat := s.Seats[svc.Seat]; !s.claims(svc.Assignment, svc.Seat) || seat.Scope == ScopeMesh && seat.Holder != svc.Assignment {
			return fmt.Errorf("%s answers seat %s", svc.Assignment, svc.Seat)
		}
	}
	return nil
}
