package bus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// A call that nobody ran is tried again when the layout changes, and at the latest after these pauses,
// which double from the first to the last.
const (
	firstPause = 10 * time.Millisecond
	lastPause  = 250 * time.Millisecond
	// leastTime is what must be left for another try. With less, a certain "it has not run" would be
	// traded for a doubtful "timed out".
	leastTime = 100 * time.Millisecond
	// darkPatience is how long a call waits for a seat that nobody may answer: longer than the lease
	// of a holder that is waited out.
	darkPatience = 2 * time.Second
)

// Call asks for t in the name of caller and returns the answer, or a *CallError that says why there is
// none. It takes 5 s at most, or until ctx ends, and never more than 60 s. Within that time it follows
// a seat that moves; it repeats a request only if that has certainly not run, or if the verb is
// idempotent.
func (b *Bus) Call(ctx context.Context, caller Caller, t Target, data []byte) (Reply, error) {
	if err := errors.Join(t.validate(), checkToken("node", caller.Node)); err != nil {
		return Reply{}, fail(CodeRefused, "%v", err)
	}
	if len(data) > maxPayload {
		return Reply{}, fail(CodeTooLarge, "request of %d bytes is over the limit of %d", len(data), maxPayload)
	}
	limit := maxDeadline
	if _, has := ctx.Deadline(); !has {
		limit = defaultDeadline
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if !b.work.begin() {
		return Reply{}, fail(CodeUnreachable, "node %s is stopping", b.cfg.NodeName)
	}
	defer b.work.end()

	var hint Holder // a newer one than our own log has, learnt from a node that lost the seat
	past := tries{began: time.Now()}
	for pause := firstPause; ; {
		v := b.view.Load()
		past.n++
		node, err := v.Directory.locate(t, hint)
		dark := codeIs(err, CodeNoHolder) && past.darkFor() < darkPatience
		if err != nil && !dark {
			return Reply{}, past.sum(err)
		}
		var moved Holder
		if !dark {
			past.dark = time.Time{}
			var reply Reply
			reply, moved, err = b.ask(ctx, caller, t, v, max(hint.Epoch, v.Directory.Seats[t.Seat].Holder.Epoch), node, data)
			switch {
			case err == nil:
				return reply, nil
			case codeIs(err, CodeNotHolder, CodeUnreachable):
			case codeIs(err, CodeUncertain, CodeOldEpoch) && v.Directory.idempotent(t):
				past.doubt = true
			default:
				return Reply{}, past.sum(err)
			}
		}
		if moved.Epoch > max(hint.Epoch, v.Directory.Seats[t.Seat].Holder.Epoch) {
			hint = moved
			continue // whom to ask is known, and each hint is newer than the last: this ends
		}
		again := time.NewTimer(pause)
		select {
		case <-v.changed:
		case <-again.C:
			pause = min(2*pause, lastPause)
		case <-ctx.Done():
			again.Stop()
			return Reply{}, past.gaveUp(err)
		case <-b.work.quit:
			again.Stop()
			return Reply{}, past.sum(fail(CodeUnreachable, "node %s is stopping", b.cfg.NodeName))
		}
		again.Stop()
		if deadline, _ := ctx.Deadline(); time.Until(deadline) < leastTime {
			return Reply{}, past.gaveUp(err)
		}
	}
}

// tries are the requests of one call.
type tries struct {
	n     int
	began time.Time
	dark  time.Time // since when the seat has had nobody who may answer it; zero while it has
	doubt bool      // one of them may have run
}

// darkFor is how long the seat, which is dark now, has been so.
func (t *tries) darkFor() time.Duration {
	if t.dark.IsZero() {
		t.dark = time.Now()
	}
	return time.Since(t.dark)
}

// gaveUp keeps the last reason and adds how long it held.
func (t tries) gaveUp(err error) error {
	ran := "it has not run"
	if t.doubt {
		ran = "it may have run"
	}
	ce := asCallError(err)
	return t.sum(fail(ce.Code, "%s (asked %d times in %v; %s)", ce.Text, t.n, time.Since(t.began).Round(time.Millisecond), ran))
}

// sum is what a call ends with whose last try ended with err. Where one before may have run, no code
// may claim that none has.
func (t tries) sum(err error) error {
	ce := asCallError(err)
	if t.doubt && ce.Code != CodeTimedOut && ce.Code != CodeOldEpoch && ce.Code != CodeUncertain {
		return fail(CodeUncertain, "%s; a try before may have run", ce.Text)
	}
	return ce
}

func asCallError(err error) *CallError {
	var ce *CallError
	if errors.As(err, &ce) {
		return ce
	}
	return fail(CodeUnreachable, "%v", err)
}

func codeIs(err error, codes ...Code) bool {
	var ce *CallError
	return errors.As(err, &ce) && slices.Contains(codes, ce.Code)
}

// idempotent reports whether a request that may have run may be made again.
func (d Directory) idempotent(t Target) bool {
	return t.meshSeat() && slices.Contains(d.Seats[t.Seat].Idempotent, t.Name)
}

// locate finds the node to ask, or says what is wrong with asking.
func (d Directory) locate(t Target, hint Holder) (string, error) {
	if !t.meshSeat() {
		return t.Node, d.check(t)
	}
	seat, ok := d.Seats[t.Seat]
	switch {
	case !ok:
		for _, node := range slices.Sorted(maps.Keys(d.Nodes)) {
			if _, here := d.Nodes[node].Seats[t.Seat]; here {
				return "", fail(CodeUnknown, "%s is a node seat: ask one node, such as %s/%s", t.Seat, node, t)
			}
		}
		return "", fail(CodeUnknown, "the mesh has no seat %q; it has: %s", t.Seat, names(d.Seats))
	case !slices.Contains(seat.Verbs, t.Name):
		return "", fail(CodeNoSuchVerb, "seat %s has no verb %q; it has: %s", t.Seat, t.Name, list(seat.Verbs))
	case hint.Epoch > seat.Holder.Epoch:
		return hint.Node, nil
	case seat.Dark != "":
		return "", fail(CodeNoHolder, "nobody answers seat %s now: %s", t.Seat, seat.Dark)
	case seat.Holder.Node == "":
		return "", fail(CodeNoHolder, "seat %s has no holder on record", t.Seat)
	default:
		return seat.Holder.Node, nil
	}
}

// check says what is wrong with asking a given node.
func (d Directory) check(t Target) error {
	n, ok := d.Nodes[t.Node]
	if !ok {
		return fail(CodeUnknown, "the mesh has no node %q; it has: %s", t.Node, names(d.Nodes))
	}
	what, who, has, all := "assignment", t.Assignment, n.Tools[t.Assignment], names(n.Tools)
	if t.Seat != "" {
		what, who, has, all = "node seat", t.Seat, n.Seats[t.Seat], names(n.Seats)
	}
	switch {
	case has == nil:
		return fail(CodeUnknown, "node %s has no %s %q to call; it has: %s", t.Node, what, who, all)
	case !slices.Contains(has, t.Name):
		return fail(CodeNoSuchVerb, "%s %s on %s has no %q; it has: %s", what, who, t.Node, t.Name, list(has))
	default:
		return nil
	}
}

// ask sends one request to one node, which is a mesh seat's holder of an epoch as v or a hint has it.
// Moved is the holder that a node names which is it no more.
func (b *Bus) ask(ctx context.Context, caller Caller, t Target, v *view, epoch uint64, node string, data []byte) (r Reply, moved Holder, err error) {
	limit := maxDeadline
	if deadline, ok := ctx.Deadline(); ok {
		limit = time.Until(deadline)
	}
	if t.meshSeat() {
		var end func()
		ctx, end = b.flights.begin(ctx, t.Seat, epoch)
		defer end()
		if now := b.view.Load(); now != v {
			b.flights.land(now.Directory)
		}
	}
	sent := b.cfg.Clock()
	o := b.request(ctx, node, t, request{name: t.Name, caller: caller, limit: limit, data: data})
	took := b.cfg.Clock() - sent
	r, err = o.Reply, o.err
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return Reply{}, Holder{}, fail(CodeUnreachable, "node %s is silent: nothing there answers %s", node, t)
	case errors.Is(err, context.Canceled):
		return Reply{}, Holder{}, fail(CodeUncertain, "node %s was asked for %s and has not answered: %v; it may have run", node, t, context.Cause(ctx))
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout):
		return Reply{}, Holder{}, fail(CodeTimedOut, "node %s did not answer %s within %v; it may have run", node, t, limit.Round(time.Millisecond))
	case err != nil && !errors.As(err, new(*CallError)):
		return Reply{}, Holder{}, fail(CodeUncertain, "ask node %s for %s: %v; it may have run", node, t, err)
	case codeIs(err, CodeNotHolder):
		return Reply{}, o.moved, err
	}
	if t.meshSeat() {
		if newest := b.seen.note(t.Seat, r.Epoch); r.Epoch < newest {
			return Reply{}, Holder{}, fail(CodeOldEpoch, "node %s answered %s under epoch %d, but epoch %d has been seen; it may have run",
				r.Node, t, r.Epoch, newest)
		}
	}
	if r.Left > 0 && took > r.Left {
		if late := b.confirmed(ctx, t, node, r.Epoch); late != nil {
			return Reply{}, Holder{}, fail(CodeUncertain, "node %s answered %s under epoch %d %v after it was asked, when its lease may have been over: %v; it has run",
				r.Node, t, r.Epoch, took.Round(time.Millisecond), late)
		}
	}
	if err != nil {
		return Reply{}, Holder{}, err
	}
	return r, Holder{}, nil
}

// request makes one request of one node. An error that is no *CallError came up on the way, as context's
// or nats's own.
func (b *Bus) request(ctx context.Context, node string, t Target, m request) outcome {
	if node == b.cfg.NodeName {
		return b.requestHere(ctx, t, m)
	}
	out := nats.NewMsg(t.at(node))
	out.Data = m.data
	out.Header.Set(headerCaller, m.caller.String())
	out.Header.Set(headerDeadline, strconv.FormatInt(max(m.limit.Milliseconds(), 1), 10))
	got, err := b.host.mesh.RequestMsgWithContext(ctx, out)
	if err != nil {
		return outcome{err: err}
	}
	r, err := decode(got)
	return outcome{r, parseHolder(got.Header.Get(headerHolder)), err}
}

// requestHere is request of this node: it takes no way through the server, and is answered by the same
// service.
func (b *Bus) requestHere(ctx context.Context, t Target, m request) outcome {
	s := b.bound.Load().at[strings.TrimSuffix(t.at(b.cfg.NodeName), "."+t.Name)]
	if s == nil {
		return outcome{err: nats.ErrNoResponders}
	}
	got := make(chan outcome, 1)
	m.reply = func(o outcome) { got <- o }
	s.take(m)
	select {
	case o := <-got:
		return o
	case <-ctx.Done():
		return outcome{err: ctx.Err()}
	}
}

// confirmed is nil if the node holds the seat under the epoch still: an answer that was long on its way,
// or long in the making, is then as good as one that was made just now.
func (b *Bus) confirmed(ctx context.Context, t Target, node string, epoch uint64) error {
	t.Name = confirm
	sent := b.cfg.Clock()
	o := b.request(ctx, node, t, request{name: confirm})
	took := b.cfg.Clock() - sent
	switch {
	case o.err != nil:
		return fmt.Errorf("it did not confirm: %w", o.err)
	case o.Epoch != epoch:
		return fmt.Errorf("it holds the seat under epoch %d now", o.Epoch)
	case took > o.Left:
		return fmt.Errorf("it confirmed after %v more", took.Round(time.Millisecond))
	}
	return nil
}

// parseHolder reads NODE/ASSIGNMENT/EPOCH; anything else is no hint.
func parseHolder(s string) Holder {
	part := strings.Split(s, "/")
	if len(part) != 3 || checkToken("node", part[0]) != nil {
		return Holder{}
	}
	epoch, err := strconv.ParseUint(part[2], 10, 64)
	if err != nil {
		return Holder{}
	}
	return Holder{Node: part[0], Assignment: part[1], Epoch: epoch}
}

// epochs keeps the highest epoch of each mesh seat that a reply or the log has shown.
type epochs struct {
	mu   sync.Mutex
	high map[string]uint64
}

// note takes in an epoch and returns the highest.
func (e *epochs) note(seat string, epoch uint64) uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.high == nil {
		e.high = map[string]uint64{}
	}
	e.high[seat] = max(e.high[seat], epoch)
	return e.high[seat]
}

// keep takes in what the log says, and forgets the seats that it has not.
func (e *epochs) keep(seats map[string]Seat) {
	for name, s := range seats {
		e.note(name, s.Holder.Epoch)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for name := range e.high {
		if _, ok := seats[name]; !ok {
			delete(e.high, name)
		}
	}
}
