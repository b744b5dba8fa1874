package peer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"meshd/bus"
	"meshd/raftfsm"
)

// Finding is one difference between who answers a mesh seat and who is named.
type Finding struct {
	Node string
	Seat string
	Text string
}

const (
	// surveyWithin is how long the members get to say what they answer: a bus that
	// is well answers in milliseconds.
	surveyWithin = time.Second
	// lookAgain is how long a difference must last to be one. A seat is handed over
	// in some milliseconds, and a node acts on an entry, and gets its lease, within a
	// fraction of this.
	lookAgain = time.Second
	// verifyEvery is how often each node compares by itself: one question that every
	// member answers with a short message.
	verifyEvery = 30 * time.Second
)

// Verify compares who answers with who is named, on every node. The error names
// who could not be asked; what was found at the others is returned beside it.
func (n *Peer) Verify(ctx context.Context) ([]Finding, error) {
	found, silent, err := n.compare(ctx)
	switch len(silent) {
	case 0:
		return found, err
	case 1:
		return found, errors.Join(err, fmt.Errorf("%s does not answer, so what it serves is not known", silent[0]))
	}
	return found, errors.Join(err, fmt.Errorf("%s do not answer, so what they serve is not known", strings.Join(silent, ", ")))
}

// compare finds what two looks a moment apart both find. Silent are the nodes that
// did not answer the last one. After an error nothing is known.
func (n *Peer) compare(ctx context.Context) (found []Finding, silent []string, err error) {
	found, silent, err = n.look(ctx)
	if err != nil || len(found) == 0 {
		return found, silent, err
	}
	if err := await(ctx, lookAgain, nil, nil); err != nil {
		return nil, nil, err
	}
	again, silent, err := n.look(ctx)
	if err != nil {
		return nil, silent, err
	}
	return slices.DeleteFunc(again, func(f Finding) bool { return !slices.Contains(found, f) }), silent, nil
}

// look compares once.
func (n *Peer) look(ctx context.Context) (found []Finding, silent []string, err error) {
	answers, err := n.cfg.Surveyor.Survey(ctx, surveyWithin)
	if err != nil {
		return nil, nil, fmt.Errorf("ask the members what they answer: %w", err)
	}
	var holders map[string]raftfsm.Holder
	n.store.view(func(s *raftfsm.State) { holders = s.Desired(n.id()).Holders })
	found, silent = decideFindings(holders, answers)
	if !n.hasHeard() { // who is named is not known, and so no difference either
		return nil, silent, errors.New(unheard + ", and does not know who is named")
	}
	return found, silent, nil
}

// verifying compares for as long as the node runs. What each node finds is its own
// metric. What the leader finds is on record, with an event when a difference comes
// and when it goes; another leader's next look replaces it.
func (n *Peer) verifying(ctx context.Context) error {
	if await(ctx, 0, n.basis.heard, nil) != nil {
		return nil
	}
	for await(ctx, verifyEvery, nil, nil) == nil {
		found, _, err := n.compare(ctx)
		if err != nil {
			n.cfg.Log.Debug("compare who answers with who is named", "err", err)
			continue
		}
		n.observed.setFound(found)
		if leader, _ := n.raft.Leader(); leader == n.id() {
			n.record(ctx, found)
		}
	}
	return nil
}

// record has the log hold what was found, if it does not.
func (n *Peer) record(ctx context.Context, found []Finding) {
	var c raftfsm.Compared
	for _, f := range found[:min(len(found), raftfsm.MaxDifferences)] {
		c.Differences = append(c.Differences, raftfsm.Difference{Seat: f.Seat, Node: f.Node, Text: f.Text})
	}
	var known bool
	n.store.view(func(s *raftfsm.State) { known = s.Compares(c) })
	if known {
		return
	}
	result, err := n.Propose(ctx, Meshd, c)
	if err = settled(result, err); err != nil {
		n.cfg.Log.Debug("record who answers other than named", "err", err) // the next look tries again
	}
}

// decideFindings compares. Of a silent node it finds what the bus itself sees: that
// it does not speak is no difference. Nor is it that nobody answers what nobody may.
func decideFindings(holders map[string]raftfsm.Holder, answers []bus.Answer) (out []Finding, silent []string) {
	bound := map[string]bool{}
	for _, a := range answers {
		if !a.Answered {
			silent = append(silent, a.Node)
		}
		for _, b := range a.Bound {
			h := holders[b.Seat]
			switch {
			case b.Leaving:
			case h.Node != a.Node:
				out = append(out, Finding{a.Node, b.Seat, fmt.Sprintf("answers, and %s is named", describe(h))})
			case a.Answered && (b.Assignment != h.Assignment || b.Epoch != h.Epoch):
				out = append(out, Finding{a.Node, b.Seat, fmt.Sprintf("answers as %s, epoch %d, and %s is named", b.Assignment, b.Epoch, describe(h))})
			case b.Interest > 1:
				out = append(out, Finding{a.Node, b.Seat, fmt.Sprintf("is subscribed to %d times", b.Interest)})
			default:
				bound[b.Seat] = true
			}
		}
	}
	for _, seat := range sortedKeys(holders) {
		if h := holders[seat]; h.Node != "" && h.Dark == "" && !bound[seat] && !slices.Contains(silent, h.Node) {
			out = append(out, Finding{h.Node, seat, fmt.Sprintf("does not answer, and %s is named", describe(h))})
		}
	}
	return out, silent
}

func describe(h raftfsm.Holder) string {
	if h.Node == "" {
		return "nobody"
	}
	return fmt.Sprintf("%s/%s, epoch %d", h.Node, h.Assignment, h.Epoch)
}
