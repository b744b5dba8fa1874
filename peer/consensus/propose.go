package consensus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/raft"
)

// What a proposal can come to, other than success.
var (
	// ErrNotLeader: nothing was proposed. Ask the leader that *NotLeaderError names, or wait for one.
	ErrNotLeader = errors.New("this node does not lead")
	// ErrUnknown: the entry may be committed, now or later, or may never be. Read before trying again.
	ErrUnknown = errors.New("the outcome is unknown")
	// ErrNoQuorum: no majority of voters answers. *NoQuorumError names who is missing.
	ErrNoQuorum = errors.New("no quorum of voters answers")
	// ErrBusy: nothing was proposed, for this node's log takes no entries: its disk hangs, or it is
	// overloaded.
	ErrBusy = errors.New("the log takes no entries")
	// ErrClosed: nothing was proposed, for the node is closed or has failed.
	ErrClosed = errors.New("the consensus node is closed")
	// ErrTooLarge: nothing was proposed.
	ErrTooLarge = errors.New("the entry is too large")
)

// NotLeaderError is ErrNotLeader, with the leader if one is known.
type NotLeaderError struct{ Leader string }

func (e *NotLeaderError) Error() string {
	if e.Leader == "" {
		return ErrNotLeader.Error() + ", and none is elected yet"
	}
	return ErrNotLeader.Error() + ": node " + e.Leader + " does"
}

// Is makes it ErrNotLeader.
func (e *NotLeaderError) Is(target error) bool { return target == ErrNotLeader }

// NoQuorumError is ErrNoQuorum, and ErrUnknown too where the entry is in this node's log.
type NoQuorumError struct {
	Silent []string // voters that do not answer
	Voters int
	Logged bool // the entry is in this node's log and may yet be committed
}

func (e *NoQuorumError) Error() string {
	s := fmt.Sprintf("%v: %d of %d are silent: %s", ErrNoQuorum, len(e.Silent), e.Voters, strings.Join(e.Silent, ", "))
	if e.Logged {
		s += "; " + ErrUnknown.Error()
	}
	return s
}

// Is makes it ErrNoQuorum and perhaps ErrUnknown.
func (e *NoQuorumError) Is(target error) bool {
	return target == ErrNoQuorum || e.Logged && target == ErrUnknown
}

// errLate says that the library did not answer in time.
var errLate = errors.New("no answer in time")

// await makes a request of the library and waits for its future, with a timer of its own: the
// library's time-outs cover only the way into its queue, and a future may never be answered.
func (n *Node) await(ctx context.Context, request func(time.Duration) raft.Future) (raft.Future, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case <-n.closing:
		return nil, ErrClosed
	default:
	}
	select {
	case n.slots <- struct{}{}:
	case <-n.closing:
		return nil, ErrClosed
	case <-ctx.Done():
		return nil, ErrBusy
	}
	by, _ := ctx.Deadline()
	type answer struct {
		future raft.Future
		err    error
	}
	done := make(chan answer, 1)
	go func() {
		defer func() { <-n.slots }()
		// Less than all of the time for the way into the queue, so that ErrBusy is told from ErrUnknown.
		f := request(max(time.Until(by)*4/5, time.Millisecond))
		done <- answer{f, f.Error()}
	}()
	select {
	case a := <-done:
		return a.future, a.err
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: %w", errLate, ctx.Err())
	}
}

// explain turns the library's errors of a proposal into ours.
func (n *Node) explain(err error) error {
	switch {
	case errors.Is(err, raft.ErrEnqueueTimeout):
		return ErrBusy
	case errors.Is(err, ErrClosed), errors.Is(err, raft.ErrRaftShutdown):
		if f := n.driver.failure(); f != nil {
			return fmt.Errorf("%w: %w", ErrClosed, f)
		}
		return ErrClosed
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		leader, known := n.Leader()
		if known && leader != n.cfg.Node {
			return &NotLeaderError{leader}
		}
		// Two seconds: every live voter campaigns or is campaigned to several times meanwhile.
		if e := n.withoutQuorum(max(2*time.Second, 3*n.cfg.Timing.Election)); e != nil {
			return e
		}
		return &NotLeaderError{}
	case errors.Is(err, raft.ErrLeadershipLost), errors.Is(err, errLate):
		if e := n.withoutQuorum(n.cfg.Timing.LeaderLease); e != nil {
			e.Logged = true
			return e
		}
		return fmt.Errorf("%w: %w", ErrUnknown, err)
	default:
		return err
	}
}

// withoutQuorum returns who is missing, if so many voters are silent for d that no majority is left.
func (n *Node) withoutQuorum(d time.Duration) *NoQuorumError {
	servers, _ := n.Servers()
	voters := 0
	for _, s := range servers {
		if s.Voter {
			voters++
		}
	}
	if silent := n.Silent(d); voters > 0 && voters-len(silent) < voters/2+1 {
		return &NoQuorumError{Silent: silent, Voters: voters}
	}
	return nil
}

// Apply commits an entry and returns its index and what this node's machine made of it. It takes 5 s
// at most. The errors are those above; only ErrUnknown leaves it open whether the entry is committed.
func (n *Node) Apply(ctx context.Context, entry []byte) (index uint64, result any, err error) {
	if len(entry) > MaxEntry {
		return 0, nil, fmt.Errorf("commit entry of %d bytes: %w: the most is %d; split it", len(entry), ErrTooLarge, MaxEntry)
	}
	f, err := n.await(ctx, func(d time.Duration) raft.Future { return n.raft.Apply(entry, d) })
	if err != nil {
		return 0, nil, fmt.Errorf("commit entry: %w", n.explain(err))
	}
	applied := f.(raft.ApplyFuture)
	out := applied.Response().(outcome)
	if out.err != nil {
		return applied.Index(), nil, fmt.Errorf("commit entry: it is committed, and this node stops: %w", out.err)
	}
	select {
	case n.news <- struct{}{}:
	default:
	}
	return applied.Index(), out.result, nil
}

// Barrier returns nil when this node leads and its machine contains everything that was committed
// before the call. It takes 5 s at most.
func (n *Node) Barrier(ctx context.Context) error {
	_, err := n.await(ctx, func(d time.Duration) raft.Future { return n.raft.Barrier(d) })
	if err != nil {
		return fmt.Errorf("commit barrier: %w", n.explain(err))
	}
	return nil
}

// change makes one change of the configuration, and only of the one at prev (see Servers).
//
// A barrier follows it. The library replicates the change before it counts the vote that the change
// gives: an acknowledgement in between is lost, and where that vote is needed the change waits for the
// next entry, perhaps for ever.
func (n *Node) change(ctx context.Context, what, id string, request func(id raft.ServerID, d time.Duration) raft.Future) error {
	if id == "" {
		return fmt.Errorf("%s: the node id is empty", what)
	}
	_, err := n.await(ctx, func(d time.Duration) raft.Future {
		f := request(raft.ServerID(id), d)
		n.raft.Barrier(barrierWithin) // later in the log: the main loop has taken the change
		return f
	})
	if err != nil {
		return fmt.Errorf("%s %s: %w", what, id, n.explain(err))
	}
	return nil
}

// AddLearner adds a node that gets the log and has no vote.
func (n *Node) AddLearner(ctx context.Context, id string, prev uint64) error {
	return n.change(ctx, "add learner", id, func(s raft.ServerID, d time.Duration) raft.Future {
		return n.raft.AddNonvoter(s, raft.ServerAddress(s), prev, d)
	})
}

// Promote gives a vote.
func (n *Node) Promote(ctx context.Context, id string, prev uint64) error {
	return n.change(ctx, "promote", id, func(s raft.ServerID, d time.Duration) raft.Future {
		return n.raft.AddVoter(s, raft.ServerAddress(s), prev, d)
	})
}

// Demote takes the vote of a node, which goes on to follow.
func (n *Node) Demote(ctx context.Context, id string, prev uint64) error {
	return n.change(ctx, "demote", id, func(s raft.ServerID, d time.Duration) raft.Future {
		return n.raft.DemoteVoter(s, prev, d)
	})
}

// Remove takes a node out. It is not told: it may never hear of it.
func (n *Node) Remove(ctx context.Context, id string, prev uint64) error {
	return n.change(ctx, "remove", id, func(s raft.ServerID, d time.Duration) raft.Future {
		return n.raft.RemoveServer(s, prev, d)
	})
}

// TransferLeadership hands the leadership to another voter. Only a process that is about to exit may
// call it, and must exit whatever comes of it: a transfer that is interrupted can leave the library
// refusing every entry (hashicorp/raft#696).
func (n *Node) TransferLeadership(ctx context.Context) error {
	_, err := n.await(ctx, func(time.Duration) raft.Future { return n.raft.LeadershipTransfer() })
	if err != nil {
		return fmt.Errorf("transfer leadership: %w", n.explain(err))
	}
	return nil
}
