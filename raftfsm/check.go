package raftfsm

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

var envRule = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

// at puts the place into a rejection, if there is one.
func at(path string, r *Rejection) *Rejection {
	if r != nil && r.Path == "" {
		r.Path = path
	}
	return r
}

// checkModule refuses a module document that contradicts itself. It asks nothing
// of the state.
func checkModule(m Module) *Rejection {
	path := "module/" + m.Name
	if r := CheckName("module", m.Name); r != nil {
		return at("module", r)
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
				return at(path+"/"+group.at, r)
			}
		}
	}
	for _, name := range sorted(m.Requires) {
		if r := checkRequirement(m, name, m.Requires[name]); r != nil {
			return at(path+"/requires/"+name, r)
		}
	}
	if r := checkServed(m, path); r != nil {
		return r
	}
	for i, call := range m.Calls {
		if _, ok := ParseTarget(call); !ok {
			return reject("bad-call", fmt.Sprintf("%s/calls/%d", path, i), fmt.Sprintf("%q is not something to call", clip(call)), "write SEAT.VERB, NODE/SEAT.VERB or NODE/MODULE.TOOL")
		}
	}
	if m.OnRotate != "" && m.OnRotate != "restart" && m.OnRotate != "none" && !strings.HasPrefix(m.OnRotate, "signal ") {
		return reject("bad-on-rotate", path+"/on-rotate", fmt.Sprintf("%q is nothing to do when a credential changes", clip(m.OnRotate)), "write restart, signal HUP or none")
	}
	if m.ReadyWithin < 0 || m.StopGrace < 0 {
		return reject("bad-time", path, fmt.Sprintf("module %s has a time below zero", m.Name), "write a duration such as 30s")
	}
	return checkRuntime("module "+m.Name, path, m.Env, m.Health, m.Limits)
}

func checkRequirement(m Module, name string, q Requirement) *Rejection {
	if r := CheckName("kind", q.Kind); r != nil {
		return r
	}
	switch q.Proof {
	case "", ProofLogin, ProofHealth, ProofDelivered:
	default:
		return reject("bad-proof", "", fmt.Sprintf("%q is no proof that requirement %s is in use", clip(q.Proof), name), "write proof: login, health or delivered")
	}
	switch {
	case q.Provider != "" && q.Node != "":
		return reject("two-names", "", fmt.Sprintf("requirement %s of module %s names both a provider and a node, and either is enough", name, m.Name), "keep one of the two")
	case q.Provider != "" && !assignmentRule(q.Provider):
		return badAssignmentName(q.Provider)
	case q.Node != "":
		return CheckName("node", q.Node)
	case q.Proof == ProofHealth && m.Health == nil:
		return reject("bad-proof", "", fmt.Sprintf("requirement %s is proven by health, and module %s has no health check", name, m.Name), "add health: to the module, or write proof: login")
	}
	return nil
}

// checkServed refuses verbs of seats that the module does not claim, and
// handlers that say nothing or two things.
func checkServed(m Module, path string) *Rejection {
	for _, tool := range sorted(m.Tools) {
		if r := checkHandler("tool", tool, m.Tools[tool]); r != nil {
			return at(path+"/tools/"+tool, r)
		}
	}
	for _, seat := range sorted(m.Serves) {
		if !slices.Contains(m.Claims, seat) {
			return reject("not-claimed", path+"/serves/"+seat, fmt.Sprintf("module %s serves verbs of seat %s and does not claim it", m.Name, seat), fmt.Sprintf("add claims: [%s]", seat))
		}
		for _, verb := range sorted(m.Serves[seat]) {
			if r := checkHandler("verb", verb, m.Serves[seat][verb]); r != nil {
				return at(path+"/serves/"+seat+"/"+verb, r)
			}
		}
	}
	return nil
}

func checkHandler(sort, name string, h Handler) *Rejection {
	if r := CheckName(sort, name); r != nil {
		return r
	}
	if count(len(h.Exec) > 0, h.HTTP != "", h.Bus, h.Builtin != "") != 1 {
		return reject("bad-handler", "", fmt.Sprintf("%s %s is answered in exactly one way", sort, name), "write one of exec, http, bus and builtin")
	}
	return nil
}

// checkRuntime looks at what a module and an assignment say alike.
func checkRuntime(of, path string, env map[string]string, h *Health, l *Limits) *Rejection {
	for _, k := range sorted(env) {
		if !envRule.MatchString(k) {
			return reject("bad-env", path+"/env", fmt.Sprintf("%q cannot name an environment variable of %s", clip(k), of), "use A-Z, a-z, 0-9 and _, and no digit first")
		}
		if strings.ContainsRune(env[k], 0) {
			return reject("bad-env", path+"/env/"+k, fmt.Sprintf("environment variable %s of %s has a zero byte, which none can have", k, of), "leave it out")
		}
	}
	if h != nil {
		if count(h.HTTP != "", h.TCP != "", len(h.Exec) > 0) != 1 {
			return reject("bad-health", path+"/health", fmt.Sprintf("the health of %s is checked in exactly one way", of), "write one of http, tcp and exec")
		}
		if h.Every < 0 || h.Timeout < 0 || h.Grace < 0 || h.Fails < 0 {
			return reject("bad-health", path+"/health", fmt.Sprintf("the health check of %s has a number below zero", of), "write durations such as 5s, and how many failures in a row count")
		}
	}
	if l != nil && (l.Memory < 0 || l.CPU < 0 || l.PIDs < 0) {
		return reject("bad-limits", path+"/limits", fmt.Sprintf("%s has a limit below zero", of), "leave a limit out to have none")
	}
	return nil
}

func count(set ...bool) int {
	n := 0
	for _, s := range set {
		if s {
			n++
		}
	}
	return n
}

func (t *tx) checkSeat(n Seat) *Rejection {
	if r := CheckName("seat", n.Name); r != nil {
		return at("seat", r)
	}
	path := "seat/" + n.Name
	for _, verb := range n.Verbs {
		if r := CheckName("verb", verb); r != nil {
			return at(path+"/verbs", r)
		}
	}
	for _, verb := range n.Idempotent {
		if !slices.Contains(n.Verbs, verb) {
			r := reject("no-such-verb", path+"/idempotent", fmt.Sprintf("%q is to be idempotent, and seat %s has no such verb", clip(verb), n.Name), "add it to verbs, or leave it out of idempotent")
			r.Candidates = nearest(verb, n.Verbs)
			return r
		}
	}
	if n.Delivers != "" {
		if r := CheckName("kind", n.Delivers); r != nil {
			return at(path+"/delivers", r)
		}
	}
	switch n.Scope {
	case ScopeMesh:
	case ScopeNode:
		if len(n.Idempotent) > 0 {
			return reject("no-holder", path+"/idempotent", fmt.Sprintf("seat %s has scope node: a call asks one node, and is not made again elsewhere", n.Name), "leave idempotent out, or write scope: mesh")
		}
		if n.Want != "" || n.Failover != "" {
			return reject("no-holder", path, fmt.Sprintf("seat %s has scope node: every node that runs a claimant serves it, and there is no holder to name or to replace", n.Name), "leave holder and failover out, or write scope: mesh")
		}
		return nil
	default:
		return reject("bad-scope", path+"/scope", fmt.Sprintf("%q is no scope of a seat", clip(n.Scope)), "write scope: mesh or scope: node")
	}
	if n.Failover != "" && n.Failover != FailoverAuto && n.Failover != FailoverManual {
		return reject("bad-failover", path+"/failover", fmt.Sprintf("%q is no way to fail over", clip(n.Failover)), "write failover: auto or failover: manual")
	}
	if n.Want != "" && !assignmentRule(n.Want) {
		return at(path+"/holder", badAssignmentName(n.Want))
	}
	if other := t.deliverer(n.Delivers, n.Name); other != "" {
		return reject("second-deliverer", path+"/delivers", fmt.Sprintf("seat %s delivers %s already, and a kind is delivered by one seat", other, n.Delivers), "leave delivers out of one of the two")
	}
	return nil
}

func (t *tx) checkAssign(a Assign, m Module, path string) *Rejection {
	if a.As != "" {
		if r := CheckName("assignment", a.As); r != nil {
			return at(path+"/as", r)
		}
	}
	switch {
	case a.All && len(a.Nodes) > 0, !a.All && len(a.Nodes) == 0:
		return reject("bad-assign", path, fmt.Sprintf("the assignment of %s needs either nodes by name or all of them", a.Module), "write node: NAME, nodes: [NAME, ...] or nodes: all")
	case a.As != "" && len(a.Nodes) != 1:
		return reject("bad-assign", path+"/as", fmt.Sprintf("%s names one assignment, and this one of %s goes to several nodes", a.As, a.Module), "write one node, or leave as: out")
	case a.All && len(a.Default) > 0:
		return reject("bad-default", path+"/default", fmt.Sprintf("the assignment of %s to all nodes cannot be a default: a kind has one", a.Module), "assign it to that one node by name as well, and write default: there")
	case a.Exclusive && len(a.Default) == 0:
		return reject("bad-exclusive", path+"/exclusive", fmt.Sprintf("the assignment of %s is exclusive and not a default: a provider that is the mesh's alone is its default", a.Module), "add default: KIND, or leave exclusive out")
	}
	for _, req := range sorted(a.Bind) {
		if _, ok := m.Requires[req]; !ok {
			r := reject("no-requirement", path+"/bind/"+req, fmt.Sprintf("the assignment of %s binds %q, and the module has no such requirement", a.Module, clip(req)), "leave it out")
			if r.Candidates = nearest(req, sorted(m.Requires)); len(r.Candidates) > 0 {
				r.Remedy = "write one of its requirements: " + few(r.Candidates)
			}
			return r
		}
		if !assignmentRule(a.Bind[req]) {
			return at(path+"/bind/"+req, badAssignmentName(a.Bind[req]))
		}
	}
	return checkRuntime("the assignment of "+a.Module, path, a.Env, a.Health, a.Limits)
}
