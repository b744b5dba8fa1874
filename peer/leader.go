package peer

import (
	"context"
	"encoding/json"
	"time"

	"meshd/peer/consensus"
	"meshd/raftfsm"
)

// leaderEvery is how often the leader looks at voters and holders without a
// wake-up.
const leaderEvery = time.Second

// leading is the leader's loop, for as long as this node leads: it names holders
// and keeps the voters as many as they should be.
func (n *Peer) leading(ctx context.Context, term uint64) {
	defer func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.basis.led = time.Now()
	}()
	grants := n.takeOver(ctx, term)
	defer n.leases.table.Stop()
	for {
		changed := n.store.watch()
		n.finishInit(ctx)
		again := min(leaderEvery, grants.keepSeats(ctx))
		if n.decideVoters(ctx) {
			again = time.Millisecond
		}
		if await(ctx, again, changed, n.loops.lead) != nil {
			return
		}
	}
}

// InitSetting is the local setting that holds the first entry of a mesh until it
// is committed: a crash in the middle of `meshd init` is mended by a start.
const InitSetting = "init"

// finishInit commits the first entry, where this node makes the mesh and has not
// done so yet.
func (n *Peer) finishInit(ctx context.Context) {
	text := n.local.Setting(InitSetting)
	var made bool
	n.store.view(func(s *raftfsm.State) { made = s.Mesh.ID != "" })
	if text == "" || made {
		return
	}
	var c raftfsm.Init
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		n.cfg.Log.Error("read the prepared first entry", "err", err)
		return
	}
	result, err := n.Propose(ctx, Meshd, c)
	if err = settled(result, err); err != nil {
		n.cfg.Log.Error("commit the first entry", "err", err)
	}
}

// alive reports whether gossip has seen the node; it decides nothing but which
// claimant is asked first.
func (n *Peer) alive(node string) bool {
	return node == n.id() || n.cfg.Members.Alive(node)
}

// decideVoters makes one change to raft's configuration, if one is due.
func (n *Peer) decideVoters(ctx context.Context) (made bool) {
	servers, index := n.raft.Servers()
	facts := consensus.Facts{Self: n.id(), Servers: servers, Last: n.raft.LastIndex(), Now: time.Now()}
	n.store.view(func(s *raftfsm.State) {
		for _, id := range sortedKeys(s.Nodes) {
			facts.Members = append(facts.Members, consensus.Member{ID: id, Leaving: id == n.id() && n.exit.vacated.Load()})
		}
	})
	if len(facts.Members) == 0 {
		return false // the first entry is not committed yet
	}
	c, due := consensus.DecideVoters(facts)
	if !due {
		return false
	}
	change := map[consensus.Op]func(context.Context, string, uint64) error{
		consensus.AddLearner: n.raft.AddLearner, consensus.Promote: n.raft.Promote, consensus.Demote: n.raft.Demote, consensus.Remove: n.raft.Remove,
	}[c.Op]
	err := change(ctx, c.Node, index)
	n.cfg.Log.Info("voters", "change", c.Op, "node", c.Node, "why", c.Why, "err", err)
	return err == nil
}
