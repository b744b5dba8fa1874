package integration

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"meshd/peer/api"
)

// pace is the pause between two calls of a loop: no loss of a few milliseconds
// goes unseen, and the machine has time for the mesh.
const pace = 2 * time.Millisecond

// ask reads what the first running node of the mesh knows.
func (s *stage) ask(ctx context.Context) (api.Overview, error) {
	i := slices.IndexFunc(s.mesh.nodes, (*Node).Answers)
	if i < 0 {
		return api.Overview{}, errors.New("no node runs")
	}
	client := api.NewClient(s.mesh.nodes[i].Socket())
	defer client.Close()
	return client.Overview(ctx)
}

// leader prints the leader's name, once there is one that runs.
func leader(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	if len(args) != 0 {
		return errUsage
	}
	return s.named(ctx, ts, "the leader", func(o api.Overview) string { return o.Leader })
}

// holder prints the node of the seat's holder, once that is one that runs and may
// answer.
func holder(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	return s.named(ctx, ts, "the holder of "+args[0], func(o api.Overview) string {
		seat := o.State.Seats[args[0]]
		if seat.Session == 0 {
			return ""
		}
		return o.State.NodeName(o.State.Assignments[seat.Holder].Node)
	})
}

// named waits until what is looked for is a node that runs, and prints its name.
func (s *stage) named(ctx context.Context, ts *testscript.TestScript, what string, look func(api.Overview) string) error {
	var name string
	var err error
	late := until(ctx, func() bool {
		var o api.Overview
		if o, err = s.ask(ctx); err != nil {
			return false
		}
		name = look(o)
		n, gone := s.mesh.Node(name)
		return gone == nil && n.Answers()
	})
	if late != nil {
		return fmt.Errorf("wait for %s: %w; it is %q (%v)", what, late, name, err)
	}
	fmt.Fprintln(ts.Stdout(), name)
	return nil
}

// another prints a node that runs and is none of those.
func another(_ context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	for _, n := range s.mesh.nodes {
		if n.Answers() && !slices.Contains(args, n.Name) {
			fmt.Fprintln(ts.Stdout(), n.Name)
			return nil
		}
	}
	return fmt.Errorf("no other node than %s runs", strings.Join(args, ", "))
}

// loop is calls that are made one after another beside the script.
type loop struct {
	stop  context.CancelFunc
	ended chan struct{} // closed when it has ended; the rest is read then

	who    map[string]int // how often each node answered
	failed []error
	worst  time.Duration // that a call took
}

// calling begins a loop of calls, and returns when the first was answered.
func calling(ctx context.Context, s *stage, _ *testscript.TestScript, args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	if s.loop != nil {
		return errors.New("a loop of calls runs already")
	}
	n, err := s.mesh.Node(args[0])
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(context.Background())
	l, first := &loop{stop: stop, ended: make(chan struct{}), who: map[string]int{}}, make(chan struct{})
	s.loop = l
	go l.run(running, n.Socket(), args[1], first)
	select {
	case <-first:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *loop) run(ctx context.Context, socket, target string, first chan struct{}) {
	defer close(l.ended)
	client := api.NewClient(socket)
	defer client.Close()
	for ctx.Err() == nil {
		began := time.Now()
		r, err := client.Call(context.WithoutCancel(ctx), target, []byte("{}"), 0)
		if err != nil {
			l.failed = append(l.failed, err)
		} else {
			l.who[r.Node]++
		}
		l.worst = max(l.worst, time.Since(began))
		if first != nil {
			close(first)
			first = nil
		}
		select {
		case <-time.After(pace):
		case <-ctx.Done():
		}
	}
}

// end stops the loop. A call takes some seconds at most.
func (l *loop) end() {
	l.stop()
	<-l.ended
}

// called ends the loop, and prints who answered. It fails if a call failed.
func called(_ context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	if len(args) != 0 || s.loop == nil {
		return errUsage
	}
	l := s.loop
	s.loop = nil
	l.end()
	for _, node := range slices.Sorted(maps.Keys(l.who)) {
		fmt.Fprintf(ts.Stdout(), "%d by %s\n", l.who[node], node)
	}
	ts.Logf("[the longest call took %v]", l.worst.Round(time.Millisecond))
	if len(l.failed) > 0 {
		return fmt.Errorf("%d calls failed: %w", len(l.failed), errors.Join(l.failed...))
	}
	return nil
}
