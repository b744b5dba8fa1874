package peer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"meshd/peer/consensus"
	"meshd/raftfsm"
)

// leaveWithin bounds a leave: a learner that is promoted first has to catch up.
const leaveWithin = 30 * time.Second

// Leave takes this node out of the mesh. Its mesh seats are handed over before that,
// so that no call is refused; where nobody can take one it is refused, unless it is
// forced. A node that leads hands that over too, and one that is the only voter waits
// until another has the vote: nobody is left without a quorum.
func (n *Peer) Leave(ctx context.Context, actor string, force bool) (err error) {
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
	if _, err := n.seatsToMove(force); err != nil {
		return err
	}
	n.leaves(true)
	defer func() { n.leaves(err == nil) }()
	if err := n.vacate(ctx, force); err != nil {
		return err
	}
	n.exit.vacated.Store(true)
	defer func() { n.exit.vacated.Store(err == nil) }()
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

// vacateWithin bounds the handing over of the seats, which takes some tens of
// milliseconds each, or a lease where a claim is waited out.
const vacateWithin = 5 * time.Second

// vacate waits until the leader, which the renewals tell that this node leaves, has
// named others for its mesh seats, and until those who call know. Forced, it leaves
// behind those that nobody can take: they go dark with this node.
func (n *Peer) vacate(ctx context.Context, force bool) error {
	bounded, cancel := context.WithTimeout(ctx, vacateWithin)
	defer cancel()
	if named, _ := n.namedFor(); len(named) == 0 {
		return nil
	}
	for {
		changed := n.store.watch()
		moving, err := n.seatsToMove(force)
		switch {
		case err != nil:
			return err
		case len(moving) == 0:
			n.leases.gate.Quiet(bounded, farewell)
			return nil
		case await(bounded, 0, changed, nil) == nil:
		case force:
			return ctx.Err()
		default:
			return fmt.Errorf("hand over the seats %s: no other node took them within %v; meshd seats says who could, and meshd leave --force leaves all the same", strings.Join(moving, ", "), vacateWithin)
		}
	}
}

// seatsToMove lists the mesh seats of this node that others can take. Those that
// nobody can take are the reason to refuse, unless it is forced.
func (n *Peer) seatsToMove(force bool) (moving []string, err error) {
	var stuck []string
	n.store.view(func(s *raftfsm.State) { moving, stuck = decideVacate(s, n.id()) })
	if len(stuck) > 0 && !force {
		return nil, &raftfsm.Rejection{
			Code: "seats-go-dark", Text: "without this node nobody answers " + strings.Join(stuck, ", nor "),
			Remedy: "assign the module to another node too, or move what fails over by hand: meshd seat move SEAT NODE; meshd leave --force lets them go dark",
		}
	}
	return moving, nil
}

// decideVacate parts the mesh seats that the node may answer into those that others
// can take and, with the reasons, those that nobody can.
func decideVacate(s *raftfsm.State, node string) (moving, stuck []string) {
	for _, name := range sortedKeys(s.Granted(s.Sessions[node].ID)) {
		fits := func(claimant string) bool {
			at := s.Assignments[claimant].Node
			_, open := s.Sessions[at]
			return at != node && open
		}
		switch {
		case !slices.ContainsFunc(s.Claimants(name), fits):
			stuck = append(stuck, fmt.Sprintf("seat %s (no other node that claims it has a lease)", name))
		case !s.Seats[name].FailsOver():
			stuck = append(stuck, fmt.Sprintf("seat %s (its failover is manual)", name))
		default:
			moving = append(moving, name)
		}
	}
	return moving, stuck
}

// leaves tells the leader, with the next renewal, whether this node leaves.
func (n *Peer) leaves(soon bool) {
	n.exit.leaving.Store(soon)
	poke(n.loops.renew)
}

// leaveRetry is how soon a leave is tried again that could not be made yet.
const leaveRetry = 100 * time.Millisecond

// handOver waits until this node does not lead any more: it gives its vote away once
// another can take it. The library's transfer of the leadership is not for a process
// that may have to go on.
func (n *Peer) handOver(ctx context.Context) error {
	for n.raft.State() == "leader" {
		if err := await(ctx, leaveRetry, nil, nil); err != nil {
			return fmt.Errorf("give the vote of this node to another: not every other voter answers, or none has caught up: %w", err)
		}
	}
	return nil
}

// resignWithin bounds the handing over of the leadership by a node that stops. The
// next change is made some 20 ms later then, and 0.6 to 1.1 s where the others elect.
const resignWithin = 500 * time.Millisecond

// resign hands the leadership over, in a node that stops whatever comes of it.
func (n *Peer) resign() {
	servers, _ := n.raft.Servers()
	heirs := slices.ContainsFunc(servers, func(s consensus.Server) bool { return s.Voter && s.ID != n.id() })
	if n.raft.State() != "leader" || !heirs {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), resignWithin)
	defer cancel()
	if err := n.raft.TransferLeadership(ctx); err != nil {
		n.cfg.Log.Info("the others elect a leader by themselves", "why", err)
	}
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
