package peer

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"meshd/gossip"
	"meshd/peer/consensus"
	"meshd/provision"
	"meshd/provision/memory"
	"meshd/raftfsm"
)

// inMesh runs f on a mesh of three in virtual time.
func inMesh(t *testing.T, f func(b *bed)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { f(newBed(t, "alpha", "beta", "gamma")) })
}

const shopDB = "shop@alpha/db"

// standard pushes, on gamma, a shop on alpha that uses a database on beta.
func (b *bed) standard() *memory.Server {
	b.Helper()
	server := b.world.Serve("db", 1)
	b.node("gamma").do(push(database("pg-main", "beta", "db"), shop("shop", "alpha", "pg-main")))
	return server
}

// inUse waits for the binding of standard.
func (b *bed) inUse() {
	b.Helper()
	b.phase(60*time.Second, shopDB, raftfsm.PhaseInUse)
}

func TestOnePushIsEnough(t *testing.T) {
	inMesh(t, func(b *bed) {
		time.Sleep(time.Minute)
		reloads := map[string]int{}
		for _, n := range b.nodes {
			_, reloads[n.name] = n.bus.counts()
		}
		began := time.Now()
		b.standard()
		b.inUse()
		if took := time.Since(began); took > time.Second {
			b.Errorf("it took %v", took)
		}
		if running := b.node("alpha").procs.running(); !slices.Equal(running, []string{"shop@alpha"}) {
			b.Errorf("alpha runs %v", running)
		}
		got := b.logins("db")
		if want := b.node("beta").state().Bindings[shopDB].Newest().Login; !slices.Equal(got, []string{want}) {
			b.Errorf("the service has the logins %v, want %s", got, want)
		}
		for _, n := range b.nodes {
			if _, now := n.bus.counts(); now-reloads[n.name] > 1 {
				b.Errorf("one push was %d reloads of the bus of %s", now-reloads[n.name], n.name)
			}
		}
	})
}

func TestAProviderThatIsAwayAtThePushFollowsByItself(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.node("beta").kill()
		b.standard()
		time.Sleep(2 * time.Minute)
		if phase := b.node("alpha").state().Bindings[shopDB].Phase(); phase != raftfsm.PhaseWaiting {
			b.Errorf("with its provider away it is %s", phase)
		}
		b.node("beta").restart()
		b.inUse()
	})
}

func TestAConsumerThatIsAwayAtThePushFollowsByItself(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.node("alpha").kill()
		b.standard()
		b.phase(10*time.Second, shopDB, raftfsm.PhaseMinted)
		b.node("alpha").restart()
		b.inUse()
	})
}

func TestTheLeaderMayDieInEveryStep(t *testing.T) {
	for _, step := range []raftfsm.Phase{raftfsm.PhaseWaiting, raftfsm.PhaseStaged, raftfsm.PhaseMinted, raftfsm.PhaseDelivered, raftfsm.PhaseInUse} {
		for _, who := range []string{"alpha", "beta", "gamma"} {
			t.Run(string(step)+" "+who, func(t *testing.T) {
				inMesh(t, func(b *bed) {
					b.lead(who)
					b.world.Serve("db", 1)
					changed := b.node(who).peer.store.watch()
					b.node("gamma").do(push(database("pg-main", "beta", "db"), shop("shop", "alpha", "pg-main")))
					for b.node(who).state().Bindings[shopDB].Phase().Rank() < step.Rank() {
						<-changed
						changed = b.node(who).peer.store.watch()
					}
					b.node(who).kill()
					time.Sleep(10 * time.Second)
					b.node(who).restart()
					b.inUse()
					b.converged("db")
				})
			})
		}
	}
}

// lead makes the node of that name lead.
func (b *bed) lead(name string) {
	b.Helper()
	for range 20 {
		l := b.leader()
		if l.name == name {
			return
		}
		// Whoever is cut off gives up; who follows is chance.
		b.fabric.Isolate(l.keys.NodeID())
		time.Sleep(3 * time.Second)
		b.fabric.Heal()
		time.Sleep(time.Second)
	}
	b.Fatalf("%s does not come to lead", name)
}

// converged checks what must hold of the services at these hosts once nothing is
// under way.
func (b *bed) converged(hosts ...string) {
	b.Helper()
	b.eventually(2*time.Minute, "nothing left to withdraw", func() bool {
		return !slices.ContainsFunc(b.nodes, func(n *node) bool { return n.up() && len(n.state().Withdrawals) > 0 })
	})
	s := b.leader().state()
	var named, found []string
	for _, id := range sortedKeys(s.Bindings) {
		if n := len(s.Bindings[id].Credentials); n > 2 {
			b.Errorf("%s has %d credentials", id, n)
		}
		for _, c := range s.Bindings[id].Credentials {
			named = append(named, c.Login)
		}
	}
	for _, host := range hosts {
		found = append(found, b.logins(host)...)
	}
	slices.Sort(named)
	slices.Sort(found)
	if !slices.Equal(named, found) {
		b.Errorf("the log names the logins %v, and the services have %v", named, found)
	}
}

func TestAMinorityReadsAndSaysWhoIsMissing(t *testing.T) {
	for _, who := range []string{"the leader", "a follower"} {
		t.Run(who, func(t *testing.T) {
			inMesh(t, func(b *bed) {
				b.standard()
				b.inUse()
				l := b.leader()
				cut := b.nodes[(slices.Index(b.nodes, l)+1)%3]
				if who == "the leader" {
					cut = l
				}
				cut.do(raftfsm.AddToken{Hash: "warm", Expires: time.Now()}) // a stream to the leader is open
				b.fabric.Isolate(cut.keys.NodeID())
				for range 2 { // at once, and when the loss is known
					began := time.Now()
					err := cut.propose(raftfsm.AddToken{Hash: "t", Expires: time.Now()})
					if took := time.Since(began); err == nil || took > proposeWithin {
						b.Fatalf("a write in a minority: %v after %v", err, took)
					}
					named := 0
					for _, n := range b.nodes {
						if n != cut && strings.Contains(err.Error(), n.name) {
							named++
						}
						if strings.Contains(err.Error(), n.keys.NodeID()) {
							b.Errorf("the error has an id in it: %v", err)
						}
					}
					if named == 0 {
						b.Errorf("the error names nobody: %v", err)
					}
					time.Sleep(5 * time.Second)
				}
				v := cut.peer.View()
				if v.Quorum || v.Age < 5*time.Second || v.Age > time.Minute || len(v.Missing) != 2 || v.State.Bindings[shopDB].Phase() != raftfsm.PhaseInUse {
					b.Errorf("a minority sees quorum %v, age %v, missing %v, phase %s", v.Quorum, v.Age, v.Missing, v.State.Bindings[shopDB].Phase())
				}
				// The others go on; what ran goes on.
				other := b.nodes[(slices.Index(b.nodes, cut)+1)%3]
				other.do(push(shop("second", "gamma", "pg-main")))
				if n := b.node("alpha").procs.starts()["shop@alpha"]; n != 1 {
					b.Errorf("the shop was started %d times", n)
				}
				b.fabric.Heal()
				b.phase(60*time.Second, "second@gamma/db", raftfsm.PhaseInUse)
				b.inUse()
				b.eventually(time.Minute, "everybody sees a quorum, and how old nothing is", func() bool {
					return !slices.ContainsFunc(b.nodes, func(n *node) bool { v := n.peer.View(); return !v.Quorum || v.Age != 0 })
				})
				b.converged("db")
			})
		})
	}
}

// TestANodeWithoutAVoteWritesThroughAnElection: it hears of the leader alone, and
// cannot tell an election from the loss of a quorum.
func TestANodeWithoutAVoteWritesThroughAnElection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "alpha", "beta", "gamma", "delta")
		time.Sleep(time.Minute)
		l := b.leader()
		voters := l.peer.View().Voters
		learner := b.nodes[slices.IndexFunc(b.nodes, func(n *node) bool { return !slices.Contains(voters, n.keys.NodeID()) })]
		learner.do(raftfsm.AddToken{Hash: "before", Expires: time.Now()})
		l.kill()
		learner.do(raftfsm.AddToken{Hash: "after", Expires: time.Now()})
	})
}

func TestALearnerAloneSaysWhoIsMissing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "alpha", "beta")
		time.Sleep(time.Minute)
		b.node("alpha").kill() // the one voter of two
		time.Sleep(time.Second)
		began := time.Now()
		err := b.node("beta").propose(raftfsm.AddToken{Hash: "t", Expires: time.Now()})
		if err == nil || !strings.Contains(err.Error(), "alpha") || time.Since(began) > proposeWithin {
			b.Errorf("a write without the only voter: %v after %v", err, time.Since(began))
		}
	})
}

func TestLogsAreReadFromAnyNode(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.standard()
		b.inUse()
		for _, on := range []string{"alpha", "gamma"} {
			ctx, cancel := context.WithTimeout(b.Context(), time.Minute+time.Second)
			var out strings.Builder
			_ = b.node(on).peer.Logs(ctx, "shop@alpha", 10, true, &out) // it ends with ctx
			if want := "shop@alpha began\n" + strings.Repeat("tick\n", 6); out.String() != want {
				b.Errorf("a minute of the log, read on %s: %q, want %q", on, out.String(), want)
			}
			cancel()
		}
	})
}

func TestAWithdrawalWhileTheProviderIsAwayDrainsByItself(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.standard()
		b.inUse()
		b.node("beta").kill()
		b.node("gamma").do(raftfsm.Remove{What: raftfsm.WhatModule, Name: "shop"})
		b.eventually(10*time.Second, "the consumer is gone at once", func() bool {
			return len(b.node("alpha").procs.running()) == 0 && len(read(b.node("alpha").bindings())) == 0
		})
		if s := b.node("alpha").state(); len(s.Withdrawals) != 1 || len(b.logins("db")) != 1 {
			b.Fatalf("the withdrawal does not wait: %v", s.Withdrawals)
		}
		b.node("beta").restart()
		b.converged("db")
		if kept := b.node("alpha").state().Retained(); len(kept) != 1 {
			b.Errorf("retained: %v", kept)
		}
	})
}

func TestAFaultNamesItsHopAndItsMendingIsEnough(t *testing.T) {
	for _, test := range []struct {
		name     string
		fault    memory.Fault
		class    provision.Class
		step     string
		provider bool // it shows at the provider, otherwise at the binding's consumer
	}{
		{"down", memory.Fault{Class: provision.Unreachable}, provision.Unreachable, "check that the service takes writes", true},
		{"read-only", memory.Fault{Class: provision.ReadOnly}, provision.ReadOnly, "check that the service takes writes", true},
		{"hangs", memory.Fault{Hang: true}, provision.TimedOut, "check that the service takes writes", true},
		{"not reached from the consumer", memory.Fault{Class: provision.Unreachable, Node: "alpha"}, provision.Unreachable, "log in", false},
		{"hangs for the consumer", memory.Fault{Hang: true, Node: "alpha"}, provision.TimedOut, "log in", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			inMesh(t, func(b *bed) {
				server := b.world.Serve("db", 1)
				server.Set(test.fault)
				b.node("gamma").do(push(database("pg-main", "beta", "db"), shop("shop", "alpha", "pg-main")))
				trouble := func(n *node) *raftfsm.Trouble {
					if s := n.state(); test.provider {
						return s.Providers["pg-main/memory"].Trouble
					} else {
						return s.Bindings[shopDB].AtConsumer
					}
				}
				b.eventually(20*time.Second, "the hop shows on every node", func() bool {
					return !slices.ContainsFunc(b.nodes, func(n *node) bool { tr := trouble(n); return tr == nil || tr.Class != string(test.class) })
				})
				since := trouble(b.node("gamma")).Since
				time.Sleep(2 * time.Minute)
				if tr := trouble(b.node("gamma")); tr.Step != test.step || !tr.Since.Equal(since) {
					b.Errorf("after two minutes the trouble is %+v, want step %q since %v", tr, test.step, since)
				}
				about := "pg-main"
				if !test.provider {
					about = shopDB
				}
				if tries, err := b.node("gamma").peer.Detail(b.Context(), about); err != nil || len(tries) == 0 || tries[0].Tries < 3 || tries[0].Text == "" {
					b.Errorf("the detail of %s is %+v, %v", about, tries, err)
				}
				server.Set()
				b.phase(lastRetry+10*time.Second, shopDB, raftfsm.PhaseInUse)
				b.eventually(10*time.Second, "no trouble is left on record", func() bool { return len(b.troubles()) == 0 })
			})
		})
	}
}

// troubles lists what the mesh has on record as wrong.
func (b *bed) troubles() (out []string) {
	s := b.leader().state()
	for id, p := range s.Providers {
		if p.Trouble != nil {
			out = append(out, fmt.Sprintf("%s: %+v", id, *p.Trouble))
		}
	}
	for id, x := range s.Bindings {
		if x.AtProvider != nil {
			out = append(out, fmt.Sprintf("%s at provider: %+v", id, *x.AtProvider))
		}
		if x.AtConsumer != nil {
			out = append(out, fmt.Sprintf("%s at consumer: %+v", id, *x.AtConsumer))
		}
	}
	return out
}

func TestAFaultAfterwardsIsACondition(t *testing.T) {
	inMesh(t, func(b *bed) {
		server := b.standard()
		b.inUse()
		server.Set(memory.Fault{Class: provision.ReadOnly})
		b.eventually(preflightEvery+5*time.Second, "the provider is not ready", func() bool {
			p := b.node("alpha").state().Providers["pg-main/memory"]
			return !p.Ready && p.Trouble != nil && p.Trouble.Class == string(provision.ReadOnly)
		})
		b.inUse() // nothing is taken back
		server.Set()
		b.eventually(lastRetry+5*time.Second, "the provider is ready", func() bool { return len(b.troubles()) == 0 })
	})
}

func TestOneBrokenProviderHoldsUpNoOther(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.world.Serve("stuck", 1).Set(memory.Fault{Hang: true})
		b.world.Serve("db", 1)
		b.node("gamma").do(push(
			database("broken", "beta", "stuck"), database("pg-main", "beta", "db"),
			shop("first", "alpha", "broken"), shop("shop", "alpha", "pg-main")))
		b.phase(2*time.Second, shopDB, raftfsm.PhaseInUse)
		if phase := b.node("alpha").state().Bindings["first@alpha/db"].Phase(); phase != raftfsm.PhaseWaiting {
			b.Errorf("the other is %s", phase)
		}
	})
}

func TestIdleMeansIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newSlowBed(t, consensus.WAN(), gossip.WAN(), "alpha", "beta", "gamma")
		b.standard()
		b.inUse()
		b.idle(time.Hour)
		// A provider that has gone is reported no more, and neither is a consumer.
		b.node("gamma").do(raftfsm.Remove{What: raftfsm.WhatModule, Name: "shop"})
		b.converged("db")
		b.node("gamma").do(raftfsm.Remove{What: raftfsm.WhatAssignment, Name: "pg-main"})
		b.idle(10 * time.Minute)
	})
}

// idle checks that nothing is written, and that nothing runs for it.
func (b *bed) idle(for_ time.Duration) {
	b.Helper()
	time.Sleep(5 * time.Second)
	l := b.leader()
	before := l.state().Index
	applies, _ := l.bus.counts()
	time.Sleep(for_)
	if wrote := l.state().Index - before; wrote > 0 {
		b.Errorf("%d entries in %v in which nothing happened", wrote, for_)
	}
	now, _ := l.bus.counts()
	if most := int(for_/everythingEvery)*3 + 10; now-applies > most {
		b.Errorf("%d passes in %v in which nothing happened, want %d at most", now-applies, for_, most)
	}
}

func TestARestartTouchesNothingThatRuns(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.standard()
		b.inUse()
		b.node("gamma").do(push(shop("second", "alpha", "pg-main")))
		b.phase(10*time.Second, "second@alpha/db", raftfsm.PhaseInUse)
		alpha := b.node("alpha")
		alpha.kill()
		// What goes while a node is down is cleared when it comes back.
		b.node("gamma").do(raftfsm.Remove{What: raftfsm.WhatModule, Name: "second"})
		time.Sleep(time.Minute)
		if n := len(alpha.procs.running()); n != 2 {
			b.Errorf("%d processes outlived meshd, want 2", n)
		}
		alpha.restart()
		b.eventually(20*time.Second, "what is gone is not delivered any more", func() bool {
			return slices.Equal(alpha.procs.running(), []string{"shop@alpha"}) && len(read(alpha.bindings())) == 2 // shop@alpha, and its versions
		})
		if public, _, err := alpha.local.busKey("shop@alpha"); err != nil || public != alpha.bus.now().Modules[0].PublicKey {
			b.Errorf("the bus has another key than the process: %v", err)
		}
		if n := alpha.procs.starts()["shop@alpha"]; n != 1 {
			b.Errorf("the restart of meshd started the shop again: %d times", n)
		}
		b.inUse()
		b.converged("db")
		b.idle(3 * time.Minute)
	})
}

func TestAllNodesLosePowerAndComeBack(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.standard()
		b.inUse()
		index := b.leader().state().Index
		for _, n := range b.nodes {
			n.kill()
		}
		for _, n := range b.nodes {
			n.restart()
		}
		b.inUse()
		if now := b.leader().state().Index; now < index {
			b.Errorf("index %d after %d", now, index)
		}
		if n := b.node("alpha").procs.starts()["shop@alpha"]; n != 1 {
			b.Errorf("the shop was started %d times", n)
		}
	})
}

// TestAConsumerThatMovesWhileItsCredentialIsUnderWay: what was sealed for the
// old node is in vain, and must be sealed for the new one although nothing of it
// ever came into the log.
func TestAConsumerThatMovesWhileItsCredentialIsUnderWay(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.world.Serve("db", 1)
		b.lead("gamma")
		docs := shop("shop", "alpha", "pg-main")
		docs.Assigns[0].As = "shop"
		b.node("gamma").do(push(database("pg-main", "beta", "db")))
		b.eventually(10*time.Second, "the provider is ready", func() bool { return b.node("beta").state().Providers["pg-main/memory"].Ready })
		beta := b.node("beta")
		b.fabric.Slow(beta.keys.NodeID(), b.node("gamma").keys.NodeID(), 50*time.Millisecond)
		b.node("gamma").do(push(docs))
		for staged := 0; staged == 0; time.Sleep(time.Millisecond) {
			beta.peer.observed.look(func(s *sightings) { staged = len(s.staged) })
		}
		b.fabric.Isolate(beta.keys.NodeID())
		docs.Assigns[0].Nodes = []string{"gamma"}
		b.node("gamma").do(push(docs))
		if phase := b.node("gamma").state().Bindings["shop/db"].Phase(); phase != raftfsm.PhaseWaiting {
			b.Fatalf("the test is too late: the binding is %s", phase)
		}
		time.Sleep(3 * time.Second)
		b.fabric.Heal()
		b.phase(60*time.Second, "shop/db", raftfsm.PhaseInUse)
		b.converged("db")
		if running := b.node("alpha").procs.running(); len(running) != 0 {
			b.Errorf("alpha still runs %v", running)
		}
	})
}

// TestAnOldStateIsNotActedOn: a node that does not know how far it had applied its
// log knows its snapshot until a leader speaks. What it runs was decided later, and
// goes on.
func TestAnOldStateIsNotActedOn(t *testing.T) {
	inMesh(t, func(b *bed) {
		alpha := b.node("alpha")
		b.must(alpha.peer.raft.Snapshot(b.Context()))
		b.standard()
		b.inUse()
		secrets := alpha.local.Setting(SecretsSetting)
		alpha.kill()
		b.fabric.Isolate(alpha.keys.NodeID())
		alpha.disk.LoseMark()
		alpha.restart()
		time.Sleep(2 * time.Minute)
		if alpha.holds() != 0 {
			b.Error("an old state was taken for a record")
		}
		if v := alpha.peer.View(); len(v.State.Nodes) == 0 || len(v.State.Bindings) != 0 || v.Age != -1 {
			b.Fatalf("the test is wrong: alpha knows %d nodes and %d bindings, age %v", len(v.State.Nodes), len(v.State.Bindings), v.Age)
		}
		if running := alpha.procs.running(); !slices.Equal(running, []string{"shop@alpha"}) {
			b.Errorf("on an old state alpha runs %v", running)
		}
		if len(read(alpha.bindings() + "/shop@alpha")["db"]) == 0 {
			b.Error("on an old state the files are gone")
		}
		if alpha.rekeys() != 0 || alpha.local.Setting(SecretsSetting) != secrets {
			b.Error("on an old state the keys were changed")
		}
		b.fabric.Heal()
		b.inUse()
		if n := alpha.procs.starts()["shop@alpha"]; n != 1 {
			b.Errorf("the shop was started %d times", n)
		}
	})
}

func TestAReboundConsumerLeavesNothingBehind(t *testing.T) {
	inMesh(t, func(b *bed) {
		server := b.standard()
		b.world.Serve("db2", 1)
		b.node("gamma").do(push(database("pg-two", "gamma", "db2"), database("pg-three", "beta", "db2")))
		b.inUse()
		alpha := b.node("alpha")
		before := read(alpha.bindings() + "/shop@alpha")["db"]
		server.Set(memory.Fault{Class: provision.ReadOnly})
		b.node("gamma").do(push(shop("shop", "alpha", "pg-two")))
		b.phase(10*time.Second, shopDB, raftfsm.PhaseInUse)
		after := read(alpha.bindings() + "/shop@alpha")["db"]
		if after["username"] == before["username"] || after["host"] != "db2" || after["provider"] != "pg-two" {
			b.Errorf("after the push the shop has %v, before it %v", after, before)
		}
		b.eventually(time.Minute, "the withdrawal says what holds it up", func() bool {
			for _, w := range alpha.state().Withdrawals {
				return w.Trouble != nil || !alpha.state().Providers["pg-main/memory"].Ready
			}
			return false
		})
		server.Set()
		b.converged("db", "db2")
		// To another provider of the same node and server, and back.
		b.node("gamma").do(push(shop("shop", "alpha", "pg-three")))
		b.phase(10*time.Second, shopDB, raftfsm.PhaseInUse)
		b.node("gamma").do(push(shop("shop", "alpha", "pg-main")))
		b.phase(10*time.Second, shopDB, raftfsm.PhaseInUse)
		b.converged("db", "db2")
		b.eventually(10*time.Second, "no trouble is left on record", func() bool { return len(b.troubles()) == 0 })
		if last := read(alpha.bindings() + "/shop@alpha")["db"]; last["provider"] != "pg-main" || last["username"] == before["username"] {
			b.Errorf("back at the first the shop has %v, and had %v", last, before)
		}
		b.idle(3 * time.Minute)
	})
}
