package raftfsm

import (
	"fmt"
	"slices"
	"strings"
)

// ProvidersOf lists the assignments that provide the kind, in order.
func (s *State) ProvidersOf(kind string) []string {
	var out []string
	for _, name := range sorted(s.Assignments) {
		if s.provides(name, kind) {
			out = append(out, name)
		}
	}
	return out
}

func (s *State) provides(assignment, kind string) bool {
	a, ok := s.Assignments[assignment]
	if !ok {
		return false
	}
	_, ok = s.Modules[a.Module].Provides[kind]
	return ok
}

// choice is the outcome of resolving one requirement.
type choice struct {
	provider string
	rule     string // one of the Chosen constants
	naming   string // what the user wrote, see Binding.Naming
}

// resolveAll makes the bindings of every assignment what its module requires.
// With lenient set, and for assignments that come from a `nodes: all` rule, a
// requirement that does not resolve leaves an unbound binding and not a
// rejection. Bindings that are bound stay as they are, unless a push names
// another provider.
func (t *tx) resolveAll(lenient bool) *Rejection {
	for _, name := range sorted(t.Assignments) {
		a := t.Assignments[name]
		m := t.Modules[a.Module]
		for _, req := range sorted(m.Requires) {
			if r := t.bind(a, req, m.Requires[req], lenient); r != nil {
				r.Path = t.pathOf(a, m, req)
				return r
			}
		}
		for _, req := range sorted(a.Bind) {
			if _, ok := m.Requires[req]; !ok {
				r := reject("no-requirement", "", fmt.Sprintf("%s binds %q, and module %s has no such requirement", a.Name, clip(req), m.Name), "name one of its requirements")
				r.Candidates = nearest(req, sorted(m.Requires))
				return r
			}
		}
	}
	for _, id := range sorted(t.Bindings) {
		b := t.Bindings[id]
		if _, still := t.Modules[t.Assignments[b.Consumer].Module].Requires[b.Requirement]; !still {
			t.unbind(id, "no longer required")
		}
	}
	return nil
}

// pathOf points a rejection at the module's requirement, the place where its
// provider is written.
func (t *tx) pathOf(a Assignment, m Module, req string) string {
	if a.Bind[req] != "" {
		return "assignment/" + a.Name + "/bind/" + req
	}
	return "module/" + m.Name + "/requires/" + req
}

// naming is what the user wrote to choose the provider of a requirement.
func naming(a Assignment, req string, q Requirement) string {
	switch {
	case a.Bind[req] != "":
		return "bind " + a.Bind[req]
	case q.Provider != "":
		return "provider " + q.Provider
	case q.Node != "":
		return "node " + q.Node
	}
	return ""
}

// bind makes the one binding of a requirement.
func (t *tx) bind(a Assignment, req string, q Requirement, lenient bool) *Rejection {
	id := BindingID(a.Name, req)
	proof := q.Proof
	if proof == "" {
		proof = ProofLogin
	}
	old, was := t.Bindings[id]
	said := naming(a, req, q)
	settled := was && old.Provider != "" && old.Kind == q.Kind && (said == old.Naming || said == "")
	if settled {
		if old.Proof != proof {
			old.Proof = proof
			t.update(old)
		}
		return nil
	}
	c, r := t.choose(a, req, q)
	if r != nil {
		pendingName := r.Code == "no-provider" && c.provider != "" && lenient
		switch {
		case pendingName:
		case lenient && said != "" || a.Rule:
			if was && old.Refusal == r.Error() {
				return nil
			}
			if was {
				t.unbind(id, "no longer resolves")
			}
			t.update(Binding{Consumer: a.Name, Requirement: req, Kind: q.Kind, Naming: said, Proof: proof, Refusal: r.Error(), Since: t.h.Time})
			t.event("%s is unbound: %s", id, r.Text)
			return nil
		default:
			return r
		}
	}
	if c.provider == a.Name {
		return reject("self", "", fmt.Sprintf("requirement %s of %s would be bound to %s itself", req, a.Name, a.Name), "name another provider of "+q.Kind)
	}
	if was && old.Provider == c.provider && old.Kind == q.Kind {
		old.Naming, old.Chosen, old.Proof = said, c.rule, proof
		t.update(old)
		return nil
	}
	if was {
		t.unbind(id, "re-bound to "+c.provider)
	}
	res := t.resource(a, req, q.Kind, c.provider)
	t.update(Binding{
		Consumer: a.Name, Requirement: req, Kind: q.Kind, Provider: c.provider, Chosen: c.rule, Naming: said,
		Resource: res, Proof: proof, Since: t.h.Time,
	})
	t.event("%s is bound to %s (%s)", id, c.provider, c.rule)
	return nil
}

// resource makes the record of what a binding's logins work on, or finds the
// one that an earlier binding left.
func (t *tx) resource(a Assignment, req, kind, provider string) string {
	owner := a.Module
	if a.Named {
		owner = a.Name
	}
	id := ResourceID(provider, kind, owner, req)
	if _, ok := t.Resources[id]; !ok {
		put(t, t.Resources, id, Resource{
			Provider: provider, Kind: kind, Owner: owner, Requirement: req,
			Name: resourceName(t.Mesh.ID, provider, kind, owner, req), Since: t.h.Time,
		})
	}
	return id
}

// choose applies the rules in their order: the assignment, the requirement's
// provider, its node, the consumer's own node, the declared default, the seat.
// With a rejection of code "no-provider" the choice still holds the name that
// the user gave, which a pending push takes.
func (t *tx) choose(a Assignment, req string, q Requirement) (choice, *Rejection) {
	said := naming(a, req, q)
	rule, name := ChosenOverride, a.Bind[req]
	if name == "" {
		rule, name = ChosenProvider, q.Provider
	}
	all := t.ProvidersOf(q.Kind)
	if name != "" {
		c := choice{name, rule, said}
		if slices.Contains(all, name) {
			return c, nil
		}
		text := fmt.Sprintf("requirement %s of %s names %s, and there is no such provider of %s", req, a.Name, clip(name), q.Kind)
		if _, exists := t.Assignments[name]; exists {
			text = fmt.Sprintf("requirement %s of %s names %s, which does not provide %s", req, a.Name, name, q.Kind)
			c.provider = ""
		}
		return c, t.candidates(reject("no-provider", "", text, "push its provider first, or push with --pending to wait for it"), req, nearest(name, all))
	}
	if q.Node != "" {
		return t.chooseOn(a, req, q, all)
	}
	if local := t.on(a.Node, all, a.Name); len(local) == 1 {
		return choice{local[0], ChosenLocal, ""}, nil
	}
	for _, p := range all {
		if slices.Contains(t.Assignments[p].Default, q.Kind) {
			return choice{p, ChosenDefault, ""}, nil
		}
	}
	if seat := t.deliverer(q.Kind, ""); seat != "" {
		holder := t.Seats[seat].Holder
		if want := t.Seats[seat].Want; want != "" {
			holder = want
		}
		if slices.Contains(all, holder) {
			return choice{holder, ChosenSeat, ""}, nil
		}
	}
	if len(all) == 0 {
		return choice{}, reject("none", "", fmt.Sprintf("requirement %s of %s needs a %s, and nothing in the mesh provides one", req, a.Name, q.Kind), "push a module that provides it and its assignment first, or name the provider and push with --pending")
	}
	where := "none of them is on its own node " + t.NodeName(a.Node)
	if n := len(t.on(a.Node, all, a.Name)); n > 1 {
		where = fmt.Sprintf("%d of them are on its own node %s", n, t.NodeName(a.Node))
	}
	text := fmt.Sprintf("requirement %s of %s does not say which %s it means: %s, and none is the default", req, a.Name, q.Kind, where)
	return choice{}, t.candidates(reject("ambiguous", "", text, ""), req, all)
}

// chooseOn resolves a requirement that names a node.
func (t *tx) chooseOn(a Assignment, req string, q Requirement, all []string) (choice, *Rejection) {
	n, ok := t.NodeNamed(q.Node)
	if !ok {
		r := reject("no-node", "", fmt.Sprintf("requirement %s of %s names node %s, and there is no such node", req, a.Name, clip(q.Node)), "meshd node ls lists them; --pending waits for it")
		r.Candidates = nearest(q.Node, t.nodeNames())
		return choice{}, r
	}
	there := t.on(n.ID, all, a.Name)
	switch len(there) {
	case 1:
		return choice{there[0], ChosenNode, "node " + q.Node}, nil
	case 0:
		text := fmt.Sprintf("requirement %s of %s names node %s, and no provider of %s is there", req, a.Name, q.Node, q.Kind)
		return choice{}, t.candidates(reject("no-provider", "", text, "push its provider first, or push with --pending to wait for it"), req, all)
	}
	text := fmt.Sprintf("requirement %s of %s names node %s, and %d providers of %s are there", req, a.Name, q.Node, len(there), q.Kind)
	return choice{}, t.candidates(reject("ambiguous", "", text, ""), req, there)
}

// candidates adds to r those that could be meant and the line that names one.
func (t *tx) candidates(r *Rejection, req string, names []string) *Rejection {
	if len(names) == 0 {
		return r
	}
	var places []string
	for _, n := range names {
		r.Candidates = append(r.Candidates, n)
		places = append(places, n+" on "+t.NodeName(t.Assignments[n].Node))
	}
	line := fmt.Sprintf("write bind: {%s: %s} in the assignment, or provider: %s in the requirement", req, names[0], names[0])
	r.Remedy = strings.Join(append([]string{"candidates: " + strings.Join(places, ", "), line}, nonEmpty(r.Remedy)...), "; ")
	return r
}

func nonEmpty(s string) []string {
	if s == "" {
		return nil
	}
	return []string{s}
}

// on keeps the providers that are on the node, without the consumer itself.
func (s *State) on(node string, providers []string, consumer string) []string {
	var out []string
	for _, p := range providers {
		if s.Assignments[p].Node == node && p != consumer {
			out = append(out, p)
		}
	}
	return out
}
