package raftfsm

import (
	"fmt"
	"strings"
	"testing"
)

// refusal is a rule for a document on its own: the sentence, the place and the
// way out are what a user reads.
type refusal struct {
	docs                 []any
	code, path, sentence string
}

func checkRefusals(t *testing.T, refusals []refusal) {
	t.Helper()
	for _, c := range refusals {
		b := story(t)
		r := b.refused("alpha", push(c.docs...), c.code, c.sentence)
		if r.Path != c.path {
			t.Errorf("%s: the place is %q, want %q", c.sentence, r.Path, c.path)
		}
	}
}

const nameHint = "one is 1 to 40 of a-z, 0-9 and -, and begins with a letter or a digit; write another name"

func TestRefusedModules(t *testing.T) {
	module := func(edit func(*Module)) Module {
		m := app("web", Requirement{Provider: "pg-main"})
		edit(&m)
		return m
	}
	checkRefusals(t, []refusal{
		{nil, "empty-push", "", "the push has no document; push a file with a module, assign or seat document"},
		{[]any{Module{Name: "-x"}}, "bad-name", "module", `"-x" is no module name: ` + nameHint},
		{[]any{Module{Name: strings.Repeat("x", 80)}}, "bad-name", "module", `"` + strings.Repeat("x", 57) + `..." is no module name: ` + nameHint},
		{[]any{module(func(m *Module) { m.Claims = []string{"A"} })}, "bad-name", "module/web/claims", `"A" is no seat name: ` + nameHint},
		{[]any{module(func(m *Module) { m.Provides = map[string]Provide{"A": {}} })}, "bad-name", "module/web/provides", `"A" is no kind name: ` + nameHint},
		{[]any{module(func(m *Module) { m.Requires["D/B"] = Requirement{Kind: "redis"} })}, "bad-name", "module/web/requires", `"D/B" is no requirement name: ` + nameHint},
		{[]any{module(func(m *Module) { m.Requires["db"] = Requirement{} })}, "bad-name", "module/web/requires/db", `"" is no kind name: ` + nameHint},
		{[]any{module(func(m *Module) { m.Requires["db"] = Requirement{Kind: pgKind, Provider: "a", Node: "b"} })}, "two-names", "module/web/requires/db",
			"requirement db of module web names both a provider and a node, and either is enough; keep one of the two"},
		{[]any{module(func(m *Module) { m.Requires["db"] = Requirement{Kind: pgKind, Provider: "a b"} })}, "bad-name", "module/web/requires/db",
			`"a b" cannot be the name of an assignment: that is what its as: says, or MODULE@NODE; meshd providers and meshd status list the names`},
		{[]any{module(func(m *Module) { m.Requires["db"] = Requirement{Kind: pgKind, Node: "B"} })}, "bad-name", "module/web/requires/db", `"B" is no node name: ` + nameHint},
		{[]any{module(func(m *Module) { m.Requires["db"] = Requirement{Kind: pgKind, Proof: "word"} })}, "bad-proof", "module/web/requires/db",
			`"word" is no proof that requirement db is in use; write proof: login, health or delivered`},
		{[]any{module(func(m *Module) { m.Requires["db"] = Requirement{Kind: pgKind, Proof: ProofHealth} })}, "bad-proof", "module/web/requires/db",
			"requirement db is proven by health, and module web has no health check; add health: to the module, or write proof: login"},
		{[]any{module(func(m *Module) { m.Serves = map[string]map[string]Handler{"store": {"query": {Bus: true}}} })}, "not-claimed", "module/web/serves/store",
			"module web serves verbs of seat store and does not claim it; add claims: [store]"},
		{[]any{module(func(m *Module) {
			m.Claims = []string{"store"}
			m.Serves = map[string]map[string]Handler{"store": {"query": {}}}
		})}, "bad-handler", "module/web/serves/store/query", "verb query is answered in exactly one way; write one of exec, http, bus and builtin"},
		{[]any{module(func(m *Module) { m.Tools = map[string]Handler{"size": {Bus: true, HTTP: "http://x"}} })}, "bad-handler", "module/web/tools/size",
			"tool size is answered in exactly one way; write one of exec, http, bus and builtin"},
		{[]any{module(func(m *Module) { m.Tools = map[string]Handler{"S": {Bus: true}} })}, "bad-name", "module/web/tools", `"S" is no tool name: ` + nameHint},
		{[]any{module(func(m *Module) { m.Calls = []string{"store.query", "query"} })}, "bad-call", "module/web/calls/1",
			`"query" is not something to call; write SEAT.VERB, NODE/SEAT.VERB or NODE/MODULE.TOOL`},
		{[]any{module(func(m *Module) { m.OnRotate = "reload" })}, "bad-on-rotate", "module/web/on-rotate",
			`"reload" is nothing to do when a credential changes; write restart, signal HUP or none`},
		{[]any{module(func(m *Module) { m.ReadyWithin = -1 })}, "bad-time", "module/web", "module web has a time below zero; write a duration such as 30s"},
		{[]any{module(func(m *Module) { m.Env = map[string]string{"A=B": ""} })}, "bad-env", "module/web/env",
			`"A=B" cannot name an environment variable of module web; use A-Z, a-z, 0-9 and _, and no digit first`},
		{[]any{module(func(m *Module) { m.Env = map[string]string{"A": "\x00"} })}, "bad-env", "module/web/env/A",
			"environment variable A of module web has a zero byte, which none can have; leave it out"},
		{[]any{module(func(m *Module) { m.Health = &Health{} })}, "bad-health", "module/web/health", "the health of module web is checked in exactly one way; write one of http, tcp and exec"},
		{[]any{module(func(m *Module) { m.Health = &Health{TCP: "a:1", Fails: -1} })}, "bad-health", "module/web/health",
			"the health check of module web has a number below zero; write durations such as 5s, and how many failures in a row count"},
		{[]any{module(func(m *Module) { m.Limits = &Limits{CPU: -1} })}, "bad-limits", "module/web/limits", "module web has a limit below zero; leave a limit out to have none"},
		{[]any{pg(), pg()}, "twice", "module/pg", "module pg is described twice in one push; keep one of the two documents"},
		{[]any{Module{Name: "pg"}}, "still-consumed", "module/pg/provides",
			"module pg no longer provides what shop@gamma/db is bound to; keep the provision, or remove those consumers or bind them to another provider first"},
	})
}

func TestRefusedSeats(t *testing.T) {
	checkRefusals(t, []refusal{
		{[]any{Seat{Name: "S"}}, "bad-name", "seat", `"S" is no seat name: ` + nameHint},
		{[]any{Seat{Name: "s", Scope: ScopeMesh, Verbs: []string{"a.b"}}}, "bad-name", "seat/s/verbs", `"a.b" is no verb name: ` + nameHint},
		{[]any{Seat{Name: "s", Scope: ScopeMesh, Delivers: "K"}}, "bad-name", "seat/s/delivers", `"K" is no kind name: ` + nameHint},
		{[]any{Seat{Name: "s", Scope: "world"}}, "bad-scope", "seat/s/scope", `"world" is no scope of a seat; write scope: mesh or scope: node`},
		{[]any{Seat{Name: "s", Scope: ScopeNode, Want: "pg-main"}}, "no-holder", "seat/s",
			"seat s has scope node: every node that runs a claimant serves it, and there is no holder to name or to replace; leave holder and failover out, or write scope: mesh"},
		{[]any{Seat{Name: "s", Scope: ScopeMesh, Failover: "fast"}}, "bad-failover", "seat/s/failover", `"fast" is no way to fail over; write failover: auto or failover: manual`},
		{[]any{Seat{Name: "s", Scope: ScopeMesh, Verbs: []string{"query"}, Idempotent: []string{"qery"}}}, "no-such-verb", "seat/s/idempotent",
			`"qery" is to be idempotent, and seat s has no such verb; add it to verbs, or leave it out of idempotent`},
		{[]any{Seat{Name: "s", Scope: ScopeNode, Verbs: []string{"query"}, Idempotent: []string{"query"}}}, "no-holder", "seat/s/idempotent",
			"seat s has scope node: a call asks one node, and is not made again elsewhere; leave idempotent out, or write scope: mesh"},
		{[]any{Seat{Name: "s", Scope: ScopeMesh, Want: "x y"}}, "bad-name", "seat/s/holder",
			`"x y" cannot be the name of an assignment: that is what its as: says, or MODULE@NODE; meshd providers and meshd status list the names`},
		{[]any{Seat{Name: "s", Scope: ScopeMesh}, Seat{Name: "s", Scope: ScopeMesh}}, "twice", "seat/s", "seat s is described twice in one push; keep one of the two documents"},
		{[]any{Seat{Name: "s", Scope: ScopeMesh, Delivers: "redis"}, Seat{Name: "r", Scope: ScopeMesh, Delivers: "redis"}}, "second-deliverer", "seat/r/delivers",
			"seat s delivers redis already, and a kind is delivered by one seat; leave delivers out of one of the two"},
		{[]any{Seat{Name: "store", Scope: ScopeMesh, Want: "shop@gamma"}}, "not-a-claimant", "seat/store/holder",
			"shop@gamma cannot hold seat store: its module shop does not claim it; add claims: [store] to module shop"},
		{[]any{Seat{Name: "store", Scope: ScopeMesh, Want: "pg-mian"}}, "no-assignment", "seat/store/holder",
			`seat store names "pg-mian" as its holder, and there is no such assignment; write holder: pg-main; push its assignment, or push with --pending to wait for it`},
	})
}

func TestRefusedAssignments(t *testing.T) {
	checkRefusals(t, []refusal{
		{[]any{on("shpo", "gamma")}, "no-module", "assign/0", `module "shpo" is assigned, and no such module is known; write assign: shop; push its module document as well`},
		{[]any{on("shop", "beta", as("S"))}, "bad-name", "assign/0/as", `"S" is no assignment name: ` + nameHint},
		{[]any{Assign{Module: "shop"}}, "bad-assign", "assign/0", "the assignment of shop needs either nodes by name or all of them; write node: NAME, nodes: [NAME, ...] or nodes: all"},
		{[]any{Assign{Module: "shop", All: true, Nodes: []string{"alpha"}}}, "bad-assign", "assign/0",
			"the assignment of shop needs either nodes by name or all of them; write node: NAME, nodes: [NAME, ...] or nodes: all"},
		{[]any{on("shop", "alpha,beta", as("s"))}, "bad-assign", "assign/0/as", "s names one assignment, and this one of shop goes to several nodes; write one node, or leave as: out"},
		{[]any{on("shop", "alpha,gama")}, "no-node", "assign/0/nodes/1", `shop is assigned to node "gama", and there is no such node; the nearest is gamma; meshd node ls lists them; add one with meshd token and meshd join`},
		{[]any{on("shop", "beta"), on("shop", "alpha,beta")}, "twice", "assign/1", "shop is assigned to beta twice in one push; keep one of the two documents, or give each a name with as:"},
		{[]any{on("shop", "all"), on("shop", "all")}, "twice", "assign/1", "shop is assigned to all nodes twice in one push; keep one of the two documents, or give each a name with as:"},
		{[]any{on("shop", "beta", as("pg-main"))}, "name-taken", "assign/0/as", "pg-main is the name of an assignment of module pg already; choose another name, or remove that one first: meshd rm assignment pg-main"},
		{[]any{on("pg", "gamma", as("pg-main"))}, "provider-moved", "assign/0",
			"pg-main provides postgres-database on alpha, and a push does not move a provider: its data would stay behind; write node: alpha, or give the one on gamma a name of its own with as:"},
		{[]any{on("shop", "beta", bound("bd", "pg-main"))}, "no-requirement", "assign/0/bind/bd", `the assignment of shop binds "bd", and the module has no such requirement; write one of its requirements: db`},
		{[]any{on("shop", "beta", bound("db", "p m"))}, "bad-name", "assign/0/bind/db",
			`"p m" cannot be the name of an assignment: that is what its as: says, or MODULE@NODE; meshd providers and meshd status list the names`},
		{[]any{on("shop", "beta", func(a *Assign) { a.Limits = &Limits{PIDs: -1} })}, "bad-limits", "assign/0/limits", "the assignment of shop has a limit below zero; leave a limit out to have none"},
	})
}

func TestRefusedDefaults(t *testing.T) {
	checkRefusals(t, []refusal{
		{[]any{on("shop", "beta", deflt(pgKind))}, "bad-default", "assign/0/default", "shop@beta cannot be the default of postgres-database: its module shop does not provide it; leave postgres-database out of default"},
		{[]any{on("pg", "all", deflt(pgKind))}, "bad-default", "assign/0/default",
			"the assignment of pg to all nodes cannot be a default: a kind has one; assign it to that one node by name as well, and write default: there"},
		{[]any{on("pg", "gamma", exclusive)}, "bad-exclusive", "assign/0/exclusive",
			"the assignment of pg is exclusive and not a default: a provider that is the mesh's alone is its default; add default: KIND, or leave exclusive out"},
		{[]any{on("pg", "alpha", as("pg-main"), deflt(pgKind)), on("pg", "beta", as("pg-apps"), deflt(pgKind))}, "second-default", "assign/0/default",
			"pg-apps is the default of postgres-database already, and a mesh has one: pg-main cannot be another; leave default out of one of the two"},
		{[]any{on("pg", "alpha", as("pg-main"), deflt(pgKind)), Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind}}, "second-default", "assign/0/default",
			"seat store delivers postgres-database, so its holder is the default, and pg-main declares another; leave default out of pg-main, or delivers out of the seat"},
		{[]any{on("pg", "alpha", as("pg-main"), deflt(pgKind), exclusive)}, "exclusive", "assign/0/default",
			"pg-main is the exclusive provider of postgres-database, and there would be pg-apps, pg-main; leave exclusive out of pg-main, or the others out of the push"},
	})
}

func TestASecondDefaultNamesTheFirst(t *testing.T) {
	b := story(t)
	b.ok("alpha", push(on("pg", "beta", as("pg-apps"), deflt(pgKind))))
	b.refused("alpha", push(on("pg", "alpha", as("pg-main"), deflt(pgKind))), "second-default",
		"pg-apps is the default of postgres-database already, and a mesh has one: pg-main cannot be another; leave default out of one of the two")
	b.ok("alpha", push(on("pg", "beta", as("pg-apps")), on("pg", "alpha", as("pg-main"), deflt(pgKind))))
}

// What a module's new version provides is judged as a new provider would be.
func TestExclusiveHoldsAgainstANewVersionOfAModule(t *testing.T) {
	b := newBed(t, "alpha", "beta")
	redis := Module{Name: "redis", Provides: map[string]Provide{"redis": {}}}
	b.ok("alpha", push(redis, on("redis", "alpha", deflt("redis"), exclusive), Module{Name: "other"}, on("other", "beta")))
	other := Module{Name: "other", Provides: map[string]Provide{"redis": {}}}
	b.refused("alpha", push(other), "exclusive", "redis@alpha is the exclusive provider of redis, and there would be other@beta, redis@alpha; leave exclusive out of redis@alpha, or the others out of the push")
	b.refused("alpha", push(Module{Name: "redis"}), "bad-default", "redis@alpha cannot be the default of redis: its module redis does not provide it; leave redis out of default")

	lone := newBed(t, "alpha")
	lone.refused("alpha", push(redis, on("redis", "all"), on("redis", "alpha", deflt("redis"), exclusive)), "exclusive",
		"redis@alpha is the exclusive provider of redis, and module redis, which provides it too, is assigned to all nodes; leave exclusive out of redis@alpha, or assign redis to nodes by name")
}

func TestAProvisionStaysWhileLoginsAreToBeWithdrawn(t *testing.T) {
	b := story(t)
	b.ok("alpha", Remove{WhatAssignment, "shop@gamma"})
	b.refused("alpha", push(Module{Name: "pg"}), "still-withdrawing",
		"module pg no longer provides what logins of shop@gamma/db are still to be ended at; keep the provision until they are gone: they go by themselves once the service answers")
	b.ok("alpha", NodeReport{Withdrawn: []Withdrawn{{sorted(b.Withdrawals)[0], 0}}, Providers: []ProviderReport{{Provider: "pg-main/" + pgKind, Ready: true}}})
	b.ok("alpha", push(Module{Name: "pg"}))
	if len(b.Providers) != 0 {
		t.Errorf("what provides nothing has the status %v", b.Providers)
	}
}

func TestAPushUpserts(t *testing.T) {
	b := story(t)
	revision := b.Assignments["shop@gamma"].Revision
	b.ok("alpha", push(app("shop", Requirement{Provider: "pg-main"}), on("shop", "gamma")))
	if b.Assignments["shop@gamma"].Revision != revision || b.Bindings["shop@gamma/db"].Phase() != PhaseInUse {
		t.Error("pushing the same again changed something")
	}
	health := app("shop", Requirement{Provider: "pg-main"})
	health.Health = &Health{TCP: "127.0.0.1:80"}
	b.ok("alpha", push(health))
	if b.Assignments["shop@gamma"].Revision != revision {
		t.Error("another health check is a restart")
	}
	health.Env = map[string]string{"A": "1"}
	b.ok("alpha", push(health))
	if got := b.Assignments["shop@gamma"].Revision; got != b.Index {
		t.Errorf("another environment leaves revision %d at %d", got, b.Index)
	}
	b.ok("alpha", push(on("shop", "gamma", func(a *Assign) { a.Env = map[string]string{"A": "1"} })))
	if got := b.Assignments["shop@gamma"].Revision; got == b.Index {
		t.Error("an override with the same value is a restart")
	}
	delete(health.Requires, "db")
	b.ok("alpha", push(health))
	if len(b.Bindings) != 0 || len(b.Withdrawals) != 1 {
		t.Errorf("a requirement that went leaves %v and %v", b.Bindings, b.Withdrawals)
	}
}

func TestAPlanGoneStale(t *testing.T) {
	b := story(t)
	plan, r := b.Preview(Header{Node: id("alpha")}, push(on("shop", "beta")))
	if r != nil {
		t.Fatal(r)
	}
	stale := push(on("shop", "beta"))
	stale.At = plan.At
	b.ok("beta", NodeReport{Processes: []ProcessReport{{Assignment: "pg-apps", State: "running"}}})
	b.ok("alpha", stale) // a report changes nothing that is desired
	b.refused("alpha", stale, "stale-plan", fmt.Sprintf("the plan was made at index %d, and the mesh was changed at %d; run meshd plan again, and push what it shows", plan.At, b.Mesh.Changed))
}

func TestAPushInParts(t *testing.T) {
	b := newBed(t, "alpha")
	b.ok("alpha", PushPart{"p", 0, push(pg()).Documents})
	b.refused("alpha", PushPart{"p", 2, Documents{}}, "bad-part", `part 2 of push "p" came where part 1 belongs; push again`)
	b.refused("alpha", PushPart{"", 0, Documents{}}, "bad-part", "a part of a push has the id of its push, and this one has none; push again")
	b.ok("alpha", PushPart{"p", 1, push(on("pg", "alpha")).Documents})
	if len(b.Modules) != 0 {
		t.Error("a part is in force before its push")
	}
	b.refused("alpha", Push{ID: "p", Parts: 3}, "bad-part", `push "p" has 3 parts, of which 2 came; push again`)
	b.refused("alpha", Push{Parts: 1}, "bad-part", `push "" has 1 parts, of which 0 came; push again`)
	both := push(app("shop", Requirement{}), on("shop", "alpha"))
	both.ID, both.Parts = "p", 2
	b.ok("alpha", both)
	b.want("shop@alpha/db", "pg@alpha (own node)")
	if len(b.Parts) != 0 {
		t.Error("the parts are kept after their push")
	}
}

func TestPushesAreBounded(t *testing.T) {
	b := newBed(t, "alpha")
	for i := range maxOpenPushes + 1 {
		b.ok("alpha", PushPart{fmt.Sprint("p", i), 0, push(pg()).Documents})
	}
	if len(b.Parts) != maxOpenPushes || has(b.Parts, "p0") {
		t.Errorf("open pushes are %v", sorted(b.Parts))
	}
	for i := range maxParts - 1 {
		b.ok("alpha", PushPart{"p5", i + 1, Documents{}})
	}
	b.refused("alpha", PushPart{"p5", maxParts, Documents{}}, "too-big", "a push has at most 64 parts of 64 KiB; push fewer documents at a time")
	var many []any
	for i := range MaxDocuments + 1 {
		many = append(many, Module{Name: fmt.Sprint("m", i)})
	}
	b.refused("alpha", push(many...), "too-big", "a push has at most 1000 documents, this one has 1001; push fewer documents at a time")
}

func TestFailover(t *testing.T) {
	for _, c := range []struct {
		seat Seat
		want bool
	}{
		{Seat{}, true}, {Seat{Failover: FailoverManual}, false},
		{Seat{Delivers: pgKind}, false}, {Seat{Delivers: pgKind, Failover: FailoverAuto}, true},
	} {
		if got := c.seat.FailsOver(); got != c.want {
			t.Errorf("%+v fails over: %v", c.seat, got)
		}
	}
}
