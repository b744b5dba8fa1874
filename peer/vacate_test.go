package peer

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meshd/raftfsm"
)

// ledger is a seat that does not fail over by itself, on the same assignments as clock.
func ledger(nodes ...string) raftfsm.Documents {
	docs := clock(nodes...)
	docs.Seats = append(docs.Seats, raftfsm.Seat{Name: "ledger", Scope: raftfsm.ScopeMesh, Failover: raftfsm.FailoverManual, Want: "clock@" + nodes[0]})
	docs.Modules[0].Claims = append(docs.Modules[0].Claims, "ledger")
	return docs
}

// another is a node that is none of those.
func (b *bed) another(than ...*node) *node {
	return b.nodes[slices.IndexFunc(b.nodes, func(n *node) bool { return !slices.Contains(than, n) })]
}

// answerer is the node that may answer the seat by n's log, or nil.
func (n *node) answerer(seat string) *node {
	s := n.state()
	held := s.Seats[seat]
	if held.Session == 0 {
		return nil
	}
	return n.node(s.NodeName(s.Assignments[held.Holder].Node))
}

// seated moves the seat to a node, and waits until its gate is open there.
func (b *bed) seated(seat string, at *node) {
	b.Helper()
	b.eventually(10*time.Second, at.name+" has a lease", func() bool {
		return at.propose(raftfsm.MoveSeat{Seat: seat, Node: at.name}) == nil
	})
	b.eventually(10*time.Second, at.name+" may answer "+seat, func() bool {
		holding, _ := at.peer.leases.gate.Holding()
		return holding[seat] != 0
	})
}

// asking has calls under way all the time from one node, through the gates, as a bus
// makes them: to whom that node's log names, and again when that one has turned it
// away. end ends it and tells how many were answered, how many ran in vain, and the
// longest time without an answer.
func (n *node) asking(seat string) (end func() (answered, lost int, silent time.Duration)) {
	var calls sync.WaitGroup
	ctx, stop := context.WithCancel(context.Background())
	var mu sync.Mutex
	var answered, lost int
	var silent time.Duration
	last := time.Now()
	one := func() {
		at := n.answerer(seat)
		if at == nil || !at.up() {
			return
		}
		_, leave, err := at.peer.leases.gate.Enter(seat)
		if err != nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
		_, err = leave()
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			lost++
			return
		}
		answered++
		silent, last = max(silent, time.Since(last)), time.Now()
	}
	for range 4 {
		calls.Go(func() {
			for ctx.Err() == nil {
				one()
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	return func() (int, int, time.Duration) {
		stop()
		calls.Wait()
		return answered, lost, max(silent, time.Since(last))
	}
}

// TestANodeThatLeavesHandsItsSeatsOver: whether it leads or not, others are named
// before it is removed, and no call is lost.
func TestANodeThatLeavesHandsItsSeatsOver(t *testing.T) {
	for _, leads := range []bool{true, false} {
		name := map[bool]string{true: "the leader", false: "another"}[leads]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, "alpha", "beta", "gamma", "delta")
				b.leader().do(push(clock("alpha", "beta", "gamma", "delta")))
				goes, stays := b.leader(), b.another(b.leader())
				if !leads {
					goes, stays = stays, goes
				}
				b.seated("clock", goes)
				end := stays.asking("clock")
				time.Sleep(time.Second)
				b.must(goes.peer.Leave(b.Context(), "root", false))
				time.Sleep(time.Second)
				if answered, lost, silent := end(); answered == 0 || lost > 0 || silent > 200*time.Millisecond {
					b.Errorf("%d calls were answered and %d not, and none for %v", answered, lost, silent)
				}
				b.eventually(10*time.Second, "the others know", func() bool { return len(stays.state().Nodes) == 3 })
				s := stays.state()
				named := s.Seats["clock"].Epoch & (1<<48 - 1)
				if at := stays.answerer("clock"); at == nil || at == goes || named >= s.Mesh.Keys {
					b.Errorf("the seat was named to %v at %d, and the node removed at %d", at, named, s.Mesh.Keys)
				}
			})
		})
	}
}

// TestALeaveThatWouldDarkenASeatIsRefused, and leaves everything as it was, but for
// one that is forced.
func TestALeaveThatWouldDarkenASeatIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		docs raftfsm.Documents
		want string // of the refusal
		dark []string
	}{
		"nobody else claims it":  {clock("alpha"), "seat clock (no other node that claims it has a lease)", []string{"clock"}},
		"its failover is manual": {ledger("alpha", "beta"), "seat ledger (its failover is manual)", []string{"ledger"}},
	} {
		t.Run(name, func(t *testing.T) {
			inMesh(t, func(b *bed) {
				alpha := b.node("alpha")
				b.lead("gamma")
				b.node("gamma").do(push(c.docs))
				b.seated("clock", alpha)
				time.Sleep(5 * time.Second)
				before := alpha.state().Seats
				var refused *raftfsm.Rejection
				if err := alpha.peer.Leave(b.Context(), "root", false); !errors.As(err, &refused) || refused.Code != "seats-go-dark" || !strings.Contains(refused.Text, c.want) {
					b.Fatalf("leave: %v", err)
				}
				time.Sleep(5 * time.Second)
				for seat, was := range before {
					if now := b.node("gamma").state().Seats[seat]; now.Epoch != was.Epoch || now.Session != was.Session {
						b.Errorf("the leave was refused, and seat %s went from %+v to %+v", seat, was, now)
					}
				}
				b.must(alpha.peer.Leave(b.Context(), "root", true))
				time.Sleep(5 * time.Second)
				var dark []string
				for _, seat := range sortedKeys(before) {
					if b.node("gamma").answerer(seat) == nil {
						dark = append(dark, seat)
					}
				}
				if !slices.Equal(dark, c.dark) {
					b.Errorf("after a leave that was forced %v are dark, want %v", dark, c.dark)
				}
			})
		})
	}
}

// TestALeaveOutlivesTheLeader: a leader that is elected while a node leaves hears of it
// by the next renewal.
func TestALeaveOutlivesTheLeader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "alpha", "beta", "gamma", "delta")
		b.leader().do(push(clock("alpha", "beta", "gamma", "delta")))
		led := b.leader()
		goes := b.another(led)
		b.seated("clock", goes)
		led.kill()
		b.must(goes.peer.Leave(b.Context(), "root", false))
		at := b.another(led, goes).answerer("clock")
		if at == nil || at == goes || at == led {
			b.Errorf("the seat is answered by %v", at)
		}
	})
}

// TestACallThatRunsIsLetOutWhateverBecomesOfTheLeader: it asked for the release, and is
// gone before the call has ended.
func TestACallThatRunsIsLetOutWhateverBecomesOfTheLeader(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.leader().do(push(clock("alpha", "beta", "gamma")))
		l := b.leader()
		holder := b.another(l)
		b.seated("clock", holder)
		gate := holder.peer.leases.gate
		epoch, leave, err := gate.Enter("clock")
		b.must(err)
		gone, cancel := context.WithCancel(b.Context())
		cancel()
		released := make(chan error, 1)
		go func() {
			_, err := holder.peer.letGo(gone, l.keys.NodeID(), releaseQuestion{Seat: "clock", Session: gate.Session(), Epoch: epoch})
			released <- err
		}()
		time.Sleep(drain / 2)
		if _, _, err := gate.Enter("clock"); err == nil {
			b.Error("a seat that is let go of admits a call")
		}
		if _, err := leave(); err != nil {
			b.Errorf("a call that ended in time: %v", err)
		}
		b.must(<-released)
	})
}

// TestNobodyIsAskedForRenewalWhileNobodyLeads, and a leader that comes is asked at once.
func TestNobodyIsAskedForRenewalWhileNobodyLeads(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.leader().do(push(clock("alpha", "beta", "gamma")))
		alpha := b.node("alpha")
		b.seated("clock", alpha)
		for _, other := range []string{"beta", "gamma"} {
			b.node(other).kill()
		}
		time.Sleep(10 * time.Second)
		before := alpha.clock.reads.Load()
		time.Sleep(time.Minute)
		if asked := alpha.clock.reads.Load() - before; asked > 12 { // 20 a second before; the comparison of who answers reads it too
			b.Errorf("it asked %d times in a minute", asked)
		}
		b.node("beta").restart()
		b.leader()
		began := time.Now()
		b.eventually(3*time.Second, "the lease is renewed", func() bool {
			_, left := alpha.peer.leases.gate.Holding()
			return left > 0
		})
		b.Logf("renewed %v after the election", time.Since(began))
		b.node("gamma").restart()
	})
}
