package peer

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"meshd/bus"
	"meshd/peer/lease"
)

// What is proven of mesh seats in virtual time: callers on every node ask the holder
// that their node's bus knows of, by way of the fabric, as package bus does; every
// answer is written down, and what is written is judged when all is over.

// turn is one run of a handler, as its node saw it.
type turn struct {
	node  string
	life  int // of the node: how often it was started
	epoch uint64
	// Both are ticks of the witness: the handler ran from one to the other.
	entered, left int64
	let           bool // its gate let the answer out
	serial        int  // of the handler's runs under this epoch in this life
}

// reply is an answer that a caller took.
type reply struct {
	caller       string
	asked, taken int64 // ticks
	*turn
}

// witness writes down what happens in a bed, in the order in which it happens. In
// virtual time many things happen at one instant: its ticks tell them apart.
type witness struct {
	mu      sync.Mutex
	ticks   int64
	began   time.Time
	answers []*turn
	replies []reply
	story   []string
	calls   sync.WaitGroup // under way
	serials map[string]int
	last    map[string]time.Time // when each caller got its newest answer
}

func newWitness() *witness {
	return &witness{began: time.Now(), serials: map[string]int{}, last: map[string]time.Time{}}
}

// tick must be called with mu held.
func (w *witness) tick() int64 {
	w.ticks++
	return w.ticks
}

func (w *witness) now() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tick()
}

func (w *witness) enter(a *turn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := fmt.Sprint(a.node, a.life, a.epoch)
	w.serials[key]++
	a.serial, a.entered = w.serials[key], w.tick()
	w.answers = append(w.answers, a)
}

func (w *witness) leave(a *turn, let bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a.let = let
}

func (w *witness) take(caller string, asked int64, a *turn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.replies = append(w.replies, reply{caller, asked, w.tick(), a})
	w.last[caller] = time.Now()
}

// answered is when the caller got its newest answer.
func (w *witness) answered(caller string) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last[caller]
}

// note adds a line to the story that a failure prints.
func (w *witness) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.story = append(w.story, fmt.Sprintf("%9.3f %7d  %s", time.Since(w.began).Seconds(), w.tick(), fmt.Sprintf(format, args...)))
}

// verdict is what is wrong with what was written down, or nothing: see also linearizable.
func (w *witness) verdict() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Concat(overlaps(w.answers), lateStarts(w.answers), regressions(w.replies))
}

// overlaps finds the answers of one epoch that were computed while, or after, a later
// epoch's were. An answer that its gate kept back is none.
func overlaps(answers []*turn) (faults []string) {
	type edge struct{ first, last *turn } // earliest to enter, latest to leave
	epochs := map[uint64]*edge{}
	for _, a := range answers {
		if !a.let {
			continue
		}
		e := epochs[a.epoch]
		if e == nil {
			e = &edge{a, a}
			epochs[a.epoch] = e
		}
		if a.node != e.first.node || a.life != e.first.life {
			faults = append(faults, fmt.Sprintf("epoch %d was answered by %s (life %d) and by %s (life %d)", a.epoch, e.first.node, e.first.life, a.node, a.life))
		}
		if a.entered < e.first.entered {
			e.first = a
		}
		if a.left > e.last.left {
			e.last = a
		}
	}
	var last *turn
	for _, epoch := range slices.Sorted(maps.Keys(epochs)) {
		e := epochs[epoch]
		if last != nil && e.first.entered < last.left {
			faults = append(faults, fmt.Sprintf("%s entered under epoch %d at %d, and %s left under epoch %d at %d", e.first.node, epoch, e.first.entered, last.node, last.epoch, last.left))
		}
		if last == nil || e.last.left > last.left {
			last = e.last
		}
	}
	return faults
}

// lateStarts finds the handlers that began under an epoch after one had begun under a
// later one.
func lateStarts(answers []*turn) (faults []string) {
	var newest *turn
	for _, a := range answers { // in the order in which they began
		if newest != nil && a.epoch < newest.epoch {
			faults = append(faults, fmt.Sprintf("%s began under epoch %d at %d, after %s had begun under epoch %d at %d", a.node, a.epoch, a.entered, newest.node, newest.epoch, newest.entered))
		}
		if newest == nil || a.epoch > newest.epoch {
			newest = a
		}
	}
	return faults
}

// regressions finds the replies under an epoch older than one that somebody had taken
// a reply of before they were asked for.
func regressions(replies []reply) (faults []string) {
	byTaken := slices.SortedFunc(slices.Values(replies), func(a, b reply) int { return cmp.Compare(a.taken, b.taken) })
	byAsked := slices.SortedFunc(slices.Values(replies), func(a, b reply) int { return cmp.Compare(a.asked, b.asked) })
	var newest reply
	for _, r := range byAsked {
		for len(byTaken) > 0 && byTaken[0].taken < r.asked {
			if newest.turn == nil || byTaken[0].epoch > newest.epoch {
				newest = byTaken[0]
			}
			byTaken = byTaken[1:]
		}
		if newest.turn != nil && r.epoch < newest.epoch {
			faults = append(faults, fmt.Sprintf("%s asked at %d and took epoch %d, after %s had taken epoch %d at %d", r.caller, r.asked, r.epoch, newest.caller, newest.epoch, newest.taken))
		}
	}
	return faults
}

// linearizable fails the test unless ordered. It is for histories of which verdict has
// nothing to say: porcupine may take for ever over one that is wrong. Its time is the
// machine's, so it is called out of the bubble.
func (w *witness) linearizable(t *testing.T) {
	if !t.Failed() && !w.ordered() {
		t.Errorf("porcupine finds no order of the replies, or not within a minute, in which epoch and serial grow\n%s", w.tell())
	}
}

// ordered lets porcupine look at the seat as at one register of two numbers, epoch and
// serial, of which each call reads a larger pair than the one before it.
func (w *witness) ordered() bool {
	type pair struct {
		epoch  uint64
		serial int
	}
	model := porcupine.Model{
		Init: func() any { return pair{} },
		Step: func(state, _, output any) (bool, any) {
			was, is := state.(pair), output.(pair)
			return is.epoch > was.epoch || is.epoch == was.epoch && is.serial > was.serial, is
		},
	}
	clients := map[string]int{}
	var calls []porcupine.Operation
	for _, r := range w.replies {
		if _, ok := clients[r.caller]; !ok {
			clients[r.caller] = len(clients)
		}
		calls = append(calls, porcupine.Operation{ClientId: clients[r.caller], Call: r.asked, Return: r.taken, Output: pair{r.epoch, r.serial}})
	}
	return porcupine.CheckOperationsTimeout(model, calls, time.Minute) == porcupine.Ok
}

// tell is the story with its verdict, for a failure's text.
func (w *witness) tell() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Join(w.story, "\n")
}

// caller asks a seat from one node, one call after another, as that node's meshd does:
// see bus.Call.
type caller struct {
	*node
	*witness
	name   string
	seat   string
	within time.Duration // of one call
	work   func() time.Duration
	newest uint64 // epoch that was seen
}

// run asks until ctx ends, with a pause after each call.
func (c *caller) run(ctx context.Context, pause func() time.Duration) {
	for !pauseFor(ctx, pause()) {
		if c.life.Load() == 0 {
			c.newest = 0
			continue
		}
		call, cancel := context.WithTimeout(ctx, c.within)
		c.ask(call)
		cancel()
	}
}

// ask makes one call, which looks again for the holder until its time is over. A call
// that may have run is not repeated.
func (c *caller) ask(ctx context.Context) {
	asked := c.now()
	for ctx.Err() == nil && c.life.Load() != 0 {
		seat := c.bus.serving().Directory.Seats[c.seat]
		c.newest = max(c.newest, seat.Holder.Epoch)
		if seat.Dark == "" && seat.Holder.Node != "" {
			got := make(chan response, 1)
			sent, work := c.clock.read(), c.work()
			c.calls.Go(func() { got <- c.node.node(seat.Holder.Node).serveCall(c.node, c.witness, c.seat, work) })
			select {
			case r := <-got:
				if r.turn != nil {
					c.judge(ctx, asked, sent, seat.Holder.Node, r)
					return
				}
				if r.lost {
					return
				}
			case <-ctx.Done():
				return
			}
		}
		pauseFor(ctx, 20*time.Millisecond)
	}
}

// judge takes an answer or refuses it.
func (c *caller) judge(ctx context.Context, asked int64, sent time.Duration, holder string, r response) {
	c.fabric.Halt(c.keys.NodeID())
	took := c.clock.read() - sent
	if r.epoch < c.newest {
		return
	}
	c.newest = r.epoch
	if took > r.leftFor {
		sent := c.clock.read()
		again := make(chan response, 1)
		c.calls.Go(func() { again <- c.node.node(holder).serveCall(c.node, c.witness, c.seat, -1) })
		select {
		case confirmed := <-again:
			c.fabric.Halt(c.keys.NodeID())
			if confirmed.turn == nil || confirmed.epoch != r.epoch || c.clock.read()-sent > confirmed.leftFor {
				return
			}
		case <-ctx.Done():
			return
		}
	}
	c.take(c.name, asked, r.turn)
}

// response is what came back of a call: an answer, a "not the holder", or nothing.
type response struct {
	*turn
	leftFor time.Duration
	lost    bool
}

// serveCall takes a call to this node, answers it and takes the answer back. A work
// below zero asks whether this node holds the seat, and runs no handler. A call to a
// process that has ended is lost, or refused if it came too late.
func (n *node) serveCall(from *node, w *witness, seat string, work time.Duration) response {
	me, them := n.keys.NodeID(), from.keys.NodeID()
	lost := response{lost: true}
	if !n.fabric.Carry(them, me) {
		return lost
	}
	life := n.life.Load()
	services := n.bus.serving().Services
	i := slices.IndexFunc(services, func(s bus.Service) bool { return s.Scope == bus.ScopeMesh && s.Seat == seat })
	if i < 0 || life == 0 {
		return response{}
	}
	gate := services[i].Gate
	epoch, leave, err := gate.Enter(seat)
	if err != nil {
		return response{}
	}
	a := &turn{node: n.name, life: int(life), epoch: epoch}
	if work >= 0 {
		w.enter(a)
		n.fabric.Halt(me)
		time.Sleep(work)
	}
	n.fabric.Halt(me)
	a.left = w.now()
	left, err := leave()
	if n.life.Load() != life {
		return lost // the process has ended
	}
	if work >= 0 {
		w.leave(a, err == nil)
	}
	if err != nil || !n.fabric.Carry(me, them) || n.life.Load() != life {
		return lost
	}
	return response{turn: a, leftFor: left}
}

// ownClock is a node's own, which runs at its own rate and may be set forward.
type ownClock struct {
	mu    sync.Mutex
	began time.Time
	ahead time.Duration
	rate  float64
	reads atomic.Int64 // one by each renewal that is asked for, and those of the gate
}

func (c *ownClock) read() time.Duration {
	c.reads.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ahead + time.Duration(float64(time.Since(c.began))*c.rate)
}

func (c *ownClock) step(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead += d
}

func (c *ownClock) run(rate float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead += time.Duration(float64(time.Since(c.began)) * (c.rate - rate))
	c.rate = rate
}

var _ lease.Clock = (*ownClock)(nil).read
