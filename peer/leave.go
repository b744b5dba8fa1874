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
func (n *Peer) Leave(ctx context.Context, actor string) error {
	ctx, cancel := context.WithTimeout(ctx, leaveWithin)
	defer cancel()
	var alone bool
	n.store.view(func(s *raftfsm.State) { alone = len(s.Nodes) < 2 })
	if alone {
		return &raftfsm.Rejection{Code: "last-node", Text: "this is the only node of the mesh", Remedy: "stop it, and delete its data directory to end the mesh with all it holds"}
	}
	if _, refused := n.Preview(actor, raftfsm.RemoveNode{ID: n.id()}); refused != nil {
		return refused
	}
	n.leaving.Store(true)
	defer n.leaving.Store(false)
	poke(n.loops.lead)
	for n.raft.State() == "leader" {
		err := n.raft.TransferLeadership(ctx)
		if err == nil {
			break
		}
		if await(ctx, 100*time.Millisecond, nil, nil) != nil {
			return fmt.Errorf("hand the leadership over: %w", err)
		}
	}
	for {
		err := n.RemoveNode(ctx, actor, n.cfg.Self.Name)
		var refused *raftfsm.Rejection
		if err == nil || errors.As(err, &refused) || !errors.Is(err, consensus.ErrNotLeader) {
			return err
		}
		if await(ctx, leaderRetry, nil, nil) != nil {
			return err
		}
	}
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
