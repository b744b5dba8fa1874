package peer

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
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
)

// ErrOutcomeUnknown says that a change may have been made. Every command is safe
// to give again.
var ErrOutcomeUnknown = errors.New("it may or may not have been committed; giving the same command again is safe")

// Propose commits one command through whoever leads and returns what it came to,
// once this node has applied it. It fails within 5 s, and says who is missing.
func (n *Peer) Propose(ctx context.Context, actor string, c raftfsm.Command) (raftfsm.Result, error) {
	entry, err := raftfsm.Encode(raftfsm.Entry{Header: n.header(actor), Command: c})
	if err != nil {
		return raftfsm.Result{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, proposeWithin)
	defer cancel()
	for {
		result, err := n.commit(ctx, entry)
		switch {
		case err == nil:
			n.caughtUp(ctx, result.Index)
			return result, nil
		case !errors.Is(err, consensus.ErrNotLeader):
			return result, n.named(err)
		}
		if await(ctx, leaderRetry, nil, nil) != nil {
			return result, n.named(err)
		}
	}
}

func (n *Peer) header(actor string) raftfsm.Header {
	var id [8]byte
	rand.Read(id[:])
	return raftfsm.Header{Level: raftfsm.Level, Actor: actor, Node: n.id(), Time: time.Now().UTC(), ID: hex.EncodeToString(id[:])}
}

// commit tries once: here, or at the node that leads.
func (n *Peer) commit(ctx context.Context, entry []byte) (raftfsm.Result, error) {
	result, err := n.commitHere(ctx, entry)
	var elsewhere *consensus.NotLeaderError
	if errors.As(err, &elsewhere) && elsewhere.Leader != "" {
		return n.forward(ctx, elsewhere.Leader, entry)
	}
	return result, err
}

func (n *Peer) commitHere(ctx context.Context, entry []byte) (raftfsm.Result, error) {
	_, result, err := n.raft.Apply(ctx, entry)
	if err != nil {
		return raftfsm.Result{}, err
	}
	return result.(raftfsm.Result), nil
}

// caughtUp waits until this node has applied index, so that whoever wrote reads
// what it wrote.
func (n *Peer) caughtUp(ctx context.Context, index uint64) {
	for {
		changed := n.store.watch()
		var at uint64
		n.store.view(func(s *raftfsm.State) { at = s.Index })
		if at >= index || await(ctx, 0, changed, nil) != nil {
			return
		}
	}
}

// named replaces node ids in an error by the names that people know.
func (n *Peer) named(err error) error {
	text := err.Error()
	n.store.view(func(s *raftfsm.State) {
		for id, m := range s.Nodes {
			text = strings.ReplaceAll(text, id, m.Name)
		}
	})
	if errors.Is(err, consensus.ErrUnknown) {
		return fmt.Errorf("%s: %w", text, ErrOutcomeUnknown)
	}
	return &namedError{text, err}
}

type namedError struct {
	text string
	err  error
}

func (e *namedError) Error() string { return e.text }
func (e *namedError) Unwrap() error { return e.err }

// Preview says what a command would change, without changing it.
func (n *Peer) Preview(actor string, c raftfsm.Command) (plan raftfsm.Plan, refused *raftfsm.Rejection) {
	h := n.header(actor)
	n.store.view(func(s *raftfsm.State) { plan, refused = s.Preview(h, c) })
	return plan, refused
}
