package lease

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

const ttl = 1500 * time.Millisecond

// bench is a gate whose clock the test sets.
type bench struct {
	*testing.T
	*Gate
	clock time.Duration
}

func newBench(t *testing.T) *bench {
	b := &bench{T: t, clock: time.Hour}
	b.Gate = NewGate(func() time.Duration { return b.clock })
	return b
}

func (b *bench) grant(sent time.Duration, seats map[string]uint64) {
	b.Grant(sent, Grant{Session: 7, TTL: ttl, Seats: seats})
}

// shut fails unless the gate refuses the seat with these words.
func (b *bench) shut(seat, words string) {
	b.Helper()
	if _, _, err := b.Enter(seat); err == nil || !strings.Contains(err.Error(), words) {
		b.Errorf("enter %s: %v, want an error that says %q", seat, err, words)
	}
}

func (b *bench) enter(seat string, want uint64) (leave func() (time.Duration, error)) {
	b.Helper()
	epoch, leave, err := b.Enter(seat)
	if err != nil || epoch != want {
		b.Fatalf("enter %s: epoch %d, %v, want %d", seat, epoch, err, want)
	}
	return leave
}

func TestAGateIsOpenForWhatTheNewestReplyLists(t *testing.T) {
	b := newBench(t)
	b.shut("store", "since it started")
	b.grant(b.clock, map[string]uint64{"store": 3})
	leave := b.enter("store", 3)
	if left, err := leave(); err != nil || left <= 0 || left > ttl {
		t.Errorf("left %v, %v", left, err)
	}
	b.shut("other", "not for it")

	leave = b.enter("store", 3)
	b.grant(b.clock, map[string]uint64{"other": 9})
	if _, err := leave(); err == nil {
		t.Error("an answer left that was made before the seat was taken away")
	}
	b.shut("store", "not for it")

	// Named again meanwhile: what was begun under the old epoch stays in.
	b.grant(b.clock, map[string]uint64{"store": 10})
	leave = b.enter("store", 10)
	b.grant(b.clock, map[string]uint64{"store": 12})
	if _, err := leave(); err == nil {
		t.Error("an answer left under an epoch that is over")
	}
}

func TestALeaseCountsFromTheSending(t *testing.T) {
	b := newBench(t)
	sent := b.clock
	b.clock += ttl / 2 // the reply took long
	b.grant(sent, map[string]uint64{"store": 3})
	leave := b.enter("store", 3)
	late := b.enter("store", 3)
	b.clock = sent + ttl - time.Millisecond
	b.shut("store", "lease ended") // too near the end to begin anything
	if _, err := leave(); err != nil {
		t.Errorf("before the end: %v", err)
	}
	b.clock = sent + ttl
	if _, err := late(); err == nil {
		t.Error("an answer left when the lease was over")
	}
	if seats, left := b.Holding(); len(seats) > 0 || left != 0 {
		t.Errorf("holding %v for %v", seats, left)
	}
	// A reply that is late as a whole opens nothing.
	b.clock = sent + 3*ttl
	b.grant(sent+ttl, map[string]uint64{"store": 3})
	b.shut("store", "lease ended")
}

func TestWhatWasReleasedStaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.grant(b.clock, map[string]uint64{"store": 3, "other": 4})
		inTime, tooLate := b.enter("store", 3), b.enter("store", 3)
		released := make(chan struct{})
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			b.Release(ctx, "store", 3)
			close(released)
		}()
		synctest.Wait()
		b.shut("store", "not for it")
		b.grant(b.clock, map[string]uint64{"store": 3, "other": 4}) // made before the leader knew
		b.shut("store", "not for it")
		if _, err := inTime(); err != nil {
			t.Errorf("a call that ended while the seat was let go of: %v", err)
		}
		select {
		case <-released:
			t.Error("released with a call inside and time left")
		default:
		}
		<-released
		if _, err := tooLate(); err == nil {
			t.Error("an answer left after the release")
		}
		b.grant(b.clock, map[string]uint64{"store": 3, "other": 4})
		b.shut("store", "not for it")
		b.enter("other", 4)
		b.grant(b.clock, map[string]uint64{"store": 8})
		b.enter("store", 8)
	})
}

func TestAReleaseWaitsForNothingElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.grant(b.clock, map[string]uint64{"store": 3})
		leave := b.enter("store", 3)
		done := make(chan struct{})
		began := time.Now()
		go func() { b.Release(t.Context(), "store", 3); close(done) }()
		go b.Release(t.Context(), "never-held", 5)
		synctest.Wait()
		if _, err := leave(); err != nil {
			t.Error(err)
		}
		<-done
		if d := time.Since(began); d != 0 {
			t.Errorf("waited %v after the last call", d)
		}
		b.grant(b.clock, map[string]uint64{"never-held": 5})
		b.shut("never-held", "not for it")
	})
}

// TestTheWayOutIsNoLongerThanTheLease: the leader may take a seat for free when the lease
// that listed it is over, though the node has another one for other seats by then.
func TestTheWayOutIsNoLongerThanTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.grant(b.clock, map[string]uint64{"store": 3, "mail": 4})
		first, second := b.enter("store", 3), b.enter("store", 3)
		go b.Release(t.Context(), "store", 3)
		synctest.Wait()
		b.clock += ttl / 2
		b.grant(b.clock, map[string]uint64{"mail": 4})
		if left, err := first(); err != nil || left > ttl/2 {
			t.Errorf("an answer within the old lease: %v left, %v", left, err)
		}
		b.clock += ttl / 2
		if _, err := second(); err == nil {
			t.Error("an answer left after the lease that its seat was listed in")
		}
		if _, left := b.Holding(); left <= 0 {
			t.Error("the newer lease is over too")
		}
	})
}

// TestLettingGoOfAllWaitsForWhatIsOnItsWayOut: a leader takes a seat away while this node
// begins to stop. The session may be closed when ReleaseAll returns.
func TestLettingGoOfAllWaitsForWhatIsOnItsWayOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.grant(b.clock, map[string]uint64{"store": 3, "mail": 4, "clock": 5})
		store, mail := b.enter("store", 3), b.enter("mail", 4)
		stuck := b.enter("clock", 5)
		go b.Release(t.Context(), "store", 3)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		done := make(chan time.Duration)
		go func() { b.ReleaseAll(ctx); done <- time.Since(began) }()
		synctest.Wait()
		for _, seat := range []string{"store", "mail", "clock"} {
			b.shut(seat, "not for it")
		}
		time.Sleep(500 * time.Millisecond)
		for _, leave := range []func() (time.Duration, error){store, mail} {
			if _, err := leave(); err != nil {
				t.Errorf("an answer that was ready in time is kept back: %v", err)
			}
		}
		if d := <-done; d != time.Second {
			t.Errorf("it let go of all after %v, with a call inside that may have a second", d)
		}
		if _, err := stuck(); err == nil {
			t.Error("an answer left after all was let go of")
		}
	})
}

func TestBoottimeGoesOn(t *testing.T) {
	a := Boottime()
	if b := Boottime(); a <= 0 || b < a {
		t.Errorf("%v and then %v", a, b)
	}
}

func TestQuietIsSoLongAfterTheLastCallThatWasTurnedAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		g := NewGate(func() time.Duration { return time.Since(began) })
		go func() {
			for range 5 {
				time.Sleep(60 * time.Millisecond)
				if _, _, err := g.Enter("store"); err == nil {
					t.Error("a gate that is shut admits a call")
				}
			}
		}()
		g.Quiet(t.Context(), 100*time.Millisecond)
		if took := time.Since(began); took != 400*time.Millisecond {
			t.Errorf("the last call was turned away after 300 ms, and it was quiet after %v", took)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		g.Quiet(ctx, time.Hour)
		if took := time.Since(began); took != 1400*time.Millisecond {
			t.Errorf("the wait was bounded by 1 s, and took %v", took-400*time.Millisecond)
		}
	})
}
