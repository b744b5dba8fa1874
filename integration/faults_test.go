package integration

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"meshd/peer/api"
)

// faultsFor is how long real processes are put through random faults. The proof in
// virtual time, in package peer, goes through hundreds of times as many; this one has
// what that cannot have: the kernel, the clocks and the programs.
var faultsFor = flag.Duration("faults-for", 20*time.Second, "how long real processes are put through random faults")

// mendedWithin is how long after the last fault every node must have an answer: the
// pool of the streams and the backing off of joins and routes come on top of a lease.
const mendedWithin = 30 * time.Second

// answer is one that a caller got.
type answer struct {
	Node, Caller string
	Epoch        uint64
	Enter, Leave int64     // of the handler, by the clock of the machine
	asked, taken time.Time // by the caller
}

func TestOneAnswererUnderRandomFaults(t *testing.T) {
	if err := wirable(); err != nil {
		if os.Getenv("MESHD_REQUIRE_SERVERS") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	seed := rand.Uint64()
	if s, err := strconv.ParseUint(os.Getenv("MESHD_TEST_SEED"), 10, 64); err == nil {
		seed = s
	}
	b := newFaultBed(t, seed, "alpha", "beta", "gamma")
	b.push()
	began := time.Now()
	for time.Since(began) < *faultsFor && !t.Failed() {
		b.fault()
		b.wait(b.between(50*time.Millisecond, 3*time.Second))
	}
	b.mend()
	answers := b.stop()
	faults := slices.Concat(overlapping(answers), goingBack(answers))
	epochs := map[uint64]bool{}
	for _, a := range answers {
		epochs[a.Epoch] = true
	}
	t.Logf("seed %d: %d answers under %d epochs in %v", seed, len(answers), len(epochs), time.Since(began).Round(time.Second))
	if len(faults) > 0 {
		t.Errorf("%s\nMESHD_TEST_SEED=%d draws the same faults:\n%s", strings.Join(faults, "\n"), seed, strings.Join(b.story, "\n"))
	}
}

// faultBed is a mesh on wires of which every node claims a seat that is asked all the time.
type faultBed struct {
	*testing.T
	*rand.Rand
	mesh  *Mesh
	began time.Time
	story []string
	done  chan struct{}
	calls sync.WaitGroup

	mu      sync.Mutex
	answers []answer
}

func newFaultBed(t *testing.T, seed uint64, names ...string) *faultBed {
	meshd, err := exec.LookPath("meshd")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "mesh") // short, for the paths of sockets
	if err != nil {
		t.Fatal(err)
	}
	b := &faultBed{T: t, Rand: rand.New(rand.NewPCG(seed, 1)), mesh: New(meshd, dir), began: time.Now(), done: make(chan struct{})}
	t.Cleanup(func() {
		if err := b.mesh.Close(); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if b.mesh.wires, err = wire(names); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := b.mesh.Start(ctx, names...); err != nil {
		t.Fatal(err)
	}
	return b
}

// manifest is a seat whose answers say from when to when they were worked on.
const manifest = `seat: clock
verbs: [now]
---
module: clock
run: {external: true}
claims: [clock]
serves:
  clock:
    now: {exec: [sh, -c, 'enter=$(date +%s%N); sleep 0.0$(($enter % 7)); echo "{\"Node\": \"$MESHD_NODE\", \"Epoch\": $MESHD_EPOCH, \"Enter\": $enter, \"Leave\": $(date +%s%N)}"']}
---
assign: clock
nodes: [alpha, beta, gamma]
`

func (b *faultBed) push() {
	b.Helper()
	path := filepath.Join(b.mesh.dir, "clock.yaml")
	b.must(os.WriteFile(path, []byte(manifest), 0o600))
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	if out, err := b.mesh.nodes[0].Command(ctx, "push", path).CombinedOutput(); err != nil {
		b.Fatalf("push: %v\n%s", err, out)
	}
	for _, n := range b.mesh.nodes {
		for i := range 2 {
			b.calls.Go(func() { b.ask(n, fmt.Sprint(n.Name, i)) })
		}
	}
}

// ask calls from one node until the end. A node that does not run refuses at once.
func (b *faultBed) ask(n *Node, caller string) {
	client := api.NewClient(n.Socket())
	defer client.Close()
	for {
		select {
		case <-b.done:
			return
		case <-time.After(20 * time.Millisecond):
		}
		ctx, cancel := context.WithTimeout(context.Background(), 8*time.Second) // of one that is stopped
		asked := time.Now()
		r, err := client.Call(ctx, "clock.now", []byte("{}"), 2*time.Second)
		cancel()
		if err != nil {
			continue
		}
		a := answer{Caller: caller, asked: asked, taken: time.Now()}
		if err := json.Unmarshal(r.Data, &a); err != nil || a.Node != r.Node || a.Epoch != r.Epoch {
			b.Errorf("node %s answered under epoch %d: %s (%v)", r.Node, r.Epoch, r.Data, err)
			continue
		}
		b.mu.Lock()
		b.answers = append(b.answers, a)
		b.mu.Unlock()
	}
}

func (b *faultBed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *faultBed) between(least, most time.Duration) time.Duration {
	return least + time.Duration(b.Int64N(int64(most-least)))
}

func (b *faultBed) wait(d time.Duration) { <-time.After(d) }

func (b *faultBed) note(format string, args ...any) {
	b.story = append(b.story, fmt.Sprintf("%8.3f  %s", time.Since(b.began).Seconds(), fmt.Sprintf(format, args...)))
}

// fault does one thing.
func (b *faultBed) fault() {
	n, other := b.mesh.nodes[b.IntN(len(b.mesh.nodes))], b.mesh.nodes[b.IntN(len(b.mesh.nodes))]
	switch b.IntN(9) {
	case 0:
		b.note("%s is killed", n.Name)
		b.must(n.Kill())
	case 1:
		b.note("%s is killed and starts", n.Name)
		b.must(n.Kill())
		b.start(n)
	case 2, 3:
		if n.Answers() {
			b.note("%s is stopped", n.Name)
			b.must(n.Pause())
		}
	case 4:
		b.goOn()
	case 5:
		b.note("%s is isolated", n.Name)
		b.must(b.mesh.wires.isolate(n.Name))
	case 6:
		if n != other {
			b.note("%s is not heard by %s", n.Name, other.Name)
			b.must(b.mesh.wires.cut(n.Name, other.Name))
		}
	case 7:
		b.note("all wires are whole")
		b.must(b.mesh.wires.heal())
	case 8:
		if n.Answers() {
			b.note("the seat is to move to %s", other.Name)
			ctx, cancel := context.WithTimeout(b.Context(), 3*time.Second)
			defer cancel()
			_ = n.Command(ctx, "seat", "move", "clock", other.Name).Run() // with whom, is no matter
		}
	}
}

// goOn has all run that does not.
func (b *faultBed) goOn() {
	b.note("all go on")
	for _, n := range b.mesh.nodes {
		if !n.Running() {
			b.start(n)
		}
		if n.paused {
			b.must(n.Resume())
		}
	}
}

func (b *faultBed) start(n *Node) {
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	b.must(n.Start(ctx))
}

// mend ends all faults, and waits until every node is answered.
func (b *faultBed) mend() {
	b.Helper()
	b.must(b.mesh.wires.heal())
	b.goOn()
	mended := time.Now()
	ctx, cancel := context.WithTimeout(b.Context(), mendedWithin)
	defer cancel()
	var missing []string
	if err := until(ctx, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		missing = nil
		for _, n := range b.mesh.nodes {
			if !slices.ContainsFunc(b.answers, func(a answer) bool { return a.asked.After(mended) && strings.HasPrefix(a.Caller, n.Name) }) {
				missing = append(missing, n.Name)
			}
		}
		return len(missing) == 0
	}); err != nil {
		b.Errorf("%v after all was mended nobody answers %v\n%s", mendedWithin, missing, strings.Join(b.story, "\n"))
	}
}

func (b *faultBed) stop() []answer {
	close(b.done)
	b.calls.Wait()
	return b.answers
}

// overlapping finds answers of one epoch that were worked on when one of another was.
func overlapping(answers []answer) (faults []string) {
	type span struct{ first, last answer }
	spans := map[uint64]span{}
	for _, a := range answers {
		s, ok := spans[a.Epoch]
		if !ok {
			s = span{a, a}
		}
		if a.Node != s.first.Node {
			faults = append(faults, fmt.Sprintf("epoch %d was answered by %s and by %s", a.Epoch, s.first.Node, a.Node))
		}
		if a.Enter < s.first.Enter {
			s.first = a
		}
		if a.Leave > s.last.Leave {
			s.last = a
		}
		spans[a.Epoch] = s
	}
	var last answer
	for _, epoch := range slices.Sorted(maps.Keys(spans)) {
		s := spans[epoch]
		if s.first.Enter < last.Leave {
			faults = append(faults, fmt.Sprintf("%s began under epoch %d %v before %s was done under epoch %d", s.first.Node, epoch, time.Duration(last.Leave-s.first.Enter), last.Node, last.Epoch))
		}
		if s.last.Leave > last.Leave {
			last = s.last
		}
	}
	return faults
}

// goingBack finds answers under an older epoch than one that somebody had before they
// were asked for.
func goingBack(answers []answer) (faults []string) {
	byTaken := slices.SortedFunc(slices.Values(answers), func(a, b answer) int { return a.taken.Compare(b.taken) })
	byAsked := slices.SortedFunc(slices.Values(answers), func(a, b answer) int { return a.asked.Compare(b.asked) })
	var newest answer
	for _, a := range byAsked {
		for len(byTaken) > 0 && byTaken[0].taken.Before(a.asked) {
			newest = slices.MaxFunc([]answer{newest, byTaken[0]}, func(a, b answer) int { return cmp.Compare(a.Epoch, b.Epoch) })
			byTaken = byTaken[1:]
		}
		if a.Epoch < newest.Epoch {
			faults = append(faults, fmt.Sprintf("%s had epoch %d, %v after %s had epoch %d", a.Caller, a.Epoch, a.taken.Sub(newest.taken), newest.Caller, newest.Epoch))
		}
	}
	return faults
}

// TestFaultsAreSeen: what judges the answers finds each kind.
func TestFaultsAreSeen(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	is := func(node string, epoch uint64, enter, leave int64) answer {
		return answer{Node: node, Caller: "a", Epoch: epoch, Enter: enter, Leave: leave, asked: at(int(enter) - 1), taken: at(int(leave) + 1)}
	}
	for _, c := range []struct {
		answers []answer
		want    int
	}{
		{[]answer{is("alpha", 1, 10, 20), is("alpha", 1, 12, 18), is("beta", 2, 30, 40)}, 0},
		{[]answer{is("alpha", 1, 10, 35), is("beta", 2, 30, 40)}, 1},
		{[]answer{is("alpha", 1, 10, 20), is("beta", 1, 30, 40)}, 1},
		{[]answer{is("beta", 2, 10, 20), is("alpha", 1, 30, 40)}, 2}, // it overlaps, and goes back
	} {
		if got := append(overlapping(c.answers), goingBack(c.answers)...); len(got) != c.want {
			t.Errorf("%+v: got %q, want %d", c.answers, got, c.want)
		}
	}
}
