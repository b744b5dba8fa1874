package cli

import (
	"slices"
	"testing"
	"time"

	"meshd/peer/api"
	"meshd/peer/supervise"
	"meshd/raftfsm"
)

const (
	pgMain = "pg-main/postgres-database"
	shopDB = "shop@gamma/db"
)

func TestExplain(t *testing.T) {
	ready := provides(pgMain, true, "", "")
	away := func(node string) func(*mesh) error {
		return func(m *mesh) error { m.over.Alive[node] = false; return nil }
	}
	self := func(node string) func(*mesh) error {
		return func(m *mesh) error { m.over.Self = node; return nil }
	}
	steps := func(all ...any) []func(*mesh) error {
		var out []func(*mesh) error
		for _, s := range all {
			switch s := s.(type) {
			case func(*mesh) error:
				out = append(out, s)
			case []func(*mesh) error:
				out = append(out, s...)
			}
		}
		return out
	}
	hops := inUse(shopDB)
	for name, c := range map[string]struct {
		push  string
		steps []func(*mesh) error
		phase raftfsm.Phase
		want  why // Since is not compared
	}{
		"pending provider": {shop, nil, "unbound", why{Node: "gamma", Text: "pg-main is not there yet"}},
		"pending node": {`module: shop
run: {exec: [/bin/shop]}
requires: {db: {kind: postgres-database, node: delta}}
---
assign: shop
node: gamma
`, nil, "unbound", why{Node: "gamma", Text: "node delta is not there yet"}},
		"not looked yet": {database + separator + shop, nil, "waiting", why{Node: "alpha", Text: "alpha has not looked at pg-main yet"}},
		"provider's node away": {database + separator + shop, steps(self("gamma"), away("alpha")), "waiting",
			why{Node: "alpha", Text: "its provider's node alpha is away"}},
		"provider not ready": {database + separator + shop, steps(provides(pgMain, false, "connect", "unreachable")), "waiting",
			why{Node: "alpha", Step: "connect", Class: "unreachable", Text: "pg-main is not ready: connect fails on alpha (unreachable)"}},
		"waiting": {database + separator + shop, steps(ready), "waiting", why{Node: "alpha", Text: "pg-main is staging a login for it"}},
		"staged":  {database + separator + shop, steps(ready, hops[:1]), "staged", why{Node: "alpha", Text: "pg-main is making its login"}},
		"minting fails": {database + separator + shop, steps(ready, hops[:1], held(shopDB, "provider", "create role", "denied")), "staged",
			why{Node: "alpha", Step: "create role", Class: "denied", Text: "create role fails on alpha (denied)"}},
		"away explains a trouble": {database + separator + shop, steps(self("gamma"), hops[:1], held(shopDB, "provider", "create role", "denied"), away("alpha")), "staged",
			why{Node: "alpha", Text: "its provider's node alpha is away"}},
		"minted": {database + separator + shop, steps(ready, hops[:2]), "minted", why{Node: "gamma", Text: "gamma is trying its login"}},
		"consumer cannot reach": {database + separator + shop, steps(ready, hops[:2], held(shopDB, "consumer", "log in", "unreachable")), "minted",
			why{Node: "gamma", Step: "log in", Class: "unreachable", Text: "log in fails on gamma (unreachable)"}},
		"consumer's node away":                 {database + separator + shop, steps(ready, hops[:2], away("gamma")), "minted", why{Node: "gamma", Text: "its own node gamma is away"}},
		"minted does not ask for the provider": {database + separator + shop, steps(self("gamma"), hops[:2], away("alpha")), "minted", why{Node: "gamma", Text: "gamma is trying its login"}},
		"delivered":                            {database + separator + shop, steps(ready, hops[:3]), "delivered", why{Node: "gamma", Text: "no session of its login was seen yet"}},
		"delivered, overdue": {database + separator + shop, steps(ready, hops[:3], func(m *mesh) error { m.later = time.Hour; return nil }), "delivered",
			why{Node: "gamma", Text: "no session of its login was seen yet; if its sessions are shorter than a second, say proof: health or proof: delivered in the requirement"}},
		"process fails": {database + separator + shop, steps(ready, hops[:3], process("shop@gamma", "backing-off", "exit 1")), "delivered",
			why{Node: "gamma", Step: "run", Class: "exit 1", Text: "shop@gamma is backing-off (exit 1)"}},
		"provider lost before the login was seen": {database + separator + shop, steps(hops[:3], provides(pgMain, false, "connect", "unreachable")), "delivered",
			why{Node: "alpha", Step: "connect", Class: "unreachable", Text: "pg-main is not ready: connect fails on alpha (unreachable)"}},
		"in use":                 {database + separator + shop, steps(ready, hops), "in-use", why{}},
		"in use, provider away":  {database + separator + shop, steps(self("gamma"), ready, hops, away("alpha")), "in-use", why{Node: "alpha", Text: "its provider's node alpha is away"}},
		"in use, login is drift": {database + separator + shop, steps(ready, hops, held(shopDB, "provider", "verify", "drift")), "in-use", why{Node: "alpha", Step: "verify", Class: "drift", Text: "verify fails on alpha (drift)"}},
		"health is missing": {database + separator + `module: shop
run: {exec: [/bin/shop]}
health: {http: "http://127.0.0.1:8080/"}
requires: {db: {kind: postgres-database, provider: pg-main, proof: health}}
---
assign: shop
node: gamma
`, steps(ready, hops[:3]), "delivered", why{Node: "gamma", Text: "the health check of shop@gamma has not passed yet"}},
		"its sibling is late": {database + separator + `module: shop
run: {exec: [/bin/shop]}
requires:
  db: {kind: postgres-database, provider: pg-main}
  cache: {kind: redis, provider: cache-main}
---
assign: shop
node: gamma
`, steps(ready, hops[:3]), "delivered", why{Node: "gamma", Text: "shop@gamma is not started before shop@gamma/cache is delivered"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			m.push(t, c.push)
			m.play(t, c.steps...)
			o := m.look()
			b := o.State.Bindings[shopDB]
			if b.Phase() != c.phase {
				t.Fatalf("phase %s, want %s", b.Phase(), c.phase)
			}
			got := explain(o, b)
			if got.Text != "" && got.Since.IsZero() {
				t.Error("no word on since when")
			}
			got.Since = time.Time{}
			if got != c.want {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
}

func TestWhyAProcessIsNotRunning(t *testing.T) {
	ready := append([]func(*mesh) error{provides(pgMain, true, "", "")}, inUse(shopDB)[:3]...)
	for name, c := range map[string]struct {
		steps []func(*mesh) error
		want  string
	}{
		"its binding waits": {nil, "shop@gamma is started once shop@gamma/db is delivered: alpha has not looked at pg-main yet"},
		"not yet":           {ready, "gamma has not started it yet"},
		"not with its user": {append(ready[:4:4], held(shopDB, "consumer", "find user", "bad-config")), "gamma has not started it yet: find user fails on gamma (bad-config)"},
		"no such program": {append(ready[:4:4], process("shop@gamma", "backing-off", "exec-not-found")),
			"shop@gamma is backing-off (exec-not-found): /usr/local/bin/shop, or the interpreter that it needs, does not exist on gamma"},
		"runs again": {append(ready[:4:4], process("shop@gamma", "running", "ended-unseen")), ""},
		"unhealthy":  {append(ready[:4:4], process("shop@gamma", "unhealthy", "ended-unseen")), "shop@gamma is unhealthy"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			m.push(t, database+separator+shop)
			m.play(t, c.steps...)
			row, got := assignmentAt(m.look(), "shop@gamma"), ""
			if row.Trouble != nil {
				got = row.Trouble.Text
			}
			if got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			if row.State == "running" && row.Class != "" {
				t.Errorf("it runs, and has the class %q of how it ended", row.Class)
			}
		})
	}
}

// TestClassesOfProcessesHaveWords keeps the words as many as the classes.
func TestClassesOfProcessesHaveWords(t *testing.T) {
	for _, class := range []string{
		supervise.SpecRefused, supervise.UserRefused, supervise.UserUnknown, supervise.ExecNotFound, supervise.ExecDenied, supervise.ExecFormat,
		supervise.DirNotFound, supervise.LimitRefused, supervise.LogUnwritable, supervise.RecordFailed, supervise.StartFailed, supervise.Exited,
		supervise.Signalled, supervise.OutOfMemory, supervise.EndedUnseen, supervise.LeftoversStuck,
	} {
		m := newMesh(t)
		m.push(t, database+separator+shop)
		m.play(t, process("shop@gamma", "backing-off", class))
		if classWords(m.look(), "shop@gamma") == "" {
			t.Errorf("class %s has no words", class)
		}
	}
}

func TestExplainWithdrawal(t *testing.T) {
	m := newMesh(t)
	m.push(t, database+separator+shop)
	m.play(t, append([]func(*mesh) error{provides(pgMain, true, "", "")}, inUse(shopDB)...)...)
	m.do(t, "beta", raftfsm.Remove{What: raftfsm.WhatModule, Name: "shop"})
	say := func() string {
		t.Helper()
		o := m.look()
		if len(o.State.Withdrawals) != 1 {
			t.Fatalf("%d withdrawals, want one", len(o.State.Withdrawals))
		}
		for _, w := range o.State.Withdrawals {
			return explainWithdrawal(o, w).Text
		}
		return ""
	}
	if got := say(); got != "pg-main is ending its logins" {
		t.Error(got)
	}
	m.play(t, provides(pgMain, false, "connect", "unreachable"))
	if got := say(); got != "pg-main is not ready: connect fails on alpha (unreachable)" {
		t.Error(got)
	}
	m.over.Self, m.over.Alive["alpha"] = "beta", false
	if got := say(); got != "alpha is away, and its logins there end once it is back" {
		t.Error(got)
	}
}

func TestUnreadyIsPastReadyWithin(t *testing.T) {
	m := newMesh(t)
	m.push(t, database+separator+shop)
	m.play(t, provides(pgMain, true, "", ""))
	names := func(all []problem) (out []string) {
		for _, p := range all {
			out = append(out, p.What+" "+p.Name)
		}
		return out
	}
	expect := func(when string, unready, coming []string) {
		t.Helper()
		over, yet := problems(m.look())
		if got := names(over); !slices.Equal(got, unready) {
			t.Errorf("%s: un-ready %v, want %v", when, got, unready)
		}
		if got := names(yet); !slices.Equal(got, coming) {
			t.Errorf("%s: on the way %v, want %v", when, got, coming)
		}
	}
	binding, shop := []string{"binding " + shopDB}, []string{"process shop@gamma"}
	m.later = 50 * time.Second
	expect("before its time", nil, binding)
	m.later = 61 * time.Second
	expect("after its time", binding, nil)
	m.play(t, inUse(shopDB)...)
	expect("in use, and no word of the process", nil, shop)
	m.play(t, process("shop@gamma", "running", ""))
	m.later = time.Hour
	expect("in use", nil, nil)
	m.play(t, process("shop@gamma", "unhealthy", "check failed"))
	expect("unhealthy", shop, nil)
	m.later = 0
	expect("unhealthy since a moment", nil, shop)
	m.over.Missing = []string{"beta"}
	expect("a silent voter", []string{"node beta"}, shop)
	m.over.Self, m.over.Quorum, m.over.Missing = "gamma", false, []string{"alpha", "beta"}
	m.over.Alive = map[string]bool{"gamma": true}
	expect("no quorum", []string{"mesh 5f3a", "node alpha", "node beta"}, append(binding, shop...))
}

func TestConcerning(t *testing.T) {
	all := []api.Try{
		{Key: "pg-main/postgres-database: preflight"}, {Key: "pg-main/postgres-database: mint shop@gamma/db 1"},
		{Key: "pg-main/postgres-database: withdraw shop@gamma/db#12"}, {Key: "check shop@gamma/cache 1"}, {Key: "deliver shop@gamma 01ab"},
		{Key: "check shop@gamma/db-old 1"}, {Key: "pg-main/other: preflight"},
	}
	mine := about(raftfsm.Binding{Consumer: "shop@gamma", Requirement: "db", Provider: "pg-main", Kind: "postgres-database"})
	var got []int
	for i, try := range all {
		if mine(try) {
			got = append(got, i)
		}
	}
	if want := []int{0, 1, 2, 4}; !slices.Equal(got, want) {
		t.Errorf("tries %v concern the binding, want %v", got, want)
	}
}
