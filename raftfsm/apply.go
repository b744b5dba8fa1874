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
	h    Header
	undo []func()
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
	e := Event{Index: t.Index, Time: t.h.Time, Actor: t.h.Actor, Node: t.NodeName(t.h.Node), Text: fmt.Sprintf(format, args...)}
	events := t.Events
	if len(events) >= maxEvents {
		events = events[len(events)-maxEvents+1:]
	}
	t.Events = append(slices.Clip(events), e)
}

// Apply applies one entry at its index. A rejected command changes nothing but
// Index. It panics on no input: what Decode accepts, Apply takes.
func (s *State) Apply(index uint64, e Entry) Result {
	s.Index = index
	t := &tx{State: s, h: e.Header}
	mesh, events := s.Mesh, s.Events
	if r := t.apply(e.Command); r != nil {
		for _, undo := range slices.Backward(t.undo) {
			undo()
		}
		s.Mesh, s.Events = mesh, events
		return Result{Index: index, Rejection: r}
	}
	return Result{Index: index}
}

func (t *tx) apply(c Command) *Rejection {
	if _, first := c.(Init); !first && t.Mesh.ID == "" {
		return reject("no-mesh", "", "this mesh was not initialised", "run meshd init")
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
	}
	return reject("unknown-command", "", fmt.Sprintf("command %T is unknown", c), "run a newer meshd")
}

func reject(code, path, text, remedy string) *Rejection {
	return &Rejection{Code: code, Path: path, Text: text, Remedy: remedy}
}

func (t *tx) init(c Init) *Rejection {
	if t.Mesh.ID != "" {
		return reject("mesh-exists", "", "this mesh is initialised already", "use meshd token and meshd join to add a node")
	}
	if err := CheckName("node", c.Node.Name); err != nil {
		return err
	}
	t.Mesh = c.Mesh
	put(t, t.Nodes, c.Node.ID, c.Node)
	t.event("mesh %s made, node %s is its first", c.Mesh.ID, c.Node.Name)
	return nil
}

// maxTokens bounds the tokens that are kept: used and expired ones make room.
const maxTokens = 256

func (t *tx) addToken(c AddToken) *Rejection {
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

func (t *tx) admit(c Admit) *Rejection {
	token, known := t.Tokens[c.Token]
	if !known {
		return reject("token-foreign", "", "the join token is not one of this mesh", "make one with meshd token on a member")
	}
	if token.Used != "" && token.Used != c.Node.ID {
		return reject("token-used", "", fmt.Sprintf("the join token was used by node %s", t.NodeName(token.Used)), "a token admits one node: make another with meshd token")
	}
	if _, gone := t.Removed[c.Node.ID]; gone {
		return reject("node-removed", "", "this node was removed from the mesh", "delete its data directory and join again: it will be a new node")
	}
	if err := CheckName("node", c.Node.Name); err != nil {
		return err
	}
	if n, taken := t.NodeNamed(c.Node.Name); taken && n.ID != c.Node.ID {
		return reject("node-name-taken", "", fmt.Sprintf("a node named %q is a member already", c.Node.Name), "choose another with --name, or remove it first: meshd node rm "+c.Node.Name)
	}
	if old, again := t.Nodes[c.Node.ID]; again {
		old.Address, old.Route, old.Level = c.Node.Address, c.Node.Route, c.Node.Level
		put(t, t.Nodes, old.ID, old)
		return nil
	}
	token.Used = c.Node.ID
	put(t, t.Tokens, c.Token, token)
	put(t, t.Nodes, c.Node.ID, c.Node)
	t.event("node %s joined", c.Node.Name)
	for _, module := range sorted(t.Everywhere) {
		t.assign(t.Everywhere[module], c.Node.ID, true)
	}
	return t.resolveAll(true)
}

func (t *tx) updateNode(c UpdateNode) *Rejection {
	n, ok := t.Nodes[c.ID]
	if !ok || t.h.Node != c.ID {
		return reject("not-own", "", "only a member may change its own record", "")
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
	if !ok {
		return reject("no-node", "", fmt.Sprintf("there is no node %s", c.ID), "meshd node ls lists them")
	}
	var leaving []string
	for _, name := range sorted(t.Assignments) {
		if t.Assignments[name].Node == c.ID {
			leaving = append(leaving, name)
		}
	}
	for _, name := range leaving {
		if r := t.refuseIfConsumed(t.Assignments[name], leaving...); r != nil {
			return r
		}
	}
	for _, name := range leaving {
		t.removeAssignment(name)
	}
	drop(t, t.Nodes, c.ID)
	put(t, t.Removed, c.ID, t.h.Time)
	for _, id := range sorted(c.Secrets) {
		if m, ok := t.Nodes[id]; ok {
			m.Secrets = c.Secrets[id]
			put(t, t.Nodes, id, m)
		}
	}
	t.event("node %s removed", n.Name)
	return nil
}

// epoch is what the entry being applied names a holder with.
func (t *tx) epoch() uint64 { return t.Mesh.Generation<<48 | t.Index }

func (t *tx) hold(c Hold) *Rejection {
	seat, ok := t.Seats[c.Seat]
	if !ok || seat.Scope != ScopeMesh {
		return reject("no-seat", "", fmt.Sprintf("there is no mesh seat %q", c.Seat), "")
	}
	if seat.Epoch != c.IfEpoch {
		return reject("stale", "", fmt.Sprintf("seat %s is at epoch %d, not %d", c.Seat, seat.Epoch, c.IfEpoch), "")
	}
	if c.Assignment != "" && !t.claims(c.Assignment, c.Seat) {
		return reject("not-a-claimant", "", fmt.Sprintf("%s does not claim seat %s", c.Assignment, c.Seat), "")
	}
	t.name(seat, c.Assignment)
	return nil
}

// name makes holder the seat's, under a new epoch.
func (t *tx) name(seat Seat, holder string) {
	seat.Holder, seat.Epoch, seat.Since = holder, t.epoch(), t.h.Time
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
	for _, name := range sorted(s.Assignments) {
		if s.claims(name, seat) {
			out = append(out, name)
		}
	}
	return out
}

func since(old, now time.Time, same bool) time.Time {
	if same {
		return old
	}
	return now
}
