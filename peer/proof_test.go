package peer

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// pitfalls are courses of events that have broken leases like these elsewhere, or in
// prototypes of this one. Random schedules hit most of them too seldom.
var pitfalls = []struct {
	name  string
	nodes int
	tries int
	run   func(v *nemesis)
}{
	{"the holder is stopped for longer than its lease", 3, 3, func(v *nemesis) {
		h := v.apart()
		v.pause(h)
		v.moves(h)
		v.resume(h)
	}},
	{"a handler runs for longer than its holder's lease", 3, 3, func(v *nemesis) {
		h := v.apart()
		for range 20 {
			v.long(h, 2*time.Second)
		}
		time.Sleep(10 * time.Millisecond)
		v.fabric.Isolate(h.keys.NodeID())
		v.moves(h)
	}},
	{"a leader that holds the seat is stopped in a write, and goes on with acknowledgements of before", 3, 10, func(v *nemesis) {
		h := v.together()
		for _, n := range v.nodes {
			if n != h {
				v.fabric.Slow(h.keys.NodeID(), n.keys.NodeID(), 60*time.Millisecond)
			}
		}
		time.Sleep(time.Second)
		v.pause(h)
		v.moves(h)
		v.fabric.Resume(h.keys.NodeID()) // its disk takes a moment more
		time.Sleep(20 * time.Millisecond)
		v.resume(h)
	}},
	{"a leader dies, and the holder is cut off", 5, 3, func(v *nemesis) {
		h := v.apart()
		v.kill(v.leader())
		v.fabric.Isolate(h.keys.NodeID())
		v.moves(h)
	}},
	{"a leader dies that held the seat", 3, 3, func(v *nemesis) {
		h := v.together()
		v.kill(h)
		v.moves(h)
	}},
	{"a leader was confirmed by the holder alone, which is cut off then", 3, 10, func(v *nemesis) {
		h, l := v.apart(), v.leader()
		third := v.other(h, l)
		v.fabric.Isolate(third.keys.NodeID())
		time.Sleep(3 * time.Second)
		v.fabric.Isolate(h.keys.NodeID())
		time.Sleep(450 * time.Millisecond) // and the leader steps down
		v.note("%s and %s are together again", l.name, third.name)
		v.fabric.Mend(l.keys.NodeID(), third.keys.NodeID())
		v.moves(h)
	}},
	{"a holder is back while its session is being closed", 3, 5, func(v *nemesis) {
		h := v.apart()
		l := v.leader()
		v.fabric.Isolate(h.keys.NodeID())
		time.Sleep(1300 * time.Millisecond)
		v.stall(l)
		time.Sleep(700 * time.Millisecond)
		v.fabric.Heal()
		time.Sleep(400 * time.Millisecond)
		v.fabric.Isolate(h.keys.NodeID())
		v.resume(l)
		v.moves(h)
	}},
	{"the seat is moved while a lease that lists it is on its way", 3, 10, func(v *nemesis) {
		h, l := v.apart(), v.leader()
		v.fabric.Slow(l.keys.NodeID(), h.keys.NodeID(), 140*time.Millisecond)
		time.Sleep(time.Second + time.Duration(v.Int64N(int64(250*time.Millisecond))))
		v.fabric.Heal() // what was sent before is slow still, and overtaken
		v.move(l)
		for range 50 {
			v.long(h, time.Millisecond)
			time.Sleep(5 * time.Millisecond)
		}
		v.moves(h)
	}},
	{"the seat is moved, and its holder does not hear of it", 3, 3, func(v *nemesis) {
		h := v.apart()
		v.fabric.Cut(h.keys.NodeID(), v.leader().keys.NodeID())
		v.move(v.leader())
		v.moves(h)
	}},
	{"the seat is moved, and its holder is stopped", 3, 3, func(v *nemesis) {
		h := v.apart()
		v.long(h, 20*time.Millisecond)
		v.pause(h)
		v.move(v.leader())
		v.moves(h)
		v.resume(h)
	}},
	{"the seat is moved, and its holder stops while the last call runs", 3, 10, func(v *nemesis) {
		h := v.together()
		for range 10 {
			v.long(h, time.Duration(10+v.IntN(35))*time.Millisecond)
		}
		v.move(v.other(h))
		time.Sleep(time.Duration(v.IntN(10)) * time.Millisecond)
		v.stopIt(h, v.IntN(2) == 0)
		v.moves(h)
	}},
	{"a lease is long on its way, and its holder is cut off", 3, 5, func(v *nemesis) {
		h := v.apart()
		v.fabric.Slow(v.leader().keys.NodeID(), h.keys.NodeID(), 140*time.Millisecond)
		time.Sleep(2 * time.Second)
		v.fabric.Isolate(h.keys.NodeID())
		v.moves(h)
	}},
	{"a holder dies and is back at once", 3, 3, func(v *nemesis) {
		h := v.apart()
		v.kill(h)
		v.boot(h)
		v.moves(nil)
	}},
	{"a leader hands over and stops", 3, 3, func(v *nemesis) {
		h := v.together()
		v.stopIt(h, true)
		v.moves(h)
	}},
}

// TestPitfalls is TestOneAnswererUnderANemesis for what is known to be dangerous.
func TestPitfalls(t *testing.T) {
	for _, p := range pitfalls {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			for try := range p.tries {
				var w *witness
				synctest.Test(t, func(t *testing.T) {
					v := newNemesis(t, uint64(try), p.nodes)
					w = v.witness
					p.run(v)
					time.Sleep(time.Second)
					v.judge()
				})
				w.linearizable(t)
			}
		})
	}
}

// apart is the holder, which is not the leader.
func (v *nemesis) apart() *node { return v.arrange(false) }

// other is a node that is none of these.
func (v *nemesis) other(these ...*node) *node {
	return v.nodes[slices.IndexFunc(v.nodes, func(n *node) bool { return !slices.Contains(these, n) })]
}

// together is the holder, which is the leader as well.
func (v *nemesis) together() *node { return v.arrange(true) }

// arrange moves the seat until its holder is the leader, or is not.
func (v *nemesis) arrange(leads bool) *node {
	var h *node
	v.eventually(30*time.Second, "the seat is where it should be", func() bool {
		l := v.leader()
		for _, n := range v.nodes {
			if (n == l) != leads {
				continue
			}
			if v.holds(n) {
				h = n
				return true
			}
			v.move(n)
			time.Sleep(500 * time.Millisecond)
			return false
		}
		return false
	})
	time.Sleep(time.Duration(v.Int64N(int64(time.Second)))) // any phase of the renewals
	return h
}

// long has the holder answer a call that takes so long.
func (v *nemesis) long(h *node, work time.Duration) {
	v.calls.Go(func() { h.serveCall(h, v.witness, "clock", work) })
}

// moves waits until another than h answers, for at most a while, and a little longer.
func (v *nemesis) moves(h *node) {
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		moved := false
		for _, n := range v.nodes {
			moved = moved || n != h && n.up() && v.holds(n)
		}
		if moved {
			break
		}
	}
	time.Sleep(200 * time.Millisecond)
}
