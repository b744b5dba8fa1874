package peer

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"meshd/bus"
	"meshd/raftfsm"
)

// differences are the events of differences, oldest first.
func (n *node) differences() (out []string) {
	for _, e := range n.state().Events {
		if strings.Contains(e.Text, " differs") {
			out = append(out, e.Text)
		}
	}
	return out
}

// TestDifferencesAreOnRecordWhileTheyLast: a second answerer is told once when it
// comes and once when it goes, under one leader and the next, and every node counts it.
func TestDifferencesAreOnRecordWhileTheyLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "alpha", "beta", "gamma")
		lead := b.leader()
		lead.do(push(raftfsm.Documents{
			Modules: []raftfsm.Module{{Name: "pg", Claims: []string{"store"}}},
			Seats:   []raftfsm.Seat{{Name: "store", Scope: raftfsm.ScopeMesh, Verbs: []string{"query"}}},
			Assigns: []raftfsm.Assign{{Module: "pg", Nodes: []string{"alpha", "beta"}}},
		}))
		b.eventually(10*time.Second, "a holder", func() bool { return lead.state().Seats["store"].Session != 0 })
		holder := b.node(lead.state().NodeName(lead.state().Assignments[lead.state().Seats["store"].Holder].Node))
		rogue := b.node("gamma")
		counted := func(want int) func() bool {
			return func() bool {
				for _, n := range b.nodes {
					if n.up() && n.peer.Counts().Differences != want {
						return false
					}
				}
				return true
			}
		}
		time.Sleep(2 * verifyEvery)
		if told := lead.differences(); len(told) > 0 {
			t.Fatalf("with nothing wrong: %q", told)
		}

		rogue.bus.setRogues(bus.Bound{Seat: "store", Assignment: "pg@gamma", Epoch: 1, Interest: 1})
		b.eventually(2*verifyEvery, "the second answerer on record", func() bool { return len(lead.differences()) == 1 })
		b.eventually(2*verifyEvery, "counted everywhere", counted(1))
		if text := lead.differences()[0]; !strings.HasPrefix(text, "seat store differs: gamma answers, and "+holder.name+"/pg@"+holder.name) {
			t.Errorf("told is %q", text)
		}
		if found, err := lead.peer.Verify(t.Context()); err != nil || len(found) != 1 {
			t.Errorf("verify finds %v, %v", found, err)
		}
		time.Sleep(10 * verifyEvery)
		if told := lead.differences(); len(told) != 1 {
			t.Errorf("it is told again and again: %q", told)
		}

		// The next leader finds the same, and tells nothing new.
		lead.kill()
		next := b.leader()
		time.Sleep(3 * verifyEvery)
		if rogue.up() && !slices.ContainsFunc(next.state().Mesh.Differences, func(d raftfsm.Difference) bool { return d.Node == "gamma" }) {
			t.Errorf("the next leader has %+v on record", next.state().Mesh.Differences)
		}
		lead.restart()
		rogue.bus.setRogues()
		b.eventually(3*verifyEvery, "its end on record", func() bool { return len(next.state().Mesh.Differences) == 0 })
		told := next.differences()
		if last := told[len(told)-1]; !strings.HasPrefix(last, "seat store differs no longer: gamma answers") {
			t.Errorf("told is %q", told)
		}
		b.eventually(2*verifyEvery, "counted nowhere", counted(0))
	})
}

// TestAHandoverIsNoDifference: looks at the very moment find nothing.
func TestAHandoverIsNoDifference(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "alpha", "beta", "gamma")
		lead := b.leader()
		lead.do(push(raftfsm.Documents{
			Modules: []raftfsm.Module{{Name: "pg", Claims: []string{"store"}}},
			Seats:   []raftfsm.Seat{{Name: "store", Scope: raftfsm.ScopeMesh, Verbs: []string{"query"}, Failover: raftfsm.FailoverAuto}},
			Assigns: []raftfsm.Assign{{Module: "pg", Nodes: []string{"alpha", "beta"}}},
		}))
		held := func(by string) func() bool {
			return func() bool {
				s := lead.state()
				return s.Seats["store"].Session != 0 && s.NodeName(s.Assignments[s.Seats["store"].Holder].Node) == by
			}
		}
		b.eventually(10*time.Second, "a holder, and all have heard a leader", func() bool {
			return (held("alpha")() || held("beta")()) && b.node("gamma").peer.hasHeard()
		})
		from, to := "alpha", "beta"
		if held(to)() {
			from, to = to, from
		}
		for range 20 {
			ended := make(chan []Finding)
			go func() {
				found, err := b.node("gamma").peer.Verify(t.Context())
				if err != nil {
					t.Error(err)
				}
				ended <- found
			}()
			lead.do(raftfsm.MoveSeat{Seat: "store", Node: to})
			if found := <-ended; len(found) > 0 {
				t.Errorf("while it moves to %s verify finds %v", to, found)
			}
			b.eventually(10*time.Second, "the move", held(to))
			from, to = to, from
		}
		if told := lead.differences(); len(told) > 0 {
			t.Errorf("told is %q", told)
		}
	})
}
