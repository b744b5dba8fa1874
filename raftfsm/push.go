package raftfsm

import (
	"bytes"
	"encoding/json"
	"fmt"
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
	case c.Push == "":
		return reject("bad-part", "", "a part of a push has the id of its push, and this one has none", "push again")
	case c.Seq != len(parts):
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
		return reject("stale-plan", "", fmt.Sprintf("the plan was made at index %d, and the mesh was changed at %d", c.At, t.Mesh.Changed), "run meshd plan again, and push what it shows")
	}
	docs := c.Documents
	if c.ID != "" || c.Parts != 0 {
		parts := t.Parts[c.ID]
		if len(parts) != c.Parts {
			return reject("bad-part", "", fmt.Sprintf("push %q has %d parts, of which %d came", clip(c.ID), c.Parts, len(parts)), "push again")
		}
		drop(t, t.Parts, c.ID)
		for _, p := range parts {
			docs.Modules = slices.Concat(docs.Modules, p.Modules)
			docs.Assigns = slices.Concat(docs.Assigns, p.Assigns)
			docs.Seats = slices.Concat(docs.Seats, p.Seats)
		}
	}
	switch n := len(docs.Modules) + len(docs.Assigns) + len(docs.Seats); {
	case n == 0:
		return reject("empty-push", "", "the push has no document", "push a file with a module, assign or seat document")
	case n > MaxDocuments:
		return reject("too-big", "", fmt.Sprintf("a push has at most %d documents, this one has %d", MaxDocuments, n), "push fewer documents at a time")
	}
	t.pushed, t.pending = true, c.Pending
	t.Mesh.Changed = t.Index
	for _, step := range []func(Documents) *Rejection{t.pushModules, t.pushSeats, t.pushAssigns} {
		if r := step(docs); r != nil {
			return r
		}
	}
	if r := t.checkDefaults(); r != nil {
		return r
	}
	if r := t.resolve(); r != nil {
		return r
	}
	return t.checkHolders(docs)
}

// same compares by bytes, so that a node that got a value from a snapshot and
// one that got it from the log never differ over nil and empty.
func same[V any](a, b V) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

func (t *tx) pushModules(docs Documents) *Rejection {
	seen := map[string]bool{}
	for _, m := range docs.Modules {
		if r := checkModule(m); r != nil {
			return r
		}
		if seen[m.Name] {
			return reject("twice", "module/"+m.Name, fmt.Sprintf("module %s is described twice in one push", m.Name), "keep one of the two documents")
		}
		seen[m.Name] = true
		old, was := t.Modules[m.Name]
		switch {
		case !was:
			put(t, t.Modules, m.Name, m)
			t.event("module %s pushed", m.Name)
		case !same(old, m):
			if r := t.changeModule(old, m); r != nil {
				return r
			}
		}
	}
	return nil
}

func (t *tx) changeModule(old, m Module) *Rejection {
	if r := t.keepsPromises(old, m); r != nil {
		return r
	}
	put(t, t.Modules, m.Name, m)
	t.event("module %s changed", m.Name)
	for _, name := range t.assignmentsOf(m.Name) {
		a := t.Assignments[name]
		t.touched[name] = ""
		if !same(old.with(a).launch(), m.with(a).launch()) {
			a.Revision = t.Index
			put(t, t.Assignments, name, a)
		}
		for _, req := range sorted(old.Requires) {
			if !has(m.Requires, req) && has(t.Bindings, BindingID(name, req)) {
				t.unbind(BindingID(name, req), "no longer required")
			}
		}
		for kind := range old.Provides {
			if !has(m.Provides, kind) {
				drop(t, t.Providers, ProviderID(name, kind))
			}
		}
		for _, seat := range sorted(t.Seats) {
			if s := t.Seats[seat]; s.Holder == name && !slices.Contains(m.Claims, seat) {
				t.name(s, "")
			}
		}
	}
	return nil
}

// keepsPromises refuses a new version of a module that no longer provides what
// a consumer is bound to, or what logins are yet to be withdrawn from.
func (t *tx) keepsPromises(old, m Module) *Rejection {
	var bound, leaving []string
	for kind := range old.Provides {
		if _, still := m.Provides[kind]; still {
			continue
		}
		for id, b := range t.Bindings {
			if b.Kind == kind && b.Provider != "" && t.Assignments[b.Provider].Module == m.Name {
				bound = append(bound, id)
			}
		}
		for _, w := range t.Withdrawals {
			if w.Kind == kind && t.Assignments[w.Provider].Module == m.Name {
				leaving = append(leaving, w.Binding)
			}
		}
	}
	slices.Sort(bound)
	slices.Sort(leaving)
	path := "module/" + m.Name + "/provides"
	switch {
	case len(bound) > 0:
		return reject("still-consumed", path, fmt.Sprintf("module %s no longer provides what %s is bound to", m.Name, few(bound)), "keep the provision, or remove those consumers or bind them to another provider first")
	case len(leaving) > 0:
		return reject("still-withdrawing", path, fmt.Sprintf("module %s no longer provides what logins of %s are still to be ended at", m.Name, few(slices.Compact(leaving))), "keep the provision until they are gone: they go by themselves once the service answers")
	}
	return nil
}

func (t *tx) pushSeats(docs Documents) *Rejection {
	seen := map[string]bool{}
	for _, n := range docs.Seats {
		if r := t.checkSeat(n); r != nil {
			return r
		}
		if seen[n.Name] {
			return reject("twice", "seat/"+n.Name, fmt.Sprintf("seat %s is described twice in one push", n.Name), "keep one of the two documents")
		}
		seen[n.Name] = true
		old, was := t.Seats[n.Name]
		next := old
		next.Name, next.Scope, next.Delivers, next.Verbs, next.Idempotent, next.Want, next.Failover = n.Name, n.Scope, n.Delivers, n.Verbs, n.Idempotent, n.Want, n.Failover
		if was && same(old, next) {
			continue
		}
		if !was {
			next.Since = t.h.Time
		}
		put(t, t.Seats, n.Name, next)
		t.event("seat %s pushed", n.Name)
		if next.Scope != ScopeMesh && next.Holder != "" {
			t.name(next, "")
		}
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
func (t *tx) checkHolders(docs Documents) *Rejection {
	for _, n := range docs.Seats {
		if n.Want == "" || t.claims(n.Want, n.Name) {
			continue
		}
		path := "seat/" + n.Name + "/holder"
		if a, exists := t.Assignments[n.Want]; exists {
			return reject("not-a-claimant", path, fmt.Sprintf("%s cannot hold seat %s: its module %s does not claim it", n.Want, n.Name, a.Module), fmt.Sprintf("add claims: [%s] to module %s", n.Name, a.Module))
		}
		if t.pending {
			continue
		}
		r := reject("no-assignment", path, fmt.Sprintf("seat %s names %q as its holder, and there is no such assignment", n.Name, clip(n.Want)), "push its assignment, or push with --pending to wait for it")
		r.Candidates = nearest(n.Want, t.Claimants(n.Name))
		if len(r.Candidates) > 0 {
			r.Remedy = and("write holder: "+r.Candidates[0], r.Remedy)
		}
		return r
	}
	return nil
}

func (t *tx) pushAssigns(docs Documents) *Rejection {
	seen := map[string]string{} // assignment, or module of a rule -> place
	for i, a := range docs.Assigns {
		path := fmt.Sprintf("assign/%d", i)
		m, ok := t.Modules[a.Module]
		if !ok {
			r := reject("no-module", path, fmt.Sprintf("module %q is assigned, and no such module is known", clip(a.Module)), "push its module document as well")
			r.Candidates = nearest(a.Module, sorted(t.Modules))
			if len(r.Candidates) > 0 {
				r.Remedy = and("write assign: "+r.Candidates[0], r.Remedy)
			}
			return r
		}
		if r := t.checkAssign(a, m, path); r != nil {
			return r
		}
		nodes, r := t.nodesOf(a, path)
		if r != nil {
			return r
		}
		if a.All {
			put(t, t.Everywhere, a.Module, a)
		}
		for _, id := range nodes {
			next := t.assignment(a, id, a.All)
			key := next.Name
			where := t.NodeName(id)
			if a.All {
				key, where = a.Module+"/all", "all nodes" // a written assignment may override it in the same push
			}
			if first, again := seen[key]; again && first != path {
				return reject("twice", path, fmt.Sprintf("%s is assigned to %s twice in one push", a.Module, where), "keep one of the two documents, or give each a name with as:")
			}
			seen[key] = path
			if r := t.assign(next, path); r != nil {
				return r
			}
		}
	}
	return nil
}

// nodesOf are the ids of the nodes that the document names.
func (t *tx) nodesOf(a Assign, path string) ([]string, *Rejection) {
	if a.All {
		return sorted(t.Nodes), nil
	}
	var ids []string
	for j, name := range a.Nodes {
		n, ok := t.NodeNamed(name)
		if !ok {
			r := reject("no-node", fmt.Sprintf("%s/nodes/%d", path, j), fmt.Sprintf("%s is assigned to node %q, and there is no such node", a.Module, clip(name)), "meshd node ls lists them; add one with meshd token and meshd join")
			r.Candidates = nearest(name, t.nodeNames())
			if len(r.Candidates) > 0 {
				r.Remedy = and("the nearest is "+r.Candidates[0], r.Remedy)
			}
			return nil, r
		}
		ids = append(ids, n.ID)
	}
	return ids, nil
}

func (s *State) nodeNames() []string {
	var out []string
	for _, n := range s.Nodes {
		out = append(out, n.Name)
	}
	slices.Sort(out)
	return out
}

// assignment is what the document says of one node. Rule marks it as one of
// `nodes: all`.
func (t *tx) assignment(a Assign, node string, rule bool) Assignment {
	name := a.As
	if name == "" {
		name = a.Module + "@" + t.Nodes[node].Name
	}
	return Assignment{
		Name: name, Module: a.Module, Node: node, Named: a.As != "", Rule: rule, Bind: a.Bind, Default: a.Default,
		Exclusive: a.Exclusive, Address: a.Address, Env: a.Env, Health: a.Health, Limits: a.Limits,
	}
}

// assign makes or changes an assignment that a push asks for.
func (t *tx) assign(next Assignment, path string) *Rejection {
	if old, was := t.Assignments[next.Name]; was {
		if old.Module != next.Module {
			return reject("name-taken", path+"/as", fmt.Sprintf("%s is the name of an assignment of module %s already", old.Name, old.Module), "choose another name, or remove that one first: meshd rm assignment "+old.Name)
		}
		if next.Rule && !old.Rule {
			return nil // a written assignment overrides the rule on its node
		}
		if kinds := sorted(t.Modules[old.Module].Provides); old.Node != next.Node && len(kinds) > 0 {
			return reject("provider-moved", path, fmt.Sprintf("%s provides %s on %s, and a push does not move a provider: its data would stay behind", old.Name, few(kinds), t.NodeName(old.Node)),
				"write node: "+t.NodeName(old.Node)+", or give the one on "+t.NodeName(next.Node)+" a name of its own with as:")
		}
	}
	t.place(next, path)
	return nil
}

// place makes or changes an assignment.
func (t *tx) place(next Assignment, path string) {
	m := t.Modules[next.Module]
	old, was := t.Assignments[next.Name]
	next.Revision, next.Report = old.Revision, old.Report
	switch {
	case !was:
		next.Revision = t.Index
		t.event("%s assigned to %s", next.Name, t.NodeName(next.Node))
	case same(old, next):
		return
	case old.Node != next.Node:
		next.Revision, next.Report = t.Index, Report{}
		t.mintAnew(next.Name)
		t.vacate(next.Name)
		t.event("%s moved from %s to %s", next.Name, t.NodeName(old.Node), t.NodeName(next.Node))
	case !same(m.with(old).launch(), m.with(next).launch()):
		next.Revision = t.Index
		t.event("%s changed", next.Name)
	default:
		t.event("%s changed", next.Name)
	}
	t.touched[next.Name] = path
	put(t, t.Assignments, next.Name, next)
}

// checkDefaults refuses a second default of a kind, and a second provider of an
// exclusive one. It looks at all assignments: a module's new version may provide
// more, or less, than the one before.
func (t *tx) checkDefaults() *Rejection {
	var before, now []string // those that the push does not touch are the first
	for name, a := range t.Assignments {
		if _, touched := t.touched[name]; touched && len(a.Default) > 0 {
			now = append(now, name)
		} else if len(a.Default) > 0 {
			before = append(before, name)
		}
	}
	slices.Sort(before)
	slices.Sort(now)
	first := map[string]string{}
	for _, name := range slices.Concat(before, now) {
		a := t.Assignments[name]
		for _, kind := range a.Default {
			path := t.touched[name]
			if path != "" {
				path += "/default"
			}
			if !t.provides(name, kind) {
				return reject("bad-default", path, fmt.Sprintf("%s cannot be the default of %s: its module %s does not provide it", name, kind, a.Module), "leave "+kind+" out of default")
			}
			if other, taken := first[kind]; taken {
				return reject("second-default", path, fmt.Sprintf("%s is the default of %s already, and a mesh has one: %s cannot be another", other, kind, name), "leave default out of one of the two")
			}
			if seat := t.deliverer(kind, ""); seat != "" {
				return reject("second-default", path, fmt.Sprintf("seat %s delivers %s, so its holder is the default, and %s declares another", seat, kind, name), "leave default out of "+name+", or delivers out of the seat")
			}
			first[kind] = name
			if r := t.checkExclusive(a, kind, path); r != nil {
				return r
			}
		}
	}
	return nil
}

func (t *tx) checkExclusive(a Assignment, kind, path string) *Rejection {
	if !a.Exclusive {
		return nil
	}
	for _, module := range sorted(t.Everywhere) {
		if _, provides := t.Modules[module].Provides[kind]; provides {
			return reject("exclusive", path, fmt.Sprintf("%s is the exclusive provider of %s, and module %s, which provides it too, is assigned to all nodes", a.Name, kind, module), "leave exclusive out of "+a.Name+", or assign "+module+" to nodes by name")
		}
	}
	if all := t.providersOf(kind); len(all) > 1 {
		return reject("exclusive", path, fmt.Sprintf("%s is the exclusive provider of %s, and there would be %s", a.Name, kind, strings.Join(all, ", ")), "leave exclusive out of "+a.Name+", or the others out of the push")
	}
	return nil
}
