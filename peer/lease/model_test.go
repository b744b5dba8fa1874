// The model of the lease protocol, and its checker.
//
// The protocol is docs/decisions/0016-the-lease-protocol.md. Here it is once
// more, as small as it can be and still be wrong in all the ways that matter:
// nodes with clocks that drift, messages that are late, lost and out of order,
// a log with elections and changes of voters, and one seat. A walk chooses at
// random what happens next; after every step no two nodes may answer for the
// seat. Nothing of the package under test is used: this checks the rules, and
// the tests beside it check that the code keeps them.
//
//   - model_test.go: the world, its clocks and messages, and what must hold.
//   - model_log_test.go: the log and the voter, which is raft and the evidence.
//   - model_leader_test.go: the leader's ledger of leases.
//   - model_holder_test.go: the holder's gate, and the seat's state in the log.
//   - model_walk_test.go: what happens next in a walk.
//   - model_schedules_test.go: schedules that random walks hardly meet.
//   - model_check_test.go: the tests, and the mutants of the rules.
package lease_test

import (
	"fmt"
	"math/bits"
)

// Real time is counted in ticks. A clock at its true rate advances 1000 a tick;
// ttl and guard are such durations, and rho is in thousandths. A real rho is a
// hundred times smaller; a walk would not notice that one.
const (
	rate  = 1000
	rho   = 100
	ttl   = 60 * rate
	guard = 2 * rate
)

// The leader's wait W has to outlast a lease that the slowest clock measures
// while the fastest measures the wait: W/(1+rho) >= ttl/(1-rho). ttl(1+2rho) falls
// short by the square of rho, and guard makes up for it. The line does not
// compile when guard is too small.
const _ = uint(wait*(rate-rho) - ttl*(rate+rho))

const wait = ttl + ttl*2*rho/rate + guard

// maxNodes is how many nodes a mesh of the model can have, voters or not.
const maxNodes = 6

// instant is a reading of one node's clock. Instants of two nodes are never
// compared; 0 is before anything that happened.
type instant int64

type clock struct{ offset, rate int64 }

func (c clock) at(tick int64) instant { return instant(c.offset + tick*c.rate) }

// nodeSet is a set of nodes.
type nodeSet uint8

func setOf(n int) nodeSet                     { return 1 << n }
func (s nodeSet) has(n int) bool              { return s&setOf(n) != 0 }
func (s nodeSet) count() int                  { return bits.OnesCount8(uint8(s)) }
func (s nodeSet) majorityOf(all nodeSet) bool { return 2*(s&all).count() > all.count() }

func (s nodeSet) String() string {
	text := "{"
	for n := range maxNodes {
		if s.has(n) {
			text += fmt.Sprintf(" n%d", n)
		}
	}
	return text + " }"
}

// node is one machine. What is on its disk survives a restart; the roles'
// memory does not.
type node struct {
	world  *world
	id     int
	clock  clock
	disk   disk
	voter  voter
	leader *leader // nil unless it believes that it leads
	holder holder
}

func (n *node) now() instant { return n.clock.at(n.world.tick) }

func (n *node) send(to int, b any) {
	if to != n.id {
		n.world.wire = append(n.world.wire, message{n.id, to, b})
	}
}

func (n *node) sendAll(b any) {
	for to := range n.world.nodes {
		n.send(to, b)
	}
}

// restart ends the process and starts the next: the disk is as it was and every
// role's memory is empty.
func (n *node) restart() {
	n.tell("restarts")
	n.voter = voter{started: n.now()}
	if n.world.mutant == restartedAnswersNever {
		n.voter.started = 0
	}
	n.leader = nil
	life := n.holder.life + 1
	if n.world.mutant == gateSurvivesRestart {
		n.holder.life = life
		return
	}
	n.holder = holder{life: life}
}

// world is all there is: the nodes, the messages under way, and real time, which
// no rule may read.
type world struct {
	mutant    mutant
	tick      int64
	nodes     []*node
	wire      []message
	committed []entry // what any leader ever saw committed
	newest    int     // the newest epoch that was ever answered under
	violation string
	reached   reached
	tracing   bool
	trace     []string
}

// reached counts what a walk came to, so that a test can say that it did not
// pass for want of trying.
type reached struct {
	takeovers int // leaders that a majority gave evidence
	voters    int // committed changes of voters
	closed    int // sessions closed because they ran out
	named     int // namings after the first
	handed    int // namings for which the former holder gave a release
	opened    int // gates opened under another epoch than before
	answers   int // replies to calls
}

// newWorld is a mesh of which node 0 leads in term 1, with an open session of
// every node and the seat named to holder. No renewal was served yet.
func newWorld(m mutant, voters, nodes, holder int) *world {
	w := &world{mutant: m}
	log := []entry{{term: 1, kind: barrier}, {term: 1, kind: setVoters, voters: setOf(voters) - 1}}
	for id := range nodes {
		log = append(log, entry{term: 1, kind: openSession, node: id, life: 1})
	}
	log = append(log, entry{term: 1, kind: nameHolder, next: 3 + holder})
	for id := range nodes {
		n := &node{world: w, id: id, clock: clock{int64(id+10) * ttl, rate}, holder: holderOf(1)}
		n.disk = disk{term: 1}
		n.disk.setLog(log)
		n.voter.commitTo(n, len(log))
		w.nodes = append(w.nodes, n)
	}
	w.nodes[0].leader = &leader{term: 1, barrier: 1}
	l := w.nodes[0].leader
	l.settled, l.base = true, w.nodes[0].now()+wait
	for id := range nodes {
		l.match[id] = len(log)
	}
	w.reached = reached{}
	return w
}

// message is under way from one node to another. Its body says what it is.
type message struct {
	from, to int
	body     any
}

// The messages of raft. sent is the leader's clock when it sent the append;
// the acknowledgement brings it back.
type (
	requestVote struct{ term, lastTerm, lastIndex int }
	vote        struct{ term int }
	heartbeat   struct {
		term int
		sent instant
	}
	appendLog struct {
		term, commit int
		sent         instant
		log          []entry
	}
	appended struct {
		term, match int
		sent        instant
	}
)

// The messages of the lease. A renewal's sent is the holder's clock; age is
// how long ago, by the voter's clock, it last heard of an earlier leader.
type (
	askEvidence struct{ term int }
	evidence    struct {
		term int
		age  instant
	}
	renew struct {
		life, request, released int
		sent                    instant
	}
	renewed struct {
		life, request, epoch int // epoch 0: the seat is not granted
		sent                 instant
	}
	askRelease struct{ epoch int }
	released   struct{ epoch int }
)

// deliver takes the message at i off the wire and gives it to its receiver.
func (w *world) deliver(i int) {
	m := w.take(i)
	if w.tracing {
		w.note("n%d -> n%d: %s", m.from, m.to, describe(m.body))
	}
	n := w.nodes[m.to]
	switch b := m.body.(type) {
	case requestVote:
		n.onRequestVote(m.from, b)
	case vote:
		n.onVote(m.from, b)
	case heartbeat:
		n.onHeartbeat(m.from, b)
	case appendLog:
		n.onAppendLog(m.from, b)
	case appended:
		n.onAppended(m.from, b)
	case askEvidence:
		n.onAskEvidence(m.from, b)
	case evidence:
		n.onEvidence(m.from, b)
	case renew:
		n.onRenew(m.from, b)
	case renewed:
		n.onRenewed(b)
	case askRelease:
		n.onAskRelease(m.from, b)
	case released:
		n.onReleased(b)
	}
}

// take removes the message at i; the order of the others stays.
func (w *world) take(i int) message {
	m := w.wire[i]
	w.wire = append(w.wire[:i], w.wire[i+1:]...)
	return m
}

func describe(body any) string {
	if b, ok := body.(appendLog); ok {
		return fmt.Sprintf("appendLog{term:%d commit:%d sent:%d} %s", b.term, b.commit, b.sent, logTail(b.log))
	}
	return fmt.Sprintf("%T%+v", body, body)[len("lease_test."):]
}

func (w *world) note(format string, args ...any) {
	w.trace = append(w.trace, fmt.Sprintf("%5d  ", w.tick)+fmt.Sprintf(format, args...))
}

// tell notes what a node did.
func (n *node) tell(format string, args ...any) {
	if n.world.tracing {
		n.world.note("n%d %s", n.id, fmt.Sprintf(format, args...))
	}
}

// violate records the first thing that must never be.
func (w *world) violate(format string, args ...any) {
	if w.violation == "" {
		w.violation = fmt.Sprintf(format, args...)
		if w.tracing {
			w.note("VIOLATION: %s", w.violation)
		}
	}
}

// check is what must hold at every instant: at most one node answers for the
// seat, under an epoch no older than any that was answered under, and with a
// grant of this life of its process. Answering ends by time and begins only with
// an event, so that it is enough to look after each.
func (w *world) check() {
	answering := nobody
	for _, n := range w.nodes {
		epoch := n.holder.answering(n.now())
		if epoch == 0 {
			continue
		}
		if answering != nobody {
			w.violate("n%d and n%d answer for the seat at once", answering, n.id)
		}
		answering = n.id
		if n.holder.grant.epoch == epoch && n.holder.grant.life != n.holder.life {
			w.violate("n%d answers under a grant of an earlier life of its process", n.id)
		}
		if epoch < w.newest {
			w.violate("n%d answers under epoch %d after epoch %d was", n.id, epoch, w.newest)
		}
		if epoch > w.newest {
			w.newest = epoch
			w.reached.opened++
			n.tell("is the first to answer under epoch %d, until its clock shows %d", epoch, n.holder.until)
		}
	}
}

// checkNamed is asked when a naming is committed: from then on the one who is
// named may open its gate at any instant, so that everybody's has to be shut.
// Most mistakes show here long before two gates are seen open.
func (w *world) checkNamed(epoch int) {
	for _, n := range w.nodes {
		if under := n.holder.answering(n.now()); under != 0 {
			w.violate("n%d answers under epoch %d when epoch %d is named", n.id, under, epoch)
		}
	}
}
