package consensus

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestHeartbeatsGoTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const beat = 100 * time.Millisecond
		v := volley{beat: beat}
		start := time.Now()
		// went is when heartbeats of so many peers in touch go that are due at these instants.
		went := func(peers int, due ...time.Duration) []time.Duration {
			out := make([]time.Duration, len(due))
			var all sync.WaitGroup
			from := time.Now()
			for i, d := range due {
				all.Go(func() {
					time.Sleep(d)
					v.join(t.Context(), peers)
					out[i] = time.Since(from)
				})
			}
			all.Wait()
			return out
		}
		ms := time.Millisecond
		for _, c := range []struct {
			what  string
			peers int
			due   []time.Duration
			want  []time.Duration
		}{
			{"a leader that has heard of nobody yet", 0, []time.Duration{10 * ms, 30 * ms}, []time.Duration{10 * ms, 30 * ms}},
			{"one peer", 1, []time.Duration{10 * ms}, []time.Duration{10 * ms}},
			{"the last one is waited for", 2, []time.Duration{10 * ms, 90 * ms}, []time.Duration{90 * ms, 90 * ms}},
			{"for a beat at most", 2, []time.Duration{10 * ms, 190 * ms}, []time.Duration{110 * ms, 290 * ms}},
			{"one that is away hurries the others, and no more", 2, []time.Duration{0, 10 * ms, 20 * ms}, []time.Duration{10 * ms, 10 * ms, 120 * ms}},
			{"asked for at once", 3, []time.Duration{0, 0, 0}, []time.Duration{0, 0, 0}},
		} {
			got := went(c.peers, c.due...)
			for i := range got {
				if got[i] != c.want[i] {
					t.Errorf("%s: due at %v, went at %v, want %v", c.what, c.due, got, c.want)
					break
				}
			}
		}
		if d := time.Since(start); d > 2*time.Second {
			t.Errorf("took %v", d)
		}
	})
}
