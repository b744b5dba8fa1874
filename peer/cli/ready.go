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

// problems sorts everything that is not as it is to be: un-ready is what is lost,
// and what takes longer than it may; coming is what may still take its time. Both
// are empty when all is ready. It is a pure function of the overview.
//
// A node that is away stands for the providers and the processes there.
func problems(o api.Overview) (unready, coming []problem) {
	unready, coming = []problem{}, []problem{}
	add := func(p problem, over bool) {
		switch {
		case p.Text == "":
		case over:
			unready = append(unready, p)
		default:
			coming = append(coming, p)
		}
	}
	if !o.Quorum {
		add(problem{"mesh", o.State.Mesh.ID, "un-ready", why{Text: noQuorum(o)}}, true)
	}
	for _, n := range nodesByName(o) {
		add(nodeProblem(o, n.Name), true)
	}
	for _, name := range sorted(o.State.Assignments) {
		for _, kind := range sorted(o.State.Modules[o.State.Assignments[name].Module].Provides) {
			id := raftfsm.ProviderID(name, kind)
			status, looked := o.State.Providers[id]
			if p := providerProblem(o, id); up(o, p.Node) {
				add(p, looked && late(o, status.Since, raftfsm.DefaultReady))
			}
		}
	}
	for _, name := range sorted(o.State.Seats) {
		s := o.State.Seats[name]
		add(seatProblem(o, s), late(o, s.Since, raftfsm.DefaultReady) || !s.FailsOver() && s.Holder != "" && !up(o, home(o, s.Holder)))
	}
	for _, d := range o.State.Mesh.Differences {
		text := fmt.Sprintf("%s %s; meshd verify looks again", d.Node, d.Text)
		add(problem{"seat", d.Seat, "differs", why{Node: d.Node, Since: d.Since, Text: text}}, true)
	}
	for _, id := range sorted(o.State.Bindings) {
		b := o.State.Bindings[id]
		p, since := bindingProblem(o, b), b.Since
		if b.Phase() == raftfsm.PhaseInUse {
			since = p.Since // its condition went bad, which may be later
		}
		add(p, late(o, since, readyWithin(o, b.Consumer)))
	}
	for _, name := range sorted(o.State.Assignments) {
		if p := processProblem(o, name); up(o, p.Node) {
			add(p, !p.Since.IsZero() && late(o, p.Since, readyWithin(o, name)))
		}
	}
	for _, id := range sorted(o.State.Withdrawals) {
		add(withdrawalProblem(o, id), late(o, o.State.Withdrawals[id].Since, raftfsm.DefaultReady))
	}
	return unready, coming
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

// nodeProblem has a text unless the node answers.
func nodeProblem(o api.Overview, name string) problem {
	p := problem{"node", name, nodeState(o, name), why{Node: name}}
	switch p.State {
	case "away":
		p.Text = "it does not answer, and what is desired of it waits"
	case "silent":
		p.Text = "it is a voter that does not answer the others, although it seems to live"
	}
	return p
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

// seatProblem has a text unless somebody may answer the seat. One that does not fail
// over and has lost its holder's node is lost.
func seatProblem(o api.Overview, s raftfsm.Seat) problem {
	p := problem{"seat", s.Name, "dark", why{Since: s.Since}}
	if s.Scope == raftfsm.ScopeMesh {
		p.Text = o.State.Dark(s)
	}
	return p
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
