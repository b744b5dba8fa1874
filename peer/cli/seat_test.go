package cli

import (
	"slices"
	"strings"
	"testing"
	"time"

	"meshd/raftfsm"
)

// movable is a mesh with a clock on each of its machines, which fails over, and a
// ledger on alpha and beta, which does not. All but gamma have a lease, and alpha
// holds both seats.
func movable(t *testing.T) *mesh {
	m := newMesh(t)
	m.push(t, `seat: clock
verbs: [now]
---
seat: ledger
verbs: [read]
failover: manual
holder: ledger@alpha
---
seat: disk
scope: node
verbs: [usage]
---
module: clock
run: {external: true}
claims: [clock, disk]
---
module: ledger
run: {external: true}
claims: [ledger]
---
assign: clock
nodes: [alpha, beta, gamma]
---
assign: ledger
nodes: [alpha, beta]
`)
	m.lease(t, "alpha")
	m.lease(t, "beta")
	m.do(t, "alpha", raftfsm.Hold{Seat: "clock", Assignment: "clock@alpha"})
	m.do(t, "alpha", raftfsm.Hold{Seat: "ledger", Assignment: "ledger@alpha"})
	return m
}

// handedOver is the leader's part in a move.
func handedOver(seat string) func(*mesh) error {
	return func(m *mesh) error {
		s := m.state.Seats[seat]
		_, err := m.commit("alpha", raftfsm.Hold{Seat: seat, Assignment: s.Want, IfEpoch: s.Epoch, Released: s.Epoch})
		return err
	}
}

// lost ends the lease of a node that was killed.
func (m *mesh) lost(t *testing.T, node string) {
	t.Helper()
	m.over.Alive[node] = false
	m.do(t, "beta", raftfsm.CloseSession{Node: "id-" + node, Session: m.state.Sessions["id-"+node].ID})
}

func TestSeatMove(t *testing.T) {
	m := movable(t)
	m.script = []func(*mesh) error{handedOver("clock")}
	m.golden(t, "seat-move", 0, "seat", "move", "clock", "beta")
	m.golden(t, "seat-move-again", 0, "seat", "move", "clock", "beta")
	m.golden(t, "seat-move-waits", 2, "seat", "move", "--timeout", "50ms", "clock", "alpha/clock@alpha")
	m.golden(t, "seat-move-detached", 0, "seat", "move", "--detach", "clock", "beta")
	for name, args := range map[string][]string{
		"seat-move-unknown": {"clok", "beta"}, "seat-move-node-seat": {"disk", "beta"}, "seat-move-no-claimant": {"ledger", "gamma"},
		"seat-move-no-lease": {"clock", "gamma"}, "seat-move-no-node": {"clock", "gama"},
	} {
		t.Run(name, func(t *testing.T) { m.golden(t, name, 1, append([]string{"seat", "move"}, args...)...) })
	}
}

// TestAManualSeatThatIsDark: it says what brings it up elsewhere, and that says whose
// data it answers from.
func TestAManualSeatThatIsDark(t *testing.T) {
	m := movable(t)
	m.over.Self = "beta"
	m.lost(t, "alpha")
	m.golden(t, "seats-lost", 0, "seats")
	m.golden(t, "seats-name-lost", 0, "seats", "ledger")
	m.golden(t, "status-dark", 2, "status", "ledger")
	m.script = []func(*mesh) error{handedOver("ledger")}
	m.golden(t, "seat-move-manual", 0, "seat", "move", "ledger", "beta")
}

func TestHowSeatsAreAnswered(t *testing.T) {
	m := movable(t)
	for _, c := range []struct {
		seat, state, words string
		edit               func()
	}{
		{"clock", "answered", "", func() {}},
		{"disk", "per node", "", func() {}},
		{"clock", "away", "alpha does not answer the others; unless it renews its lease", func() { m.over.Self, m.over.Alive["alpha"] = "beta", false }},
		{"clock", "dark", "another claimant takes over once its node has a lease", func() { m.lost(t, "alpha") }},
		{"ledger", "dark", "failover is manual: meshd seat move ledger NODE", func() {}},
		{"clock", "answered", "", func() {
			m.do(t, "beta", raftfsm.Hold{Seat: "clock", Assignment: "clock@beta", IfEpoch: m.state.Seats["clock"].Epoch})
		}},
		{"clock", "unknown", "clock@beta on beta was the last that this node heard of, and no leader vouches for it here", func() { m.over.Quorum = false }},
	} {
		c.edit()
		if state, why := seatState(m.look(), m.state.Seats[c.seat]); state != c.state || !strings.Contains(why, c.words) || (c.words == "") != (why == "") {
			t.Errorf("seat %s is %s: %s; want %s: %s", c.seat, state, why, c.state, c.words)
		}
	}
}

// A manual seat without its holder's machine is lost, another is on its way, for a
// minute.
func TestADarkSeatIsUnready(t *testing.T) {
	m := movable(t)
	m.over.Self = "beta"
	m.lost(t, "alpha")
	names := func(all []problem) (out []string) {
		for _, p := range all {
			if p.What == "seat" {
				out = append(out, p.Name)
			}
		}
		return out
	}
	unready, coming := problems(m.look())
	if !slices.Equal(names(unready), []string{"ledger"}) || !slices.Equal(names(coming), []string{"clock"}) {
		t.Errorf("un-ready are %v, on their way %v", names(unready), names(coming))
	}
	m.later = 2 * time.Minute
	if unready, _ := problems(m.look()); !slices.Equal(names(unready), []string{"clock", "ledger"}) {
		t.Errorf("two minutes later un-ready are %v", names(unready))
	}
}

func TestCompletionOfAMove(t *testing.T) {
	m := movable(t)
	for _, c := range []struct{ args, want string }{
		{"seat ", "move"}, {"seat move ", "clock ledger"}, {"seat move clock ", "alpha beta gamma"}, {"seat move ledger b", "beta"}, {"seat move ledger beta ", ""},
	} {
		got := m.command(t, append([]string{"__complete"}, strings.Split(c.args, " ")...)...)
		var words []string
		for line := range strings.Lines(got.out) {
			if line[0] != ':' {
				word, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
				words = append(words, word)
			}
		}
		if strings.Join(words, " ") != c.want {
			t.Errorf("meshd %s is completed with %q, want %q", c.args, words, c.want)
		}
	}
}
