package consensus_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"meshd/peer/consensus"
)

func TestAPeerThatWasAwayIsServedAtOnce(t *testing.T) {
	for _, tc := range []struct {
		name     string
		snapshot bool // what it missed is no longer in the log
	}{{"entries", false}, {"snapshot", true}} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, ms := virtual(t, "a", "b", "c")
				ms.form(t)
				l := ms.leader(t)
				away := ms[2]
				if away == l {
					away = ms[1]
				}
				for _, absence := range []time.Duration{15 * time.Second, time.Minute, 10 * time.Minute} {
					f.Isolate(away.id)
					missed := 1
					if tc.snapshot {
						missed = 6000 // more than are kept behind a snapshot
					}
					for i := range missed {
						if _, _, err := l.node.Apply(t.Context(), fmt.Appendf(nil, "%d", i)); err != nil {
							t.Fatal(err)
						}
					}
					if tc.snapshot {
						if err := l.node.Snapshot(t.Context()); err != nil {
							t.Fatal(err)
						}
					}
					time.Sleep(absence)
					f.Heal()
					// A dial into the cut may have to end first, and then the heartbeat's pause.
					eventually(t, 1200*time.Millisecond, fmt.Sprintf("%s has what it missed in %v", away.id, absence), func() bool {
						return away.node.AppliedIndex() >= l.node.CommitIndex()
					})
				}
			})
		})
	}
}

// A goroutine of the library that waits for a peer must not keep anything from ending.
func TestNothingIsKeptForAPeerThatIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		l := ms.leader(t)
		away := ms[2]
		if away == l {
			away = ms[1]
		}
		f.Isolate(away.id)
		time.Sleep(10 * time.Second)
		_, at := l.node.Servers()
		if err := l.node.Remove(t.Context(), away.id, at); err != nil {
			t.Fatal(err)
		}
		_, at = l.node.Servers()
		if err := l.node.AddLearner(t.Context(), away.id, at); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		start := time.Now()
		if err := l.down(); err != nil {
			t.Error(err)
		}
		f.Kill(l.id)
		l.node = nil
		if d := time.Since(start); d > 100*time.Millisecond {
			t.Errorf("a leader took %v to stop", d)
		}
	})
}

func TestASoleVoterLeadsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a")
		a := ms[0]
		leads := func(what string, d time.Duration) {
			t.Helper()
			eventually(t, d, what, func() bool { return a.node.State() == "leader" && a.node.Barrier(t.Context()) == nil })
		}
		restart := func() {
			t.Helper()
			if err := a.down(); err != nil {
				t.Fatal(err)
			}
			f.Kill("a")
			if err := a.start(); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.start(); err != nil {
			t.Fatal(err)
		}
		if err := a.node.Bootstrap(); err != nil {
			t.Fatal(err)
		}
		leads("leader of a new mesh", 20*time.Millisecond)
		restart()
		leads("leader after a restart", 20*time.Millisecond)
		// With another voter beside it it waits to hear from that one.
		_, at := a.node.Servers()
		if err := a.node.AddLearner(t.Context(), "b", at); err != nil {
			t.Fatal(err)
		}
		restart()
		leads("leader beside a learner", 20*time.Millisecond)
	})
}

func TestOneOfTwoVotersWaitsForTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b")
		ms.form(t)
		for _, m := range ms {
			if err := m.down(); err != nil {
				t.Fatal(err)
			}
			f.Kill(m.id)
			m.node = nil
		}
		a := ms[0]
		if err := a.start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(consensus.LAN().Heartbeat / 2)
		if s := a.node.State(); s != "follower" {
			t.Errorf("it is a %s before its time", s)
		}
	})
}
