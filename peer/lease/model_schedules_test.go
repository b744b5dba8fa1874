package lease_test

// script is a world in which a test says what happens next: node 0 leads three
// voters, nodes 3 and 4 do not vote, and node 3 holds the seat.
type script struct{ *world }

func follow(m mutant, schedule func(*script)) *script {
	s := &script{newWorld(m, 3, 5, 3)}
	s.tracing = true
	schedule(s)
	return s
}

// pass lets time pass.
func (s *script) pass(ticks int64) { s.tick += ticks }

// among delivers what is under way among the nodes, and what they answer, in
// order. Everything else stays under way.
func (s *script) among(ids ...int) {
	var set nodeSet
	for _, id := range ids {
		set |= setOf(id)
	}
	for i := 0; i < len(s.wire); {
		if m := s.wire[i]; !set.has(m.from) || !set.has(m.to) {
			i++
			continue
		}
		s.deliver(i)
		s.check()
		i = 0
	}
}

// first delivers the first message of a type that is under way from a node to
// another. It says whether there is one, since under the rules as they are there
// may be none.
func first[T any](s *script, from, to int) bool {
	for i, m := range s.wire {
		if _, ok := m.body.(T); ok && m.from == from && m.to == to {
			s.deliver(i)
			s.check()
			return true
		}
	}
	return false
}

// hold keeps what is under way from a node to another back.
func (s *script) hold(from, to int) (held []message) {
	for i := 0; i < len(s.wire); {
		if m := s.wire[i]; m.from == from && m.to == to {
			held = append(held, s.take(i))
			continue
		}
		i++
	}
	return held
}

// ask sends node 3's renewal to a leader.
func (s *script) ask(leader int) {
	s.nodes[3].sendRenew(leader)
	first[renew](s, 3, leader)
}

// renewByNode1 renews node 3's lease with node 0, by an acknowledgement of node 1. Node
// 2 hears nothing.
func (s *script) renewByNode1() {
	s.ask(0)
	first[heartbeat](s, 0, 1)
	first[appended](s, 1, 0)
	s.nodes[0].confirm()
	first[renewed](s, 0, 3)
	s.wire = nil
}

// electAndMove makes node 2 leader with the help of another, and lets it try at once
// to give node 3's seat to node 4.
func (s *script) electAndMove(other int) {
	s.nodes[2].stand()
	s.among(2, other)
	s.pass(1)
	s.nodes[2].closeExpired(3, 4)
	s.among(2, other)
}

// takeOver: node 1 knows of the renewal, and tells the new leader.
func takeOver(s *script) {
	s.renewByNode1()
	s.electAndMove(1)
}

// ownVote: the old leader votes for the new one. Of the renewal know only node 0,
// which confirmed it and takes no appends, and node 1, which is gone.
func ownVote(s *script) {
	s.renewByNode1()
	s.electAndMove(0)
}

// restartedVoter: the one that acknowledged has forgotten it.
func restartedVoter(s *script) {
	s.renewByNode1()
	s.nodes[1].restart()
	s.electAndMove(1)
}

// ownElection: node 2 hears of no earlier leader, and of no renewal, ever. It is
// elected by node 1, which does know, removes the others from the voters, and is
// elected again by itself alone.
func ownElection(s *script) {
	s.renewByNode1()
	s.nodes[2].stand()
	s.among(1, 2)
	s.nodes[2].changeVoters(0)
	s.among(1, 2)
	s.nodes[2].changeVoters(1)
	s.wire = nil
	s.nodes[1].stand()
	first[requestVote](s, 1, 2)
	s.electAndMove(1)
}

// deposed lets node 2 lead with node 1 while node 0 does not know, wait until
// every lease is over, and decide to move the seat; only the commit is missing.
func (s *script) deposed() {
	s.nodes[2].stand()
	s.among(1, 2)
	s.pass(2 * wait / rate)
	s.nodes[2].closeExpired(3, 4)
}

// ackOfBefore: node 1's acknowledgement of an append that was sent before the
// renewal comes after it.
func ackOfBefore(s *script) {
	s.nodes[0].sendHeartbeats()
	first[heartbeat](s, 0, 1)
	s.deposed()
	s.ask(0)
	first[appended](s, 1, 0)
	s.nodes[0].confirm()
	first[renewed](s, 0, 3)
	s.among(1, 2)
}

// ackOfNonVoters: nodes 3 and 4 acknowledge, and with node 0 are as many as a
// majority of three.
func ackOfNonVoters(s *script) {
	s.deposed()
	s.ask(0)
	s.among(0, 4)
	s.among(0, 3)
	s.nodes[0].confirm()
	first[renewed](s, 0, 3)
	s.among(1, 2)
}

// beforeBarrier: the seat has moved to node 4, which answers. The new leader has
// the entry, and does not know that it is committed.
func beforeBarrier(s *script) {
	s.pass(2 * wait / rate)
	s.nodes[0].closeExpired(3, 4)
	s.among(0, 1)
	s.nodes[4].sendRenew(0)
	first[renew](s, 4, 0)
	s.among(0, 1)
	s.nodes[0].confirm()
	first[renewed](s, 0, 4)
	s.wire = nil
	s.nodes[1].stand()
	first[requestVote](s, 1, 2)
	first[vote](s, 2, 1)
	first[askEvidence](s, 1, 2)
	first[evidence](s, 2, 1)
	s.ask(1)
	first[heartbeat](s, 1, 2)
	first[appended](s, 2, 1)
	s.nodes[1].confirm()
	first[renewed](s, 1, 3)
}

// whileRevoking: node 3 renews after the leader decided to close its session,
// and before the decision is committed.
func whileRevoking(s *script) {
	s.pass(2 * wait / rate)
	s.nodes[0].closeExpired(3, 4)
	s.ask(0)
	first[heartbeat](s, 0, 1)
	held := s.hold(0, 1)
	first[appended](s, 1, 0)
	s.nodes[0].confirm()
	first[renewed](s, 0, 3)
	s.wire = append(s.wire, held...)
	s.among(0, 1)
}

// drift: the holder's clock is as slow as it may be and the leader's as fast.
func drift(s *script) {
	s.nodes[0].clock.rate, s.nodes[3].clock.rate = rate+rho, rate-rho
	s.nodes[0].leader.base = 0
	s.renewByNode1()
	for !s.nodes[0].closeExpired(3, 4) {
		s.pass(1)
	}
	s.among(0, 1)
}

// lateReply: a reply that grants the seat comes after the seat was released.
func lateReply(s *script) {
	s.renewByNode1()
	s.ask(0)
	s.among(0, 1)
	s.nodes[0].confirm()
	late := s.hold(0, 3)
	s.nodes[0].withdraw()
	s.among(0, 3)
	s.nodes[0].name(4)
	s.wire = append(s.wire, late...)
	first[renewed](s, 0, 3)
	s.among(0, 1)
}

// oldReply: a reply that grants the seat comes after newer ones, which do not,
// and when the lease that they renewed is longer than the one of its own request.
func oldReply(s *script) {
	s.ask(0)
	s.among(0, 1)
	s.nodes[0].confirm()
	late := s.hold(0, 3)
	s.nodes[0].take()
	s.among(0, 1)
	s.pass(2 * wait / rate)
	s.nodes[0].name(4)
	held := s.hold(0, 1)
	s.ask(0)
	s.among(0, 1)
	s.nodes[0].confirm()
	first[renewed](s, 0, 3)
	s.wire = append(s.wire, late...)
	first[renewed](s, 0, 3)
	s.wire = append(s.wire, held...)
	s.among(0, 1)
}
