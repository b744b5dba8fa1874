package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// surveySubject is where, in the account MESH, every meshd says what it answers.
const surveySubject = "meshd.survey"

// Answer is what one node says that it answers, beside what this node's server knows of it.
type Answer struct {
	Node     string  `json:"node"`
	Answered bool    `json:"-"` // false: it was silent, and Bound is what the server knows alone
	Bound    []Bound `json:"bound"`
}

// Bound is one mesh seat that a node is subscribed for.
type Bound struct {
	Seat       string `json:"seat"`
	Assignment string `json:"assignment"` // empty if the node did not say
	Epoch      uint64 `json:"epoch"`
	Leaving    bool   `json:"leaving"` // runs no call: it answers only that it is not the holder
	Interest   int    `json:"-"`       // subscriptions at the node that this node's server knows of
}

func (b *Bus) serveSurvey() error {
	_, err := b.host.mesh.Subscribe(surveySubject, func(m *nats.Msg) {
		data, err := json.Marshal(Answer{Node: b.cfg.NodeName, Bound: b.boundSeats()})
		if err == nil {
			err = m.Respond(data)
		}
		if err != nil {
			b.cfg.Log.Warn("answer to a survey was not sent", "err", err)
		}
	})
	if err != nil {
		return fmt.Errorf("serve survey: %w", err)
	}
	return b.host.mesh.FlushTimeout(bindLimit)
}

func (b *Bus) boundSeats() []Bound {
	var out []Bound
	for _, s := range b.bound.Load().list {
		spec, leaving := s.state()
		if spec.Scope == ScopeMesh {
			out = append(out, Bound{Seat: spec.Seat, Assignment: spec.Assignment, Epoch: spec.Epoch, Leaving: leaving || !spec.Answers()})
		}
	}
	return out
}

// Survey asks every member which mesh seats it has bound, so that the caller can compare who answers
// with who is named. It returns one Answer per member of the Directory, sorted by name, once all have
// spoken or wait has passed; and for every seat of the Directory it adds what the server knows, so that
// a node that is silent, or does not say, is found as well.
func (b *Bus) Survey(ctx context.Context, wait time.Duration) ([]Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	d := b.view.Load().Directory
	answers := map[string]*Answer{}
	for node := range d.Nodes {
		answers[node] = &Answer{Node: node}
	}
	inbox := b.host.mesh.NewInbox()
	sub, err := b.host.mesh.SubscribeSync(inbox)
	if err == nil {
		err = b.host.mesh.PublishRequest(surveySubject, inbox, nil)
	}
	if err != nil {
		return nil, fmt.Errorf("survey seats: %w", err)
	}
	defer func() {
		if err := sub.Unsubscribe(); err != nil {
			b.cfg.Log.Warn("end of a survey", "err", err)
		}
	}()
	for missing := len(answers); missing > 0; {
		m, err := sub.NextMsgWithContext(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("survey seats: %w", err)
		}
		var a Answer
		if err := json.Unmarshal(m.Data, &a); err != nil {
			return nil, fmt.Errorf("survey seats: read an answer: %w", err)
		}
		if old := answers[a.Node]; old == nil || !old.Answered {
			a.Answered = true
			answers[a.Node] = &a
			if old != nil {
				missing--
			}
		}
	}
	// The server works on copies of the accounts that it is given, so it must be asked for its own.
	account, err := b.host.srv.LookupAccount(accountMesh)
	if err != nil {
		return nil, fmt.Errorf("survey seats: account %s: %w", accountMesh, err)
	}
	out := make([]Answer, 0, len(answers))
	for _, node := range slices.Sorted(maps.Keys(answers)) {
		answers[node].addInterest(d, account)
		out = append(out, *answers[node])
	}
	return out, nil
}

// interest counts the subscriptions for any one verb of a seat at a node, as this node's server knows
// them: its own, and those that other servers have told it of.
func interest(account *server.Account, node, seat string, verbs []string) int {
	most := 0
	for _, verb := range verbs {
		most = max(most, account.Interest(Target{Seat: seat, Name: verb}.at(node)))
	}
	return most
}

func (a *Answer) addInterest(d Directory, account *server.Account) {
	for seat, s := range d.Seats {
		n := interest(account, a.Node, seat, s.Verbs)
		i := slices.IndexFunc(a.Bound, func(b Bound) bool { return b.Seat == seat })
		switch {
		case i >= 0:
			a.Bound[i].Interest = n
		case n > 0:
			a.Bound = append(a.Bound, Bound{Seat: seat, Interest: n})
		}
	}
	slices.SortFunc(a.Bound, func(x, y Bound) int { return strings.Compare(x.Seat, y.Seat) })
}
