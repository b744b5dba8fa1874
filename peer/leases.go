package peer

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path"
	"sync"
	"time"

	"meshd/peer/consensus"
	"meshd/peer/lease"
	"meshd/raftfsm"
)

// The calls of the leases, as those in rpc.go.
const (
	pathRenew    = "/lease/renew"    // a node to the leader
	pathRelease  = "/lease/release"  // the leader to a node: let go of a seat
	pathEvidence = "/lease/evidence" // a new leader to a voter: until when did you vouch for another
	pathEnd      = "/lease/end"      // a node to the leader: I have let go of everything, and stop
)

const (
	// renewRetry is the pause after a renewal that failed: short beside an election.
	renewRetry = 50 * time.Millisecond
	// drain is how long the calls that run have to end when their seat is let go of.
	drain = 50 * time.Millisecond
	// endWithin bounds what a node that stops does for its seats.
	endWithin = time.Second
	// farewell is how long nobody must have asked a node that stops for a seat: an
	// entry reaches those who call within some heartbeats of the log. A call that is
	// on its way when the bus closes is lost, and nobody can tell whether it has run.
	farewell = 100 * time.Millisecond
)

// leases are this node's part in them: as the holder of one, and as a leader.
type leases struct {
	gate        *lease.Gate
	table       lease.Table
	incarnation string // of this process: see raftfsm.Session

	mu       sync.Mutex
	released map[lease.Claim]bool      // their node has let go of them
	asked    map[lease.Claim]time.Time // when their node was asked to
	leaving  map[uint64]bool           // by session, as its newest renewal says
}

func newLeases(p lease.Process) *leases {
	var life [8]byte
	rand.Read(life[:])
	return &leases{
		gate: lease.NewGate(p.Clock), incarnation: p.Lock + "/" + hex.EncodeToString(life[:]),
		released: map[lease.Claim]bool{}, asked: map[lease.Claim]time.Time{}, leaving: map[uint64]bool{},
	}
}

// renewal asks for a node's lease.
type renewal struct {
	Incarnation string
	Hurry       bool              // the log grants what the node has not got yet
	Have        string            // digest of the seats that it has
	Released    map[string]uint64 // epochs, of seats that it is named for, which it has let go of
	Leaving     bool              // it should hold nothing: its seats are to go where others can answer them
}

// renewing keeps this node's lease while it has claims to mesh seats. What the log
// has granted just now is fetched at once.
func (n *Peer) renewing(ctx context.Context) {
	for {
		changed := n.store.watch()
		named, claims := n.namedFor()
		if !claims {
			if await(ctx, everythingEvery, changed, nil) != nil {
				return
			}
			continue
		}
		pause := n.cfg.Raft.Timing.Renew
		if err := n.renewOnce(ctx, named); err != nil {
			n.cfg.Log.Debug("renew this node's lease", "err", err)
			pause = renewRetry
			if _, known := n.raft.Leader(); !known {
				pause = everythingEvery // one that comes wakes us
			}
		}
		if n.restUntilRenewal(ctx, pause, named) != nil {
			return
		}
	}
}

// restUntilRenewal returns after the pause, or before when the log names this node for
// other seats, or when it is poked.
func (n *Peer) restUntilRenewal(ctx context.Context, pause time.Duration, named map[string]uint64) error {
	due := time.NewTimer(pause)
	defer due.Stop()
	for {
		changed := n.store.watch()
		if now, _ := n.namedFor(); !maps.Equal(now, named) {
			return nil
		}
		select {
		case <-changed:
		case <-n.loops.renew:
			return nil
		case <-due.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// namedFor is what the log names this process for, by epoch, and whether it could
// name this node for anything.
func (n *Peer) namedFor() (named map[string]uint64, claims bool) {
	n.store.view(func(s *raftfsm.State) {
		if session, ok := s.Sessions[n.id()]; ok && session.Incarnation == n.leases.incarnation {
			named = s.Granted(session.ID)
		}
		claims = len(named) > 0 || s.ClaimsOn(n.id())
	})
	return named, claims
}

func (n *Peer) renewOnce(ctx context.Context, named map[string]uint64) error {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.Raft.Timing.Lease/2)
	defer cancel()
	gate := n.leases.gate
	held := gate.Granted()
	sent := gate.Now()
	ask := renewal{Incarnation: n.leases.incarnation, Hurry: !maps.Equal(named, held), Have: lease.Digest(held), Released: gate.Released(named), Leaving: n.exit.leaving.Load()}
	var g lease.Grant
	if err := n.withLeader(ctx, pathRenew, ask, &g, func() (err error) {
		g, err = n.grant(ctx, n.id(), ask)
		return err
	}); err != nil {
		return err
	}
	if g.Seats == nil && g.Digest == ask.Have {
		g.Seats = held
	}
	if lease.Digest(g.Seats) != g.Digest {
		return errors.New("the leader's answer lists other seats than it says")
	}
	gate.Grant(sent, g)
	return nil
}

// withLeader has the leader do something: here, or at another node.
func (n *Peer) withLeader(ctx context.Context, path string, ask, into any, here func() error) error {
	leader, known := n.raft.Leader()
	switch {
	case !known:
		return &consensus.NotLeaderError{}
	case leader == n.id():
		return here()
	}
	return n.ask(ctx, leader, path, ask, into)
}

// ask sends a question to another node, and reads its answer.
func (n *Peer) ask(ctx context.Context, node, path string, question, answer any) error {
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	resp, err := n.request(ctx, http.MethodPost, node, path, body)
	if err != nil {
		return fmt.Errorf("ask %s: %w", node, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var f fault
		if err := decodeBody(resp.Body, &f); err != nil {
			return fmt.Errorf("node %s answered %s", node, resp.Status)
		}
		return fmt.Errorf("node %s: %s", node, f.Text)
	}
	return decodeBody(resp.Body, answer)
}

// answerTo serves one kind of question of the other nodes.
func answerTo[Q, A any](do func(ctx context.Context, from string, q Q) (A, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var q Q
		if err := decodeBody(r.Body, &q); err != nil {
			respond(w, http.StatusBadRequest, fault{faultOther, err.Error()})
			return
		}
		from, _ := r.Context().Value(peerKey{}).(string)
		a, err := do(r.Context(), from, q)
		if err != nil {
			respond(w, http.StatusServiceUnavailable, fault{faultOther, err.Error()})
			return
		}
		respond(w, http.StatusOK, a)
	}
}

// grant is the leader's side of a renewal. Its order is the protocol's: see package
// lease.
func (n *Peer) grant(ctx context.Context, node string, ask renewal) (lease.Grant, error) {
	arrived := time.Now()
	table := &n.leases.table
	term := table.Term()
	if term == 0 {
		return lease.Grant{}, lease.ErrNotLeading
	}
	s, err := n.session(ctx, term, node, ask.Incarnation)
	if err != nil {
		return lease.Grant{}, err
	}
	n.noteReleased(s.ID, ask.Released)
	if n.leases.noteLeaving(s.ID, ask.Leaving) {
		poke(n.loops.lead)
	}
	if err := table.Promise(term, s.ID, arrived, s.TTL); err != nil {
		return lease.Grant{}, err
	}
	if err := n.raft.Prove(ctx, term, arrived, ask.Hurry); err != nil {
		return lease.Grant{}, err
	}
	seats, err := table.List(term, s.ID, arrived, s.TTL, func() bool { return n.raft.Leads(term) }, func() (named map[string]uint64) {
		n.store.view(func(now *raftfsm.State) { named = now.Granted(s.ID) })
		return named
	})
	if err != nil {
		return lease.Grant{}, err
	}
	g := lease.Grant{Session: s.ID, TTL: s.TTL, Seats: seats, Digest: lease.Digest(seats)}
	if g.Digest == ask.Have {
		g.Seats = nil
	}
	return g, nil
}

// session is the node's open session, which is opened where there is none for this
// incarnation. An older one is closed with that: whoever holds the lock that it held
// proves it dead. With another lock there is no such proof, as in a copy of the data
// directory: it is waited out.
func (n *Peer) session(ctx context.Context, term uint64, node, incarnation string) (raftfsm.Session, error) {
	read := func() (s raftfsm.Session, ok bool) {
		n.store.view(func(state *raftfsm.State) { s, ok = state.Sessions[node] })
		return s, ok
	}
	old, was := read()
	switch {
	case was && old.Incarnation == incarnation:
		return old, nil
	case was && lockOf(old.Incarnation) != lockOf(incarnation) && !n.leases.table.Close(term, old.ID, old.TTL, time.Now()):
		return raftfsm.Session{}, fmt.Errorf("another process of node %s may have its lease, with a data directory that is not this one: it is waited out", node)
	}
	result, err := n.Propose(ctx, Meshd, raftfsm.OpenSession{Node: node, Incarnation: incarnation, TTL: n.cfg.Raft.Timing.Lease})
	if err = settled(result, err); err != nil {
		return raftfsm.Session{}, err
	}
	s, ok := read()
	if !ok || s.Incarnation != incarnation {
		return raftfsm.Session{}, fmt.Errorf("the session of node %s was closed again", node)
	}
	return s, nil
}

// lockOf is the part of an incarnation that names the lock.
func lockOf(incarnation string) string { return path.Dir(incarnation) }

// noteReleased takes in what a node says of the claims of its session.
func (n *Peer) noteReleased(session uint64, released map[string]uint64) {
	var claims []lease.Claim
	n.store.view(func(s *raftfsm.State) {
		for seat, epoch := range s.Granted(session) {
			if released[seat] == epoch {
				claims = append(claims, lease.Claim{Seat: seat, Epoch: epoch})
			}
		}
	})
	if len(claims) > 0 {
		n.leases.note(claims...)
		poke(n.loops.lead)
	}
}

// endLease lets go of everything, in a node that stops, and has the leader name
// others at once. It tells those who still ask here that they should ask again.
func (n *Peer) endLease() {
	ctx, cancel := context.WithTimeout(context.Background(), endWithin)
	defer cancel()
	if n.leases.gate.Session() == 0 {
		return
	}
	draining, done := context.WithTimeout(ctx, drain)
	n.leases.gate.ReleaseAll(draining)
	done()
	if err := n.tellEnded(ctx); err != nil {
		n.cfg.Log.Info("the lease of this node runs out by itself", "why", err)
	}
	n.leases.gate.Quiet(ctx, farewell)
}

// tellEnded has the leader close this node's session. One that has just been elected
// is asked again until it can.
func (n *Peer) tellEnded(ctx context.Context) error {
	ask, done := renewal{Incarnation: n.leases.incarnation}, struct{}{}
	for {
		err := n.withLeader(ctx, pathEnd, ask, &done, func() (err error) {
			_, err = n.ended(ctx, n.id(), ask)
			return err
		})
		if _, known := n.raft.Leader(); err == nil || !known || await(ctx, renewRetry, nil, nil) != nil {
			return err
		}
	}
}
