package peer

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"meshd/peer/consensus"
	"meshd/peer/lease"
	"meshd/raftfsm"
)

// nemeses is how many schedules of faults are run against one seat: -nemeses=N runs
// more. MESHD_TEST_SEED=n runs that one alone, and tells its story.
var nemeses = flag.Int("nemeses", 1000, "schedules of faults that a mesh seat is put through")

// healedWithin is how long after all is mended every node must have an answer: two leases
// and three time-outs of an election.
func healedWithin() time.Duration {
	lan := consensus.LAN()
	return 2*lan.Lease + 3*lan.Heartbeat
}

// TestOneAnswererUnderANemesis is the proof of "one answerer" in virtual time: whatever
// happens to machines, links, disks and clocks, no two nodes answer a seat at once, no
// caller goes back to an older holder, and a mesh that has healed answers.
//
// A seed replays the schedule, and not every timer: raft and memberlist draw from the
// global source. So a failure prints its whole story.
func TestOneAnswererUnderANemesis(t *testing.T) {
	first, count := uint64(0), uint64(*nemeses)
	if raceEnabled {
		count /= 10
	}
	if seed, err := strconv.ParseUint(os.Getenv("MESHD_TEST_SEED"), 10, 64); err == nil {
		first, count = seed, 1
	}
	for seed := first; seed < first+count; seed++ {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			var w *witness
			synctest.Test(t, func(t *testing.T) {
				v := newNemesis(t, seed, 3+2*int(seed%2))
				w = v.witness
				v.schedule()
			})
			w.linearizable(t)
		})
	}
}

// nemesis does things to a bed whose nodes all claim one seat.
type nemesis struct {
	*bed
	*rand.Rand
	*witness
	resumes map[*node][]func() // what ends the pauses and stalls of a node
	idle    context.CancelFunc // ends the callers, and what else is under way
	ctx     context.Context
}

// newNemesis makes a mesh of so many with the seat "clock", and calls it from every node.
func newNemesis(t *testing.T, seed uint64, nodes int) *nemesis {
	names := []string{"alpha", "beta", "gamma", "delta", "epsilon"}[:nodes]
	v := &nemesis{bed: newBed(t, names...), Rand: rand.New(rand.NewPCG(seed, 3)), witness: newWitness(), resumes: map[*node][]func(){}}
	v.ctx, v.idle = context.WithCancel(t.Context())
	t.Cleanup(func() { // where judge was not reached
		v.idle()
		for _, n := range v.nodes {
			v.free(n)
		}
		v.calls.Wait()
	})
	v.node("alpha").do(push(clock(names...)))
	for _, n := range v.nodes {
		n.clock.run(1 + lease.Drift/2*(2*v.Float64()-1))
		for i := range 2 {
			v.call(n, fmt.Sprint(n.name, i), rand.New(rand.NewPCG(seed, uint64(v.Int64()))))
		}
	}
	v.eventually(10*time.Second, "every node is answered", func() bool { return v.answeredSince(v.witness.began) })
	return v
}

// call has a caller call from the node.
func (v *nemesis) call(n *node, name string, r *rand.Rand) {
	c := &caller{node: n, witness: v.witness, name: name, seat: "clock", within: 3 * time.Second}
	// Most handlers are quick. Some run for longer than a lease.
	c.work = func() time.Duration {
		most := []time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, 2500 * time.Millisecond}
		return time.Duration(r.Int64N(int64(most[min(r.IntN(20), len(most)-1)*btoi(r.IntN(4) == 0)])))
	}
	v.calls.Go(func() {
		c.run(v.ctx, func() time.Duration { return time.Duration(r.Int64N(int64(60 * time.Millisecond))) })
	})
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (v *nemesis) answeredSince(t time.Time) bool {
	for _, n := range v.nodes {
		if !v.answered(n.name+"0").After(t) && !v.answered(n.name+"1").After(t) {
			return false
		}
	}
	return true
}

func (v *nemesis) schedule() {
	for range 5 + v.IntN(10) {
		time.Sleep(time.Duration(v.Int64N(int64([]time.Duration{50 * time.Millisecond, 500 * time.Millisecond, 2500 * time.Millisecond}[v.IntN(3)]))))
		v.event()
	}
	time.Sleep(time.Duration(v.Int64N(int64(2 * time.Second))))
	v.judge()
}

// judge mends everything and looks at what was written down.
func (v *nemesis) judge() {
	v.mend()
	mended, end := time.Now(), time.Now().Add(healedWithin())
	for !v.answeredSince(mended) && time.Now().Before(end) {
		time.Sleep(10 * time.Millisecond)
	}
	took := time.Since(mended)
	healed := v.answeredSince(mended)
	v.idle()
	v.calls.Wait()
	faults := v.verdict()
	if !healed {
		faults = append(faults, fmt.Sprintf("not every node is answered %v after all was mended", healedWithin()))
	}
	if len(faults) > 0 {
		v.Errorf("%v\n%s\n%s", faults, v.tell(), v.picture())
	}
	if os.Getenv("MESHD_TEST_SEED") != "" {
		v.Logf("%d answers, %d taken, healed in %v\n%s", len(v.answers), len(v.replies), took, v.tell())
	}
}

// victim is some node that is up, as often as not one that matters.
func (v *nemesis) victim() *node {
	if v.IntN(2) == 0 {
		for _, n := range v.nodes {
			if n.up() && v.IntN(2) == 0 && (v.holds(n) || n.peer.raft.State() == "leader") {
				return n
			}
		}
	}
	return v.nodes[v.IntN(len(v.nodes))]
}

func (v *nemesis) holds(n *node) bool {
	seats, _ := n.peer.leases.gate.Holding()
	return len(seats) > 0
}

// event does one thing.
func (v *nemesis) event() {
	n := v.victim()
	other := v.nodes[v.IntN(len(v.nodes))]
	id, ot := n.keys.NodeID(), other.keys.NodeID()
	switch v.IntN(17) {
	case 0:
		v.kill(n)
		v.boot(n)
	case 1, 2:
		v.kill(n)
	case 3:
		for _, n := range v.nodes {
			v.boot(n)
		}
	case 4, 5, 6:
		v.pause(n)
	case 7:
		v.resume(n)
	case 8:
		v.note("%s is isolated", n.name)
		v.fabric.Isolate(id)
	case 9:
		v.note("%s and %s are cut", n.name, other.name)
		v.fabric.Cut(id, ot)
	case 10:
		v.note("%s is cut one way, to %s", n.name, other.name)
		v.fabric.CutOneWay(id, ot)
	case 11:
		v.note("all links are whole")
		v.fabric.Heal()
	case 12:
		delay := time.Duration(v.Int64N(int64(150 * time.Millisecond)))
		v.note("%s and %s are %v apart", n.name, other.name, delay)
		v.fabric.Slow(id, ot, delay)
	case 13:
		step := time.Duration(v.Int64N(int64(3 * time.Second)))
		v.note("the clock of %s is %v ahead", n.name, step)
		n.clock.step(step)
	case 14:
		v.stall(n)
	case 15:
		v.move(other)
	case 16:
		v.stopIt(n, v.IntN(2) == 0)
		v.boot(n)
	}
}

func (v *nemesis) kill(n *node) {
	if !n.up() {
		return
	}
	v.note("%s is killed", n.name)
	n.life.Store(0)
	v.free(n)
	n.kill()
}

func (v *nemesis) boot(n *node) {
	if !n.up() {
		v.note("%s boots", n.name)
		n.restart()
	}
}

// pause stops a process: it neither sends nor receives, and its log takes nothing. A
// leader is in the middle of a write, so that it takes itself for the leader when it
// goes on.
func (v *nemesis) pause(n *node) {
	if !n.up() {
		return
	}
	v.note("%s (%s, holds %v) is stopped", n.name, n.peer.raft.State(), v.holds(n))
	id := n.keys.NodeID()
	v.fabric.Pause(id)
	on := n.disk.Stall()
	v.resumes[n] = append(v.resumes[n], on, func() { v.fabric.Resume(id) })
	v.write(n)
}

func (v *nemesis) stall(n *node) {
	if !n.up() {
		return
	}
	v.note("the disk of %s (%s) stalls", n.name, n.peer.raft.State())
	v.resumes[n] = append(v.resumes[n], n.disk.Stall())
	v.write(n)
}

// write has the node write something.
func (v *nemesis) write(n *node) {
	p := n.peer
	v.calls.Go(func() {
		ctx, cancel := context.WithTimeout(v.ctx, time.Second)
		defer cancel()
		self := n.member()
		p.Propose(ctx, Meshd, raftfsm.UpdateNode{ID: self.ID, Address: self.Address, Route: self.Route, Level: self.Level}) // what comes of it is no matter
	})
}

func (v *nemesis) resume(n *node) {
	if len(v.resumes[n]) > 0 {
		v.note("%s goes on", n.name)
		v.free(n)
	}
}

func (v *nemesis) free(n *node) {
	for _, on := range v.resumes[n] {
		on()
	}
	delete(v.resumes, n)
}

// move has the seat moved to a node, by that node's request.
func (v *nemesis) move(to *node) {
	if !to.up() {
		return
	}
	v.note("the seat is to move to %s", to.name)
	p := to.peer
	v.calls.Go(func() {
		ctx, cancel := context.WithTimeout(v.ctx, 2*time.Second)
		defer cancel()
		result, err := p.Propose(ctx, "root@"+to.name, raftfsm.MoveSeat{Seat: "clock", Node: to.name})
		if err = settled(result, err); err != nil {
			v.note("the move to %s: %v", to.name, err)
		}
	})
}

// stopIt ends a meshd as an operator does, who may have it hand the leadership over.
func (v *nemesis) stopIt(n *node, transfer bool) {
	if !n.up() {
		return
	}
	v.resume(n)
	v.note("%s (%s) stops", n.name, n.peer.raft.State())
	if transfer && n.peer.raft.State() == "leader" {
		ctx, cancel := context.WithTimeout(v.ctx, time.Second)
		if err := n.peer.raft.TransferLeadership(ctx); err != nil {
			v.note("%s does not hand over: %v", n.name, err)
		}
		cancel()
	}
	n.down()
}

// mend makes everything well.
func (v *nemesis) mend() {
	v.note("all is mended")
	v.fabric.Heal()
	for _, n := range v.nodes {
		v.resume(n)
		v.boot(n)
	}
}
