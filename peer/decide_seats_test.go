package peer

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"meshd/raftfsm"
)

// seatBed is what a leader decides by: a mesh of alpha, beta, gamma and delta, of
// which alpha leads, with a module lamp on each, as lamp-a to lamp-d. Entry i is at
// index i, and the epochs are indices.
type seatBed struct {
	testing.TB
	state    *raftfsm.State
	silent   map[string]bool // nodes that have not renewed lately
	leaving  map[string]bool
	released map[uint64]bool // epochs that were let go of
	over     map[uint64]bool // epochs whose claims are over
}

func newSeatBed(t testing.TB) *seatBed {
	b := &seatBed{TB: t, state: raftfsm.New(), silent: map[string]bool{}, leaving: map[string]bool{}, released: map[uint64]bool{}, over: map[uint64]bool{}}
	node := func(name string) raftfsm.Node { return raftfsm.Node{ID: "id-" + name, Name: name} }
	b.do(raftfsm.Init{Mesh: raftfsm.Mesh{ID: "m"}, Node: node("alpha")})
	docs := raftfsm.Documents{
		Modules: []raftfsm.Module{{Name: "lamp", Claims: []string{"lamp", "torch", "lantern"}}},
		Seats:   []raftfsm.Seat{{Name: "lamp", Scope: raftfsm.ScopeMesh}},
	}
	for i, name := range []string{"alpha", "beta", "gamma", "delta"} {
		if name != "alpha" {
			b.do(raftfsm.AddToken{Hash: name}, raftfsm.Admit{Token: name, Node: node(name)})
		}
		docs.Assigns = append(docs.Assigns, raftfsm.Assign{Module: "lamp", Nodes: []string{name}, As: "lamp-" + "abcd"[i:i+1]})
	}
	b.do(raftfsm.Push{Documents: docs})
	return b
}

func (b *seatBed) do(commands ...raftfsm.Command) {
	b.Helper()
	for _, c := range commands {
		index := b.state.Index + 1
		h := raftfsm.Header{Actor: "test", Node: "id-alpha", Time: time.Unix(int64(index), 0).UTC(), ID: fmt.Sprint(index)}
		if r := b.state.Apply(index, raftfsm.Entry{Header: h, Command: c}); r.Rejection != nil {
			b.Fatalf("%+v: %v", c, r.Rejection)
		}
	}
}

// sessions opens one of each node.
func (b *seatBed) sessions(nodes ...string) {
	b.Helper()
	for _, n := range nodes {
		b.do(raftfsm.OpenSession{Node: "id-" + n, Incarnation: fmt.Sprint("run ", b.state.Index), TTL: time.Second})
	}
}

func (b *seatBed) close(node string) {
	b.Helper()
	b.do(raftfsm.CloseSession{Node: "id-" + node, Session: b.session(node)})
}

func (b *seatBed) session(node string) uint64 { return b.state.Sessions["id-"+node].ID }

// hold names the holder of a seat, as of one that was let go of.
func (b *seatBed) hold(seat, assignment string) {
	b.Helper()
	epoch := b.state.Seats[seat].Epoch
	b.do(raftfsm.Hold{Seat: seat, Assignment: assignment, IfEpoch: epoch, Released: epoch})
}

// seat pushes one of the seats that lamp claims.
func (b *seatBed) seat(name string, edit func(*raftfsm.Seat)) {
	b.Helper()
	s := raftfsm.Seat{Name: name, Scope: raftfsm.ScopeMesh}
	edit(&s)
	b.do(raftfsm.Push{Documents: raftfsm.Documents{Seats: []raftfsm.Seat{s}}})
}

func (b *seatBed) want(assignment string) {
	b.seat("lamp", func(s *raftfsm.Seat) { s.Want = assignment })
}

// manual makes the seat one that does not fail over; want may be "".
func (b *seatBed) manual(want string) {
	b.seat("lamp", func(s *raftfsm.Seat) { s.Want, s.Failover = want, raftfsm.FailoverManual })
}

func (b *seatBed) unhealthy(assignments ...string) {
	b.Helper()
	for _, a := range assignments {
		index := b.state.Index + 1
		h := raftfsm.Header{Node: b.state.Assignments[a].Node, Time: time.Unix(int64(index), 0).UTC(), ID: fmt.Sprint(index)}
		report := raftfsm.NodeReport{Processes: []raftfsm.ProcessReport{{Assignment: a, State: "backing-off", Class: "exit 1"}}}
		b.state.Apply(index, raftfsm.Entry{Header: h, Command: report})
		if b.state.Assignments[a].Report.Class == "" {
			b.Fatalf("the report of %s was not taken", a)
		}
	}
}

func (b *seatBed) facts() seatFacts {
	return seatFacts{
		state: b.state, self: "id-alpha",
		live: func(session uint64) bool {
			for id, s := range b.state.Sessions {
				if s.ID == session {
					return !b.silent[b.state.NodeName(id)]
				}
			}
			return false
		},
		leaving:  func(node string) bool { return b.leaving[b.state.NodeName(node)] },
		released: func(_ string, c raftfsm.Claim) bool { return b.released[c.Epoch] },
		over:     func(_ string, c raftfsm.Claim) bool { return b.over[c.Epoch] },
	}
}

// step writes down what is to be done for the seat lamp: "lamp-b", "lamp-b after
// let go" or "after let go, nobody" of an entry, "ask beta" of a question, "" of
// nothing.
func (b *seatBed) step() string {
	step, due := decideSeats(b.facts())["lamp"]
	switch {
	case !due:
		return ""
	case step.Release != nil && step.Hold != nil:
		b.Error("an entry and a question at once")
	case step.Release != nil:
		claim, former := raftfsm.Claim{Session: b.state.Seats["lamp"].Session, Epoch: b.state.Seats["lamp"].Epoch}, b.state.Former["lamp"]
		if *step.Release != claim && *step.Release != former {
			b.Errorf("asked is for %+v, and the claims are %+v and %+v", *step.Release, claim, former)
		}
		return "ask " + b.state.NodeName(step.Node)
	}
	if step.Hold.IfEpoch != b.state.Seats["lamp"].Epoch {
		b.Errorf("the entry is for epoch %d of %d", step.Hold.IfEpoch, b.state.Seats["lamp"].Epoch)
	}
	text := step.Hold.Assignment
	if step.Hold.Released != 0 {
		text += " after its release"
	}
	b.do(*step.Hold) // what is decided must not be refused
	return text
}

// held is the mesh with leases of all, whose seat lamp-b holds.
func held(t testing.TB) *seatBed {
	b := newSeatBed(t)
	b.sessions("alpha", "beta", "gamma", "delta")
	b.hold("lamp", "lamp-b")
	return b
}

func (b *seatBed) epoch() uint64 { return b.state.Seats["lamp"].Epoch }

func TestDecideSeats(t *testing.T) {
	for _, c := range []struct {
		name string
		mesh func(t testing.TB) *seatBed
		edit func(b *seatBed)
		want string
	}{
		// Nobody holds it.
		{"no lease anywhere", newSeatBed, func(*seatBed) {}, ""},
		{"one node has a lease, the leader", newSeatBed, func(b *seatBed) { b.sessions("alpha") }, "lamp-a"},
		{"all have: not the leader's, the first by name", newSeatBed, func(b *seatBed) { b.sessions("delta", "gamma", "beta", "alpha") }, "lamp-b"},
		{"one that has not renewed lately is passed over", newSeatBed, func(b *seatBed) { b.sessions("alpha", "beta", "gamma"); b.silent["beta"] = true }, "lamp-c"},
		{"so is one that is unhealthy", newSeatBed, func(b *seatBed) { b.sessions("alpha", "beta", "gamma"); b.unhealthy("lamp-b") }, "lamp-c"},
		{"the leader's before an unhealthy one", newSeatBed, func(b *seatBed) { b.sessions("alpha", "beta"); b.unhealthy("lamp-b") }, "lamp-a"},
		{"where all are unhealthy, not the leader's", newSeatBed, func(b *seatBed) { b.sessions("alpha", "beta"); b.unhealthy("lamp-a", "lamp-b") }, "lamp-b"},
		{"fewest seats", newSeatBed, func(b *seatBed) {
			b.sessions("alpha", "beta", "gamma", "delta")
			for _, s := range []string{"torch", "lantern"} {
				b.seat(s, func(*raftfsm.Seat) {})
			}
			b.hold("torch", "lamp-b")
			b.hold("lantern", "lamp-c")
		}, "lamp-d"},
		{"a node that leaves is passed over", newSeatBed, func(b *seatBed) { b.sessions("alpha", "beta"); b.leaving["beta"] = true }, "lamp-a"},
		{"wanted", newSeatBed, func(b *seatBed) { b.sessions("alpha", "beta", "gamma"); b.want("lamp-c") }, "lamp-c"},
		{"wanted, without a lease", newSeatBed, func(b *seatBed) { b.sessions("alpha", "beta"); b.want("lamp-c") }, "lamp-b"},
		{"wanted, and does not claim it", newSeatBed, func(b *seatBed) {
			b.sessions("alpha", "beta")
			b.do(raftfsm.Push{Pending: true, Documents: raftfsm.Documents{Seats: []raftfsm.Seat{{Name: "lamp", Scope: raftfsm.ScopeMesh, Want: "lamp-x"}}}})
		}, "lamp-b"},
		{"manual: any, the first time", newSeatBed, func(b *seatBed) { b.sessions("alpha", "beta"); b.manual("") }, "lamp-b"},
		{"manual, wanted, without a lease: named, and dark", newSeatBed, func(b *seatBed) { b.sessions("alpha", "beta"); b.manual("lamp-c") }, "lamp-c"},
		{"manual, wanted, named and dark", newSeatBed, func(b *seatBed) { b.manual("lamp-c"); b.hold("lamp", "lamp-c") }, ""},
		{"a node seat", newSeatBed, func(b *seatBed) {
			b.sessions("alpha", "beta")
			b.seat("lamp", func(s *raftfsm.Seat) { s.Scope = raftfsm.ScopeNode })
		}, ""},

		// Its holder may answer.
		{"held", held, func(*seatBed) {}, ""},
		{"held by one that has not renewed lately: its lease may last", held, func(b *seatBed) { b.silent["beta"] = true }, ""},
		{"held by one that is unhealthy: it stays", held, func(b *seatBed) { b.unhealthy("lamp-b") }, ""},
		{"held by the leader: it stays", held, func(b *seatBed) { b.hold("lamp", "lamp-a") }, ""},
		{"another is wanted", held, func(b *seatBed) { b.want("lamp-c") }, "ask beta"},
		{"and the holder has let go", held, func(b *seatBed) { b.want("lamp-c"); b.released[b.epoch()] = true }, "lamp-c after its release"},
		{"and the holder's claim is over", held, func(b *seatBed) { b.want("lamp-c"); b.over[b.epoch()] = true }, "lamp-c after its release"},
		{"another is wanted, that has not renewed lately", held, func(b *seatBed) { b.want("lamp-c"); b.silent["gamma"] = true }, ""},
		{"another is wanted, without a lease", held, func(b *seatBed) { b.close("gamma"); b.want("lamp-c") }, ""},
		{"manual, and another is wanted, without a lease", held, func(b *seatBed) { b.close("gamma"); b.manual("lamp-c") }, ""},
		{"manual, and another is wanted", held, func(b *seatBed) { b.manual("lamp-c") }, "ask beta"},
		{"the holder leaves", held, func(b *seatBed) { b.leaving["beta"] = true }, "ask beta"},
		{"the holder leaves, and nobody else has a lease", held, func(b *seatBed) {
			b.leaving["beta"] = true
			for _, n := range []string{"alpha", "gamma", "delta"} {
				b.close(n)
			}
		}, ""},
		{"manual, and the holder leaves: it stays with it", held, func(b *seatBed) { b.manual(""); b.leaving["beta"] = true }, ""},
		{"the holder let go of it, and nobody else is to have it", held, func(b *seatBed) { b.released[b.epoch()] = true }, "lamp-b after its release"},
		{"its claim is over, and nobody else is to have it", held, func(b *seatBed) { b.over[b.epoch()] = true }, ""},

		// It was taken from its holder, which may answer yet.
		{"vacated", held, func(b *seatBed) { b.vacate() }, "ask beta"},
		{"vacated, and let go of", held, func(b *seatBed) { b.released[b.epoch()] = true; b.vacate() }, "lamp-b after its release"},
		{"vacated, and over", held, func(b *seatBed) { b.over[b.epoch()] = true; b.vacate() }, "lamp-b after its release"},
		{"vacated, and another is wanted", held, func(b *seatBed) { b.over[b.epoch()] = true; b.vacate(); b.want("lamp-d") }, "lamp-d after its release"},
		{"vacated, and nobody could have it", held, func(b *seatBed) {
			b.vacate()
			for _, n := range []string{"alpha", "beta", "gamma", "delta"} {
				b.silent[n] = true
			}
		}, ""},
		{"vacated, and the session is closed", held, func(b *seatBed) { b.vacate(); b.close("beta") }, "lamp-c"},

		// Its holder's lease has ended.
		{"lost", held, func(b *seatBed) { b.close("beta") }, "lamp-c"},
		{"lost, and nobody else has renewed lately", held, func(b *seatBed) {
			b.close("beta")
			for _, n := range []string{"alpha", "gamma", "delta"} {
				b.silent[n] = true
			}
		}, ""},
		{"lost, and back: it has the seat by its session", held, func(b *seatBed) { b.close("beta"); b.sessions("beta") }, ""},
		{"lost, and another is wanted", held, func(b *seatBed) { b.close("beta"); b.want("lamp-d") }, "lamp-d"},
		{"manual, and its holder is gone for good: dark", held, func(b *seatBed) {
			b.manual("lamp-b")
			b.do(raftfsm.Remove{What: raftfsm.WhatAssignment, Name: "lamp-b"})
			b.close("beta")
		}, ""},
		{"manual, its holder gone for good, and moved", held, func(b *seatBed) {
			b.manual("")
			b.do(raftfsm.Remove{What: raftfsm.WhatAssignment, Name: "lamp-b"})
			b.close("beta")
			b.do(raftfsm.MoveSeat{Seat: "lamp", Node: "gamma"})
		}, "lamp-c"},
		{"manual, and lost: dark", held, func(b *seatBed) { b.manual(""); b.close("beta") }, ""},
		{"manual, lost, and moved", held, func(b *seatBed) {
			b.manual("lamp-b")
			b.close("beta")
			b.do(raftfsm.MoveSeat{Seat: "lamp", Node: "gamma"})
		}, "lamp-c"},
		{"manual, lost, moved, and the other is lost as well", held, func(b *seatBed) {
			b.manual("lamp-b")
			b.close("beta")
			b.do(raftfsm.MoveSeat{Seat: "lamp", Node: "gamma"})
			b.close("gamma")
		}, "lamp-c"}, // named and dark, so that it is answered when that is back
	} {
		t.Run(c.name, func(t *testing.T) {
			b := c.mesh(t)
			c.edit(b)
			if got := b.step(); got != c.want {
				t.Errorf("the step is %q, want %q", got, c.want)
			}
		})
	}
}

// vacate takes the seat from its holder, which has not let go of it.
func (b *seatBed) vacate() {
	b.Helper()
	b.do(raftfsm.Hold{Seat: "lamp", IfEpoch: b.epoch()})
}

// TestDecideSeatsComesToAnEnd: every chain of steps ends, and with the seat where it
// should be.
func TestDecideSeatsComesToAnEnd(t *testing.T) {
	for name, c := range map[string]struct {
		edit func(b *seatBed)
		want string
	}{
		"moved":          {func(b *seatBed) { b.want("lamp-d") }, "ask beta, lamp-d after its release"},
		"leaving":        {func(b *seatBed) { b.leaving["beta"] = true }, "ask beta, lamp-c after its release"},
		"vacated":        {func(b *seatBed) { b.vacate() }, "ask beta, lamp-b after its release"},
		"lost":           {func(b *seatBed) { b.close("beta") }, "lamp-c"},
		"manual, dark":   {func(b *seatBed) { b.manual(""); b.close("beta") }, ""},
		"let go of once": {func(b *seatBed) { b.released[b.epoch()] = true }, "lamp-b after its release"},
	} {
		b := held(t)
		c.edit(b)
		var steps []string
		for range 5 {
			step := b.step()
			if step == "" {
				break
			}
			steps = append(steps, step)
			if strings.HasPrefix(step, "ask ") {
				now, former := b.state.Seats["lamp"], b.state.Former["lamp"]
				b.released[now.Epoch], b.released[former.Epoch] = now.Session != 0, true
			}
		}
		if got := strings.Join(steps, ", "); got != c.want {
			t.Errorf("%s: the steps are %q, want %q", name, got, c.want)
		}
	}
}

// TestSeatsThatAreNewAreSpread: they are all decided by one look.
func TestSeatsThatAreNewAreSpread(t *testing.T) {
	b := newSeatBed(t)
	b.sessions("alpha", "beta", "gamma", "delta")
	for _, s := range []string{"torch", "lantern"} {
		b.seat(s, func(*raftfsm.Seat) {})
	}
	var got []string
	steps := decideSeats(b.facts())
	for _, seat := range slices.Sorted(maps.Keys(steps)) {
		got = append(got, seat+":"+steps[seat].Hold.Assignment)
	}
	if text := strings.Join(got, " "); text != "lamp:lamp-b lantern:lamp-c torch:lamp-d" {
		t.Errorf("the holders are %s", text)
	}
}

// TestDecideMoves: where the seats of a lease go that has ended.
func TestDecideMoves(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(b *seatBed)
		want string
	}{
		{"each to the fittest, by what the one before makes of it", func(b *seatBed) {}, "lamp:lamp-c lantern:lamp-d torch:lamp-c"},
		{"not to the leader's, while another is fit", func(b *seatBed) { b.close("delta"); b.silent["gamma"] = true }, "lamp:lamp-a lantern:lamp-a torch:lamp-a"},
		{"manual ones go nowhere", func(b *seatBed) { b.manual("") }, "lantern:lamp-c torch:lamp-d"},
		{"to the wanted one", func(b *seatBed) { b.want("lamp-d") }, "lamp:lamp-d lantern:lamp-c torch:lamp-c"},
		{"to another, where the wanted one is not fit", func(b *seatBed) { b.want("lamp-d"); b.silent["delta"] = true }, "lamp:lamp-c lantern:lamp-c torch:lamp-c"},
		{"to another, where the wanted one is lost", func(b *seatBed) { b.want("lamp-b") }, "lamp:lamp-c lantern:lamp-d torch:lamp-c"},
		{"nowhere, where nobody is fit", func(b *seatBed) { b.silent = map[string]bool{"alpha": true, "gamma": true, "delta": true} }, ""},
		{"not to one on the same node", func(b *seatBed) {
			b.do(raftfsm.Push{Documents: raftfsm.Documents{Assigns: []raftfsm.Assign{{Module: "lamp", Nodes: []string{"beta"}, As: "lamp-0"}}}})
			b.silent = map[string]bool{"alpha": true, "gamma": true, "delta": true}
		}, ""},
		{"only what the session holds", func(b *seatBed) { b.hold("torch", "lamp-d") }, "lamp:lamp-c lantern:lamp-c"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := held(t)
			for _, s := range []string{"torch", "lantern"} {
				b.seat(s, func(*raftfsm.Seat) {})
				b.hold(s, "lamp-b")
			}
			c.edit(b)
			moves := b.facts().moves(b.session("beta"))
			var got []string
			for _, seat := range slices.Sorted(maps.Keys(moves)) {
				got = append(got, seat+":"+moves[seat])
			}
			if text := strings.Join(got, " "); text != c.want {
				t.Errorf("the moves are %q, want %q", text, c.want)
			}
			b.do(raftfsm.CloseSession{Node: "id-beta", Session: b.session("beta"), Moves: moves})
		})
	}
}
