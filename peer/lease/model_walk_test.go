package lease_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// walkSteps is the length of a walk: some five leases.
const walkSteps = 300

// maxWire is how many messages may wait; of more the oldest are lost.
const maxWire = 25

// action is what can happen next in a walk.
type action int

const (
	deliver action = iota
	renewSeat
	beat
	prove
	closeAny
	nameAny
	lose
	renewAny
	stand
	pause
	call
	handOver
	push
	members
	restart
	cutOff
	giveUp
	actions
)

// weights are the most that a walk gives to each action. Of those from lose on a
// walk takes all, a quarter or nothing, so that some walks are about few things.
var weights = [actions]int{
	deliver: 80, renewSeat: 80, beat: 30, prove: 120, closeAny: 100, nameAny: 40,
	lose: 40, renewAny: 40, stand: 50, pause: 24, call: 40, handOver: 40, push: 16, members: 24, restart: 16, cutOff: 40, giveUp: 4,
}

// walk is one random walk.
type walk struct {
	*world
	*rand.Rand
	weights [actions]int
	total   int
	speed   int     // ticks that a step may take
	prompt  int     // of a hundred messages, how many arrive at once
	cut     nodeSet // whose messages wait
}

func newWalk(m mutant, voters int, seed uint64) *walk {
	r := rand.New(rand.NewPCG(seed, uint64(voters)))
	nodes := min(voters+1+r.IntN(2), maxNodes)
	w := &walk{world: newWorld(m, voters, nodes, r.IntN(nodes)), Rand: r, weights: weights, speed: 1 + r.IntN(3), prompt: []int{50, 80, 95}[r.IntN(3)]}
	for a := range w.weights {
		if action(a) >= lose {
			w.weights[a] = w.weights[a] * []int{0, 1, 4}[r.IntN(3)] / 4
		}
		w.total += w.weights[a]
	}
	for _, n := range w.nodes {
		n.clock.rate = int64(rate - rho + r.IntN(3)*rho)
	}
	return w
}

// run takes the steps of a walk until something is wrong.
func (w *walk) run() {
	for range walkSteps {
		w.tick += int64(w.IntN(w.speed))
		under := len(w.wire)
		w.step()
		w.follow(min(under, len(w.wire)))
		w.check()
		if w.violation != "" {
			return
		}
	}
}

func (w *walk) step() {
	n := w.nodes[w.IntN(len(w.nodes))]
	other := w.nodes[w.IntN(len(w.nodes))]
	switch w.choose() {
	case deliver:
		if i := w.ready(); i >= 0 {
			w.deliver(i)
		}
	case lose:
		if len(w.wire) > 0 {
			w.take(w.IntN(len(w.wire)))
		}
	case renewSeat:
		w.holding(n).sendRenew(w.leading(other).id)
	case renewAny:
		n.sendRenew(w.leading(other).id)
	case beat:
		if n = w.leading(n); n.leader != nil && w.IntN(3) == 0 {
			n.replicate()
		} else {
			n.sendHeartbeats()
		}
	case prove:
		w.leading(n).confirm()
	case closeAny:
		w.leading(n).closeExpired(w.holding(other).id, w.IntN(len(w.nodes)))
	case nameAny:
		w.leading(n).name(other.id)
	case stand:
		n.stand()
	case pause:
		w.tick += int64(w.IntN(40))
	case call:
		if n = w.holding(n); w.IntN(2) == 0 {
			n.enter()
		} else {
			n.leave()
		}
	case handOver:
		if n = w.leading(n); w.IntN(3) == 0 {
			n.withdraw()
		} else {
			n.askRelease()
		}
	case push:
		w.leading(n).take()
	case members:
		w.leading(n).changeVoters(other.id)
	case restart:
		n.restart()
	case cutOff:
		w.cut ^= setOf(n.id)
	case giveUp:
		n.giveUpEvidence()
	}
}

// follow delivers most of the messages that a step sent, and that those sent, at
// once. The others wait on the wire.
func (w *walk) follow(i int) {
	for i < len(w.wire) && w.violation == "" {
		if m := w.wire[i]; w.cut.has(m.from) || w.cut.has(m.to) || w.IntN(100) >= w.prompt {
			i++
			continue
		}
		w.deliver(i)
		w.check()
	}
}

func (w *walk) choose() action {
	x := w.IntN(w.total)
	for a, weight := range w.weights {
		if x -= weight; x < 0 {
			return action(a)
		}
	}
	return deliver
}

// ready chooses a message that may be delivered: often one of those that wait
// longest, else any.
func (w *walk) ready() int {
	for len(w.wire) > maxWire {
		w.take(0)
	}
	if len(w.wire) == 0 {
		return -1
	}
	i := w.IntN(len(w.wire))
	if w.IntN(2) == 0 {
		i = min(i, w.IntN(4))
	}
	if m := w.wire[i]; w.cut.has(m.from) || w.cut.has(m.to) {
		return -1
	}
	return i
}

// leading is mostly a node that believes that it leads, of which there may be
// several, and n otherwise.
func (w *walk) leading(n *node) *node {
	from := w.IntN(len(w.nodes))
	for i := range w.nodes {
		if n := w.nodes[(from+i)%len(w.nodes)]; n.leader != nil {
			return n
		}
	}
	return n
}

// holding is mostly a node that has a grant, and n otherwise.
func (w *walk) holding(n *node) *node {
	if w.IntN(3) == 0 {
		return n
	}
	from := w.IntN(len(w.nodes))
	for i := range w.nodes {
		if n := w.nodes[(from+i)%len(w.nodes)]; n.holder.grant.epoch != 0 || n.holder.out.calls > 0 {
			return n
		}
	}
	return n
}

// replay runs a walk again and tells what happened.
func replay(m mutant, voters int, seed uint64) string {
	w := newWalk(m, voters, seed)
	w.tracing = true
	w.run()
	return fmt.Sprintf("walk %d with %d voters: %s\n%s", seed, voters, w.violation, strings.Join(w.trace, "\n"))
}
