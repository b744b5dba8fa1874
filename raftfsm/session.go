package raftfsm

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Leases is what the log knows of the leases of the nodes. A lease covers every
// mesh seat that its node holds, and is granted and renewed by the leader outside
// of the log; the log has the sessions, and to close one is the only way to take
// a seat from a node that has not let go of it.
type Leases struct {
	Sessions map[string]Session // open ones, by node id; a removed node's until its lease has ended
	Former   map[string]Claim   // by seat name, those of seats that were removed too: who had it and may still answer
}

// Session is one node's right to answer, for as long as its lease is renewed.
type Session struct {
	ID          uint64        // index of the entry that opened it
	Incarnation string        // random; one run of meshd, which holds the exclusive lock of its data directory
	TTL         time.Duration // of its lease; here, so that leader and holder cannot disagree
	Since       time.Time
	Superseded  []string `json:",omitempty"` // older incarnations of the node, newest last, at most maxSuperseded; they are dead
}

// Claim is what a node was granted under a session.
type Claim struct{ Session, Epoch uint64 }

// Bounds of a session. Below half a second a lease would not outlast an election.
// A minute is how long a seat with a lost holder would at least be dark.
const (
	MinTTL         = 500 * time.Millisecond
	MaxTTL         = time.Minute
	maxIncarnation = 128 // bytes
	maxSuperseded  = 8   // more restarts than a message can be late for
)

// Granted lists the seats under the session with their epochs: what a renewal
// grants.
func (s *State) Granted(session uint64) map[string]uint64 {
	out := map[string]uint64{}
	for name, seat := range s.Seats {
		if seat.Session == session && session != 0 {
			out[name] = seat.Epoch
		}
	}
	return out
}

// claimed is the claim that keeps the seat from other nodes, which is zero for
// none: its holder's, or that of one who had it before.
func (s *State) claimed(seat string) Claim {
	if former, ok := s.Former[seat]; ok {
		return former
	}
	if now := s.Seats[seat]; now.Session != 0 {
		return Claim{now.Session, now.Epoch}
	}
	return Claim{}
}

// mayTake refuses a holder while a node other than its own may still answer.
func (t *tx) mayTake(seat Seat, c Hold) *Rejection {
	claim := t.claimed(seat.Name)
	switch {
	case c.Assignment == "", claim.Session == 0, c.Released == claim.Epoch:
		return nil
	case t.Sessions[t.Assignments[c.Assignment].Node].ID == claim.Session:
		return nil // one node answers one seat once, whoever is named there
	}
	return reject("still-held", "", fmt.Sprintf("seat %s cannot go to %s yet: %s may still answer it, and has not let go of epoch %d", seat.Name, c.Assignment, t.whose(claim.Session), claim.Epoch),
		"it can be named once that node has let go or its lease has ended; meshd seats shows when")
}

// settle ends the claim on the seat that its node has let go of, and reports
// whether it did.
func (t *tx) settle(c Hold) bool {
	claim := t.claimed(c.Seat)
	if claim.Session == 0 || c.Released != claim.Epoch {
		return false
	}
	drop(t, t.Former, c.Seat)
	return true
}

// leave keeps what the seat's holder may go on answering, as the seat is taken
// from it or removed.
func (t *tx) leave(seat Seat) {
	if seat.Session != 0 {
		put(t, t.Former, seat.Name, Claim{seat.Session, seat.Epoch})
	}
}

// whose names the node of an open session.
func (s *State) whose(session uint64) string {
	for id, open := range s.Sessions {
		if open.ID != session {
			continue
		}
		if n, member := s.Nodes[id]; member {
			return "node " + n.Name
		}
	}
	return "a node that was removed"
}

func (t *tx) openSession(c OpenSession) *Rejection {
	n, member := t.Nodes[c.Node]
	old := t.Sessions[c.Node]
	switch {
	case !member:
		return reject("not-a-member", "", fmt.Sprintf("node %q is no member, and only members have leases", clip(c.Node)), "join it to the mesh: meshd token, then meshd join")
	case c.Incarnation == "" || len(c.Incarnation) > maxIncarnation:
		return reject("bad-session", "", fmt.Sprintf("a session is of one run of meshd, which names itself with 1 to %d bytes, and this one of node %s has %d", maxIncarnation, n.Name, len(c.Incarnation)), "start meshd on it again")
	case c.TTL < MinTTL || c.TTL > MaxTTL:
		return reject("bad-session", "", fmt.Sprintf("a lease of %s for node %s is out of bounds: one lasts %s to %s", c.TTL, n.Name, MinTTL, MaxTTL), "choose a time between them")
	case old.Incarnation == c.Incarnation:
		return nil
	case slices.Contains(old.Superseded, c.Incarnation):
		return reject("superseded", "", fmt.Sprintf("an older run of meshd asks for the lease of node %s, and a newer one has it", n.Name), "if both run, one has a copy of the data directory: stop it, delete that directory and join it as a new node")
	}
	next := Session{ID: t.Index, Incarnation: c.Incarnation, TTL: c.TTL, Since: t.h.Time}
	if old.ID != 0 {
		next.Superseded = append(slices.Clone(old.Superseded), old.Incarnation)
		next.Superseded = next.Superseded[max(0, len(next.Superseded)-maxSuperseded):]
		t.endSession(c.Node)
	}
	put(t, t.Sessions, c.Node, next)
	var seats []string
	for _, name := range sorted(t.Seats) {
		if seat := t.Seats[name]; t.Assignments[seat.Holder].Node == c.Node {
			seat.Session, seat.Epoch, seat.Since = next.ID, t.epoch(), t.h.Time
			put(t, t.Seats, name, seat)
			seats = append(seats, name)
		}
	}
	t.event("node %s has a lease, session %d: it answers %s", n.Name, next.ID, cmp.Or(few(seats), "no seat yet"))
	return nil
}

// endSession takes the node's session away, and with it all that is left of what it
// held before.
func (t *tx) endSession(node string) {
	id := t.Sessions[node].ID
	drop(t, t.Sessions, node)
	for _, seat := range sorted(t.Former) {
		if t.Former[seat].Session == id {
			drop(t, t.Former, seat)
		}
	}
}

func (t *tx) closeSession(c CloseSession) *Rejection {
	who := t.whose(c.Session)
	if open, ok := t.Sessions[c.Node]; !ok || open.ID != c.Session {
		return reject("stale", "", fmt.Sprintf("session %d of node %s is not open: it was closed or replaced meanwhile", c.Session, clip(t.NodeName(c.Node))), "look at its present session and decide again")
	}
	for _, name := range sorted(c.Moves) {
		if seat, ok := t.Seats[name]; ok && !seat.FailsOver() {
			return reject("no-failover", "", fmt.Sprintf("seat %s cannot move to %q by itself: its failover is manual", name, clip(c.Moves[name])), "leave it out, and it goes dark until somebody names its holder")
		}
	}
	t.endSession(c.Node)
	t.event("the lease of %s has ended, session %d", who, c.Session)
	for _, name := range sorted(t.Seats) {
		seat := t.Seats[name]
		if seat.Session != c.Session {
			continue
		}
		why := t.unfit(seat, c.Moves[name])
		if why == "" {
			t.name(seat, c.Moves[name])
			continue
		}
		seat.Session, seat.Since = 0, t.h.Time
		put(t, t.Seats, name, seat)
		t.event("seat %s is dark: the lease of %s, where %s holds it, has ended; %s", name, who, seat.Holder, why)
	}
	return t.resolve()
}

// unfit says why the seat cannot move to the assignment; it is empty when it can.
func (t *tx) unfit(seat Seat, to string) string {
	switch {
	case !seat.FailsOver():
		return "failover is manual"
	case to == "":
		return "nobody was named to take over"
	case !t.claims(to, seat.Name):
		return fmt.Sprintf("%s, which was to take over, does not claim it any more", clip(to))
	case !has(t.Sessions, t.Assignments[to].Node):
		return fmt.Sprintf("%s, which was to take over, has no lease on its node %s", to, t.NodeName(t.Assignments[to].Node))
	}
	return ""
}

// Dark says why nobody may answer the mesh seat; it is empty when its holder
// may.
func (s *State) Dark(seat Seat) string {
	if seat.Session != 0 {
		return ""
	}
	if former, ok := s.Former[seat.Name]; ok {
		return fmt.Sprintf("its former holder may still answer until its lease has ended: %s has not let go of it", s.whose(former.Session))
	}
	if a, held := s.Assignments[seat.Holder]; held {
		node := s.NodeName(a.Node)
		text := fmt.Sprintf("%s/%s holds it, whose node %s has not renewed its lease since %s", node, a.Name, node, seat.Since.UTC().Format(time.RFC3339))
		if seat.FailsOver() {
			return text + "; another claimant takes over once its node has a lease"
		}
		return text + fmt.Sprintf("; failover is manual: meshd seat move %s NODE", seat.Name)
	}
	claimants := s.Claimants(seat.Name)
	switch {
	case len(claimants) > 0 && seat.Epoch != 0 && !seat.FailsOver() && !slices.Contains(claimants, seat.Want):
		return fmt.Sprintf("its holder is gone, and failover is manual: meshd seat move %s NODE; %s could hold it", seat.Name, few(claimants))
	case seat.Want != "" && !slices.Contains(claimants, seat.Want):
		return fmt.Sprintf("it waits for its holder %s, which does not claim it or is not there yet", seat.Want)
	case len(claimants) == 0:
		return fmt.Sprintf("nobody claims it: add claims: [%s] to a module and assign that", seat.Name)
	}
	return fmt.Sprintf("no holder is named yet; %s could be", few(claimants))
}

// ClaimsOn reports whether an assignment on the node claims a mesh seat: the node
// may be named for it, and needs a lease.
func (s *State) ClaimsOn(node string) bool {
	for _, a := range s.Assignments {
		if a.Node != node {
			continue
		}
		for _, seat := range s.Modules[a.Module].Claims {
			if s.Seats[seat].Scope == ScopeMesh {
				return true
			}
		}
	}
	return false
}
