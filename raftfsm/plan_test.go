package raftfsm

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write golden files; logs of the corpus that are there stay")

// golden compares with a file, or with -update writes it.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is\n%s\nwant\n%s", path, got, want)
	}
}

func (p Plan) lines(title string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\nat %d, on %s\n", title, p.At, strings.Join(p.Nodes, " "))
	for _, c := range p.Changes {
		fmt.Fprintf(&b, "%-8s %-10s %s  [%s]\n", c.Effect, c.What, c.Text, strings.Join(c.Nodes, " "))
	}
	return b.String() + "\n"
}

// TestPlans tells a story, push by push: what each would change is what it does.
func TestPlans(t *testing.T) {
	b := newBed(t, "alpha", "beta", "gamma")
	var out strings.Builder
	step := func(title string, c Command) {
		t.Helper()
		plan, r := b.Preview(Header{Actor: "root@alpha", Node: id("alpha")}, c)
		if r != nil {
			t.Fatalf("%s: %v", title, r)
		}
		out.WriteString(plan.lines(title))
		before := b.Clone()
		b.ok("alpha", c)
		checkPlan(t, before, b.State, plan, nil)
	}
	cache := Module{Name: "cache", Provides: map[string]Provide{"redis": {}}}
	shop := app("shop", Requirement{})
	shop.Requires["cache"] = Requirement{Kind: "redis"}
	first := push(
		Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind, Verbs: []string{"query"}, Want: "pg-main"},
		pg(), on("pg", "alpha", as("pg-main")), on("pg", "beta", as("pg-apps")), cache, on("cache", "gamma"),
		shop, on("shop", "gamma", as("shop-one")),
	)
	step("the first push", first)
	b.ok("alpha", Hold{Seat: "store", Assignment: "pg-main"})
	b.use("shop-one/db")
	b.use("shop-one/cache")
	step("the same again", first)
	step("a consumer is bound to another", push(on("shop", "gamma", as("shop-one"), bound("db", "pg-apps"))))
	step("and back to its data", push(on("shop", "gamma", as("shop-one"), bound("db", "pg-main"))))
	b.use("shop-one/db")
	step("a consumer moves", push(on("shop", "beta", as("shop-one"), bound("db", "pg-main"))))
	shop.Env = map[string]string{"A": "1"}
	step("another environment", push(shop))
	shop.Health = &Health{TCP: "127.0.0.1:80"}
	step("another health check", push(shop))
	step("the seat is to move", push(Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind, Verbs: []string{"query"}, Want: "pg-apps"}))
	step("a provider that is not there", pending(push(on("shop", "beta", as("shop-one"), bound("db", "pg-new")), Seat{Name: "ident", Scope: ScopeMesh, Want: "idp"})))
	step("it appears", push(on("pg", "gamma", as("pg-new"))))
	step("on all nodes", push(app("agent", Requirement{Kind: "redis"}), on("agent", "all")))
	ext := app("agent", Requirement{Kind: "redis"})
	ext.Run = Run{}
	step("external from now on", push(ext))
	step("no longer external", push(app("agent", Requirement{Kind: "redis"})))
	step("removal of a module", Remove{WhatModule, "agent"})
	step("removal of a seat", Remove{WhatSeat, "store"})
	b.ok("alpha", push(on("shop", "beta", as("shop-one"))))
	step("removal of a node", removal(b.State, "beta"))
	golden(t, "plans.txt", out.String())
}

func TestAPlanOfARefusedPushIsTheRefusal(t *testing.T) {
	b := story(t)
	before := snapshotOf(t, b.State)
	plan, r := b.Preview(Header{Node: id("alpha")}, push(on("nothing", "alpha")))
	if r == nil || r.Code != "no-module" || len(plan.Changes) != 0 {
		t.Errorf("the plan is %+v, %v", plan, r)
	}
	if string(before) != string(snapshotOf(t, b.State)) {
		t.Error("a plan changed the state")
	}
}

// A command that did not go through the log is planned as if it had.
func TestAPlanMindsNoEmptyMaps(t *testing.T) {
	b := story(t)
	shop := app("shop", Requirement{Provider: "pg-main"})
	shop.Env, shop.Calls, shop.Serves = map[string]string{}, []string{}, map[string]map[string]Handler{}
	where := on("shop", "gamma")
	where.Bind, where.Default = map[string]string{}, []string{}
	plan, r := b.Preview(Header{Node: id("alpha")}, push(shop, where, Seat{Name: "store", Scope: ScopeMesh, Verbs: []string{"databases", "query"}}))
	if r != nil || len(plan.Changes) != 0 || len(plan.Nodes) != 0 {
		t.Errorf("pushing the same with empty maps is planned as %+v, %v", plan, r)
	}
}

// A push that is too big for one entry is planned whole.
func TestAPlanHasNoSizeOfAnEntry(t *testing.T) {
	b := newBed(t, "alpha")
	var docs []any
	for i := range MaxDocuments {
		docs = append(docs, Module{Name: fmt.Sprint("m", i), Env: map[string]string{"LONG": strings.Repeat("x", 200)}})
	}
	plan, r := b.Preview(Header{Node: id("alpha")}, push(docs...))
	if r != nil || len(plan.Changes) != MaxDocuments {
		t.Errorf("%d changes, %v", len(plan.Changes), r)
	}
}
