package cli

import (
	"fmt"
	"time"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// problem is one thing that is not as the mesh was asked to make it.
type problem struct {
	What  string `json:"what"` // mesh, node, seat, provider, binding, process or withdrawal
	Name  string `json:"name"`
	State string `json:"state"`
	why
}

// problems lists everything that is un-ready: what is lost at once, and what
// takes longer than it may. It is a pure function of the overview.
func problems(o api.Overview) []problem {
	out := []problem{}
	if !o.Quorum {
		out = append(out, problem{"mesh", o.State.Mesh.ID, "un-ready", why{Text: noQuorum(o)}})
	}
	for _, n := range nodesByName(o) {
		if !up(o, n.Name) {
			out = append(out, problem{"node", n.Name, "away", why{Node: n.Name, Text: "it does not answer, and what is desired of it waits"}})
		}
	}
	for _, id := range sorted(o.State.Providers) {
		out = append(out, lateProvider(o, id)...)
	}
	for _, name := range sorted(o.State.Seats) {
		if s := o.State.Seats[name]; s.Scope == raftfsm.ScopeMesh && s.Holder == "" && late(o, s.Since, raftfsm.DefaultReady) {
			out = append(out, problem{"seat", name, "dark", why{Text: dark(o, s), Since: s.Since}})
		}
	}
	for _, id := range sorted(o.State.Bindings) {
		b := o.State.Bindings[id]
		p, since := bindingProblem(o, b), b.Since
		if b.Phase() == raftfsm.PhaseInUse {
			since = p.Since // its condition went bad, which may be later
		}
		if p.Text != "" && late(o, since, readyWithin(o, b.Consumer)) {
			out = append(out, p)
		}
	}
	for _, name := range sorted(o.State.Assignments) {
		p := processProblem(o, name)
		if p.Text != "" && !p.Since.IsZero() && late(o, p.Since, readyWithin(o, name)) {
			out = append(out, p)
		}
	}
	for _, id := range sorted(o.State.Withdrawals) {
		if w := o.State.Withdrawals[id]; late(o, w.Since, raftfsm.DefaultReady) {
			out = append(out, withdrawalProblem(o, id))
		}
	}
	return out
}

func late(o api.Overview, since time.Time, within time.Duration) bool {
	return o.Now.Sub(since) > within
}

// readyWithin is how long a consumer may take.
func readyWithin(o api.Overview, assignment string) time.Duration {
	if d := o.State.Modules[o.State.Assignments[assignment].Module].ReadyWithin; d > 0 {
		return d
	}
	return raftfsm.DefaultReady
}

func lateProvider(o api.Overview, id string) []problem {
	p := providerProblem(o, id)
	if p.Text == "" || !up(o, p.Node) || !late(o, o.State.Providers[id].Since, raftfsm.DefaultReady) {
		return nil
	}
	return []problem{p}
}

func providerProblem(o api.Overview, id string) problem {
	name, kind := cutProvider(id)
	return problem{"provider", id, "not ready", providerTrouble(o, name, kind, "its node %s is away")}
}

// bindingProblem has a text unless the binding is in use and in good condition.
func bindingProblem(o api.Overview, b raftfsm.Binding) problem {
	return problem{"binding", b.ID(), string(b.Phase()), explain(o, b)}
}

func withdrawalProblem(o api.Overview, id string) problem {
	w := o.State.Withdrawals[id]
	return problem{"withdrawal", w.Binding, "withdrawing", explainWithdrawal(o, w)}
}

// dark says why a mesh seat is answered by nobody.
func dark(o api.Overview, s raftfsm.Seat) string {
	claimants := o.State.Claimants(s.Name)
	switch {
	case len(claimants) == 0:
		return fmt.Sprintf("nothing claims it: add claims: [%s] to a module and assign that", s.Name)
	case !s.FailsOver() && s.Epoch != 0:
		return fmt.Sprintf("it has no holder, and does not fail over by itself; name one of %s with holder:", list(claimants))
	}
	return "no holder is named yet; " + list(claimants) + " could be"
}

// noQuorum says who is missing.
func noQuorum(o api.Overview) string {
	if len(o.Missing) == 0 {
		return "no leader is known"
	}
	if len(o.Missing) == 1 {
		return o.Missing[0] + " does not answer"
	}
	return list(o.Missing) + " do not answer"
}
