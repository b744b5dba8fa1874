package peer

import (
	"slices"
	"testing"
	"time"

	"meshd/bus"
	"meshd/provision"
	"meshd/provision/memory"
	"meshd/raftfsm"
)

// TestATroubleEndsWithWhatItWasAbout: a login that cannot be made is held up at
// its provider. Bound to another, the binding is well, and the old provider's
// node has nothing to say of it any more.
func TestATroubleEndsWithWhatItWasAbout(t *testing.T) {
	inMesh(t, func(b *bed) {
		server := b.world.Serve("db", 1)
		b.world.Serve("db2", 1)
		b.node("gamma").do(push(database("pg-main", "beta", "db"), database("pg-two", "gamma", "db2")))
		b.eventually(10*time.Second, "the provider is ready", func() bool { return b.node("alpha").state().Providers["pg-main/memory"].Ready })
		server.Set(memory.Fault{Class: provision.MissingRight})
		b.node("gamma").do(push(shop("shop", "alpha", "pg-main")))
		b.eventually(10*time.Second, "the hop is named", func() bool {
			tr := b.node("gamma").state().Bindings[shopDB].AtProvider
			return tr != nil && tr.Class == string(provision.MissingRight) && tr.Step == "create resource"
		})
		b.node("gamma").do(push(shop("shop", "alpha", "pg-two")))
		b.inUse()
		server.Set()
		b.converged("db", "db2")
		b.eventually(time.Minute, "no trouble is left on record", func() bool { return len(b.troubles()) == 0 })
		b.idle(5 * time.Minute)
	})
}

// TestACorrectedProviderIsTriedAtOnce: who pushes the right address does not wait
// out the back-off of the wrong one.
func TestACorrectedProviderIsTriedAtOnce(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.node("gamma").do(push(database("pg-main", "beta", "nowhere"), shop("shop", "alpha", "pg-main")))
		time.Sleep(5*time.Minute + 7*time.Second)
		if tr := b.node("alpha").state().Providers["pg-main/memory"].Trouble; tr == nil || tr.Class != string(provision.Unreachable) {
			b.Fatalf("at an address where nothing is: %+v", tr)
		}
		b.world.Serve("db", 1)
		b.node("gamma").do(push(database("pg-main", "beta", "db")))
		b.phase(2*time.Second, shopDB, raftfsm.PhaseInUse)
	})
}

func TestATroubleOnRecordEndsAfterARestart(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.standard()
		b.inUse()
		beta := b.node("beta")
		// As after a crash between a success and the word of it.
		result, err := beta.peer.Propose(b.Context(), Meshd, raftfsm.NodeReport{Troubles: []raftfsm.TroubleReport{{Binding: shopDB, Side: raftfsm.SideProvider, Step: "log in", Class: "unreachable"}}})
		b.must(settled(result, err))
		beta.kill()
		beta.restart()
		b.eventually(10*time.Second, "nobody works on it, so it is over", func() bool { return len(b.troubles()) == 0 })
	})
}

func TestHealthProvesTheProcessThatHasTheCredential(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.world.Serve("db", 1)
		b.world.Serve("db2", 1)
		docs := shop("shop", "alpha", "pg-main")
		docs.Modules[0].Health = &raftfsm.Health{TCP: "127.0.0.1:1"}
		bindTo := func(provider string) {
			docs.Modules[0].Requires = map[string]raftfsm.Requirement{"db": {Kind: "memory", Provider: provider, Proof: raftfsm.ProofHealth}}
			b.node("gamma").do(push(docs))
		}
		alpha := b.node("alpha")
		alpha.procs.setHealth("starting")
		b.node("gamma").do(push(database("pg-main", "beta", "db"), database("pg-two", "gamma", "db2")))
		bindTo("pg-main")
		b.phase(10*time.Second, shopDB, raftfsm.PhaseDelivered)
		time.Sleep(time.Minute)
		b.phase(time.Second, shopDB, raftfsm.PhaseDelivered)
		alpha.procs.setHealth("healthy")
		alpha.peer.Poke()
		b.inUse()
		// Bound to another: the process that is healthy was started with the old login
		// until it is started anew.
		alpha.procs.setFrozen(true)
		bindTo("pg-two")
		b.phase(10*time.Second, shopDB, raftfsm.PhaseDelivered)
		time.Sleep(2 * time.Minute)
		b.phase(time.Second, shopDB, raftfsm.PhaseDelivered)
		alpha.procs.setFrozen(false)
		b.phase(everythingEvery+10*time.Second, shopDB, raftfsm.PhaseInUse)
		if n := alpha.procs.starts()["shop@alpha"]; n != 2 {
			b.Errorf("the shop was started %d times, want once for each login", n)
		}
	})
}

func TestASignalInPlaceOfARestart(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.world.Serve("db", 1)
		b.world.Serve("db2", 1)
		docs := shop("shop", "alpha", "pg-main")
		docs.Modules[0].OnRotate = "signal HUP"
		docs.Modules[0].Health = &raftfsm.Health{TCP: "127.0.0.1:1"}
		docs.Modules[0].Requires = map[string]raftfsm.Requirement{"db": {Kind: "memory", Provider: "pg-main", Proof: raftfsm.ProofHealth}}
		alpha := b.node("alpha")
		alpha.procs.setHealth("healthy")
		b.node("gamma").do(push(database("pg-main", "beta", "db"), database("pg-two", "gamma", "db2"), docs))
		b.inUse()
		if got := alpha.procs.signalled(); len(got) != 0 {
			b.Errorf("signalled at its start: %v", got)
		}
		docs.Modules[0].Requires = map[string]raftfsm.Requirement{"db": {Kind: "memory", Provider: "pg-two", Proof: raftfsm.ProofHealth}}
		b.node("gamma").do(push(docs))
		b.phase(10*time.Second, shopDB, raftfsm.PhaseDelivered)
		delivered := time.Now()
		b.inUse()
		if took := time.Since(delivered); took < healthFails*2*healthEvery {
			b.Errorf("proven %v after the delivery, by checks from before it", took)
		}
		if got := alpha.procs.signalled(); !slices.Equal(got, []string{"shop@alpha hangup"}) {
			b.Errorf("signalled: %v", got)
		}
		if n := alpha.procs.starts()["shop@alpha"]; n != 1 {
			b.Errorf("the shop was started %d times", n)
		}
	})
}

func TestASeatMovesWithItsHoldersLossAloneAndEveryBusSaysTheSame(t *testing.T) {
	inMesh(t, func(b *bed) {
		lamp := raftfsm.Documents{
			Seats:   []raftfsm.Seat{{Name: "lamp", Scope: raftfsm.ScopeMesh, Verbs: []string{"on"}}},
			Modules: []raftfsm.Module{{Name: "lamp", Run: raftfsm.Run{Exec: []string{"/bin/lamp"}}, Claims: []string{"lamp"}, Tools: map[string]raftfsm.Handler{"size": {Bus: true}}}},
			Assigns: []raftfsm.Assign{{Module: "lamp", Nodes: []string{"alpha", "beta", "gamma"}}},
		}
		b.node("gamma").do(push(lamp))
		b.eventually(10*time.Second, "a holder", func() bool { return b.node("alpha").state().Seats["lamp"].Holder != "" })
		first := b.node("alpha").state().Seats["lamp"]
		dead := b.leader()
		dead.kill()
		time.Sleep(5 * time.Second)
		for _, n := range b.nodes {
			if !n.up() {
				n.restart()
			}
		}
		b.leader()
		time.Sleep(time.Minute)
		now := b.node("alpha").state().Seats["lamp"]
		if moved := first.Holder == "lamp@"+dead.name; moved != (now.Holder != first.Holder) || moved != (now.Epoch > first.Epoch) {
			b.Errorf("%s died: the seat went from %s, epoch %d, to %s, epoch %d", dead.name, first.Holder, first.Epoch, now.Holder, now.Epoch)
		}
		for _, n := range b.nodes {
			if seat := n.state().Seats["lamp"]; seat.Holder != now.Holder || seat.Epoch != now.Epoch {
				b.Errorf("%s has %s, epoch %d, on record", n.name, seat.Holder, seat.Epoch)
			}
			l := n.bus.now()
			if h := l.Directory.Seats["lamp"].Holder; h.Assignment != now.Holder || h.Epoch != now.Epoch {
				b.Errorf("%s says that %v holds the seat", n.name, h)
			}
			if seats, _ := n.peer.leases.gate.Holding(); (len(seats) > 0) != (now.Holder == "lamp@"+n.name) {
				b.Errorf("the gate of %s is open for %v", n.name, seats)
			}
			holds := slices.ContainsFunc(l.Services, func(s bus.Service) bool { return s.Scope == bus.ScopeMesh })
			tools := slices.ContainsFunc(l.Services, func(s bus.Service) bool { return s.Scope == bus.ScopeTools })
			if holds != (now.Holder == "lamp@"+n.name) || !tools || len(l.Peers) != 2 {
				b.Errorf("%s serves %+v to %d peers", n.name, l.Services, len(l.Peers))
			}
		}
	})
}

// TestAServiceThatGoesIsNoticed: nobody asks an idle service anything for half a
// minute, and it is known at once that it went; and that it came back, by the
// next try.
func TestAServiceThatGoesIsNoticed(t *testing.T) {
	inMesh(t, func(b *bed) {
		server := b.standard()
		b.inUse()
		ready := func(want bool) func() bool {
			return func() bool { return b.node("alpha").state().Providers["pg-main/memory"].Ready == want }
		}
		for range 3 {
			time.Sleep(time.Minute + 7*time.Second)
			server.Set(memory.Fault{Class: provision.Unreachable})
			b.eventually(time.Second, "the provider is down", ready(false))
			server.Set()
			b.eventually(2*time.Second, "the provider is ready", ready(true))
		}
	})
}
