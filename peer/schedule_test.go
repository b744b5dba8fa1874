package peer

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"meshd/provision"
	"meshd/provision/memory"
	"meshd/raftfsm"
)

// schedules is how many random schedules are run. MESHD_TEST_SEED=n runs that
// one alone.
const schedules = 200

// TestRandomSchedules lets machines die, links break and services fail at random
// points of a binding's life, while it is pushed, bound to another provider,
// moved and removed. Once all is mended nothing but time may be needed.
func TestRandomSchedules(t *testing.T) {
	first, count := uint64(0), uint64(schedules)
	if raceEnabled {
		count /= 5
	}
	if seed, err := strconv.ParseUint(os.Getenv("MESHD_TEST_SEED"), 10, 64); err == nil {
		first, count = seed, 1
	}
	for seed := first; seed < first+count; seed++ {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { schedule(newBed(t, "alpha", "beta", "gamma"), seed) })
		})
	}
}

// chance makes one random schedule happen.
type chance struct {
	*bed
	*rand.Rand
	servers []*memory.Server
	docs    raftfsm.Documents // the shop's, as it was pushed last
	removed bool
}

func schedule(b *bed, seed uint64) {
	c := &chance{bed: b, Rand: rand.New(rand.NewPCG(seed, 1))}
	for _, host := range []string{"db", "db2"} {
		server := b.world.Serve(host, 1)
		server.Set(memory.Fault{Delay: time.Duration(c.IntN(8)) * time.Millisecond})
		c.servers = append(c.servers, server)
	}
	c.docs = shop("shop", "alpha", "pg-main")
	c.docs.Assigns[0].As = "shop"
	b.node("gamma").do(push(database("pg-main", "beta", "db"), database("pg-two", "gamma", "db2"), c.docs))
	for range 3 + c.IntN(6) {
		c.moment()
		c.event()
	}
	c.moment()
	stuck := c.IntN(4) == 0
	c.mend(stuck)
	if stuck {
		c.namesItsHop()
		c.mend(false)
	}
	if c.removed {
		c.node("gamma").do(push(c.docs))
	}
	b.phase(2*time.Minute, "shop/db", raftfsm.PhaseInUse)
	b.converged("db", "db2")
	b.eventually(time.Minute, "no trouble is left on record", func() bool { return len(b.troubles()) == 0 })
}

// moment lets some of a binding's life pass: as often a few milliseconds, in
// which it makes a step, as some seconds.
func (c *chance) moment() {
	most := []time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second, 5 * time.Second}[c.IntN(4)]
	time.Sleep(time.Duration(c.Int64N(int64(most))))
}

func (c *chance) any() *node { return c.nodes[c.IntN(len(c.nodes))] }

func (c *chance) event() {
	switch n := c.any(); c.IntN(9) {
	case 0, 1: // a machine dies, and boots at once or later
		if n.up() {
			n.kill()
		}
		if c.IntN(2) == 0 {
			n.restart()
		}
	case 2: // whatever is down boots
		for _, n := range c.nodes {
			if !n.up() {
				n.restart()
			}
		}
	case 3:
		c.fabric.Isolate(n.keys.NodeID())
	case 4:
		c.fabric.CutOneWay(n.keys.NodeID(), c.any().keys.NodeID())
	case 5:
		c.fabric.Heal()
	case 6: // a service breaks, after some steps of what is being done there
		c.servers[c.IntN(2)].Set(c.fault())
	case 7: // the shop is bound to the other provider, or moves
		if c.IntN(2) == 0 {
			provider := []string{"pg-main", "pg-two"}[c.IntN(2)]
			c.docs.Modules[0].Requires = map[string]raftfsm.Requirement{"db": {Kind: "memory", Provider: provider}}
		} else {
			c.docs.Assigns[0].Nodes = []string{n.name}
		}
		c.tell(push(c.docs), false)
	case 8:
		c.tell(raftfsm.Remove{What: raftfsm.WhatAssignment, Name: "shop"}, true)
	}
}

func (c *chance) fault() memory.Fault {
	f := memory.Fault{After: c.IntN(8), Node: []string{"", "alpha", "beta", "gamma"}[c.IntN(4)]}
	f.Class = []provision.Class{provision.Unreachable, provision.ReadOnly, provision.Full, ""}[c.IntN(4)]
	f.Hang = f.Class == ""
	return f
}

// tell gives a command to some node that is up, if it takes it. What came of it
// is read when all is mended.
func (c *chance) tell(cmd raftfsm.Command, removes bool) {
	if n := c.any(); n.up() && n.propose(cmd) == nil {
		c.removed = removes
	} else {
		c.removed = true // perhaps: it is pushed again at the end
	}
}

// mend makes everything well, but for the services if they are to stay stuck.
func (c *chance) mend(stuck bool) {
	c.fabric.Heal()
	for _, n := range c.nodes {
		if !n.up() {
			n.restart()
		}
	}
	for _, s := range c.servers {
		if s.Set(); stuck {
			s.Set(memory.Fault{Class: provision.Unreachable})
		}
	}
	c.leader()
}

// namesItsHop checks that a binding that does not come into use says why: at its
// provider, or at the end that is held up.
func (c *chance) namesItsHop() {
	c.eventually(time.Minute, "the shop is in use, or the hop that is stuck is named", func() bool {
		s := c.nodes[0].state()
		b, bound := s.Bindings["shop/db"]
		return !bound || b.Phase() == raftfsm.PhaseInUse || b.AtConsumer != nil || b.AtProvider != nil || s.Providers[raftfsm.ProviderID(b.Provider, b.Kind)].Trouble != nil
	})
}
