package bus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

var query = Target{Seat: "store", Name: "query"}

func TestOneAnswerer(t *testing.T) {
	m := newMesh(t, "alpha", "beta", "gamma")
	var ran atomic.Int64
	m.hold("store", "beta", 5, func(context.Context, Call) ([]byte, error) { ran.Add(1); return []byte("beta"), nil }, "query")
	m.apply()
	for _, n := range m.nodes {
		for range 200 {
			r, err := n.Call(within(t, patience), Caller{Node: n.name}, query, nil)
			must(t, err)
			if r.Node != "beta" || r.Epoch != 5 || r.Seat != "store" || string(r.Data) != "beta" {
				t.Fatalf("from %s: %+v", n.name, r)
			}
		}
	}
	if ran.Load() != 600 {
		t.Errorf("600 calls ran %d times", ran.Load())
	}
}

// TestSeatMovesUnderCalls: callers on every node, while the seat goes round. Each call is answered,
// runs once, and no caller sees an epoch go back.
func TestSeatMovesUnderCalls(t *testing.T) {
	m := newMesh(t, "alpha", "beta", "gamma")
	var mu sync.Mutex
	runs := map[string]int{}
	handler := func(_ context.Context, c Call) ([]byte, error) {
		mu.Lock()
		defer mu.Unlock()
		runs[string(c.Data)]++
		return c.Data, nil
	}
	m.hold("store", "alpha", 1, handler, "query")
	m.apply()
	stop := make(chan struct{})
	var callers sync.WaitGroup
	var made, lost atomic.Int64
	for name, n := range m.nodes {
		callers.Go(func() {
			var last uint64
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				id := name + strconv.Itoa(i)
				r, err := n.Call(context.Background(), Caller{Node: name}, query, []byte(id))
				made.Add(1)
				switch {
				case errors.Is(err, &CallError{Code: CodeUncertain}), errors.Is(err, ErrOldEpoch):
					lost.Add(1) // it ran while the seat moved, and its answer was kept back
				case err != nil:
					t.Errorf("call %s: %v", id, err)
					return
				case r.Epoch < last || string(r.Data) != id:
					t.Errorf("call %s: epoch %d after %d, answer %q", id, r.Epoch, last, r.Data)
					return
				default:
					last = r.Epoch
				}
			}
		})
	}
	for epoch := uint64(2); epoch < 40; epoch++ {
		m.hold("store", []string{"alpha", "beta", "gamma"}[epoch%3], epoch, handler, "query")
		m.apply()
		before := made.Load()
		wait(t, "calls under each holder", func() bool { return made.Load() >= before+20 || t.Failed() })
	}
	close(stop)
	callers.Wait()
	for id, n := range runs {
		if n != 1 {
			t.Errorf("call %s ran %d times", id, n)
		}
	}
	if lost.Load() > 3*38 { // each caller has one call under way when the seat moves
		t.Errorf("of %d calls %d lost their answer", made.Load(), lost.Load())
	}
}

// TestCallerBehindTheLog: a caller whose node still has the old holder on record is told the new one.
func TestCallerBehindTheLog(t *testing.T) {
	m := newMesh(t, "alpha", "beta", "gamma")
	m.hold("store", "alpha", 3, says("alpha"), "query")
	m.apply()
	old := m.of("gamma")
	m.hold("store", "beta", 4, says("beta"), "query")
	m.apply()
	must(t, m.nodes["gamma"].Apply(old))
	r, err := m.nodes["gamma"].Call(within(t, patience), Caller{Node: "gamma"}, query, nil)
	must(t, err)
	if r.Node != "beta" || r.Epoch != 4 {
		t.Errorf("answered by %s under epoch %d", r.Node, r.Epoch)
	}
	// The old holder, asked as the old log says, names the new one, for a while; then it is silent.
	msg, err := m.nodes["gamma"].host.mesh.Request(query.at("alpha"), nil, patience)
	must(t, err)
	_, err = decode(msg)
	wantCode(t, err, CodeNotHolder, "node alpha is not the holder of store; beta/pg, epoch 4 is")
	wait(t, "the old holder to unsubscribe", func() bool {
		// Short: a request that arrives just as it unsubscribes vanishes.
		_, err := m.nodes["gamma"].host.mesh.Request(query.at("alpha"), nil, 100*time.Millisecond)
		return errors.Is(err, nats.ErrNoResponders)
	})
}

func TestOldEpochIsRefused(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	m.hold("store", "beta", 6, says("beta"), "query")
	m.apply()
	alpha, beta := m.nodes["alpha"], m.nodes["beta"]
	_, err := alpha.Call(within(t, patience), Caller{Node: "alpha"}, query, nil)
	must(t, err)
	// Beta's state is taken back to an epoch that alpha knows to be over.
	stale := m.of("beta")
	stale.Directory.Seats["store"] = Seat{Verbs: []string{"query"}, Holder: Holder{"beta", "pg", 5}}
	stale.Services = []Service{{Scope: ScopeMesh, Seat: "store", Assignment: "pg", Verbs: []string{"query"}, Epoch: 5, Handler: says("beta")}}
	must(t, beta.Apply(stale))
	_, err = alpha.Call(within(t, patience), Caller{Node: "alpha"}, query, nil)
	wantCode(t, err, CodeOldEpoch, "beta", "epoch 5", "epoch 6")
	if !errors.Is(err, ErrOldEpoch) {
		t.Error("it is not ErrOldEpoch")
	}
}

func TestErrorsSayWhy(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	m.hold("store", "beta", 4, says("beta"), "query", "databases")
	m.dir.Seats["dark"] = Seat{Verbs: []string{"x"}}
	m.dir.Seats["ghost"] = Seat{Verbs: []string{"x"}, Holder: Holder{"beta", "pg", 2}}
	m.dir.Nodes["beta"].Seats["clock"] = []string{"now"}
	m.tools("beta", "pg", says("pg"), "size", "vacuum")
	m.apply()
	for _, c := range []struct {
		t     Target
		code  Code
		words []string
	}{
		{Target{Seat: "stor", Name: "query"}, CodeUnknown, []string{`no seat "stor"`, "dark, ghost, store"}},
		{Target{Seat: "clock", Name: "now"}, CodeUnknown, []string{"node seat", "beta/clock.now"}},
		{Target{Seat: "dark", Name: "x"}, CodeNoHolder, []string{"dark", "no holder on record"}},
		{Target{Seat: "ghost", Name: "x"}, CodeUnreachable, []string{"node beta is silent", "ghost.x", "has not run"}},
		{Target{Seat: "store", Name: "quary"}, CodeNoSuchVerb, []string{`"quary"`, "query, databases"}},
		{Target{Node: "gamma", Assignment: "pg", Name: "size"}, CodeUnknown, []string{`no node "gamma"`, "alpha, beta"}},
		{Target{Node: "alpha", Assignment: "pg", Name: "size"}, CodeUnknown, []string{"node alpha", `"pg"`, "none"}},
		{Target{Node: "beta", Assignment: "pg", Name: "sise"}, CodeNoSuchVerb, []string{"size, vacuum"}},
		{Target{Node: "beta", Seat: "clok", Name: "now"}, CodeUnknown, []string{`"clok"`, "clock"}},
		{Target{Node: "beta", Seat: "clock", Name: "set"}, CodeNoSuchVerb, []string{"now"}},
		{Target{Seat: "store.>", Name: "query"}, CodeRefused, []string{"store.>", "not a name"}},
		{Target{Seat: "store", Assignment: "pg", Node: "beta", Name: "x"}, CodeRefused, []string{"a seat and an assignment"}},
		{Target{}, CodeRefused, []string{"not a name"}},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err := m.nodes["alpha"].Call(ctx, Caller{Node: "alpha"}, c.t, nil)
		cancel()
		wantCode(t, err, c.code, c.words...)
	}
	// The answering side says so as well, to a caller whose directory promises too much.
	msg, err := m.nodes["alpha"].host.mesh.Request("node.beta.pg.sise", nil, patience)
	must(t, err)
	_, err = decode(msg)
	wantCode(t, err, CodeNoSuchVerb, "assignment pg on beta", "size, vacuum")
}

func TestHandlersThatMisbehave(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	hang := make(chan struct{})
	defer close(hang)
	m.hold("store", "beta", 1, func(_ context.Context, c Call) ([]byte, error) {
		switch string(c.Data) {
		case "panic":
			panic("secret thing")
		case "hang":
			<-hang
		case "big":
			return make([]byte, maxPayload+1), nil
		case "full":
			return bytes.Repeat([]byte("x"), maxPayload), nil
		case "liar":
			return nil, fail(CodeNotHolder, "not me")
		case "long":
			return nil, errors.New(strings.Repeat("é\r\n", 5000))
		}
		return c.Data, nil
	}, "query")
	m.apply()
	alpha := m.nodes["alpha"]
	ask := func(data []byte, limit time.Duration) (Reply, error) {
		return alpha.Call(within(t, limit), Caller{Node: "alpha"}, query, data)
	}
	_, err := ask([]byte("panic"), patience)
	wantCode(t, err, CodeFailed, "panicked", "node beta")
	if strings.Contains(err.Error(), "secret") {
		t.Error("the panic's value travelled")
	}
	_, err = ask([]byte("big"), patience)
	wantCode(t, err, CodeTooLarge, "1048577", "1048576")
	_, err = ask(make([]byte, maxPayload+1), patience)
	wantCode(t, err, CodeTooLarge, "request")
	_, err = ask([]byte("liar"), patience)
	wantCode(t, err, CodeFailed, "not me")
	_, err = ask([]byte("long"), patience)
	wantCode(t, err, CodeFailed, "bytes cut")
	r, err := ask([]byte("full"), patience)
	must(t, err)
	if len(r.Data) != maxPayload {
		t.Errorf("full reply has %d bytes", len(r.Data))
	}
	r, err = ask(bytes.Repeat([]byte("y"), maxPayload), patience)
	must(t, err)
	if len(r.Data) != maxPayload {
		t.Errorf("full request came back with %d bytes", len(r.Data))
	}
	began := time.Now()
	_, err = ask([]byte("hang"), 100*time.Millisecond)
	wantCode(t, err, CodeTimedOut, "may have run")
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("a call of 100 ms took %v", took)
	}
}

func TestBusyIsSaid(t *testing.T) {
	m := newMesh(t, "alpha")
	release := make(chan struct{})
	var inside atomic.Int64
	m.hold("store", "alpha", 1, func(_ context.Context, c Call) ([]byte, error) {
		inside.Add(1)
		<-release
		return []byte("done"), nil
	}, "query")
	m.tools("alpha", "pg", says("pg"), "size")
	m.apply()
	alpha := m.nodes["alpha"]
	var calls sync.WaitGroup
	for range mostCalls {
		calls.Go(func() {
			_, err := alpha.Call(within(t, patience), Caller{Node: "alpha"}, query, nil)
			check(t, err)
		})
	}
	wait(t, "all places to be taken", func() bool { return inside.Load() == mostCalls })
	_, err := alpha.Call(within(t, patience), Caller{Node: "alpha"}, query, nil)
	wantCode(t, err, CodeBusy, "store", "64")
	// Another service has places of its own.
	_, err = alpha.Call(within(t, patience), Caller{Node: "alpha"}, Target{Node: "alpha", Assignment: "pg", Name: "size"}, nil)
	must(t, err)
	close(release)
	calls.Wait()
	if inside.Load() != mostCalls {
		t.Errorf("%d ran", inside.Load())
	}
}

// gate is a lease as a test wants it.
type gate struct {
	open    atomic.Bool
	entered atomic.Int64
	left    atomic.Int64
	lost    atomic.Bool
}

func (g *gate) Enter(seat string) (uint64, func() (time.Duration, error), error) {
	if !g.open.Load() {
		return 0, nil, errors.New("lease of " + seat + " ran out")
	}
	g.entered.Add(1)
	return 12, func() (time.Duration, error) {
		g.left.Add(1)
		if g.lost.Load() {
			return 0, errors.New("lease ran out meanwhile")
		}
		return 0, nil
	}, nil
}

// TestALateAnswerIsConfirmed: an answer that took longer than its lease had left is as good as its
// holder's word that it still is one, and no better.
func TestALateAnswerIsConfirmed(t *testing.T) {
	const step = 10 * time.Millisecond
	var clock atomic.Int64
	m := newMeshOf(t, func(c *Config) { c.Clock = func() time.Duration { return time.Duration(clock.Add(int64(step))) } }, "alpha")
	m.hold("store", "alpha", 12, says("x"), "query")
	alpha := m.nodes["alpha"]
	for _, c := range []struct {
		name   string
		left   []time.Duration // at each leave
		epochs []uint64        // at each Enter
		want   string          // in the error; empty for an answer
	}{
		{"in time", []time.Duration{2 * step}, []uint64{12}, ""},
		{"late and confirmed", []time.Duration{step / 2, 2 * step}, []uint64{12, 12}, ""},
		{"late twice", []time.Duration{step / 2, step / 2}, []uint64{12, 12}, "confirmed after"},
		{"held anew", []time.Duration{step / 2, 2 * step}, []uint64{12, 13}, "epoch 13 now"},
		{"lost", []time.Duration{step / 2}, []uint64{12}, "no lease"},
	} {
		alpha.layout.Services = slices.Clone(alpha.layout.Services)
		alpha.layout.Services[0].Gate = &script{left: c.left, epochs: c.epochs}
		m.apply()
		r, err := alpha.Call(within(t, patience), Caller{Node: "alpha"}, query, nil)
		switch {
		case c.want != "":
			wantCode(t, err, CodeUncertain, c.want, "it has run")
		case err != nil || r.Epoch != 12 || !strings.HasPrefix(string(r.Data), "x"):
			t.Errorf("%s: %+v, %v", c.name, r, err)
		}
	}
}

// TestADarkSeatSaysWhyAndIsWaitedFor: a call that finds nobody named waits for a holder, and gives the
// log's reason when there is none in time.
func TestADarkSeatSaysWhyAndIsWaitedFor(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	m.hold("store", "", 4, says("x"), "query")
	dark := m.dir.Seats["store"]
	dark.Dark = "beta/pg holds it, whose node is away"
	m.dir.Seats["store"] = dark
	m.apply()
	_, err := m.nodes["alpha"].Call(within(t, 300*time.Millisecond), Caller{Node: "alpha"}, query, nil)
	wantCode(t, err, CodeNoHolder, "nobody answers seat store now: beta/pg holds it, whose node is away", "has not run")
	done := make(chan error, 1)
	ctx := within(t, patience)
	go func() {
		_, err := m.nodes["alpha"].Call(ctx, Caller{Node: "alpha"}, query, nil)
		done <- err
	}()
	m.hold("store", "beta", 5, says("x"), "query")
	m.apply()
	must(t, <-done)
}

// script is a gate that says one thing after the other.
type script struct {
	mu     sync.Mutex
	left   []time.Duration
	epochs []uint64
}

func (s *script) Enter(string) (uint64, func() (time.Duration, error), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.epochs) == 0 {
		return 0, nil, errors.New("no lease")
	}
	epoch, left := s.epochs[0], s.left[0]
	s.epochs, s.left = s.epochs[1:], s.left[1:]
	return epoch, func() (time.Duration, error) { return left, nil }, nil
}

func TestGateIsAskedBeforeAndAfter(t *testing.T) {
	m := newMesh(t, "alpha")
	g := &gate{}
	var ran atomic.Int64
	m.hold("store", "alpha", 12, func(_ context.Context, c Call) ([]byte, error) {
		ran.Add(1)
		if string(c.Data) == "panic" {
			panic("x")
		}
		return fmt.Append(nil, c.Epoch), nil
	}, "query")
	alpha := m.nodes["alpha"]
	alpha.layout.Services[0].Gate = g
	m.apply()
	ask := func(data string, limit time.Duration) (Reply, error) {
		return alpha.Call(within(t, limit), Caller{Node: "alpha"}, query, []byte(data))
	}
	_, err := ask("", time.Second)
	wantCode(t, err, CodeNotHolder, "lease of store ran out", "has not run")
	if ran.Load() != 0 {
		t.Error("it ran behind a closed gate")
	}
	g.open.Store(true)
	r, err := ask("", patience)
	must(t, err)
	if r.Epoch != 12 || string(r.Data) != "12" {
		t.Errorf("reply is %+v", r)
	}
	_, err = ask("panic", patience)
	wantCode(t, err, CodeFailed)
	g.lost.Store(true)
	_, err = ask("", patience)
	wantCode(t, err, CodeUncertain, "lease ran out meanwhile")
	if g.entered.Load() != 3 || g.left.Load() != 3 {
		t.Errorf("entered %d times, left %d times", g.entered.Load(), g.left.Load())
	}
}

// TestAClosedServiceSaysWhy: it runs nothing, and answers as soon as it is open.
func TestAClosedServiceSaysWhy(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	m.hold("store", "alpha", 12, func(context.Context, Call) ([]byte, error) { return []byte("open"), nil }, "query")
	alpha := m.nodes["alpha"]
	alpha.layout.Services[0].Closed = "no leader was heard"
	m.apply()
	for _, n := range m.nodes {
		_, err := n.Call(within(t, time.Second), Caller{Node: n.name}, query, nil)
		wantCode(t, err, CodeNotHolder, "mesh seat store on alpha: no leader was heard", "has not run")
	}
	answers, err := alpha.Survey(within(t, patience), patience)
	must(t, err)
	if b := answers[0].Bound; len(b) != 1 || !b[0].Leaving {
		t.Errorf("a closed seat is surveyed as %+v", b)
	}
	if list := alpha.announced(); len(list) != 0 {
		t.Errorf("a closed seat announces itself: %v", list)
	}
	done := make(chan error, 1)
	go func() {
		_, err := m.nodes["beta"].Call(within(t, patience), Caller{Node: "beta"}, query, nil)
		done <- err
	}()
	alpha.layout.Services = slices.Clone(alpha.layout.Services)
	alpha.layout.Services[0].Closed = ""
	m.apply()
	must(t, <-done)
}

// TestSeatLostWhileItRuns: without any gate, an answer still does not leave a node that lost the seat.
func TestSeatLostWhileItRuns(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	inside, release := make(chan struct{}), make(chan struct{})
	m.hold("store", "alpha", 1, func(context.Context, Call) ([]byte, error) {
		close(inside)
		<-release
		return []byte("stale"), nil
	}, "query")
	m.apply()
	done := make(chan error, 1)
	go func() {
		_, err := m.nodes["beta"].Call(context.Background(), Caller{Node: "beta"}, query, nil)
		done <- err
	}()
	<-inside
	m.hold("store", "beta", 2, says("beta"), "query")
	m.apply()
	close(release)
	// Refused twice over: by alpha, which knows, and by beta, which has seen a newer epoch.
	wantCode(t, <-done, CodeOldEpoch, "epoch 1", "epoch 2")
}

func TestSurveyFindsWhoAnswers(t *testing.T) {
	m := newMesh(t, "alpha", "beta", "gamma")
	m.hold("store", "beta", 5, says("beta"), "query")
	m.hold("mail", "gamma", 3, says("gamma"), "send")
	m.apply()
	alpha := m.nodes["alpha"]
	survey := func() string {
		answers, err := alpha.Survey(within(t, patience), patience)
		must(t, err)
		var out []string
		for _, a := range answers {
			if !a.Answered {
				t.Errorf("%s did not answer", a.Node)
			}
			for _, b := range a.Bound {
				out = append(out, fmt.Sprint(a.Node, " ", b.Seat, " ", b.Assignment, " ", b.Epoch, " ", b.Leaving, " ", b.Interest))
			}
		}
		return strings.Join(out, "; ")
	}
	wait(t, "interest to spread", func() bool { return survey() == "beta store pg 5 false 1; gamma mail pg 3 false 1" })

	// Gamma has a state of its own in which it holds the store as well: the survey shows both.
	rogue := m.of("gamma")
	rogue.Directory.Seats["store"] = Seat{Verbs: []string{"query"}, Holder: Holder{"gamma", "pg", 4}}
	rogue.Services = append(slices.Clone(rogue.Services),
		Service{Scope: ScopeMesh, Seat: "store", Assignment: "pg", Verbs: []string{"query"}, Epoch: 4, Handler: says("gamma")})
	must(t, m.nodes["gamma"].Apply(rogue))
	wait(t, "the second answerer", func() bool {
		return survey() == "beta store pg 5 false 1; gamma mail pg 3 false 1; gamma store pg 4 false 1"
	})
	// One that subscribes without a word is known to the server all the same.
	sub, err := m.nodes["alpha"].host.mesh.SubscribeSync("node.alpha.seat.mail.send")
	must(t, err)
	wait(t, "the silent one", func() bool { return strings.HasPrefix(survey(), "alpha mail  0 false 1; ") })
	must(t, sub.Unsubscribe())
	// Calls go to the named one regardless.
	r, err := alpha.Call(within(t, patience), Caller{Node: "alpha"}, query, nil)
	must(t, err)
	if r.Node != "beta" {
		t.Errorf("answered by %s", r.Node)
	}
}

func TestLayoutFaultsAreAllReported(t *testing.T) {
	m := newMesh(t, "alpha")
	err := m.nodes["alpha"].Apply(Layout{
		Peers:     []Peer{{ID: "x", Name: "Be.ta", Addr: "nowhere", Pin: "AB"}},
		Modules:   []Module{{Assignment: "a>", PublicKey: "UX", Calls: []Target{{Seat: "s", Name: "*"}}}},
		Operators: []Operator{{Name: "eye", PublicKey: "UX"}},
		Services: []Service{
			{Scope: ScopeMesh, Seat: "store", Assignment: "pg", Epoch: 3, Verbs: []string{"q.r"}},
			{Scope: ScopeNode, Seat: "store", Assignment: "pg", Handler: says("x")},
		},
		Directory: Directory{Seats: map[string]Seat{"store": {Holder: Holder{"beta", "pg", 4}}}},
	})
	if err == nil {
		t.Fatal("it was accepted")
	}
	for _, w := range []string{`"Be.ta"`, `"nowhere"`, "64 lower-case hex", `"a>"`, "user's nkey", `"*"`, `operator "eye"`, `"q.r"`,
		"no handler", "the log names beta/pg, epoch 4, not alpha/pg, epoch 3", "listed twice"} {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error does not say %s:\n%v", w, err)
		}
	}
}

// TestNodeSeatIsAnsweredByEachNode: the same seat on two nodes, each asked by its node, from a module.
func TestNodeSeatIsAnsweredByEachNode(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	var calls []Target
	for name, n := range m.nodes {
		m.dir.Nodes[name].Seats["clock"] = []string{"now"}
		n.layout.Services = []Service{{Scope: ScopeNode, Seat: "clock", Assignment: "ntp", Verbs: []string{"now"}, Handler: says(name)}}
		calls = append(calls, Target{Node: name, Seat: "clock", Name: "now"})
	}
	shop := m.module("alpha", "shop", calls...)
	m.apply()
	shop.connect()
	for _, c := range calls {
		r, err := shop.call(c, "?")
		must(t, err)
		if want := c.Node + " to alpha/shop: now ?"; string(r.Data) != want || r.Header.Get("Meshd-Node") != c.Node {
			t.Errorf("%s: answer is %q %v, want %q", c, r.Data, r.Header, want)
		}
	}
}

func TestDeadlineOfARequest(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"": defaultDeadline, "x": defaultDeadline, "-1": defaultDeadline, "0": defaultDeadline,
		"1": time.Millisecond, "1500": 1500 * time.Millisecond, "60001": maxDeadline, "99999999999999": defaultDeadline,
	} {
		if got := timeLeft(nats.Header{headerDeadline: {text}}); got != want {
			t.Errorf("%q leaves %v, want %v", text, got, want)
		}
	}
}

func TestCallSubjectsReadBack(t *testing.T) {
	caller := Caller{Node: "alpha", Assignment: "shop@alpha"}
	for subject, want := range map[string]Target{
		"call.alpha.shop@alpha.seat.store.query":        {Seat: "store", Name: "query"},
		"call.alpha.shop@alpha.nodeseat.beta.clock.now": {Node: "beta", Seat: "clock", Name: "now"},
		"call.alpha.shop@alpha.tool.beta.pg@beta.size":  {Node: "beta", Assignment: "pg@beta", Name: "size"},
	} {
		if got := want.CallSubject(caller); got != subject {
			t.Errorf("%v is called at %s, want %s", want, got, subject)
		}
		if who, got, err := parseCall(subject); err != nil || who != caller || got != want {
			t.Errorf("%s reads back as %v %v (%v)", subject, who, got, err)
		}
	}
	for _, subject := range []string{"", "call", "call.a.b.seat.s", "call.a.b.seat.s.v.w", "call.a.b.tool.n.t", "call.a.b.else.n.a.t", "call.a.b.seat.*.v"} {
		if _, _, err := parseCall(subject); err == nil {
			t.Errorf("%q was taken for a call", subject)
		}
	}
}
