package bus

import (
	"context"
	"testing"
	"time"
)

// TestACallEndsWithItsHolder: the machine that was asked is silent, and the log has named another. Who
// called learns that long before its own deadline, and a verb that is idempotent is asked of the other.
func TestACallEndsWithItsHolder(t *testing.T) {
	m := newMesh(t, "alpha", "beta", "gamma")
	silent, over := make(chan struct{}, 8), make(chan struct{})
	t.Cleanup(func() { close(over) })
	m.hold("store", "alpha", 3, func(context.Context, Call) ([]byte, error) {
		silent <- struct{}{}
		<-over
		return nil, nil
	}, "query", "write")
	again := func() {
		seat := m.dir.Seats["store"]
		seat.Idempotent = []string{"query"}
		m.dir.Seats["store"] = seat
	}
	again()
	m.apply()
	call := func(verb string) <-chan error {
		done := make(chan error, 1)
		go func() {
			r, err := m.nodes["gamma"].Call(within(t, time.Minute), Caller{Node: "gamma"}, Target{Seat: "store", Name: verb}, nil)
			if err == nil && string(r.Data) != "beta to gamma/(operator): "+verb+" " {
				err = fail(CodeFailed, "the answer is %q", r.Data)
			}
			done <- err
		}()
		<-silent
		return done
	}
	query, write := call("query"), call("write")
	// It is dark first, as where nobody else has a lease yet.
	dark := m.of("gamma")
	dark.Directory.Seats["store"] = Seat{Verbs: []string{"query", "write"}, Idempotent: []string{"query"}, Dark: "its node is away"}
	must(t, m.nodes["gamma"].Apply(dark))
	wantCode(t, <-write, CodeUncertain, "node alpha was asked for store.write and has not answered: seat store is dark now: its node is away; it may have run")
	m.hold("store", "beta", 4, says("beta"), "query", "write")
	again()
	must(t, m.nodes["beta"].Apply(m.of("beta")))
	must(t, m.nodes["gamma"].Apply(m.of("gamma")))
	must(t, <-query)
}

// TestACallThatIsOnItsWayWhenTheSeatMoves is told by the old holder that it has not run, or by the log.
func TestACallThatIsOnItsWayWhenTheSeatMoves(t *testing.T) {
	m := newMesh(t, "alpha", "beta", "gamma")
	entered, over := make(chan struct{}, 1), make(chan struct{})
	t.Cleanup(func() { close(over) })
	m.hold("store", "alpha", 3, func(context.Context, Call) ([]byte, error) {
		entered <- struct{}{}
		<-over
		return nil, nil
	}, "write")
	m.apply()
	done := make(chan error, 1)
	go func() {
		_, err := m.nodes["gamma"].Call(within(t, time.Minute), Caller{Node: "gamma"}, Target{Seat: "store", Name: "write"}, nil)
		done <- err
	}()
	<-entered
	m.hold("store", "beta", 4, says("beta"), "write")
	must(t, m.nodes["beta"].Apply(m.of("beta")))
	must(t, m.nodes["gamma"].Apply(m.of("gamma")))
	wantCode(t, <-done, CodeUncertain, "the log names beta/pg, epoch 4 now; it may have run")
	if n := len(m.nodes["gamma"].flights.under); n != 0 {
		t.Errorf("%d requests are under way still", n)
	}
}

// TestNoCodeClaimsWhatMayNotBe: that nothing has run is only said where nothing has.
func TestNoCodeClaimsWhatMayNotBe(t *testing.T) {
	doubtful := tries{n: 2, began: time.Now(), doubt: true}
	for _, code := range []Code{CodeUnreachable, CodeNotHolder, CodeNoHolder, CodeBusy, CodeUnknown} {
		wantCode(t, doubtful.sum(fail(code, "so it is")), CodeUncertain, "so it is; a try before may have run")
		wantCode(t, doubtful.gaveUp(fail(code, "so it is")), CodeUncertain, "asked 2 times", "it may have run")
		wantCode(t, tries{n: 1, began: time.Now()}.gaveUp(fail(code, "so it is")), code, "it has not run")
	}
	wantCode(t, doubtful.sum(fail(CodeTimedOut, "late")), CodeTimedOut, "late")
}
