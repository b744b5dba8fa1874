package consensus

import (
	"context"
	"sync"
	"time"
)

// volley sends a leader's heartbeats together. Each peer's comes when it pleases, between one and two
// beats after the last; to wake up for each, and again for each reply, is most of what a leader at rest
// costs. One that is due waits for the others, a beat at most: as long as they are in step, no peer
// waits longer than two beats for its next.
type volley struct {
	beat time.Duration

	mu      sync.Mutex
	waiting int
	fire    chan struct{} // closed when those that wait go out
}

// join returns when as many as there are peers in touch have joined, or after a beat.
func (v *volley) join(ctx context.Context, peers int) {
	v.mu.Lock()
	if v.fire == nil {
		v.fire = make(chan struct{})
	}
	fire := v.fire
	if v.waiting++; v.waiting >= peers {
		v.release()
		v.mu.Unlock()
		return
	}
	v.mu.Unlock()
	late := time.NewTimer(v.beat)
	defer late.Stop()
	select {
	case <-fire:
	case <-ctx.Done():
	case <-late.C:
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.fire == fire {
			v.release()
		}
	}
}

// release must be called with mu held.
func (v *volley) release() {
	close(v.fire)
	v.fire, v.waiting = nil, 0
}
