package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"meshd/bus"
	"meshd/raftfsm"
)

// View is what this node can say of the mesh at once, from its own copy.
type View struct {
	State   *raftfsm.State
	Leader  string        // node id, "" for none
	Age     time.Duration // since the last word from a leader: how old State may be; -1: it is this node's own record, as no leader was heard out since it started
	Quorum  bool
	Missing []string // node ids of voters that do not answer
	Voters  []string // node ids
	Alive   map[string]bool
}

// View copies the state and what surrounds it. It needs no quorum.
func (n *Peer) View() View {
	var v View
	n.store.view(func(s *raftfsm.State) { v.State = s.Clone() })
	v.Leader, v.Quorum = n.raft.Leader()
	switch {
	case !n.hasHeard():
		v.Age = -1
	case !v.Quorum:
		last := n.raft.LastAppendBefore(math.MaxUint64)
		n.mu.Lock()
		if n.basis.led.After(last) {
			last = n.basis.led
		}
		n.mu.Unlock()
		v.Age = time.Since(last)
	}
	v.Missing = n.raft.Silent(silentAfter)
	servers, _ := n.raft.Servers()
	for _, s := range servers {
		if s.Voter {
			v.Voters = append(v.Voters, s.ID)
		}
	}
	v.Alive = map[string]bool{}
	for id := range v.State.Nodes {
		v.Alive[id] = n.alive(id)
	}
	return v
}

// Wait returns when the state is newer than index, or with ctx.
func (n *Peer) Wait(ctx context.Context, index uint64) error {
	for {
		changed := n.store.watch()
		var at uint64
		n.store.view(func(s *raftfsm.State) { at = s.Index })
		if at > index {
			return nil
		}
		if err := await(ctx, 0, changed, nil); err != nil {
			return err
		}
	}
}

// Address is where the node was last known to be: what gossip says, what the
// log says, what the join said.
func (n *Peer) Address(node string) (addr string, ok bool) {
	if addr, _ = n.cfg.Members.Addresses(node); addr != "" {
		return addr, true
	}
	n.store.view(func(s *raftfsm.State) { addr = s.Nodes[node].Address })
	if addr == "" {
		addr = n.local.Address(node)
	}
	return addr, addr != ""
}

// routeOf is where the node's bus routes are.
func (n *Peer) routeOf(m raftfsm.Node) string {
	if _, route := n.cfg.Members.Addresses(m.ID); route != "" {
		return route
	}
	return m.Route
}

// Admitted says whether a node that the mesh's CA has signed may connect: nil, or
// why not. The CA signs a node only when it is admitted, so what has to be known
// is who was removed. A node that this one has not heard of is let in: it may be
// the leader that brings the log with its name in it.
func (n *Peer) Admitted(node string) error {
	var removed bool
	n.store.view(func(s *raftfsm.State) { _, removed = s.Removed[node] })
	if removed || n.local.isRemoved(node) {
		return fmt.Errorf("node %s was removed from the mesh", node)
	}
	return nil
}

// Tries lists what this node tries in vain.
func (n *Peer) Tries() []Try {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []Try
	for _, id := range sortedKeys(n.services) {
		for _, t := range n.services[id].worker.report() {
			t.Key = id + ": " + t.Key
			out = append(out, t)
		}
	}
	for _, assignment := range sortedKeys(n.consumers) {
		c := n.consumers[assignment]
		workers := []*worker{c.deliver}
		for _, req := range sortedKeys(c.checks) {
			workers = append(workers, c.checks[req])
		}
		for _, w := range workers {
			out = append(out, w.report()...)
		}
	}
	return out
}

// Detail asks the nodes that work on name what they try in vain: it is too much
// and too restless for the log.
func (n *Peer) Detail(ctx context.Context, name string) ([]Try, error) {
	nodes := map[string]bool{}
	n.store.view(func(s *raftfsm.State) {
		home := func(assignment string) {
			if a, ok := s.Assignments[assignment]; ok {
				nodes[a.Node] = true
			}
		}
		home(name)
		for _, id := range sortedKeys(s.Bindings) {
			if b := s.Bindings[id]; id == name || b.Consumer == name || b.Provider == name {
				home(b.Consumer)
				home(b.Provider)
			}
		}
		for id, w := range s.Withdrawals {
			if id == name || w.Binding == name {
				home(w.Provider)
			}
		}
	})
	ids := sortedKeys(nodes)
	tries, errs := make([][]Try, len(ids)), make([]error, len(ids))
	var asked sync.WaitGroup
	for i, node := range ids {
		asked.Go(func() { tries[i], errs[i] = n.detailOf(ctx, node) })
	}
	asked.Wait()
	return slices.Concat(tries...), errors.Join(errs...)
}

func (n *Peer) detailOf(ctx context.Context, node string) ([]Try, error) {
	if node == n.id() {
		return n.Tries(), nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	resp, err := n.request(ctx, http.MethodGet, node, pathDetail, nil)
	if err != nil {
		return nil, n.unasked(node, err)
	}
	defer resp.Body.Close()
	var tries []Try
	if err := decodeBody(resp.Body, &tries); err != nil {
		return nil, n.unasked(node, err)
	}
	return tries, nil
}

// unasked says for a person why a node could not be asked.
func (n *Peer) unasked(node string, err error) error {
	var dial *net.OpError
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		err = errors.New("it does not answer")
	case errors.As(err, &dial):
		err = dial // where it was looked for, and how that ended
	}
	name := node
	n.store.view(func(s *raftfsm.State) { name = s.NodeName(node) })
	return fmt.Errorf("%s could not be asked: %s", name, strings.ReplaceAll(err.Error(), node, name))
}

func (n *Peer) serveDetail(w http.ResponseWriter, r *http.Request) {
	respond(w, http.StatusOK, n.Tries())
}

// Logs writes the newest lines of an assignment's output to w, from whichever
// node it runs on, and with follow what comes after them until ctx ends.
func (n *Peer) Logs(ctx context.Context, assignment string, lines int, follow bool, w io.Writer) error {
	var node string
	n.store.view(func(s *raftfsm.State) { node = s.Assignments[assignment].Node })
	switch node {
	case "":
		return &raftfsm.Rejection{Code: "no-assignment", Text: fmt.Sprintf("there is no assignment %q", assignment), Remedy: "meshd modules lists them"}
	case n.id():
		return n.logsHere(ctx, assignment, lines, follow, w)
	}
	q := url.Values{"name": {assignment}, "lines": {strconv.Itoa(lines)}, "follow": {strconv.FormatBool(follow)}}
	resp, err := n.request(ctx, http.MethodGet, node, pathLogs+"?"+q.Encode(), nil)
	if err != nil {
		return n.named(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10)) // part of an error's text is better than none
		return errors.New(string(text))
	}
	_, err = io.Copy(w, resp.Body)
	return err
}

// maxLines bounds what is asked for at once.
const maxLines = 10000

func (n *Peer) logsHere(ctx context.Context, assignment string, lines int, follow bool, w io.Writer) error {
	if lines < 0 || lines > maxLines {
		return &raftfsm.Rejection{Code: "bad-lines", Text: fmt.Sprintf("%d lines were asked for, and 0 to %d are given", lines, maxLines), Remedy: "ask for fewer"}
	}
	b, err := n.cfg.Processes.Logs(assignment, lines)
	if err != nil {
		return err
	}
	if _, err := w.Write(b); err != nil || !follow {
		return err
	}
	return n.cfg.Processes.Follow(ctx, assignment, w)
}

func (n *Peer) serveLogs(w http.ResponseWriter, r *http.Request) {
	lines, err := strconv.Atoi(r.FormValue("lines"))
	if err != nil {
		http.Error(w, "lines is not a number", http.StatusBadRequest)
		return
	}
	if err := n.logsHere(r.Context(), r.FormValue("name"), lines, r.FormValue("follow") == "true", flusher{w}); err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
	}
}

// flusher sends each write on at once.
type flusher struct{ http.ResponseWriter }

func (f flusher) Write(b []byte) (int, error) {
	k, err := f.ResponseWriter.Write(b)
	if err == nil {
		err = http.NewResponseController(f.ResponseWriter).Flush()
	}
	return k, err
}

// Call calls a seat's verb or a module's tool as an operator of this node.
func (n *Peer) Call(ctx context.Context, target string, data []byte) (bus.Reply, error) {
	t, ok := raftfsm.ParseTarget(target)
	if !ok {
		return bus.Reply{}, &raftfsm.Rejection{Code: "bad-call", Text: fmt.Sprintf("%q is not something to call", target), Remedy: "write SEAT.VERB, NODE/SEAT.VERB or NODE/MODULE.TOOL"}
	}
	var found []raftfsm.Target
	n.store.view(func(s *raftfsm.State) {
		if found = s.Targets(t); len(found) == 0 {
			found = withoutTool(s, t)
		}
	})
	switch {
	case len(found) > 1:
		return bus.Reply{}, &raftfsm.Rejection{Code: "ambiguous", Text: fmt.Sprintf("%s names %d assignments on %s", target, len(found), t.Node), Remedy: "write the assignment's name in place of the module's"}
	case len(found) == 1:
		t = found[0]
	}
	return n.cfg.Bus.Call(ctx, bus.Caller{Node: n.cfg.Self.Name}, busTarget(t), data)
}

// withoutTool are the assignments that a target means whose tool there is not, so
// that the refusal lists the tools that there are. A seat of that name goes first.
func withoutTool(s *raftfsm.State, t raftfsm.Target) []raftfsm.Target {
	if _, isSeat := s.Seats[t.Seat]; isSeat || t.Node == "" {
		return nil
	}
	var out []raftfsm.Target
	for _, name := range sortedKeys(s.Assignments) {
		a := s.Assignments[name]
		if s.NodeName(a.Node) == t.Node && (a.Module == t.Seat || name == t.Seat) {
			out = append(out, raftfsm.Target{Node: t.Node, Assignment: name, Name: t.Name})
		}
	}
	return out
}
