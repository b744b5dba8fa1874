package lease_test

import (
	"flag"
	"fmt"
	"runtime/debug"
	"strings"
	"testing"
)

var (
	walksFlag = flag.Int("walks", 0, "how many walks of the lease model for each number of voters; 0: as many as take seconds")
	seedFlag  = flag.Uint64("seed", 1, "seed of the first walk of the lease model; the next walk has the next")
)

// TestLeaseModel walks at random under the rules as they are. For a long run by
// hand, of about four minutes for each million:
//
//	go test ./peer/lease -run 'TestLeaseModel$' -walks 5000000 -timeout 0 -v
//
// A walk that fails is shown step by step; -seed with its number and -walks 1
// runs it alone again.
func TestLeaseModel(t *testing.T) {
	for _, voters := range []int{3, 5} {
		t.Run(fmt.Sprintf("%d voters", voters), func(t *testing.T) {
			walks := 40_000
			if raceEnabled {
				walks = 2_000
			}
			if *walksFlag > 0 {
				walks = *walksFlag
			}
			sum, failed, seed := walkMany(t, correct, voters, *seedFlag, walks)
			if failed {
				t.Fatalf("%s\nAgain: go test ./peer/lease -run 'TestLeaseModel$/%d' -walks 1 -seed %d", replay(correct, voters, seed), voters, seed)
			}
			t.Logf("%d walks: %+v", walks, sum)
			for what, n := range map[string]int{
				"a leader that took over by evidence": sum.takeovers, "a change of voters": sum.voters,
				"a session that ran out": sum.closed, "a naming": sum.named, "a naming after a release": sum.handed,
				"a gate opened": sum.opened, "an answer": sum.answers,
			} {
				if walks >= 1000 && n < walks/50 {
					t.Errorf("%d walks came %d times to %s: they prove little", walks, n, what)
				}
			}
		})
	}
}

// walkMany walks until a walk fails, and returns the seed of that one.
func walkMany(t *testing.T, m mutant, voters int, first uint64, walks int) (sum reached, failed bool, seed uint64) {
	// A walk's garbage is small and dies with it.
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	for i := range uint64(walks) {
		w := newWalk(m, voters, first+i)
		if w.run(); w.violation != "" {
			return sum, true, first + i
		}
		sum.add(w.reached)
	}
	return sum, false, 0
}

func (r *reached) add(o reached) {
	r.takeovers += o.takeovers
	r.voters += o.voters
	r.closed += o.closed
	r.named += o.named
	r.handed += o.handed
	r.opened += o.opened
	r.answers += o.answers
}

// mutant is a rule left out or changed. The checker has to catch every one, or
// it would not catch the same mistake in the rules as they are.
type mutant int

const (
	correct mutant = iota
	noOwnVoteAsEvidence
	noElectionAsEvidence
	acksByReceipt
	acksOfNonVoters
	newLeaderDoesNotWait
	evidenceOfAMinority
	restartedAnswersNever
	renewalsBeforeBarrier
	renewalsWhileRevoking
	waitWithoutDrift
	handoverWithoutRelease
	releaseBeforeCallsLeave
	lateReplyReopens
	waysOutAreRenewed
	oldReplyTaken
	vacatedSeatNamedAtOnce
	gateSurvivesRestart
	mutants
)

// mutations says how each mutant is caught: by walks where a few thousand are
// enough, else by a schedule, under which the rules as they are have to hold.
var mutations = [mutants]struct {
	name     string
	walks    int
	schedule func(*script)
}{
	noOwnVoteAsEvidence:     {"no own vote as evidence", 0, ownVote},
	noElectionAsEvidence:    {"no election as evidence", 0, ownElection},
	acksByReceipt:           {"acks counted by receipt time", 0, ackOfBefore},
	acksOfNonVoters:         {"acks of non-voters counted", 0, ackOfNonVoters},
	newLeaderDoesNotWait:    {"new leader does not wait", 2000, takeOver},
	evidenceOfAMinority:     {"evidence from less than a majority", 0, takeOver},
	restartedAnswersNever:   {"restarted voter answers never", 0, restartedVoter},
	renewalsBeforeBarrier:   {"renewals served before the barrier", 0, beforeBarrier},
	renewalsWhileRevoking:   {"renewals confirmed after deciding to revoke", 0, whileRevoking},
	waitWithoutDrift:        {"wait without the drift allowance", 0, drift},
	handoverWithoutRelease:  {"handover without release", 2000, nil},
	releaseBeforeCallsLeave: {"release before calls have left", 2000, nil},
	lateReplyReopens:        {"a late reply reopens a released gate", 0, lateReply},
	waysOutAreRenewed:       {"a later lease lets the last calls out", 2000, nil},
	oldReplyTaken:           {"an older reply is taken after a newer", 0, oldReply},
	vacatedSeatNamedAtOnce:  {"vacated seat named at once", 2000, nil},
	gateSurvivesRestart:     {"gate survives a restart", 2000, nil},
}

func TestLeaseModelCatches(t *testing.T) {
	for m := correct + 1; m < mutants; m++ {
		how := mutations[m]
		t.Run(how.name, func(t *testing.T) {
			if how.walks > 0 {
				if _, failed, _ := walkMany(t, m, 3, 1, how.walks); !failed {
					t.Errorf("%d walks do not catch it", how.walks)
				}
			}
			if how.schedule == nil {
				return
			}
			if s := follow(m, how.schedule); s.violation == "" {
				t.Errorf("the schedule does not catch it:\n%s", strings.Join(s.trace, "\n"))
			}
			if s := follow(correct, how.schedule); s.violation != "" {
				t.Errorf("the rules as they are fail: %s\n%s", s.violation, strings.Join(s.trace, "\n"))
			}
		})
	}
}

// TestLeaseModelMeets tells how often walks meet each mutant, which is how good
// they are. It runs only with -walks.
func TestLeaseModelMeets(t *testing.T) {
	if *walksFlag == 0 {
		t.Skip("runs by hand: -walks 100000 -v")
	}
	for m := correct + 1; m < mutants; m++ {
		caught, shown := 0, uint64(0)
		for at := *seedFlag; at < *seedFlag+uint64(*walksFlag); {
			_, failed, seed := walkMany(t, m, 3, at, int(*seedFlag+uint64(*walksFlag)-at))
			if !failed {
				break
			}
			caught, shown, at = caught+1, seed, seed+1
		}
		t.Logf("%-45s %d of %d, the last %d", mutations[m].name, caught, *walksFlag, shown)
	}
}
