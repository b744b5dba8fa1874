package network

import (
	"fmt"
	"net"
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
