package peer

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// mutant is a change of the code that breaks a rule of the lease protocol, and the test
// that must see it. Paths are relative to this package.
type mutant struct{ name, dir, test, file, was, is string }

// mutants break each rule by itself. The first seven are known from other systems, or
// from prototypes of this one, to look right in most runs.
var mutants = []mutant{
	{"a new leader waits for nothing", ".", "TestPitfalls/a_leader_dies,_and", "holders.go",
		"n.leases.table.Lead(term, elected, vouched, open)", "n.leases.table.Lead(term, elected, vouched.Add(-time.Hour), open)"},
	{"the library's VerifyLeader proves the leadership", "consensus", "TestNothingIsProven", "consensus/node.go",
		"case n.AckedSince(term, t):", "case n.raft.VerifyLeader().Error() == nil:"},
	{"acknowledgements count from their receipt", "consensus", "TestNothingIsProven", "consensus/tap.go",
		"if sent.After(c.acked) {", "if sent = time.Now(); sent.After(c.acked) {"},
	{"no check before the answer", ".", "TestPitfalls/a_handler_runs", "lease/gate.go",
		"until := g.until\n\tif g.granted[seat] != epoch {", "until := g.now() + time.Second\n\tif false {"},
	{"no barrier before a leader grants", "consensus", "TestALeaderHasSeen", "consensus/node.go",
		"err := n.Barrier(ctx)\n\t\tif err == nil {", "var err error\n\t\tif err == nil {"},
	{"a leader is no evidence itself", ".", "TestPitfalls/a_leader_was_confirmed", "holders.go",
		"if own.After(at) {", "if false && own.After(at) {"},
	{"heartbeats pass the main loop by", "consensus", "TestHeartbeatsHaveNoFastPath", "consensus/tap.go",
		"func (x *tap) SetHeartbeatHandler(func(raft.RPC)) {}", "func (x *tap) SetHeartbeatHandler(f func(raft.RPC)) { x.NetworkTransport.SetHeartbeatHandler(f) }"},
	{"nothing proves the leadership", ".", "TestPitfalls/a_leader_that_holds", "leases.go",
		"if err := n.raft.Prove(ctx, term, arrived, ask.Hurry); err != nil {", "if err := ctx.Err(); err != nil {"},
	{"a node counts from the receipt of its lease", ".", "TestPitfalls/a_lease_is_long", "leases.go",
		"gate.Grant(sent, g)", "gate.Grant(max(sent, gate.Now()), g)"},
	{"no check before the handler", ".", "TestPitfalls/a_leader_dies,_and", "lease/gate.go",
		"case now >= g.until-margin:", "case false:"},
	{"a session that is closed is renewed", ".", "TestPitfalls/a_holder_is_back_while", "lease/table.go",
		"t.closing[session] = true\n\treturn true\n}\n\n// Surrender", "return true\n}\n\n// Surrender"},
	{"what was let go of comes back with a late reply", ".", "TestPitfalls/the_seat_is_moved_while", "lease/gate.go",
		"return epoch <= g.released[seat] || epoch <= g.draining[seat].epoch", "return false"},
	{"a holder that does not answer has let go", ".", "TestPitfalls/the_seat_is_moved,_and", "holders.go",
		`"why", err)
			return
		}
		g.leases.note(claim)`, `"why", err)
		}
		g.leases.note(claim)`},
	{"a node stops before the last call is out", ".", "TestPitfalls/the_seat_is_moved,_and_its_holder_stops", "lease/gate.go",
		"draining := maps.Clone(g.draining)", "draining := map[string]term{}"},
	{"the last calls are let out under a later lease", ".", "TestPitfalls/the_seat_is_moved,_and_its_holder_is", "lease/gate.go",
		"until = out.until", "until = g.until"},
	{"a withheld claim is over at once", ".", "TestPitfalls/the_seat_is_moved,_and", "lease/table.go",
		"now.After(t.floor) && now.After(t.listed[c])", "true"},
}

// TestMutantsAreCaught shows that the proof in virtual time can fail. A build of a test
// takes most of its time: the race detector, under which it says nothing more, makes it
// three times as long.
func TestMutantsAreCaught(t *testing.T) {
	if raceEnabled {
		t.Skip("runs other test binaries, which are built without the race detector: it is run without it too")
	}
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			binary := m.build(t)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			// What is left to chance in a course is tried until it shows.
			run := exec.CommandContext(ctx, binary, "-test.run=^"+strings.Replace(m.test, "/", "$/^", 1), "-test.failfast", "-test.count=50", "-test.v")
			run.Dir = m.dir
			out, err := run.CombinedOutput()
			var exit *exec.ExitError
			switch fault := caught(string(out)); {
			case !strings.Contains(string(out), "=== RUN"):
				t.Errorf("%s is no test: %v\n%s", m.test, err, out)
			case ctx.Err() != nil || !errors.As(err, &exit) || fault == "":
				t.Errorf("it is not caught: %v\n%s", err, out)
			default:
				t.Log(fault)
			}
		})
	}
}

// caught is the first line in which a test's output says what was wrong.
func caught(out string) string {
	for line := range strings.Lines(out) {
		if strings.Contains(line, "_test.go:") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// build makes the test binary of this package with the mutant in the place of the code.
func (m mutant) build(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs(m.file)
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(code), m.was); n != 1 {
		t.Fatalf("%s has the text that is to be changed %d times, not once: %q", m.file, n, m.was)
	}
	dir := t.TempDir()
	changed, overlay, binary := filepath.Join(dir, "changed.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "peer.test")
	if err := os.WriteFile(changed, []byte(strings.Replace(string(code), m.was, m.is, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(overlay, replace, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("go", "test", "-c", "-overlay", overlay, "-o", binary, "./"+m.dir).CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return binary
}
