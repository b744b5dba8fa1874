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

// surveyWithin is how long the members get to say what they answer: a bus that
// is well answers in milliseconds.
const surveyWithin = time.Second

// Verify compares who answers with who is named, on every node. The error names
// who could not be asked; what was found at the others is returned beside it.
func (n *Peer) Verify(ctx context.Context) ([]Finding, error) {
	answers, err := n.cfg.Surveyor.Survey(ctx, surveyWithin)
	if err != nil {
		return nil, fmt.Errorf("ask the members what they answer: %w", err)
	}
	var holders map[string]raftfsm.Holder
	n.store.view(func(s *raftfsm.State) { holders = s.Desired(n.id()).Holders })
	findings, silent := decideFindings(holders, answers)
	switch len(silent) {
	case 0:
	case 1:
		err = fmt.Errorf("%s does not answer, so what it serves is not known", silent[0])
	default:
		err = fmt.Errorf("%s do not answer, so what they serve is not known", strings.Join(silent, ", "))
	}
	if !n.hasHeard() { // who is named is not known, and so no difference either
		return nil, errors.Join(err, errors.New(unheard+", and does not know who is named"))
	}
	return findings, err
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
