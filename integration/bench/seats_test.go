package bench

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"meshd/integration"
	"meshd/peer/api"
	"meshd/peer/manifest"
	"meshd/raftfsm"
)

// kills is how often a node is killed in each part of the failover: ten give a
// median, and two hundred what the slowest of them take.
var kills = flag.Int("kills", 10, "how often each part of Seats kills or moves")

// The budgets, for a machine with nothing else to do.
const (
	failoverAllowed = 2 * time.Second        // the lease, what clocks may differ, an election of three heartbeats at the worst
	silenceAllowed  = 100 * time.Millisecond // without its leader a holder goes on
	handoverAllowed = 50 * time.Millisecond  // two commits and two requests
)

// polling is the pause between two calls of the one who watches for gaps.
const polling = 2 * time.Millisecond

const clockYAML = `seat: clock
verbs: [now]
---
module: clock
run: {external: true}
claims: [clock]
serves:
  clock:
    now: {http: "%s"}
---
assign: clock
nodes: [alpha, beta, gamma]
`

// BenchmarkSeats measures how long a seat is not answered, on a mesh of its own.
func BenchmarkSeats(b *testing.B) {
	m := integration.New(build(b), shortDir(b))
	b.Cleanup(func() {
		if err := m.Close(); err != nil {
			b.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(b.Context(), within)
	defer cancel()
	if err := m.Start(ctx, "alpha", "beta", "gamma"); err != nil {
		b.Fatal(err)
	}
	answering := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") }))
	b.Cleanup(answering.Close)
	s := &seats{mesh: m, names: []string{"alpha", "beta", "gamma"}}
	s.push(b, fmt.Sprintf(clockYAML, answering.URL))
	b.Run("failover/holder", func(b *testing.B) { s.failover(b, "the holder's node, which does not lead", false) })
	b.Run("failover/both", func(b *testing.B) { s.failover(b, "the holder's node, which leads", true) })
	b.Run("failover/leader", func(b *testing.B) { s.leader(b) })
	b.Run("handover", func(b *testing.B) { s.handover(b) })
}

// seats is a mesh with a seat that is answered on each of its nodes.
type seats struct {
	mesh  *integration.Mesh
	names []string
}

func (s *seats) node(b *testing.B, name string) *integration.Node {
	b.Helper()
	n, err := s.mesh.Node(name)
	if err != nil {
		b.Fatal(err)
	}
	return n
}

func (s *seats) client(b *testing.B, name string) *api.Client {
	b.Helper()
	return api.NewClient(s.node(b, name).Socket())
}

func (s *seats) push(b *testing.B, yaml string) {
	b.Helper()
	parsed, err := manifest.Parse(manifest.Source{Name: "clock.yaml", Data: []byte(yaml)})
	if err != nil {
		b.Fatal(err)
	}
	c := s.client(b, s.names[0])
	defer c.Close()
	if _, err := c.Push(b.Context(), api.Push{Documents: parsed.Documents}); err != nil {
		b.Fatal(err)
	}
}

// until asks a node until it is so.
func until(b *testing.B, c *api.Client, what string, reached func(api.Overview) bool) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), within)
	defer cancel()
	o, err := c.Overview(ctx)
	for err == nil && !reached(o) {
		o, err = c.Newer(ctx, o.Index, 100*time.Millisecond)
	}
	if err != nil {
		b.Fatalf("wait until %s: %v", what, err)
	}
}

// ready waits until all nodes have a lease, and names the leader and two others.
func (s *seats) ready(b *testing.B) (leader string, others []string) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), within)
	defer cancel()
	if err := s.mesh.Settle(ctx); err != nil {
		b.Fatal(err)
	}
	c := s.client(b, s.names[0])
	defer c.Close()
	until(b, c, "all nodes have a lease", func(o api.Overview) bool {
		leader = o.Leader
		return leader != "" && len(o.State.Sessions) == len(s.names)
	})
	for _, name := range s.names {
		if name != leader {
			others = append(others, name)
		}
	}
	return leader, others
}

// hold moves the seat to a node, and waits until another has it answered from there.
func (s *seats) hold(b *testing.B, node, asker string) *api.Client {
	b.Helper()
	c := s.client(b, asker)
	if _, err := c.MoveSeat(b.Context(), raftfsm.MoveSeat{Seat: "clock", Node: node}); err != nil {
		b.Fatal(err)
	}
	until(b, c, "the seat is answered on "+node, func(o api.Overview) bool {
		seat := o.State.Seats["clock"]
		return seat.Session != 0 && o.State.NodeName(o.State.Assignments[seat.Holder].Node) == node
	})
	if r, err := answer(b.Context(), c); err != nil || r.Node != node {
		b.Fatalf("the seat was moved to %s, and %s answers (%v)", node, r.Node, err)
	}
	return c
}

// answer calls until there is an answer: a call gives up a dark seat after 2 s.
func answer(ctx context.Context, c *api.Client) (r api.CallReply, err error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		r, err = c.Call(ctx, "clock.now", []byte("{}"), 0)
		var e *api.Error
		if err == nil || ctx.Err() != nil || !errors.As(err, &e) || e.Code != "no-holder" && e.Code != "unreachable" && e.Code != "not-the-holder" {
			return r, err
		}
	}
}

// again is how soon another caller joins those who wait for the first answer: a call
// that was sent before it is known that a node is gone is lost with it.
const again = 50 * time.Millisecond

// first returns the first of the answers to calls that begin one after another.
func first(ctx context.Context, c *api.Client) (api.CallReply, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	answers := make(chan api.CallReply)
	next := time.NewTicker(again)
	defer next.Stop()
	for {
		go func() {
			if r, err := answer(ctx, c); err == nil {
				select {
				case answers <- r:
				case <-ctx.Done():
				}
			}
		}()
		select {
		case r := <-answers:
			return r, nil
		case <-next.C:
		case <-ctx.Done():
			return api.CallReply{}, ctx.Err()
		}
	}
}

// failover kills the holder's node, and calls from another as soon as it is dead.
func (s *seats) failover(b *testing.B, whom string, leads bool) {
	var took []time.Duration
	for range *kills {
		leader, others := s.ready(b)
		victim, asker := others[0], others[1]
		if leads {
			victim = leader
		}
		c := s.hold(b, victim, asker)
		began := time.Now()
		if err := s.node(b, victim).Kill(); err != nil {
			b.Fatal(err)
		}
		r, err := first(b.Context(), c)
		if err != nil || r.Node == victim {
			b.Fatalf("after %s was killed %s answers: %v", victim, r.Node, err)
		}
		took = append(took, time.Since(began))
		c.Close()
		if err := s.node(b, victim).Start(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	report(b, fmt.Sprintf("from kill -9 of %s to the first answer of another, %d times", whom, *kills), failoverAllowed, line{"first answer", took})
}

// leader kills the leader, while another holds the seat and a third asks.
func (s *seats) leader(b *testing.B) {
	var gaps []time.Duration
	for range *kills {
		leader, others := s.ready(b)
		c := s.hold(b, others[0], others[1])
		w := watch(c)
		if err := s.node(b, leader).Kill(); err != nil {
			b.Fatal(err)
		}
		until(b, c, "there is another leader", func(o api.Overview) bool { return o.Leader != "" && o.Leader != leader })
		gaps = append(gaps, w.end(b))
		c.Close()
		if err := s.node(b, leader).Start(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	report(b, fmt.Sprintf("the longest silence of a seat whose holder does not lead, while its leader is killed and another elected, %d times", *kills), silenceAllowed, line{"silence", gaps})
}

// handover moves the seat between the two that do not lead, while the leader asks.
// Beside that it asks for as long while nothing moves.
func (s *seats) handover(b *testing.B) {
	leader, others := s.ready(b)
	s.hold(b, others[0], leader).Close()
	c := s.client(b, leader)
	defer c.Close()
	var moves, beside, gaps []time.Duration
	for i := range *kills {
		w := watch(c)
		began := time.Now()
		s.hold(b, others[(i+1)%2], leader).Close()
		took := time.Since(began)
		moves = append(moves, took)
		gaps = append(gaps, w.end(b))
		w = watch(c)
		<-time.After(took)
		beside = append(beside, w.end(b))
	}
	report(b, fmt.Sprintf("the longest silence of a seat that is moved, asked every %v, %d times", polling, *kills), handoverAllowed,
		line{"silence", gaps}, line{"the same, unmoved", beside}, line{"the whole move", moves})
}

// watcher is somebody who asks again and again, and notes the longest time between
// two answers.
type watcher struct {
	stop    context.CancelFunc
	ended   chan struct{} // closed when it has ended; the rest is read then
	longest time.Duration
	err     error
}

func watch(c *api.Client) *watcher {
	ctx, stop := context.WithCancel(context.Background())
	w := &watcher{stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(w.ended)
		for last := time.Now(); ctx.Err() == nil && w.err == nil; {
			_, w.err = answer(context.WithoutCancel(ctx), c)
			now := time.Now()
			w.longest = max(w.longest, now.Sub(last))
			last = now
			select {
			case <-time.After(polling):
			case <-ctx.Done():
			}
		}
	}()
	return w
}

// end returns the longest time between two answers.
func (w *watcher) end(b *testing.B) time.Duration {
	b.Helper()
	w.stop()
	<-w.ended
	if w.err != nil {
		b.Fatal(w.err)
	}
	return w.longest
}

// line is one row of a report: what was measured, and how long it took each time.
type line struct {
	what string
	all  []time.Duration
}

// report prints rows, the first of which has a budget.
func report(b *testing.B, title string, allowed time.Duration, lines ...line) {
	b.Helper()
	var text strings.Builder
	fmt.Fprintln(&text, title)
	for _, l := range lines {
		fmt.Fprintf(&text, "  %-17s  %s  (slowest %s)\n", l.what, spread(l.all), ms(quantile(l.all, 4)))
	}
	fmt.Fprintf(&text, "  %-17s  %s: %s", "allowed", ms(allowed), verdict(median(lines[0].all) <= allowed))
	b.Log(text.String())
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(lines[0].all).Seconds()*1e3, "ms")
	b.ReportMetric(quantile(lines[0].all, 4).Seconds()*1e3, "slowest-ms")
}
