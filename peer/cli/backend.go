package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"meshd/bus"
	"meshd/peer/api"
	"meshd/raftfsm"
)

// backend serves the local socket from the running node.
type backend struct{ n *node }

func (n *node) backend() *api.Server {
	b := backend{n}
	return &api.Server{Node: n.Name, Reader: b, Writer: b, Caller: b, Members: b, Bus: b, Logs: b, Log: n.log.With("part", "api")}
}

// Overview is what this node knows, without asking another.
func (b backend) Overview(context.Context) (api.Overview, error) {
	v := b.n.peer.View()
	name := v.State.NodeName
	o := api.Overview{
		Self: b.n.Name, Version: version(), State: v.State, Leader: name(v.Leader), Index: v.State.Index, Age: v.Age,
		Quorum: v.Quorum, Alive: map[string]bool{}, Now: time.Now(),
	}
	for id, alive := range v.Alive {
		o.Alive[name(id)] = alive
	}
	for _, id := range v.Missing {
		o.Missing = append(o.Missing, name(id))
	}
	for _, id := range v.Voters {
		o.Voters = append(o.Voters, name(id))
	}
	for _, r := range b.n.bus.Refusals() {
		o.Refused = append(o.Refused, api.Refusal{Assignment: r.Assignment, Action: r.Action, Subject: r.Subject, Count: int(r.Count), First: r.First, Last: r.Last})
	}
	return o, nil
}

// Wait returns when the state is newer than after.
func (b backend) Wait(ctx context.Context, after uint64) error { return b.n.peer.Wait(ctx, after) }

// Detail asks the nodes that work on name.
func (b backend) Detail(ctx context.Context, name string) ([]api.Try, error) {
	tries, err := b.n.peer.Detail(ctx, name)
	var out []api.Try
	for _, t := range tries {
		out = append(out, api.Try{Key: t.Key, Step: t.Step, Class: t.Class, Text: t.Text, Since: t.Since, Tries: t.Tries, Next: t.Next})
	}
	return out, err
}

// Propose commits a command through whoever leads.
func (b backend) Propose(ctx context.Context, actor string, c raftfsm.Command) (raftfsm.Result, error) {
	return b.n.peer.Propose(ctx, actor, c)
}

// Preview says what a command would change.
func (b backend) Preview(ctx context.Context, actor string, c raftfsm.Command) (api.Plan, *raftfsm.Rejection) {
	plan, own, refused := b.n.peer.Preview(ctx, actor, c)
	return api.Plan{Plan: plan, Own: own}, refused
}

// Call calls as an operator of this node.
func (b backend) Call(ctx context.Context, target string, data []byte) (api.CallReply, error) {
	r, err := b.n.peer.Call(ctx, target, data)
	var failed *bus.CallError
	if errors.As(err, &failed) {
		return api.CallReply{}, &raftfsm.Rejection{Code: string(failed.Code), Text: failed.Text}
	}
	return api.CallReply{Data: json.RawMessage(r.Data), Seat: r.Seat, Epoch: r.Epoch, Node: r.Node}, err
}

// Verify compares who answers with who is named.
func (b backend) Verify(ctx context.Context) ([]api.Finding, error) {
	findings, err := b.n.peer.Verify(ctx)
	var out []api.Finding
	for _, f := range findings {
		out = append(out, api.Finding(f))
	}
	return out, err
}

// AddBusCredential lets a key onto this node's bus.
func (b backend) AddBusCredential(ctx context.Context, actor, publicKey string, ttl time.Duration) (api.BusLogin, error) {
	l, err := b.n.peer.AddBusCredential(ctx, actor, publicKey, ttl)
	return api.BusLogin{BusCredential: api.BusCredential(l.BusCredential), URL: l.URL, Inbox: l.Inbox, Calls: l.Calls}, err
}

// BusCredentials lists those of this node.
func (b backend) BusCredentials() []api.BusCredential {
	out := []api.BusCredential{}
	for _, c := range b.n.peer.BusCredentials() {
		out = append(out, api.BusCredential(c))
	}
	return out
}

// RemoveBusCredential ends one.
func (b backend) RemoveBusCredential(ctx context.Context, name string) error {
	return b.n.peer.RemoveBusCredential(ctx, name)
}

// Token makes a join token.
func (b backend) Token(ctx context.Context, actor string, ttl time.Duration) (string, error) {
	return b.n.peer.Token(ctx, actor, ttl)
}

// RemoveNode expels a member.
func (b backend) RemoveNode(ctx context.Context, actor, name string) error {
	return b.n.peer.RemoveNode(ctx, actor, name)
}

// Leave takes this node out of the mesh and stops it, with what it supervises.
func (b backend) Leave(ctx context.Context, actor string, force bool) error {
	if err := b.n.peer.Leave(ctx, actor, force); err != nil {
		return err
	}
	defer time.AfterFunc(leaveGrace, b.n.leave)
	if err := b.n.procs.StopAll(ctx); err != nil {
		return fmt.Errorf("the node has left the mesh; %w", err)
	}
	return nil
}

// leaveGrace lets the answer to `meshd leave` out before the socket closes.
const leaveGrace = 200 * time.Millisecond

// Logs writes an assignment's output, from whichever node it runs on.
func (b backend) Logs(ctx context.Context, assignment string, lines int, follow bool, w io.Writer) error {
	return b.n.peer.Logs(ctx, assignment, lines, follow, w)
}
