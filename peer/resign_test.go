package peer

import (
	"testing"
	"time"

	"meshd/raftfsm"
)

// TestALeaderThatStopsHandsTheLeadershipOver: another leads when it has stopped, and
// nobody waits for an election.
func TestALeaderThatStopsHandsTheLeadershipOver(t *testing.T) {
	inMesh(t, func(b *bed) {
		l := b.leader()
		other := b.another(l)
		began := time.Now()
		l.down()
		other.do(raftfsm.AddToken{Hash: "t", Expires: time.Now()})
		if took := time.Since(began); took > 200*time.Millisecond {
			b.Errorf("the next change was made %v after it was told to stop", took)
		}
		l.restart()
	})
}

// TestALeaderThatCannotHandOverStopsAllTheSame, within its time, and nothing of the
// attempt outlives the process.
func TestALeaderThatCannotHandOverStopsAllTheSame(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.leader().do(push(clock("alpha", "beta", "gamma")))
		l := b.leader()
		b.seated("clock", l)
		b.fabric.Isolate(l.keys.NodeID())
		began := time.Now()
		l.down()
		if took := time.Since(began); took > endWithin+resignWithin+3*time.Second {
			b.Errorf("it stopped within %v", took)
		}
		b.eventually(10*time.Second, "another answers", func() bool {
			at := b.another(l).answerer("clock")
			return at != nil && at != l
		})
		b.fabric.Heal()
		l.restart()
		for _, other := range b.nodes {
			if other != l {
				other.down() // each hands over to whoever is left with a majority
				b.leader().do(raftfsm.AddToken{Hash: other.name, Expires: time.Now()})
				other.restart()
			}
		}
	})
}
