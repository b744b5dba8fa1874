package raftfsm

import (
	"slices"
	"testing"
	"time"
)

// aBinding is shop on gamma, bound to pg-main on alpha; beta is a bystander.
func aBinding(t testing.TB, proof string) *bed {
	b := newBed(t, "alpha", "beta", "gamma")
	shop := app("shop", Requirement{Provider: "pg-main", Proof: proof})
	shop.Health = &Health{TCP: "127.0.0.1:80"}
	b.ok("alpha", push(pg(), on("pg", "alpha", as("pg-main")), shop, on("shop", "gamma")))
	return b
}

const shopDB = "shop@gamma/db"

// TestTheLifeOfABinding walks the drawing of the package comment. At each step,
// every fact comes first from every node that may not write it.
func TestTheLifeOfABinding(t *testing.T) {
	for proof, last := range map[string]struct{ fact, by string }{
		ProofLogin: {FactSeen, "alpha"}, ProofHealth: {FactHealthy, "gamma"}, ProofDelivered: {"", ""},
	} {
		t.Run(proof, func(t *testing.T) {
			b := aBinding(t, proof)
			b.phase(shopDB, PhaseWaiting)
			for _, stranger := range []string{"beta", "gamma"} {
				b.ok(stranger, b.stage(shopDB))
				b.phase(shopDB, PhaseWaiting)
			}
			b.ok("alpha", b.stage(shopDB))
			for _, step := range []struct {
				fact, by string
				before   Phase
			}{
				{FactMinted, "alpha", PhaseStaged}, {FactDelivered, "gamma", PhaseMinted}, {last.fact, last.by, PhaseDelivered},
			} {
				if step.fact == "" {
					break
				}
				b.phase(shopDB, step.before)
				for _, node := range []string{"alpha", "beta", "gamma"} {
					if node != step.by {
						b.ok(node, b.mark(shopDB, step.fact))
						b.phase(shopDB, step.before)
					}
				}
				since := b.Bindings[shopDB].Since
				b.ok(step.by, b.mark(shopDB, step.fact))
				if !b.Bindings[shopDB].Since.After(since) {
					t.Errorf("%s does not begin a new phase", step.fact)
				}
			}
			b.phase(shopDB, PhaseInUse)
			if b.Bindings[shopDB].Phase().Rank() != 5 || !b.happened(shopDB+" is in-use") {
				t.Error("in-use is not the last phase, or nobody was told")
			}
			b.ok("alpha", Remove{WhatAssignment, "shop@gamma"})
			w := sorted(b.Withdrawals)[0]
			for _, stranger := range []string{"beta", "gamma"} {
				b.ok(stranger, NodeReport{Withdrawn: []Withdrawn{{w, 1}}})
				if len(b.Withdrawals) != 1 {
					t.Errorf("%s ended a withdrawal at alpha", stranger)
				}
			}
			b.ok("alpha", NodeReport{Withdrawn: []Withdrawn{{w, 1}}})
			if len(b.Withdrawals) != 0 || len(b.Retained()) != 1 {
				t.Errorf("at the end: withdrawals %v, retained %v", b.Withdrawals, b.Retained())
			}
		})
	}
}

// TestReportsInAnyOrder applies the facts in each order, again and again until
// nothing changes: every order ends in use, and none skips a step.
func TestReportsInAnyOrder(t *testing.T) {
	facts := []struct{ fact, by string }{{FactMinted, "alpha"}, {FactSeen, "alpha"}, {FactDelivered, "gamma"}, {FactHealthy, "gamma"}}
	for _, order := range permutations(len(facts)) {
		b := aBinding(t, ProofHealth)
		b.ok("alpha", b.stage(shopDB))
		for range len(facts) {
			for _, i := range order {
				b.ok(facts[i].by, b.mark(shopDB, facts[i].fact)) // the invariants refuse a skipped step
			}
		}
		if c := b.Bindings[shopDB].Newest(); !c.Minted || !c.Delivered || !c.Healthy || !c.Seen {
			t.Errorf("order %v ends with %+v", order, c)
		}
	}
}

func permutations(n int) [][]int {
	if n == 0 {
		return [][]int{nil}
	}
	var out [][]int
	for _, p := range permutations(n - 1) {
		for at := range n {
			out = append(out, slices.Insert(slices.Clone(p), at, n-1))
		}
	}
	return out
}

func TestReportsThatNoLongerFitAreDropped(t *testing.T) {
	b := aBinding(t, ProofLogin)
	first := b.stage(shopDB)
	b.ok("alpha", first)
	for name, report := range map[string]NodeReport{
		"a generation twice":      first,
		"a generation left out":   {Staged: []Staged{{Binding: shopDB, Resource: first.Staged[0].Resource, To: id("gamma"), Generation: 3}}},
		"another resource":        {Staged: []Staged{{Binding: shopDB, Resource: "other", To: id("gamma"), Generation: 2}}},
		"another consumer's node": {Staged: []Staged{{Binding: shopDB, Resource: first.Staged[0].Resource, To: id("beta"), Generation: 2}}},
		"no such binding":         {Staged: []Staged{{Binding: "x/y", Generation: 1}}, Marks: []Mark{{Binding: "x/y"}}, Troubles: []TroubleReport{{Binding: "x/y", Class: "c"}}},
		"no such generation":      {Marks: []Mark{{Binding: shopDB, Resource: first.Staged[0].Resource, Generation: 9, Fact: FactMinted}}},
		"no such fact":            {Marks: []Mark{{Binding: shopDB, Resource: first.Staged[0].Resource, Generation: 1, Fact: "loved"}}},
		"no such withdrawal":      {Withdrawn: []Withdrawn{{ID: "x"}}},
		"no such provider":        {Providers: []ProviderReport{{Provider: "pg-main/redis"}, {Provider: "x"}, {Provider: ""}}},
		"no such process":         {Processes: []ProcessReport{{Assignment: "x", State: "running"}}},
		"another node's process":  {Processes: []ProcessReport{{Assignment: "shop@gamma", State: "running"}}},
		"the other side":          {Troubles: []TroubleReport{{Binding: shopDB, Side: SideConsumer, Class: "c"}}},
	} {
		before := b.Clone()
		b.ok("alpha", report)
		before.Index = b.Index
		if x, y := snapshotOf(t, before), snapshotOf(t, b.State); string(x) != string(y) {
			t.Errorf("%s changed\n%s\nto\n%s", name, x, y)
		}
	}
}

func TestTwoCredentialsAtMost(t *testing.T) {
	b := aBinding(t, ProofLogin)
	b.use(shopDB)
	b.ok("alpha", b.stage(shopDB))
	b.phase(shopDB, PhaseInUse) // the old one still is
	b.ok("alpha", b.stage(shopDB))
	if got := b.Bindings[shopDB]; len(got.Credentials) != 2 || got.Newest().Generation != 2 {
		t.Errorf("credentials are %+v", got.Credentials)
	}
}

func TestTrouble(t *testing.T) {
	b := aBinding(t, ProofLogin)
	say := func(node, side, step, class string) {
		b.ok(node, NodeReport{Troubles: []TroubleReport{{Binding: shopDB, Side: side, Step: step, Class: class}}})
	}
	say("alpha", SideProvider, "connect", "refused")
	first := *b.Bindings[shopDB].AtProvider
	say("alpha", SideProvider, "login", "refused")
	if got := *b.Bindings[shopDB].AtProvider; got.Step != "login" || got.Since != first.Since {
		t.Errorf("the same class began anew: %+v", got)
	}
	say("alpha", SideProvider, "login", "full")
	if got := *b.Bindings[shopDB].AtProvider; got.Since == first.Since {
		t.Errorf("another class goes on: %+v", got)
	}
	if !b.happened("shop@gamma/db is held up at alpha: connect (refused)") || !b.happened("held up at alpha: login (full)") {
		t.Error("nobody was told")
	}
	say("gamma", SideConsumer, "write", "denied")
	say("alpha", SideProvider, "", "")
	if got := b.Bindings[shopDB]; got.AtProvider != nil || got.AtConsumer == nil {
		t.Errorf("troubles are %+v and %+v", got.AtProvider, got.AtConsumer)
	}
	b.use(shopDB) // delivered: what kept the consumer's node up is over
	if got := b.Bindings[shopDB]; got.AtConsumer != nil {
		t.Errorf("trouble is %+v", got.AtConsumer)
	}
	b.ok("alpha", Remove{WhatAssignment, "shop@gamma"})
	w := sorted(b.Withdrawals)[0]
	for _, node := range []string{"beta", "alpha"} {
		b.ok(node, NodeReport{Troubles: []TroubleReport{{Withdrawal: w, Step: "drop", Class: "down"}}})
		if got := b.Withdrawals[w].Trouble != nil; got != (node == "alpha") {
			t.Errorf("%s reported: trouble is %+v", node, b.Withdrawals[w].Trouble)
		}
	}
}

func TestProviderAndProcessReports(t *testing.T) {
	b := aBinding(t, ProofLogin)
	pgMain := ProviderID("pg-main", pgKind)
	say := func(ready bool, step, class string) time.Time {
		b.ok("alpha", NodeReport{Providers: []ProviderReport{{pgMain, ready, Address{Host: "10.0.0.1", Port: 5432}, step, class}}})
		return b.Providers[pgMain].Since
	}
	b.ok("beta", NodeReport{Providers: []ProviderReport{{Provider: pgMain, Ready: true}}})
	if has(b.Providers, pgMain) {
		t.Error("another node spoke for pg-main")
	}
	down := say(false, "connect", "refused")
	if down.IsZero() || say(false, "connect", "refused") != down {
		t.Errorf("not ready since %v", down)
	}
	up := say(true, "", "")
	if !up.After(down) || b.Providers[pgMain].Trouble != nil || say(true, "", "") != up {
		t.Errorf("ready since %v: %+v", up, b.Providers[pgMain])
	}
	if !b.happened("provider pg-main of postgres-database is not ready: connect (refused)") || !b.happened("provider pg-main of postgres-database is ready") {
		t.Error("nobody was told")
	}
	n := len(b.Events)
	for range 2 {
		b.ok("gamma", NodeReport{Processes: []ProcessReport{{"shop@gamma", "running", ""}}})
	}
	if got := b.Assignments["shop@gamma"].Report; got.State != "running" || len(b.Events) != n+1 {
		t.Errorf("the process is %+v after %d events", got, len(b.Events)-n)
	}
}

// A reader may keep what it read under the lock.
func TestValuesAreReplacedNeverChanged(t *testing.T) {
	b := aBinding(t, ProofLogin)
	b.ok("alpha", b.stage(shopDB))
	kept, copied, events := b.Bindings[shopDB], b.Clone(), b.Events
	n := len(events)
	want := kept.Newest().Minted
	b.ok("alpha", b.mark(shopDB, FactMinted))
	if kept.Newest().Minted != want || copied.Bindings[shopDB].Newest().Minted != want || len(copied.Events) != n {
		t.Error("a value changed in the hands of its reader")
	}
}
