package peer

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"meshd/raftfsm"
)

func TestBusCredentials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "alpha", "beta")
		alpha := b.node("alpha")
		key := func() string {
			public, _, err := newBusKey()
			b.must(err)
			return public
		}
		add := func(key string, ttl time.Duration) BusLogin {
			t.Helper()
			l, err := alpha.peer.AddBusCredential(t.Context(), "eve@alpha", key, ttl)
			b.must(err)
			if !alpha.bus.Admits(key) {
				t.Errorf("%+v is not let in", l)
			}
			return l
		}
		refused := func(key string, ttl time.Duration, code string) {
			t.Helper()
			var r *raftfsm.Rejection
			if _, err := alpha.peer.AddBusCredential(t.Context(), "eve@alpha", key, ttl); !errors.As(err, &r) || r.Code != code {
				t.Errorf("a key for %v: %v, want %s", ttl, err, code)
			}
		}
		first, short := key(), key()
		l := add(first, time.Hour)
		if l.Inbox != "_O.alpha."+l.Name || l.Calls != "call.alpha._"+l.Name || l.Actor != "eve@alpha" || l.URL != alpha.bus.ClientURL() {
			t.Errorf("the login is %+v", l)
		}
		add(short, 10*time.Second)
		refused(first, time.Hour, "bad-key")
		refused("UX", time.Hour, "bad-key")
		refused(key(), 0, "bad-ttl")
		refused(key(), MaxBusTTL+time.Second, "bad-ttl")
		if b.node("beta").bus.Admits(first) {
			t.Error("another node lets it in")
		}

		// It expires by itself, at its time.
		time.Sleep(9 * time.Second)
		if !alpha.bus.Admits(short) {
			t.Error("it is shut out before its time")
		}
		time.Sleep(time.Second + 100*time.Millisecond)
		if alpha.bus.Admits(short) || len(alpha.local.operators()) != 1 || len(alpha.peer.BusCredentials()) != 1 {
			t.Errorf("after its time: let in %v, on record %+v", alpha.bus.Admits(short), alpha.local.operators())
		}

		// It outlives meshd, and ends when that is asked for.
		alpha.kill()
		alpha.bus.forget()
		alpha.restart()
		b.eventually(20*time.Second, "it is let in again", func() bool { return alpha.bus.Admits(first) })
		b.must(alpha.peer.RemoveBusCredential(t.Context(), l.Name))
		if alpha.bus.Admits(first) || len(alpha.peer.BusCredentials()) != 0 {
			t.Error("it is let in after its end")
		}
		var r *raftfsm.Rejection
		if err := alpha.peer.RemoveBusCredential(t.Context(), l.Name); !errors.As(err, &r) || r.Code != "no-credential" {
			t.Errorf("ended twice: %v", err)
		}
		for range maxBusCredentials {
			add(key(), time.Hour)
		}
		refused(key(), time.Hour, "too-many")
	})
}
