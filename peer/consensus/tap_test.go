package consensus

import (
	"context"
	"io"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	"meshd/peer/network"
)

type idle struct{}

func (idle) Apply(uint64, []byte) (any, error) { return nil, nil }
func (idle) Snapshot() (io.WriterTo, error)    { return strings.NewReader(""), nil }
func (idle) Restore(io.Reader) error           { return nil }
func openTap(t *testing.T, f *network.Fabric, id string) *tap {
	t.Helper()
	x, err := newTap(id, f.Join(id), 500*time.Millisecond, 100*time.Millisecond, newLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	x.serve(func(raft.RPC) bool { return false }, func(raft.ServerID, uint64) bool { return false })
	return x
}

// answer serves the RPCs of a tap until stop is closed.
func answer(x *tap, stop <-chan struct{}, reply func(command any) any) {
	for {
		select {
		case rpc := <-x.Consumer():
			rpc.Respond(reply(rpc.Command), nil)
		case <-stop:
			return
		}
	}
}

func TestHeartbeatsHaveNoFastPath(t *testing.T) {
	// hashicorp/raft#695: with the handler installed, a heartbeat changes the term beside the main loop.
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		n, err := Open(Config{Node: "a", Streams: f.Join("a"), Disk: MemoryDisk(), Machine: idle{},
			Timing: LAN(), Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		handler := reflect.ValueOf(n.tap.NetworkTransport).Elem().FieldByName("heartbeatFn")
		if !handler.IsValid() {
			t.Error("the library's transport has no field heartbeatFn any more: check how it treats heartbeats now")
		} else if !handler.IsNil() {
			t.Error("the library has installed its heartbeat handler")
		}
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}

		a, b := openTap(t, f, "b"), openTap(t, f, "c")
		defer a.Close()
		defer b.Close()
		b.SetHeartbeatHandler(func(raft.RPC) { t.Error("a heartbeat took the fast path") })
		stop := make(chan struct{})
		defer close(stop)
		seen := make(chan uint64, 1)
		go answer(b, stop, func(c any) any {
			req := c.(*raft.AppendEntriesRequest)
			seen <- req.Term
			return &raft.AppendEntriesResponse{Term: req.Term, Success: true}
		})
		beat := &raft.AppendEntriesRequest{
			RPCHeader: raft.RPCHeader{ProtocolVersion: 3, ID: []byte("b"), Addr: []byte("b")}, Term: 9,
		}
		if err := a.AppendEntries("c", "c", beat, &raft.AppendEntriesResponse{}); err != nil {
			t.Fatal(err)
		}
		if term := <-seen; term != 9 {
			t.Errorf("the main loop saw term %d", term)
		}
	})
}

func TestARestartedPeerGetsTheVoteRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a := openTap(t, f, "a")
		defer a.Close()
		grant := func(c any) any {
			switch c := c.(type) {
			case *raft.RequestVoteRequest:
				return &raft.RequestVoteResponse{Term: c.Term, Granted: true}
			case *raft.RequestPreVoteRequest:
				return &raft.RequestPreVoteResponse{Term: c.Term, Granted: true}
			default:
				return &raft.AppendEntriesResponse{Success: true}
			}
		}
		vote := func() error {
			var resp raft.RequestVoteResponse
			return a.RequestVote("b", "b", &raft.RequestVoteRequest{Term: 2}, &resp)
		}
		preVote := func() error {
			var resp raft.RequestPreVoteResponse
			return a.RequestPreVote("b", "b", &raft.RequestPreVoteRequest{Term: 2}, &resp)
		}
		for _, ask := range []func() error{vote, preVote} {
			b := openTap(t, f, "b")
			stop := make(chan struct{})
			// As many at once as the pool holds, so that every pooled stream is stale afterwards.
			f.Slow("a", "b", time.Millisecond)
			done := make(chan error)
			for range pooled {
				go func() { done <- ask() }()
			}
			go answer(b, stop, grant)
			for range pooled {
				if err := <-done; err != nil {
					t.Fatal(err)
				}
			}
			f.Heal()
			close(stop)
			f.Kill("b")
			b.Close()

			b = openTap(t, f, "b")
			stop = make(chan struct{})
			go answer(b, stop, grant)
			if err := ask(); err != nil {
				t.Errorf("the first vote after a restart: %v", err)
			}
			close(stop)
			f.Kill("b")
			b.Close()
		}
		// A peer that is silent is asked once: a time-out is not a stale stream.
		b := openTap(t, f, "b")
		defer b.Close()
		f.Isolate("b")
		start := time.Now()
		if err := vote(); err == nil {
			t.Error("a vote over a cut link")
		}
		if d := time.Since(start); d > 600*time.Millisecond {
			t.Errorf("asked a silent peer for %v", d)
		}
	})
}

func TestANewVoterIsElectedByOneThatDoesNotKnowItYet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		nodes := map[string]*Node{}
		for _, id := range []string{"a", "b", "c"} {
			n, err := Open(Config{Node: id, Streams: f.Join(id), Disk: MemoryDisk(), Machine: idle{},
				Timing: LAN(), Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			nodes[id] = n
			t.Cleanup(func() {
				if err := n.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		a := nodes["a"]
		change := func(f func(context.Context, string, uint64) error, id string) {
			t.Helper()
			_, at := a.Servers()
			if err := f(t.Context(), id, at); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		if err := a.Bootstrap(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		change(a.AddLearner, "b")
		change(a.Promote, "b")
		change(a.AddLearner, "c")
		// b hears nothing of the next change, and then the leader is gone for ever.
		f.CutOneWay("a", "b")
		_, at := a.Servers()
		if err := a.Promote(t.Context(), "c", at); err != nil {
			t.Fatal(err)
		}
		f.Isolate("a")
		f.Kill("a")
		f.Isolate("a")
		time.Sleep(5 * time.Second)
		if b, c := nodes["b"].State(), nodes["c"].State(); b != "follower" || c != "leader" {
			t.Errorf("b is %s and c is %s", b, c)
		}
		if servers, _ := nodes["b"].Servers(); len(servers) != 3 || !servers[2].Voter {
			t.Errorf("b has not learnt who votes: %+v", servers)
		}
	})
}

func TestTapRemembersAppends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		x := openTap(t, f, "a")
		defer x.Close()
		start := time.Now()
		at := func(term uint64) {
			time.Sleep(time.Second)
			x.noteInbound(&raft.AppendEntriesRequest{RPCHeader: raft.RPCHeader{ID: []byte("b")}, Term: term})
		}
		want := func(term uint64, after time.Duration) {
			t.Helper()
			if got := x.lastAppendBefore(term).Sub(start); got != after {
				t.Errorf("the last append before term %d was after %v, want %v", term, got, after)
			}
		}
		want(5, 0) // nothing yet: the start, which is later than anything forgotten
		at(3)
		at(3)
		want(3, 0)
		want(4, 2*time.Second)
		at(5)
		want(5, 2*time.Second)
		at(4) // from a deposed leader, and refused: it vouches for nothing
		want(5, 2*time.Second)
		want(6, 3*time.Second)
		at(7)
		want(7, 3*time.Second)
		want(5, 3*time.Second) // two terms back it may only err to the later side
		if heard := x.of("b").heard; !heard.Equal(time.Now()) {
			t.Errorf("heard of the leader at %v, it is %v", heard, time.Now())
		}
	})
}
