package raftfsm

import (
	"fmt"
	"reflect"
	"testing"
	"time"
)

func TestDesired(t *testing.T) {
	b := newBed(t, "alpha", "beta")
	store := pg()
	store.Tools = map[string]Handler{"size": {Exec: []string{"/bin/size"}}}
	store.Serves = map[string]map[string]Handler{"store": {"query": {HTTP: "http://127.0.0.1/query"}}}
	idp := Module{Name: "idp", Claims: []string{"ident", "store"}}
	caller := app("caller", Requirement{})
	caller.Calls = []string{"store.query", "store.none", "alpha/pg.size", "alpha/pg.none", "alpha/pg-main.size", "beta/pg.size", "beta/ident.who", "ident.who", "beta/store.query", "delta/ident.who", "none.x"}
	b.ok("alpha", push(
		Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind, Verbs: []string{"databases", "query"}},
		Seat{Name: "ident", Scope: ScopeNode, Verbs: []string{"who"}},
		store, on("pg", "alpha", as("pg-main"), func(a *Assign) { a.Address = "10.0.0.1:5432" }), on("pg", "beta", as("pg-apps")),
		idp, on("idp", "beta", as("idp-b")), on("idp", "beta", as("idp-a")),
		caller, on("caller", "beta", func(a *Assign) {
			a.Env, a.Health, a.Limits = map[string]string{"A": "1"}, &Health{TCP: "127.0.0.1:1"}, &Limits{PIDs: 7}
		}),
	))

	d := b.Desired(id("alpha"))
	if len(d.Seats) != 0 || !reflect.DeepEqual(d.Holders["store"], Holder{Verbs: []string{"databases", "query"}, Dark: "no holder is named yet; idp-a, idp-b, pg-apps, pg-main could be"}) {
		t.Errorf("a seat that nobody holds is answered: %+v, %+v", d.Seats, d.Holders)
	}
	b.open("alpha")
	b.ok("alpha", Hold{Seat: "store", Assignment: "pg-main"})
	epoch := b.Index
	d = b.Desired(id("alpha"))
	wantSeat := SeatService{"store", ScopeMesh, "pg-main", epoch, map[string]Handler{"query": {HTTP: "http://127.0.0.1/query"}, "databases": {Builtin: pgKind}}}
	if len(d.Seats) != 1 || !reflect.DeepEqual(d.Seats[0], wantSeat) {
		t.Errorf("the holder's node answers %+v, want %+v", d.Seats, wantSeat)
	}
	if len(d.Provides) != 1 || d.Provides[0].Provide.Address != "10.0.0.1:5432" || b.Modules["pg"].Provides[pgKind].Address == "10.0.0.1:5432" {
		t.Errorf("provides %+v", d.Provides)
	}
	if len(d.Tools) != 1 || d.Tools[0].Assignment != "pg-main" {
		t.Errorf("tools %+v", d.Tools)
	}

	d = b.Desired(id("beta"))
	wantIdent := SeatService{"ident", ScopeNode, "idp-a", 0, map[string]Handler{"who": {Bus: true}}}
	if len(d.Seats) != 1 || !reflect.DeepEqual(d.Seats[0], wantIdent) {
		t.Errorf("beta, which claims store twice and holds it not, answers %+v", d.Seats)
	}
	if got := d.Holders["store"]; !reflect.DeepEqual(got, Holder{Node: "alpha", Assignment: "pg-main", Epoch: epoch, Verbs: []string{"databases", "query"}}) {
		t.Errorf("store is held by %+v", got)
	}
	if got := fmt.Sprint(d.NodeSeats); got != "map[ident:[who]]" {
		t.Errorf("node seats are %s", got)
	}
	var names []string
	for _, r := range d.Runs {
		names = append(names, r.Assignment)
	}
	if fmt.Sprint(names) != "[caller@beta idp-a idp-b pg-apps]" {
		t.Errorf("beta runs %v", names)
	}
	run := d.Runs[0]
	if run.Module.Env["A"] != "1" || run.Module.Health.TCP == "" || run.Module.Limits.PIDs != 7 || fmt.Sprint(run.Bindings) != "[caller@beta/db]" {
		t.Errorf("caller runs as %+v", run)
	}
	want := []Target{
		{Seat: "store", Name: "query"},
		{Node: "alpha", Assignment: "pg-main", Name: "size"}, {Node: "alpha", Assignment: "pg-main", Name: "size"},
		{Node: "beta", Assignment: "pg-apps", Name: "size"},
		{Node: "beta", Seat: "ident", Name: "who"},
	}
	if got := d.Grants[0].Calls; !reflect.DeepEqual(got, want) {
		t.Errorf("caller may call %+v, want %+v", got, want)
	}
	for _, g := range d.Grants[1:] {
		if len(g.Calls) > 0 {
			t.Errorf("%s lists no call and may call %+v", g.Assignment, g.Calls)
		}
	}
	if d := b.Desired("id-nobody"); len(d.Runs)+len(d.Seats)+len(d.Grants) != 0 {
		t.Errorf("a node that is none is to do %+v", d)
	}
}

func TestParseTarget(t *testing.T) {
	for s, want := range map[string]Target{
		"store.query":                {Seat: "store", Name: "query"},
		"alpha/ident.who":            {Node: "alpha", Seat: "ident", Name: "who"},
		"alpha/pg.size":              {Node: "alpha", Seat: "pg", Name: "size"},
		"alpha/pg@alpha.size":        {Node: "alpha", Seat: "pg@alpha", Name: "size"},
		"":                           {},
		"store":                      {},
		"store.":                     {},
		".query":                     {},
		"store.query.x":              {},
		"/store.query":               {},
		"a/b/store.query":            {},
		"store.*":                    {},
		"alpha/>.size":               {},
		"A/store.query":              {},
		"store.que ry":               {},
		"alpha/pg@alpha@x.size":      {},
		"mesh-store.databases\n":     {},
		"alpha/postgres.size.extra.": {},
	} {
		got, ok := ParseTarget(s)
		if valid := want != (Target{}); ok != valid || valid && got != want {
			t.Errorf("%q is %+v, %v", s, got, ok)
		}
	}
}

func TestLookups(t *testing.T) {
	b := story(t)
	if n, ok := b.NodeNamed("beta"); !ok || n.ID != id("beta") || b.NodeName(id("beta")) != "beta" || b.NodeName("gone") != "gone" {
		t.Error("nodes are not found by name and id")
	}
	if _, ok := b.NodeNamed("delta"); ok {
		t.Error("there is a delta")
	}
	if fmt.Sprint(b.ProvidersOf(pgKind), b.ConsumersOf("pg-main"), b.Claimants("store"), b.Claimants("x")) != "[pg-apps pg-main] [shop@gamma/db] [pg-apps pg-main] []" {
		t.Error(b.ProvidersOf(pgKind), b.ConsumersOf("pg-main"), b.Claimants("store"))
	}
	if DefaultReady != time.Minute {
		t.Error("the guide says a minute")
	}
}
