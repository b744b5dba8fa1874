package peer

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"meshd/bus"
	"meshd/raftfsm"
)

// lamp is a module with a mesh seat, a node seat and a tool, on these nodes.
func lamp(nodes ...string) raftfsm.Documents {
	return raftfsm.Documents{
		Seats: []raftfsm.Seat{
			{Name: "lamp", Scope: raftfsm.ScopeMesh, Verbs: []string{"on"}, Want: "lamp@alpha"},
			{Name: "bulb", Scope: raftfsm.ScopeNode, Verbs: []string{"off"}},
		},
		Modules: []raftfsm.Module{{
			Name: "lamp", Run: raftfsm.Run{Exec: []string{"/bin/lamp"}}, Claims: []string{"lamp", "bulb"},
			Tools: map[string]raftfsm.Handler{"size": {Bus: true}},
		}},
		Assigns: []raftfsm.Assign{{Module: "lamp", Nodes: nodes}},
	}
}

// lit waits until alpha holds the seat.
func (b *bed) lit() {
	b.Helper()
	b.node("gamma").do(push(lamp("alpha", "beta")))
	b.eventually(20*time.Second, "alpha holds the seat and serves it", func() bool {
		return b.node("alpha").serves() == "mesh seat lamp, node seat bulb, tools lamp@alpha"
	})
}

// serves is what the node's bus answers, in words; closed is what it refuses.
func (n *node) serves() string { return n.listed(func(s bus.Service) bool { return s.Closed == "" }) }
func (n *node) closed() string { return n.listed(func(s bus.Service) bool { return s.Closed != "" }) }

func (n *node) listed(which func(bus.Service) bool) string {
	var out []string
	for _, s := range n.bus.now().Services {
		switch {
		case !which(s):
		case s.Seat != "":
			out = append(out, fmt.Sprint(s.Scope, " ", s.Seat))
		default:
			out = append(out, fmt.Sprint(s.Scope, " ", s.Assignment))
		}
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

// reboot ends what the node runs, as a loss of power does.
func (n *node) reboot() {
	n.procs.end()
	n.bus.forget()
}

func (n *node) holds() int {
	n.procs.mu.Lock()
	defer n.procs.mu.Unlock()
	return n.procs.held
}

// told is what a node saw of its providers and would report.
func (n *node) told() (providers int) {
	n.peer.observed.look(func(s *sightings) { providers = len(s.providers) })
	return providers
}

// TestANodeAloneGoesByItsRecord names I10: restarted where no leader speaks, a node
// answers its tools and node seats, and what ran runs on; a mesh seat is dark and
// says why; nothing is minted or told. When the others are back, nothing is
// started or minted again.
func TestANodeAloneGoesByItsRecord(t *testing.T) {
	for _, name := range []string{"alpha", "beta"} {
		for _, power := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s keeps its processes %v", name, power), func(t *testing.T) {
				inMesh(t, func(b *bed) {
					b.standard()
					b.lit()
					b.inUse()
					time.Sleep(time.Minute)
					before, logins := b.leader().state(), b.logins("db")
					n := b.node(name)
					running := n.procs.running()
					for _, n := range b.nodes {
						n.kill()
					}
					n.bus.forget()
					if !power {
						n.reboot()
					}
					n.restart()
					ctx, cancel := context.WithTimeout(b.Context(), 500*time.Millisecond)
					defer cancel()
					b.must(n.peer.Up(ctx, false))
					want, dark := "node seat bulb, tools lamp@"+name, ""
					if name == "alpha" {
						dark = "mesh seat lamp"
					}
					if n.serves() != want || n.closed() != dark || len(n.bus.now().Peers) != 2 {
						b.Errorf("by its record %s serves %q and refuses %q", name, n.serves(), n.closed())
					}
					for _, s := range n.bus.now().Services {
						if s.Closed != "" && !strings.Contains(s.Closed, "has heard no leader since it started") {
							b.Errorf("the seat is refused with %q", s.Closed)
						}
					}
					if v := n.peer.View(); v.Age != -1 || v.Quorum || v.State.Index < before.Index-1 || v.State.Bindings[shopDB].Phase() != raftfsm.PhaseInUse {
						b.Errorf("it knows index %d of %d, age %v, phase %s", v.State.Index, before.Index, v.Age, v.State.Bindings[shopDB].Phase())
					}
					began := time.Now()
					err := n.propose(raftfsm.AddToken{Hash: "t", Expires: time.Now()})
					if took := time.Since(began); err == nil || took > proposeWithin {
						b.Fatalf("a write alone: %v after %v", err, took)
					}
					for _, other := range b.nodes {
						if other != n && !strings.Contains(err.Error(), other.name) {
							b.Errorf("the refusal does not name %s: %v", other.name, err)
						}
					}
					b.eventually(10*time.Second, "what it ran runs", func() bool { return slices.Equal(n.procs.running(), running) })
					time.Sleep(2 * time.Minute)
					if n.told() != 0 || !slices.Equal(b.logins("db"), logins) {
						b.Errorf("alone it worked at %d services; logins %v, before %v", n.told(), b.logins("db"), logins)
					}
					if findings, err := n.peer.Verify(b.Context()); err == nil || !strings.Contains(err.Error(), "does not know who is named") || len(findings) > 0 {
						b.Errorf("verify alone: %v, %v", findings, err)
					}
					starts := n.procs.starts()
					for _, other := range b.nodes {
						if other != n {
							other.restart()
						}
					}
					b.inUse()
					b.eventually(20*time.Second, "the seat is answered again", func() bool {
						return b.node("alpha").serves() == "mesh seat lamp, node seat bulb, tools lamp@alpha"
					})
					time.Sleep(time.Minute)
					if now := n.procs.starts(); !reflect.DeepEqual(now, starts) {
						b.Errorf("started %v, and %v when the others were back", starts, now)
					}
					after := b.leader().state()
					if !slices.Equal(b.logins("db"), logins) || !reflect.DeepEqual(after.Bindings[shopDB].Credentials, before.Bindings[shopDB].Credentials) {
						b.Errorf("logins %v, before %v", b.logins("db"), logins)
					}
					b.converged("db")
				})
			})
		}
	}
}

// TestAnOldRecordStopsNothing: what was removed while a node was away goes on
// until a leader says so, and what does not run is not started when one is there.
func TestAnOldRecordStopsNothing(t *testing.T) {
	away := func(b *bed) *node {
		b.standard()
		b.lit()
		b.inUse()
		time.Sleep(time.Minute)
		alpha := b.node("alpha")
		alpha.kill()
		b.node("gamma").do(raftfsm.Remove{What: raftfsm.WhatModule, Name: "shop"})
		b.node("gamma").do(push(shop("second", "alpha", "pg-main")))
		moved := lamp("alpha", "beta")
		moved.Seats[0].Want = "lamp@beta"
		b.node("gamma").do(push(moved))
		b.eventually(20*time.Second, "beta holds the seat", func() bool { return b.node("beta").state().Seats["lamp"].Holder == "lamp@beta" })
		return alpha
	}
	t.Run("no leader", func(t *testing.T) {
		inMesh(t, func(b *bed) {
			alpha := away(b)
			b.fabric.Isolate(alpha.keys.NodeID())
			alpha.restart()
			time.Sleep(2 * time.Minute)
			if running := alpha.procs.running(); !slices.Equal(running, []string{"lamp@alpha", "shop@alpha"}) {
				b.Errorf("by an old record alpha runs %v", running)
			}
			if alpha.procs.starts()["shop@alpha"] != 1 || len(read(alpha.bindings() + "/shop@alpha")["db"]) == 0 {
				b.Error("by an old record the shop was touched")
			}
			if alpha.closed() != "mesh seat lamp" || alpha.serves() != "node seat bulb, tools lamp@alpha" {
				b.Errorf("by an old record alpha serves %q and refuses %q", alpha.serves(), alpha.closed())
			}
			b.fabric.Heal()
			b.phase(time.Minute, "second@alpha/db", raftfsm.PhaseInUse)
			b.eventually(20*time.Second, "the mesh's word holds", func() bool {
				return slices.Equal(alpha.procs.running(), []string{"lamp@alpha", "second@alpha"}) && alpha.serves() == "node seat bulb, tools lamp@alpha" && alpha.closed() == ""
			})
			if n := alpha.procs.starts()["lamp@alpha"]; n != 1 {
				b.Errorf("the lamp was started %d times", n)
			}
			b.converged("db")
		})
	})
	t.Run("a leader", func(t *testing.T) {
		inMesh(t, func(b *bed) {
			alpha := away(b)
			alpha.reboot()
			alpha.restart()
			b.phase(time.Minute, "second@alpha/db", raftfsm.PhaseInUse)
			if n := alpha.holds(); n != 0 {
				b.Errorf("an old record was started by, %d times", n)
			}
			b.converged("db")
		})
	})
}

// TestAMeshOfOneComesBackByItself: its only voter needs nobody's word.
func TestAMeshOfOneComesBackByItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "alpha")
		b.node("alpha").do(push(lamp("alpha")))
		alpha := b.node("alpha")
		b.eventually(10*time.Second, "it serves", func() bool { return alpha.serves() == "mesh seat lamp, node seat bulb, tools lamp@alpha" })
		alpha.kill()
		alpha.bus.forget()
		alpha.restart()
		ctx, cancel := context.WithTimeout(b.Context(), 5*time.Second)
		defer cancel()
		b.must(alpha.peer.Up(ctx, true))
		b.eventually(time.Second, "it serves again", func() bool {
			return alpha.serves() == "mesh seat lamp, node seat bulb, tools lamp@alpha" && alpha.holds() == 0
		})
	})
}
