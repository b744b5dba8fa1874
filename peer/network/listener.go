package network

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"
)

// backlog is how many streams of one protocol may wait for Accept. More than raft, gossip and the
// API of a twenty-node mesh open at once when a node comes back.
const backlog = 64

// listener hands out the streams of one protocol.
type listener struct {
	proto string
	addr  net.Addr
	queue chan net.Conn
	done  chan struct{}
	once  sync.Once
	leave func(*listener)
}

func newListener(proto string, addr net.Addr, leave func(*listener)) *listener {
	return &listener{
		proto: proto,
		addr:  addr,
		queue: make(chan net.Conn, backlog),
		done:  make(chan struct{}),
		leave: leave,
	}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.done:
		return nil, fmt.Errorf("accept %s: %w", l.proto, net.ErrClosed)
	default:
	}
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.done:
		return nil, fmt.Errorf("accept %s: %w", l.proto, net.ErrClosed)
	}
}

// Close ends Accept and the streams that nobody accepted.
func (l *listener) Close() error {
	l.once.Do(func() {
		l.leave(l)
		close(l.done)
		for {
			select {
			case c := <-l.queue:
				c.Close()
			default:
				return
			}
		}
	})
	return nil
}

func (l *listener) Addr() net.Addr { return l.addr }

// deliver queues a stream and reports whether it did: not after Close, and not when the queue stays
// full for the given time.
func (l *listener) deliver(c net.Conn, patience time.Duration) bool {
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case l.queue <- c:
	case <-l.done:
		return false
	case <-t.C:
		return false
	}
	select {
	case <-l.done: // Close may have drained the queue just before the stream came into it
		select {
		case late := <-l.queue:
			late.Close()
		default:
		}
	default:
	}
	return true
}

// desk is where the protocols of one node are listened for, each by one listener, and its packets
// are taken. Its lock guards what the owner adds beside it.
type desk struct {
	mu        sync.Mutex
	closed    bool
	taken     bool // the packets
	listeners map[string]*listener
}

// listen opens the listener of a protocol at that address.
func (d *desk) listen(proto string, addr net.Addr) (net.Listener, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("listen for %s: %w", proto, ErrClosed)
	}
	if d.listeners[proto] != nil {
		return nil, fmt.Errorf("listen for %s: somebody listens already", proto)
	}
	l := newListener(proto, addr, d.unlisten)
	d.listeners[proto] = l
	return l, nil
}

func (d *desk) unlisten(l *listener) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listeners[l.proto] == l {
		delete(d.listeners, l.proto)
	}
}

// listener is the one of a protocol, or nil.
func (d *desk) listener(proto string) *listener {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.listeners[proto]
}

// take gives the packets to one taker, once.
func (d *desk) take() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return fmt.Errorf("take packets: %w", ErrClosed)
	}
	if d.taken {
		return errors.New("take packets: somebody has them already")
	}
	d.taken = true
	return nil
}

// close marks the desk as closed, and returns the listeners that its owner closes. It is first only
// once.
func (d *desk) close() (open []*listener, first bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	first, d.closed = !d.closed, true
	return slices.Collect(maps.Values(d.listeners)), first
}
