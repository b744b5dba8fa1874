package bus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// mostCalls is how many calls of one service run at once; the next is told that it is busy.
	mostCalls = 64
	// leavingTime is how long a service that is gone still says so. News of an unsubscription takes up
	// to a second or two to reach every node, and calls that arrive meanwhile would vanish.
	leavingTime = 2 * time.Second
	// bindLimit bounds the wait for our own server to confirm a subscription.
	bindLimit = 5 * time.Second
)

// Call is one request as its handler sees it. Caller was stamped by the caller's meshd, on an account
// that no module reaches.
type Call struct {
	Caller Caller
	Target
	Epoch uint64 // under which it is answered; 0 for a tool
	Data  []byte // at most 1 MiB
}

// Handler answers one call, in a goroutine of its own. Ctx ends with the call's deadline; a handler
// that goes on after it keeps one of the service's 64 places, and its answer is dropped. A *CallError
// that it returns keeps its code, except for those that claim that nothing has run.
type Handler func(ctx context.Context, c Call) (data []byte, err error)

// Gate says whether this node may answer for a seat. It is entered before the handler runs; leave is
// called when the handler has ended, always. Its error keeps the reply from leaving, and else left is
// for how long from then on, by any clock, nobody else can answer.
type Gate interface {
	Enter(seat string) (epoch uint64, leave func() (left time.Duration, err error), err error)
}

// confirm, in the place of a verb, asks a holder's gate alone. No verb is called so.
const confirm = "_confirm"

// service is a Service that is bound to its subject. See the package comment for its states.
type service struct {
	bus    *Bus
	prefix string
	sub    *nats.Subscription
	slots  chan struct{}
	tally  tally

	mu      sync.Mutex
	spec    Service
	leaving bool
	timer   *time.Timer
}

// serve binds what is listed and not yet bound, and gives what is bound its newest form.
func (b *Bus) serve(list []Service) error {
	var faults []error
	fresh := false
	defer b.publishBound()
	for _, spec := range list {
		prefix := spec.prefix(b.cfg.NodeName)
		if s := b.services[prefix]; s != nil {
			s.stay(spec)
			continue
		}
		s := &service{bus: b, prefix: prefix, spec: spec, slots: make(chan struct{}, mostCalls)}
		s.tally.init()
		var err error
		// A plain subscription. A queue group would hide a second one.
		if s.sub, err = b.host.mesh.Subscribe(prefix+".*", s.receive); err != nil {
			faults = append(faults, fmt.Errorf("bind %s: %w", spec.label(), err))
			continue
		}
		b.services[prefix] = s
		fresh = true
	}
	if fresh {
		if err := b.host.mesh.FlushTimeout(bindLimit); err != nil {
			faults = append(faults, fmt.Errorf("bind services: %w", err))
		}
	}
	return errors.Join(faults...)
}

// publishBound lets those see the services who do not hold the lock of Apply.
func (b *Bus) publishBound() {
	now := &board{at: maps.Clone(b.services)}
	for _, prefix := range slices.Sorted(maps.Keys(b.services)) {
		now.list = append(now.list, b.services[prefix])
	}
	b.bound.Store(now)
}

// board is the services that are bound: in order, and by subject prefix.
type board struct {
	list []*service
	at   map[string]*service
}

// dismiss makes every bound service that is not listed a leaving one.
func (b *Bus) dismiss(list []Service) {
	keep := map[string]bool{}
	for _, spec := range list {
		keep[spec.prefix(b.cfg.NodeName)] = true
	}
	for prefix, s := range b.services {
		if !keep[prefix] {
			s.leave()
		}
	}
}

func (s *service) stay(spec Service) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spec, s.leaving = spec, false
	if s.timer != nil {
		s.timer.Stop()
		s.timer = nil
	}
}

func (s *service) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leaving {
		return
	}
	s.leaving = true
	s.timer = time.AfterFunc(leavingTime, s.unbind)
}

func (s *service) stopTimer() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.timer != nil {
		s.timer.Stop()
	}
}

// unbind ends a leaving service, unless it has been listed again.
func (s *service) unbind() {
	s.bus.applying.Lock()
	defer s.bus.applying.Unlock()
	s.mu.Lock()
	leaving := s.leaving
	s.mu.Unlock()
	if !leaving || s.bus.closed || s.bus.services[s.prefix] != s {
		return
	}
	delete(s.bus.services, s.prefix)
	s.bus.publishBound()
	if err := s.sub.Unsubscribe(); err != nil {
		s.bus.cfg.Log.Error("unbind service failed", "subject", s.prefix, "err", err)
	}
}

func (s *service) state() (spec Service, leaving bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.spec, s.leaving
}

// request is a call as a service takes it, from the bus or from its own node.
type request struct {
	name   string // verb, tool, or confirm
	caller Caller
	limit  time.Duration // what is left until its deadline
	data   []byte
	reply  func(outcome) // does not wait
}

// outcome is what became of a request: an answer, or why there is none, with who made it in either case.
type outcome struct {
	Reply
	moved Holder // whom the log names, where the seat has left this node
	err   error
}

// receive takes one request off the connection. It never waits.
func (s *service) receive(m *nats.Msg) {
	s.take(request{
		name: m.Subject[strings.LastIndexByte(m.Subject, '.')+1:], caller: parseCaller(m.Header.Get(headerCaller)),
		limit: timeLeft(m.Header), data: m.Data,
		reply: func(o outcome) {
			if m.Reply == "" {
				return // nobody waits
			}
			if err := s.bus.host.mesh.PublishMsg(o.encode(m.Reply)); err != nil {
				s.bus.cfg.Log.Warn("answer to a call was not sent", "subject", m.Subject, "err", err)
			}
		},
	})
}

// encode makes the message that carries the outcome.
func (o outcome) encode(subject string) *nats.Msg {
	m := encode(subject, o.Reply, o.err)
	if o.moved.Node != "" {
		m.Header.Set(headerHolder, o.moved.Node+"/"+o.moved.Assignment+"/"+strconv.FormatUint(o.moved.Epoch, 10))
	}
	return m
}

// take begins to answer one request. It never waits.
func (s *service) take(m request) {
	spec, leaving := s.state()
	name := m.name
	switch {
	case leaving:
		s.answerLeft(m, spec)
	case spec.Closed != "":
		s.answer(m, spec, Reply{}, fail(CodeNotHolder, "%s on %s: %s", spec.label(), s.bus.cfg.NodeName, spec.Closed))
	case name == confirm && spec.Gate != nil:
		s.confirm(m, spec)
	case !slices.Contains(spec.Verbs, name):
		s.answer(m, spec, Reply{}, fail(CodeNoSuchVerb, "%s on %s has no %q; it has: %s",
			spec.label(), s.bus.cfg.NodeName, name, list(spec.Verbs)))
	case len(m.data) > maxPayload:
		s.answer(m, spec, Reply{}, fail(CodeTooLarge, "request of %d bytes is over the limit of %d", len(m.data), maxPayload))
	default:
		select {
		case s.slots <- struct{}{}:
		default:
			s.answer(m, spec, Reply{}, fail(CodeBusy, "%s on %s has %d calls running, its limit; try again",
				spec.label(), s.bus.cfg.NodeName, mostCalls))
			return
		}
		if !s.bus.work.begin() {
			<-s.slots
			s.answer(m, spec, Reply{}, fail(CodeUnreachable, "node %s is stopping", s.bus.cfg.NodeName))
			return
		}
		go func() {
			defer func() { <-s.slots; s.bus.work.end() }()
			s.run(m, spec)
		}()
	}
}

// run answers one call: gate, handler, gate.
func (s *service) run(m request, spec Service) {
	began, name := time.Now(), m.name
	ctx, cancel := context.WithTimeout(s.bus.work.ctx, m.limit)
	defer cancel()
	leave := func() (time.Duration, error) { return 0, nil }
	if spec.Gate != nil {
		epoch, out, err := spec.Gate.Enter(spec.Seat)
		if err != nil {
			s.answer(m, spec, Reply{}, fail(CodeNotHolder, "%s on %s: %v", spec.label(), s.bus.cfg.NodeName, err))
			return
		}
		leave, spec.Epoch = out, epoch
	}
	var answered atomic.Bool
	reply := func(r Reply, err error) {
		if answered.CompareAndSwap(false, true) {
			s.tally.count(name, time.Since(began), err)
			s.answer(m, spec, r, err)
		}
	}
	overdue := context.AfterFunc(ctx, func() {
		reply(Reply{}, fail(CodeTimedOut, "%s on %s did not answer %q within %v; it may have run",
			spec.label(), s.bus.cfg.NodeName, name, m.limit))
	})
	defer overdue()
	call := Call{Caller: m.caller, Target: spec.target(name), Epoch: spec.Epoch, Data: m.data}
	call.Node = s.bus.cfg.NodeName
	data, err := s.invoke(ctx, spec.Handler, call)
	left, closed := leave()
	if lost := errors.Join(closed, s.lost(spec)); lost != nil {
		data, left, err = nil, 0, fail(CodeUncertain, "%s on %s ran %q, but the seat was lost before the answer: %v",
			spec.label(), s.bus.cfg.NodeName, name, lost)
	}
	reply(Reply{Data: data, Left: left}, err)
}

// confirm tells a caller that got its answer late whether this node is the holder still.
func (s *service) confirm(m request, spec Service) {
	epoch, leave, err := spec.Gate.Enter(spec.Seat)
	var left time.Duration
	if err == nil {
		spec.Epoch = epoch
		left, err = leave()
	}
	if err != nil {
		s.answer(m, spec, Reply{}, fail(CodeNotHolder, "%s on %s: %v", spec.label(), s.bus.cfg.NodeName, err))
		return
	}
	s.answer(m, spec, Reply{Left: left}, nil)
}

// lost tells when a mesh seat went elsewhere while its handler ran.
func (s *service) lost(spec Service) error {
	if _, leaving := s.state(); leaving && spec.Scope == ScopeMesh {
		return fmt.Errorf("the log names %v", s.bus.view.Load().Directory.Seats[spec.Seat].Holder)
	}
	return nil
}

// invoke runs the handler and makes its failure one that says no more than the handler can know.
func (s *service) invoke(ctx context.Context, h Handler, c Call) (data []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.bus.cfg.Log.Error("handler panicked", "target", c.Target.String(), "panic", p, "stack", string(debug.Stack()))
			data, err = nil, fail(CodeFailed, "handler of %s panicked; the log of node %s has the stack", c.Target, c.Node)
		}
	}()
	data, err = h(ctx, c)
	var ce *CallError
	switch {
	case err == nil && len(data) > maxPayload:
		return nil, fail(CodeTooLarge, "reply of %d bytes is over the limit of %d; it did run", len(data), maxPayload)
	case err == nil:
		return data, nil
	case errors.Is(err, context.DeadlineExceeded):
		return nil, fail(CodeTimedOut, "%v; it may have run", err)
	case errors.As(err, &ce) && ce.Code != CodeNotHolder && ce.Code != CodeUnreachable:
		return nil, ce
	default:
		return nil, fail(CodeFailed, "the handler of %s failed: %v", c.Target, err)
	}
}

// answer sends what became of a request.
func (s *service) answer(m request, spec Service, r Reply, err error) {
	r.Seat, r.Epoch, r.Node = spec.Seat, spec.Epoch, s.bus.cfg.NodeName
	m.reply(outcome{Reply: r, err: err})
}

// answerLeft says who holds what has left this node.
func (s *service) answerLeft(m request, spec Service) {
	node := s.bus.cfg.NodeName
	if spec.Scope != ScopeMesh {
		s.answer(m, spec, Reply{}, fail(CodeNotServed, "node %s does not serve %s any more", node, spec.label()))
		return
	}
	now := s.bus.view.Load().Directory.Seats[spec.Seat].Holder
	m.reply(outcome{
		Reply: Reply{Seat: spec.Seat, Epoch: spec.Epoch, Node: node}, moved: now,
		err: fail(CodeNotHolder, "node %s is not the holder of %s; %v is", node, spec.Seat, now),
	})
}
