package raftfsm

import (
	"fmt"
	"testing"
)

// story is a mesh of alpha, beta and gamma with two PostgreSQL, a consumer of
// pg-main that uses it, and a seat.
func story(t testing.TB) *bed {
	b := newBed(t, "alpha", "beta", "gamma")
	b.ok("alpha", push(
		Seat{Name: "store", Scope: ScopeMesh, Verbs: []string{"databases", "query"}},
		pg(), on("pg", "alpha", as("pg-main")), on("pg", "beta", as("pg-apps")),
		app("shop", Requirement{Provider: "pg-main"}), on("shop", "gamma"),
	))
	b.use("shop@gamma/db")
	return b
}

func TestAnEmptyStateTakesInitOnly(t *testing.T) {
	b := &bed{TB: t, State: New()}
	b.refused("alpha", AddToken{Hash: "h"}, "no-mesh", "there is no mesh here yet; make one with meshd init, or join one with meshd join")
	b.refused("alpha", Init{Node: member("alpha")}, "bad-mesh", "a mesh has an id, and this one has none; run meshd init again")
	b.refused("alpha", Init{Mesh: Mesh{ID: "m"}}, "bad-node", "a node has an id, which comes from its key, and this one has none; run meshd init or meshd join on it again")
	b.refused("alpha", Init{Mesh: Mesh{ID: "m"}, Node: member("Alpha")}, "bad-name",
		`"Alpha" is no node name: one is 1 to 40 of a-z, 0-9 and -, and begins with a letter or a digit; write another name`)
	b.refused("alpha", Init{Mesh: Mesh{ID: "m"}, Node: member("all")}, "bad-name", `a node cannot be named "all": nodes: all means every node; choose another with --name`)
	b.ok("alpha", Init{Mesh: Mesh{ID: "m"}, Node: member("alpha")})
	b.refused("alpha", Init{Mesh: Mesh{ID: "n"}, Node: member("beta")}, "mesh-exists", "mesh m is here already, and a mesh is made once; add a node to it with meshd token and meshd join")
}

func TestAdmission(t *testing.T) {
	b := newBed(t, "alpha", "beta")
	if b.Tokens["token-beta"].Used != id("beta") {
		t.Errorf("the token of beta is %+v", b.Tokens["token-beta"])
	}
	b.refused("alpha", AddToken{}, "bad-token", "a join token is known by the hash of its secret, and this one has none; make another with meshd token")
	b.refused("alpha", Admit{Token: "none", Node: member("gamma")}, "token-foreign", "the join token is not one of this mesh, or it is too old to be remembered; make one with meshd token on a member")
	b.refused("alpha", Admit{Token: "token-beta", Node: member("gamma")}, "token-used", "the join token was used by node beta, and a token admits one node; make another with meshd token on a member")
	b.ok("alpha", AddToken{Hash: "t"})
	twin := member("beta")
	twin.ID = "id-twin"
	b.refused("alpha", Admit{Token: "t", Node: twin}, "node-name-taken", `a node named "beta" is a member already; choose another with --name, or remove that one first: meshd node rm beta`)

	moved := member("beta")
	moved.Address, moved.Route = "10.9.9.9:7946", "10.9.9.9:6222"
	b.ok("alpha", Admit{Token: "token-beta", Node: moved})
	other := moved
	other.Recipient = "age1another"
	b.refused("alpha", Admit{Token: "token-beta", Node: other}, "node-differs", "this machine is node beta of the mesh already, and asks to be another; join with --name beta and the keys that it has, or remove it first: meshd node rm beta")
	other = moved
	other.Name = "zeta"
	b.refused("alpha", Admit{Token: "token-beta", Node: other}, "node-differs", "this machine is node beta of the mesh already, and asks to be another; join with --name beta and the keys that it has, or remove it first: meshd node rm beta")
	if n := b.Nodes[id("beta")]; n.Address != moved.Address || n.Route != moved.Route {
		t.Errorf("beta joined again from elsewhere and is at %s", n.Address)
	}

	b.ok("alpha", removal(b.State, "beta"))
	b.refused("alpha", Admit{Token: "t", Node: member("beta")}, "node-removed", "node id-beta was removed from the mesh, and a removed node does not come back; delete its data directory and join again: it will be a new node")
	b.refused("alpha", RemoveNode{ID: id("beta")}, "no-node", `there is no node "id-beta"; meshd node ls lists them`)
	b.refused("alpha", RemoveNode{ID: id("alpha")}, "last-node", "alpha is the last node, and a mesh has at least one; run meshd leave on it to end the mesh")
}

// Whoever stays has the newest keys, and nobody else: the seals were made by a
// state that the log may have moved on from.
func TestNewKeysAreForWhoStays(t *testing.T) {
	b := newBed(t, "alpha", "beta")
	early := removal(b.State, "beta")
	old := Admit{Token: "token-delta", Node: member("delta")}
	old.Node.Secrets = "old keys"
	b.ok("alpha", AddToken{Hash: old.Token, Expires: epochStart})
	b.join("gamma")
	const moved = "nodes joined or left while new keys were made for those that remain without beta; give the command again"
	b.refused("alpha", early, "members-changed", moved)
	b.refused("alpha", RemoveNode{ID: id("beta"), SealedTo: b.Without(id("beta"))}, "members-changed", moved)
	b.ok("alpha", removal(b.State, "beta"))
	b.refused("alpha", old, "keys-changed", "the mesh's keys were changed while node delta was let in; join again")
	old.Keys, old.Node.Secrets = b.Mesh.Keys, "delta's"
	b.ok("alpha", old)
	for node, want := range map[string]string{"alpha": "new keys", "gamma": "new keys", "delta": "delta's", "beta": ""} {
		if got := b.SecretsOf(id(node)); got != want {
			t.Errorf("%s has %q, want %q", node, got, want)
		}
	}
	b.ok("gamma", removal(b.State, "alpha"))
	if got := b.SecretsOf(id("delta")); got != "new keys" {
		t.Errorf("after the next removal delta has %q", got)
	}
}

func TestTokensAreBounded(t *testing.T) {
	b := newBed(t, "alpha")
	for i := range maxTokens + 3 {
		b.ok("alpha", AddToken{Hash: fmt.Sprintf("h%03d", i), Expires: epochStart.AddDate(0, 0, i)})
	}
	if len(b.Tokens) != maxTokens || has(b.Tokens, "h000") || !has(b.Tokens, "h003") {
		t.Errorf("%d tokens are kept, and not those that expire last", len(b.Tokens))
	}
}

func TestANodeChangesItsOwnRecordOnly(t *testing.T) {
	b := newBed(t, "alpha", "beta")
	b.ok("beta", UpdateNode{ID: id("beta"), Address: "10.0.0.2:7946", Route: "10.0.0.2:6222", Level: 1})
	if !b.happened("node beta is now at 10.0.0.2:7946") || b.Nodes[id("beta")].Address != "10.0.0.2:7946" {
		t.Errorf("beta is %+v", b.Nodes[id("beta")])
	}
	b.refused("alpha", UpdateNode{ID: id("beta"), Address: "x"}, "not-own", "node alpha may not change the record of node beta: a member changes its own only; let that node report its address itself")
}

func TestRemovalOfANode(t *testing.T) {
	b := story(t)
	b.refused("beta", RemoveNode{ID: id("alpha")}, "still-consumed", "pg-main cannot be removed: it is the provider of shop@gamma/db; remove those consumers first, or bind them to another provider and push")
	b.ok("alpha", removal(b.State, "gamma"))
	if has(b.Assignments, "shop@gamma") || len(b.Withdrawals) != 1 {
		t.Errorf("after the consumer's node is gone there are withdrawals %v", b.Withdrawals)
	}
	b.ok("beta", removal(b.State, "alpha"))
	if len(b.Withdrawals) != 0 || !b.happened("logins of shop@gamma/db were left behind at pg-main, which is removed") {
		t.Error("the withdrawal at a removed provider is waited for")
	}
}

func TestRemovalOfANodeWithAProviderAndItsConsumer(t *testing.T) {
	b := newBed(t, "alpha", "beta")
	b.ok("alpha", push(pg(), on("pg", "beta"), app("zeta", Requirement{}), on("zeta", "beta"), app("app", Requirement{}), on("app", "beta")))
	b.use("zeta@beta/db")
	b.use("app@beta/db")
	b.ok("alpha", removal(b.State, "beta"))
	if len(b.Withdrawals)+len(b.Bindings)+len(b.Assignments) != 0 {
		t.Errorf("what is left: %v %v %v", b.Withdrawals, b.Bindings, b.Assignments)
	}
}

func TestHold(t *testing.T) {
	b := story(t)
	at := len(b.log)
	b.ok("alpha", Hold{Seat: "store", Assignment: "pg-main"})
	if s := b.Seats["store"]; s.Holder != "pg-main" || s.Epoch != uint64(at+1) {
		t.Errorf("seat is %+v", s)
	}
	b.refused("alpha", Hold{Seat: "store", Assignment: "pg-apps"}, "stale", fmt.Sprintf("seat store is at epoch %d and was to be changed from 0: something else named its holder meanwhile; look at meshd seats and ask again", at+1))
	r := b.refused("alpha", Hold{Seat: "store", Assignment: "shop@gamma", IfEpoch: uint64(at + 1)}, "not-a-claimant",
		`"shop@gamma" cannot hold seat store: no assignment of that name has a module that claims it; add claims: [store] to its module, or name a claimant`)
	if fmt.Sprint(r.Candidates) != "[pg-apps pg-main]" {
		t.Errorf("candidates are %v", r.Candidates)
	}
	r = b.refused("alpha", Hold{Seat: "stoer"}, "no-seat", `there is no mesh seat "stoer"; meshd seats lists them`)
	if fmt.Sprint(r.Candidates) != "[store]" {
		t.Errorf("candidates are %v", r.Candidates)
	}
	b.ok("alpha", Hold{Seat: "store", IfEpoch: uint64(at + 1)})
	if s := b.Seats["store"]; s.Holder != "" || s.Epoch <= uint64(at+1) {
		t.Errorf("a vacated seat is %+v", s)
	}
}

func TestAnEpochRisesOverARecoveryThatLowersTheIndex(t *testing.T) {
	b := &bed{TB: t, State: New()}
	b.ok("alpha", Init{Mesh: Mesh{ID: "m", Generation: 3}, Node: member("alpha")})
	b.ok("alpha", push(pg(), on("pg", "alpha"), Seat{Name: "store", Scope: ScopeMesh}))
	b.ok("alpha", Hold{Seat: "store", Assignment: "pg@alpha"})
	if got := b.Seats["store"].Epoch; got != 3<<48|3 {
		t.Errorf("epoch is %x", got)
	}
}

// A seat never changes its machine under the epoch that it was named with.
func TestASeatLosesItsHolder(t *testing.T) {
	ident := Module{Name: "ident", Claims: []string{"ident"}}
	for name, change := range map[string]Command{
		"that moves":           push(on("ident", "beta", as("idp"))),
		"that is removed":      Remove{WhatAssignment, "idp"},
		"whose module goes":    Remove{WhatModule, "ident"},
		"that claims no more":  push(Module{Name: "ident"}),
		"whose node goes":      RemoveNode{id("alpha"), []string{id("beta")}, "new keys"},
		"as its scope changes": push(Seat{Name: "ident", Scope: ScopeNode}),
	} {
		b := newBed(t, "alpha", "beta")
		b.ok("alpha", push(ident, on("ident", "alpha", as("idp")), Seat{Name: "ident", Scope: ScopeMesh}))
		b.ok("alpha", Hold{Seat: "ident", Assignment: "idp"})
		b.ok("beta", change)
		if s := b.Seats["ident"]; s.Holder != "" || s.Epoch != b.Index {
			t.Errorf("a holder %s leaves the seat as %+v", name, s)
		}
	}
}

func TestRemove(t *testing.T) {
	b := story(t)
	for _, c := range []struct {
		what, name, code, sentence string
	}{
		{WhatModule, "shp", "no-module", `there is no module "shp"; meshd modules lists them`},
		{WhatAssignment, "pg-mian", "no-assignment", `there is no assignment "pg-mian"; meshd status lists them`},
		{WhatSeat, "stor", "no-seat", `there is no seat "stor"; meshd seats lists them`},
		{"node", "x", "bad-what", `"node" is not a sort of thing that can be removed; write meshd rm module, assignment or seat, and a name`},
		{WhatModule, "pg", "still-consumed", "pg-main cannot be removed: it is the provider of shop@gamma/db; remove those consumers first, or bind them to another provider and push"},
		{WhatAssignment, "pg-main", "still-consumed", "pg-main cannot be removed: it is the provider of shop@gamma/db; remove those consumers first, or bind them to another provider and push"},
	} {
		b.refused("alpha", Remove{c.what, c.name}, c.code, c.sentence)
	}
	b.ok("alpha", Remove{WhatAssignment, "pg-apps"})
	b.ok("alpha", Remove{WhatModule, "shop"})
	b.refused("alpha", Remove{WhatModule, "pg"}, "still-withdrawing", "pg-main cannot be removed: it has logins of shop@gamma/db to end first; they go by themselves once its service answers; meshd providers pg-main shows what holds them up")
	b.ok("alpha", NodeReport{Withdrawn: []Withdrawn{{sorted(b.Withdrawals)[0], 1}}})
	b.ok("alpha", Remove{WhatModule, "pg"})
	b.ok("alpha", Remove{WhatSeat, "store"})
	if len(b.Modules)+len(b.Assignments)+len(b.Bindings)+len(b.Seats) != 0 {
		t.Error("something is left")
	}
	if got := b.Retained(); len(got) != 1 || got[0] != "pg-main/"+pgKind+"/shop@all/db" {
		t.Errorf("retained is %v", got)
	}
}

func TestRemovalUnderANodesAllRule(t *testing.T) {
	b := newBed(t, "alpha", "beta")
	b.ok("alpha", push(Module{Name: "agent", Run: Run{Exec: []string{"/bin/agent"}}}, on("agent", "all")))
	b.refused("alpha", Remove{WhatAssignment, "agent@beta"}, "by-rule", "agent@beta comes from the assignment of agent to all nodes, and would come back; remove the module with meshd rm module agent, and push it again to the nodes that should have it")
	b.ok("alpha", push(on("agent", "beta", func(a *Assign) { a.Env = map[string]string{"A": "1"} })))
	b.ok("alpha", push(on("agent", "all", func(a *Assign) { a.Env = map[string]string{"A": "2"} })))
	if a := b.Assignments["agent@beta"]; a.Rule || a.Env["A"] != "1" || b.Assignments["agent@alpha"].Env["A"] != "2" {
		t.Errorf("a written assignment did not override the rule: %+v", a)
	}
	b.ok("alpha", Remove{WhatAssignment, "agent@beta"})
	if a := b.Assignments["agent@beta"]; !a.Rule || a.Env["A"] != "2" {
		t.Errorf("the rule did not come back: %+v", a)
	}
	b.ok("alpha", Remove{WhatModule, "agent"})
	b.join("gamma")
	if len(b.Assignments) != 0 {
		t.Errorf("a removed module came back: %v", b.Assignments)
	}
}

func TestCommandsAreTakenFromMembersOnly(t *testing.T) {
	b := newBed(t, "alpha")
	const sentence = `node "id-stranger" is no member, and only members change the mesh; join it to the mesh: meshd token, then meshd join`
	for _, c := range []Command{NodeReport{}, AddToken{Hash: "x"}, Remove{What: WhatModule, Name: "shop"}, UpdateNode{ID: "id-stranger"}, Push{}, Hold{}} {
		b.refused("stranger", c, "not-a-member", sentence)
	}
	b.ok("alpha", NodeReport{})
}

func TestEventsAreBoundedAndSayWho(t *testing.T) {
	b := newBed(t, "alpha")
	for i := range maxEvents {
		b.ok("alpha", AddToken{Hash: fmt.Sprint("h", i%3)})
	}
	if len(b.Events) != maxEvents {
		t.Errorf("%d events are kept", len(b.Events))
	}
	last := b.Events[len(b.Events)-1]
	if last.Actor != "root@alpha" || last.Node != "alpha" || last.Index != b.Index || last.Text != "join token h1 made" {
		t.Errorf("the last event is %+v", last)
	}
}
