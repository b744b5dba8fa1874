package peer

import (
	"context"
	"errors"
	"time"

	"meshd/peer/lease"
	"meshd/raftfsm"
)

const (
	// evidenceWithin is how long a new leader waits for the voters' evidence. Without
	// it, it waits a lease from its election on.
	evidenceWithin = 150 * time.Millisecond
	// releaseWithin is how long a holder has to let go of a seat, before its claim is
	// waited out.
	releaseWithin = 200 * time.Millisecond
	// movingEvery is how soon a seat that is being moved is looked at again.
	movingEvery = 20 * time.Millisecond
	// stopped is how much later than planned a leader may wake up before it takes
	// itself for one that was stopped, and blames nobody for not renewing.
	stopped = 100 * time.Millisecond
)

// grants is a leader's part in the leases, for one leadership.
type grants struct {
	*Peer
	term    uint64
	refused map[raftfsm.Hold]uint64 // what the state did not take, and at which change of it
	planned time.Time               // when this node meant to look again
}

// takeOver begins to grant leases. What was granted in earlier terms is waited out.
func (n *Peer) takeOver(ctx context.Context, term uint64) *grants {
	elected := n.raft.LeadingSince(term)
	vouched := n.evidence(ctx, term)
	if vouched.IsZero() || vouched.After(elected) {
		vouched = elected
	}
	open := map[uint64]time.Duration{}
	n.store.view(func(s *raftfsm.State) {
		for _, session := range s.Sessions {
			open[session.ID] = session.TTL
		}
	})
	n.leases.forget()
	n.leases.table.Lead(term, elected, vouched, open)
	return &grants{Peer: n, term: term, refused: map[raftfsm.Hold]uint64{}}
}

// evidenceQuestion asks a voter how long ago it last vouched for a leader of an
// earlier term than this.
type evidenceQuestion struct{ Term uint64 }

type evidenceAnswer struct{ Age time.Duration }

// evidence is the last instant at which a leader of an earlier term can have been
// confirmed by a majority, as a majority of voters tells it now; zero without one.
func (n *Peer) evidence(ctx context.Context, term uint64) time.Time {
	ctx, cancel := context.WithTimeout(ctx, evidenceWithin)
	defer cancel()
	servers, _ := n.raft.Servers()
	var voters []string
	for _, s := range servers {
		if s.Voter {
			voters = append(voters, s.ID)
		}
	}
	answers := make(chan time.Time, len(voters))
	for _, id := range voters {
		if id == n.id() {
			answers <- n.vouchedBefore(term)
			continue
		}
		go func() {
			var a evidenceAnswer
			if n.ask(ctx, id, pathEvidence, evidenceQuestion{term}, &a) == nil {
				answers <- time.Now().Add(-a.Age)
			}
		}()
	}
	var newest time.Time
	for range len(voters)/2 + 1 {
		select {
		case at := <-answers:
			if at.After(newest) {
				newest = at
			}
		case <-ctx.Done():
			return time.Time{}
		}
	}
	return newest
}

// vouchedBefore is when this node last vouched for a leader of an earlier term:
// by taking an append of it, or by leading itself.
func (n *Peer) vouchedBefore(term uint64) time.Time {
	at, own := n.raft.LastAppendBefore(term), n.leases.table.Vouched()
	if own.After(at) {
		return own
	}
	return at
}

// testify answers a new leader. A voter that has not reached its term may vouch for
// another yet.
func (n *Peer) testify(_ context.Context, _ string, q evidenceQuestion) (evidenceAnswer, error) {
	if n.raft.Term() < q.Term {
		return evidenceAnswer{}, errors.New("this node is in an earlier term, and may vouch for its leader yet")
	}
	return evidenceAnswer{Age: time.Since(n.vouchedBefore(q.Term))}, nil
}

// keepSeats closes the sessions whose leases are over, names holders and moves
// seats, and says when to look again.
func (g *grants) keepSeats(ctx context.Context) (again time.Duration) {
	now := time.Now()
	if late := now.Sub(g.planned); !g.planned.IsZero() && late > stopped {
		g.leases.table.Excuse(late)
	}
	f := g.facts()
	for _, node := range sortedKeys(f.state.Sessions) {
		if s := f.state.Sessions[node]; g.leases.table.Close(g.term, s.ID, s.TTL, now) {
			g.close(ctx, node, s.ID, f.moves(s.ID))
			f = g.facts()
		}
	}
	again = leaderEvery
	steps := decideSeats(f)
	for _, seat := range sortedKeys(f.state.Seats) {
		step, due := steps[seat]
		switch {
		case !due:
			g.leases.table.Offer(seat)
		case step.Hold != nil:
			g.hold(ctx, *step.Hold)
		default:
			again = movingEvery
			g.askRelease(ctx, seat, step.Node, *step.Release)
		}
	}
	var open []uint64
	g.store.view(func(s *raftfsm.State) {
		for _, session := range s.Sessions {
			open = append(open, session.ID)
		}
	})
	if next := g.leases.table.Next(open); !next.IsZero() {
		again = min(again, max(time.Until(next)+time.Millisecond, time.Millisecond))
	}
	g.planned = time.Now().Add(again)
	return again
}

func (g *grants) facts() seatFacts {
	f := seatFacts{
		self: g.id(),
		live: func(session uint64) bool {
			return time.Since(g.leases.table.Renewed(session)) < 3*g.cfg.Raft.Timing.Renew
		},
		released: func(seat string, c raftfsm.Claim) bool {
			return g.leases.letGo(lease.Claim{Seat: seat, Epoch: c.Epoch})
		},
	}
	g.store.view(func(s *raftfsm.State) { f.state = s.Clone() })
	f.leaving = func(node string) bool { return g.leases.leaves(f.state.Sessions[node].ID) }
	f.over = func(seat string, c raftfsm.Claim) bool {
		named := f.state.Seats[seat].Session == c.Session
		return g.leases.table.Over(g.term, lease.Claim{Seat: seat, Epoch: c.Epoch}, named, time.Now())
	}
	return f
}

// close closes a session, of which the table has decided so.
func (g *grants) close(ctx context.Context, node string, session uint64, moves map[string]string) {
	result, err := g.Propose(ctx, Meshd, raftfsm.CloseSession{Node: node, Session: session, Moves: moves})
	if err = settled(result, err); err != nil {
		g.cfg.Log.Warn("close the session of a node", "node", node, "err", err)
	}
}

// hold names a holder. What was refused is not asked again before the mesh has
// changed: each asking is an entry.
func (g *grants) hold(ctx context.Context, h raftfsm.Hold) {
	var at uint64
	g.store.view(func(s *raftfsm.State) { at = s.Mesh.Changed })
	if before, was := g.refused[h]; was && before == at {
		return
	}
	result, err := g.Propose(ctx, Meshd, h)
	if result.Rejection != nil {
		g.refused[h] = at
	}
	if err = settled(result, err); err != nil {
		g.cfg.Log.Warn("name a holder", "seat", h.Seat, "err", err)
		return
	}
	g.leases.table.Offer(h.Seat)
}

// releaseQuestion asks a node to let go of a seat.
type releaseQuestion struct {
	Seat    string
	Session uint64
	Epoch   uint64
}

// askRelease lists a seat no more and has its node let go of it. Its answer, or that
// the claim runs out, is seen by a later look.
func (g *grants) askRelease(ctx context.Context, seat, node string, c raftfsm.Claim) {
	g.leases.table.Withhold(seat)
	claim := lease.Claim{Seat: seat, Epoch: c.Epoch}
	if node == "" || !g.leases.begin(claim) {
		return
	}
	g.work.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, releaseWithin)
		defer cancel()
		q, done := releaseQuestion{Seat: seat, Session: c.Session, Epoch: c.Epoch}, struct{}{}
		var err error
		if node == g.id() {
			_, err = g.letGo(ctx, node, q)
		} else {
			err = g.ask(ctx, node, pathRelease, q, &done)
		}
		if err != nil {
			g.cfg.Log.Info("the claim to a seat that is moved is waited out", "seat", seat, "holder", node, "why", err)
			return
		}
		g.leases.note(claim)
		poke(g.loops.lead)
	})
}

// letGo answers the leader that moves a seat away from here.
func (n *Peer) letGo(ctx context.Context, from string, q releaseQuestion) (struct{}, error) {
	if leader, _ := n.raft.Leader(); from != n.id() && leader != from {
		return struct{}{}, errors.New("only the leader moves seats")
	}
	if n.leases.gate.Session() != q.Session {
		return struct{}{}, errors.New("this process does not have that session")
	}
	// A leader that goes away meanwhile takes nothing back: what was begun ends as it should.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
	defer cancel()
	n.leases.gate.Release(ctx, q.Seat, q.Epoch)
	return struct{}{}, nil
}

// ended closes the session of a node that has let go of everything and stops.
func (n *Peer) ended(ctx context.Context, node string, ask renewal) (struct{}, error) {
	var s raftfsm.Session
	var open bool
	n.store.view(func(state *raftfsm.State) { s, open = state.Sessions[node] })
	term := n.leases.table.Term()
	switch {
	case !open || s.Incarnation != ask.Incarnation:
		return struct{}{}, nil
	case !n.leases.table.Surrender(term, s.ID):
		return struct{}{}, lease.ErrNotLeading
	}
	g := &grants{Peer: n, term: term}
	g.close(ctx, node, s.ID, g.facts().moves(s.ID))
	return struct{}{}, nil
}

// letGo reports whether the claim's node has let go of it.
func (l *leases) letGo(c lease.Claim) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.released[c]
}

// begin reports whether the claim's node is to be asked now.
func (l *leases) begin(c lease.Claim) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released[c] || time.Since(l.asked[c]) < 2*releaseWithin {
		return false
	}
	l.asked[c] = time.Now()
	return true
}

// note takes in that a node has let go of claims.
func (l *leases) note(claims ...lease.Claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range claims {
		l.released[c] = true
	}
}

// noteLeaving takes in whether a session's node leaves, and reports whether that is news.
func (l *leases) noteLeaving(session uint64, leaving bool) (news bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	news = l.leaving[session] != leaving
	if leaving {
		l.leaving[session] = true
	} else {
		delete(l.leaving, session)
	}
	return news
}

func (l *leases) leaves(session uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.leaving[session]
}

// forget begins a leadership: what nodes have let go of, and that they leave, they
// tell again.
func (l *leases) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.released)
	clear(l.asked)
	clear(l.leaving)
}
