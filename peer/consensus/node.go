// Package consensus keeps one log on several nodes, and one state machine on each that applies it.
//
// It is hashicorp/raft with its sharp edges covered: addresses are node ids, every wait has an end,
// what cannot be applied stops the node, and leadership is a context.
//
//	Open ──> a member once Bootstrap ran here, or once a leader added this node
//	  │
//	 Run ──> follower <──> candidate ──> leader: a barrier, then Config.Lead(ctx, term);
//	  │                                  ctx ends when the leadership does
//	Close
//
// Invariants:
//
//   - An entry for which Apply returned nil is in the log of a majority of voters, synced.
//   - Machine.Apply sees every committed entry once, in the order of the log, on every node; after a
//     restart it sees again those that came after the newest snapshot. As many of them as it had seen
//     before it sees in Open, without a leader; see mark.go.
//   - At most one Config.Lead runs at a time, and none before everything committed in earlier terms
//     was applied here. Lead and its context are no proof of leadership to others: an old leader
//     learns late that it is one. AckedSince is the proof.
//   - Nothing here reads the wall clock; timers affect speed, never safety.
package consensus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// patience bounds every proposal: without a quorum a write must have failed within 5 s.
	patience = 5 * time.Second
	// MaxEntry is the largest entry in bytes. Entries are replicated 64 at a time within one RPC
	// time-out; what is larger is several entries.
	MaxEntry = 64 << 10
	// inFlight is how many proposals may wait at once; one more waits for a place.
	inFlight = 256
	// closePatience is how long Close waits for the library's goroutines.
	closePatience = 10 * time.Second
	// drainPatience is how long a node that stops waits for the proposals that are under way.
	drainPatience = time.Second
	// barrierWithin is how long the main loop has to take the barrier behind a change that it took.
	barrierWithin = 100 * time.Millisecond
	// takeoverRetry is the pause between barriers of a new leader that could not commit one.
	takeoverRetry = 100 * time.Millisecond

	snapshotInterval  = 2 * time.Minute
	snapshotThreshold = 4096 // entries since the last: about a megabyte of log to replay at most
	trailingLogs      = 4096 // kept behind a snapshot, so that a node away for minutes needs none
)

// ErrBootstrapped says that Bootstrap found a log.
var ErrBootstrapped = errors.New("this node has a log already; a mesh is made once, and other nodes join it")

// Config is what a node runs on. Machine, Streams and Disk belong to the node from Open to Close.
type Config struct {
	Node    string // id of this node, as Streams knows it; it lives and dies with Disk
	Streams Streams
	Disk    *Disk
	Machine Machine
	Timing  Timing
	// Lead runs while this node leads; nil for nothing. It must return when its context ends. If it
	// returns earlier it is not run again before the next leadership. It may be run twice in a term.
	Lead func(ctx context.Context, term uint64)
	// Led is called when this node believes in another leader than before, or in none, after Leader
	// tells so; nil for nothing. It must not wait.
	Led func()
	Log *slog.Logger
}

func (c Config) validate() error {
	faults := []error{c.Timing.Validate()}
	if c.Node == "" {
		faults = append(faults, errors.New("the node must have an id"))
	}
	if c.Streams == nil || c.Disk == nil || c.Machine == nil || c.Log == nil {
		faults = append(faults, errors.New("streams, disk, machine and log must all be set"))
	}
	return errors.Join(faults...)
}

// Node is one member of the mesh's raft.
type Node struct {
	cfg    Config
	raft   *raft.Raft
	tap    *tap
	driver *driver
	record record
	slots  chan struct{} // a place for each proposal under way
	news   chan struct{} // pokes spread: something was committed here
	hurry  chan struct{} // pokes beat: somebody waits for a proof
	stop   func() raft.Future

	closing   chan struct{}
	closeOnce sync.Once
	closeErr  error
}

// Open starts a node on its disk: it votes and follows at once. Close must be called. The disk is
// closed when Open fails.
func Open(cfg Config) (*Node, error) {
	n, err := open(cfg)
	if err == nil {
		return n, nil
	}
	if cfg.Disk != nil {
		err = errors.Join(err, cfg.Disk.close())
	}
	return nil, fmt.Errorf("open consensus node %s: %w", cfg.Node, err)
}

func open(cfg Config) (*Node, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	n := &Node{
		cfg:     cfg,
		driver:  newDriver(cfg.Machine, cfg.Disk),
		slots:   make(chan struct{}, inFlight),
		news:    make(chan struct{}, 1),
		hurry:   make(chan struct{}, 1),
		closing: make(chan struct{}),
	}
	logger := newLogger(cfg.Log)
	var err error
	if n.tap, err = newTap(cfg.Node, cfg.Streams, cfg.Timing.RPC, cfg.Timing.Beat, logger); err != nil {
		return nil, err
	}
	rc := raft.DefaultConfig()
	rc.LocalID = raft.ServerID(cfg.Node)
	rc.Logger = logger
	rc.LeaderLeaseTimeout = cfg.Timing.LeaderLease
	rc.CommitTimeout = cfg.Timing.Commit
	pace := pace(cfg.Timing, false)
	rc.HeartbeatTimeout, rc.ElectionTimeout = pace.HeartbeatTimeout, pace.ElectionTimeout
	rc.SnapshotInterval, rc.SnapshotThreshold, rc.TrailingLogs = pace.SnapshotInterval, pace.SnapshotThreshold, pace.TrailingLogs
	rc.ShutdownOnRemove = false // a node that lost its vote or was removed is told so; it decides for itself
	rc.NoLegacyTelemetry = true
	logs, err := raft.NewLogCache(512, cfg.Disk.logs)
	if err == nil {
		n.raft, err = raft.NewRaft(rc, n.driver, logs, cfg.Disk.stable, cfg.Disk.snapshots, n.tap)
	}
	if err != nil {
		return nil, errors.Join(err, n.driver.failure(), n.tap.Close())
	}
	if cfg.Led != nil {
		n.raft.RegisterObserver(raft.NewObserver(nil, false, func(o *raft.Observation) bool {
			if _, led := o.Data.(raft.LeaderObservation); led {
				cfg.Led()
			}
			return false
		}))
	}
	n.stop = sync.OnceValue(n.halt) // the library hands out one future that waits, and later ones that do not
	// The library falls back to an older snapshot when the machine refuses the newest. That is right
	// for a torn file, which its checksum finds first, and wrong for one of another version.
	if err := n.driver.failure(); err != nil {
		return nil, errors.Join(err, n.stop().Error())
	}
	before, _ := cfg.Disk.mark.get()
	n.record = record{whole: n.driver.replay(cfg.Disk.logs), index: before}
	n.tap.serve((&ballot{n.raft, cfg.Disk.logs, rc.LocalID}).take, n.replicates)
	cfg.Log.Info("raft heartbeats go through the main loop", "why", "hashicorp/raft#695")
	n.standAlone()
	return n, nil
}

// pace is what the library's timers are while this node leads, and while it does not: a leader's
// heartbeats are a tenth to a fifth of its own heartbeat time-out apart, which serves it for nothing
// else but twice the longest pause between its tries to reach a peer.
func pace(t Timing, leads bool) raft.ReloadableConfig {
	c := raft.ReloadableConfig{
		HeartbeatTimeout: t.Heartbeat, ElectionTimeout: t.Election,
		SnapshotInterval: snapshotInterval, SnapshotThreshold: snapshotThreshold, TrailingLogs: trailingLogs,
	}
	if leads {
		c.HeartbeatTimeout = max(10*t.Beat, t.LeaderLease)
		c.ElectionTimeout = max(c.HeartbeatTimeout, t.Election)
	}
	return c
}

// standAlone makes the only voter lead at once. It has nobody to wait for.
func (n *Node) standAlone() {
	servers, _ := n.Servers()
	voters := slices.DeleteFunc(servers, func(s Server) bool { return !s.Voter })
	if len(voters) == 1 && voters[0].ID == n.cfg.Node {
		n.tap.campaign()
	}
}

// replicates reports whether this node leads in a term and has the peer in its newest configuration.
func (n *Node) replicates(id raft.ServerID, term uint64) bool {
	if !n.Leads(term) {
		return false
	}
	servers, _ := n.Servers()
	return slices.ContainsFunc(servers, func(s Server) bool { return s.ID == string(id) })
}

// Bootstrap makes this node the first of a new mesh: the sole voter of an empty log. Refused with
// ErrBootstrapped where there is any state.
func (n *Node) Bootstrap() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	self := raft.Server{ID: raft.ServerID(n.cfg.Node), Address: raft.ServerAddress(n.cfg.Node)}
	_, err := n.await(ctx, func(time.Duration) raft.Future {
		return n.raft.BootstrapCluster(raft.Configuration{Servers: []raft.Server{self}})
	})
	switch {
	case errors.Is(err, raft.ErrCantBootstrap):
		return fmt.Errorf("bootstrap: %w", ErrBootstrapped)
	case err != nil:
		return fmt.Errorf("bootstrap: %w", err)
	}
	n.standAlone()
	return nil
}

// reign is one leadership of this node.
type reign struct {
	cancel context.CancelFunc
	done   chan struct{}
}

func (r *reign) end() {
	if r != nil {
		r.cancel()
		<-r.done
	}
}

// Run follows the leadership until ctx ends, and then returns nil. When the machine fails it takes
// the node out of the consensus and returns what failed: the process should exit.
func (n *Node) Run(ctx context.Context) error {
	var current *reign
	defer func() { current.end() }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.closing:
			return nil
		case <-n.driver.failed:
			current.end()
			n.stop() // Close waits for it
			return fmt.Errorf("consensus node %s stopped: %w", n.cfg.Node, n.driver.failure())
		case leads := <-n.raft.LeaderCh():
			// The channel keeps the newest value only: two "true" in a row are a leadership that was
			// lost and won again, so every value ends the reign before it.
			current.end()
			current = nil
			if err := n.raft.ReloadConfig(pace(n.cfg.Timing, leads)); err != nil {
				n.cfg.Log.Error("set the pace of raft", "leads", leads, "err", err) // both were validated
			}
			if leads {
				current = n.begin(ctx)
			}
		}
	}
}

func (n *Node) begin(ctx context.Context) *reign {
	ctx, cancel := context.WithCancel(ctx)
	r := &reign{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		defer cancel()
		n.lead(ctx)
	}()
	return r
}

// lead applies what earlier terms committed, and then leads. The term is read around the barrier: if
// it changed, a newer value is in the leader channel, and this reign is over.
func (n *Node) lead(ctx context.Context) {
	term := n.raft.CurrentTerm()
	for {
		err := n.Barrier(ctx)
		if err == nil {
			break
		}
		n.cfg.Log.Warn("new leader waits for its first commit", "term", term, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(takeoverRetry):
		}
	}
	if n.raft.CurrentTerm() != term || n.raft.State() != raft.Leader || n.cfg.Lead == nil {
		return
	}
	n.cfg.Log.Info("leading", "term", term)
	ctx, cancel := context.WithCancel(ctx)
	var spreading sync.WaitGroup
	spreading.Go(func() { n.spread(ctx) })
	spreading.Go(func() { n.beat(ctx) })
	defer spreading.Wait()
	defer cancel()
	n.cfg.Lead(ctx, term)
	n.cfg.Log.Info("not leading any more", "term", term)
}

// spread lets the followers hear at once of what was committed. The library tells them with the next
// entry, or when Timing.Commit has passed without one; asking them that often costs every node a per
// cent of a core for ever. So a commit is followed by a barrier, an entry of a few bytes, which several
// commits share.
func (n *Node) spread(ctx context.Context) {
	for {
		select {
		case <-n.news:
		case <-ctx.Done():
			return
		}
		if servers, _ := n.Servers(); len(servers) < 2 {
			continue
		}
		if err := n.Barrier(ctx); err != nil && ctx.Err() == nil {
			n.cfg.Log.Debug("followers hear of a commit a little later", "err", err)
		}
	}
}

// beatPause is the least time between two heartbeats that are hurried: one serves all who wait.
const beatPause = 20 * time.Millisecond

// beat sends heartbeats at once when somebody waits for a proof. The library's verdict on the leadership
// is not used: it counts learners, and answers to questions of before.
func (n *Node) beat(ctx context.Context) {
	for {
		select {
		case <-n.hurry:
		case <-ctx.Done():
			return
		}
		n.raft.VerifyLeader()
		select {
		case <-time.After(beatPause):
		case <-ctx.Done():
			return
		}
	}
}

// Leader names the node that this one believes to lead. It may be wrong, and known is false during
// an election.
func (n *Node) Leader() (id string, known bool) {
	_, l := n.raft.LeaderWithID()
	return string(l), l != ""
}

// State is "leader", "candidate", "follower" or "shutdown", as this node believes.
func (n *Node) State() string {
	switch n.raft.State() {
	case raft.Leader:
		return "leader"
	case raft.Candidate:
		return "candidate"
	case raft.Follower:
		return "follower"
	default:
		return "shutdown"
	}
}

// Term is the newest term that this node has seen.
func (n *Node) Term() uint64 { return n.raft.CurrentTerm() }

// CommitIndex is the index of the newest entry that a leader has said to be committed since this node
// was started: 0 until one speaks. What was before, Recorded knows.
func (n *Node) CommitIndex() uint64 { return n.raft.CommitIndex() }

// AppliedIndex is the newest index up to which the machine contains every entry. Entries of the
// library's own (barriers, memberships) have an index too, and nothing for the machine: they are
// stepped over, so that it reaches CommitIndex on a node that is up to date.
func (n *Node) AppliedIndex() uint64 {
	handed := n.raft.AppliedIndex() // handed to the driver, perhaps not applied yet
	at := n.driver.applied.Load()
	first, err := n.cfg.Disk.logs.FirstIndex()
	if err != nil || handed <= at {
		return at
	}
	switch {
	case first == 0:
		return handed // an empty log: all of it came in a snapshot
	case first > at+1:
		at = min(first-1, handed) // compacted, so contained in a snapshot that the machine made or took
	}
	for at < handed {
		var l raft.Log
		if err := n.cfg.Disk.logs.GetLog(at+1, &l); err != nil || l.Type == raft.LogCommand {
			break
		}
		at++
	}
	return max(at, n.driver.applied.Load())
}

// Server is one member of the raft configuration.
type Server struct {
	ID    string
	Voter bool
	// The rest is known on the leader only, from its own term.
	Matched uint64    // its log agrees with the leader's up to here
	Acked   time.Time // send time of the newest append that it acknowledged; the start of the term if none
}

// Servers lists the newest configuration, and the index of the newest committed one, which the calls
// that change it want back. While a change is under way the two differ, and another is refused.
func (n *Node) Servers() (servers []Server, index uint64) {
	index = n.driver.config.Load() // first, so that it is never newer than what is listed
	f := n.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, 0 // the library answers this from memory, and never with an error
	}
	term, leads := n.raft.CurrentTerm(), n.raft.State() == raft.Leader
	for _, s := range f.Configuration().Servers {
		srv := Server{ID: string(s.ID), Voter: s.Suffrage == raft.Voter}
		switch {
		case !leads:
		case srv.ID == n.cfg.Node:
			srv.Matched, srv.Acked = n.raft.LastIndex(), time.Now()
		default:
			srv.Acked = n.tap.leadingSince(term)
			if c := n.tap.of(s.ID); c.term == term {
				srv.Matched, srv.Acked = c.matched, c.acked
			}
		}
		servers = append(servers, srv)
	}
	return servers, index
}

// LastIndex is the index of the newest entry in this node's log, committed or not.
func (n *Node) LastIndex() uint64 { return n.raft.LastIndex() }

// Silent lists the voters that gave no sign of life for so long. A leader judges by what they
// acknowledged; a node without a leader by anything heard of them. A follower of a live leader hears
// of nobody else, and lists nobody: the leader knows.
func (n *Node) Silent(d time.Duration) []string {
	servers, _ := n.Servers()
	leads := n.raft.State() == raft.Leader
	if id, known := n.Leader(); known && id != n.cfg.Node && !leads {
		return nil
	}
	var silent []string
	for _, s := range servers {
		if !s.Voter || s.ID == n.cfg.Node {
			continue
		}
		last := s.Acked
		if !leads {
			last = n.tap.of(raft.ServerID(s.ID)).heard
			if last.Before(n.tap.started) {
				last = n.tap.started
			}
		}
		if time.Since(last) >= d {
			silent = append(silent, s.ID)
		}
	}
	return silent
}

// AckedSince reports whether a majority of voters, this node included, acknowledged in a term an
// append that this node sent at or after t. If so no other node can have led in a later term at t.
func (n *Node) AckedSince(term uint64, t time.Time) bool {
	servers, _ := n.Servers()
	voters, acked := 0, 0
	for _, s := range servers {
		if !s.Voter {
			continue
		}
		voters++
		c := n.tap.of(raft.ServerID(s.ID))
		if s.ID == n.cfg.Node || c.term == term && !c.acked.Before(t) {
			acked++
		}
	}
	return voters > 0 && acked >= voters/2+1
}

// Prove returns nil once AckedSince, and an error when this node does not lead in the term any more or
// when ctx ends. It waits for the next heartbeat, or hurries it.
func (n *Node) Prove(ctx context.Context, term uint64, t time.Time, hurry bool) error {
	for {
		next := n.tap.nextAck()
		switch {
		case !n.Leads(term):
			return fmt.Errorf("prove the leadership of term %d: %w", term, &NotLeaderError{})
		case n.AckedSince(term, t):
			return nil
		case hurry:
			select {
			case n.hurry <- struct{}{}:
			default:
			}
		}
		select {
		case <-next:
		case <-ctx.Done():
			return fmt.Errorf("prove the leadership of term %d: no majority of voters answered: %w", term, ctx.Err())
		case <-n.closing:
			return ErrClosed
		}
	}
}

// Leads reports whether this node believes to lead in a term. It is no proof of it to others.
func (n *Node) Leads(term uint64) bool {
	return n.raft.State() == raft.Leader && n.raft.CurrentTerm() == term
}

// LeadingSince is when this node sent the first append of a term, or now if it sent none: not before it
// was elected in it.
func (n *Node) LeadingSince(term uint64) time.Time { return n.tap.leadingSince(term) }

// LastAppendBefore is when this node last received an append of a term before the given one: until
// then it may have vouched for a leader of such a term. It errs to the later side, and after a
// restart is never before the start.
func (n *Node) LastAppendBefore(term uint64) time.Time { return n.tap.lastAppendBefore(term) }

// Snapshot makes a snapshot now. It is made by itself every few minutes and thousand entries.
func (n *Node) Snapshot(ctx context.Context) error {
	_, err := n.await(ctx, func(time.Duration) raft.Future { return n.raft.Snapshot() })
	if err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) {
		return fmt.Errorf("make snapshot: %w", err)
	}
	return nil
}

// halt refuses new proposals, lets those under way come to an end, and stops the library: that never
// answers a proposal which is committed and not applied yet when it stops. Without a quorum it does.
func (n *Node) halt() raft.Future {
	close(n.closing)
	late := time.NewTimer(drainPatience)
	defer late.Stop()
	for range inFlight {
		select {
		case n.slots <- struct{}{}:
			continue
		case <-late.C:
		}
		break
	}
	n.tap.letGo()
	return n.raft.Shutdown()
}

// Close stops the node and closes its disk. Run returns. It waits some seconds at most; an error says
// what was still running.
func (n *Node) Close() error {
	n.closeOnce.Do(func() { n.closeErr = n.shut() })
	return n.closeErr
}

func (n *Node) shut() error {
	done := make(chan error, 1)
	go func() { done <- n.stop().Error() }()
	late := time.NewTimer(closePatience)
	defer late.Stop()
	select {
	case err := <-done:
		return errors.Join(err, n.tap.Close(), n.cfg.Disk.close())
	case <-late.C:
		return fmt.Errorf("close consensus node %s: still running after %v, the disk stays open", n.cfg.Node, closePatience)
	}
}
