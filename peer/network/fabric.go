package network

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Fabric is a mesh's network in memory. It does no I/O and reads no clock but time's, so in a
// testing/synctest bubble everything on it runs in virtual time. A fault acts on what is sent after
// it: a cut link swallows packets and stream bytes and answers no dial; what it swallowed of a
// stream is not sent again, so that stream ends some seconds later as a real one would.
type Fabric struct {
	mu     sync.Mutex
	healed chan struct{} // closed and replaced when links or nodes change
	links  map[link]fault
	addrs  map[string]netip.AddrPort // by node, kept over a restart
	nodes  map[netip.AddrPort]*port  // those that run
	paused map[string]chan struct{}  // closed when the node goes on
}

// link is one direction between two nodes.
type link struct{ from, to string }

type fault struct {
	cut   bool
	shut  bool // the end that sends takes nothing of the other but joins
	delay time.Duration
}

// NewFabric returns a network without nodes or faults.
func NewFabric() *Fabric {
	return &Fabric{
		healed: make(chan struct{}),
		links:  map[link]fault{},
		addrs:  map[string]netip.AddrPort{},
		nodes:  map[netip.AddrPort]*port{},
		paused: map[string]chan struct{}{},
	}
}

// change edits the fabric and wakes the dials that wait for a link.
func (f *Fabric) change(edit func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	edit()
	close(f.healed)
	f.healed = make(chan struct{})
}

// Join starts a node, or starts it again after Kill or Close at the address it had. It panics when
// the node runs: two processes cannot have one port.
func (f *Fabric) Join(node string) Network {
	var n *port
	f.change(func() {
		addr, ok := f.addrs[node]
		if !ok {
			last := len(f.addrs) + 1
			addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(last >> 8), byte(last)}), 7946)
			f.addrs[node] = addr
		}
		if f.nodes[addr] != nil {
			panic(fmt.Sprintf("node %s has joined the fabric already", node))
		}
		n = &port{
			fabric:  f,
			node:    node,
			addr:    addr,
			done:    make(chan struct{}),
			desk:    desk{listeners: map[string]*listener{}},
			ends:    map[*pipeEnd]struct{}{},
			packets: make(chan packet, 1024), // a socket's buffer; more are dropped
		}
		f.nodes[addr] = n
	})
	return n
}

// Addr is the address of a node that has joined, running or not.
func (f *Fabric) Addr(node string) (netip.AddrPort, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	a, ok := f.addrs[node]
	return a, ok
}

// Cut black-holes the link between two nodes, both ways.
func (f *Fabric) Cut(a, b string) {
	f.fault(func(x *fault) { x.cut = true }, link{a, b}, link{b, a})
}

// CutOneWay black-holes what one node sends to another.
func (f *Fabric) CutOneWay(from, to string) {
	f.fault(func(x *fault) { x.cut = true }, link{from, to})
}

// Isolate cuts a node from every other that has joined.
func (f *Fabric) Isolate(node string) {
	f.mu.Lock()
	others := slices.Collect(maps.Keys(f.addrs))
	f.mu.Unlock()
	for _, o := range others {
		if o != node {
			f.Cut(node, o)
		}
	}
}

// Slow delays what two nodes send each other.
func (f *Fabric) Slow(a, b string, delay time.Duration) {
	f.fault(func(x *fault) { x.delay = delay }, link{a, b}, link{b, a})
}

func (f *Fabric) fault(set func(*fault), ls ...link) {
	f.change(func() {
		for _, l := range ls {
			x := f.links[l]
			set(&x)
			f.links[l] = x
		}
	})
}

// Expel makes a node refuse another as Port does that was removed: what is open between them ends, and
// of what the other opens only the joins are taken. Heal does not end it.
func (f *Fabric) Expel(node, other string) {
	f.fault(func(x *fault) { x.shut = true }, link{node, other})
	f.mu.Lock()
	n := f.nodes[f.addrs[node]]
	f.mu.Unlock()
	if n == nil {
		return
	}
	n.desk.mu.Lock()
	ends := slices.Collect(maps.Keys(n.ends))
	n.desk.mu.Unlock()
	for _, p := range ends {
		if p.PeerNode() == other {
			p.Close() // what it sent arrives
		}
	}
}

// shut reports whether one of two nodes refuses the other. mu is held.
func (f *Fabric) shut(a, b string) bool { return f.links[link{a, b}].shut || f.links[link{b, a}].shut }

// Mend ends the cut and the delay of one link.
func (f *Fabric) Mend(a, b string) {
	f.fault(func(x *fault) { *x = fault{shut: x.shut} }, link{a, b}, link{b, a})
}

// Heal ends every cut and delay.
func (f *Fabric) Heal() {
	f.change(func() {
		for l, x := range f.links {
			f.links[l] = fault{shut: x.shut}
		}
	})
}

// Kill ends a node as kill -9 does: its streams are reset, its Network is closed. To lose power
// instead, so that nobody is told, isolate it first.
func (f *Fabric) Kill(node string) {
	f.mu.Lock()
	n := f.nodes[f.addrs[node]]
	f.mu.Unlock()
	if n != nil {
		n.stop((*pipeEnd).die)
	}
}

// Pause keeps a node from whatever it does on the network until Resume, as SIGSTOP does: what others
// send it waits, and what it sends is sent when it goes on.
func (f *Fabric) Pause(node string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.paused[node] == nil {
		f.paused[node] = make(chan struct{})
	}
}

// Resume ends a Pause.
func (f *Fabric) Resume(node string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resume(node)
}

// resume must be called with mu held.
func (f *Fabric) resume(node string) {
	if on := f.paused[node]; on != nil {
		close(on)
		delete(f.paused, node)
	}
}

// Halt returns when the node is not paused.
func (f *Fabric) Halt(node string) { f.stop(node).halt() }

func (f *Fabric) stop(node string) stop {
	return func() <-chan struct{} {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.paused[node]
	}
}

// Carry takes a message of something else than Dial and Packets from one node to another, with the
// faults that it meets, and reports whether it has arrived.
func (f *Fabric) Carry(from, to string) bool {
	f.Halt(from)
	cut, delay := f.road(from, to)()
	if cut {
		return false
	}
	time.Sleep(delay)
	f.Halt(to)
	return true
}

func (f *Fabric) road(from, to string) road {
	return func() (bool, time.Duration) {
		f.mu.Lock()
		defer f.mu.Unlock()
		x := f.links[link{from, to}]
		return x.cut, x.delay
	}
}

func (f *Fabric) lane(from, to string) lane {
	return lane{f.road(from, to), f.stop(from), f.stop(to)}
}

// port is a node's place on a Fabric.
type port struct {
	fabric *Fabric
	node   string
	addr   netip.AddrPort
	done   chan struct{}

	desk    desk // its lock guards ends
	ends    map[*pipeEnd]struct{}
	packets chan packet
}

type packet struct {
	b    []byte
	from netip.AddrPort
}

var _ Network = (*port)(nil)

func (n *port) Listen(proto string) (net.Listener, error) {
	return n.desk.listen(proto, net.TCPAddrFromAddrPort(n.addr))
}

func (n *port) Dial(ctx context.Context, node, proto string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	for {
		n.fabric.Halt(n.node)
		c, wait, err := n.connect(node, proto)
		n.fabric.Halt(n.node)
		if err != nil {
			return nil, fmt.Errorf("dial %s of node %s: %w", proto, node, err)
		}
		if c != nil {
			return c, nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, fmt.Errorf("dial %s of node %s: %w", proto, node, ctx.Err())
		case <-n.done:
			return nil, fmt.Errorf("dial %s of node %s: %w", proto, node, ErrClosed)
		}
	}
}

// connect opens a stream, or returns what to wait for when the link swallows the attempt.
func (n *port) connect(node, proto string) (net.Conn, <-chan struct{}, error) {
	f := n.fabric
	f.mu.Lock()
	addr, known := f.addrs[node]
	peer := f.nodes[addr]
	there, back, wait := f.links[link{n.node, node}], f.links[link{node, n.node}], f.healed
	shut := f.shut(n.node, node) && proto != Join
	f.mu.Unlock()
	switch {
	case !known:
		return nil, nil, errors.New("no address of the node is known")
	case there.cut || back.cut:
		return nil, wait, nil
	case peer == nil || shut:
		return nil, nil, syscall.ECONNREFUSED
	}
	if d := there.delay + back.delay; d > 0 {
		select {
		case <-time.After(d):
		case <-n.done:
			return nil, nil, ErrClosed
		}
	}
	l := peer.desk.listener(proto)
	if l == nil {
		return nil, nil, syscall.ECONNREFUSED
	}
	here, far := newPipe(n.node, node, net.TCPAddrFromAddrPort(n.addr), net.TCPAddrFromAddrPort(addr),
		f.lane(n.node, node), f.lane(node, n.node))
	here.forget, far.forget = func() { n.forget(here) }, func() { peer.forget(far) }
	if !n.remember(here) {
		return nil, nil, ErrClosed
	}
	if !peer.remember(far) || !l.deliver(far, time.Second) {
		here.Close()
		far.Close()
		return nil, nil, syscall.ECONNREFUSED
	}
	return here, nil, nil
}

func (n *port) remember(p *pipeEnd) bool {
	n.desk.mu.Lock()
	defer n.desk.mu.Unlock()
	if !n.desk.closed {
		n.ends[p] = struct{}{}
	}
	return !n.desk.closed
}

func (n *port) forget(p *pipeEnd) {
	n.desk.mu.Lock()
	defer n.desk.mu.Unlock()
	delete(n.ends, p)
}

// Close ends the node in good order: its peers read the end of each stream.
func (n *port) Close() error {
	n.stop(func(p *pipeEnd) { p.Close() })
	return nil
}

func (n *port) stop(end func(*pipeEnd)) {
	ls, first := n.desk.close()
	if !first {
		return
	}
	n.desk.mu.Lock()
	ps := slices.Collect(maps.Keys(n.ends)) // no more come: see remember
	n.desk.mu.Unlock()
	close(n.done)
	n.fabric.change(func() {
		delete(n.fabric.nodes, n.addr)
		n.fabric.resume(n.node)
	})
	for _, l := range ls {
		l.Close()
	}
	for _, p := range ps {
		end(p)
	}
}

func (n *port) Packets() (Packets, error) {
	if err := n.desk.take(); err != nil {
		return nil, err
	}
	return &mailbox{n: n, done: make(chan struct{})}, nil
}

// mailbox is the packet side of a node on a Fabric.
type mailbox struct {
	n    *port
	done chan struct{}
	once sync.Once
}

func (m *mailbox) Send(b []byte, to netip.AddrPort) error {
	select {
	case <-m.n.done:
		return ErrClosed
	case <-m.done:
		return net.ErrClosed
	default:
	}
	if len(b) > MaxPacket {
		return syscall.EMSGSIZE
	}
	f := m.n.fabric
	f.Halt(m.n.node)
	f.mu.Lock()
	peer := f.nodes[to]
	lost := peer == nil || f.shut(m.n.node, peer.node) // of a removed node: the key that it knows is no good
	f.mu.Unlock()
	if lost {
		return nil
	}
	cut, delay := f.road(m.n.node, peer.node)()
	if cut {
		return nil
	}
	p := packet{append([]byte(nil), b...), m.n.addr}
	if delay == 0 {
		peer.push(p)
		return nil
	}
	time.AfterFunc(delay, func() { peer.push(p) })
	return nil
}

func (n *port) push(p packet) {
	select {
	case n.packets <- p:
	default: // the buffer is full: lost
	}
}

func (m *mailbox) Receive(b []byte) (int, netip.AddrPort, error) {
	select {
	case p := <-m.n.packets:
		m.n.fabric.Halt(m.n.node)
		return copy(b, p.b), p.from, nil
	case <-m.n.done:
		return 0, netip.AddrPort{}, ErrClosed
	case <-m.done:
		return 0, netip.AddrPort{}, net.ErrClosed
	}
}

func (m *mailbox) Addr() netip.AddrPort { return m.n.addr }

func (m *mailbox) Close() error {
	m.once.Do(func() { close(m.done) })
	return nil
}
