package lease

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// Grant is the leader's answer to a renewal.
type Grant struct {
	Session uint64
	TTL     time.Duration
	Seats   map[string]uint64 // epoch by seat: all that the log names the session for
	Digest  string            // of Seats; they are left out where the renewal had the same
}

// Digest tells two sets of granted seats apart.
func Digest(seats map[string]uint64) string {
	h := sha256.New()
	for _, seat := range slices.Sorted(maps.Keys(seats)) {
		fmt.Fprintf(h, "%s %d\n", seat, seats[seat])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Gate is the lease as its node knows it. It starts shut: what was granted to an
// earlier process of this node is nothing to this one.
type Gate struct {
	now Clock

	mu       sync.Mutex
	session  uint64
	until    time.Duration     // by now
	granted  map[string]uint64 // epoch by seat
	draining map[string]term   // by seat: admits nothing, and lets out what is in
	released map[string]uint64 // highest epoch by seat that was let go of, for the life of the process
	inside   map[string]int    // calls by seat
	left     chan struct{}     // closed when a call has left, then replaced
	turned   time.Duration     // by now: when a call was turned away last
}

// term is what is left of a grant that this node lets go of.
type term struct {
	epoch uint64
	until time.Duration // by now: of the last lease that listed the seat, whatever comes after it
}

// NewGate returns a gate that is shut.
func NewGate(now Clock) *Gate {
	return &Gate{now: now, draining: map[string]term{}, released: map[string]uint64{}, inside: map[string]int{}, left: make(chan struct{})}
}

// Now reads the gate's clock: take the time of sending from it.
func (g *Gate) Now() time.Duration { return g.now() }

// Grant takes in the reply to the renewal that was sent at an instant. Replies to
// others than the newest renewal must not be given to it.
func (g *Gate) Grant(sent time.Duration, r Grant) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.session = r.Session
	g.until = max(g.until, sent+r.TTL)
	g.granted = maps.Clone(r.Seats)
	// What this node let go of stays so, whenever the reply was made.
	maps.DeleteFunc(g.granted, func(seat string, epoch uint64) bool {
		return epoch <= g.released[seat] || epoch <= g.draining[seat].epoch
	})
}

// Released lists those of the named seats that this process let go of under the epoch
// that is named, or a later one.
func (g *Gate) Released(named map[string]uint64) map[string]uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := map[string]uint64{}
	for seat, epoch := range named {
		if g.released[seat] >= epoch {
			out[seat] = epoch
		}
	}
	return out
}

// ReleaseAll lets go of everything, and of what is being let go of: see Release.
func (g *Gate) ReleaseAll(ctx context.Context) {
	g.mu.Lock()
	for seat, epoch := range g.granted {
		g.shut(seat, epoch)
	}
	draining := maps.Clone(g.draining)
	g.mu.Unlock()
	for seat, t := range draining {
		g.Release(ctx, seat, t.epoch)
	}
}

// Session is the newest that was granted, 0 for none.
func (g *Gate) Session() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.session
}

// Granted is what the newest reply lists and this node has not let go of, whether or
// not the lease still holds.
func (g *Gate) Granted() map[string]uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.granted)
}

// Holding lists the seats that may be answered now, with their epochs, and how much
// of the lease is left.
func (g *Gate) Holding() (seats map[string]uint64, left time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	left = g.until - g.now()
	if left <= margin {
		return nil, 0
	}
	return maps.Clone(g.granted), left
}

// Enter admits a call, and says under which epoch it runs. leave must be called once,
// when it has run; its error keeps the answer back, and else left is for how long after
// the instant of leave, on any clock, nobody else can answer unless this node lets go of
// the seat before.
func (g *Gate) Enter(seat string) (epoch uint64, leave func() (left time.Duration, err error), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	epoch, ok := g.granted[seat]
	now := g.now()
	defer func() {
		if err != nil {
			g.turned = now
		}
	}()
	switch {
	case g.session == 0:
		return 0, nil, fmt.Errorf("no leader has granted this node a lease since it started")
	case now >= g.until-margin:
		return 0, nil, fmt.Errorf("this node's lease ended %v ago: no leader with a majority has renewed it",
			max(now-g.until, 0).Round(time.Millisecond))
	case !ok:
		return 0, nil, fmt.Errorf("this node's lease is not for it")
	}
	g.inside[seat]++
	return epoch, func() (time.Duration, error) { return g.leave(seat, epoch) }, nil
}

// Quiet returns when no call has been turned away for so long, or with ctx: those who
// would have asked here have learnt whom to ask.
func (g *Gate) Quiet(ctx context.Context, long time.Duration) {
	began := g.now()
	for ctx.Err() == nil {
		g.mu.Lock()
		rest := max(g.turned, began) + long - g.now()
		g.mu.Unlock()
		if rest <= 0 {
			return
		}
		select {
		case <-time.After(rest):
		case <-ctx.Done():
		}
	}
}

func (g *Gate) leave(seat string, epoch uint64) (time.Duration, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside[seat]--; g.inside[seat] == 0 {
		delete(g.inside, seat)
	}
	close(g.left)
	g.left = make(chan struct{})
	until := g.until
	if g.granted[seat] != epoch {
		out, ok := g.draining[seat]
		if !ok || out.epoch != epoch {
			return 0, fmt.Errorf("it was taken from this node")
		}
		until = out.until
	}
	now := g.now()
	if now >= until {
		return 0, fmt.Errorf("this node's lease ended %v before", (now - until).Round(time.Millisecond))
	}
	return time.Duration(float64(until-now) / (1 + Drift)), nil
}

// Release lets go of a seat up to an epoch: it admits no more calls, lets out those
// that end before ctx does, and keeps back the answers of the rest. When it returns
// nothing more is answered under that epoch, and never again by this process.
func (g *Gate) Release(ctx context.Context, seat string, epoch uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut(seat, epoch)
	for ctx.Err() == nil && g.draining[seat].epoch != 0 && g.inside[seat] > 0 {
		left := g.left
		g.mu.Unlock()
		select {
		case <-left:
		case <-ctx.Done():
		}
		g.mu.Lock()
	}
	delete(g.draining, seat)
	g.released[seat] = max(g.released[seat], epoch)
}

// shut admits no more calls to a seat that is held up to an epoch. mu is held.
func (g *Gate) shut(seat string, epoch uint64) {
	if held, ok := g.granted[seat]; ok && held <= epoch {
		delete(g.granted, seat)
		g.draining[seat] = term{held, g.until}
	}
}
