// Package peer is one machine of the mesh: it applies the log, reconciles this
// node with what the log asks of it, and tells the log what it saw.
//
// Three ideas carry it:
//
//   - Gather, decide, act. What this node has to do is decided by pure functions
//     of the state (decide.go); acting on it is the business of workers.
//   - Levels, not edges. A wake-up carries no data. Every pass reads everything
//     again, deleting the absent succeeds, and what was seen but is not yet in
//     the log is compared with the log and told again (observed.go).
//   - Nothing slow in the loop. Each backing service, each binding and each
//     process has a worker of its own (worker.go), so one that hangs holds up no
//     other.
//
// What this node wants to change goes through Propose, which finds the leader.
// What it may never do is decide something of the mesh by itself: gossip is a
// hint, and holders, bindings and grants come from the log alone.
package peer

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"meshd/bus"
	"meshd/peer/consensus"
	"meshd/peer/identity"
	"meshd/peer/lease"
	"meshd/peer/network"
	"meshd/peer/supervise"
	"meshd/provision"
	"meshd/raftfsm"
)

// Bus is this node's messaging; *bus.Bus is the real one.
type Bus interface {
	ClientURL() string
	Apply(bus.Layout) error
	Call(ctx context.Context, caller bus.Caller, t bus.Target, data []byte) (bus.Reply, error)
	Forward(ctx context.Context, assignment, suffix string, c bus.Call) ([]byte, error)
}

// Surveyor tells who answers, who may connect, and what was refused; *bus.Bus is
// the real one.
type Surveyor interface {
	Admits(publicKey string) bool
	Survey(ctx context.Context, wait time.Duration) ([]bus.Answer, error)
	Refusals() []bus.Refusal
}

// Processes supervises this node's processes; *supervise.Supervisor is the real
// one.
type Processes interface {
	// Set makes specs what runs. Names in keep are left as they are, running or
	// not: what they should be is not known yet.
	Set(specs []supervise.Spec, keep []string)
	// Hold starts what of specs does not run, and ends nothing.
	Hold(specs []supervise.Spec)
	Status() map[string]supervise.Status
	Signal(name string, sig syscall.Signal) error
	Outputs
}

// Outputs is what processes wrote.
type Outputs interface {
	// Logs are the newest lines of a name's output; Follow writes what comes after
	// them until ctx ends.
	Logs(name string, lines int) ([]byte, error)
	Follow(ctx context.Context, name string, w io.Writer) error
}

// Host is what a Peer asks of the process that it runs in.
type Host interface {
	// Embedded is where this node's own service of that kind listens, if it has
	// one.
	Embedded(kind string) (provision.Address, bool)
	// Rekeyed says that the mesh's own keys have changed: see SecretsSetting.
	Rekeyed()
	// Expel closes everything that a node has open here.
	Expel(node string)
}

// Members says who seems alive, and where: hints, by node id.
type Members interface {
	Alive(node string) bool
	// Addresses are host:port of the mesh port and of the routes, or "".
	Addresses(node string) (mesh, route string)
}

// Config is everything that a Peer is made of.
type Config struct {
	Self        raftfsm.Node // ID, Name, Address, Route, Pin, Recipient, Level
	BindingRoot string       // where binding directories are written; tmpfs
	Keys        *identity.Keys
	Local       *Local
	Network     network.Network
	Raft        consensus.Config // Machine, Lead and Led are set here
	Bus         Bus
	Surveyor    Surveyor
	Processes   Processes
	Kinds       provision.Kinds
	Members     Members
	Host        Host
	Process     lease.Process // this one
	Log         *slog.Logger

	// Render fills in a template of an environment variable or an address.
	Render func(template string, data map[string]map[string]string) (string, error)
}

// everythingEvery is how often a pass runs without a wake-up: what a wake-up
// missed is late by this much at most.
const everythingEvery = 30 * time.Second

// Peer is one running node.
type Peer struct {
	cfg      Config
	store    *store
	raft     *consensus.Node
	client   *http.Client // to the other nodes
	local    *Local
	observed *observed
	loops    loops
	basis    *basis // what this node goes by
	leases   *leases
	exit     exit
	work     sync.WaitGroup
	ctx      context.Context // of Run; workers end with it

	mu        sync.Mutex
	services  map[string]*service  // by provider id
	consumers map[string]*consumer // by assignment
}

// exit is how nodes go out of the mesh.
type exit struct {
	leaving   atomic.Bool                     // this one by itself, soon or since: it should have no seat
	vacated   atomic.Bool                     // it leaves, and has none: it should have no vote
	told      atomic.Pointer[raftfsm.Removal] // a member said that this node was removed
	farewells atomic.Int32                    // removals whose answer is not out yet
	asked     atomic.Bool                     // every other member was asked once, since no leader was in sight
}

// loops are the pokes of a Peer's loops.
type loops struct {
	reconcile chan struct{}
	report    chan struct{}
	lead      chan struct{}
	renew     chan struct{}
}

// New opens the log and returns a Peer that Run brings to life.
func New(cfg Config) (*Peer, error) {
	n := &Peer{
		cfg: cfg, store: newStore(), local: cfg.Local, client: newClient(cfg.Network), loops: loops{make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{}, 1)},
		basis: newBasis(), leases: newLeases(cfg.Process),
		services: map[string]*service{}, consumers: map[string]*consumer{},
	}
	n.observed = newObserved(func() { poke(n.loops.report) })
	raft := cfg.Raft
	raft.Machine, raft.Lead = n.store, n.leading
	raft.Led = func() { poke(n.loops.renew) }
	node, err := consensus.Open(raft)
	if err != nil {
		return nil, err
	}
	n.raft = node
	n.basis.record = n.ownRecord()
	n.basis.had = n.basis.record != nil
	n.recallRemoval()
	if n.local.Setting(InitSetting) != "" {
		if err := node.Bootstrap(); err != nil && !errors.Is(err, consensus.ErrBootstrapped) {
			return nil, errors.Join(err, node.Close())
		}
	}
	return n, nil
}

func (n *Peer) id() string { return n.cfg.Self.ID }

func (n *Peer) meshID() (id string) {
	n.store.view(func(s *raftfsm.State) { id = s.Mesh.ID })
	return id
}

// Poke makes the node look at everything again: something outside changed.
func (n *Peer) Poke() { poke(n.loops.reconcile) }

// Run runs the node until ctx ends or something fails that it cannot go on
// without. Processes go on running, but for those of a node that was removed: see
// RemovedError.
func (n *Peer) Run(ctx context.Context) error {
	told := ctx // that it is to stop
	group, ctx := errgroup.WithContext(context.WithoutCancel(told))
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	n.ctx = ctx
	defer n.close()
	// A node that is told to stop renews no more, so that nothing more is granted to it,
	// and lets go of its seats while it can still say so.
	holding, cease := context.WithCancel(ctx)
	defer context.AfterFunc(told, cease)()
	group.Go(func() error {
		defer cease()
		n.renewing(holding)
		if ctx.Err() == nil {
			n.endLease()
			n.resign()
			stop()
		}
		return nil
	})
	group.Go(func() error { return n.raft.Run(ctx) })
	group.Go(func() error { return n.serve(ctx) })
	group.Go(func() error { return n.listen(ctx) })
	group.Go(func() error { return n.reconcile(ctx) })
	group.Go(func() error { return n.reporting(ctx) })
	group.Go(func() error { return n.announce(ctx) })
	group.Go(func() error { return n.standing(ctx) })
	group.Go(func() error { return n.verifying(ctx) })
	return group.Wait()
}

// close ends what Run started. Workers end with its context; what they have open
// is closed behind them.
func (n *Peer) close() {
	n.work.Wait()
	for _, s := range n.services {
		s.close()
	}
	n.client.CloseIdleConnections()
	if err := n.raft.Close(); err != nil {
		n.cfg.Log.Warn("close the log", "err", err)
	}
}

func (n *Peer) newWorker() *worker { return newWorker(n.ctx, &n.work, n.Poke) }

// nodeFields are what templates may say of this node.
func (n *Peer) nodeFields() map[string]string {
	host, _, err := net.SplitHostPort(n.cfg.Self.Address)
	if err != nil {
		host = n.cfg.Self.Address
	}
	return map[string]string{"name": n.cfg.Self.Name, "address": host, "id": n.id()}
}

func (n *Peer) serviceOf(provider string) *service {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.services[provider]
}

// announce keeps this node's own record in the log true: its addresses and what
// its build understands.
func (n *Peer) announce(ctx context.Context) error {
	if await(ctx, 0, n.basis.heard, nil) != nil {
		return nil // else the old addresses of an old state would be corrected again
	}
	for {
		changed := n.store.watch()
		self := n.cfg.Self
		var stale bool
		n.store.view(func(s *raftfsm.State) {
			r, member := s.Nodes[self.ID]
			stale = member && (r.Address != self.Address || r.Route != self.Route || r.Level != self.Level)
		})
		retry := time.Duration(0)
		if stale {
			result, err := n.Propose(ctx, Meshd, raftfsm.UpdateNode{ID: self.ID, Address: self.Address, Route: self.Route, Level: self.Level})
			if err = settled(result, err); err != nil {
				n.cfg.Log.Debug("announce this node's addresses", "err", err)
				changed, retry = nil, time.Second
			}
		}
		if err := await(ctx, retry, changed, nil); err != nil {
			return nil
		}
	}
}

// await returns when one of the channels is ready, after retry if that is not
// zero, or with an error when ctx ends.
func await(ctx context.Context, retry time.Duration, changed, poked <-chan struct{}) error {
	var after <-chan time.Time
	if retry > 0 {
		timer := time.NewTimer(retry)
		defer timer.Stop()
		after = timer.C
	}
	select {
	case <-changed:
	case <-poked:
	case <-after:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// tellAgain is how soon a report is repeated that the state did not take: it was
// made from a state that had moved on.
const tellAgain = time.Second

// reporting tells the log what this node saw and the log does not hold.
func (n *Peer) reporting(ctx context.Context) error {
	if await(ctx, 0, n.basis.heard, nil) != nil {
		return nil
	}
	var last raftfsm.NodeReport
	var told time.Time
	for {
		changed := n.store.watch()
		var r raftfsm.NodeReport
		n.store.view(func(s *raftfsm.State) {
			if _, member := s.Nodes[n.id()]; member {
				r = n.observed.report(s, n.id())
			}
		})
		retry := time.Duration(0)
		switch {
		case empty(r):
		case reflect.DeepEqual(r, last) && time.Since(told) < tellAgain:
			retry = tellAgain - time.Since(told)
		default:
			last, told = r, time.Now()
			result, err := n.Propose(ctx, Meshd, r)
			if err == nil && result.Rejection == nil {
				continue
			}
			n.cfg.Log.Debug("a report is told again", "err", settled(result, err))
			retry = firstRetry
			if result.Rejection != nil { // this node was removed, and may never hear of it
				changed, retry = nil, everythingEvery
			}
		}
		if err := await(ctx, retry, changed, n.loops.report); err != nil {
			return nil
		}
	}
}
