package cli

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"meshd/bus"
	"meshd/gossip"
	"meshd/peer"
	"meshd/peer/api"
	"meshd/peer/consensus"
	"meshd/peer/identity"
	"meshd/peer/lease"
	"meshd/peer/manifest"
	"meshd/peer/network"
	"meshd/peer/supervise"
	"meshd/provision"
	"meshd/provision/jetstream"
	"meshd/provision/postgres"
	"meshd/raftfsm"
)

// node is one running node: every part, wired by hand.
type node struct {
	place
	settings
	log     *slog.Logger
	keys    *identity.Keys
	creds   *identity.Credentials
	local   *peer.Local
	port    *network.Port
	bus     *bus.Bus
	store   *jetstream.Server
	procs   *supervise.Supervisor
	members *members
	peer    *peer.Peer
	current atomic.Pointer[peer.Peer] // for handshakes, which may come before peer is there
	leave   context.CancelFunc        // ends the node after `meshd leave`
}

// run brings the node in the directory to life and runs it until ctx ends. say is
// called once it serves and has heard a leader out; and before, with heard false,
// if that takes longer than a leader needs, or a moment where the node serves
// without one.
//
// The order: what locks the directory first, so that two processes never run
// one; then who we are; then the ports, from the innermost to the one that lets
// the log in; the parts that act on the log last.
func run(ctx context.Context, p place, log *slog.Logger, say func(n *node, heard bool)) (err error) {
	s, err := p.load()
	if err != nil {
		return fmt.Errorf("%w; make a mesh with meshd init, or join one with meshd join", err)
	}
	n := &node{place: p, settings: s, log: log}
	var opened closers
	defer func() { err = errors.Join(err, opened.close()) }()
	openBus := func(c *closers) error { return n.openBus(ctx, c) }
	for _, open := range []func(*closers) error{n.openLocal, n.openIdentity, n.openPort, openBus, n.openStore, n.openProcesses, n.openPeer, n.openMembers} {
		if err := open(&opened); err != nil {
			return err
		}
	}
	listener, err := api.Listen(p.socket())
	if err != nil {
		return err
	}
	ctx, n.leave = context.WithCancel(ctx)
	defer n.leave()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return n.procs.Run(ctx) })
	group.Go(func() error { return n.members.run(ctx) })
	group.Go(func() error { return n.peer.Run(ctx) })
	group.Go(func() error { return n.backend().Serve(ctx, listener) })
	group.Go(func() error {
		within := leaderWithin
		if n.peer.HasRecord() {
			within = recordWithin
		}
		waiting, stop := context.WithTimeout(ctx, within)
		defer stop()
		if n.peer.Up(waiting, true) != nil && ctx.Err() == nil {
			say(n, false)
		}
		if n.peer.Up(ctx, true) == nil {
			say(n, true)
		}
		return nil
	})
	err = group.Wait()
	if removed, ok := errors.AsType[*peer.RemovedError](err); ok {
		return fmt.Errorf("%w; to use this machine again delete %s, with the built-in buckets in it, and join it as a new node with a new token", removed, n.dir)
	}
	return err
}

const (
	// leaderWithin is how long a node that knows nothing waits for a leader without
	// a word: elections take 0.8 s, and all nodes may be starting at once.
	leaderWithin = 4 * time.Second
	// recordWithin is as much for a node that serves by its record: a leader that is
	// there has been heard by then, most often.
	recordWithin = 400 * time.Millisecond
)

// closers are closed in the reverse order of their opening.
type closers []func() error

func (c *closers) add(f func() error) { *c = append(*c, f) }

func (c closers) close() error {
	var errs []error
	for i := len(c) - 1; i >= 0; i-- {
		errs = append(errs, c[i]())
	}
	return errors.Join(errs...)
}

func (n *node) openLocal(c *closers) (err error) {
	if n.local, err = peer.OpenLocal(n.dir); err != nil {
		return err
	}
	c.add(n.local.Close)
	return nil
}

func (n *node) openIdentity(*closers) error {
	keys, err := identity.Load(n.identity())
	if err != nil {
		return err
	}
	cert, ca, err := n.certificates()
	if err != nil {
		return err
	}
	tlsCert, err := keys.TLSCertificate(cert, ca)
	if err != nil {
		return err
	}
	n.keys = keys
	if n.creds, err = identity.NewCredentials(n.Mesh, tlsCert, ca); err != nil {
		return err
	}
	n.creds.Allow = func(id string) error {
		if p := n.current.Load(); p != nil {
			return p.Admitted(id)
		}
		return errors.New("this node is starting")
	}
	return nil
}

func (n *node) certificates() (cert, ca []byte, err error) {
	if cert, err = os.ReadFile(n.cert()); err != nil {
		return nil, nil, err
	}
	ca, err = os.ReadFile(n.ca())
	return cert, ca, err
}

func (n *node) openPort(c *closers) (err error) {
	n.port, err = network.OpenPort(network.Config{
		Bind: n.listen(n.MeshPort), Advertise: n.reach(n.MeshPort),
		Server: n.creds.Server(network.Raft, network.Gossip, network.Peer, network.Join),
		Client: n.creds.Client,
		PeerNode: func(s tls.ConnectionState) (string, error) {
			if len(s.PeerCertificates) == 0 {
				return "", nil // wants to join; the port lets it do nothing else
			}
			return identity.PeerNode(s, n.Mesh)
		},
		Resolver: func(id string) (string, bool) {
			if p := n.current.Load(); p != nil {
				return p.Address(id)
			}
			return "", false
		},
		Limits: network.DefaultLimits(), Log: n.log.With("part", "network"),
	})
	if err != nil {
		return err
	}
	c.add(n.port.Close)
	return nil
}

// clientPortSetting keeps the bus's client port, so that processes find it again
// after a restart of meshd.
const clientPortSetting = "bus-client-port"

func (n *node) openBus(ctx context.Context, c *closers) error {
	kept, err := strconv.Atoi("0" + n.local.Setting(clientPortSetting))
	if err != nil {
		return fmt.Errorf("read the bus's client port: %w", err)
	}
	port, err := clientPort(kept, []int{n.MeshPort, n.RoutePort, n.StorePort}, n.log)
	if err != nil {
		return err
	}
	n.bus, err = bus.Start(ctx, bus.Config{
		Mesh: n.Mesh, NodeID: n.keys.NodeID(), NodeName: n.Name, ClientPort: port,
		RouteAddr: n.listen(n.RoutePort), RouteTLS: n.creds.Route(), Log: n.log.With("part", "bus"), Clock: lease.Boottime,
	})
	if err != nil {
		return err
	}
	c.add(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), stopWithin)
		defer cancel()
		return n.bus.Close(ctx)
	})
	return n.local.Set(clientPortSetting, strconv.Itoa(n.bus.ClientPort()))
}

// stopWithin bounds an orderly stop of one part: calls under way end or do not.
const stopWithin = 5 * time.Second

func (n *node) openStore(c *closers) (err error) {
	n.store, err = jetstream.StartServer(jetstream.ServerConfig{
		Dir: n.place.store(), Listen: n.listen(n.StorePort), TLS: n.creds.Service(), Log: n.log.With("part", "store"), Write: identity.WriteFile,
	})
	if err != nil {
		return err
	}
	c.add(func() error { n.store.Close(); return nil })
	return nil
}

func (n *node) openProcesses(*closers) (err error) {
	n.procs, err = supervise.New(supervise.Config{
		Dir: n.logs(), Records: peer.Children{Local: n.local}, Log: n.log.With("part", "processes"), Write: identity.WriteFile,
		Changed: func() {
			if p := n.current.Load(); p != nil {
				p.Poke()
			}
		},
	})
	return err
}

// kinds are the sorts of backing services that this build provisions.
func (n *node) kinds() provision.Kinds {
	return provision.Kinds{postgres.Kind{}, jetstream.KV(n.store), jetstream.Object(n.store)}
}

// Embedded is where this node's own buckets are.
func (n *node) Embedded(kind string) (provision.Address, bool) {
	if kind != jetstream.KV(nil).Name() && kind != jetstream.Object(nil).Name() {
		return provision.Address{}, false
	}
	_, ca, err := n.certificates()
	if err != nil {
		return provision.Address{}, false
	}
	return provision.Address{Host: n.Advertise, Port: n.StorePort, TLS: provision.VerifyFull, CA: string(ca)}, true
}

func (n *node) openPeer(*closers) error {
	disk, err := consensus.OpenDisk(n.raft(), n.log.With("part", "raft"))
	if err != nil {
		return err
	}
	n.members = &members{}
	n.peer, err = peer.New(peer.Config{
		Self: raftfsm.Node{
			ID: n.keys.NodeID(), Name: n.Name, Address: n.reach(n.MeshPort), Route: n.reach(n.RoutePort),
			Pin: identity.Pin(n.keys.Public()), Recipient: n.keys.Recipient(), Level: raftfsm.Level,
		},
		BindingRoot: n.bindings(), Keys: n.keys, Local: n.local, Network: n.port,
		Raft: consensus.Config{Node: n.keys.NodeID(), Streams: n.port, Disk: disk, Timing: consensus.LAN(), Log: n.log.With("part", "raft")},
		Bus:  n.bus, Surveyor: n.bus, Processes: n.procs, Kinds: n.kinds(), Members: n.members,
		Host: n, Render: manifest.Render, Log: n.log.With("part", "peer"), Process: lease.Process{Clock: lease.Boottime, Lock: disk.Lock()},
	})
	if err != nil {
		return err
	}
	n.current.Store(n.peer)
	return nil
}

// openMembers starts gossip with the mesh's key.
func (n *node) openMembers(c *closers) error {
	secrets, err := peer.OpenSecrets(n.keys, n.local.Setting(peer.SecretsSetting))
	if err != nil {
		return err
	}
	transport, err := network.Gossiping(n.port)
	if err != nil {
		return err
	}
	g, err := gossip.Start(gossip.Config{
		Node: n.keys.NodeID(), Mesh: n.Mesh, Keys: [][]byte{secrets.Gossip}, Transport: transport,
		Record: gossip.Record{Build: thisBuild().Version, Level: raftfsm.Level, Mesh: n.reach(n.MeshPort), Routes: n.reach(n.RoutePort)},
		Peers:  n.others, Changed: n.peer.Poke, Timing: gossip.LAN(), Log: n.log.With("part", "gossip"),
	})
	if err != nil {
		return errors.Join(err, transport.Shutdown())
	}
	c.add(g.Close)
	n.members.key = secrets.Gossip
	n.members.gossip.Store(g)
	return nil
}

// others are the members that gossip looks for.
func (n *node) others() []gossip.Peer {
	var out []gossip.Peer
	for _, id := range n.peer.Others() {
		if addr, ok := n.peer.Address(id); ok {
			out = append(out, gossip.Peer{ID: id, Addr: addr})
		}
	}
	return out
}

// Expel closes every stream of a node that was removed.
func (n *node) Expel(id string) { n.port.Expel(id) }

// Rekeyed gives gossip the mesh's newest key.
func (n *node) Rekeyed() {
	secrets, err := peer.OpenSecrets(n.keys, n.local.Setting(peer.SecretsSetting))
	if err == nil {
		err = n.members.rekey(secrets.Gossip)
	}
	if err != nil {
		n.log.Error("use the mesh's new keys", "err", err)
	}
}

// newLog writes what an operator should read, as text.
func newLog(w io.Writer, verbose bool) *slog.Logger {
	level := slog.LevelWarn
	if verbose {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level}))
}
