package lease_test

import (
	"fmt"
	"strings"
)

// nobody is no node.
const nobody = -1

type entryKind int

const (
	barrier      entryKind = iota // a leader's first entry: once committed, it knows what is
	setVoters                     // a configuration, in force from when it is in a log
	openSession                   // a life of a node's process; closes its earlier lives
	closeSession                  // a session that ran out; the seat goes to next, if that is open
	nameHolder                    // the seat is next's, if the newest epoch is still epoch
	takeSeat                      // a user's push takes the seat from its holder
)

// entry is one of the log. Its index, from 1, is the id of the session that it
// opens and the epoch that it names.
type entry struct {
	term       int
	kind       entryKind
	voters     nodeSet // setVoters
	node, life int     // openSession
	session    int     // closeSession
	next       int     // session named: closeSession, nameHolder
	epoch      int     // nameHolder: the epoch that it follows
}

func (e entry) String() string {
	switch e.kind {
	case setVoters:
		return "voters" + e.voters.String()
	case openSession:
		return fmt.Sprintf("open n%d life %d", e.node, e.life)
	case closeSession:
		return fmt.Sprintf("close session %d, seat to %d", e.session, e.next)
	case nameHolder:
		return fmt.Sprintf("name session %d after epoch %d", e.next, e.epoch)
	case takeSeat:
		return "take the seat"
	}
	return "barrier"
}

// logTail is a log of which the end is shown.
type logTail []entry

func (log logTail) String() string {
	var parts []string
	for i := max(0, len(log)-3); i < len(log); i++ {
		parts = append(parts, fmt.Sprintf("%d/%d %s", i+1, log[i].term, log[i]))
	}
	return "[.. " + strings.Join(parts, "; ") + "]"
}

// disk is what a voter has fsynced. Logs are shared between nodes and never
// changed in place.
type disk struct {
	term        int
	votedFor    int // in term
	log         []entry
	voters      nodeSet // of the newest configuration in log
	votersIndex int
}

func (d *disk) setLog(log []entry) {
	d.log = log
	for i := len(log); i > 0; i-- {
		if log[i-1].kind == setVoters {
			d.voters, d.votersIndex = log[i-1].voters, i
			return
		}
	}
}

func (d *disk) last() (term, index int) {
	if len(d.log) == 0 {
		return 0, 0
	}
	return d.log[len(d.log)-1].term, len(d.log)
}

// voter is a node's memory as one that votes, appends and gives evidence. Nodes
// that do not vote keep the log too; nobody counts them.
type voter struct {
	started instant // of the process
	heard   heard
	commit  int
	state   state   // of the log up to commit
	votes   nodeSet // for itself in the disk's term; empty when it is no candidate
}

// heard is the newest instant at which a node took part in a term's leadership:
// it took an append of the leader, or it was itself elected, or confirmed a
// renewal that had arrived then. Two instants are enough, since only the newest
// term's leader asks, and about the terms before it.
type heard struct {
	term   int
	at     instant // in term
	before instant // in any earlier term
}

func (h *heard) note(term int, at instant) {
	switch {
	case term > h.term:
		*h = heard{term, at, max(h.before, h.at)}
	case term == h.term:
		h.at = max(h.at, at)
	}
}

// of is the newest instant of any term before term.
func (h *heard) of(term int) instant {
	if h.term < term {
		return max(h.before, h.at)
	}
	return h.before
}

// evidenceFor is when the node last may have helped a leader before term. A
// process that has started since answers with its start, which is later than
// anything that it forgot.
func (v *voter) evidenceFor(term int) instant { return max(v.heard.of(term), v.started) }

// observe takes over a newer term, in which the node follows, and says whether
// the term is not an old one.
func (n *node) observe(term int) bool {
	if term > n.disk.term {
		n.disk.term, n.disk.votedFor = term, nobody
		n.voter.votes = 0
		n.leader = nil
	}
	return term == n.disk.term
}

// stand begins an election. Any voter may stand at any time: that raft waits for
// a timeout first makes elections rarer, not safer.
func (n *node) stand() {
	if n.leader != nil || !n.disk.voters.has(n.id) {
		return
	}
	n.disk.term++
	n.disk.votedFor = n.id
	n.voter.votes = setOf(n.id)
	lastTerm, lastIndex := n.disk.last()
	n.tell("stands in term %d", n.disk.term)
	n.sendAll(requestVote{n.disk.term, lastTerm, lastIndex})
	n.countVotes()
}

func (n *node) onRequestVote(from int, b requestVote) {
	if !n.observe(b.term) || n.disk.votedFor != nobody && n.disk.votedFor != from {
		return
	}
	lastTerm, lastIndex := n.disk.last()
	if b.lastTerm < lastTerm || b.lastTerm == lastTerm && b.lastIndex < lastIndex {
		return
	}
	n.disk.votedFor = from
	n.send(from, vote{b.term})
}

func (n *node) onVote(from int, b vote) {
	if b.term == n.disk.term && n.voter.votes != 0 {
		n.voter.votes |= setOf(from)
		n.countVotes()
	}
}

func (n *node) countVotes() {
	if n.voter.votes.majorityOf(n.disk.voters) {
		n.voter.votes = 0
		n.lead()
	}
}

// append puts an entry at the end of a leader's log and returns its index.
func (n *node) append(e entry) int {
	e.term = n.leader.term
	log := n.disk.log
	n.disk.setLog(append(log[:len(log):len(log)], e))
	n.leader.match[n.id] = len(n.disk.log)
	n.tell("appends %s", logTail(n.disk.log))
	n.replicate()
	n.countMatches()
	return len(log) + 1
}

// replicate sends the whole log; the receiver keeps what it has of it.
func (n *node) replicate() {
	n.sendAll(appendLog{n.disk.term, n.voter.commit, n.now(), n.disk.log})
}

func (n *node) onHeartbeat(from int, b heartbeat) {
	if n.observe(b.term) {
		n.voter.votes = 0
		n.voter.heard.note(b.term, n.now())
		n.send(from, appended{b.term, 0, b.sent})
	}
}

func (n *node) onAppendLog(from int, b appendLog) {
	if !n.observe(b.term) {
		return
	}
	n.voter.votes = 0
	n.voter.heard.note(b.term, n.now())
	n.takeLog(b.log)
	n.voter.commitTo(n, min(b.commit, len(b.log)))
	n.send(from, appended{b.term, len(b.log), b.sent})
}

// takeLog makes the log contain the leader's. Two logs that have an entry of one
// term at one index are equal up to it.
func (n *node) takeLog(log []entry) {
	mine := n.disk.log
	if shared := min(len(mine), len(log)); shared == 0 || mine[shared-1].term == log[shared-1].term {
		if len(log) > len(mine) {
			n.disk.setLog(log)
		}
		return
	}
	if c := n.voter.commit; c > len(log) || c > 0 && log[c-1].term != mine[c-1].term {
		n.world.violate("n%d would drop a committed entry: the model's raft is wrong", n.id)
		return
	}
	n.disk.setLog(log)
}

// countMatches commits what a majority of the newest configuration has, if an
// entry of this term is among it.
func (n *node) countMatches() {
	l := n.leader
	for index := len(n.disk.log); index > n.voter.commit && n.disk.log[index-1].term == l.term; index-- {
		var have nodeSet
		for id, match := range l.match {
			if match >= index {
				have |= setOf(id)
			}
		}
		if !have.majorityOf(n.disk.voters) {
			continue
		}
		n.voter.commitTo(n, index)
		if l.barrier <= index && n.disk.votersIndex <= index && !n.disk.voters.has(n.id) {
			n.tell("steps down: it is no voter any more")
			n.leader = nil
		}
		return
	}
}

// commitTo applies the log up to index.
func (v *voter) commitTo(n *node, index int) {
	for ; v.commit < min(index, len(n.disk.log)); v.commit++ {
		e := n.disk.log[v.commit]
		w := n.world
		if v.commit < len(w.committed) {
			if w.committed[v.commit] != e {
				w.violate("n%d commits another entry %d: the model's raft is wrong", n.id, v.commit+1)
			}
		} else {
			w.committed = append(w.committed, e)
			w.count(n, v.state, e)
		}
		v.state.apply(v.commit+1, e)
	}
}

// count notes what a newly committed entry means for the walk.
func (w *world) count(n *node, before state, e entry) {
	switch after := before; e.kind {
	case setVoters:
		w.reached.voters++
	case closeSession:
		w.reached.closed++
		fallthrough
	case nameHolder:
		if after.apply(len(w.committed), e); after.epoch != before.epoch {
			w.reached.named++
			w.checkNamed(after.epoch)
			if l := n.leader; l != nil && l.released != 0 && l.released == before.epoch {
				w.reached.handed++
			}
		}
	}
	n.tell("is the first to see %d committed: %s", len(w.committed), e)
}

// changeVoters adds the node to the voters or removes it from them. One change
// at a time: the one before, and the leader's barrier, are committed.
func (n *node) changeVoters(id int) {
	changed := n.disk.voters ^ setOf(id)
	if n.leader == nil || n.voter.commit < max(n.disk.votersIndex, n.leader.barrier) || changed == 0 {
		return
	}
	n.append(entry{kind: setVoters, voters: changed})
}
