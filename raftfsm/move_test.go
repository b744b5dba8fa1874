package raftfsm

import (
	"fmt"
	"slices"
	"testing"
)

func TestASeatIsMovedToAClaimantThatCanAnswer(t *testing.T) {
	b, alpha, beta, epoch := lamps(t)
	b.ok("alpha", push(Seat{Name: "disk", Scope: ScopeNode, Verbs: []string{"usage"}}, Seat{Name: "idle", Scope: ScopeMesh}))
	b.join("delta")
	for _, c := range []struct {
		move           MoveSeat
		code, sentence string
		candidates     []string
	}{
		{MoveSeat{Seat: "lmap", Node: "beta"}, "no-seat", `there is no mesh seat "lmap"; meshd seats lists them`, []string{"lamp", "disk", "idle"}},
		{MoveSeat{Seat: "disk", Node: "beta"}, "node-seat", "seat disk is a node seat, which each node answers for itself, so it does not move; ask the node that is meant: NODE/disk.VERB", nil},
		{MoveSeat{Seat: "lamp", Node: "gama"}, "no-node", `there is no node "gama"; meshd node ls lists them`, []string{"gamma", "beta", "alpha", "delta"}},
		{MoveSeat{Seat: "lamp", Node: "delta"}, "not-a-claimant", "seat lamp cannot move to delta: nothing there claims it; add claims: [lamp] to a module and assign that to delta; or write meshd seat move lamp alpha", []string{"alpha", "beta", "gamma"}},
		{MoveSeat{Seat: "idle", Node: "beta"}, "not-a-claimant", "seat idle cannot move to beta: nothing there claims it; add claims: [idle] to a module and assign that to beta", nil},
		{MoveSeat{Seat: "lamp", Node: "alpha"}, "ambiguous", "seat lamp cannot move to alpha: lamp-a, lamp-z all claim it there, and one answers; write meshd seat move lamp alpha/lamp-a", []string{"alpha/lamp-a", "alpha/lamp-z"}},
		{MoveSeat{Seat: "lamp", Node: "alpha", Assignment: "lamp-b"}, "not-a-claimant", `seat lamp cannot move to "lamp-b" on alpha: no claimant there has that name; write meshd seat move lamp alpha/lamp-a`, []string{"alpha/lamp-a", "alpha/lamp-z"}},
		{MoveSeat{Seat: "lamp", Node: "gamma"}, "no-lease", "seat lamp cannot move to gamma now: node gamma has no lease, and could not answer it; start meshd there, and give the command again; or write meshd seat move lamp alpha", []string{"alpha", "beta"}},
	} {
		if r := b.refused("beta", c.move, c.code, c.sentence); !slices.Equal(r.Candidates, c.candidates) {
			t.Errorf("%+v: the candidates are %v, want %v", c.move, r.Candidates, c.candidates)
		}
	}

	plan, _ := b.Preview(Header{Node: id("beta")}, MoveSeat{Seat: "lamp", Node: "beta"})
	if len(plan.Changes) != 1 || plan.Changes[0].Text != "seat lamp moves from lamp-a to lamp-b" || fmt.Sprint(plan.Nodes) != "[alpha beta]" {
		t.Errorf("the plan is %+v", plan)
	}
	b.ok("beta", MoveSeat{Seat: "lamp", Node: "beta"})
	b.seat("lamp", "lamp-a", alpha, epoch, Claim{}) // the leader hands it over
	if b.Seats["lamp"].Want != "lamp-b" || b.Mesh.Changed != b.Index || !b.happened("seat lamp is to be held by lamp-b on beta") {
		t.Errorf("the seat is %+v", b.Seats["lamp"])
	}
	at := b.Mesh.Changed
	b.ok("beta", MoveSeat{Seat: "lamp", Node: "beta", Assignment: "lamp-b"})
	if b.Mesh.Changed != at {
		t.Error("the same again makes plans stale")
	}
	b.ok("alpha", hold(b, "lamp", "lamp-b", epoch))
	b.seat("lamp", "lamp-b", beta, b.Index, Claim{})
	b.ok("beta", MoveSeat{Seat: "lamp", Node: "alpha", Assignment: "lamp-z"})
	b.refused("beta", Push{At: at}, "stale-plan", b.apply("beta", Push{At: at}).Error())
}

// A seat that a push describes is wanted by whom that push says, moved or not.
func TestAPushSaysAgainWhoIsWanted(t *testing.T) {
	for want, doc := range map[string]Seat{
		"lamp-a": {Name: "lamp", Scope: ScopeMesh, Verbs: []string{"on"}, Want: "lamp-a"},
		"":       {Name: "lamp", Scope: ScopeMesh, Verbs: []string{"on"}},
	} {
		b, _, _, _ := lamps(t)
		b.ok("alpha", push(doc))
		b.ok("alpha", MoveSeat{Seat: "lamp", Node: "beta"})
		b.ok("alpha", push(doc))
		if got := b.Seats["lamp"].Want; got != want {
			t.Errorf("a push with holder: %q leaves %q wanted", want, got)
		}
	}
}

// A requirement that waits for the seat's holder is bound by the entry that says
// who that is to be.
func TestAMoveBindsWhatWaitedForIt(t *testing.T) {
	b := story(t)
	b.ok("alpha", push(Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind, Verbs: []string{"query"}}))
	b.ok("alpha", push(app("agent", Requirement{}), on("agent", "all")))
	b.want("agent@gamma/db", "unbound")
	b.open("beta")
	b.ok("gamma", MoveSeat{Seat: "store", Node: "beta"})
	b.want("agent@gamma/db", "pg-apps (seat)")
}
