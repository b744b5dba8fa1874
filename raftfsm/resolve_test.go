package raftfsm

import (
	"fmt"
	"strings"
	"testing"
)

// twoPG is alpha with pg-main, beta with pg-apps, and gamma with none.
func twoPG(t testing.TB, edit ...func(*Assign)) *bed {
	b := newBed(t, "alpha", "beta", "gamma")
	b.ok("alpha", push(pg(), on("pg", "alpha", append(edit, as("pg-main"))...), on("pg", "beta", as("pg-apps"))))
	return b
}

func TestTheRuleThatChooses(t *testing.T) {
	seat := Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind}
	held := seat
	held.Want = "pg-apps"
	for name, c := range map[string]struct {
		setup []any
		q     Requirement
		where Assign
		want  string
	}{
		"the assignment's word":                   {nil, Requirement{}, on("shop", "gamma", bound("db", "pg-main")), "pg-main (assignment)"},
		"the assignment's over the requirement's": {nil, Requirement{Provider: "pg-apps"}, on("shop", "gamma", bound("db", "pg-main")), "pg-main (assignment)"},
		"the assignment's over the node":          {nil, Requirement{Node: "beta"}, on("shop", "gamma", bound("db", "pg-main")), "pg-main (assignment)"},
		"the requirement's word":                  {nil, Requirement{Provider: "pg-apps"}, on("shop", "alpha"), "pg-apps (provider)"},
		"the requirement's node":                  {nil, Requirement{Node: "beta"}, on("shop", "alpha"), "pg-apps (node)"},
		"its own node":                            {nil, Requirement{}, on("shop", "beta"), "pg-apps (own node)"},
		"its own node over the default":           {[]any{on("pg", "alpha", as("pg-main"), deflt(pgKind))}, Requirement{}, on("shop", "beta"), "pg-apps (own node)"},
		"the default":                             {[]any{on("pg", "alpha", as("pg-main"), deflt(pgKind))}, Requirement{}, on("shop", "gamma"), "pg-main (default)"},
		"the default, with two on its own node":   {[]any{on("pg", "gamma", as("pg-x")), on("pg", "gamma", as("pg-y"), deflt(pgKind))}, Requirement{}, on("shop", "gamma"), "pg-y (default)"},
		"the seat's wanted holder":                {[]any{held}, Requirement{}, on("shop", "gamma"), "pg-apps (seat)"},
		"the seat's holder":                       {[]any{seat, Hold{Seat: "store", Assignment: "pg-main"}}, Requirement{}, on("shop", "gamma"), "pg-main (seat)"},
	} {
		t.Run(name, func(t *testing.T) {
			b := twoPG(t)
			for _, s := range c.setup {
				if h, ok := s.(Hold); ok {
					b.ok("alpha", h)
					continue
				}
				b.ok("alpha", push(s))
			}
			b.ok("alpha", push(app("shop", c.q), c.where))
			name := c.where.Module + "@" + c.where.Nodes[0]
			b.want(name+"/db", c.want)
		})
	}
}

func TestWhatDoesNotResolve(t *testing.T) {
	offer := "candidates: pg-apps on beta, pg-main on alpha; write bind: {db: pg-apps} in the assignment, or provider: pg-apps in the requirement"
	for name, c := range map[string]struct {
		setup          []any
		docs           []any
		code, path     string
		sentence, near string
	}{
		"nothing named, and two elsewhere": {nil, []any{app("shop", Requirement{}), on("shop", "gamma")}, "ambiguous", "module/shop/requires/db",
			"requirement db of shop@gamma does not say which postgres-database it means: none is on its own node gamma, and none is the default; " + offer, "[pg-apps pg-main]"},
		"one elsewhere is not taken by accident": {[]any{Module{Name: "redis", Provides: map[string]Provide{"redis": {}}}, on("redis", "alpha")},
			[]any{app("shop", Requirement{Kind: "redis"}), on("shop", "gamma")}, "ambiguous", "module/shop/requires/db",
			"requirement db of shop@gamma does not say which redis it means: none is on its own node gamma, and none is the default; candidates: redis@alpha on alpha; write bind: {db: redis@alpha} in the assignment, or provider: redis@alpha in the requirement", "[redis@alpha]"},
		"two on its own node": {[]any{on("pg", "alpha", as("pg-two"))}, []any{app("shop", Requirement{}), on("shop", "alpha")}, "ambiguous", "module/shop/requires/db",
			"requirement db of shop@alpha does not say which postgres-database it means: 2 are on its own node alpha, and none is the default; candidates: pg-apps on beta, pg-main on alpha, pg-two on alpha; write bind: {db: pg-apps} in the assignment, or provider: pg-apps in the requirement", "[pg-apps pg-main pg-two]"},
		"the seat has no holder": {[]any{Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind}}, []any{app("shop", Requirement{}), on("shop", "gamma")}, "ambiguous", "module/shop/requires/db",
			"requirement db of shop@gamma does not say which postgres-database it means: none is on its own node gamma, and none is the default; " + offer + "; or write holder: in seat store, which delivers postgres-database and has no holder yet", "[pg-apps pg-main]"},
		"nobody provides it": {nil, []any{app("shop", Requirement{Kind: "redis"}), on("shop", "gamma")}, "none", "module/shop/requires/db",
			"requirement db of shop@gamma needs a redis, and nothing in the mesh provides one; push a module that provides it and an assignment of that, or name the provider to be and push with --pending", "[]"},
		"a slip in the name": {nil, []any{app("shop", Requirement{Provider: "pg-mian"}), on("shop", "gamma")}, "no-provider", "module/shop/requires/db",
			`requirement db of shop@gamma names "pg-mian", and there is no provider of postgres-database of that name; candidates: pg-main on alpha, pg-apps on beta; write bind: {db: pg-main} in the assignment, or provider: pg-main in the requirement; push its assignment, or push with --pending to wait for it`, "[pg-main pg-apps]"},
		"a slip in bind": {nil, []any{app("shop", Requirement{}), on("shop", "gamma", bound("db", "pg-ap"))}, "no-provider", "assign/0/bind/db",
			`requirement db of shop@gamma names "pg-ap", and there is no provider of postgres-database of that name; candidates: pg-apps on beta, pg-main on alpha; write bind: {db: pg-apps} in the assignment, or provider: pg-apps in the requirement; push its assignment, or push with --pending to wait for it`, "[pg-apps pg-main]"},
		"another kind": {[]any{Module{Name: "mix", Provides: map[string]Provide{"redis": {}, "amqp-vhost": {}}}, on("mix", "beta")}, []any{app("shop", Requirement{Provider: "mix@beta"}), on("shop", "gamma")}, "wrong-kind", "module/shop/requires/db",
			"requirement db of shop@gamma needs a postgres-database, and mix@beta provides amqp-vhost, redis; " + offer, "[pg-apps pg-main]"},
		"another kind, and none of its own": {nil, []any{app("shop", Requirement{Kind: "redis", Provider: "pg-main"}), on("shop", "gamma")}, "wrong-kind", "module/shop/requires/db",
			"requirement db of shop@gamma needs a redis, and pg-main provides postgres-database; name a provider of redis; nothing in the mesh is one yet", "[]"},
		"what provides nothing": {[]any{Module{Name: "dull"}, on("dull", "beta")}, []any{app("shop", Requirement{Provider: "dull@beta"}), on("shop", "gamma")}, "wrong-kind", "module/shop/requires/db",
			"requirement db of shop@gamma needs a postgres-database, and dull@beta provides nothing; " + offer, "[pg-apps pg-main]"},
		"a node that is none": {nil, []any{app("shop", Requirement{Node: "bta"}), on("shop", "gamma")}, "no-node", "module/shop/requires/db",
			`requirement db of shop@gamma names node "bta", and there is no such node; the nearest is beta; meshd node ls lists them; push with --pending to wait for it`, "[beta alpha gamma]"},
		"a node without one": {nil, []any{app("shop", Requirement{Node: "gamma"}), on("shop", "beta")}, "no-provider", "module/shop/requires/db",
			"requirement db of shop@beta names node gamma, and no provider of postgres-database is there; " + offer + "; push one to that node, or push with --pending to wait for it", "[pg-apps pg-main]"},
		"a node with two": {[]any{on("pg", "alpha", as("pg-two"))}, []any{app("shop", Requirement{Node: "alpha"}), on("shop", "beta")}, "ambiguous", "module/shop/requires/db",
			"requirement db of shop@beta names node alpha, and 2 providers of postgres-database are there; candidates: pg-main on alpha, pg-two on alpha; write bind: {db: pg-main} in the assignment, or provider: pg-main in the requirement", "[pg-main pg-two]"},
		"itself": {nil, []any{selfish(), on("selfish", "gamma", bound("db", "selfish@gamma"))}, "self", "assign/0/bind/db",
			"requirement db of selfish@gamma would be bound to selfish@gamma itself, and nothing is its own provider; " + offer, "[pg-apps pg-main]"},
	} {
		t.Run(name, func(t *testing.T) {
			b := twoPG(t)
			if len(c.setup) > 0 {
				b.ok("alpha", push(c.setup...))
			}
			r := b.refused("alpha", push(c.docs...), c.code, c.sentence)
			if r.Path != c.path || fmt.Sprint(r.Candidates) != c.near {
				t.Errorf("the place is %s, the candidates %v; want %s, %s", r.Path, r.Candidates, c.path, c.near)
			}
		})
	}
}

// selfish provides the kind that it requires.
func selfish() Module {
	m := app("selfish", Requirement{})
	m.Provides = map[string]Provide{pgKind: {}}
	return m
}

func TestAProviderThatRequiresItsOwnKind(t *testing.T) {
	b := twoPG(t)
	b.ok("alpha", push(selfish(), on("selfish", "alpha")))
	b.want("selfish@alpha/db", "pg-main (own node)") // of two there, the other one
	lone := newBed(t, "alpha")
	lone.refused("alpha", push(selfish(), on("selfish", "alpha", deflt(pgKind))), "self",
		"requirement db of selfish@alpha would be bound to selfish@alpha itself, and nothing is its own provider; push another provider of postgres-database and name it")
}

// I5: nothing that comes later re-binds what was bound.
func TestABindingIsSticky(t *testing.T) {
	for name, later := range map[string]Command{
		"a provider on its own node": push(on("pg", "gamma", as("pg-new"))),
		"another default":            push(on("pg", "alpha", as("pg-main")), on("pg", "beta", as("pg-apps"), deflt(pgKind))),
		"a seat that delivers":       push(on("pg", "alpha", as("pg-main")), Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind, Want: "pg-apps"}),
		"a move of the consumer":     push(on("shop", "beta", as("shop-one"))),
		"the same push again":        push(app("shop", Requirement{}), on("shop", "gamma", as("shop-one"))),
		"a node that joins":          Admit{Token: "t", Node: member("delta")},
	} {
		t.Run(name, func(t *testing.T) {
			b := twoPG(t, deflt(pgKind))
			b.ok("alpha", push(app("shop", Requirement{}), on("shop", "gamma", as("shop-one"))))
			b.ok("alpha", AddToken{Hash: "t"})
			b.want("shop-one/db", "pg-main (default)")
			b.ok("alpha", later)
			b.want("shop-one/db", "pg-main (default)")
		})
	}
	b := twoPG(t)
	b.ok("alpha", push(app("shop", Requirement{Node: "alpha"}), on("shop", "gamma")))
	b.ok("alpha", push(on("pg", "alpha", as("pg-aa"))))
	b.ok("alpha", push(app("shop", Requirement{}), on("shop", "gamma")))
	b.want("shop@gamma/db", "pg-main (node)")
}

func TestAPushThatNamesAnotherRebinds(t *testing.T) {
	b := twoPG(t)
	b.ok("alpha", push(app("shop", Requirement{Provider: "pg-main"}), on("shop", "gamma")))
	b.use("shop@gamma/db")
	b.ok("alpha", push(on("shop", "gamma", bound("db", "pg-main"))))
	b.want("shop@gamma/db", "pg-main (assignment)") // the same in other words
	b.phase("shop@gamma/db", PhaseInUse)
	b.ok("alpha", push(on("shop", "gamma", bound("db", "pg-apps"))))
	b.want("shop@gamma/db", "pg-apps (assignment)")
	b.phase("shop@gamma/db", PhaseWaiting)
	if len(b.Withdrawals) != 1 {
		t.Errorf("withdrawals are %v", b.Withdrawals)
	}
	// A late report of the old login is not one of the new.
	old := b.Withdrawals[sorted(b.Withdrawals)[0]]
	b.ok("beta", b.stage("shop@gamma/db"))
	b.ok("beta", b.mark("shop@gamma/db", FactMinted))
	b.ok("gamma", NodeReport{Marks: []Mark{{Binding: "shop@gamma/db", Resource: old.Resource, Generation: 1, Fact: FactDelivered}}})
	b.phase("shop@gamma/db", PhaseMinted)

	b.ok("alpha", push(Module{Name: "redis", Provides: map[string]Provide{"redis": {}}}, on("redis", "gamma"),
		app("shop", Requirement{Kind: "redis"}), on("shop", "gamma")))
	b.want("shop@gamma/db", "redis@gamma (own node)") // another kind
}

func TestPendingConvergesWhenTheProviderAppears(t *testing.T) {
	for name, c := range map[string]struct {
		q      Requirement
		assign Assign
		then   []Command
		want   string
	}{
		"named by the requirement": {Requirement{Provider: "pg-new"}, on("shop", "gamma"), []Command{push(on("pg", "beta", as("pg-new")))}, "pg-new (provider)"},
		"named by the assignment":  {Requirement{}, on("shop", "gamma", bound("db", "pg-new")), []Command{push(on("pg", "beta", as("pg-new")))}, "pg-new (assignment)"},
		"by a node that is known":  {Requirement{Node: "gamma"}, on("shop", "alpha"), []Command{push(on("pg", "gamma"))}, "pg@gamma (node)"},
		"by a node that joins":     {Requirement{Node: "delta"}, on("shop", "gamma"), []Command{AddToken{Hash: "t"}, Admit{Token: "t", Node: member("delta")}, push(on("pg", "delta"))}, "pg@delta (node)"},
	} {
		t.Run(name, func(t *testing.T) {
			b := twoPG(t)
			docs := push(app("shop", c.q), c.assign)
			if r := b.apply("alpha", docs); r == nil || !strings.Contains(r.Remedy, "--pending") {
				t.Fatalf("without --pending: %v", r)
			}
			b.ok("alpha", pending(docs))
			id := c.assign.Module + "@" + c.assign.Nodes[0] + "/db"
			b.want(id, "unbound")
			if got := b.Bindings[id].Refusal; !strings.HasSuffix(got, "; it is bound as soon as that is there") {
				t.Errorf("it is unbound because %s", got)
			}
			b.ok("alpha", docs) // it was accepted
			b.ok("alpha", push(Module{Name: "other"}, on("other", "beta")))
			b.want(id, "unbound")
			for _, then := range c.then {
				b.ok("beta", then)
			}
			b.want(id, c.want)
			b.use(id)
		})
	}
}

func TestUnnamedIsNeverPending(t *testing.T) {
	b := twoPG(t)
	for _, q := range []Requirement{{}, {Kind: "redis"}, {Provider: "shop@gamma"}} {
		if r := b.apply("alpha", pending(push(app("shop", q), on("shop", "gamma")))); r == nil {
			t.Errorf("%+v was accepted", q)
		}
	}
	// Nor does one that was accepted with a name stay without.
	b.ok("alpha", pending(push(app("shop", Requirement{Provider: "pg-new"}), on("shop", "gamma"))))
	if r := b.apply("alpha", pending(push(app("shop", Requirement{}), on("shop", "gamma")))); r == nil || r.Code != "ambiguous" {
		t.Errorf("a push that names no provider any more gives %v", r)
	}
}

func TestAPendingNameThatComesAsAnotherKind(t *testing.T) {
	b := twoPG(t)
	b.ok("alpha", pending(push(app("shop", Requirement{Provider: "later"}), on("shop", "gamma"))))
	b.ok("alpha", push(Module{Name: "redis", Provides: map[string]Provide{"redis": {}}}, on("redis", "beta", as("later"))))
	b.want("shop@gamma/db", "unbound")
	if got := b.Bindings["shop@gamma/db"].Refusal; !strings.HasPrefix(got, "requirement db of shop@gamma needs a postgres-database, and later provides redis; candidates:") {
		t.Errorf("it is unbound because %s", got)
	}
}

func TestNodesAllLeavesUnboundAndNeverStopsAJoin(t *testing.T) {
	b := twoPG(t)
	b.ok("alpha", push(app("agent", Requirement{}), on("agent", "all")))
	b.want("agent@alpha/db", "pg-main (own node)")
	b.want("agent@gamma/db", "unbound")
	if r := b.apply("alpha", push(app("agent", Requirement{Provider: "pg-mian"}))); r == nil || r.Code != "no-provider" {
		t.Errorf("a slip in a name for all nodes gives %v", r)
	}
	b.join("delta")
	b.want("agent@delta/db", "unbound")
	b.ok("alpha", push(on("pg", "gamma", as("pg-g"), deflt(pgKind))))
	b.want("agent@gamma/db", "pg-g (own node)")
	b.want("agent@delta/db", "pg-g (default)")
	b.want("agent@alpha/db", "pg-main (own node)")
}

func TestASeatsNewHolderBindsWhatWaits(t *testing.T) {
	b := twoPG(t)
	b.ok("alpha", push(Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind}, app("agent", Requirement{}), on("agent", "all")))
	b.want("agent@gamma/db", "unbound")
	b.ok("alpha", Hold{Seat: "store", Assignment: "pg-main"})
	b.want("agent@gamma/db", "pg-main (seat)")
	b.ok("alpha", Hold{Seat: "store", Assignment: "pg-apps", IfEpoch: b.Seats["store"].Epoch})
	b.want("agent@gamma/db", "pg-main (seat)")
}

// Each of these would be refused in a push; a join goes on.
func TestNothingThatIsWrittenStopsAJoin(t *testing.T) {
	b := newBed(t, "alpha")
	both := app("both", Requirement{})
	both.Provides = map[string]Provide{pgKind: {}}
	b.ok("alpha", pending(push(both, on("both", "all", bound("db", "both@beta")))))
	b.want("both@alpha/db", "unbound")
	b.join("beta")
	b.want("both@alpha/db", "both@beta (assignment)")
	b.want("both@beta/db", "unbound") // it would be its own
	b.join("gamma")
	b.want("both@gamma/db", "both@beta (assignment)")
}

func TestReplicasShareAResourceWithLoginsOfTheirOwn(t *testing.T) {
	b := twoPG(t)
	b.ok("alpha", push(app("shop", Requirement{Provider: "pg-main"}), on("shop", "alpha,beta"), on("shop", "gamma", as("shop-own")),
		app("web", Requirement{Provider: "pg-main"}), on("web", "gamma", as("shop"))))
	x, y, own, web := b.Bindings["shop@alpha/db"], b.Bindings["shop@beta/db"], b.Bindings["shop-own/db"], b.Bindings["shop/db"]
	if x.Resource != y.Resource || own.Resource == x.Resource || web.Resource == x.Resource {
		t.Errorf("resources are %s, %s, %s and %s", x.Resource, y.Resource, own.Resource, web.Resource)
	}
	b.use("shop@alpha/db")
	b.use("shop@beta/db")
	x, y = b.Bindings["shop@alpha/db"], b.Bindings["shop@beta/db"]
	if x.Newest().Login == y.Newest().Login || x.Newest().Generation != 1 || y.Newest().Generation != 2 {
		t.Errorf("credentials are %+v and %+v", x.Newest(), y.Newest())
	}
	if own.Newest() != nil {
		t.Error("a credential came from nowhere")
	}
}

func TestAConsumerThatMovesKeepsItsDataAndGetsANewLogin(t *testing.T) {
	b := twoPG(t)
	b.ok("alpha", push(app("shop", Requirement{Provider: "pg-main"}), on("shop", "gamma", as("shop-one"))))
	b.ok("gamma", NodeReport{Processes: []ProcessReport{{"shop-one", "running", ""}}})
	b.use("shop-one/db")
	was := b.Bindings["shop-one/db"]
	sealed := b.stage("shop-one/db") // made for gamma, and late
	b.ok("alpha", push(on("shop", "beta", as("shop-one"))))
	is := b.Bindings["shop-one/db"]
	if is.Resource != was.Resource || is.Phase() != PhaseWaiting || len(b.Withdrawals) != 1 || b.Assignments["shop-one"].Report.State != "" {
		t.Errorf("after the move it is %+v, with withdrawals %v", is, b.Withdrawals)
	}
	b.ok("alpha", sealed)
	b.phase("shop-one/db", PhaseWaiting) // beta could not open it
	b.use("shop-one/db")
	if got := b.Bindings["shop-one/db"].Newest().Generation; got != 2 {
		t.Errorf("the new login has generation %d", got)
	}
}

func TestAConsumerThatReturnsGetsItsDataAndANewLogin(t *testing.T) {
	for _, minted := range []bool{true, false} {
		b := twoPG(t)
		docs := push(app("shop", Requirement{Provider: "pg-main"}), on("shop", "gamma"))
		b.ok("alpha", docs)
		b.ok("alpha", b.stage("shop@gamma/db"))
		if minted {
			b.ok("alpha", b.mark("shop@gamma/db", FactMinted))
		}
		was := b.Bindings["shop@gamma/db"]
		b.ok("alpha", Remove{WhatAssignment, "shop@gamma"})
		if len(b.Withdrawals) != 1 || len(b.Retained()) != map[bool]int{true: 1, false: 0}[minted] {
			t.Errorf("withdrawals %v, retained %v", b.Withdrawals, b.Retained())
		}
		// The provider is away: the withdrawal waits, and nobody waits for it.
		b.ok("alpha", docs)
		if len(b.Withdrawals) != 1 || b.Bindings["shop@gamma/db"].Resource != was.Resource {
			t.Errorf("on return: %v, %+v", b.Withdrawals, b.Bindings["shop@gamma/db"])
		}
		b.use("shop@gamma/db")
		if n := b.Bindings["shop@gamma/db"].Newest(); n.Generation != 2 || n.Login == was.Newest().Login {
			t.Errorf("it came back with %+v", n)
		}
		b.ok("alpha", NodeReport{Withdrawn: []Withdrawn{{ID: sorted(b.Withdrawals)[0]}}})
		if len(b.Withdrawals) != 0 || len(b.Resources) != 1 {
			t.Errorf("afterwards: %v %v", b.Withdrawals, b.Resources)
		}
	}
}

func TestAResourceThatNeverHadALoginIsForgotten(t *testing.T) {
	b := twoPG(t)
	b.ok("alpha", push(app("shop", Requirement{Provider: "pg-main"}), on("shop", "gamma")))
	b.ok("alpha", Remove{WhatAssignment, "shop@gamma"})
	if len(b.Resources)+len(b.Withdrawals) != 0 {
		t.Errorf("left are %v and %v", b.Resources, b.Withdrawals)
	}
}
