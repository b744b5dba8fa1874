package cli

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"meshd/gossip"
)

// members is gossip as the node's other parts see it; before it is started
// nobody is alive.
type members struct {
	gossip atomic.Pointer[gossip.Gossip]

	mu  sync.Mutex
	key []byte // in use
}

// Alive reports whether the node was heard of lately.
func (m *members) Alive(node string) bool { return m.seen(node).Alive }

// Addresses are what the node says of itself while it is alive.
func (m *members) Addresses(node string) (mesh, route string) {
	if s := m.seen(node); s.Alive {
		return s.Record.Mesh, s.Record.Routes
	}
	return "", ""
}

func (m *members) seen(node string) gossip.Seen {
	g := m.gossip.Load()
	if g == nil {
		return gossip.Seen{}
	}
	return g.Seen()[node]
}

func (m *members) run(ctx context.Context) error { return m.gossip.Load().Run(ctx) }

// oldKeyFor is how long the key before the last is still understood: the log
// brings the new one to every node that is up within seconds.
const oldKeyFor = time.Minute

// rekey makes key the one that is used. The old one is understood a little
// longer.
func (m *members) rekey(key []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.gossip.Load()
	if g == nil || bytes.Equal(m.key, key) {
		m.key = key
		return nil
	}
	keys := [][]byte{key, m.key}
	m.key = key
	if err := g.SetKeys(keys); err != nil {
		return err
	}
	time.AfterFunc(oldKeyFor, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if bytes.Equal(m.key, key) {
			_ = g.SetKeys(keys[:1]) // the keys were good a minute ago
		}
	})
	return nil
}
