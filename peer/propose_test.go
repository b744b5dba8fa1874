package peer

import (
	"regexp"
	"testing"
	"time"

	"meshd/raftfsm"
)

// Whoever pushes on one node and plans on another plans on what it pushed, however
// late that other hears of it.
func TestAPlanIsMadeByAllThatIsCommitted(t *testing.T) {
	inMesh(t, func(b *bed) {
		l := b.leader()
		for _, n := range b.nodes {
			if n == l {
				continue
			}
			b.fabric.Slow(l.keys.NodeID(), n.keys.NodeID(), 100*time.Millisecond)
			store := push(database(n.name, n.name, n.name))
			result, err := l.peer.Propose(b.Context(), "root", store)
			b.must(settled(result, err))
			if at := n.state().Index; at >= result.Index {
				b.Fatalf("%s has applied %d already, and the test needs it to be late", n.name, at)
			}
			plan, own, refused := n.peer.Preview(b.Context(), "root", store)
			if refused != nil || own != 0 || plan.At != result.Index || len(plan.Changes) != 0 {
				b.Errorf("%s plans what was pushed at %d just now: %+v, own %d, %v", n.name, result.Index, plan, own, refused)
			}
			b.fabric.Heal()
		}
	})
}

func TestAPlanWithoutALeaderSaysByWhichStateItIs(t *testing.T) {
	inMesh(t, func(b *bed) {
		l := b.leader()
		b.fabric.Isolate(l.keys.NodeID())
		for _, lost := range []raftfsm.Command{push(database("pg", l.name, "db")), raftfsm.Remove{What: raftfsm.WhatModule, Name: "nothing"}} {
			began := time.Now()
			plan, own, refused := l.peer.Preview(b.Context(), "root", lost)
			at := l.state().Index
			if refused == nil && (own != at || len(plan.Changes) == 0) {
				b.Errorf("%T: %+v, own %d at index %d", lost, plan, own, at)
			}
			if refused != nil && !regexp.MustCompile(`there is no module "nothing" \(by this node's own copy of the log, which is of index \d+`).MatchString(refused.Text) {
				b.Errorf("%T: refused: %v", lost, refused)
			}
			if took := time.Since(began); took > refreshWithin {
				b.Errorf("%T took %v", lost, took)
			}
		}
	})
}
