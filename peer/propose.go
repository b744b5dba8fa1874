package peer

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"meshd/peer/consensus"
	"meshd/raftfsm"
)

// Meshd is the actor of what a node proposes by itself.
const Meshd = "meshd"

const (
	// proposeWithin is how long a write may take before it fails and says who is
	// missing.
	proposeWithin = 5 * time.Second
	// leaderRetry is how soon a leader is looked for again: elections take 0.8 s.
	leaderRetry = 50 * time.Millisecond
	// quorumWithin is how long a node looks for a leader although no majority of
	// voters answers it. A node without a vote hears of the leader alone, so while
	// another is elected it cannot tell that from the loss of a quorum.
	quorumWithin = 3 * time.Second
)

// ErrOutcomeUnknown says that a change may have been made. Giving the command
// again does no harm: what it declares is so already, and a push that was planned
// at an index, a removal or a token's second use is refused and says so. The log
// keeps no list of what was proposed, so that a retry is a new entry.
var ErrOutcomeUnknown = errors.New("it may or may not have been committed; giving the same command again is safe")

// Propose commits one command through whoever leads and returns what it came to,
// once this node has applied it. It fails within 5 s, and says who is missing.
func (n *Peer) Propose(ctx context.Context, actor string, c raftfsm.Command) (raftfsm.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, proposeWithin)
	defer cancel()
	result, err := n.propose(ctx, actor, c)
	if err == nil {
		_ = n.caughtUp(ctx, result.Index) // it is committed, read here or not
	}
	return result, err
}

// propose commits one command. It retries only what has certainly not been
// proposed: see ErrOutcomeUnknown.
func (n *Peer) propose(ctx context.Context, actor string, c raftfsm.Command) (raftfsm.Result, error) {
	e := raftfsm.Entry{Header: n.header(actor), Command: c}
	entry, err := raftfsm.Encode(e)
	if err != nil {
		return raftfsm.Result{}, err
	}
	began := time.Now()
	for {
		result, err := n.commit(ctx, e.Command, entry)
		switch {
		case err == nil:
			return result, nil
		case errors.Is(err, consensus.ErrUnknown):
			return result, n.named(err)
		case errors.Is(err, consensus.ErrNotLeader):
		case errors.Is(err, consensus.ErrNoQuorum) && time.Since(began) < quorumWithin:
		default:
			return result, n.named(err)
		}
		if await(ctx, leaderRetry, nil, nil) != nil {
			return result, n.named(err)
		}
	}
}

// settled is the error of a command that was not committed, or was refused.
func settled(r raftfsm.Result, err error) error {
	if err == nil && r.Rejection != nil {
		return r.Rejection
	}
	return err
}

func (n *Peer) header(actor string) raftfsm.Header {
	var id [8]byte
	rand.Read(id[:])
	return raftfsm.Header{Level: raftfsm.Level, Actor: actor, Node: n.id(), Time: time.Now().UTC(), ID: hex.EncodeToString(id[:])}
}

// commit tries once: here, or at the node that leads.
func (n *Peer) commit(ctx context.Context, c raftfsm.Command, entry []byte) (raftfsm.Result, error) {
	result, err := n.commitHere(ctx, c, entry)
	var elsewhere *consensus.NotLeaderError
	if errors.As(err, &elsewhere) && elsewhere.Leader != "" {
		err = n.askLeader(ctx, http.MethodPost, elsewhere.Leader, pathApply, entry, &result)
	}
	return result, err
}

// commitHere commits an entry if this node leads. Nobody else knows who of the
// voters answers, so the leader it is that refuses to lose a quorum.
func (n *Peer) commitHere(ctx context.Context, c raftfsm.Command, entry []byte) (raftfsm.Result, error) {
	if rm, ok := c.(raftfsm.RemoveNode); ok && n.raft.State() == "leader" {
		if r := n.quorumWithout(rm.ID); r != nil {
			return raftfsm.Result{Rejection: r}, nil
		}
	}
	_, result, err := n.raft.Apply(ctx, entry)
	if err != nil {
		return raftfsm.Result{}, err
	}
	return result.(raftfsm.Result), nil
}

// caughtUp waits until this node has applied index, so that whoever wrote reads
// what it wrote.
func (n *Peer) caughtUp(ctx context.Context, index uint64) error {
	for {
		changed := n.store.watch()
		var at uint64
		n.store.view(func(s *raftfsm.State) { at = s.Index })
		if at >= index {
			return nil
		}
		if err := await(ctx, 0, changed, nil); err != nil {
			return err
		}
	}
}

// named replaces node ids in an error by the names that people know, and says
// who does not answer where that is known and the error does not.
func (n *Peer) named(err error) error {
	text := err.Error()
	if _, known := n.raft.Leader(); !known && !errors.Is(err, consensus.ErrNoQuorum) {
		if silent := n.raft.Silent(silentAfter); len(silent) > 0 {
			text += "; these voters do not answer: " + strings.Join(silent, ", ")
		}
	}
	n.store.view(func(s *raftfsm.State) {
		for id, m := range s.Nodes {
			text = strings.ReplaceAll(text, id, m.Name)
		}
	})
	if errors.Is(err, consensus.ErrUnknown) {
		text += ": " + ErrOutcomeUnknown.Error()
		err = errors.Join(err, ErrOutcomeUnknown)
	}
	return &namedError{text, err}
}

// silentAfter is how long a voter may be silent before it is named as missing:
// five heartbeats.
const silentAfter = 2 * time.Second

type namedError struct {
	text string
	err  error
}

func (e *namedError) Error() string { return e.text }
func (e *namedError) Unwrap() error { return e.err }

// Preview says what a command would change, without changing it. It plans by all
// that was committed when it was asked: whoever pushed on another node just now
// reads what it wrote. Where no leader says how much that is within 2 s, it plans by this
// node's own copy, and own is the index of that.
func (n *Peer) Preview(ctx context.Context, actor string, c raftfsm.Command) (plan raftfsm.Plan, own uint64, refused *raftfsm.Rejection) {
	h := n.header(actor)
	err := n.refresh(ctx)
	n.store.view(func(s *raftfsm.State) {
		plan, refused = s.Preview(h, c)
		switch {
		case s.Mesh.ID == "":
			refused = n.unread()
		case err != nil && refused != nil:
			refused.Text += fmt.Sprintf(" (by this node's own copy of the log, which is of index %d, since no leader could be asked)", s.Index)
		case err != nil:
			own = s.Index
		}
	})
	return plan, own, refused
}

// refreshWithin is how long a read may look for a leader: elections take 0.8 s.
const refreshWithin = 2 * time.Second

// refresh waits until this node has applied all that was committed when it was
// called.
func (n *Peer) refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, refreshWithin)
	defer cancel()
	for {
		index, err := n.indexHere(ctx)
		if leader, known := n.raft.Leader(); errors.Is(err, consensus.ErrNotLeader) && known && leader != n.id() {
			err = n.askLeader(ctx, http.MethodGet, leader, pathIndex, nil, &index)
		}
		if err == nil {
			return n.caughtUp(ctx, index)
		}
		if await(ctx, leaderRetry, nil, nil) != nil {
			return err
		}
	}
}

// indexHere is the index of all that is committed, if this node leads.
func (n *Peer) indexHere(ctx context.Context) (index uint64, err error) {
	if n.raft.State() != "leader" { // a barrier would look for who is missing
		return 0, consensus.ErrNotLeader
	}
	if err := n.raft.Barrier(ctx); err != nil {
		return 0, err
	}
	n.store.view(func(s *raftfsm.State) { index = s.Index })
	return index, nil
}

// unread is the refusal of a node that has not read its mesh's log since it
// started. It has a mesh: init or join gave it one.
func (n *Peer) unread() *raftfsm.Rejection {
	return &raftfsm.Rejection{
		Code: "no-quorum", Text: fmt.Sprintf("node %s has found no leader since it started, and reads its mesh's log once it has", n.cfg.Self.Name),
		Remedy: "start the other nodes: most of the voters must be up",
	}
}
