// Package gossip says who seems alive, and where. It decides nothing: what it
// says may be seconds old and wrong, and is used to find an address, to choose
// among candidates and to be quick, never to take anything from anybody.
//
// It is memberlist with the traps of a long life closed:
//
//   - A member is named by its node id, never by a host name, so a machine that
//     comes back with another address is the same member.
//   - memberlist forgets the dead, and two halves that were apart for longer
//     than that would never meet again. Run joins every known member that is not
//     alive again and again.
//   - Packets are encrypted with the mesh's key and carry its id; a node of
//     another mesh is not heard.
//   - Callbacks of the library only poke: they run under its locks.
package gossip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	// rejoinEvery is how often members that are not alive are looked for: soon
	// after a long split heals, and cheap.
	rejoinEvery = 15 * time.Second
	// rejoinSoon is how often while this node sees nobody at all.
	rejoinSoon = time.Second
	// reclaimAfter is when a dead member's name may come back with another
	// address at once.
	reclaimAfter = 30 * time.Second
	// gossipToDead is how long the dead are told of their death, which they refute.
	gossipToDead = 60 * time.Second
	// maxMeta is memberlist's own limit, in bytes.
	maxMeta = memberlist.MetaMaxSize
	keySize = 32 // AES-256
)

// Meta is what a member says of itself with every sign of life.
type Meta struct {
	Mesh  string `json:"m"` // host:port of its mesh port
	Route string `json:"r"` // host:port of its bus routes
}

// Seen is what is known of one member.
type Seen struct {
	Alive bool
	Since time.Time // of Alive, by this node's clock
	Meta  Meta
}

// Config is everything that a Gossip is made of.
type Config struct {
	NodeID    string
	Mesh      string // id; packets of another are dropped
	Key       []byte // 32 bytes
	Transport memberlist.NodeAwareTransport
	Meta      Meta
	// Peers lists the ids of all other members, and Address finds one.
	Peers   func() []string
	Address func(node string) (addr string, ok bool)
	Changed func() // poked when somebody came, went or moved; must not block
	Log     *slog.Logger
}

func (c Config) validate() error {
	var faults []error
	if c.NodeID == "" || c.Mesh == "" {
		faults = append(faults, errors.New("the node and the mesh must have an id"))
	}
	if len(c.Key) != keySize {
		faults = append(faults, fmt.Errorf("the key has %d bytes, and must have %d", len(c.Key), keySize))
	}
	if c.Transport == nil || c.Peers == nil || c.Address == nil || c.Changed == nil || c.Log == nil {
		faults = append(faults, errors.New("transport, peers, address, changed and log must all be set"))
	}
	if b, err := json.Marshal(c.Meta); err != nil || len(b) > maxMeta {
		faults = append(faults, fmt.Errorf("the node's record has %d bytes, and at most %d are carried", len(b), maxMeta))
	}
	return errors.Join(faults...)
}

// Gossip is this node among the members.
type Gossip struct {
	cfg  Config
	list *memberlist.Memberlist
	keys *memberlist.Keyring

	mu    sync.Mutex
	since map[string]change
}

// change is when a member was last seen to come or go.
type change struct {
	alive bool
	at    time.Time
	meta  Meta
}

// Start makes this node a member as far as gossip goes. Run must follow.
func Start(cfg Config) (*Gossip, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("start gossip: %w", err)
	}
	keys, err := memberlist.NewKeyring(nil, cfg.Key)
	if err != nil {
		return nil, fmt.Errorf("start gossip: %w", err)
	}
	g := &Gossip{cfg: cfg, keys: keys, since: map[string]change{}}
	mc := memberlist.DefaultLANConfig()
	mc.Name, mc.Label = cfg.NodeID, cfg.Mesh
	mc.Transport, mc.Keyring = cfg.Transport, keys
	mc.Delegate, mc.Events = delegate{g}, events{g}
	mc.DeadNodeReclaimTime, mc.GossipToTheDeadTime = reclaimAfter, gossipToDead
	mc.RequireNodeNames = true
	mc.Logger = log.New(logLines{cfg.Log}, "", 0)
	if g.list, err = memberlist.Create(mc); err != nil {
		return nil, fmt.Errorf("start gossip: %w", err)
	}
	return g, nil
}

// Run keeps looking for members that are not alive, until ctx ends. It then says
// that this node leaves, and stops.
func (g *Gossip) Run(ctx context.Context) error {
	for {
		alone := g.rejoin() == 0
		wait := rejoinEvery/2 + rand.N(rejoinEvery)
		if alone {
			wait = rejoinSoon/2 + rand.N(rejoinSoon)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			if err := g.list.Shutdown(); err != nil {
				return fmt.Errorf("stop gossip: %w", err)
			}
			return nil
		}
	}
}

// rejoin asks every known member that is not alive, and returns how many others
// are alive afterwards.
func (g *Gossip) rejoin() int {
	alive := map[string]bool{}
	for _, m := range g.list.Members() {
		alive[m.Name] = true
	}
	var missing []string
	for _, id := range g.cfg.Peers() {
		if addr, ok := g.cfg.Address(id); ok && !alive[id] && id != g.cfg.NodeID {
			missing = append(missing, id+"/"+addr)
		}
	}
	if len(missing) > 0 {
		if _, err := g.list.Join(missing); err != nil {
			g.cfg.Log.Debug("members are missing", "missing", missing, "err", err)
		}
	}
	return g.list.NumMembers() - 1
}

// Seen says what is known of a member. The zero Seen is one that was never heard
// of.
func (g *Gossip) Seen(node string) Seen {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.since[node]
	return Seen{Alive: c.alive, Since: c.at, Meta: c.meta}
}

// SetKey makes key the one that packets are sent with. Packets with the keys
// before it are still understood, for members that have not heard of it yet,
// until Forget.
func (g *Gossip) SetKey(key []byte) error {
	if err := g.keys.AddKey(key); err != nil {
		return fmt.Errorf("use gossip key: %w", err)
	}
	if err := g.keys.UseKey(key); err != nil {
		return fmt.Errorf("use gossip key: %w", err)
	}
	return nil
}

// Forget drops every key but the one in use: a node that was removed is heard no
// more.
func (g *Gossip) Forget() error {
	primary := string(g.keys.GetPrimaryKey())
	for _, key := range g.keys.GetKeys() {
		if string(key) == primary {
			continue
		}
		if err := g.keys.RemoveKey(key); err != nil {
			return fmt.Errorf("drop gossip key: %w", err)
		}
	}
	return nil
}

func (g *Gossip) note(n *memberlist.Node, alive bool) {
	var meta Meta
	if err := json.Unmarshal(n.Meta, &meta); err != nil {
		meta = Meta{} // a newer build's; its address is known from the log
	}
	g.mu.Lock()
	if old, was := g.since[n.Name]; !was || old.alive != alive {
		g.since[n.Name] = change{alive, time.Now(), meta}
	} else {
		g.since[n.Name] = change{alive, old.at, meta}
	}
	g.mu.Unlock()
	g.cfg.Changed()
}

// events is memberlist's word on who comes and goes.
type events struct{ g *Gossip }

func (e events) NotifyJoin(n *memberlist.Node)   { e.g.note(n, true) }
func (e events) NotifyLeave(n *memberlist.Node)  { e.g.note(n, false) }
func (e events) NotifyUpdate(n *memberlist.Node) { e.g.note(n, true) }

// delegate carries our record, and nothing else.
type delegate struct{ g *Gossip }

func (d delegate) NodeMeta(limit int) []byte {
	b, err := json.Marshal(d.g.cfg.Meta)
	if err != nil || len(b) > limit {
		return nil // checked at the start
	}
	return b
}
func (delegate) NotifyMsg([]byte)                {}
func (delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (delegate) LocalState(bool) []byte          { return nil }
func (delegate) MergeRemoteState([]byte, bool)   {}

// logLines turns memberlist's "[LEVEL] memberlist: text" into records.
type logLines struct{ to *slog.Logger }

func (l logLines) Write(b []byte) (int, error) {
	line := strings.TrimSpace(string(b))
	level := slog.LevelDebug
	switch {
	case strings.HasPrefix(line, "[ERR"):
		level = slog.LevelWarn // of one packet or peer; none of them stops gossip
	case strings.HasPrefix(line, "[WARN"):
		level = slog.LevelInfo
	}
	l.to.Log(context.Background(), level, line)
	return len(b), nil
}
