package raftfsm

import (
	"fmt"
	"slices"
	"time"
)

// tx is one command being applied: it changes the state at once and remembers
// how to undo it, so that a rejection costs what was touched and not a copy of
// the state.
type tx struct {
	*State
	h        Header
	undo     []func()
	happened []Event
	resolution
}

// put sets m[k] and remembers what was there.
func put[V any](t *tx, m map[string]V, k string, v V) {
	remember(t, m, k)
	m[k] = v
}

// drop deletes m[k] and remembers what was there.
func drop[V any](t *tx, m map[string]V, k string) {
	remember(t, m, k)
	delete(m, k)
}

func remember[V any](t *tx, m map[string]V, k string) {
	old, was := m[k]
	t.undo = append(t.undo, func() {
		if was {
			m[k] = old
		} else {
			delete(m, k)
		}
	})
}

// event records one thing that happened.
func (t *tx) event(format string, args ...any) {
	t.happened = append(t.happened, Event{
		Index: t.Index, Time: t.h.Time, Actor: t.h.Actor, Node: t.NodeName(t.h.Node), Text: fmt.Sprintf(format, args...),
	})
}

// Apply applies one entry at its index. A rejected command changes nothing but
// Index. It panics on no input: what Decode accepts, Apply takes.
func (s *State) Apply(index uint64, e Entry) Result {
	s.Index = index
	t := &tx{State: s, h: e.Header, resolution: resolution{touched: map[string]string{}}}
	mesh := s.Mesh
	if r := t.apply(e.Command); r != nil {
		for _, undo := range slices.Backward(t.undo) {
			undo()
		}
		s.Mesh = mesh
		return Result{Index: index, Rejection: r}
	}
	if len(t.happened) > 0 {
		all := slices.Concat(s.Events, t.happened)
		s.Events = all[max(0, len(all)-maxEvents):]
	}
	return Result{Index: index}
}

func (t *tx) apply(c Command) *Rejection {
	if _, first := c.(Init); !first && t.Mesh.ID == "" {
		return reject("no-mesh", "", "there is no mesh here yet", "make one with meshd init, or join one with meshd join")
	}
	if _, first := c.(Init); !first {
		if _, member := t.Nodes[t.h.Node]; !member {
			return reject("not-a-member", "", fmt.Sprintf("node %q is no member, and only members change the mesh", clip(t.h.Node)), "join it to the mesh: meshd token, then meshd join")
		}
	}
	switch c := c.(type) {
	case Init:
		return t.init(c)
	case AddToken:
		return t.addToken(c)
	case Admit:
		return t.admit(c)
	case UpdateNode:
		return t.updateNode(c)
	case RemoveNode:
		return t.removeNode(c)
	case PushPart:
		return t.pushPart(c)
	case Push:
		return t.push(c)
	case Remove:
		return t.remove(c)
	case NodeReport:
		return t.report(c)
	case Hold:
		return t.hold(c)
	case OpenSession:
		return t.openSession(c)
	case CloseSession:
		return t.closeSession(c)
	case MoveSeat:
		return t.moveSeat(c)
	case Compared:
		return t.compared(c)
	}
	return reject("unknown-command", "", fmt.Sprintf("%T is no command that this meshd knows", c), "run a newer meshd")
}

func reject(code, path, text, remedy string) *Rejection {
	return &Rejection{Code: code, Path: path, Text: text, Remedy: remedy}
}

// checkMember refuses a node that could not be told apart from others.
func (t *tx) checkMember(n Node) *Rejection {
	if n.ID == "" {
		return reject("bad-node", "", "a node has an id, which comes from its key, and this one has none", "run meshd init or meshd join on it again")
	}
	if n.Name == "all" {
		return reject("bad-name", "", `a node cannot be named "all": nodes: all means every node`, "choose another with --name")
	}
	return CheckName("node", n.Name)
}

func (t *tx) init(c Init) *Rejection {
	if t.Mesh.ID != "" {
		return reject("mesh-exists", "", fmt.Sprintf("mesh %s is here already, and a mesh is made once", t.Mesh.ID), "add a node to it with meshd token and meshd join")
	}
	if c.Mesh.ID == "" {
		return reject("bad-mesh", "", "a mesh has an id, and this one has none", "run meshd init again")
	}
	if r := t.checkMember(c.Node); r != nil {
		return r
	}
	t.Mesh = c.Mesh
	t.Mesh.Changed = t.Index
	put(t, t.Nodes, c.Node.ID, c.Node)
	t.event("mesh %s made, node %s is its first", c.Mesh.ID, c.Node.Name)
	return nil
}

// maxTokens bounds the tokens that are kept: those that expire first make room.
const maxTokens = 256

func (t *tx) addToken(c AddToken) *Rejection {
	if c.Hash == "" {
		return reject("bad-token", "", "a join token is known by the hash of its secret, and this one has none", "make another with meshd token")
	}
	for len(t.Tokens) >= maxTokens {
		oldest := ""
		for _, h := range sorted(t.Tokens) {
			if oldest == "" || t.Tokens[h].Expires.Before(t.Tokens[oldest].Expires) {
				oldest = h
			}
		}
		drop(t, t.Tokens, oldest)
	}
	put(t, t.Tokens, c.Hash, Token{Hash: c.Hash, Expires: c.Expires})
	t.event("join token %.12s made", c.Hash)
	return nil
}

// CheckToken refuses a join token, known by its hash, that cannot admit that node.
// When it expires is for whoever has a clock to judge.
func (s *State) CheckToken(hash, node string) *Rejection {
	token, known := s.Tokens[hash]
	if !known {
		return reject("token-foreign", "", "the join token is not one of this mesh, or it is too old to be remembered", "make one with meshd token on a member")
	}
	if token.Used != "" && token.Used != node {
		return reject("token-used", "", fmt.Sprintf("the join token was used by node %s, and a token admits one node", s.NodeName(token.Used)), "make another with meshd token on a member")
	}
	return nil
}

func (t *tx) admit(c Admit) *Rejection {
	if r := t.CheckToken(c.Token, c.Node.ID); r != nil {
		return r
	}
	if _, gone := t.Removed[c.Node.ID]; gone {
		return reject("node-removed", "", fmt.Sprintf("node %s was removed from the mesh, and a removed node does not come back", c.Node.ID), "delete its data directory and join again: it will be a new node")
	}
	if r := t.checkMember(c.Node); r != nil {
		return r
	}
	if n, taken := t.NodeNamed(c.Node.Name); taken && n.ID != c.Node.ID {
		return reject("node-name-taken", "", fmt.Sprintf("a node named %q is a member already", c.Node.Name), "choose another with --name, or remove that one first: meshd node rm "+c.Node.Name)
	}
	token := t.Tokens[c.Token]
	token.Used = c.Node.ID
	put(t, t.Tokens, c.Token, token)
	if old, again := t.Nodes[c.Node.ID]; again {
		if old.Name != c.Node.Name || old.Recipient != c.Node.Recipient || old.Pin != c.Node.Pin {
			return reject("node-differs", "", fmt.Sprintf("this machine is node %s of the mesh already, and asks to be another", old.Name), fmt.Sprintf("join with --name %s and the keys that it has, or remove it first: meshd node rm %s", old.Name, old.Name))
		}
		old.Address, old.Route, old.Level = c.Node.Address, c.Node.Route, c.Node.Level
		put(t, t.Nodes, old.ID, old)
		return nil
	}
	if c.Keys != t.Mesh.Keys {
		return reject("keys-changed", "", fmt.Sprintf("the mesh's keys were changed while node %s was let in", c.Node.Name), "join again")
	}
	put(t, t.Nodes, c.Node.ID, c.Node)
	t.event("node %s joined", c.Node.Name)
	for _, module := range sorted(t.Everywhere) {
		t.Mesh.Changed = t.Index
		t.place(t.assignment(t.Everywhere[module], c.Node.ID, true), "")
	}
	return t.resolve()
}

func (t *tx) updateNode(c UpdateNode) *Rejection {
	n, ok := t.Nodes[c.ID]
	if !ok || t.h.Node != c.ID {
		return reject("not-own", "", fmt.Sprintf("node %s may not change the record of node %s: a member changes its own only", t.NodeName(t.h.Node), t.NodeName(c.ID)), "let that node report its address itself")
	}
	if n.Address != c.Address {
		t.event("node %s is now at %s", n.Name, c.Address)
	}
	n.Address, n.Route, n.Level = c.Address, c.Route, c.Level
	put(t, t.Nodes, n.ID, n)
	return nil
}

func (t *tx) removeNode(c RemoveNode) *Rejection {
	n, ok := t.Nodes[c.ID]
	switch {
	case !ok:
		return reject("no-node", "", fmt.Sprintf("there is no node %q", clip(c.ID)), "meshd node ls lists them")
	case len(t.Nodes) == 1:
		return reject("last-node", "", fmt.Sprintf("%s is the last node, and a mesh has at least one", n.Name), "run meshd leave on it to end the mesh")
	}
	leaving := t.assignmentsOn(c.ID)
	if r := t.refuseConsumed(leaving); r != nil {
		return r
	}
	t.end(leaving)
	t.Mesh.Changed = t.Index
	drop(t, t.Nodes, c.ID)
	put(t, t.Removed, c.ID, Removal{At: t.h.Time, By: t.h.Actor})
	if !slices.Equal(c.SealedTo, sorted(t.Nodes)) || c.Secrets == "" {
		return reject("members-changed", "", fmt.Sprintf("nodes joined or left while new keys were made for those that remain without %s", n.Name), "give the command again")
	}
	t.Mesh.Secrets, t.Mesh.Keys = c.Secrets, t.Index
	for _, id := range c.SealedTo {
		m := t.Nodes[id]
		m.Secrets = ""
		put(t, t.Nodes, id, m)
	}
	t.event("node %s removed", n.Name)
	return t.resolve()
}

// epoch is what the entry being applied names a holder with.
func (t *tx) epoch() uint64 { return t.Mesh.Generation<<48 | t.Index }

func (t *tx) hold(c Hold) *Rejection {
	seat, ok := t.Seats[c.Seat]
	if !ok || seat.Scope != ScopeMesh {
		if c.Assignment == "" && t.settle(c) {
			return nil
		}
		r := reject("no-seat", "", fmt.Sprintf("there is no mesh seat %q", clip(c.Seat)), "meshd seats lists them")
		r.Candidates = nearest(c.Seat, sorted(t.Seats))
		return r
	}
	if seat.Epoch != c.IfEpoch {
		return reject("stale", "", fmt.Sprintf("seat %s is at epoch %d and was to be changed from %d: something else named its holder meanwhile", c.Seat, seat.Epoch, c.IfEpoch), "look at meshd seats and ask again")
	}
	if c.Assignment != "" && !t.claims(c.Assignment, c.Seat) {
		r := reject("not-a-claimant", "", fmt.Sprintf("%q cannot hold seat %s: no assignment of that name has a module that claims it", clip(c.Assignment), c.Seat), fmt.Sprintf("add claims: [%s] to its module, or name a claimant", c.Seat))
		r.Candidates = t.Claimants(c.Seat)
		return r
	}
	if r := t.mayTake(seat, c); r != nil {
		return r
	}
	if t.settle(c) {
		seat.Session = 0
	}
	t.name(seat, c.Assignment)
	return t.resolve()
}

// name makes holder the seat's, under a new epoch and the session of its node.
// Without a holder, what the last one may go on answering is kept in Former.
func (t *tx) name(seat Seat, holder string) {
	if holder == "" {
		t.leave(seat)
	} else {
		drop(t, t.Former, seat.Name)
	}
	seat.Holder, seat.Epoch, seat.Since = holder, t.epoch(), t.h.Time
	seat.Session = t.Sessions[t.Assignments[holder].Node].ID
	put(t, t.Seats, seat.Name, seat)
	if holder == "" {
		t.event("seat %s has no holder", seat.Name)
		return
	}
	t.event("seat %s is held by %s on %s, epoch %d", seat.Name, holder, t.NodeName(t.Assignments[holder].Node), seat.Epoch)
}

// claims reports whether the assignment's module claims the seat.
func (s *State) claims(assignment, seat string) bool {
	a, ok := s.Assignments[assignment]
	return ok && slices.Contains(s.Modules[a.Module].Claims, seat)
}

// Claimants are the assignments that may hold the seat, in order.
func (s *State) Claimants(seat string) []string {
	var out []string
	for name := range s.Assignments {
		if s.claims(name, seat) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// vacate leaves the mesh seats that the assignment holds without a holder.
func (t *tx) vacate(assignment string) {
	for _, seat := range sorted(t.Seats) {
		if s := t.Seats[seat]; s.Holder == assignment {
			t.name(s, "")
		}
	}
}

func since(old, now time.Time, same bool) time.Time {
	if same {
		return old
	}
	return now
}
