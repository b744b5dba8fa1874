package bus

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// mostOfOne is how many calls one module may have under way at once.
const mostOfOne = 64

// serveCalls answers the calls of this node's modules. The server has checked already that the caller
// named in the subject is the one that published it, and that it may.
func (b *Bus) serveCalls() error {
	_, err := b.host.mod.Subscribe("call."+b.cfg.NodeName+".>", b.relay)
	if err != nil {
		return fmt.Errorf("serve calls of modules: %w", err)
	}
	return b.host.mod.FlushTimeout(bindLimit)
}

// relay takes one call of a module, or of an operator's client, off the connection. It never waits.
func (b *Bus) relay(m *nats.Msg) {
	caller, t, err := parseCall(m.Subject)
	from := clientOf(caller)
	if !below(from.inbox, m.Reply) {
		// Whatever subject stands here, meshd would publish to it: only the caller's own will do.
		b.host.log.refuse(0, from.who, ActionReply, m.Reply)
		return
	}
	answer := func(r Reply, err error) {
		if err := b.host.mod.PublishMsg(encode(m.Reply, r, err)); err != nil {
			b.cfg.Log.Warn("answer to a module was not sent", "assignment", from.who, "err", err)
		}
	}
	here := Reply{Node: b.cfg.NodeName}
	if err != nil {
		answer(here, fail(CodeRefused, "%v", err))
		return
	}
	if !b.relays.enter(from.who, mostOfOne) {
		answer(here, fail(CodeBusy, "%s has %d calls under way, its limit; wait for some", from.who, mostOfOne))
		return
	}
	if !b.work.begin() {
		b.relays.leave(from.who)
		answer(here, fail(CodeUnreachable, "node %s is stopping", b.cfg.NodeName))
		return
	}
	go func() {
		defer b.work.end()
		defer b.relays.leave(from.who)
		ctx, cancel := context.WithTimeout(b.work.ctx, timeLeft(m.Header))
		defer cancel()
		r, err := b.Call(ctx, from.Caller, t, m.Data)
		if err != nil {
			r = here
		}
		answer(r, err)
	}()
}

// forwarder asks modules on this node. It has its own kind of inbox, one branch per assignment, and
// each module may publish to its own branch only.
type forwarder struct {
	nc   *nats.Conn
	node string

	mu      sync.Mutex
	waiting map[string]chan *nats.Msg // by reply subject
}

func newForwarder(nc *nats.Conn, node string) (*forwarder, error) {
	f := &forwarder{nc: nc, node: node, waiting: map[string]chan *nats.Msg{}}
	if _, err := nc.Subscribe("r."+node+".*.*", f.receive); err != nil {
		return nil, fmt.Errorf("receive answers of modules: %w", err)
	}
	return f, nc.FlushTimeout(bindLimit)
}

// receive hands an answer to whoever waits for it; a second one, or a late one, is dropped.
func (f *forwarder) receive(m *nats.Msg) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ch := f.waiting[m.Subject]; ch != nil {
		delete(f.waiting, m.Subject)
		ch <- m
	}
}

// ask publishes to a private subject of the assignment and waits for the first answer.
func (f *forwarder) ask(ctx context.Context, assignment string, m *nats.Msg) (*nats.Msg, error) {
	m.Reply = replies(f.node, assignment) + "." + rand.Text()
	ch := make(chan *nats.Msg, 1)
	f.mu.Lock()
	f.waiting[m.Reply] = ch
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.waiting, m.Reply)
	}()
	if err := f.nc.PublishMsg(m); err != nil {
		return nil, fmt.Errorf("publish to module: %w", err)
	}
	select {
	case got := <-ch:
		return got, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Forward passes c on to the module's own connection, at suffix below its private prefix: the handler
// of everything that a module serves itself. See Handler for what its errors become.
func (b *Bus) Forward(ctx context.Context, assignment, suffix string, c Call) ([]byte, error) {
	faults := []error{checkToken("assignment", assignment)}
	for _, token := range strings.Split(suffix, ".") {
		faults = append(faults, checkToken("part of the subject", token))
	}
	if err := errors.Join(faults...); err != nil {
		return nil, fail(CodeRefused, "forward to module: %v", err)
	}
	m := nats.NewMsg(Private(b.cfg.NodeName, assignment) + "." + suffix)
	m.Data = c.Data
	m.Header.Set(headerCaller, c.Caller.String())
	if c.Seat != "" {
		m.Header.Set(headerSeat, c.Seat)
		m.Header.Set(headerEpoch, strconv.FormatUint(c.Epoch, 10))
	}
	if deadline, ok := ctx.Deadline(); ok {
		m.Header.Set(headerDeadline, strconv.FormatInt(max(time.Until(deadline).Milliseconds(), 1), 10))
	}
	got, err := b.forward.ask(ctx, assignment, m)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return nil, fail(CodeTimedOut, "module %s on %s did not answer %s in time; it may have run", assignment, b.cfg.NodeName, suffix)
	case err != nil:
		return nil, fail(CodeUncertain, "module %s on %s: %v; it may have run", assignment, b.cfg.NodeName, err)
	case noResponders(got):
		return nil, fail(CodeNotServed, "module %s on %s is not connected to the bus, or does not subscribe %s", assignment, b.cfg.NodeName, m.Subject)
	}
	// Only the text is taken over. A module that sets our own headers gains nothing by it.
	if text := got.Header.Get(headerText); text != "" || got.Header.Get(headerStatus) != "" {
		return nil, fail(CodeFailed, "module %s on %s: %s", assignment, b.cfg.NodeName, text)
	}
	return got.Data, nil
}

// noResponders recognises the server's own word that nobody subscribes. A module that forges it lies
// about itself only.
func noResponders(m *nats.Msg) bool { return len(m.Data) == 0 && m.Header.Get("Status") == "503" }
