package raftfsm

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"
)

// open opens a session of the node, of a run of meshd that none had before.
func (b *bed) open(node string) uint64 {
	b.Helper()
	b.ok("alpha", OpenSession{id(node), fmt.Sprint("run-", len(b.log)), time.Second})
	return b.Index
}

// close closes the node's open session; moves are pairs of seat and assignment.
func (b *bed) close(node string, moves ...string) {
	b.Helper()
	c := CloseSession{Node: id(node), Session: b.Sessions[id(node)].ID, Moves: map[string]string{}}
	for i := 0; i < len(moves); i += 2 {
		c.Moves[moves[i]] = moves[i+1]
	}
	b.ok("alpha", c)
}

// hold names a holder; released is the epoch that was let go of, 0 for none.
func hold(b *bed, seat, assignment string, released uint64) Hold {
	return Hold{seat, assignment, b.Seats[seat].Epoch, released}
}

// seat checks who holds it under which session and since which entry, and who
// may still answer from before.
func (b *bed) seat(name, holder string, session, epoch uint64, former Claim) {
	b.Helper()
	s := b.Seats[name]
	if s.Holder != holder || s.Session != session || s.Epoch != epoch || b.Former[name] != former {
		b.Fatalf("seat %s is held by %q under session %d, epoch %d, after %+v; want %q, %d, %d, %+v", name, s.Holder, s.Session, s.Epoch, b.Former[name], holder, session, epoch, former)
	}
}

// dark checks the sentence that every node tells its users.
func (b *bed) dark(seat, sentence string) {
	b.Helper()
	for node := range b.Nodes {
		if got := b.Desired(node).Holders[seat].Dark; got != sentence {
			b.Fatalf("seat %s is dark because\n  %s\nwant\n  %s", seat, got, sentence)
		}
	}
}

// lamps is a mesh of alpha, beta and gamma with a module lamp on each, which
// claims the seat lamp, and sessions of alpha and beta; lamp-a holds it.
func lamps(t *testing.T) (b *bed, alpha, beta, epoch uint64) {
	b = newBed(t, "alpha", "beta", "gamma")
	b.ok("alpha", push(Module{Name: "lamp", Claims: []string{"lamp"}}, Seat{Name: "lamp", Scope: ScopeMesh, Verbs: []string{"on"}},
		on("lamp", "alpha", as("lamp-a")), on("lamp", "beta", as("lamp-b")), on("lamp", "gamma", as("lamp-c")), on("lamp", "alpha", as("lamp-z"))))
	alpha, beta = b.open("alpha"), b.open("beta")
	b.ok("alpha", hold(b, "lamp", "lamp-a", 0))
	return b, alpha, beta, b.Index
}

func TestASessionIsOfAMember(t *testing.T) {
	b := newBed(t, "alpha", "beta")
	for _, c := range []struct {
		open           OpenSession
		code, sentence string
	}{
		{OpenSession{"id-gone", "x", time.Second}, "not-a-member", `node "id-gone" is no member, and only members have leases; join it to the mesh: meshd token, then meshd join`},
		{OpenSession{id("beta"), "", time.Second}, "bad-session", "a session is of one run of meshd, which names itself with 1 to 128 bytes, and this one of node beta has 0; start meshd on it again"},
		{OpenSession{id("beta"), strings.Repeat("x", 129), time.Second}, "bad-session", "a session is of one run of meshd, which names itself with 1 to 128 bytes, and this one of node beta has 129; start meshd on it again"},
		{OpenSession{id("beta"), "x", MinTTL - 1}, "bad-session", "a lease of 499.999999ms for node beta is out of bounds: one lasts 500ms to 1m0s; choose a time between them"},
		{OpenSession{id("beta"), "x", MaxTTL + 1}, "bad-session", "a lease of 1m0.000000001s for node beta is out of bounds: one lasts 500ms to 1m0s; choose a time between them"},
	} {
		b.refused("alpha", c.open, c.code, c.sentence)
	}
	b.ok("alpha", OpenSession{id("beta"), "one", MinTTL})
	first := b.Index
	want := Session{ID: first, Incarnation: "one", TTL: MinTTL, Since: epochStart.Add(time.Duration(first) * time.Second)}
	if got := b.Sessions[id("beta")]; !reflect.DeepEqual(got, want) || !b.happened(fmt.Sprintf("node beta has a lease, session %d: it answers no seat yet", first)) {
		t.Errorf("the session is %+v, want %+v", got, want)
	}
	b.ok("alpha", OpenSession{id("beta"), "one", time.Minute})
	if got := b.Sessions[id("beta")]; !reflect.DeepEqual(got, want) {
		t.Errorf("asking again made the session %+v of %+v", got, want)
	}
	b.refused("alpha", CloseSession{Node: id("beta"), Session: first + 1}, "stale", fmt.Sprintf("session %d of node beta is not open: it was closed or replaced meanwhile; look at its present session and decide again", first+1))
	b.refused("alpha", CloseSession{Node: id("alpha")}, "stale", "session 0 of node alpha is not open: it was closed or replaced meanwhile; look at its present session and decide again")
	b.ok("alpha", CloseSession{Node: id("beta"), Session: first})
	if len(b.Sessions) != 0 || !b.happened(fmt.Sprintf("the lease of node beta has ended, session %d", first)) {
		t.Errorf("left are %v", b.Sessions)
	}
	b.ok("alpha", OpenSession{id("beta"), "one", MinTTL}) // the same run may renew again, as another session
	if got := b.Sessions[id("beta")].ID; got != b.Index {
		t.Errorf("the session of a run that came back is %d", got)
	}
}

// A message of a dead process that is read late must not end the session of the
// process that runs: what that holds would be given away as it answers.
func TestASupersededRunDoesNotComeBack(t *testing.T) {
	b := newBed(t, "alpha", "beta")
	const sentence = "an older run of meshd asks for the lease of node beta, and a newer one has it; if both run, one has a copy of the data directory: stop it, delete that directory and join it as a new node"
	for i := range maxSuperseded + 2 {
		b.ok("alpha", OpenSession{id("beta"), fmt.Sprint("run", i), time.Second})
		for before := max(0, i-maxSuperseded); before < i; before++ {
			b.refused("alpha", OpenSession{id("beta"), fmt.Sprint("run", before), time.Second}, "superseded", sentence)
		}
	}
	if n := len(b.Sessions[id("beta")].Superseded); n != maxSuperseded {
		t.Errorf("%d older runs are remembered", n)
	}
}

func TestARestartKeepsItsSeatsUnderANewEpoch(t *testing.T) {
	b, alpha, _, epoch := lamps(t)
	b.seat("lamp", "lamp-a", alpha, epoch, Claim{})
	again := b.open("alpha")
	b.seat("lamp", "lamp-a", again, again, Claim{})
	b.dark("lamp", "")
	if got := fmt.Sprint(b.Granted(again), b.Granted(alpha), b.Granted(0)); got != fmt.Sprintf("map[lamp:%d] map[] map[]", again) {
		t.Errorf("granted is %s", got)
	}
	if !b.happened(fmt.Sprintf("node alpha has a lease, session %d: it answers lamp", again)) {
		t.Error("no event tells of the session")
	}
}

// A node that is known to be dead has nothing that keeps a seat from others.
func TestARestartSettlesWhatTheOlderProcessHad(t *testing.T) {
	b, alpha, beta, epoch := lamps(t)
	b.ok("alpha", hold(b, "lamp", "", 0))
	b.seat("lamp", "", 0, b.Index, Claim{alpha, epoch})
	b.open("alpha")
	b.seat("lamp", "", 0, b.Seats["lamp"].Epoch, Claim{})
	b.ok("alpha", hold(b, "lamp", "lamp-b", 0))
	b.seat("lamp", "lamp-b", beta, b.Index, Claim{})
}

func TestAHolderThatHasNotLetGoKeepsTheSeat(t *testing.T) {
	const sentence = "seat lamp cannot go to %s yet: node alpha may still answer it, and has not let go of epoch %d; it can be named once that node has let go or its lease has ended; meshd seats shows when"
	b, alpha, beta, epoch := lamps(t)
	for _, released := range []uint64{0, epoch - 1, epoch + 1} {
		b.refused("alpha", hold(b, "lamp", "lamp-b", released), "still-held", fmt.Sprintf(sentence, "lamp-b", epoch))
	}
	b.ok("alpha", hold(b, "lamp", "lamp-z", 0)) // on the same node, which answers a seat once
	epoch = b.Index
	b.seat("lamp", "lamp-z", alpha, epoch, Claim{})
	b.ok("alpha", hold(b, "lamp", "lamp-b", epoch))
	b.seat("lamp", "lamp-b", beta, b.Index, Claim{})

	b, alpha, beta, epoch = lamps(t)
	b.ok("alpha", hold(b, "lamp", "", 0))
	b.dark("lamp", "its former holder may still answer until its lease has ended: node alpha has not let go of it")
	b.refused("alpha", hold(b, "lamp", "lamp-c", b.Seats["lamp"].Epoch), "still-held", fmt.Sprintf(sentence, "lamp-c", epoch))
	b.ok("alpha", hold(b, "lamp", "", b.Seats["lamp"].Epoch)) // vacated again: it is still alpha's
	b.seat("lamp", "", 0, b.Index, Claim{alpha, epoch})
	b.ok("alpha", hold(b, "lamp", "lamp-z", 0))
	b.seat("lamp", "lamp-z", alpha, b.Index, Claim{})
	b.ok("alpha", hold(b, "lamp", "", 0))
	b.ok("alpha", hold(b, "lamp", "lamp-c", b.Former["lamp"].Epoch))
	b.seat("lamp", "lamp-c", 0, b.Index, Claim{})
	b.dark("lamp", "gamma/lamp-c holds it, whose node gamma has not renewed its lease since "+b.Seats["lamp"].Since.Format(time.RFC3339)+"; another claimant takes over once its node has a lease")
	gamma := b.open("gamma")
	b.seat("lamp", "lamp-c", gamma, gamma, Claim{})
	b.ok("alpha", hold(b, "lamp", "", gamma)) // let go of as it is vacated
	b.seat("lamp", "", 0, b.Index, Claim{})
	b.ok("alpha", hold(b, "lamp", "lamp-b", 0))
	b.seat("lamp", "lamp-b", beta, b.Index, Claim{})
}

// Whatever takes a seat from its holder, the node may answer for as long as its
// lease lasts, and no other node is named before that has ended.
func TestWhateverTakesASeatKeepsTheClaim(t *testing.T) {
	for name, change := range map[string]Command{
		"its assignment moved":      push(on("lamp", "gamma", as("lamp-a"))),
		"its assignment is removed": Remove{WhatAssignment, "lamp-a"},
		"its module does not claim": push(Module{Name: "lamp"}),
		"its module is removed":     Remove{WhatModule, "lamp"},
		"the seat is removed":       Remove{WhatSeat, "lamp"},
		"the seat is a node's":      push(Seat{Name: "lamp", Scope: ScopeNode}),
		"its node is removed":       RemoveNode{},
	} {
		b, alpha, beta, epoch := lamps(t)
		if _, gone := change.(RemoveNode); gone {
			change = removal(b.State, "alpha")
		}
		b.ok("beta", change)
		who := "node alpha"
		if !has(b.Nodes, id("alpha")) {
			who = "a node that was removed"
		}
		if got := b.Former["lamp"]; got != (Claim{alpha, epoch}) || b.Seats["lamp"].Session != 0 || len(b.Granted(alpha)) != 0 {
			t.Errorf("%s: the claim is %+v, the seat %+v", name, got, b.Seats["lamp"])
		}
		b.ok("beta", push(Module{Name: "lamp", Claims: []string{"lamp"}}, Seat{Name: "lamp", Scope: ScopeMesh, Verbs: []string{"on"}}, on("lamp", "beta", as("lamp-b"))))
		b.dark("lamp", "its former holder may still answer until its lease has ended: "+who+" has not let go of it")
		b.refused("beta", hold(b, "lamp", "lamp-b", 0), "still-held",
			fmt.Sprintf("seat lamp cannot go to lamp-b yet: %s may still answer it, and has not let go of epoch %d; it can be named once that node has let go or its lease has ended; meshd seats shows when", who, epoch))
		b.ok("beta", CloseSession{Node: id("alpha"), Session: alpha})
		if len(b.Former) != 0 || has(b.Sessions, id("alpha")) {
			t.Errorf("%s: after the lease has ended there are %v, %v", name, b.Former, b.Sessions)
		}
		b.ok("beta", hold(b, "lamp", "lamp-b", 0))
		b.seat("lamp", "lamp-b", beta, b.Index, Claim{})
	}
}

func TestAClaimOnARemovedSeatIsSettled(t *testing.T) {
	b, alpha, _, epoch := lamps(t)
	b.ok("alpha", Remove{WhatSeat, "lamp"})
	for _, h := range []Hold{{Seat: "lamp", Released: epoch + 1}, {Seat: "lamp"}, {Seat: "lamp", Assignment: "lamp-b", Released: epoch}} {
		b.refused("alpha", h, "no-seat", `there is no mesh seat "lamp"; meshd seats lists them`)
	}
	if b.Former["lamp"] != (Claim{alpha, epoch}) {
		t.Fatalf("claims are %v", b.Former)
	}
	b.ok("alpha", Hold{Seat: "lamp", Released: epoch})
	if len(b.Former) != 0 {
		t.Errorf("claims are %v", b.Former)
	}
}

func TestClosingASessionMovesItsSeats(t *testing.T) {
	b, alpha, beta, _ := lamps(t)
	b.close("alpha", "lamp", "lamp-b", "none", "lamp-b")
	b.seat("lamp", "lamp-b", beta, b.Index, Claim{})
	if !b.happened(fmt.Sprintf("seat lamp is held by lamp-b on beta, epoch %d", b.Index)) || has(b.Sessions, id("alpha")) || len(b.Granted(alpha)) != 0 {
		t.Errorf("after its lease has ended alpha has %v, %v", b.Sessions, b.Granted(alpha))
	}
	b.open("alpha")
	b.seat("lamp", "lamp-b", beta, b.Seats["lamp"].Epoch, Claim{})
}

func TestClosingASessionDarkensWhatCannotMove(t *testing.T) {
	for _, c := range []struct{ name, to, why string }{
		{"nobody is named", "", "nobody was named to take over"},
		{"it does not claim", "none", "none, which was to take over, does not claim it any more"},
		{"its node has no session", "lamp-c", "lamp-c, which was to take over, has no lease on its node gamma"},
		{"it is on the lost node", "lamp-z", "lamp-z, which was to take over, has no lease on its node alpha"},
	} {
		b, _, _, epoch := lamps(t)
		b.close("alpha", "lamp", c.to)
		b.seat("lamp", "lamp-a", 0, epoch, Claim{})
		if !b.happened("seat lamp is dark: the lease of node alpha, where lamp-a holds it, has ended; " + c.why) {
			t.Errorf("%s: the last event is %q", c.name, b.Events[len(b.Events)-1].Text)
		}
		b.dark("lamp", "alpha/lamp-a holds it, whose node alpha has not renewed its lease since "+epochStart.Add(time.Duration(b.Index)*time.Second).Format(time.RFC3339)+"; another claimant takes over once its node has a lease")
		if got := b.Granted(0); len(got) != 0 {
			t.Errorf("%s: no session grants %v", c.name, got)
		}
		if d := b.Desired(id("alpha")); len(d.Seats) != 1 || d.Seats[0].Epoch != epoch {
			t.Errorf("%s: alpha is to serve %+v", c.name, d.Seats)
		}
		again := b.open("alpha")
		b.seat("lamp", "lamp-a", again, again, Claim{})
	}
}

func TestAManualSeatGoesDark(t *testing.T) {
	b := story(t)
	b.ok("alpha", push(Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind, Verbs: []string{"query"}, Want: "pg-main"}))
	session := b.open("alpha")
	b.open("beta")
	b.dark("store", "no holder is named yet; pg-apps, pg-main could be")
	b.ok("alpha", hold(b, "store", "pg-main", 0))
	epoch := b.Index
	b.refused("alpha", CloseSession{id("alpha"), session, map[string]string{"store": "pg-apps"}}, "no-failover",
		`seat store cannot move to "pg-apps" by itself: its failover is manual; leave it out, and it goes dark until somebody names its holder`)
	b.close("alpha")
	b.seat("store", "pg-main", 0, epoch, Claim{})
	b.dark("store", "alpha/pg-main holds it, whose node alpha has not renewed its lease since "+b.Seats["store"].Since.Format(time.RFC3339)+"; failover is manual: meshd seat move store NODE")
	if !b.happened("seat store is dark: the lease of node alpha, where pg-main holds it, has ended; failover is manual") {
		t.Errorf("the last event is %q", b.Events[len(b.Events)-1].Text)
	}
	b.ok("alpha", MoveSeat{Seat: "store", Node: "beta"}) // somebody names its holder
	b.ok("alpha", hold(b, "store", "pg-apps", 0))
	b.dark("store", "")
	b.ok("alpha", Remove{WhatAssignment, "pg-apps"})
	b.close("beta")
	b.dark("store", "its holder is gone, and failover is manual: meshd seat move store NODE; pg-main could hold it")
}

func TestASeatThatNobodyHoldsSaysWhatItWaitsFor(t *testing.T) {
	b := newBed(t, "alpha")
	b.ok("alpha", push(Seat{Name: "lamp", Scope: ScopeMesh, Verbs: []string{"on"}}))
	b.dark("lamp", "nobody claims it: add claims: [lamp] to a module and assign that")
	b.ok("alpha", pending(push(Seat{Name: "lamp", Scope: ScopeMesh, Verbs: []string{"on"}, Want: "lamp-a"})))
	b.dark("lamp", "it waits for its holder lamp-a, which does not claim it or is not there yet")
}

// A requirement that waits for a holder is bound by the entry that moves the
// seat, as by one that names it.
func TestAMoveByExpiryBindsWhatWaitedForIt(t *testing.T) {
	b := story(t)
	b.ok("alpha", push(Seat{Name: "store", Scope: ScopeMesh, Delivers: pgKind, Verbs: []string{"query"}, Failover: FailoverAuto}))
	b.ok("alpha", push(Module{Name: "idp", Claims: []string{"store"}}, on("idp", "gamma"), app("agent", Requirement{}), on("agent", "all")))
	b.open("gamma")
	b.open("beta")
	b.ok("alpha", hold(b, "store", "idp@gamma", 0)) // which provides nothing
	b.want("agent@gamma/db", "unbound")
	b.close("gamma", "store", "pg-apps")
	b.want("agent@gamma/db", "pg-apps (seat)")
}

func TestSessionsShowInNoPlan(t *testing.T) {
	b, _, _, _ := lamps(t)
	for _, c := range []Command{
		OpenSession{id("gamma"), "x", time.Second}, OpenSession{id("alpha"), "x", time.Second}, CloseSession{Node: id("alpha"), Session: b.Sessions[id("alpha")].ID},
	} {
		if plan, r := b.Preview(Header{Node: id("alpha")}, c); r != nil || len(plan.Changes)+len(plan.Nodes) != 0 {
			t.Errorf("%T is planned as %+v, %v", c, plan, r)
		}
	}
	first, _ := b.Preview(Header{Node: id("alpha")}, push(on("lamp", "gamma", as("lamp-n"))))
	b.close("alpha")
	then, _ := b.Preview(Header{Node: id("alpha")}, push(on("lamp", "gamma", as("lamp-n"))))
	if !reflect.DeepEqual(first, then) || fmt.Sprint(then.Nodes) != "[gamma]" {
		t.Errorf("a plan is %+v with a session and %+v without", first, then)
	}
}

// TestOneNodeMayAnswerASeat walks at random through all that names, moves and
// takes seats and opens and closes sessions, and asks after each step what the
// nodes may be doing: see watched.
func TestOneNodeMayAnswerASeat(t *testing.T) {
	reached := map[string]int{}
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 2))
		b, _, _, _ := lamps(t)
		seats := watched{}
		for range 150 {
			before := b.Clone()
			c := turn(r, b.State)
			rejection := b.apply("alpha", c)
			if rejection != nil {
				reached[rejection.Code]++
				continue
			}
			seats.after(t, b.State, c)
			for name, former := range before.Former {
				if now, kept := b.Former[name]; !kept || now != former {
					reached[fmt.Sprintf("settled by %T", c)]++
				}
			}
			for name, seat := range b.Seats {
				if _, closed := c.(CloseSession); closed && seat.Holder != before.Seats[name].Holder {
					reached["moved"]++
				} else if closed && seat.Session != before.Seats[name].Session {
					reached["darkened"]++
				}
			}
		}
	}
	for _, want := range []string{"still-held", "no-failover", "superseded", "moved", "darkened", "settled by raftfsm.Hold", "settled by raftfsm.CloseSession", "settled by raftfsm.OpenSession"} {
		if reached[want] < 20 {
			t.Errorf("%q was reached %d times: the walks do not reach far; %v", want, reached[want], reached)
		}
	}
}

// turn is one command of TestOneNodeMayAnswerASeat.
func turn(r *rand.Rand, s *State) Command {
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	seat, node, assignment := pick("lamp", "vault"), pick("alpha", "beta", "gamma"), pick("lamp-a", "lamp-b", "lamp-c", "lamp-z")
	switch r.IntN(40) {
	case 0:
		return Remove{WhatAssignment, assignment}
	case 1:
		return Remove{WhatSeat, seat}
	case 2:
		return push(Module{Name: "lamp", Claims: []string{pick("lamp", "vault")}})
	case 3:
		return push(Seat{Name: seat, Scope: ScopeNode})
	case 4:
		if node != "alpha" && r.IntN(5) == 0 {
			return removal(s, node)
		}
		fallthrough
	case 5:
		return Hold{Seat: seat, Released: s.claimed(seat).Epoch}
	case 6, 7, 8, 9:
		return push(on("lamp", node, as(assignment)))
	case 10, 11, 12, 13, 14, 15:
		return push(Module{Name: "lamp", Claims: []string{"lamp", "vault"}}, Seat{Name: "lamp", Scope: ScopeMesh}, Seat{Name: "vault", Scope: ScopeMesh, Failover: FailoverManual})
	case 16, 17, 18, 19, 20, 21, 22, 23, 24, 25:
		h := Hold{seat, pick(append(s.Claimants(seat), "")...), s.Seats[seat].Epoch, 0}
		if r.IntN(3) == 0 {
			h.Released = s.claimed(seat).Epoch
		}
		return h
	case 26, 27, 28, 29:
		holder := cmp.Or(s.Assignments[s.Seats["lamp"].Holder].Node, id(node))
		c := CloseSession{Node: holder, Session: s.Sessions[holder].ID}
		if r.IntN(4) > 0 {
			c.Moves = map[string]string{pick("lamp", "lamp", "lamp", "vault"): pick(append(s.Claimants("lamp"), assignment)...)}
		}
		return c
	}
	return OpenSession{id(node), fmt.Sprint("run-", r.IntN(30)), time.Second}
}

// session is a command about a session: mostly of what is there, so that the
// histories reach far.
func (s *source) session(state *State) Command {
	node := id(s.node())
	if s.n(3) > 0 {
		return OpenSession{node, s.of("a", "b", "c", "d", "e", "f", "g"), time.Duration(s.n(8)) * time.Second}
	}
	c := CloseSession{Node: node, Session: state.Sessions[node].ID}
	if s.yes() {
		c.Moves = map[string]string{s.seat(): s.assignment()}
	}
	return c
}

// sessionInvariants checks what the package comment says of sessions.
func sessionInvariants(s *State) error {
	nodeOf := map[uint64]string{}
	for node, open := range s.Sessions {
		if other, taken := nodeOf[open.ID]; taken || open.ID == 0 || open.ID > s.Index {
			return fmt.Errorf("session %d is of %s and of %s", open.ID, node, other)
		}
		nodeOf[open.ID] = node
		if _, removed := s.Removed[node]; !removed && !has(s.Nodes, node) || open.TTL < MinTTL || open.TTL > MaxTTL || len(open.Superseded) > maxSuperseded {
			return fmt.Errorf("session %+v of %s", open, node)
		}
	}
	for name, seat := range s.Seats {
		if open := s.Sessions[s.Assignments[seat.Holder].Node]; seat.Session != open.ID {
			return fmt.Errorf("seat %s of %q is under session %d, and its node has %d", name, seat.Holder, seat.Session, open.ID)
		}
		former, kept := s.Former[name]
		if kept && (seat.Session != 0 || seat.Holder != "" || seat.Epoch != 0 && seat.Epoch <= former.Epoch) {
			return fmt.Errorf("seat %+v is another's, %+v", seat, former)
		}
	}
	for name, former := range s.Former {
		if nodeOf[former.Session] == "" {
			return fmt.Errorf("seat %s is claimed by %+v, whose session is not open", name, former)
		}
	}
	return nil
}

// watched is what the world may see of the seats, told by nothing but grants and
// their ends: by seat, who may be answering it. It outlives the seat.
type watched map[string]*watchedSeat

type watchedSeat struct {
	answering map[Claim]bool
	under     map[uint64]uint64 // the session of each epoch
	last      uint64            // newest epoch
}

// after checks that whoever may be answering a seat after the command is on one
// node, and that epochs never go back.
func (w watched) after(t testing.TB, s *State, c Command) {
	t.Helper()
	open := map[uint64]bool{}
	for _, session := range s.Sessions {
		open[session.ID] = true
	}
	for name, seat := range w {
		for claim := range seat.answering {
			// A gate is shut for an epoch and for all before it.
			h, named := c.(Hold)
			if !open[claim.Session] || named && h.Seat == name && h.Released >= claim.Epoch {
				delete(seat.answering, claim)
			}
		}
	}
	for name, seat := range s.Seats {
		if w[name] == nil {
			w[name] = &watchedSeat{answering: map[Claim]bool{}, under: map[uint64]uint64{}}
		}
		if seat.Epoch != 0 && seat.Epoch < w[name].last {
			t.Fatalf("seat %s went back from epoch %d to %d", name, w[name].last, seat.Epoch)
		}
		w[name].last = max(w[name].last, seat.Epoch)
		if seat.Session != 0 {
			w[name].answering[Claim{seat.Session, seat.Epoch}] = true
			if first, known := w[name].under[seat.Epoch]; known && first != seat.Session {
				t.Fatalf("seat %s has epoch %d under session %d, and had it under %d", name, seat.Epoch, seat.Session, first)
			}
			w[name].under[seat.Epoch] = seat.Session
		}
		var session uint64
		for claim := range w[name].answering {
			if session != 0 && claim.Session != session {
				t.Fatalf("after %+v seat %s may be answered under %v: that is two nodes", c, name, w[name].answering)
			}
			session = claim.Session
		}
	}
}
