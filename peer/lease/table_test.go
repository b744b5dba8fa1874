package lease

import (
	"errors"
	"maps"
	"testing"
	"time"
)

var (
	start   = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	yes     = func() bool { return true }
	nothing = func() map[string]uint64 { return nil }
)

func names(seats map[string]uint64) func() map[string]uint64 {
	return func() map[string]uint64 { return seats }
}

// granting is a table of a leader that has waited out everything.
func granting() (*Table, time.Time) {
	t := &Table{}
	t.Lead(5, start, start, map[uint64]time.Duration{1: ttl})
	return t, start.Add(time.Minute)
}

func TestNothingIsGrantedOutsideALeadership(t *testing.T) {
	x := &Table{}
	if err := x.Promise(0, 1, start, ttl); !errors.Is(err, ErrNotLeading) {
		t.Errorf("never led: %v", err)
	}
	if _, err := x.List(0, 1, start, ttl, yes, nothing); !errors.Is(err, ErrNotLeading) {
		t.Errorf("never led: %v", err)
	}
	if x.Surrender(0, 1) || x.Close(0, 1, ttl, start) || x.Over(0, Claim{"store", 3}, false, start) {
		t.Error("a node that never led decides")
	}
	x, now := granting()
	if err := x.Promise(4, 1, now, ttl); !errors.Is(err, ErrNotLeading) {
		t.Errorf("another term: %v", err)
	}
	if err := x.Promise(5, 1, now, ttl); err != nil {
		t.Fatal(err)
	}
	if _, err := x.List(5, 1, now, ttl, func() bool { return false }, nothing); !errors.Is(err, ErrNotLeading) {
		t.Errorf("deposed while it was proven: %v", err)
	}
	x.Stop()
	if _, err := x.List(5, 1, now, ttl, yes, nothing); !errors.Is(err, ErrNotLeading) {
		t.Errorf("stopped: %v", err)
	}
	if x.Close(5, 1, ttl, now.Add(time.Hour)) {
		t.Error("closed by one that does not lead")
	}
}

func TestASessionIsClosedWhenItsLeaseCannotBeValid(t *testing.T) {
	x, now := granting()
	if err := x.Promise(5, 1, now, ttl); err != nil {
		t.Fatal(err)
	}
	// The node's clock is slow, the leader's fast, and the renewal took no time.
	last := now.Add(Wait(ttl))
	if least := time.Duration(float64(ttl) * 1.02); Wait(ttl) < least {
		t.Errorf("the wait of %v does not cover %v", Wait(ttl), least)
	}
	if x.Close(5, 1, ttl, last) {
		t.Error("closed while a lease may be valid")
	}
	if next := x.Next([]uint64{1}); !next.Equal(last) {
		t.Errorf("looks again at %v, want %v", next, last)
	}
	if !x.Close(5, 1, ttl, last.Add(1)) {
		t.Error("not closed after the lease")
	}
	if err := x.Promise(5, 1, last, ttl); !errors.Is(err, ErrClosing) {
		t.Errorf("renewed while it is closed: %v", err)
	}
	if _, err := x.List(5, 1, last, ttl, yes, nothing); !errors.Is(err, ErrClosing) {
		t.Errorf("confirmed while it is closed: %v", err)
	}
}

func TestANewLeaderWaitsOutWhatWasGrantedBefore(t *testing.T) {
	x := &Table{}
	x.Lead(6, start, start, map[uint64]time.Duration{1: ttl})
	last := start.Add(Wait(ttl))
	c := Claim{"store", 3}
	if x.Close(6, 1, ttl, last) || x.Over(6, c, false, last) {
		t.Error("it took a seat that a predecessor's lease may cover")
	}
	if !x.Over(6, c, false, last.Add(1)) || !x.Close(6, 1, ttl, last.Add(1)) {
		t.Error("it waits on")
	}
}

func TestASeatThatIsListedNoMoreRunsOut(t *testing.T) {
	x, now := granting()
	list := func(at time.Time) map[string]uint64 {
		t.Helper()
		if err := x.Promise(5, 1, at, ttl); err != nil {
			t.Fatal(err)
		}
		seats, err := x.List(5, 1, at, ttl, yes, names(map[string]uint64{"store": 3, "other": 4}))
		if err != nil {
			t.Fatal(err)
		}
		return seats
	}
	if got := list(now); !maps.Equal(got, map[string]uint64{"store": 3, "other": 4}) {
		t.Errorf("listed %v", got)
	}
	x.Withhold("store")
	if got := list(now.Add(time.Second)); !maps.Equal(got, map[string]uint64{"other": 4}) {
		t.Errorf("listed %v while the seat is withheld", got)
	}
	over := now.Add(Wait(ttl))
	if x.Over(5, Claim{"store", 3}, true, over) || !x.Over(5, Claim{"store", 3}, true, over.Add(1)) {
		t.Error("the claim does not end with the last renewal that listed it")
	}
	if x.Over(5, Claim{"other", 4}, true, now.Add(time.Hour)) {
		t.Error("a claim that is listed is over")
	}
	x.Offer("store")
	if got := list(now.Add(2 * time.Second)); got["store"] != 3 {
		t.Errorf("listed %v after the seat was offered again", got)
	}
}

func TestALeadersOwnWordIsEvidence(t *testing.T) {
	x, now := granting()
	if !x.Vouched().Equal(start) {
		t.Errorf("vouched until %v, want its election at %v", x.Vouched(), start)
	}
	if err := x.Promise(5, 1, now, ttl); err != nil {
		t.Fatal(err)
	}
	if _, err := x.List(5, 1, now, ttl, func() bool { return false }, nothing); err == nil {
		t.Fatal("confirmed by one that was deposed")
	}
	if !x.Vouched().Equal(now) {
		t.Errorf("vouched until %v, want %v: noted before the last look", x.Vouched(), now)
	}
}

func TestAPausedLeaderBlamesNobody(t *testing.T) {
	x, now := granting()
	if err := x.Promise(5, 1, now, ttl); err != nil {
		t.Fatal(err)
	}
	x.Excuse(time.Second)
	if x.Close(5, 1, ttl, now.Add(Wait(ttl)+time.Second)) || !x.Close(5, 1, ttl, now.Add(Wait(ttl)+time.Second+1)) {
		t.Error("the pause was not added")
	}
}

func TestASessionThatIsOpenedIsNotClosedBeforeItsFirstRenewal(t *testing.T) {
	x, now := granting()
	if x.Close(5, 2, ttl, now) {
		t.Error("closed at the first look")
	}
	if x.Close(5, 2, ttl, now.Add(Wait(ttl))) || !x.Close(5, 2, ttl, now.Add(Wait(ttl)+1)) {
		t.Error("it has another time than a lease to be renewed")
	}
	x.Lead(6, now, now, nil)
	if err := x.Promise(6, 3, now.Add(time.Second), ttl); err != nil {
		t.Fatal(err)
	}
	if x.Close(6, 3, ttl, now.Add(Wait(ttl))) {
		t.Error("closed although it was renewed")
	}
}
