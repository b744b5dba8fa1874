package peer

import (
	"testing"
	"time"

	"meshd/raftfsm"
)

// clock is a seat, and its claimant on each of the nodes.
func clock(nodes ...string) raftfsm.Documents {
	return raftfsm.Documents{
		Seats:   []raftfsm.Seat{{Name: "clock", Scope: raftfsm.ScopeMesh, Verbs: []string{"now"}}},
		Modules: []raftfsm.Module{{Name: "clock", Claims: []string{"clock"}}},
		Assigns: []raftfsm.Assign{{Module: "clock", Nodes: nodes}},
	}
}

// TestANodeThatStopsLetsGoForGood: the entry that names another reaches it while it
// still runs, and must not make it ask for a lease again.
func TestANodeThatStopsLetsGoForGood(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.leader().do(push(clock("alpha", "beta", "gamma")))
		holder := func() string {
			s := b.leader().state()
			if s.Seats["clock"].Session == 0 {
				return ""
			}
			return s.NodeName(s.Assignments[s.Seats["clock"].Holder].Node)
		}
		b.eventually(5*time.Second, "the seat has a holder", func() bool { return holder() != "" })
		gone := b.node(holder())
		gone.down()
		s := b.leader().state()
		if _, open := s.Sessions[gone.keys.NodeID()]; open {
			t.Errorf("%s has stopped, and has a lease", gone.name)
		}
		if now := holder(); now == gone.name || now == "" {
			t.Errorf("%s has stopped, and the seat is answered by %q", gone.name, now)
		}
		gone.restart()
	})
}
