package peer

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"meshd/raftfsm"
)

// What a node goes by after it was started:
//
//	its record ── caught up with a leader ──> the log
//
// The record is the state that it had applied before, which is never older than
// what it acted on. It may be older than the mesh. So until a leader was heard out
// nothing is made, withdrawn, stopped, swept, expelled or told, whatever is
// applied meanwhile: that is of long ago as well. What needs nobody else goes on.
//
//   - At once: the bus is laid. Tools and node seats answer. A mesh seat refuses
//     its calls and says why, since another may hold it by now.
//   - After aloneAfter with no leader in sight, and once the others were asked
//     whether this node was removed: what the record delivers is
//     delivered, and what it runs and does not run is started. Where a leader is
//     in sight its word is waited for, for it may say otherwise.
//
// A node without a record leaves everything as it is until then.

// catchUpEvery is how often a node that has just started looks whether it has
// heard a leader out: it does so within milliseconds of the first word.
const catchUpEvery = 100 * time.Millisecond

// aloneAfter is how many heartbeats without a leader mean that there is none: an
// election takes two to three.
const aloneAfter = 5

// unheard is what a node says of itself that goes by its record.
const unheard = "this node has heard no leader since it started"

// basis is what a node goes by.
type basis struct {
	record *facts        // the reconciler's; nil where there is none, and once heard
	had    bool          // there was a record at the start
	alone  atomic.Bool   // no leader is in sight: see listen
	heard  chan struct{} // closed once a leader was heard out
	laid   chan struct{} // closed once the bus was laid
	lay    func()        // closes laid
	led    time.Time     // when this node led last, zero for never; guarded by Peer.mu
}

func newBasis() *basis {
	laid := make(chan struct{})
	return &basis{heard: make(chan struct{}), laid: laid, lay: sync.OnceFunc(func() { close(laid) })}
}

func (n *Peer) hasHeard() bool {
	select {
	case <-n.basis.heard:
		return true
	default:
		return false
	}
}

// ownRecord is what this node goes by until it has heard a leader out, or nil
// where nothing says that it is as new as what was acted on. It has no jobs.
func (n *Peer) ownRecord() *facts {
	if !n.raft.Recorded() {
		return nil
	}
	f := n.gather()
	if f.jobs = nil; !f.isMember {
		return nil
	}
	return &f
}

// listen waits until this node has heard a leader out. It has the reconciler look
// again then, and when it turns out that there is none.
func (n *Peer) listen(ctx context.Context) error {
	seen := time.Now() // when a leader was in sight last
	for !n.raft.CaughtUp() {
		if _, known := n.raft.Leader(); known {
			seen = time.Now()
		}
		alone := n.exit.asked.Load() && time.Since(seen) >= aloneAfter*n.cfg.Raft.Timing.Heartbeat
		if n.basis.alone.Swap(alone) != alone {
			n.Poke()
		}
		if await(ctx, catchUpEvery, nil, nil) != nil {
			return nil
		}
	}
	close(n.basis.heard)
	n.Poke()
	return nil
}

// passOnRecord keeps up what this node had.
func (n *Peer) passOnRecord() {
	if n.basis.record == nil {
		return
	}
	f := *n.basis.record
	n.layBus(f, unheard+", and the seat may be another's by now")
	n.basis.lay()
	n.mu.Lock()
	defer n.mu.Unlock()
	work := map[raftfsm.TroubleReport]bool{} // nothing is told, so nothing is taken back
	n.passServices(f, work)
	if !n.basis.alone.Load() {
		return
	}
	n.passConsumers(f, work)
	specs, _ := n.processes(f)
	n.cfg.Processes.Hold(specs)
}

// Up returns once this node serves: by its own record, or with heard, after it
// has heard a leader out.
func (n *Peer) Up(ctx context.Context, heard bool) error {
	if err := await(ctx, 0, n.basis.laid, nil); err != nil || !heard {
		return err
	}
	return await(ctx, 0, n.basis.heard, nil)
}

// HasRecord reports whether this node serves without a leader.
func (n *Peer) HasRecord() bool { return n.basis.had }
