package consensus_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meshd/peer/consensus"
)

// The rules of which the leases of mesh seats make use: what is proven, and what a
// leader has seen when it begins.

// TestNothingIsProvenSoonerThanARoundTrip: an acknowledgement counts from when the
// append was sent that it is for. What arrives right after the question was, mostly,
// sent before it, to somebody who may have followed another since.
func TestNothingIsProvenSoonerThanARoundTrip(t *testing.T) {
	const oneWay = 60 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		l := ms.leader(t)
		for _, m := range ms {
			if m != l {
				f.Slow(l.id, m.id, oneWay)
			}
		}
		time.Sleep(time.Second)
		term := l.node.Term()
		for range 50 {
			time.Sleep(7 * time.Millisecond) // any phase of the heartbeats
			asked := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			err := l.node.Prove(ctx, term, asked, false)
			cancel()
			if took := time.Since(asked); err != nil || took < 2*oneWay {
				t.Errorf("proven after %v, %v", took, err)
			}
		}
	})
}

// TestALeaderHasSeenWhatWasAcknowledged: the voters learn what is committed with the
// append after it, and who is elected of them may not know it yet.
func TestALeaderHasSeenWhatWasAcknowledged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		var mu sync.Mutex
		var written []string
		takeovers := 0
		for _, m := range ms {
			m.lead = func(ctx context.Context, term uint64) {
				mu.Lock()
				want := slices.Clone(written)
				takeovers++
				mu.Unlock()
				m.ledger.mu.Lock()
				defer m.ledger.mu.Unlock()
				for _, w := range want {
					if !slices.Contains(m.ledger.Entries, w) {
						t.Errorf("%s leads in term %d and has not seen %s", m.id, term, w)
					}
				}
			}
		}
		ms.form(t)
		for _, w := range []string{"one", "two", "three", "four", "five"} {
			l := ms.leader(t)
			if _, _, err := l.node.Apply(t.Context(), []byte(w)); err != nil {
				t.Fatal(err)
			}
			f.Isolate(l.id)
			mu.Lock()
			written = append(written, w)
			before := takeovers
			mu.Unlock()
			eventually(t, 5*time.Second, "another leads", func() bool {
				mu.Lock()
				defer mu.Unlock()
				return takeovers > before
			})
			f.Heal()
		}
	})
}

func TestAStalledDiskWritesWhenItGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a")
		disk := consensus.MemoryDisk()
		ms[0].open = func(id string) (consensus.Streams, *consensus.Disk) { return f.Join(id), disk }
		ms.form(t)
		ms.leader(t)
		start := time.Now()
		resume := disk.Stall()
		time.AfterFunc(2*time.Second, resume)
		if _, _, err := ms[0].node.Apply(t.Context(), []byte("x")); err != nil || time.Since(start) != 2*time.Second {
			t.Errorf("written after %v, %v", time.Since(start), err)
		}
		start = time.Now()
		if _, _, err := ms[0].node.Apply(t.Context(), []byte("y")); err != nil || time.Since(start) != 0 {
			t.Errorf("then after %v, %v", time.Since(start), err)
		}
	})
}
