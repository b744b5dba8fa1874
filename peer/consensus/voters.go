package consensus

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

const (
	// voterCurrent is how recent a voter's acknowledgement must be to count on it while the
	// configuration changes: five heartbeats on a LAN.
	voterCurrent = 2 * time.Second
	// voterLost is how long a voter may be silent before another node takes its place: longer than a
	// reboot of most machines takes meshd, shorter than an operator takes.
	voterLost = 60 * time.Second
	// caughtUp is how many entries a learner may be behind to get a vote. What is missing then
	// arrives within one RPC or two.
	caughtUp = 128
)

// Member is a node that the mesh's own state names.
type Member struct {
	ID      string
	Leaving bool // being drained: it should have no vote
}

// Facts is what DecideVoters decides by, gathered on the leader.
type Facts struct {
	Self    string   // this node, which leads
	Members []Member // all of the mesh, in any order
	Servers []Server // the newest configuration, in any order
	Last    uint64   // newest index of the leader's log
	Now     time.Time
}

// Op is a change of the configuration.
type Op string

// The changes, named as the calls of a Node that make them.
const (
	AddLearner Op = "add learner"
	Promote    Op = "promote"
	Demote     Op = "demote"
	Remove     Op = "remove"
)

// Change is one step towards the right configuration.
type Change struct {
	Op   Op
	Node string
	Why  string
}

// VotersFor is how many voters a mesh of so many nodes should have. Two nodes have one: with two
// voters the loss of either would stop the mesh.
func VotersFor(nodes int) int {
	if nodes < 3 {
		return 1
	}
	return 3
}

// DecideVoters returns the next change to make, or false when the configuration is right or no change
// is safe now. It is pure, and its caller makes one change at a time, on the configuration that it
// was decided for.
//
//   - Every member is in the configuration; whoever is no member is taken out.
//   - The number of voters follows from the number of members that are not leaving, never from who
//     is alive: what died keeps its vote until another member can take it.
//   - A learner gets a vote only when it has caught up.
//   - A vote is replaced by adding first. Votes change only while every other voter is current, so
//     that the change is committed and the next failure finds a full quorum.
func DecideVoters(f Facts) (Change, bool) {
	v := view{Facts: f, members: map[string]Member{}}
	for _, m := range f.Members {
		v.members[m.ID] = m
		if !m.Leaving {
			v.staying++
		}
	}
	v.Members = slices.Clone(f.Members)
	slices.SortFunc(v.Members, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	for _, s := range f.Servers {
		if s.Voter {
			v.voters = append(v.voters, s)
		} else {
			v.learners = append(v.learners, s)
		}
	}
	byID := func(a, b Server) int { return cmp.Compare(a.ID, b.ID) }
	slices.SortFunc(v.voters, byID)
	slices.SortFunc(v.learners, byID)
	for _, rule := range []func() (Change, bool){v.forget, v.add, v.grow, v.replace, v.shrink} {
		if c, ok := rule(); ok {
			return c, true
		}
	}
	return Change{}, false
}

type view struct {
	Facts
	members          map[string]Member
	staying          int // members that are not leaving
	voters, learners []Server
}

func (v *view) want() int { return VotersFor(v.staying) }

func (v *view) current(s Server) bool { return s.ID == v.Self || v.Now.Sub(s.Acked) < voterCurrent }

// settled reports whether every voter, but for the one that the change is about, is current.
func (v *view) settled(but string) bool {
	for _, s := range v.voters {
		if s.ID != but && !v.current(s) {
			return false
		}
	}
	return true
}

// fit reports whether a voter should go on to be one.
func (v *view) fit(s Server) bool {
	m, ok := v.members[s.ID]
	return ok && !m.Leaving
}

// heir is the learner to give the next vote to. One that has acknowledged nothing
// in this term may not exist at all, however short the log is.
func (v *view) heir() (Server, bool) {
	for _, s := range v.learners {
		if v.fit(s) && v.current(s) && s.Matched > 0 && s.Matched+caughtUp >= v.Last {
			return s, true
		}
	}
	return Server{}, false
}

// forget takes out learners that are no members; they have no say in anything.
func (v *view) forget() (Change, bool) {
	for _, s := range v.learners {
		if _, ok := v.members[s.ID]; !ok {
			return Change{Remove, s.ID, "it is no member of the mesh"}, true
		}
	}
	return Change{}, false
}

// add takes in members, as learners.
func (v *view) add() (Change, bool) {
	for _, m := range v.Members {
		known := slices.ContainsFunc(v.Servers, func(s Server) bool { return s.ID == m.ID })
		if !known {
			return Change{AddLearner, m.ID, "it is a member of the mesh"}, true
		}
	}
	return Change{}, false
}

// grow gives a vote while too few of the voters are fit.
func (v *view) grow() (Change, bool) {
	fit, unfit := 0, ""
	for _, s := range v.voters {
		if v.fit(s) {
			fit++
		} else {
			unfit = s.ID
		}
	}
	heir, ok := v.heir()
	if fit >= v.want() || !ok || !v.settled(unfit) {
		return Change{}, false
	}
	return Change{Promote, heir.ID, fmt.Sprintf("%d of %d voters", fit, v.want())}, true
}

// replace gives a vote beside one that is lost; shrink then takes the lost one.
func (v *view) replace() (Change, bool) {
	if len(v.voters) != v.want() {
		return Change{}, false
	}
	for _, s := range v.voters {
		if s.ID == v.Self || v.Now.Sub(s.Acked) < voterLost {
			continue
		}
		if heir, ok := v.heir(); ok && v.settled(s.ID) {
			return Change{Promote, heir.ID, fmt.Sprintf("voter %s is silent for more than %v", s.ID, voterLost)}, true
		}
	}
	return Change{}, false
}

// shrink takes the votes of those who should have none, and then of those who are too many: who is
// no member, who is leaving, who is lost, and last the greatest id. The leader takes its own only
// when it is no member or leaving; it steps down with that.
func (v *view) shrink() (Change, bool) {
	fit := 0
	for _, s := range v.voters {
		if v.fit(s) {
			fit++
		}
	}
	for _, s := range v.voters {
		if _, member := v.members[s.ID]; !member && fit > 0 && v.settled(s.ID) {
			return Change{Remove, s.ID, "it is no member of the mesh"}, true
		}
	}
	for _, s := range v.voters {
		if m := v.members[s.ID]; m.Leaving && fit >= v.want() && v.settled(s.ID) {
			return Change{Demote, s.ID, "it is leaving"}, true
		}
	}
	if len(v.voters) <= max(v.want(), 1) {
		return Change{}, false
	}
	for _, lost := range []bool{true, false} {
		for _, s := range slices.Backward(v.voters) {
			if s.ID == v.Self || lost == v.current(s) || !v.settled(s.ID) {
				continue
			}
			return Change{Demote, s.ID, fmt.Sprintf("%d voters where %d are enough", len(v.voters), v.want())}, true
		}
	}
	return Change{}, false
}
