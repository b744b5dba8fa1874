package raftfsm

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

// source turns bytes into choices from a small vocabulary, so that what it
// makes collides.
type source struct {
	b []byte
}

func (s *source) n(max int) int {
	if len(s.b) == 0 {
		return 0
	}
	v := int(s.b[0]) % max
	s.b = s.b[1:]
	return v
}

func (s *source) yes() bool { return s.n(2) == 1 }

func (s *source) of(words ...string) string { return words[s.n(len(words))] }

func (s *source) node() string   { return s.of("alpha", "beta", "gamma", "delta") }
func (s *source) module() string { return s.of("pg", "shop", "web") }
func (s *source) seat() string   { return s.of("store", "ident") }
func (s *source) kind() string   { return s.of(pgKind, "redis") }
func (s *source) assignment() string {
	return s.of("pg-main", "pg-apps", "shop", "pg@alpha", "pg@beta", "shop@alpha", "web@beta", "web@gamma")
}

func (s *source) moduleDoc() Module {
	m := Module{Name: s.module(), Run: Run{Exec: []string{s.of("/bin/a", "/bin/b")}}}
	if s.yes() {
		m.Provides = map[string]Provide{s.kind(): {}}
	}
	if s.yes() {
		m.Claims = []string{s.seat()}
	}
	for range s.n(3) {
		q := Requirement{Kind: s.kind()}
		switch s.n(4) {
		case 1:
			q.Provider = s.assignment()
		case 2:
			q.Node = s.node()
		case 3:
			q.Proof = ProofDelivered
		}
		if m.Requires == nil {
			m.Requires = map[string]Requirement{}
		}
		m.Requires[s.of("db", "cache")] = q
	}
	if s.yes() {
		m.Tools = map[string]Handler{"size": {HTTP: "http://127.0.0.1/size"}}
		m.Calls = []string{s.of("store.query", "alpha/pg.size", "beta/ident.query", "alpha/shop.none")}
	}
	return m
}

func (s *source) assignDoc() Assign {
	a := Assign{Module: s.module()}
	switch s.n(4) {
	case 0:
		a.All = true
	case 1:
		a.Nodes, a.As = []string{s.node()}, s.of("pg-main", "pg-apps")
	case 2:
		a.Module, a.Nodes, a.As = "shop", []string{s.node()}, "shop" // one that moves
	default:
		a.Nodes = []string{s.node()}
	}
	if s.n(3) == 1 {
		a.Bind = map[string]string{s.of("db", "cache"): s.assignment()}
	}
	if s.n(4) == 1 {
		a.Default, a.Exclusive = []string{s.kind()}, s.yes()
	}
	return a
}

func (s *source) seatDoc() Seat {
	seat := Seat{Name: s.seat(), Scope: s.of(ScopeMesh, ScopeNode), Verbs: []string{"query"}}
	if s.yes() {
		seat.Delivers = s.kind()
	}
	if s.n(3) == 1 {
		seat.Want = s.assignment()
	}
	return seat
}

func (s *source) documents() Documents {
	var d Documents
	for range s.n(3) {
		d.Modules = append(d.Modules, s.moduleDoc())
	}
	for range s.n(3) {
		d.Assigns = append(d.Assigns, s.assignDoc())
	}
	if s.yes() {
		d.Seats = append(d.Seats, s.seatDoc())
	}
	return d
}

// binding picks one that is there, so that reports hit something.
func (s *source) binding(state *State) string {
	ids := sorted(state.Bindings)
	if len(ids) == 0 {
		return "none"
	}
	return ids[s.n(len(ids))]
}

func (s *source) report(state *State) NodeReport {
	id := s.binding(state)
	b := state.Bindings[id]
	switch s.n(6) {
	case 0:
		return NodeReport{Staged: []Staged{{Binding: id, Resource: b.Resource, To: state.Assignments[b.Consumer].Node, Generation: state.Resources[b.Resource].Last + uint64(s.n(2)), Sealed: "s"}}}
	case 1:
		return NodeReport{Troubles: []TroubleReport{{Binding: id, Side: s.of(SideProvider, SideConsumer), Step: "login", Class: s.of("", "refused")}}}
	case 2:
		return NodeReport{Providers: []ProviderReport{{Provider: ProviderID(s.assignment(), s.kind()), Ready: s.yes(), Step: "connect", Class: s.of("", "down")}}}
	case 3:
		var r NodeReport
		for _, w := range sorted(state.Withdrawals) {
			r.Withdrawn = append(r.Withdrawn, Withdrawn{ID: w})
		}
		return r
	case 4:
		return NodeReport{Processes: []ProcessReport{{Assignment: s.assignment(), State: s.of("running", "failed")}}}
	}
	return NodeReport{Marks: []Mark{{
		Binding: id, Resource: b.Resource, Generation: state.Resources[b.Resource].Last,
		Fact: s.of(FactMinted, FactDelivered, FactSeen, FactHealthy),
	}}}
}

func (s *source) command(state *State) Command {
	switch s.n(20) {
	case 0:
		return Remove{What: s.of(WhatModule, WhatAssignment, WhatSeat), Name: s.of(s.module(), s.seat(), s.assignment())}
	case 1, 13, 14:
		seat := s.seat()
		h := Hold{Seat: seat, Assignment: s.of(append(state.Claimants(seat), "", s.assignment())...), IfEpoch: state.Seats[seat].Epoch}
		if s.yes() {
			h.Released = state.claimed(seat).Epoch
		}
		return h
	case 2:
		return AddToken{Hash: s.of("t1", "t2", "t3"), Expires: epochStart}
	case 3:
		return Admit{Token: s.of("t1", "t2", "t3"), Node: member(s.node()), Keys: state.Mesh.Keys}
	case 4:
		return removal(state, s.node())
	case 5:
		return PushPart{Push: s.of("p", "q"), Seq: s.n(3), Part: s.documents()}
	case 6:
		return Push{ID: s.of("p", "q"), Parts: s.n(3), Documents: s.documents()}
	case 7, 8, 9:
		return s.report(state)
	case 10, 11, 12:
		return s.session(state)
	case 17:
		var c Compared
		for range s.n(3) {
			c.Differences = append(c.Differences, Difference{Seat: s.seat(), Node: s.node(), Text: s.of("answers", "does not answer")})
		}
		return c
	case 18, 19:
		m := MoveSeat{Seat: s.seat(), Node: s.node()}
		if claimants := state.Claimants(m.Seat); len(claimants) > 0 && s.n(4) > 0 {
			m.Assignment = claimants[s.n(len(claimants))]
			m.Node = state.NodeName(state.Assignments[m.Assignment].Node)
		}
		return m
	}
	return Push{Documents: s.documents(), Pending: s.yes()}
}

// history applies the commands that data stands for, checks every step, and
// returns the log.
func history(t testing.TB, data []byte) []Entry {
	src := &source{data}
	b := newBed(t, "alpha", "beta")
	b.ok("alpha", push(pg(), on("pg", "alpha", as("pg-main")), app("shop", Requirement{Provider: "pg-main"}), on("shop", "beta"), Seat{Name: "store", Scope: ScopeMesh}))
	last, seats := map[string]uint64{}, watched{}
	for len(src.b) > 0 && len(b.log) < 200 {
		c := src.command(b.State)
		proposer := src.node()
		n := len(b.log) + 1
		h := Header{Format: Format, Level: Level, Actor: "root@" + proposer, Node: id(proposer), Time: epochStart.Add(time.Duration(n) * time.Second), ID: fmt.Sprint("e", n)}
		before := b.Clone()
		plan, refusal := b.Preview(h, c)
		r := b.apply(proposer, c)
		if (refusal == nil) != (r == nil) || r != nil && r.Error() != refusal.Error() {
			t.Fatalf("%+v: the plan says %v, applying it says %v", c, refusal, r)
		}
		checkPlan(t, before, b.State, plan, r)
		checkProgress(t, before, b.State, last)
		if r == nil {
			seats.after(t, b.State, c)
		}
	}
	return b.log
}

// checkPlan checks a plan against what happened.
func checkPlan(t testing.TB, before, after *State, plan Plan, r *Rejection) {
	t.Helper()
	if r != nil {
		return
	}
	if got := difference(before, after); !reflect.DeepEqual(got, plan) {
		t.Fatalf("the plan was %+v, what happened %+v", plan, got)
	}
	if len(plan.Changes) > 0 {
		return
	}
	for id := range after.Nodes {
		if x, y := before.Desired(id).planned(), after.Desired(id).planned(); !reflect.DeepEqual(x, y) {
			t.Fatalf("an empty plan changes what is desired of %s from\n%+v\nto\n%+v", id, x, y)
		}
	}
}

// checkProgress checks what no single state shows: that generations and epochs
// only rise, and that a binding is re-bound by nothing but a push or a removal.
func checkProgress(t testing.TB, before, after *State, last map[string]uint64) {
	t.Helper()
	for id, r := range after.Resources {
		if r.Last < last[id] {
			t.Fatalf("resource %s goes back from generation %d to %d", id, last[id], r.Last)
		}
	}
	for id, n := range last {
		if !has(after.Resources, id) && n > 0 {
			t.Fatalf("resource %s forgot that it handed out generation %d", id, n)
		}
	}
	for id, r := range after.Resources {
		last[id] = r.Last
	}
	for name, seat := range after.Seats {
		old, was := before.Seats[name]
		moved := was && old.Holder != "" && before.Assignments[old.Holder].Node != after.Assignments[seat.Holder].Node
		if was && (seat.Holder != old.Holder || moved) && seat.Epoch != after.epochNow() {
			t.Fatalf("seat %s went from %s to %s under epoch %d", name, old.Holder, seat.Holder, seat.Epoch)
		}
	}
}

func (s *State) epochNow() uint64 { return s.Mesh.Generation<<48 | s.Index }

// replay applies the log to a new state; after entry cut it goes on from a
// snapshot, if cut is not negative.
func replay(t testing.TB, log []Entry, cut int) []byte {
	t.Helper()
	s := New()
	for i, e := range log {
		s.Apply(uint64(i+1), e)
		if i == cut {
			var err error
			if s, err = Restore(bytes.NewReader(snapshotOf(t, s))); err != nil {
				t.Fatal(err)
			}
		}
	}
	return snapshotOf(t, s)
}

func FuzzApply(f *testing.F) {
	for i := range 64 {
		seed := make([]byte, 64+8*i)
		x := uint32(i + 1)
		for j := range seed {
			x = x*1664525 + 1013904223
			seed[j] = byte(x >> 16)
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 2000 {
			return
		}
		log := history(t, data)
		want := replay(t, log, -1)
		if again := replay(t, log, -1); !bytes.Equal(want, again) {
			t.Fatalf("the same log gave\n%s\nand\n%s", want, again)
		}
		if cut := len(data) % len(log); !bytes.Equal(want, replay(t, log, cut)) {
			t.Fatalf("going on from a snapshot at entry %d gave other bytes", cut)
		}
	})
}

func FuzzDecode(f *testing.F) {
	for _, c := range everyCommand() {
		b, err := Encode(Entry{Header{Actor: "root@alpha", Node: "id-alpha", Time: epochStart, ID: "e1"}, c})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"Format":1,"Level":1,"Actor":"","Node":"","Time":"9999-12-31T23:59:59-23:00","ID":"","Name":"rm","Body":{}}`))
	f.Add([]byte(`{"Format":1,"Level":1,"Name":"push","Body":{"Documents":{"Seats":[{"Name":"s","Scope":"mesh","Verbs":[]}]}}} {}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := Decode(b)
		if err != nil {
			return
		}
		again, err := Encode(e)
		if err != nil {
			if len(b) > MaxEntry/8 {
				return // escapes make it longer than the bound
			}
			t.Fatalf("Decode took %q and Encode does not: %v", b, err)
		}
		e2, err := Decode(again)
		if err != nil {
			t.Fatalf("Decode refuses what Encode wrote, %q: %v", again, err)
		}
		if b2, err := Encode(e2); err != nil || !bytes.Equal(again, b2) {
			t.Fatalf("Encode wrote %q, and %q the second time: %v", again, b2, err)
		}
		s := newBed(t, "alpha").State
		s.Apply(2, e)
		if _, err := Restore(bytes.NewReader(snapshotOf(t, s))); err != nil {
			t.Fatalf("after %q the snapshot cannot be read: %v", b, err)
		}
	})
}

// TestRandomHistories walks further than a fuzzer gets within a test run: long
// histories of random commands, the same ones each time.
func TestRandomHistories(t *testing.T) {
	accepted := map[string]int{}
	histories := uint64(40)
	if testing.Short() {
		histories = 8
	}
	for seed := range histories {
		r := rand.New(rand.NewPCG(seed, 1))
		data := make([]byte, 1200)
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		log := history(t, data)
		want := replay(t, log, -1)
		if got := replay(t, log, r.IntN(len(log))); !bytes.Equal(want, got) {
			t.Fatalf("history %d: going on from a snapshot gave other bytes", seed)
		}
		s := New()
		for i, e := range log {
			if s.Apply(uint64(i+1), e).Rejection == nil {
				accepted[e.Command.name()]++
			}
		}
	}
	for _, c := range everyCommand() {
		if _, own := c.(UpdateNode); !own && !testing.Short() && accepted[c.name()] < int(histories)/4 {
			t.Errorf("only %d %s commands were accepted: the histories do not reach far", accepted[c.name()], c.name())
		}
	}
}
