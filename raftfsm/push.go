package raftfsm

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Bounds of one push and of the pushes that wait for their commit.
const (
	MaxDocuments  = 1000 // in one push, all parts together
	maxOpenPushes = 8    // the one with the least id makes room
	maxParts      = 64   // of one push: 4 MiB
)

func (t *tx) pushPart(c PushPart) *Rejection {
	parts := t.Parts[c.Push]
	switch {
	case c.Push == "" || c.Seq != len(parts):
		return reject("bad-part", "", fmt.Sprintf("part %d of push %q came where part %d belongs", c.Seq, clip(c.Push), len(parts)), "push again")
	case c.Seq >= maxParts:
		return reject("too-big", "", fmt.Sprintf("a push has at most %d parts of %d KiB", maxParts, MaxEntry>>10), "push fewer documents at a time")
	case parts == nil && len(t.Parts) >= maxOpenPushes:
		drop(t, t.Parts, sorted(t.Parts)[0])
	}
	put(t, t.Parts, c.Push, append(slices.Clone(parts), c.Part))
	return nil
}

func (t *tx) push(c Push) *Rejection {
	if c.At != 0 && c.At < t.Mesh.Changed {
		return reject("stale-plan", "", fmt.Sprintf("the plan was made at index %d and the mesh was changed at %d", c.At, t.Mesh.Changed), "run meshd plan again")
	}
	docs := c.Documents
	if c.ID != "" {
		parts := t.Parts[c.ID]
		if len(parts) != c.Parts {
			return reject("bad-part", "", fmt.Sprintf("push %q has %d parts of %d", clip(c.ID), len(parts), c.Parts), "push again")
		}
		drop(t, t.Parts, c.ID)
		for _, p := range parts {
			docs.Modules = append(docs.Modules, p.Modules...)
			docs.Assigns = append(docs.Assigns, p.Assigns...)
			docs.Seats = append(docs.Seats, p.Seats...)
		}
	}
	if n := len(docs.Modules) + len(docs.Assigns) + len(docs.Seats); n == 0 || n > MaxDocuments {
		return reject("bad-push", "", fmt.Sprintf("a push has 1 to %d documents, this one %d", MaxDocuments, n), "")
	}
	t.Mesh.Changed = t.Index
	for _, step := range []func(Documents) *Rejection{t.pushModules, t.pushSeats, t.pushAssigns} {
		if r := step(docs); r != nil {
			return r
		}
	}
	for i, a := range docs.Assigns {
		if r := t.checkDefaults(a, fmt.Sprintf("assign/%d", i)); r != nil {
			return r
		}
	}
	if r := t.resolveAll(c.Pending); r != nil {
		return r
	}
	return t.checkHolders(docs, c.Pending)
}

func (t *tx) pushModules(docs Documents) *Rejection {
	for _, m := range docs.Modules {
		if r := t.checkModule(m); r != nil {
			return r
		}
		old, was := t.Modules[m.Name]
		if was && reflect.DeepEqual(old, m) {
			continue
		}
		put(t, t.Modules, m.Name, m)
		if !was {
			t.event("module %s pushed", m.Name)
			continue
		}
		t.event("module %s changed", m.Name)
		for _, name := range sorted(t.Assignments) {
			if a := t.Assignments[name]; a.Module == m.Name {
				if r := t.keepsPromises(a, m); r != nil {
					return r
				}
				a.Revision = t.Index
				put(t, t.Assignments, name, a)
				t.dropUnclaimed(name)
			}
		}
	}
	return nil
}

// keepsPromises refuses a new version of a module that no longer provides what
// a consumer is bound to.
func (t *tx) keepsPromises(a Assignment, m Module) *Rejection {
	for _, id := range sorted(t.Bindings) {
		if b := t.Bindings[id]; b.Provider == a.Name {
			if _, still := m.Provides[b.Kind]; !still {
				return reject("still-consumed", "module/"+m.Name+"/provides",
					fmt.Sprintf("module %s no longer provides %s, and %s is bound to %s", m.Name, b.Kind, id, a.Name), "keep the provision, or remove or re-bind its consumers first")
			}
		}
	}
	return nil
}

// dropUnclaimed vacates the seats that the assignment holds and no longer claims.
func (t *tx) dropUnclaimed(assignment string) {
	for _, seat := range sorted(t.Seats) {
		if s := t.Seats[seat]; s.Holder == assignment && !t.claims(assignment, seat) {
			t.name(s, "")
		}
	}
}

func (t *tx) checkModule(m Module) *Rejection {
	path := "module/" + m.Name
	if r := CheckName("module", m.Name); r != nil {
		r.Path = path
		return r
	}
	for _, group := range []struct {
		sort, at string
		names    []string
	}{
		{"seat", "claims", m.Claims}, {"kind", "provides", sorted(m.Provides)}, {"requirement", "requires", sorted(m.Requires)},
		{"tool", "tools", sorted(m.Tools)}, {"seat", "serves", sorted(m.Serves)},
	} {
		for _, name := range group.names {
			if r := CheckName(group.sort, name); r != nil {
				r.Path = path + "/" + group.at + "/" + name
				return r
			}
		}
	}
	for _, name := range sorted(m.Requires) {
		q, at := m.Requires[name], path+"/requires/"+name
		if r := CheckName("kind", q.Kind); r != nil {
			r.Path = at + "/kind"
			return r
		}
		if q.Provider != "" && q.Node != "" {
			return reject("two-names", at, fmt.Sprintf("requirement %s of module %s names both a provider and a node", name, m.Name), "keep one of the two")
		}
		if q.Proof != "" && q.Proof != ProofLogin && q.Proof != ProofHealth && q.Proof != ProofDelivered {
			return reject("bad-proof", at+"/proof", fmt.Sprintf("%q is no proof of use", clip(q.Proof)), "write login, health or delivered")
		}
		if q.Proof == ProofHealth && m.Health == nil {
			return reject("bad-proof", at+"/proof", fmt.Sprintf("requirement %s is proven by health, and module %s has no health check", name, m.Name), "add health: to the module")
		}
	}
	for _, seat := range sorted(m.Serves) {
		if !slices.Contains(m.Claims, seat) {
			return reject("not-claimed", path+"/serves/"+seat, fmt.Sprintf("module %s serves verbs of seat %s and does not claim it", m.Name, seat), fmt.Sprintf("add claims: [%s]", seat))
		}
	}
	for i, call := range m.Calls {
		if _, ok := ParseTarget(call); !ok {
			return reject("bad-call", fmt.Sprintf("%s/calls/%d", path, i), fmt.Sprintf("%q is not something to call", clip(call)), "write SEAT.VERB, NODE/SEAT.VERB or NODE/MODULE.TOOL")
		}
	}
	return nil
}

func (t *tx) pushSeats(docs Documents) *Rejection {
	for _, n := range docs.Seats {
		path := "seat/" + n.Name
		for _, name := range append([]string{n.Name}, n.Verbs...) {
			if r := CheckName("seat or verb", name); r != nil {
				r.Path = path
				return r
			}
		}
		if n.Scope != ScopeMesh && n.Scope != ScopeNode {
			return reject("bad-scope", path+"/scope", fmt.Sprintf("%q is no scope", clip(n.Scope)), "write mesh or node")
		}
		if n.Scope == ScopeNode && n.Want != "" {
			return reject("no-holder", path+"/holder", fmt.Sprintf("seat %s has scope node: every node that runs a claimant serves it", n.Name), "leave holder out, or make it scope: mesh")
		}
		if other := t.deliverer(n.Delivers, n.Name); other != "" {
			return reject("second-deliverer", path+"/delivers", fmt.Sprintf("seat %s delivers %s already", other, n.Delivers), "a kind is delivered by one seat: leave delivers out of this one")
		}
		old, was := t.Seats[n.Name]
		next := old
		next.Name, next.Scope, next.Delivers, next.Verbs, next.Want, next.Failover = n.Name, n.Scope, n.Delivers, n.Verbs, n.Want, n.Failover
		if next.Scope != old.Scope {
			next.Holder = ""
		}
		if was && reflect.DeepEqual(old, next) {
			continue
		}
		if !was || next.Scope != old.Scope {
			next.Since = t.h.Time
		}
		put(t, t.Seats, n.Name, next)
		t.event("seat %s pushed", n.Name)
	}
	return nil
}

// deliverer is the mesh seat, other than the one named, that delivers the kind.
func (s *State) deliverer(kind, except string) string {
	for _, name := range sorted(s.Seats) {
		if seat := s.Seats[name]; kind != "" && name != except && seat.Delivers == kind && seat.Scope == ScopeMesh {
			return name
		}
	}
	return ""
}

// checkHolders refuses a holder that is not there or does not claim the seat.
func (t *tx) checkHolders(docs Documents, pending bool) *Rejection {
	for _, n := range docs.Seats {
		if n.Want == "" || t.claims(n.Want, n.Name) {
			continue
		}
		path := "seat/" + n.Name + "/holder"
		a, exists := t.Assignments[n.Want]
		if exists {
			return reject("not-a-claimant", path, fmt.Sprintf("%s cannot hold seat %s: its module %s does not claim it", n.Want, n.Name, a.Module), fmt.Sprintf("add claims: [%s] to module %s", n.Name, a.Module))
		}
		if !pending {
			r := reject("no-assignment", path, fmt.Sprintf("holder %s of seat %s is no assignment", clip(n.Want), n.Name), "name one of the claimants, or push with --pending")
			r.Candidates = nearest(n.Want, t.Claimants(n.Name))
			if len(r.Candidates) > 0 {
				r.Remedy = "write holder: " + r.Candidates[0] + ", or push with --pending"
			}
			return r
		}
	}
	return nil
}

func (t *tx) pushAssigns(docs Documents) *Rejection {
	for i, a := range docs.Assigns {
		path := fmt.Sprintf("assign/%d", i)
		if _, ok := t.Modules[a.Module]; !ok {
			r := reject("no-module", path, fmt.Sprintf("module %q is not known", clip(a.Module)), "push its module document as well")
			r.Candidates = nearest(a.Module, sorted(t.Modules))
			return r
		}
		if a.As != "" {
			if r := CheckName("assignment", a.As); r != nil {
				r.Path = path + "/as"
				return r
			}
		}
		if (a.As != "" && (len(a.Nodes) != 1 || a.All)) || (len(a.Nodes) == 0 && !a.All) {
			return reject("bad-assign", path, fmt.Sprintf("the assignment of %s needs a node, and `as:` needs exactly one", a.Module), "write node: NAME, nodes: [NAME, ...] or nodes: all")
		}
		if a.All {
			put(t, t.Everywhere, a.Module, a)
			for _, id := range sorted(t.Nodes) {
				if r := t.assign(a, id, true); r != nil {
					r.Path = path
					return r
				}
			}
			continue
		}
		for j, name := range a.Nodes {
			n, ok := t.NodeNamed(name)
			if !ok {
				r := reject("no-node", fmt.Sprintf("%s/nodes/%d", path, j), fmt.Sprintf("there is no node %q", clip(name)), "meshd node ls lists them")
				r.Candidates = nearest(name, t.nodeNames())
				return r
			}
			if r := t.assign(a, n.ID, false); r != nil {
				r.Path = path
				return r
			}
		}
	}
	return nil
}

func (s *State) nodeNames() []string {
	var out []string
	for _, id := range sorted(s.Nodes) {
		out = append(out, s.Nodes[id].Name)
	}
	slices.Sort(out)
	return out
}

// assign makes or changes the one assignment of rule a on that node.
func (t *tx) assign(a Assign, node string, rule bool) *Rejection {
	name := a.As
	if name == "" {
		name = a.Module + "@" + t.Nodes[node].Name
	}
	next := Assignment{
		Name: name, Module: a.Module, Node: node, Named: a.As != "", Rule: rule, Bind: a.Bind, Default: a.Default,
		Exclusive: a.Exclusive, Address: a.Address, Env: a.Env, Health: a.Health, Limits: a.Limits,
	}
	old, was := t.Assignments[name]
	if was {
		if old.Module != next.Module {
			return reject("name-taken", "", fmt.Sprintf("%s is an assignment of module %s already", name, old.Module), "choose another name, or remove it first: meshd rm assignment "+name)
		}
		if rule && !old.Rule {
			return nil // a written assignment overrides the rule on its node
		}
		if old.Node != node {
			if r := t.refuseMove(old, node); r != nil {
				return r
			}
		}
		next.Revision, next.Report = old.Revision, old.Report
		if reflect.DeepEqual(old, next) {
			return nil
		}
	}
	next.Revision = t.Index
	if was && old.Node != node {
		next.Report = Report{}
		t.mintAnew(name)
		t.event("%s moved from %s to %s", name, t.NodeName(old.Node), t.NodeName(node))
	} else if !was {
		t.event("%s assigned to %s", name, t.NodeName(node))
	}
	put(t, t.Assignments, name, next)
	return nil
}

// refuseMove refuses to move by a push what carries data or a role.
func (t *tx) refuseMove(a Assignment, to string) *Rejection {
	if len(t.Modules[a.Module].Provides) > 0 {
		return reject("provider-moved", "", fmt.Sprintf("%s provides %s from %s, and a push does not move a provider: its data would stay behind", a.Name, strings.Join(sorted(t.Modules[a.Module].Provides), ", "), t.NodeName(a.Node)),
			"write node: "+t.NodeName(a.Node)+", or give the one on "+t.NodeName(to)+" a name of its own")
	}
	return nil
}

// checkDefaults refuses a second default of a kind, and a second provider of an
// exclusive one.
func (t *tx) checkDefaults(pushed Assign, path string) *Rejection {
	for _, kind := range pushed.Default {
		if _, ok := t.Modules[pushed.Module].Provides[kind]; !ok {
			return reject("bad-default", path+"/default", fmt.Sprintf("module %s does not provide %s, so it cannot be its default", pushed.Module, kind), "leave default out")
		}
	}
	first := map[string]string{}
	for _, name := range sorted(t.Assignments) {
		for _, kind := range t.Assignments[name].Default {
			if other, taken := first[kind]; taken {
				return reject("second-default", path+"/default", fmt.Sprintf("%s and %s both are the default of %s, and a mesh has one", other, name, kind), "leave default out of one of the two")
			}
			first[kind] = name
		}
	}
	for _, kind := range sorted(first) {
		name := first[kind]
		if !t.Assignments[name].Exclusive {
			continue
		}
		if all := t.ProvidersOf(kind); len(all) > 1 {
			return reject("exclusive", path, fmt.Sprintf("%s is the exclusive provider of %s, and there would be %s", name, kind, strings.Join(all, ", ")), "leave exclusive out of "+name)
		}
	}
	return nil
}
