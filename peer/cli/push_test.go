package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// hopByHop is the world after a push of database and shop: all goes well.
func hopByHop() []func(*mesh) error {
	return append(append([]func(*mesh) error{provides(pgMain, true, "", "")}, inUse(shopDB)...), process("shop@gamma", "running", ""))
}

func TestPushFollowsHopByHop(t *testing.T) {
	m := newMesh(t)
	m.script = hopByHop()
	m.golden(t, "push-ready", 0, "push", file(t, "shop.yaml", database+separator+shop))
	if m.docs != 1 {
		t.Errorf("%d pushes committed, want one", m.docs)
	}
}

func TestPushOfTheSameChangesNothing(t *testing.T) {
	m := newMesh(t)
	m.push(t, database+separator+shop)
	m.play(t, hopByHop()...)
	m.golden(t, "push-same", 0, "push", file(t, "shop.yaml", database+separator+shop))
	if m.docs != 0 {
		t.Errorf("%d pushes committed, want none", m.docs)
	}
}

func TestPushOfTheSameStillChecksReadiness(t *testing.T) {
	m := newMesh(t)
	m.push(t, database+separator+shop)
	m.play(t, hopByHop()[:4]...)
	m.tries = []api.Try{
		{Key: "check shop@gamma/db 1", Step: "log in", Class: "unreachable", Text: "log in: dial tcp 10.0.0.1:5432: connection refused", Since: noon.Add(10 * time.Second), Tries: 7, Next: noon.Add(30 * time.Second)},
		{Key: "check other@gamma/db 1", Step: "log in", Class: "refused", Text: "not about the shop", Since: noon, Tries: 1, Next: noon},
	}
	m.unasked = errors.New("beta could not be asked: it does not answer")
	m.later = 10 * time.Second
	m.golden(t, "push-stuck", 2, "push", "--timeout", "50ms", file(t, "shop.yaml", database+separator+shop))
}

func TestPushThatIsHeldUp(t *testing.T) {
	m := newMesh(t)
	world := hopByHop()
	m.script = append([]func(*mesh) error{provides(pgMain, false, "connect", "unreachable")}, world[:2]...)
	m.script = append(m.script, held(shopDB, "provider", "create role", "denied"))
	m.script = append(m.script, world[2:5]...)
	m.script = append(m.script, process("shop@gamma", "backing-off", "exit 1"), process("shop@gamma", "running", ""))
	m.golden(t, "push-held-up", 0, "push", file(t, "shop.yaml", database+separator+shop))
}

// TestPushSaysWhatTheSettingsLack: the log has the class, and the provider's node
// has the words.
func TestPushSaysWhatTheSettingsLack(t *testing.T) {
	m := newMesh(t)
	m.script = []func(*mesh) error{provides(pgMain, false, "read provider settings", "bad-config")}
	m.tries = []api.Try{badSettings}
	m.golden(t, "push-bad-settings", 2, "push", "--timeout", "300ms", file(t, "db.yaml", database))
}

// badSettings is what a node says of a provider that has a wrong key.
var badSettings = api.Try{
	Key: pgMain + ": preflight", Step: "read provider settings", Class: "bad-config", Text: `read provider settings: pg-main has no key "tsl"; write tls`,
	Since: noon, Tries: 3, Next: noon.Add(time.Minute),
}

// TestPushOfWhatIsAway: every thing that is waited for has a state.
func TestPushOfWhatIsAway(t *testing.T) {
	m := newMesh(t)
	m.push(t, "module: app\nrun: {exec: [/bin/app]}\n---\nassign: app\nnode: gamma\n")
	m.over.Alive["gamma"] = false
	m.golden(t, "push-away", 2, "push", "--timeout", "50ms", file(t, "app.yaml", "module: app\nrun: {exec: [/bin/app]}\n"))
}

func TestPushUntilItsSeatIsHeld(t *testing.T) {
	m := newMesh(t)
	m.lease(t, "alpha")
	m.script = []func(*mesh) error{provides(pgMain, true, "", ""), func(m *mesh) error {
		_, err := m.commit("beta", raftfsm.Hold{Seat: "mesh-store", Assignment: "pg-main"})
		return err
	}}
	m.golden(t, "push-seat", 0, "push", file(t, "db.yaml", seat+"holder: pg-main\n"+separator+database))
}

func TestPushPending(t *testing.T) {
	m := newMesh(t)
	m.golden(t, "push-pending", 2, "push", "--pending", file(t, "shop.yaml", shop))
}

func TestPushDetached(t *testing.T) {
	m := newMesh(t)
	m.golden(t, "push-detached", 0, "push", "--detach", file(t, "shop.yaml", database+separator+shop))
	if m.docs != 1 {
		t.Errorf("%d pushes committed, want one", m.docs)
	}
}

func TestPushRefusedAtItsLine(t *testing.T) {
	for name, c := range map[string]struct {
		docs string
		args []string
	}{
		"push-refused-ambiguous": {database + separator + `module: shop
run: {exec: [/bin/shop]}
requires:
  db: {kind: postgres-database}
---
assign: shop
nodes: [gamma]
`, nil},
		"push-refused-provider": {database + separator + strings.ReplaceAll(shop, "pg-main", "pg-mian"), nil},
		"push-refused-node":     {database + separator + strings.ReplaceAll(shop, "[gamma]", "[beta, gama]"), nil},
		"push-refused-stale":    {database, []string{"--at", "2"}},
		"push-refused-yaml":     {strings.ReplaceAll(shop, "requires", "require"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			m.push(t, "module: other\nrun: {exec: [/bin/true]}\n") // so that there is an index to be behind of
			args := append(append([]string{"push"}, c.args...), file(t, "shop.yaml", c.docs))
			m.golden(t, name, 1, args...)
			if m.docs != 0 {
				t.Error("a refused push was committed")
			}
		})
	}
}

func TestPushIsPlannedAgainWhenTheMeshChangedMeanwhile(t *testing.T) {
	other := raftfsm.Documents{Modules: []raftfsm.Module{{Name: "other", Run: raftfsm.Run{Exec: []string{"/bin/true"}}}}}
	meanwhile := func(m *mesh) error {
		_, err := m.commit("beta", raftfsm.Push{Documents: other})
		return err
	}
	m := newMesh(t)
	m.meanwhile = meanwhile
	m.golden(t, "push-planned-again", 0, "push", "--detach", file(t, "shop.yaml", database+separator+shop))
	if m.docs != 1 {
		t.Errorf("%d pushes committed, want one", m.docs)
	}

	// Not where the index was given: it says what the plan was that somebody read.
	m = newMesh(t)
	m.meanwhile = meanwhile
	at := fmt.Sprint(m.state.Mesh.Changed)
	if got := m.command(t, "push", "--detach", "--at", at, file(t, "shop.yaml", database+separator+shop)); got.code != 1 || !strings.Contains(got.err, "run meshd plan again") {
		t.Errorf("push --at %s of a mesh that changed: exit code %d, %s", at, got.code, got.err)
	}
}

func TestPushWithoutAQuorum(t *testing.T) {
	m := newMesh(t)
	m.fails, m.own = errors.New("no quorum: beta and gamma do not answer"), 5
	m.golden(t, "push-no-quorum", 1, "push", file(t, "db.yaml", database))
	// That nothing changes is no answer either, where the plan may be of an old mesh.
	m = newMesh(t)
	m.push(t, database)
	m.fails, m.over.Quorum, m.over.Leader = errors.New("no quorum: beta and gamma do not answer"), false, ""
	if got := m.command(t, "push", file(t, "db.yaml", database)); got.code != 1 || !strings.Contains(got.err, "no quorum") {
		t.Errorf("a push that changes nothing, without a leader: exit code %d, %s", got.code, got.err)
	}
}

func TestPushUntilALoginIsWithdrawn(t *testing.T) {
	m := newMesh(t)
	m.push(t, database+separator+shop)
	m.play(t, hopByHop()...)
	m.script = []func(*mesh) error{func(m *mesh) error {
		for id := range m.state.Withdrawals {
			return m.from("pg-main", raftfsm.NodeReport{Withdrawn: []raftfsm.Withdrawn{{ID: id, Ended: 1}}})
		}
		return errors.New("there is no withdrawal")
	}, process("shop@gamma", "starting", ""), process("shop@gamma", "running", "")}
	m.golden(t, "push-withdraws", 0, "push", file(t, "shop.yaml", "module: shop\nrun: {exec: [/usr/local/bin/shop]}\n"))
}

func TestRemoveFollowsTheWithdrawal(t *testing.T) {
	m := newMesh(t)
	m.push(t, database+separator+shop)
	m.play(t, hopByHop()...)
	m.golden(t, "rm-waits", 2, "rm", "--timeout", "10ms", "module", "shop")
	m.golden(t, "rm-unknown", 1, "rm", "module", "nonsense")
	m.golden(t, "rm-provider-consumed", 1, "rm", "assignment", "pg-mai")
}

func TestARestartThatSaysNothingIsBelievedLater(t *testing.T) {
	m := newMesh(t)
	m.push(t, database+separator+shop)
	m.play(t, hopByHop()...)
	before := m.look()
	m.push(t, strings.ReplaceAll(shop, "DATABASE_URL", "DB_URL"))
	o := m.look()
	plan := raftfsm.Plan{Changes: []raftfsm.Change{{What: raftfsm.WhatAssignment, Name: "shop@gamma", Effect: raftfsm.EffectRestart}}}
	g := goalOf(before, plan)
	if left := g.pending(o); len(left) != 1 || left[0].Text != "shop@gamma is being restarted" {
		t.Errorf("a restart that was just asked for: %+v", left)
	}
	g.settled = true
	if left := g.pending(o); len(left) != 0 {
		t.Errorf("a restart that said nothing: %+v", left)
	}
	g.settled = false
	m.play(t, process("shop@gamma", "starting", ""), process("shop@gamma", "running", ""))
	if left := g.pending(m.look()); len(left) != 0 {
		t.Errorf("a restart that was seen: %+v", left)
	}
}

func TestInterruptedPush(t *testing.T) {
	m := newMesh(t)
	ctx, cancel := context.WithCancel(t.Context())
	m.script = []func(*mesh) error{func(*mesh) error { cancel(); return nil }}
	got := invoke(ctx, m.serve(t), "", "push", file(t, "shop.yaml", database+separator+shop))
	if got.code != 2 || !strings.Contains(got.out, "it goes on by itself") {
		t.Errorf("exit code %d, want 2:\n%s%s", got.code, got.out, got.err)
	}
}

func TestPlan(t *testing.T) {
	m := newMesh(t)
	m.over.Alive["gamma"] = false
	m.golden(t, "plan-changes", 2, "plan", file(t, "shop.yaml", seat+separator+database+separator+shop))
	m.golden(t, "plan-json", 2, "plan", "-o", "json", file(t, "db.yaml", database))
	m.push(t, database)
	m.golden(t, "plan-nothing", 0, "plan", file(t, "db.yaml", database))
	m.golden(t, "plan-refused", 1, "plan", file(t, "db.yaml", database+"default: redis\n"))
}

func TestWhatCanBeRead(t *testing.T) {
	m := newMesh(t)
	socket := m.serve(t)
	got := invoke(t.Context(), socket, database, "plan", "-")
	if got.code != 2 {
		t.Errorf("from standard input: exit code %d\n%s%s", got.code, got.out, got.err)
	}
	if got = invoke(t.Context(), socket, "module: [", "plan", "-"); got.code != 1 || !strings.Contains(got.err, "standard input:1:") {
		t.Errorf("a fault in standard input: %d %s", got.code, got.err)
	}
	for _, c := range []struct {
		file func(t *testing.T) string
		says string
	}{
		{func(t *testing.T) string { return t.TempDir() }, "is a directory"},
		{func(t *testing.T) string { return filepath.Join(t.TempDir(), "none.yaml") }, "no such file"},
		{func(t *testing.T) string { return file(t, "big.yaml", strings.Repeat("#", api.MaxBody+1)) }, "more than 4 MiB"},
	} {
		if got = invoke(t.Context(), socket, "", "plan", c.file(t)); got.code != 1 || !strings.Contains(got.err, c.says) {
			t.Errorf("exit code %d, want 1 and %q: %s", got.code, c.says, got.err)
		}
	}
	path := file(t, "db.yaml", database)
	if got = invoke(t.Context(), socket, "", "plan", path, path); got.code != 1 || !strings.Contains(got.err, "given twice") {
		t.Errorf("a file given twice: %d %s", got.code, got.err)
	}
}

func TestWithoutANode(t *testing.T) {
	none := filepath.Join(t.TempDir(), "meshd.sock")
	got := invoke(t.Context(), none, "", "status")
	want := "meshd: no meshd answers at " + none + "; start it with meshd start; the first time with meshd init for a new mesh, or meshd join TOKEN for one that is there\n"
	if got.code != 1 || got.err != want || got.out != "" {
		t.Errorf("exit code %d:\n%s\nwant 1:\n%s", got.code, got.err, want)
	}
	got = invoke(t.Context(), none, "", "version")
	if got.code != 0 || !strings.Contains(got.out, "none answers") {
		t.Errorf("version: %+v", got)
	}
	got = invoke(t.Context(), none, "", "__complete", "status", "")
	if got.code != 0 || strings.Contains(got.out, "meshd:") {
		t.Errorf("a completion: %+v", got)
	}
	if _, err := os.Stat(none); !os.IsNotExist(err) {
		t.Error("a command made the socket")
	}
}
