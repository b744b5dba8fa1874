package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"meshd/peer/network"
	"meshd/raftfsm"
)

// pathStanding is where a node that hears no leader asks a member whether it was
// removed. It is beside the join: all else is refused to a node that was.
const pathStanding = "/standing"

// standing is what a member says of the node that asks: nil where it knows of no
// removal.
type standing struct{ Removed *raftfsm.Removal }

const (
	// askAfter is how long a node hears no leader before it asks: an election. It
	// starts nothing by its own record before.
	askAfter = time.Second
	// askEvery is how soon it asks again, ever later up to everythingEvery: the
	// others take few such questions a second.
	askEvery = time.Second
	// stoppedWithin bounds the wait for what a removed node ran: three times what a
	// process gets to stop.
	stoppedWithin = 30 * time.Second
)

// RemovedError ends Run: this node is no member of its mesh any more.
type RemovedError struct {
	raftfsm.Removal
	Stopping bool // what it ran has not ended yet
}

func (e *RemovedError) Error() string {
	text := "this node was removed from the mesh"
	if !e.At.IsZero() {
		text += fmt.Sprintf(" by %s at %s", e.By, e.At.UTC().Format(time.RFC3339))
	}
	if e.Stopping {
		return text + "; some of what it ran has not stopped yet"
	}
	return text + "; what it ran is stopped"
}

// standing ends the node once it was removed, and what it ran is stopped. It
// hears of that from the log, or from a member: a node that was removed while it
// was away is sent no log any more.
func (n *Peer) standing(ctx context.Context) error {
	silent, wait := time.Duration(0), askEvery
	for {
		gone, out := n.removed()
		switch _, led := n.raft.Leader(); {
		case out && !n.exit.leaving.Load(): // a node that leaves by itself is ended by whoever asked for it
			return n.endRemoved(ctx, gone)
		case out || led:
			silent, wait = 0, askEvery
		case silent < askAfter:
			silent += wait
		default:
			n.askStanding(ctx)
			n.exit.asked.Store(true)
			if _, out := n.removed(); out {
				continue
			}
			wait = min(2*wait, everythingEvery)
		}
		if await(ctx, wait, nil, nil) != nil {
			return nil
		}
	}
}

// removed says whether this node was removed, by the log or by what it was told.
func (n *Peer) removed() (gone raftfsm.Removal, out bool) {
	if told := n.exit.told.Load(); told != nil {
		return *told, true
	}
	n.store.view(func(s *raftfsm.State) { gone, out = s.Removed[n.id()] })
	return gone, out
}

// endRemoved waits until the passes have stopped what this node runs.
func (n *Peer) endRemoved(ctx context.Context, gone raftfsm.Removal) error {
	err := &RemovedError{Removal: gone, Stopping: true}
	n.cfg.Log.Warn("this node was removed from the mesh: it stops what it runs, and ends", "by", gone.By, "at", gone.At)
	n.Poke()
	ctx, cancel := context.WithTimeout(ctx, stoppedWithin)
	defer cancel()
	for err.Stopping && await(ctx, catchUpEvery, nil, nil) == nil {
		err.Stopping = len(n.cfg.Processes.Status()) > 0
	}
	return err
}

// askStanding asks the others whether they know of a removal. What one says counts,
// since the network has proven that it is a node of this mesh.
func (n *Peer) askStanding(ctx context.Context) {
	var asked sync.WaitGroup
	for _, id := range n.Others() {
		asked.Go(func() {
			switch s, err := n.standingAt(ctx, id); {
			case err != nil:
				n.cfg.Log.Debug("ask whether this node is a member", "node", id, "err", err)
			case s.Removed != nil:
				n.exit.told.Store(s.Removed)
				n.rememberRemoval(*s.Removed)
			}
		})
	}
	asked.Wait()
}

// removalSetting is the local setting that holds what this node was told of its
// removal, so that it starts nothing when it is started again.
const removalSetting = "removal"

func (n *Peer) rememberRemoval(gone raftfsm.Removal) {
	text, err := json.Marshal(gone)
	if err == nil {
		err = n.local.Set(removalSetting, string(text))
	}
	if err != nil {
		n.cfg.Log.Error("remember that this node was removed", "err", err)
	}
}

func (n *Peer) recallRemoval() {
	text := n.local.Setting(removalSetting)
	if text == "" {
		return
	}
	var gone raftfsm.Removal
	if err := json.Unmarshal([]byte(text), &gone); err != nil {
		n.cfg.Log.Error("read that this node was removed", "err", err)
		return
	}
	n.exit.told.Store(&gone)
}

func (n *Peer) standingAt(ctx context.Context, node string) (s standing, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*dialTimeout)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{
		DialContext: dialPeer(n.cfg.Network, network.Join), DisableKeepAlives: true, ResponseHeaderTimeout: dialTimeout,
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+node+pathStanding, nil)
	if err != nil {
		return s, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return s, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return s, errors.New(resp.Status)
	}
	return s, json.NewDecoder(http.MaxBytesReader(nil, resp.Body, 1<<10)).Decode(&s)
}

// serveStanding tells a node that has a certificate of this mesh, and nobody
// else, whether it was removed.
func (n *Peer) serveStanding(w http.ResponseWriter, r *http.Request) {
	id, _ := r.Context().Value(peerKey{}).(string)
	if id == "" {
		http.Error(w, "only a node of this mesh may ask", http.StatusForbidden)
		return
	}
	var s standing
	n.store.view(func(state *raftfsm.State) {
		if gone, out := state.Removed[id]; out {
			s.Removed = &gone
		}
	})
	if s.Removed == nil && n.local.isRemoved(id) { // this node has not read the log yet
		s.Removed = &raftfsm.Removal{}
	}
	respond(w, http.StatusOK, s)
}
