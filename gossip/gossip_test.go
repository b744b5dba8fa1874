package gossip_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"meshd/gossip"
	"meshd/peer/network"
	"meshd/peer/network/networktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func key(b byte) []byte { return bytes.Repeat([]byte{b}, gossip.KeySize) }

// member is one gossiping node of a test.
type member struct {
	*gossip.Gossip
	id    string
	stop  context.CancelFunc
	ran   chan error
	pokes atomic.Int64
}

func start(t *testing.T, n network.Network, id string, edit func(*gossip.Config)) *member {
	t.Helper()
	tr, err := network.Gossiping(n)
	if err != nil {
		t.Fatal(err)
	}
	m := &member{id: id, ran: make(chan error, 1)}
	cfg := gossip.Config{
		Node: id, Mesh: "mesh-1", Keys: [][]byte{key(1)}, Transport: tr,
		Record:  gossip.Record{Build: "v1", Mesh: id + ":7946"},
		Peers:   func() []gossip.Peer { return nil },
		Changed: func() { m.pokes.Add(1) },
		Timing:  gossip.LAN(),
		Log:     slog.New(slog.DiscardHandler),
	}
	if edit != nil {
		edit(&cfg)
	}
	if m.Gossip, err = gossip.Start(cfg); err != nil {
		t.Fatal(err)
	}
	var ctx context.Context
	ctx, m.stop = context.WithCancel(context.Background())
	go func() { m.ran <- m.Run(ctx) }()
	t.Cleanup(func() { m.end(t) })
	return m
}

func (m *member) end(t *testing.T) {
	t.Helper()
	m.stop()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := <-m.ran; err != nil {
		t.Error(err)
	}
	m.ran <- nil
}

func eventually(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	end := time.NewTimer(within)
	defer end.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-end.C:
			t.Fatalf("not within %v: %s", within, what)
		case <-tick.C:
		}
	}
}

func (m *member) sees(id string) bool { return m.Seen()[id].Alive }

func allSee(ms []*member, want func(a, b *member) bool) func() bool {
	return func() bool {
		for _, a := range ms {
			for _, b := range ms {
				if a.sees(b.id) != want(a, b) {
					return false
				}
			}
		}
		return true
	}
}

func everybody(_, _ *member) bool { return true }

// newFabric makes a network for a bubble. A probe of memberlist that is under way when it is shut down
// ends with its time-out, and once the test is over a bubble's clock stands still, so the last thing
// that a test does is wait.
func newFabric(t *testing.T) *network.Fabric {
	t.Helper()
	t.Cleanup(func() { time.Sleep(time.Minute) })
	return network.NewFabric()
}

// fabric starts nodes that know each other's addresses.
func fabric(t *testing.T, ids ...string) (*network.Fabric, []*member) {
	t.Helper()
	f := newFabric(t)
	var ms []*member
	for _, id := range ids {
		ms = append(ms, join(t, f, id, ids, nil))
	}
	return f, ms
}

func join(t *testing.T, f *network.Fabric, id string, ids []string, edit func(*gossip.Config)) *member {
	t.Helper()
	return start(t, f.Join(id), id, func(c *gossip.Config) {
		c.Peers = func() []gossip.Peer {
			var ps []gossip.Peer
			for _, p := range ids {
				if a, ok := f.Addr(p); ok {
					ps = append(ps, gossip.Peer{ID: p, Addr: a.String()})
				}
			}
			return ps
		}
		if edit != nil {
			edit(c)
		}
	})
}

func TestEverybodySeesEverybody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := fabric(t, "a", "b", "c", "d")
		eventually(t, 20*time.Second, "all see all", allSee(ms, everybody))
		at, _ := f.Addr("b")
		got := ms[0].Seen()["b"]
		if got.Addr != at || got.Record.Mesh != "b:7946" || got.Record.Build != "v1" || got.Since.IsZero() {
			t.Errorf("b is seen as %+v", got)
		}
		if ms[0].pokes.Load() == 0 {
			t.Error("nobody was poked")
		}
	})
}

func TestALongSplitHeals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := fabric(t, "a", "b", "c", "d")
		eventually(t, 20*time.Second, "all see all", allSee(ms, everybody))
		side := map[string]int{"a": 0, "b": 0, "c": 1, "d": 1}
		for _, x := range ms {
			for _, y := range ms {
				if side[x.id] != side[y.id] {
					f.Cut(x.id, y.id)
				}
			}
		}
		eventually(t, 60*time.Second, "each side sees itself alone", allSee(ms, func(a, b *member) bool {
			return side[a.id] == side[b.id]
		}))
		time.Sleep(10 * time.Minute) // far beyond the time after which the dead are forgotten
		f.Heal()
		healed := time.Now()
		eventually(t, 60*time.Second, "all see all again", allSee(ms, everybody))
		if d := time.Since(healed); d > 30*time.Second {
			t.Errorf("the split healed after %v", d)
		}
	})
}

func TestADeadNodeIsNoticedAndComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ids := []string{"a", "b", "c"}
		f, ms := fabric(t, ids...)
		eventually(t, 20*time.Second, "all see all", allSee(ms, everybody))
		f.Kill("c")
		died := time.Now()
		eventually(t, 60*time.Second, "c is missed", func() bool { return !ms[0].sees("c") && !ms[1].sees("c") })
		if d := time.Since(died); d > 20*time.Second {
			t.Errorf("it was missed after %v", d)
		}
		since := ms[0].Seen()["c"].Since
		if since.Before(died) {
			t.Errorf("dead since %v, died at %v", since, died)
		}
		ms[2].end(t)
		ms[2] = join(t, f, "c", ids, nil)
		eventually(t, 60*time.Second, "all see all again", allSee(ms, everybody))
	})
}

func TestALeaveIsNewsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ms := fabric(t, "a", "b", "c")
		eventually(t, 20*time.Second, "all see all", allSee(ms, everybody))
		if err := ms[2].Leave(time.Second); err != nil {
			t.Fatal(err)
		}
		eventually(t, 2*time.Second, "c is gone", func() bool { return !ms[0].sees("c") && !ms[1].sees("c") })
		ms[2].end(t)
		if err := ms[2].Leave(time.Second); err != nil {
			t.Errorf("leave after close: %v", err)
		}
	})
}

func TestANewRecordSpreads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ms := fabric(t, "a", "b", "c")
		eventually(t, 20*time.Second, "all see all", allSee(ms, everybody))
		since := ms[1].Seen()["a"].Since
		if err := ms[0].Update(gossip.Record{Build: "v2", Level: 7}); err != nil {
			t.Fatal(err)
		}
		eventually(t, 5*time.Second, "the record is known", func() bool {
			b, c := ms[1].Seen()["a"], ms[2].Seen()["a"]
			return b.Record.Level == 7 && c.Record.Build == "v2"
		})
		if got := ms[1].Seen()["a"].Since; !got.Equal(since) {
			t.Errorf("alive since %v, with the old record since %v", got, since)
		}
		if err := ms[0].Update(gossip.Record{Build: strings.Repeat("x", 600)}); err == nil {
			t.Error("a record of 600 bytes was taken")
		}
	})
}

func TestKeysRotateWithoutLosingAnybody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ms := fabric(t, "a", "b", "c")
		eventually(t, 20*time.Second, "all see all", allSee(ms, everybody))
		for _, keys := range [][][]byte{{key(1), key(2)}, {key(2), key(1)}, {key(2)}} {
			for _, m := range ms {
				if err := m.SetKeys(keys); err != nil {
					t.Fatal(err)
				}
				time.Sleep(20 * time.Second) // some have the new keys, some the old
				if !allSee(ms, everybody)() {
					t.Fatalf("somebody was lost on the way to %d keys", len(keys))
				}
			}
		}
		// Whoever was not told is out.
		if err := ms[2].SetKeys([][]byte{key(1)}); err != nil {
			t.Fatal(err)
		}
		eventually(t, 2*time.Minute, "the one with the old key is alone", func() bool {
			return !ms[0].sees("c") && !ms[1].sees("c") && !ms[2].sees("a") && ms[0].sees("b")
		})
		if err := ms[0].SetKeys([][]byte{key(1)[:16]}); err == nil {
			t.Error("a key of 16 bytes was taken")
		}
	})
}

func TestForeignersAreNotSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ids := []string{"a", "b", "wrong-key", "wrong-mesh"}
		f, ms := fabric(t, "a", "b")
		k := join(t, f, "wrong-key", ids, func(c *gossip.Config) { c.Keys = [][]byte{key(9)} })
		m := join(t, f, "wrong-mesh", ids, func(c *gossip.Config) { c.Mesh = "mesh-2" })
		time.Sleep(5 * time.Minute)
		if !allSee(ms, everybody)() {
			t.Error("the members do not see each other")
		}
		for _, x := range []*member{ms[0], ms[1], k, m} {
			for id := range x.Seen() {
				if x.id != id && (x == k || x == m || id == "wrong-key" || id == "wrong-mesh") {
					t.Errorf("%s sees %s", x.id, id)
				}
			}
		}
	})
}

func TestTheDeadWhoAreNoMembersAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFabric(t)
		a := join(t, f, "a", []string{"a", "b"}, nil)
		b := join(t, f, "b", []string{"a", "b"}, nil)
		c := join(t, f, "c", []string{"a", "b"}, nil) // of which the log knows nothing yet
		eventually(t, 20*time.Second, "all see all", allSee([]*member{a, b, c}, everybody))
		f.Kill("c")
		eventually(t, 2*time.Minute, "c is forgotten", func() bool {
			_, known := a.Seen()["c"]
			return !known
		})
	})
}

func TestGossipOverARealPort(t *testing.T) {
	// Shutdown of memberlist does not wait for a probe that is under way. It ends by itself, within the
	// eight probe intervals of a node that takes itself for slow.
	t.Cleanup(func() {
		var left error
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
			if left = goleak.Find(); left == nil { // it waits about a second itself
				return
			}
		}
		t.Error(left)
	})
	mesh := networktest.NewMesh(t)
	ids := []string{"a", "b", "c"}
	ports := map[string]*network.Port{}
	for _, id := range ids {
		ports[id] = mesh.Port(id)
	}
	var ms []*member
	for _, id := range ids {
		ms = append(ms, start(t, ports[id], id, func(c *gossip.Config) {
			c.Timing.Rejoin = 100 * time.Millisecond
			c.Timing.Probe, c.Timing.ProbeTimeout = 300*time.Millisecond, 200*time.Millisecond
			c.Peers = func() []gossip.Peer {
				var ps []gossip.Peer
				for _, p := range ids {
					ps = append(ps, gossip.Peer{ID: p, Addr: ports[p].Addr().String()})
				}
				return ps
			}
		}))
	}
	eventually(t, 30*time.Second, "all see all", allSee(ms, everybody))
	if got := ms[0].Seen()["c"].Addr; got != ports["c"].Addr() {
		t.Errorf("c is seen at %v, it is at %v", got, ports["c"].Addr())
	}
	ms[2].end(t)
	ports["c"].Close()
	eventually(t, 60*time.Second, "c is missed", func() bool { return !ms[0].sees("c") && !ms[1].sees("c") })
}

func TestStartSaysWhatIsWrong(t *testing.T) {
	for name, tc := range map[string]struct {
		edit func(*gossip.Config)
		want string
	}{
		"no key":       {func(c *gossip.Config) { c.Keys = nil }, "never in clear"},
		"short key":    {func(c *gossip.Config) { c.Keys = [][]byte{key(1)[:24]} }, "it must have 32"},
		"no ids":       {func(c *gossip.Config) { c.Node, c.Mesh = "", "" }, "must have ids"},
		"long mesh id": {func(c *gossip.Config) { c.Mesh = strings.Repeat("m", 256) }, "the most is 255"},
		"no timing":    {func(c *gossip.Config) { c.Timing = gossip.Timing{} }, "every time must be positive"},
		"nothing":      {func(c *gossip.Config) { *c = gossip.Config{} }, "must all be set"},
		"long record":  {func(c *gossip.Config) { c.Record.Mesh = strings.Repeat("m", 600) }, "the most is 512"},
	} {
		t.Run(name, func(t *testing.T) {
			n := network.NewFabric().Join("a")
			defer n.Close()
			tr, err := network.Gossiping(n)
			if err != nil {
				t.Fatal(err)
			}
			defer tr.Shutdown()
			cfg := gossip.Config{
				Node: "a", Mesh: "mesh-1", Keys: [][]byte{key(1)}, Transport: tr, Timing: gossip.WAN(),
				Peers: func() []gossip.Peer { return nil }, Changed: func() {}, Log: slog.New(slog.DiscardHandler),
			}
			tc.edit(&cfg)
			g, err := gossip.Start(cfg)
			if err == nil {
				g.Close()
				t.Fatal("started")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%q does not say %q", err, tc.want)
			}
		})
	}
}
