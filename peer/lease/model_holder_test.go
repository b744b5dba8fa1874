package lease_test

// state is what the log says of sessions and of the seat.
type state struct {
	sessions [maxNodes]session
	holder   claim // whom the log names
	former   claim // whom a push took the seat from, until that is known to be over
	epoch    int   // the newest that was named
}

type session struct{ id, life int } // id 0: none is open

// claim is a session that may answer for the seat. Session 0 is none.
type claim struct{ session, epoch int }

// claim is the one that may still be acted on.
func (s *state) claim() claim {
	if s.holder.session != 0 {
		return s.holder
	}
	return s.former
}

// nodeOf is the node of an open session.
func (s *state) nodeOf(id int) int {
	for n, s := range s.sessions {
		if s.id == id {
			return n
		}
	}
	return nobody
}

func (s *state) apply(index int, e entry) {
	switch e.kind {
	case openSession:
		// A newer life proves the older ended: only one process of a node runs.
		now := s.sessions[e.node]
		if e.life > now.life || now.id == 0 && e.life == now.life {
			s.close(now.id)
			s.sessions[e.node] = session{index, e.life}
		}
	case closeSession:
		id := s.nodeOf(e.session)
		if e.session == 0 || id == nobody {
			return
		}
		held := s.holder.session == e.session
		s.close(e.session)
		s.sessions[id].id = 0
		if held && s.open(e.next) {
			s.nameTo(e.next, index)
		}
	case nameHolder:
		if s.open(e.next) && e.epoch == s.epoch {
			s.nameTo(e.next, index)
		}
	case takeSeat:
		if s.holder.session != 0 {
			s.former, s.holder = s.holder, claim{}
		}
	}
}

func (s *state) open(id int) bool { return id != 0 && s.nodeOf(id) != nobody }

func (s *state) nameTo(id, epoch int) {
	s.holder, s.former, s.epoch = claim{id, epoch}, claim{}, epoch
}

// close ends what a session claims: it is proved that nobody answers under it.
func (s *state) close(id int) {
	if id == 0 {
		return
	}
	if s.holder.session == id {
		s.holder = claim{}
	}
	if s.former.session == id {
		s.former = claim{}
	}
}

// holder is a node's memory as one that may answer for the seat.
type holder struct {
	life    int // of the process; the node's disk counts them
	request int // number of the newest renewal
	taken   int // number of the newest renewal of which the reply was taken
	until   instant
	grant   grant
	shut    int // the newest epoch that it was asked to release; never entered again
	asker   int // who asked; nobody when it was told
	calls   int // that entered under the grant and have not left
	out     leaving
}

type grant struct{ epoch, life int }

// leaving are the calls that entered under a grant which is being released. They may
// leave until the last lease that listed it ends, whatever lease comes after it.
type leaving struct {
	grant
	calls int
	until instant
}

func holderOf(life int) holder { return holder{life: life, asker: nobody} }

// open says whether a call may enter.
func (h *holder) open(now instant) bool { return h.grant.epoch != 0 && now < h.until }

// answering is the epoch under which a reply may leave, of a call that is in or that
// could enter; 0 for none.
func (h *holder) answering(now instant) int {
	switch {
	case h.open(now):
		return h.grant.epoch
	case h.out.calls > 0 && now < h.out.until:
		return h.out.epoch
	}
	return 0
}

// sendRenew asks to a node that may lead. The lease will count from now.
func (n *node) sendRenew(to int) {
	h := &n.holder
	h.request++
	b := renew{life: h.life, request: h.request, sent: n.now()}
	if h.out.calls == 0 {
		b.released = h.shut
	}
	if to == n.id {
		n.onRenew(n.id, b)
	}
	n.send(to, b)
}

// onRenewed takes a reply to a request of this life, unless a newer request's was
// taken: what an older reply grants may be withdrawn by now, and the lease that
// covered it may have been over before the newer began.
func (n *node) onRenewed(b renewed) {
	h := &n.holder
	if b.life != h.life || b.request <= h.taken && n.world.mutant != oldReplyTaken {
		return
	}
	h.taken = max(h.taken, b.request)
	h.until = max(h.until, b.sent+ttl)
	if n.world.mutant == waysOutAreRenewed {
		h.out.until = h.until
	}
	if b.epoch <= h.shut && n.world.mutant != lateReplyReopens {
		b.epoch = 0
	}
	if b.epoch != h.grant.epoch {
		h.grant, h.calls = grant{b.epoch, h.life}, 0
	}
}

// onAskRelease shuts the gate for good: calls that are in may leave, and then
// the leader is told.
func (n *node) onAskRelease(from int, b askRelease) {
	h := &n.holder
	h.shut, h.asker = max(h.shut, b.epoch), from
	if h.grant.epoch != 0 && h.grant.epoch <= h.shut {
		h.out = leaving{h.grant, h.calls, h.until}
		h.grant, h.calls = grant{}, 0
	}
	n.acknowledge()
}

// acknowledge tells who asked that nothing leaves any more.
func (n *node) acknowledge() {
	h := &n.holder
	if h.asker == nobody || h.out.calls > 0 && n.world.mutant != releaseBeforeCallsLeave {
		return
	}
	to := h.asker
	h.asker = nobody
	if to == n.id && n.leader != nil {
		n.onReleased(released{h.shut})
	}
	n.send(to, released{h.shut})
}

// enter lets a call in.
func (n *node) enter() {
	if n.holder.open(n.now()) {
		n.holder.calls++
	}
}

// leave lets the reply of a call out, or drops it when the lease is over.
func (n *node) leave() {
	h := &n.holder
	if h.answering(n.now()) != 0 {
		n.world.reached.answers++
	}
	switch {
	case h.out.calls > 0:
		h.out.calls--
	case h.calls > 0:
		h.calls--
	}
	n.acknowledge()
}
