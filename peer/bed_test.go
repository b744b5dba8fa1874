package peer

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"meshd/gossip"
	"meshd/peer/consensus"
	"meshd/peer/identity"
	"meshd/peer/lease"
	"meshd/peer/manifest"
	"meshd/peer/network"
	"meshd/provision"
	"meshd/provision/memory"
	"meshd/raftfsm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bed is a mesh in virtual time: everything is real but for the bus, the
// processes, the backing services and the network, which are in memory. The
// nodes' own files are in a directory in memory where there is one.
type bed struct {
	*testing.T
	fabric  *network.Fabric
	world   *memory.World
	timing  consensus.Timing
	hints   gossip.Timing
	nodes   []*node
	mesh    string
	secrets Secrets
	ca      *identity.CA
}

// node is one machine of a bed. Its disk, its files and its processes outlive
// the meshd on it.
type node struct {
	*bed
	name   string
	dir    string
	keys   *identity.Keys
	disk   *consensus.Disk
	procs  *processes
	bus    *fakeBus
	kind   *memory.Kind
	record raftfsm.Node
	clock  *ownClock
	starts int64
	life   atomic.Int64 // which start the meshd that runs is of, 0 while none does

	mu      sync.Mutex
	expels  map[string]bool
	rekeyed int

	local  *Local // what follows is of one run of meshd
	net    network.Network
	gossip *gossip.Gossip
	peer   *Peer
	stop   context.CancelFunc
	ran    chan error
}

// scratch is a directory for a bed: fsync is quick in memory.
func scratch(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "meshd-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// newBed makes a mesh of these nodes, all up, with as many voters as it should
// have. It is called inside a bubble, which ends with the bed.
func newBed(t *testing.T, names ...string) *bed {
	t.Helper()
	return newSlowBed(t, consensus.LAN(), gossip.LAN(), names...)
}

// newSlowBed is newBed with other timing.
func newSlowBed(t *testing.T, timing consensus.Timing, hints gossip.Timing, names ...string) *bed {
	t.Helper()
	b := &bed{T: t, fabric: network.NewFabric(), world: memory.NewWorld(), timing: timing, hints: hints}
	root := scratch(t)
	for _, name := range names {
		n := &node{bed: b, name: name, dir: filepath.Join(root, name), disk: consensus.MemoryDisk(), kind: b.world.Kind(name), bus: &fakeBus{}, clock: &ownClock{began: time.Now(), rate: 1}, expels: map[string]bool{}}
		n.procs = &processes{kind: n.kind, apps: map[string]*app{}}
		keys, err := identity.Create(n.dir)
		b.must(err)
		n.keys = keys
		b.nodes = append(b.nodes, n)
	}
	for _, n := range b.nodes {
		n.bus.mesh = b.nodes
	}
	t.Cleanup(b.end)
	b.found()
	for _, n := range b.nodes[1:] {
		b.admit(n)
	}
	b.eventually(30*time.Second, "every node a member, with enough voters", func() bool {
		for _, n := range b.nodes {
			if v := n.peer.View(); !v.Quorum || len(v.State.Nodes) != len(names) || len(v.Voters) != consensus.VotersFor(len(names)) {
				return false
			}
		}
		return true
	})
	return b
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// found makes the mesh on the first node.
func (b *bed) found() {
	first := b.nodes[0]
	b.mesh = identity.NewMeshID()
	var err error
	b.ca, err = identity.NewCA(b.mesh, time.Now())
	b.must(err)
	_, recovery, err := identity.NewRecovery()
	b.must(err)
	b.secrets = Secrets{CAKey: b.ca.KeyPEM(), Gossip: make([]byte, 32)}
	first.net = b.fabric.Join(first.keys.NodeID())
	init, err := json.Marshal(raftfsm.Init{
		Mesh: raftfsm.Mesh{ID: b.mesh, Generation: 1, Level: raftfsm.Level, CACert: string(b.ca.CertPEM()), Recovery: recovery},
		Node: first.member(),
	})
	b.must(err)
	first.open(map[string]string{InitSetting: string(init), SecretsSetting: first.member().Secrets})
	first.start()
}

// admit makes n a member and starts it.
func (b *bed) admit(n *node) {
	n.net = b.fabric.Join(n.keys.NodeID())
	m := n.member()
	hash := "token-" + n.name
	b.eventually(10*time.Second, "the first node leads", func() bool { return b.nodes[0].state().Mesh.ID != "" })
	b.nodes[0].do(raftfsm.AddToken{Hash: hash, Expires: time.Now().Add(time.Hour)})
	b.nodes[0].do(raftfsm.Admit{Token: hash, Node: m})
	n.open(map[string]string{SecretsSetting: m.Secrets})
	n.start()
}

// member is n as the log has it.
func (n *node) member() raftfsm.Node {
	if n.record.ID != "" {
		return n.record
	}
	sealed, err := n.secrets.Seal(n.keys.Recipient())
	n.must(err)
	id := n.keys.NodeID()
	addr, _ := n.fabric.Addr(id)
	n.record = raftfsm.Node{
		ID: id, Name: n.name, Address: addr.String(), Route: addr.Addr().String() + ":6222", Pin: identity.Pin(n.keys.Public()),
		Recipient: n.keys.Recipient(), Secrets: sealed, Level: raftfsm.Level, Joined: time.Now().UTC(),
	}
	return n.record
}

func (n *node) open(settings map[string]string) {
	var err error
	n.local, err = OpenLocal(n.dir)
	n.must(err)
	for k, v := range settings {
		n.must(n.local.Set(k, v))
	}
}

// start runs a meshd on the node.
func (n *node) start() {
	n.Helper()
	quiet := slog.New(slog.DiscardHandler)
	if os.Getenv("MESHD_TEST_VERBOSE") != "" {
		quiet = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})).With("node", n.name)
	}
	id := n.keys.NodeID()
	n.bus.setDown(false)
	var err error
	n.peer, err = New(Config{
		Self: n.member(), BindingRoot: n.bindings(), Keys: n.keys, Local: n.local, Network: n.net,
		Raft: consensus.Config{Node: id, Streams: n.net, Disk: n.disk, Timing: n.timing, Log: quiet},
		Bus:  n.bus, Surveyor: n.bus, Processes: n.procs, Kinds: provision.Kinds{n.kind}, Members: n, Host: n,
		Render: manifest.Render, Log: quiet, Process: lease.Process{Clock: n.clock.read, Lock: n.disk.Lock()},
	})
	n.must(err)
	transport, err := network.Gossiping(n.net)
	n.must(err)
	n.gossip, err = gossip.Start(gossip.Config{
		Node: id, Mesh: n.mesh, Keys: [][]byte{n.secrets.Gossip}, Transport: transport, Record: gossip.Record{Level: raftfsm.Level},
		Peers: n.others, Changed: n.peer.Poke, Timing: n.hints, Log: slog.New(slog.DiscardHandler),
	})
	n.must(err)
	var ctx context.Context
	ctx, n.stop = context.WithCancel(context.Background())
	n.ran = make(chan error, 2)
	p, g := n.peer, n.gossip
	n.starts++
	n.life.Store(n.starts)
	go func() { n.ran <- p.Run(ctx) }()
	go func() { n.ran <- g.Run(ctx) }()
}

func (n *node) bindings() string { return filepath.Join(n.dir, "bindings") }

func (n *node) others() []gossip.Peer {
	var out []gossip.Peer
	for _, id := range n.peer.Others() {
		if addr, ok := n.fabric.Addr(id); ok {
			out = append(out, gossip.Peer{ID: id, Addr: addr.String()})
		}
	}
	return out
}

func (n *node) up() bool { return n.peer != nil }

// kill ends the node's meshd as kill -9 does. Its processes run on.
func (n *node) kill() {
	n.Helper()
	n.life.Store(0)
	n.fabric.Kill(n.keys.NodeID())
	n.down()
}

func (n *node) down() {
	n.bus.setDown(true)
	n.stop()
	<-n.ran // that it ended with its network is no news
	<-n.ran
	n.must(n.gossip.Close())
	n.must(n.net.Close())
	n.must(n.local.Close())
	n.life.Store(0)
	n.bus.end()
	n.peer, n.gossip, n.local, n.net = nil, nil, nil, nil
}

// restart starts a meshd again on what the one before has left.
func (n *node) restart() {
	n.Helper()
	n.net = n.fabric.Join(n.keys.NodeID())
	n.open(nil)
	n.start()
}

func (b *bed) end() {
	b.fabric.Heal()
	for _, n := range b.nodes {
		if n.up() {
			n.down()
		}
		n.procs.end()
	}
	time.Sleep(10 * time.Second) // memberlist's last probes: nothing may outlive the bubble
}

// Embedded, Rekeyed and Expel make a node the Host of its Peer.
func (n *node) Embedded(string) (provision.Address, bool) { return provision.Address{}, false }

func (n *node) Rekeyed() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.rekeyed++
}

// Expel refuses a node, the first time that it is asked for.
func (n *node) Expel(id string) {
	if n.expelled(id) {
		n.fabric.Expel(n.keys.NodeID(), id)
	}
}

// expelled marks a node as expelled, and reports whether it was not before.
func (n *node) expelled(id string) (first bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	first = !n.expels[id]
	n.expels[id] = true
	return first
}

func (n *node) rekeys() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.rekeyed
}

// Alive and Addresses make a node the Members of its Peer.
func (n *node) Alive(id string) bool {
	g := n.gossip
	return g != nil && g.Seen()[id].Alive
}
func (n *node) Addresses(string) (mesh, route string) { return "", "" }

// state is a copy of the node's state, which needs no quorum.
func (n *node) state() *raftfsm.State { return n.peer.View().State }

func (n *node) propose(c raftfsm.Command) error {
	result, err := n.peer.Propose(n.Context(), "root@"+n.name, c)
	return settled(result, err)
}

func (n *node) do(c raftfsm.Command) {
	n.Helper()
	n.must(n.propose(c))
}

func (b *bed) node(name string) *node {
	return b.nodes[slices.IndexFunc(b.nodes, func(n *node) bool { return n.name == name })]
}

// leader waits for a node that leads and that all others who are up follow.
func (b *bed) leader() (l *node) {
	b.Helper()
	b.eventually(20*time.Second, "one leader", func() bool {
		l = nil
		for _, n := range b.nodes {
			if n.up() && n.peer.raft.State() == "leader" {
				l = n
			}
		}
		return l != nil && l.peer.raft.Barrier(b.Context()) == nil
	})
	return l
}

// eventually waits for a condition, in virtual time.
func (b *bed) eventually(within time.Duration, what string, ok func() bool) {
	b.Helper()
	end := time.Now().Add(within)
	for !ok() {
		if time.Now().After(end) {
			b.Fatalf("not within %v: %s\n%s", within, what, b.picture())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// picture is what each node knows, for a failure's text.
func (b *bed) picture() string {
	var out strings.Builder
	for _, n := range b.nodes {
		if !n.up() {
			fmt.Fprintf(&out, "%s is down\n", n.name)
			continue
		}
		v := n.peer.View()
		fmt.Fprintf(&out, "%s: %s, index %d, leader %q, voters %d, missing %v\n", n.name, n.peer.raft.State(), v.State.Index, v.State.NodeName(v.Leader), len(v.Voters), v.Missing)
		for _, id := range sortedKeys(v.State.Bindings) {
			bind := v.State.Bindings[id]
			fmt.Fprintf(&out, "  %s at %s: %s", id, bind.Provider, bind.Phase())
			for _, c := range bind.Credentials {
				fmt.Fprintf(&out, " [%d minted=%v delivered=%v seen=%v]", c.Generation, c.Minted, c.Delivered, c.Seen)
			}
			fmt.Fprintf(&out, " provider: %+v consumer: %+v\n", bind.AtProvider, bind.AtConsumer)
		}
		for _, id := range sortedKeys(v.State.Withdrawals) {
			fmt.Fprintf(&out, "  withdrawal %s: %+v\n", id, v.State.Withdrawals[id].Trouble)
		}
		for _, id := range sortedKeys(v.State.Providers) {
			fmt.Fprintf(&out, "  provider %s: ready=%v %+v\n", id, v.State.Providers[id].Ready, v.State.Providers[id].Trouble)
		}
		for _, try := range n.peer.Tries() {
			fmt.Fprintf(&out, "  tries %s: %s %s %s\n", try.Key, try.Step, try.Class, try.Text)
		}
	}
	return out.String()
}

// phase waits until every node that is up sees the binding in that phase.
func (b *bed) phase(within time.Duration, binding string, want raftfsm.Phase) {
	b.Helper()
	b.eventually(within, binding+" is "+string(want), func() bool {
		return !slices.ContainsFunc(b.nodes, func(n *node) bool { return n.up() && n.state().Bindings[binding].Phase() != want })
	})
}

// database is a module that provides a memory service at host:1, and its assignment.
func database(name, node, host string) raftfsm.Documents {
	return raftfsm.Documents{
		Modules: []raftfsm.Module{{Name: name + "-store", Provides: map[string]raftfsm.Provide{"memory": {Address: host + ":1", TLS: provision.Off}}}},
		Assigns: []raftfsm.Assign{{Module: name + "-store", Nodes: []string{node}, As: name}},
	}
}

// shop is a module that uses a memory service of that provider, and its assignment.
func shop(name, node, provider string) raftfsm.Documents {
	return raftfsm.Documents{
		Modules: []raftfsm.Module{{
			Name: name, Run: raftfsm.Run{Exec: []string{"/bin/" + name}},
			Requires: map[string]raftfsm.Requirement{"db": {Kind: "memory", Provider: provider}},
		}},
		Assigns: []raftfsm.Assign{{Module: name, Nodes: []string{node}}},
	}
}

func push(docs ...raftfsm.Documents) raftfsm.Push {
	var p raftfsm.Push
	for _, d := range docs {
		p.Documents.Modules = append(p.Documents.Modules, d.Modules...)
		p.Documents.Assigns = append(p.Documents.Assigns, d.Assigns...)
		p.Documents.Seats = append(p.Documents.Seats, d.Seats...)
	}
	return p
}

// logins are those of ours that the service at an address has.
func (b *bed) logins(host string) []string {
	p, err := b.world.Kind("observer").Open(provision.Config{Mesh: b.mesh, Address: provision.Address{Host: host, Port: 1}})
	b.must(err)
	found, err := p.Observe(b.Context())
	b.must(err)
	var names []string
	for _, f := range found {
		if f.Login {
			names = append(names, f.Name)
		}
	}
	return names
}
