package peer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"meshd/peer/consensus"
	"meshd/raftfsm"
)

// leaveWithin bounds a leave: a learner that is promoted first has to catch up.
const leaveWithin = 30 * time.Second

// Leave takes this node out of the mesh. A node that leads hands over first, and
// one that is the only voter waits until another has the vote: nobody is left
// without a quorum.
func (n *Peer) Leave(ctx context.Context, actor string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, leaveWithin)
	defer cancel()
	var alone bool
	n.store.view(func(s *raftfsm.State) { alone = len(s.Nodes) < 2 })
	if alone {
		return &raftfsm.Rejection{Code: "last-node", Text: "this is the only node of the mesh", Remedy: "stop it, and delete its data directory to end the mesh with all it holds"}
	}
	c, err := n.removal(n.id())
	if err != nil {
		return err
	}
	if _, _, refused := n.Preview(ctx, actor, c); refused != nil && !movedOn(refused) {
		return refused
	}
	n.exit.leaving.Store(true)
	defer func() { n.exit.leaving.Store(err == nil) }()
	poke(n.loops.lead)
	if err := n.handOver(ctx); err != nil {
		return err
	}
	for {
		err := n.RemoveNode(ctx, actor, n.id())
		if errors.Is(err, ErrOutcomeUnknown) || errors.Is(err, consensus.ErrNoQuorum) {
			n.askStanding(ctx) // it may be done, and the others silent because of it
		}
		var refused *raftfsm.Rejection
		switch {
		case err == nil || n.expelled(err):
			return nil
		case errors.As(err, &refused) && refused.Code != "last-voter":
			return refused
		case refused == nil && !errors.Is(err, consensus.ErrNotLeader) && !errors.Is(err, consensus.ErrBusy) && !errors.Is(err, ErrOutcomeUnknown):
			return err
		}
		// The vote is on its way to another, or a slow disk held it up, or the others
		// have to say whether it was done.
		if await(ctx, leaveRetry, nil, nil) != nil {
			return fmt.Errorf("leave the mesh: %w", err)
		}
	}
}

// leaveRetry is how soon a leave is tried again that could not be made yet.
const leaveRetry = 100 * time.Millisecond

// handOver waits until another node leads.
func (n *Peer) handOver(ctx context.Context) error {
	for n.raft.State() == "leader" {
		err := n.raft.TransferLeadership(ctx)
		if err == nil {
			return nil
		}
		if await(ctx, leaveRetry, nil, nil) != nil {
			return fmt.Errorf("hand the leadership over: %w", err)
		}
	}
	return nil
}

// expelled reports whether this node is out: by its own state, by what it was
// told, or because the removal was refused as one of a node that is not there.
func (n *Peer) expelled(err error) (out bool) {
	var refused *raftfsm.Rejection
	if errors.As(err, &refused) && (refused.Code == "no-node" || refused.Code == "not-a-member") {
		return true
	}
	_, out = n.removed()
	return out
}

// Others are the ids of the other members, as the log or the join names them.
func (n *Peer) Others() []string {
	var ids []string
	n.store.view(func(s *raftfsm.State) {
		for _, id := range sortedKeys(s.Nodes) {
			if id != n.id() {
				ids = append(ids, id)
			}
		}
	})
	if len(ids) == 0 {
		ids = n.local.addressed()
	}
	return ids
}
