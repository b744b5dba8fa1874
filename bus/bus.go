// Package bus is one machine's part of the mesh's message bus: a NATS server in this process, what its
// modules may say on it, what this node answers, and calls to what others answer.
//
// # Contract
//
// Apply takes the whole desired state and makes it true; nothing else changes what the bus does. Call
// asks for a verb of a seat or a tool, wherever it is. A module uses any NATS client, connects with its
// key to ClientURL, with Inbox as its inbox prefix, publishes requests to Target.CallSubject, and serves
// what it has below Private. There is no library of ours in it.
//
//	module                  its own meshd                    the answering meshd             module
//	  | call.<n>.<a>.seat...  |                                 |                               |
//	  |---------------------->| who, may it, where, epoch       |                               |
//	  |        (MOD)          | node.<holder>.seat.<s>.<verb>   |                               |
//	  |                       |-------------------------------->| held here? verb? gate         |
//	  |                       |        (MESH)                   | m.<n>.<a>.seat.<s>.<verb>     |
//	  |                       |                                 |------------------------------>|
//	  |                       |                                 |        (MOD)     r.<n>.<a>.*  |
//	  |                       |                                 |<------------------------------|
//	  |   _I.<n>.<a>.*        | epoch not older? node?          | gate again                    |
//	  |<----------------------|<--------------------------------|                               |
//
// # Invariants
//
//   - Account MESH is meshd's alone: its keys live in this process and work only inside it. So no module
//     can answer a seat, whatever it claims, holds or once held.
//   - A call of a mesh seat is addressed to the one node that the log names. Nobody else receives it, so
//     it cannot run twice, and "not the holder" from that node means that it has not run.
//   - What a module may publish and subscribe is wire(Layout), a pure function. Each allow list is exact
//     and none is empty. A refused subject costs the module that subject, never its connection.
//   - A reply goes to the caller's own inbox or nowhere. A module answers its meshd on subjects that no
//     other module can publish to.
//   - A call is repeated only if its handler has certainly not run, or the verb is idempotent.
//   - What a node asks of itself takes no way through the server, and the same gate.
//
// # A service on this node
//
//	          Apply lists it                     Apply lists it no more
//	absent ----------------------> serving -------------------------------> leaving
//	   ^                              ^                                        |  |
//	   |                              |  Apply lists it again                  |  | 2 s
//	   |                              +----------------------------------------+  |
//	   +--------------------------------------------------------------------------+
//
// A closed service (Service.Closed) is bound and runs nothing either; it answers why. A leaving service
// runs nothing; it answers who holds the seat now, because for a second or two other
// nodes still send it calls, and silence would leave these in doubt.
package bus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
)

// Bus is a running bus. Its methods may be used from any goroutine.
type Bus struct {
	cfg     Config
	host    *host
	view    atomic.Pointer[view]
	seen    epochs
	forward *forwarder
	work    work
	relays  limiter
	flights flights

	bound atomic.Pointer[board] // those in services, for who does not apply

	applying sync.Mutex // serialises Apply and Close, and guards what follows
	wired    wiring
	services map[string]*service // by subject prefix
	closed   bool
}

// view is the layout as everything that reads it sees it. Changed is closed when another takes over.
type view struct {
	Layout
	changed chan struct{}
}

// Start starts the server, with no peers and no modules until the first Apply. It gives up when ctx
// ends, and else within some 10 s; afterwards ctx means nothing.
func Start(ctx context.Context, cfg Config) (*Bus, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	h, err := startHost(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("start bus: %w", err)
	}
	b := &Bus{cfg: cfg, host: h, services: map[string]*service{}}
	b.view.Store(&view{changed: make(chan struct{})})
	b.bound.Store(&board{})
	b.work.init()
	if b.forward, err = newForwarder(h.out, cfg.NodeName); err == nil {
		err = errors.Join(b.serveCalls(), b.serveAnnouncements(), b.serveSurvey())
	}
	if err != nil {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		return nil, errors.Join(fmt.Errorf("start bus: %w", err), h.close(ctx))
	}
	return b, nil
}

// ClientPort is the loopback port that modules connect to. Keep it and give it to the next Start, so
// that modules outlive a restart of meshd.
func (b *Bus) ClientPort() int { return b.host.clientPort }

// ClientURL is what a module's NATS client connects to.
func (b *Bus) ClientURL() string {
	return "nats://127.0.0.1:" + strconv.Itoa(b.host.clientPort)
}

// RouteAddr is the host:port on which this node listens for others.
func (b *Bus) RouteAddr() string {
	return net.JoinHostPort(b.host.routeHost, strconv.Itoa(b.host.routePort))
}

// Routes lists the ids of the nodes that this one has a route to now.
func (b *Bus) Routes() ([]string, error) { return b.host.peers() }

// Admits reports whether a key of the last layout that took effect may connect.
func (b *Bus) Admits(publicKey string) bool {
	b.applying.Lock()
	defer b.applying.Unlock()
	return slices.ContainsFunc(b.wired.users, func(u user) bool { return u.key == publicKey })
}

// Refusals lists what the bus keeps from who is connected, the newest first, at most 100.
func (b *Bus) Refusals() []Refusal {
	return b.host.log.list(func(client uint64) bool { return b.host.srv.GetClient(client) != nil })
}

// Apply makes l true: it stops answering what l does not list, then changes routes, keys and rights by
// one reload of the server if these differ, then answers what is new. It does nothing for what is
// already so. After an error, which leaves the rest of l in force, apply again. A reload costs about a
// millisecond: a caller whose state changes in bursts should let some milliseconds pass before it calls.
func (b *Bus) Apply(l Layout) error {
	if err := l.validate(b.cfg.NodeName); err != nil {
		return fmt.Errorf("apply layout: %w", err)
	}
	b.applying.Lock()
	defer b.applying.Unlock()
	if b.closed {
		return errors.New("apply layout: the bus is closed")
	}
	old := b.view.Load()
	b.view.Store(&view{Layout: l, changed: make(chan struct{})})
	b.seen.keep(l.Directory.Seats)
	b.flights.land(l.Directory)
	b.dismiss(l.Services)
	var faults []error
	if w := wire(b.cfg.NodeID, b.cfg.NodeName, l); !reflect.DeepEqual(w, b.wired) {
		if err := b.host.reload(w); err != nil {
			faults = append(faults, err)
		} else {
			b.wired = w
		}
	}
	faults = append(faults, b.serve(l.Services))
	close(old.changed)
	if err := errors.Join(faults...); err != nil {
		return fmt.Errorf("apply layout: %w", err)
	}
	return nil
}

// Close stops answering, waits for the handlers that run, and stops the server. When ctx ends before
// that, it cancels the handlers and cuts whoever is still connected; how many calls then still ran is
// in the error. The caller closes its gates and gives up its leases first.
func (b *Bus) Close(ctx context.Context) error {
	b.applying.Lock()
	defer b.applying.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	errs := []error{b.work.stop(ctx)}
	for _, s := range b.services {
		s.stopTimer()
	}
	errs = append(errs, b.host.close(ctx))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close bus: %w", err)
	}
	return nil
}

// work counts the calls that run on this node, so that Close can wait for them.
type work struct {
	ctx    context.Context // of every handler
	cancel context.CancelFunc
	quit   chan struct{} // closed when nothing new may begin

	mu      sync.Mutex
	running int
	stopped chan struct{} // not nil after quit; closed when nothing runs
}

func (w *work) init() {
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.quit = make(chan struct{})
}

// begin says whether a call may still begin; if so, end must follow.
func (w *work) begin() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped != nil {
		return false
	}
	w.running++
	return true
}

func (w *work) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running--
	if w.running == 0 && w.stopped != nil {
		close(w.stopped)
	}
}

// stop refuses new calls and waits for those that run.
func (w *work) stop(ctx context.Context) error {
	defer w.cancel()
	close(w.quit)
	w.mu.Lock()
	w.stopped = make(chan struct{})
	if w.running == 0 {
		close(w.stopped)
	}
	stopped := w.stopped
	w.mu.Unlock()
	select {
	case <-stopped:
		return nil
	case <-ctx.Done():
		w.mu.Lock()
		defer w.mu.Unlock()
		return fmt.Errorf("wait for %d running calls: %w", w.running, ctx.Err())
	}
}

// limiter bounds what one name does at once.
type limiter struct {
	mu      sync.Mutex
	running map[string]int
}

func (l *limiter) enter(name string, most int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running == nil {
		l.running = map[string]int{}
	}
	if l.running[name] >= most {
		return false
	}
	l.running[name]++
	return true
}

func (l *limiter) leave(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running[name]--; l.running[name] <= 0 {
		delete(l.running, name)
	}
}
