// Package gossip tells which nodes of the mesh seem alive, and where they are. It is hints only and
// decides nothing: a hint may be seconds late, and two nodes may be given different ones. A cut
// between two nodes is no hint at all while a third reaches both.
//
// It wraps hashicorp/memberlist, whose packets and streams carry the mesh id as their label and are
// encrypted with a key that only members hold.
//
//	Start ──> Run (rejoins, announces) ──> Leave, at a planned exit only ──> Close
//
// Invariants:
//
//   - Changed is only a poke: it carries nothing, never blocks memberlist, and may be sent for
//     nothing. Whoever is poked reads Seen again.
//   - A node is its id. Its address and record are what it said last.
//   - A partition of any length heals: every member that does not seem alive is asked again and
//     again, for memberlist itself forgets the dead after a minute.
package gossip

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"
)

const (
	// KeySize is the size of a key in bytes: AES-256.
	KeySize = 32
	// maxRecord is memberlist's bound for what a node says about itself, in bytes.
	maxRecord = memberlist.MetaMaxSize
	// rejoining is how many members are asked at the same time.
	rejoining = 8
	// announceTimeout is how long to wait for somebody to take a new record; gossip goes on after it.
	announceTimeout = time.Second
)

// Record is what a node says about itself. Encoded it fits 512 bytes.
type Record struct {
	Build  string `json:"b,omitempty"` // version of meshd
	Level  int    `json:"l,omitempty"` // feature level that it supports
	Mesh   string `json:"m,omitempty"` // host:port of its mesh port
	Routes string `json:"r,omitempty"` // host:port of its bus routes
}

// Seen is what is believed about a node.
type Seen struct {
	Alive  bool
	Addr   netip.AddrPort // where it gossips from
	Record Record         // what it said last
	Since  time.Time      // when Alive became what it is
}

// Peer is a member to look for.
type Peer struct {
	ID   string
	Addr string // host:port of its mesh port, as last known
}

// Timing is how fast silence is noticed, at which price in packets.
type Timing struct {
	Probe        time.Duration // one random member is probed so often
	ProbeTimeout time.Duration // after which other members are asked to probe it
	Spread       time.Duration // news are passed on so often
	Sync         time.Duration // a random member is compared with in full so often
	Stream       time.Duration // for dialling and for each read and write of a stream
	Rejoin       time.Duration // members that do not seem alive are asked so often
	Reclaim      time.Duration // a dead node may come back at another address after so long
	Dead         time.Duration // the dead are still told so for so long, then forgotten
}

// LAN notices a dead node within about 7 s, up to 30 nodes.
func LAN() Timing {
	return Timing{
		Probe:        time.Second, // memberlist's default for a LAN, as the next
		ProbeTimeout: 500 * time.Millisecond,
		Spread:       500 * time.Millisecond, // news reaches 20 members in three rounds; 200 ms wake a node at rest thrice a second more
		Sync:         30 * time.Second,       // memberlist's default for a LAN
		Stream:       3 * time.Second,        // a LAN answers in milliseconds; 10 s keep a rejoin waiting for the dead
		Rejoin:       15 * time.Second,       // what an operator waits after mending a cable; one dial a member
		Reclaim:      30 * time.Second,       // longer than a restart, shorter than patience
		Dead:         60 * time.Second,       // above Reclaim and two rejoins, so that the dead learn that they are
	}
}

// WAN suits round trips of up to 150 ms; a dead node is noticed within about a minute.
func WAN() Timing {
	t := LAN()
	t.Probe, t.ProbeTimeout = 5*time.Second, 3*time.Second
	t.Spread, t.Sync, t.Stream = 500*time.Millisecond, time.Minute, 10*time.Second
	return t
}

// Config says who gossips, with whom and over what.
type Config struct {
	Node      string   // id of this node
	Mesh      string   // id of the mesh: packets with another are dropped
	Keys      [][]byte // 32 bytes each; the first encrypts, all decrypt
	Transport memberlist.NodeAwareTransport
	Record    Record
	Peers     func() []Peer // all members that are known, this node or not
	Changed   func()        // called when something may have changed; must not block
	Timing    Timing
	Log       *slog.Logger
}

func (c Config) validate() error {
	faults := []error{checkKeys(c.Keys)}
	if c.Node == "" || c.Mesh == "" {
		faults = append(faults, errors.New("node and mesh must have ids"))
	}
	if len(c.Mesh) > memberlist.LabelMaxSize {
		faults = append(faults, fmt.Errorf("mesh id of %d bytes: the most is %d", len(c.Mesh), memberlist.LabelMaxSize))
	}
	if c.Transport == nil || c.Peers == nil || c.Changed == nil || c.Log == nil {
		faults = append(faults, errors.New("transport, peers, changed and log must all be set"))
	}
	t := c.Timing
	for _, d := range []time.Duration{t.Probe, t.ProbeTimeout, t.Spread, t.Sync, t.Stream, t.Rejoin, t.Reclaim, t.Dead} {
		if d <= 0 {
			faults = append(faults, fmt.Errorf("timing %+v: every time must be positive", t))
			break
		}
	}
	return errors.Join(faults...)
}

func checkKeys(keys [][]byte) error {
	if len(keys) == 0 {
		return errors.New("there must be a key: gossip is never in clear")
	}
	for i, k := range keys {
		if len(k) != KeySize {
			return fmt.Errorf("key %d has %d bytes: it must have %d", i, len(k), KeySize)
		}
	}
	return nil
}

// Gossip is one node's part in the gossip of its mesh.
type Gossip struct {
	cfg      Config
	list     *memberlist.Memberlist
	keys     *memberlist.Keyring
	announce chan struct{} // poked when the record changed

	mu     sync.Mutex // never held while memberlist is called: its callbacks take it
	record []byte
	seen   map[string]Seen

	ending sync.Mutex // Leave after Close would panic in memberlist
	ended  bool
}

// Start joins the gossip as a node that knows nobody yet; Run looks for the others. Close must be
// called. The transport is shut down by Close, and when Start fails.
func Start(cfg Config) (*Gossip, error) {
	g, err := start(cfg)
	if err == nil {
		return g, nil
	}
	if cfg.Transport != nil {
		err = errors.Join(err, cfg.Transport.Shutdown())
	}
	return nil, fmt.Errorf("start gossip of node %s: %w", cfg.Node, err)
}

func start(cfg Config) (*Gossip, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	record, err := encode(cfg.Record)
	if err != nil {
		return nil, err
	}
	keys, err := memberlist.NewKeyring(cfg.Keys, cfg.Keys[0])
	if err != nil {
		return nil, err
	}
	ip, port, err := cfg.Transport.FinalAdvertiseAddr("", 0)
	if err != nil {
		return nil, err
	}
	g := &Gossip{
		cfg:      cfg,
		keys:     keys,
		announce: make(chan struct{}, 1),
		record:   record,
		seen:     map[string]Seen{},
	}
	t := cfg.Timing
	mc := memberlist.DefaultLANConfig()
	mc.Name = cfg.Node
	mc.Label = cfg.Mesh
	mc.Transport = cfg.Transport
	mc.RequireNodeNames = true // streams go to nodes, not to addresses
	mc.BindAddr, mc.BindPort = ip.String(), port
	mc.AdvertiseAddr, mc.AdvertisePort = ip.String(), port
	mc.Keyring = keys
	mc.Delegate, mc.Events = delegate{g}, delegate{g}
	mc.ProbeInterval, mc.ProbeTimeout = t.Probe, t.ProbeTimeout
	mc.GossipInterval, mc.PushPullInterval = t.Spread, t.Sync
	mc.TCPTimeout = t.Stream
	mc.DeadNodeReclaimTime, mc.GossipToTheDeadTime = t.Reclaim, t.Dead
	mc.Logger = log.New(lines{cfg.Log}, "", 0)
	if g.list, err = memberlist.Create(mc); err != nil {
		return nil, err
	}
	return g, nil
}

func encode(r Record) ([]byte, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode record: %w", err)
	}
	if len(b) > maxRecord {
		return nil, fmt.Errorf("encode record: it has %d bytes, the most is %d", len(b), maxRecord)
	}
	return b, nil
}

// Run announces new records and looks for members that do not seem alive, until ctx ends.
func (g *Gossip) Run(ctx context.Context) error {
	for {
		g.rejoin(ctx)
		// A fifth more or less, so that the two sides of a mended cut do not stay in step.
		pause := time.Duration((0.8 + 0.4*rand.Float64()) * float64(g.cfg.Timing.Rejoin))
		if !g.idle(ctx, pause) {
			return nil
		}
	}
}

// idle announces what there is to announce for a while, and reports false when ctx ended.
func (g *Gossip) idle(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-t.C:
			return true
		case <-g.announce:
			if err := g.list.UpdateNode(announceTimeout); err != nil {
				g.cfg.Log.Debug("nobody has taken the new record yet", "err", err)
			}
		}
	}
}

// rejoin asks the members that do not seem alive, and forgets nodes that are dead and no members.
func (g *Gossip) rejoin(ctx context.Context) {
	peers := g.cfg.Peers()
	seen := g.Seen()
	var asks errgroup.Group
	asks.SetLimit(rejoining)
	member := map[string]bool{g.cfg.Node: true}
	for _, p := range peers {
		member[p.ID] = true
		if p.ID == g.cfg.Node || seen[p.ID].Alive || ctx.Err() != nil {
			continue
		}
		asks.Go(func() error {
			// memberlist's notation for a node at an address.
			if _, err := g.list.Join([]string{p.ID + "/" + p.Addr}); err != nil {
				g.cfg.Log.Debug("a member does not answer", "node", p.ID, "err", err)
			}
			return nil
		})
	}
	_ = asks.Wait() // they only log
	g.mu.Lock()
	defer g.mu.Unlock()
	maps.DeleteFunc(g.seen, func(id string, s Seen) bool { return !s.Alive && !member[id] })
}

// Seen is what is believed of each node that was ever heard of, this one included.
func (g *Gossip) Seen() map[string]Seen {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.seen)
}

// Update replaces what this node says about itself. Run announces it.
func (g *Gossip) Update(r Record) error {
	b, err := encode(r)
	if err != nil {
		return err
	}
	g.mu.Lock()
	g.record = b
	g.mu.Unlock()
	select {
	case g.announce <- struct{}{}:
	default:
	}
	return nil
}

// SetKeys replaces the keys: the first encrypts, all decrypt. To rotate without losing anybody, give
// every node the new key behind the old one, then before it, then alone.
func (g *Gossip) SetKeys(keys [][]byte) error {
	if err := checkKeys(keys); err != nil {
		return fmt.Errorf("set gossip keys: %w", err)
	}
	for _, k := range keys {
		if err := g.keys.AddKey(k); err != nil {
			return fmt.Errorf("set gossip keys: %w", err)
		}
	}
	if err := g.keys.UseKey(keys[0]); err != nil {
		return fmt.Errorf("set gossip keys: %w", err)
	}
	for _, old := range g.keys.GetKeys() {
		if containsKey(keys, old) {
			continue
		}
		if err := g.keys.RemoveKey(old); err != nil {
			return fmt.Errorf("set gossip keys: %w", err)
		}
	}
	return nil
}

func containsKey(keys [][]byte, k []byte) bool {
	for _, x := range keys {
		if bytes.Equal(x, k) {
			return true
		}
	}
	return false
}

// Leave tells the others that this node goes, so that they need not find out. It is final for the
// process. An error says that nobody took the news in time.
func (g *Gossip) Leave(timeout time.Duration) error {
	g.ending.Lock()
	defer g.ending.Unlock()
	if g.ended {
		return nil
	}
	if err := g.list.Leave(timeout); err != nil {
		return fmt.Errorf("leave gossip: %w", err)
	}
	return nil
}

// Close stops gossiping, without a word, and shuts the transport down. Run must have returned or be
// about to.
func (g *Gossip) Close() error {
	g.ending.Lock()
	defer g.ending.Unlock()
	g.ended = true
	if err := g.list.Shutdown(); err != nil {
		return fmt.Errorf("close gossip: %w", err)
	}
	return nil
}

// delegate is what memberlist calls, under its own lock. It notes and pokes, and calls nothing back.
type delegate struct{ g *Gossip }

func (d delegate) NotifyJoin(n *memberlist.Node)   { d.note(n, true) }
func (d delegate) NotifyUpdate(n *memberlist.Node) { d.note(n, true) }
func (d delegate) NotifyLeave(n *memberlist.Node)  { d.note(n, false) }

func (d delegate) note(n *memberlist.Node, alive bool) {
	s := Seen{Alive: alive, Since: time.Now()}
	if ip, ok := netip.AddrFromSlice(n.Addr); ok {
		s.Addr = netip.AddrPortFrom(ip.Unmap(), n.Port)
	}
	// A later version may say more; what cannot be read at all is no reason to call a node dead.
	if err := json.Unmarshal(n.Meta, &s.Record); err != nil && len(n.Meta) > 0 {
		d.g.cfg.Log.Warn("unreadable gossip record", "node", n.Name, "err", err)
	}
	d.g.mu.Lock()
	if old, ok := d.g.seen[n.Name]; ok && old.Alive == alive {
		s.Since = old.Since
	}
	d.g.seen[n.Name] = s
	d.g.mu.Unlock()
	d.g.cfg.Changed()
}

func (d delegate) NodeMeta(int) []byte {
	d.g.mu.Lock()
	defer d.g.mu.Unlock()
	return d.g.record
}

func (delegate) NotifyMsg([]byte)                {}
func (delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (delegate) LocalState(bool) []byte          { return nil }
func (delegate) MergeRemoteState([]byte, bool)   {}

var (
	_ memberlist.Delegate      = delegate{}
	_ memberlist.EventDelegate = delegate{}
)

// lines passes memberlist's log on to slog, by the level in brackets that begins each line.
type lines struct{ log *slog.Logger }

func (l lines) Write(b []byte) (int, error) {
	level, text := slog.LevelInfo, bytes.TrimSpace(b)
	for prefix, lv := range map[string]slog.Level{
		"[DEBUG] ": slog.LevelDebug, "[INFO] ": slog.LevelInfo, "[WARN] ": slog.LevelWarn,
		"[ERR] ": slog.LevelError, "[ERROR] ": slog.LevelError,
	} {
		if rest, ok := bytes.CutPrefix(text, []byte(prefix)); ok {
			level, text = lv, rest
			break
		}
	}
	l.log.Log(context.Background(), level, string(text))
	return len(b), nil
}
