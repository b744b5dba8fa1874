package lease_test

// leader is a node's memory as the leader of one term.
type leader struct {
	term     int
	barrier  int               // index of its own barrier
	match    [maxNodes]int     // how much of the log each node has
	acked    [maxNodes]instant // when the newest append that each acknowledged was sent
	received [maxNodes]instant // when its newest acknowledgement came, which proves nothing
	ledger
}

// ledger is what a leader knows of leases. It begins empty in every term, and
// is never in the log.
type ledger struct {
	elected  instant
	evidence nodeSet // who answered
	newest   instant // what they told, on this node's clock
	settled  bool    // base is known
	base     instant // every lease of an earlier term has run out then

	expires   [maxNodes]deadline // of a node's session
	revoking  [maxNodes]int      // the session that is being closed, for the rest of the term
	listed    deadline           // of the newest epoch that was granted
	withdrawn int                // the epoch that is handed over, and not granted any more
	released  int                // the epoch of which the holder said that its gate is shut
	pending   []renewal          // not proved yet
	proposed  int                // index of the last entry of the lease's own
}

// deadline is until when something may be relied on by its holder, as far as
// this term knows.
type deadline struct {
	of int // session or epoch
	at instant
}

// renewal is a request that waits for its proof.
type renewal struct {
	from, session int
	arrived       instant
	renew
}

// lead begins a term of leadership.
func (n *node) lead() {
	now := n.now()
	l := &leader{term: n.disk.term}
	l.elected = now
	l.newest = n.voter.evidenceFor(l.term)
	if n.disk.voters.has(n.id) {
		l.evidence = setOf(n.id)
	}
	n.leader = l
	n.tell("leads in term %d", l.term)
	if n.world.mutant != noElectionAsEvidence {
		n.voter.heard.note(l.term, now)
	}
	l.barrier = len(n.disk.log) + 1
	n.append(entry{kind: barrier})
	if n.leader == l {
		n.sendAll(askEvidence{l.term})
		n.countEvidence()
	}
}

func (n *node) sendHeartbeats() {
	if n.leader != nil {
		n.sendAll(heartbeat{n.leader.term, n.now()})
	}
}

func (n *node) onAppended(from int, b appended) {
	l := n.leader
	if l == nil || l.term != b.term {
		return
	}
	l.acked[from] = max(l.acked[from], b.sent)
	l.received[from] = n.now()
	l.match[from] = max(l.match[from], b.match)
	n.countMatches()
}

// onAskEvidence: from here on this node takes no append of an earlier term, so
// that its answer stays true.
func (n *node) onAskEvidence(from int, b askEvidence) {
	if n.observe(b.term) {
		n.send(from, evidence{b.term, n.now() - n.voter.evidenceFor(b.term)})
	}
}

func (n *node) onEvidence(from int, b evidence) {
	l := n.leader
	if l == nil || l.term != b.term || l.settled {
		return
	}
	l.evidence |= setOf(from)
	l.newest = max(l.newest, n.now()-b.age)
	n.countEvidence()
}

// countEvidence settles how long to wait for leases of earlier terms. Whoever
// proved a renewal had an append taken by a majority of voters after the renewal
// arrived, and a majority tells now when that last was.
func (n *node) countEvidence() {
	l := n.leader
	if l.evidence.majorityOf(n.disk.voters) || n.world.mutant == evidenceOfAMinority {
		n.world.reached.takeovers++
		n.settle(l.newest)
	}
}

// giveUpEvidence waits from the election instead: no earlier leader can have
// proved anything since.
func (n *node) giveUpEvidence() {
	if n.leader != nil && !n.leader.settled {
		n.settle(n.leader.elected)
	}
}

func (n *node) settle(newest instant) {
	l := n.leader
	l.settled, l.base = true, min(newest, l.elected)+n.wait()
	if n.world.mutant == newLeaderDoesNotWait {
		l.base = n.now()
	}
	n.tell("knows that earlier leases end by %d of its clock", l.base)
}

// wait is how long a leader's clock has to run for a lease to be over on any
// holder's clock.
func (n *node) wait() instant {
	if n.world.mutant == waitWithoutDrift {
		return ttl + guard
	}
	return wait
}

// serving says whether this leader may renew and decide: its barrier is
// committed, so that it knows every decision of those before it, and it knows
// how long their leases last.
func (n *node) serving() bool {
	return n.leader != nil && n.leader.settled && n.voter.commit >= n.leader.barrier
}

func (n *node) renewing() bool {
	return n.serving() || n.world.mutant == renewalsBeforeBarrier && n.leader != nil && n.leader.settled
}

// onRenew enters a renewal. The session's deadline moves before anything is
// promised.
func (n *node) onRenew(from int, b renew) {
	if !n.renewing() {
		return
	}
	s := n.voter.state.sessions[from]
	if s.id == 0 || s.life < b.life {
		n.openSession(from, b.life)
		return
	}
	if s.life > b.life || n.refused(from, s.id) {
		return
	}
	l := n.leader
	// The holder says again what it released, in case that nobody acted on it.
	if c := n.voter.state.claim(); c.session == s.id && b.released == c.epoch {
		l.withdrawn, l.released = c.epoch, c.epoch
	}
	arrived := n.now()
	l.expires[from] = deadline{s.id, max(n.expiry(from), arrived+n.wait())}
	l.pending = append(l.pending, renewal{from, s.id, arrived, b})
	n.sendHeartbeats()
}

// refused says whether the session is being closed.
func (n *node) refused(id, session int) bool {
	return n.leader.revoking[id] == session && n.world.mutant != renewalsWhileRevoking
}

// proved says whether a majority of the voters of the newest configuration took
// an append that was sent at since or later. Any leader of a later term is then
// elected after since.
func (n *node) proved(since instant) bool {
	l := n.leader
	have := setOf(n.id)
	for id := range l.acked {
		at := l.acked[id]
		if n.world.mutant == acksByReceipt {
			at = l.received[id]
		}
		if at >= since {
			have |= setOf(id)
		}
	}
	if n.world.mutant == acksOfNonVoters {
		return 2*have.count() > n.disk.voters.count()
	}
	return have.majorityOf(n.disk.voters)
}

// confirm answers the renewals that are proved.
func (n *node) confirm() {
	if !n.renewing() {
		return
	}
	l := n.leader
	kept := l.pending[:0]
	for _, r := range l.pending {
		if !n.proved(r.arrived) {
			kept = append(kept, r)
		} else if n.voter.state.sessions[r.from].id == r.session && !n.refused(r.from, r.session) {
			n.grant(r)
		}
	}
	l.pending = kept
}

// grant answers a proved renewal with the seat, if the session holds it and it
// is not being handed over.
func (n *node) grant(r renewal) {
	l, c := n.leader, n.voter.state.holder
	if n.world.mutant != noOwnVoteAsEvidence {
		n.voter.heard.note(l.term, r.arrived)
	}
	epoch := 0
	if c.session == r.session && l.withdrawn != c.epoch {
		epoch = c.epoch
		l.listed = deadline{epoch, max(n.listedUntil(epoch), r.arrived+n.wait())}
	}
	if n.world.tracing {
		n.tell("confirms request %d of n%d: epoch %d", r.request, r.from, epoch)
	}
	b := renewed{r.life, r.request, epoch, r.sent}
	if r.from == n.id {
		n.onRenewed(b)
	}
	n.send(r.from, b)
}

// expiry is when the lease of a node's session is over.
func (n *node) expiry(id int) instant {
	if e := n.leader.expires[id]; e.of == n.voter.state.sessions[id].id {
		return max(e.at, n.leader.base)
	}
	return n.leader.base
}

// listedUntil is when the last renewal that granted epoch has run out.
func (n *node) listedUntil(epoch int) instant {
	if l := n.leader.listed; l.of == epoch {
		return max(l.at, n.leader.base)
	}
	return n.leader.base
}

// propose appends an entry of the lease's own, one at a time.
func (n *node) propose(e entry) bool {
	l := n.leader
	if l.proposed > n.voter.commit {
		return false
	}
	l.proposed = n.append(e)
	return true
}

func (n *node) openSession(id, life int) {
	if l := n.leader; n.propose(entry{kind: openSession, node: id, life: life}) {
		l.expires[id] = deadline{l.proposed, n.now() + n.wait()}
	}
}

// closeExpired closes the session of a node that has not renewed it, and gives
// the seat, if that was the node's, to next. It says whether it did.
func (n *node) closeExpired(id, next int) bool {
	s := n.voter.state.sessions[id].id
	if !n.serving() || s == 0 || n.leader.revoking[id] == s || n.now() <= n.expiry(id) {
		return false
	}
	l := n.leader
	if !n.propose(entry{kind: closeSession, session: s, next: n.voter.state.sessions[next].id}) {
		return false
	}
	l.revoking[id] = s
	return true
}

// withdraw begins a handover: the seat is granted no more, and the holder is
// asked to shut its gate.
func (n *node) withdraw() {
	if c := n.voter.state.holder; n.serving() && c.session != 0 {
		n.leader.withdrawn = c.epoch
		n.askRelease()
	}
}

// askRelease asks the holder of a seat that is withdrawn, here or by the log.
func (n *node) askRelease() {
	if !n.serving() {
		return
	}
	c := n.voter.state.claim()
	if c.session == 0 || !n.withdrawn(c) {
		return
	}
	holder := n.voter.state.nodeOf(c.session)
	if holder == n.id {
		n.onAskRelease(n.id, askRelease{c.epoch})
	}
	n.send(holder, askRelease{c.epoch})
}

func (n *node) withdrawn(c claim) bool {
	return n.leader.withdrawn == c.epoch || n.voter.state.former == c
}

func (n *node) onReleased(b released) {
	if n.leader != nil {
		n.leader.released = max(n.leader.released, b.epoch)
	}
}

// name gives the seat to the node's session, once nobody can answer for it any
// more: there is no claim, or its holder said that its gate is shut, or the last
// renewal that granted it has run out.
func (n *node) name(id int) {
	s := &n.voter.state
	next := s.sessions[id].id
	if !n.serving() || next == 0 {
		return
	}
	if c := s.claim(); c.session != 0 && !n.ended(c) {
		return
	}
	n.propose(entry{kind: nameHolder, next: next, epoch: s.epoch})
}

func (n *node) ended(c claim) bool {
	if !n.withdrawn(c) {
		return false
	}
	taken := n.voter.state.former == c
	if n.world.mutant == handoverWithoutRelease && !taken || n.world.mutant == vacatedSeatNamedAtOnce && taken {
		return true
	}
	return n.leader.released == c.epoch || n.now() > n.listedUntil(c.epoch)
}

// take is a user's push, of which the lease knows nothing until it is committed.
func (n *node) take() {
	if n.leader != nil {
		n.append(entry{kind: takeSeat})
	}
}
