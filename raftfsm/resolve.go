package raftfsm

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// resolution is the part of a transaction that binds requirements.
type resolution struct {
	pushed  bool // somebody asked, and can be refused; otherwise what does not resolve stays unbound
	pending bool // the push accepts named providers and nodes that are not there yet

	touched   map[string]string   // assignments to resolve, and the place of each in the push
	providers map[string][]string // what ProvidersOf said, by kind
}

// ProvidersOf lists the assignments that provide the kind, in order.
func (s *State) ProvidersOf(kind string) []string {
	modules := map[string]bool{} // few of them, so this is quicker than to ask each assignment
	for name, m := range s.Modules {
		if has(m.Provides, kind) {
			modules[name] = true
		}
	}
	var out []string
	for name, a := range s.Assignments {
		if modules[a.Module] {
			out = append(out, name)
		}
	}
	slices.Sort(out)
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

// providersOf is ProvidersOf, looked up once per transaction: it is asked when
// the assignments are settled.
func (t *tx) providersOf(kind string) []string {
	if t.providers == nil {
		t.providers = map[string][]string{}
	}
	all, known := t.providers[kind]
	if !known {
		all = t.ProvidersOf(kind)
		t.providers[kind] = all
	}
	return all
}

// resolve binds the requirements of the touched assignments, and tries the
// unbound ones of all others again. A binding that is bound stays as it is,
// unless its module or its assignment now names another provider.
func (t *tx) resolve() *Rejection {
	for _, b := range t.Bindings {
		if _, touched := t.touched[b.Consumer]; !touched && b.Provider == "" {
			t.touched[b.Consumer] = ""
		}
	}
	for _, name := range sorted(t.touched) {
		a := t.Assignments[name]
		m := t.Modules[a.Module]
		for _, req := range sorted(m.Requires) {
			if r := t.bind(a, req, m.Requires[req]); r != nil {
				r.Path = "module/" + m.Name + "/requires/" + req
				if a.Bind[req] != "" {
					r.Path = cmp.Or(t.touched[name], "assignment/"+name) + "/bind/" + req
				}
				return r
			}
		}
	}
	return nil
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
func (t *tx) bind(a Assignment, req string, q Requirement) *Rejection {
	next := Binding{Consumer: a.Name, Requirement: req, Kind: q.Kind, Naming: naming(a, req, q), Proof: cmp.Or(q.Proof, ProofLogin)}
	id := next.ID()
	old, was := t.Bindings[id]
	was = was && old.Kind == next.Kind
	if was && old.Provider != "" && (next.Naming == old.Naming || next.Naming == "") {
		if old.Proof != next.Proof {
			old.Proof = next.Proof
			t.update(old)
		}
		return nil
	}
	var r *Rejection
	next.Provider, next.Chosen, r = t.choose(a, req, q)
	if r != nil {
		accepted := was && old.Provider == "" && old.Naming == next.Naming
		if !t.mayStayUnbound(a, next.Naming, r.Code, accepted) {
			return r
		}
		next.Provider, next.Chosen = "", ""
		if absent(r.Code) {
			r.Remedy = "it is bound as soon as that is there"
		}
		next.Refusal = r.Error()
	}
	if was && old.Provider == next.Provider {
		if old.Naming != next.Naming || old.Chosen != next.Chosen || old.Refusal != next.Refusal || old.Proof != next.Proof {
			old.Naming, old.Chosen, old.Refusal, old.Proof = next.Naming, next.Chosen, next.Refusal, next.Proof
			t.update(old)
		}
		return nil
	}
	if has(t.Bindings, id) {
		t.unbind(id, "its requirement names another")
	}
	if next.Provider == "" {
		t.event("%s is unbound: %s", id, r.Text)
	} else {
		next.Resource = t.resource(a, req, q.Kind, next.Provider)
		t.event("%s is bound to %s (%s)", id, next.Provider, next.Chosen)
	}
	t.update(next)
	return nil
}

// mayStayUnbound says when a requirement that does not resolve is left unbound
// rather than refused. Accepted is one that was left so before.
func (t *tx) mayStayUnbound(a Assignment, naming, code string, accepted bool) bool {
	switch {
	case !t.pushed:
		return true // a node joins or leaves, a seat gets its holder: nobody to refuse
	case naming == "":
		return a.Rule // on another node of `nodes: all` it may resolve
	case code == "self":
		return a.Rule
	}
	return accepted || t.pending && absent(code)
}

// absent reports whether a rejection's code means that what was named is not
// there yet.
func absent(code string) bool { return code == "no-provider" || code == "no-node" }

// resource makes the record of what a binding's logins work on, or finds the
// one that an earlier binding left.
func (t *tx) resource(a Assignment, req, kind, provider string) string {
	owner := a.owner()
	id := ResourceID(provider, kind, owner, req)
	if _, ok := t.Resources[id]; !ok {
		put(t, t.Resources, id, Resource{
			Provider: provider, Kind: kind, Owner: owner, Requirement: req,
			Name: resourceName(t.Mesh.ID, provider, kind, owner, req), Since: t.h.Time,
		})
	}
	return id
}

// choose applies the rules in their order: the assignment's word, the
// requirement's, its node, the consumer's own node, the declared default, the
// seat.
func (t *tx) choose(a Assignment, req string, q Requirement) (provider, chosen string, r *Rejection) {
	all := t.providersOf(q.Kind)
	switch {
	case a.Bind[req] != "":
		provider, chosen = a.Bind[req], ChosenOverride
		r = t.checkNamed(a, req, q.Kind, provider, all)
	case q.Provider != "":
		provider, chosen = q.Provider, ChosenProvider
		r = t.checkNamed(a, req, q.Kind, provider, all)
	case q.Node != "":
		chosen = ChosenNode
		provider, r = t.chooseOn(a, req, q, all)
	default:
		provider, chosen, r = t.chooseUnnamed(a, req, q.Kind, all)
	}
	if r == nil && provider == a.Name {
		r = reject("self", "", fmt.Sprintf("requirement %s of %s would be bound to %s itself, and nothing is its own provider", req, a.Name, a.Name), "")
		t.offer(r, req, slices.DeleteFunc(slices.Clone(all), func(p string) bool { return p == a.Name }))
		r.Remedy = cmp.Or(r.Remedy, "push another provider of "+q.Kind+" and name it")
	}
	return provider, chosen, r
}

// checkNamed refuses a provider that is not there or is of another kind.
func (t *tx) checkNamed(a Assignment, req, kind, name string, all []string) *Rejection {
	if slices.Contains(all, name) {
		return nil
	}
	if other, exists := t.Assignments[name]; exists {
		text := fmt.Sprintf("requirement %s of %s needs a %s, and %s provides %s", req, a.Name, kind, name, cmp.Or(few(sorted(t.Modules[other.Module].Provides)), "nothing"))
		r := reject("wrong-kind", "", text, "")
		t.offer(r, req, all)
		r.Remedy = cmp.Or(r.Remedy, fmt.Sprintf("name a provider of %s; nothing in the mesh is one yet", kind))
		return r
	}
	r := reject("no-provider", "", fmt.Sprintf("requirement %s of %s names %q, and there is no provider of %s of that name", req, a.Name, clip(name), kind), "")
	t.offer(r, req, nearest(name, all))
	r.Remedy = and(r.Remedy, "push its assignment, or push with --pending to wait for it")
	return r
}

// chooseOn takes the one provider on the node that a requirement names.
func (t *tx) chooseOn(a Assignment, req string, q Requirement, all []string) (string, *Rejection) {
	n, ok := t.NodeNamed(q.Node)
	if !ok {
		r := reject("no-node", "", fmt.Sprintf("requirement %s of %s names node %q, and there is no such node", req, a.Name, clip(q.Node)), "meshd node ls lists them; push with --pending to wait for it")
		r.Candidates = nearest(q.Node, t.nodeNames())
		if len(r.Candidates) > 0 {
			r.Remedy = and("the nearest is "+r.Candidates[0], r.Remedy)
		}
		return "", r
	}
	there := t.on(n.ID, all, a.Name)
	if len(there) == 1 {
		return there[0], nil
	}
	if len(there) == 0 {
		r := reject("no-provider", "", fmt.Sprintf("requirement %s of %s names node %s, and no provider of %s is there", req, a.Name, q.Node, q.Kind), "")
		t.offer(r, req, all)
		r.Remedy = and(r.Remedy, "push one to that node, or push with --pending to wait for it")
		return "", r
	}
	r := reject("ambiguous", "", fmt.Sprintf("requirement %s of %s names node %s, and %d providers of %s are there", req, a.Name, q.Node, len(there), q.Kind), "")
	t.offer(r, req, there)
	return "", r
}

// chooseUnnamed applies the default rule. A single provider elsewhere is not
// taken: it would be by accident.
func (t *tx) chooseUnnamed(a Assignment, req, kind string, all []string) (provider, chosen string, r *Rejection) {
	local := t.on(a.Node, all, a.Name)
	if len(local) == 1 {
		return local[0], ChosenLocal, nil
	}
	for _, p := range all {
		if slices.Contains(t.Assignments[p].Default, kind) {
			return p, ChosenDefault, nil
		}
	}
	seat := t.Seats[t.deliverer(kind, "")]
	if holder := cmp.Or(seat.Want, seat.Holder); slices.Contains(all, holder) {
		return holder, ChosenSeat, nil
	}
	if len(all) == 0 {
		return "", "", reject("none", "", fmt.Sprintf("requirement %s of %s needs a %s, and nothing in the mesh provides one", req, a.Name, kind), "push a module that provides it and an assignment of that, or name the provider to be and push with --pending")
	}
	where := fmt.Sprintf("none is on its own node %s", t.NodeName(a.Node))
	if len(local) > 1 {
		where = fmt.Sprintf("%d are on its own node %s", len(local), t.NodeName(a.Node))
	}
	r = reject("ambiguous", "", fmt.Sprintf("requirement %s of %s does not say which %s it means: %s, and none is the default", req, a.Name, kind, where), "")
	t.offer(r, req, all)
	if seat.Name != "" {
		r.Remedy += fmt.Sprintf("; or write holder: in seat %s, which delivers %s and has no holder yet", seat.Name, kind)
	}
	return "", "", r
}

// offer adds to r the providers that could be meant, and the line that names
// the first.
func (t *tx) offer(r *Rejection, req string, names []string) {
	if len(names) == 0 {
		return
	}
	var places []string
	for _, n := range names {
		places = append(places, n+" on "+t.NodeName(t.Assignments[n].Node))
	}
	r.Candidates = names
	r.Remedy = fmt.Sprintf("candidates: %s; write bind: {%s: %s} in the assignment, or provider: %s in the requirement", few(places), req, names[0], names[0])
}

// and joins two ways out, either of which may be empty.
func and(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return strings.Join([]string{a, b}, "; ")
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
