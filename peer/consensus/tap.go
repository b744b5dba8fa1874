package consensus

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

const (
	// pooled is how many idle streams to one peer are kept: heartbeats, replication and votes each
	// use one at a time.
	pooled = 3
	// deadStream is how soon an RPC on a stream fails whose peer is gone: at once. A failure that
	// took longer was a time-out, and asking again would take as long.
	deadStream = 50 * time.Millisecond
	// lookAgain is how soon a held append finds that it is no longer wanted.
	lookAgain = time.Second
)

// Streams opens streams to nodes by id, and takes those that they open. Both are authenticated.
type Streams interface {
	Listen(proto string) (net.Listener, error)
	Dial(ctx context.Context, node, proto string) (net.Conn, error)
}

// proto is the protocol name of the streams.
const proto = "raft"

// layer gives the library its streams. Addresses are node ids.
type layer struct {
	net.Listener
	self    string
	streams Streams
	life    context.Context // of the dials

	mu     sync.Mutex
	open   map[net.Conn]struct{} // accepted; the library leaves those to the listener
	closed bool
}

func (l *layer) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		c.Close()
		return nil, net.ErrClosed
	}
	l.open[c] = struct{}{}
	return &accepted{c, l}, nil
}

// accepted leaves the layer's list when the library closes it.
type accepted struct {
	net.Conn
	layer *layer
}

func (a *accepted) Close() error {
	a.layer.mu.Lock()
	delete(a.layer.open, a.Conn)
	a.layer.mu.Unlock()
	return a.Conn.Close()
}

func (l *layer) Close() error {
	err := l.Listener.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for c := range l.open {
		c.Close()
	}
	return err
}

func (l *layer) Addr() net.Addr { return nodeAddr(l.self) }

func (l *layer) Dial(to raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(l.life, timeout)
	defer cancel()
	return l.streams.Dial(ctx, string(to), proto)
}

type nodeAddr string

func (nodeAddr) Network() string  { return "node" }
func (a nodeAddr) String() string { return string(a) }

// contact is what the RPCs with one peer showed.
type contact struct {
	heard   time.Time // newest sign of life of any kind, by receipt
	term    uint64    // of acked and matched
	acked   time.Time // when the newest append was SENT that the peer acknowledged in term
	matched uint64    // its log is known to agree with ours up to here
}

// tap is the transport of a node, and sees every RPC.
//
// It never installs the library's heartbeat handler: in v1.8.0 that handler runs beside the main
// loop, and a heartbeat with a newer term changes the term under it, so that a deposed leader can
// append in a term that it does not own (hashicorp/raft#695). Without the handler heartbeats go
// through the main loop like every RPC.
//
// It asks again for a vote that died with a stale pooled stream: after a peer has restarted the
// first vote would otherwise be lost for the whole round. Votes may be asked for twice.
//
// It keeps an append that failed until its peer gives a sign of life, which the heartbeats beside it
// ask for: the library waits longer after each failure, 10 s in the end, and cannot be woken.
type tap struct {
	*raft.NetworkTransport
	started time.Time
	rpcs    chan raft.RPC
	life    context.Context // of dials, of holds and of the hand-over of RPCs
	letGo   func()          // ends life: the library does not stop before
	volley  volley          // of heartbeats
	wg      sync.WaitGroup

	mu       sync.Mutex
	peers    map[raft.ServerID]contact
	holds    holds
	outTerm  uint64    // newest term in which we sent an append
	outSince time.Time // when the first was sent
	inTerm   uint64    // newest term of an append that we received
	inAt     time.Time // receipt of the newest in inTerm
	prevAt   time.Time // receipt of the newest in any term before
}

// holds is what calls of the tap wait for.
type holds struct {
	wanted  func(id raft.ServerID, term uint64) bool // see Node.replicates; nil before serve
	awaited map[raft.ServerID]chan struct{}          // closed when the peer is heard
	acks    chan struct{}                            // closed at the next acknowledgement; nil when nobody waits
}

var (
	_ raft.Transport   = (*tap)(nil)
	_ raft.WithPreVote = (*tap)(nil)
	_ raft.WithClose   = (*tap)(nil)
)

func newTap(self string, streams Streams, timeout, beat time.Duration, log hclog.Logger) (*tap, error) {
	lis, err := streams.Listen(proto)
	if err != nil {
		return nil, err
	}
	x := &tap{
		started: time.Now(),
		rpcs:    make(chan raft.RPC),
		peers:   map[raft.ServerID]contact{},
		holds:   holds{awaited: map[raft.ServerID]chan struct{}{}},
	}
	x.volley.beat = beat
	x.life, x.letGo = context.WithCancel(context.Background())
	x.NetworkTransport = raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream:  &layer{Listener: lis, self: self, streams: streams, life: x.life, open: map[net.Conn]struct{}{}},
		MaxPool: pooled,
		Timeout: timeout,
		Logger:  log,
		// One: a follower that stalls can wedge pipelined replication until the leader restarts
		// (hashicorp/raft#612), and pipelining gains little at our rates.
		MaxRPCsInFlight: 1,
	})
	return x, nil
}

// serve hands inbound RPCs to the main loop from now on, noting each before it is processed. take sees
// it then, and may answer it. wanted tells what is worth holding.
func (x *tap) serve(take func(raft.RPC) bool, wanted func(raft.ServerID, uint64) bool) {
	x.mu.Lock()
	x.holds.wanted = wanted
	x.mu.Unlock()
	x.wg.Go(func() { x.forward(take) })
}

// campaign makes this node a candidate at once, as a leader does that hands over to it.
func (x *tap) campaign() {
	now := raft.RPC{
		Command:  &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}},
		RespChan: make(chan raft.RPCResponse, 1),
	}
	x.wg.Go(func() {
		select {
		case x.rpcs <- now:
		case <-x.life.Done():
		}
	})
}

func (x *tap) forward(take func(raft.RPC) bool) {
	for {
		select {
		case rpc := <-x.NetworkTransport.Consumer():
			x.noteInbound(rpc.Command)
			if take(rpc) {
				continue
			}
			select {
			case x.rpcs <- rpc:
			case <-x.life.Done():
				return
			}
		case <-x.life.Done():
			return
		}
	}
}

// Consumer implements raft.Transport.
func (x *tap) Consumer() <-chan raft.RPC { return x.rpcs }

// SetHeartbeatHandler installs nothing; see tap.
func (x *tap) SetHeartbeatHandler(func(raft.RPC)) {}

// Close ends the transport and every stream of it.
func (x *tap) Close() error {
	x.letGo()
	err := x.NetworkTransport.Close()
	x.NetworkTransport.CloseStreams()
	x.wg.Wait()
	return err
}

func (x *tap) noteInbound(command any) {
	now := time.Now()
	x.mu.Lock()
	defer x.mu.Unlock()
	if h, ok := command.(raft.WithRPCHeader); ok {
		x.hear(raft.ServerID(h.GetRPCHeader().ID), now)
	}
	a, ok := command.(*raft.AppendEntriesRequest)
	if !ok || a.Term < x.inTerm {
		return
	}
	if a.Term > x.inTerm {
		if x.inAt.After(x.prevAt) {
			x.prevAt = x.inAt
		}
		x.inTerm = a.Term
	}
	x.inAt = now
}

// hear must be called with mu held.
func (x *tap) hear(id raft.ServerID, at time.Time) {
	c := x.peers[id]
	c.heard = at
	x.peers[id] = c
	if awaited, ok := x.holds.awaited[id]; ok {
		close(awaited)
		delete(x.holds.awaited, id)
	}
}

// hold returns when the peer was heard after an instant, or when nothing is to be sent to it any more.
func (x *tap) hold(id raft.ServerID, term uint64, after time.Time) {
	for {
		x.mu.Lock()
		wanted := x.holds.wanted
		heard := x.peers[id].heard.After(after)
		next, ok := x.holds.awaited[id]
		if !ok {
			next = make(chan struct{})
			x.holds.awaited[id] = next
		}
		x.mu.Unlock()
		if heard || wanted == nil || !wanted(id, term) {
			return
		}
		select {
		case <-next:
		case <-time.After(lookAgain):
		case <-x.life.Done():
			return
		}
	}
}

// AppendEntries implements raft.Transport.
func (x *tap) AppendEntries(id raft.ServerID, to raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	heartbeat := req.PrevLogEntry == 0 && req.LeaderCommitIndex == 0 && len(req.Entries) == 0
	if heartbeat {
		x.volley.join(x.life, x.inTouch())
	}
	sent := time.Now()
	x.mu.Lock()
	if req.Term > x.outTerm {
		x.outTerm, x.outSince = req.Term, sent
	}
	x.mu.Unlock()
	// The library shares one resp between heartbeats, so it is read only after a clean return.
	if err := x.NetworkTransport.AppendEntries(id, to, req, resp); err != nil {
		if !heartbeat {
			x.hold(id, req.Term, sent)
		}
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.hear(id, time.Now())
	if !resp.Success || resp.Term != req.Term {
		return nil
	}
	c := x.peers[id]
	if req.Term < c.term {
		return nil
	}
	if req.Term > c.term {
		c.term, c.acked, c.matched = req.Term, time.Time{}, 0
	}
	if sent.After(c.acked) {
		c.acked = sent
	}
	if x.holds.acks != nil {
		close(x.holds.acks)
		x.holds.acks = nil
	}
	// A heartbeat names no entry and proves nothing about the log.
	c.matched = max(c.matched, req.PrevLogEntry+uint64(len(req.Entries)))
	x.peers[id] = c
	return nil
}

// InstallSnapshot implements raft.Transport.
func (x *tap) InstallSnapshot(id raft.ServerID, to raft.ServerAddress, req *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, data io.Reader) error {
	sent := time.Now()
	err := x.NetworkTransport.InstallSnapshot(id, to, req, resp, data)
	if err != nil {
		x.hold(id, req.Term, sent)
	}
	return err
}

// inTouch is how many peers have acknowledged something lately.
func (x *tap) inTouch() (n int) {
	now := time.Now()
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, c := range x.peers {
		if c.term == x.outTerm && now.Sub(c.acked) < 4*x.volley.beat {
			n++
		}
	}
	return n
}

// RequestVote implements raft.Transport.
func (x *tap) RequestVote(id raft.ServerID, to raft.ServerAddress, req *raft.RequestVoteRequest, resp *raft.RequestVoteResponse) error {
	return x.ask(id, func() error { return x.NetworkTransport.RequestVote(id, to, req, resp) })
}

// RequestPreVote implements raft.WithPreVote.
func (x *tap) RequestPreVote(id raft.ServerID, to raft.ServerAddress, req *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse) error {
	return x.ask(id, func() error { return x.NetworkTransport.RequestPreVote(id, to, req, resp) })
}

// ask makes a vote RPC until it is answered on a fresh stream. An RPC that fails takes its stream out
// of the pool, so after as many quick failures as the pool holds the next one dials.
func (x *tap) ask(id raft.ServerID, rpc func() error) error {
	var err error
	for range pooled + 1 {
		start := time.Now()
		if err = rpc(); err == nil {
			x.mu.Lock()
			defer x.mu.Unlock()
			x.hear(id, time.Now())
			return nil
		}
		if errors.Is(err, raft.ErrTransportShutdown) || time.Since(start) >= deadStream {
			break
		}
	}
	return fmt.Errorf("ask %s for its vote: %w", id, err)
}

// nextAck is closed when a peer has acknowledged an append after this call.
func (x *tap) nextAck() <-chan struct{} {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.holds.acks == nil {
		x.holds.acks = make(chan struct{})
	}
	return x.holds.acks
}

// of returns what is known of a peer.
func (x *tap) of(id raft.ServerID) contact {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.peers[id]
}

// leadingSince is when the first append of a term was sent, or now if none was yet.
func (x *tap) leadingSince(term uint64) time.Time {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.outTerm == term {
		return x.outSince
	}
	return time.Now()
}

// lastAppendBefore is the receipt of the newest append of any term before the given one. A node
// that has restarted answers with its start, which is later than anything it forgot.
func (x *tap) lastAppendBefore(term uint64) time.Time {
	x.mu.Lock()
	defer x.mu.Unlock()
	at := x.prevAt
	if x.inTerm < term {
		at = x.inAt
	}
	if at.Before(x.started) {
		return x.started
	}
	return at
}
