package network

import (
	"errors"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limits bounds what peers may cost a Port before and after they have proved who they are.
type Limits struct {
	Handshake time.Duration // for a TLS handshake, from accept to finished
	PerSource int           // connections of one source address that have not proved an identity
	Pending   int           // the same, of all sources together
	PerNode   int           // open streams from one node
	JoinRate  rate.Limit    // new join streams a second, of all sources together
	JoinBurst int           // join streams at once
}

// DefaultLimits suits a mesh of up to some hundred nodes.
func DefaultLimits() Limits {
	return Limits{
		Handshake: 2 * time.Second, // ten times a slow machine's handshake; a stalled one frees its place soon
		PerSource: 8,               // a returning node opens about five at once
		Pending:   256,             // about 10 MB of handshakes, and a whole mesh coming back at once
		PerNode:   64,              // raft keeps 6, gossip 2, the API one for each watcher
		JoinRate:  2,               // people type joins; 2/s makes guessing tokens hopeless
		JoinBurst: 20,              // a script that joins every machine of a small mesh together
	}
}

func (l Limits) validate() error {
	var faults []error
	if l.Handshake <= 0 {
		faults = append(faults, errors.New("limits: handshake must be a positive time"))
	}
	if l.PerSource < 1 || l.Pending < 1 || l.PerNode < 1 || l.JoinBurst < 1 {
		faults = append(faults, errors.New("limits: per source, pending, per node and join burst must be at least 1"))
	}
	if l.JoinRate <= 0 {
		faults = append(faults, errors.New("limits: join rate must be positive"))
	}
	return errors.Join(faults...)
}

// lobby counts the connections that have not proved an identity.
type lobby struct {
	perSource, pending int

	mu     sync.Mutex
	total  int
	source map[netip.Addr]int
}

func newLobby(l Limits) *lobby {
	return &lobby{perSource: l.PerSource, pending: l.Pending, source: map[netip.Addr]int{}}
}

// enter takes a place, or refuses. leave gives it back and may be called more than once.
func (l *lobby) enter(from netip.Addr) (leave func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.total >= l.pending || l.source[from] >= l.perSource {
		return nil, false
	}
	l.total++
	l.source[from]++
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.total--
		if l.source[from]--; l.source[from] == 0 {
			delete(l.source, from)
		}
	}), true
}
