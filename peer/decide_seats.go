package peer

import (
	"cmp"
	"slices"

	"meshd/raftfsm"
)

// seatFacts is what a leader decides holders by.
type seatFacts struct {
	state    *raftfsm.State
	self     string                                  // id of this node
	live     func(session uint64) bool               // renewed lately
	leaving  func(node string) bool                  // about to leave: it should hold nothing
	released func(seat string, c raftfsm.Claim) bool // its node has let go of it
	over     func(seat string, c raftfsm.Claim) bool // nobody can hold it any more
	held     map[string]int                          // by node, as it will be with what is decided already
}

// seatStep is the next step for one seat: an entry, or a question.
type seatStep struct {
	Hold    *raftfsm.Hold
	Release *raftfsm.Claim // ask its node to let go
	Node    string         // id of that node
}

// decideSeats is what the leader has to do for the mesh seats now, by seat. A seat
// that is held goes to another only when its holder has let go of it, or when its
// claim is over.
func decideSeats(f seatFacts) map[string]seatStep {
	steps := map[string]seatStep{}
	f.count()
	for _, name := range sortedKeys(f.state.Seats) {
		if seat := f.state.Seats[name]; seat.Scope == raftfsm.ScopeMesh {
			if step, due := f.step(seat); due {
				steps[name] = step
			}
		}
	}
	return steps
}

func (f seatFacts) step(seat raftfsm.Seat) (seatStep, bool) {
	target := f.target(seat)
	f.place(seat, target)
	hold := func(released uint64) (seatStep, bool) {
		return seatStep{Hold: &raftfsm.Hold{Seat: seat.Name, Assignment: target, IfEpoch: seat.Epoch, Released: released}}, target != ""
	}
	former, was := f.state.Former[seat.Name]
	now := raftfsm.Claim{Session: seat.Session, Epoch: seat.Epoch}
	switch {
	case was && (f.released(seat.Name, former) || f.over(seat.Name, former)):
		return hold(former.Epoch)
	case was:
		return seatStep{Release: &former, Node: f.nodeOf(former.Session)}, target != ""
	case seat.Session == 0:
		if target == seat.Holder && f.sessionOf(target) == 0 {
			return seatStep{}, false
		}
		return hold(0)
	case f.released(seat.Name, now):
		return hold(seat.Epoch) // a new epoch, even where the holder stays
	case target == "" || target == seat.Holder:
		return seatStep{}, false
	case f.over(seat.Name, now):
		return hold(seat.Epoch)
	default:
		return seatStep{Release: &now, Node: f.nodeOf(seat.Session)}, true
	}
}

// target is the assignment that should hold the seat, or "" for none. The one that
// the user named comes first, once it can answer, then the one that has it. A seat
// that does not fail over waits for those.
func (f seatFacts) target(seat raftfsm.Seat) string {
	claimants := f.state.Claimants(seat.Name)
	wanted, holds := slices.Contains(claimants, seat.Want), slices.Contains(claimants, seat.Holder)
	switch {
	case wanted && f.fit(seat.Want):
		return seat.Want
	case holds && (f.fit(seat.Holder) || seat.Session != 0 && !f.leaving(f.nodeFor(seat.Holder))):
		return seat.Holder
	case wanted && !seat.FailsOver():
		return seat.Want
	case holds && !seat.FailsOver():
		return seat.Holder
	case !seat.FailsOver() && seat.Epoch != 0:
		return "" // its holder is gone for good; whose data answers from now on is said by hand
	}
	if best := f.best(claimants); best != "" {
		return best
	}
	if holds {
		return seat.Holder
	}
	return ""
}

// count counts what each node holds.
func (f *seatFacts) count() {
	f.held = map[string]int{}
	for _, s := range f.state.Seats {
		f.held[f.nodeFor(s.Holder)]++
	}
}

// place counts a seat for the claimant that is to have it: of several seats that are
// decided at once not all go to one node.
func (f seatFacts) place(seat raftfsm.Seat, claimant string) {
	f.held[f.nodeFor(seat.Holder)]--
	f.held[f.nodeFor(claimant)]++
}

// best is the fittest of the claimants, or "": one whose process has no fault first;
// then one on another node than the leader's, since the loss of a node that is both
// costs the longest; then one that has the fewest seats.
func (f seatFacts) best(claimants []string) string {
	fit := slices.DeleteFunc(slices.Clone(claimants), func(c string) bool { return !f.fit(c) })
	if len(fit) == 0 {
		return ""
	}
	rank := func(c string) (r int) {
		if f.state.Assignments[c].Report.Class != "" {
			r = 2
		}
		if f.nodeFor(c) == f.self {
			r++
		}
		return r
	}
	return slices.MinFunc(fit, func(a, b string) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(f.held[f.nodeFor(a)], f.held[f.nodeFor(b)]), cmp.Compare(a, b))
	})
}

// fit reports whether the assignment's node renews its lease, and stays.
func (f seatFacts) fit(assignment string) bool {
	node := f.nodeFor(assignment)
	s, open := f.state.Sessions[node]
	return open && f.live(s.ID) && !f.leaving(node)
}

func (f seatFacts) nodeFor(assignment string) string { return f.state.Assignments[assignment].Node }

// sessionOf is the open session of the assignment's node, 0 for none.
func (f seatFacts) sessionOf(assignment string) uint64 {
	return f.state.Sessions[f.nodeFor(assignment)].ID
}

// nodeOf is whose session it is, "" for one that is closed.
func (f seatFacts) nodeOf(session uint64) string {
	for node, s := range f.state.Sessions {
		if s.ID == session {
			return node
		}
	}
	return ""
}

// moves is where the seats of a session go that is closed: those that fail over, to
// the fittest claimant on another node.
func (f seatFacts) moves(session uint64) map[string]string {
	moves := map[string]string{}
	node := f.nodeOf(session)
	f.count()
	for _, name := range sortedKeys(f.state.Granted(session)) {
		seat := f.state.Seats[name]
		if !seat.FailsOver() {
			continue
		}
		others := slices.DeleteFunc(f.state.Claimants(name), func(c string) bool { return f.nodeFor(c) == node })
		if slices.Contains(others, seat.Want) && f.fit(seat.Want) {
			moves[name] = seat.Want
		} else if best := f.best(others); best != "" {
			moves[name] = best
		}
		if to, moved := moves[name]; moved {
			f.place(seat, to)
		}
	}
	return moves
}
