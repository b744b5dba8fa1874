package network

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	// window is how many bytes of a stream of a Fabric may be on the way: a socket's two buffers.
	window = 256 << 10
	// lossEnds is how long after it lost something a stream of a Fabric ends at both sides, as
	// userTimeout and keep-alive end a real one.
	lossEnds = userTimeout
)

// road says how a packet that is sent now fares: whether it arrives, and after how long.
type road func() (cut bool, delay time.Duration)

// stop is nil while the process at one end runs, and else closed when it goes on.
type stop func() <-chan struct{}

// halt returns when the process runs, and whether it was stopped.
func (s stop) halt() (was bool) {
	for on := s(); on != nil; on = s() {
		<-on
		was = true
	}
	return was
}

// lane is what a Fabric says of one direction between two nodes.
type lane struct {
	road
	writer, reader stop
}

// half is one direction of a stream in memory: a queue of pieces, each with the time it arrives.
//
//	open -> finished   the writer closed; the reader gets the rest, then EOF
//	open -> lossy      something was written, or the end announced, on a cut link: from then on
//	                   nothing arrives, for a stream has no holes
//	any  -> broken     err is set: both sides fail with it at once
type half struct {
	lane
	lose func() // called once, when the first bytes are lost

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced when anything below changes
	pieces   []piece
	size     int
	finished bool
	gone     bool // the reader closed
	lossy    bool
	err      error
	due      time.Time // when the newest piece, or the end, arrives
	readBy   time.Time
	writeBy  time.Time
}

type piece struct {
	at time.Time
	b  []byte
}

func newHalf(l lane) *half { return &half{lane: l, changed: make(chan struct{})} }

// poke must be called with mu held.
func (h *half) poke() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// wait gives up mu until something changes or the earliest of some times comes; it returns with mu held.
func (h *half) wait(until ...time.Time) {
	changed := h.changed
	var first time.Time
	for _, t := range until {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	h.mu.Unlock()
	defer h.mu.Lock()
	if first.IsZero() {
		<-changed
		return
	}
	t := time.NewTimer(time.Until(first))
	defer t.Stop()
	select {
	case <-changed:
	case <-t.C:
	}
}

func past(t time.Time) bool { return !t.IsZero() && !time.Now().Before(t) }

func (h *half) read(b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		// A reader that was stopped finds what has arrived, and that its time is over. Either may
		// come first in a real process: here it is what surprises more.
		h.mu.Unlock()
		woke := h.reader.halt()
		h.mu.Lock()
		late := woke && len(h.pieces) > 0 && past(h.pieces[0].at)
		switch {
		case h.gone:
			return 0, net.ErrClosed
		case h.err != nil:
			return 0, h.err
		case past(h.readBy) && !late:
			return 0, os.ErrDeadlineExceeded
		case len(b) == 0:
			return 0, nil
		case len(h.pieces) > 0 && past(h.pieces[0].at):
			p := &h.pieces[0]
			n := copy(b, p.b)
			if p.b = p.b[n:]; len(p.b) == 0 {
				h.pieces = h.pieces[1:]
			}
			h.size -= n
			h.poke()
			return n, nil
		case len(h.pieces) > 0:
			h.wait(h.readBy, h.pieces[0].at)
		case h.finished && !h.lossy && past(h.due):
			return 0, io.EOF
		case h.finished && !h.lossy:
			h.wait(h.readBy, h.due)
		default:
			h.wait(h.readBy)
		}
	}
}

func (h *half) write(b []byte) (int, error) {
	done := 0
	for {
		h.writer.halt()
		cut, delay := h.road()
		h.mu.Lock()
		switch {
		case h.finished:
			h.mu.Unlock()
			return done, net.ErrClosed
		case h.err != nil:
			err := h.err
			h.mu.Unlock()
			return done, err
		case past(h.writeBy):
			h.mu.Unlock()
			return done, os.ErrDeadlineExceeded
		case cut || h.lossy:
			first := !h.lossy
			h.lossy = true
			h.mu.Unlock()
			if first {
				h.lose()
			}
			return done + len(b), nil
		case h.gone:
			h.mu.Unlock()
			return done, syscall.EPIPE
		case len(b) == 0:
			h.mu.Unlock()
			return done, nil
		case h.size < window:
			n := min(len(b), window-h.size)
			h.arriveAfter(delay)
			h.pieces = append(h.pieces, piece{h.due, append([]byte(nil), b[:n]...)})
			h.size += n
			h.poke()
			done, b = done+n, b[n:]
		default:
			h.wait(h.writeBy)
		}
		h.mu.Unlock()
	}
}

// arriveAfter moves due on: pieces keep their order when a link gets faster.
func (h *half) arriveAfter(delay time.Duration) {
	if at := time.Now().Add(delay); at.After(h.due) {
		h.due = at
	}
}

// finish is the writer's Close.
func (h *half) finish() {
	cut, delay := h.road()
	h.mu.Lock()
	if h.finished || h.err != nil {
		h.mu.Unlock()
		return
	}
	h.finished = true
	h.arriveAfter(delay)
	first := cut && !h.lossy
	h.lossy = h.lossy || cut
	h.poke()
	h.mu.Unlock()
	if first {
		h.lose()
	}
}

// leave is the reader's Close.
func (h *half) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gone = true
	h.pieces, h.size = nil, 0
	h.poke()
}

// snap breaks the direction with an error.
func (h *half) snap(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil {
		h.err = err
		h.poke()
	}
}

func (h *half) setReadBy(t time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.readBy = t
	h.poke()
}

func (h *half) setWriteBy(t time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.writeBy = t
	h.poke()
}

// pipeEnd is one end of a stream of a Fabric.
type pipeEnd struct {
	node          string // at the other end
	local, remote net.Addr
	in, out       *half
	forget        func()
}

// newPipe makes a stream between two nodes, that a dialled from b.
func newPipe(a, b string, addrA, addrB net.Addr, ab, ba lane) (atA, atB *pipeEnd) {
	there, back := newHalf(ab), newHalf(ba)
	var once sync.Once
	lose := func() {
		once.Do(func() {
			time.AfterFunc(lossEnds, func() {
				there.snap(syscall.ETIMEDOUT)
				back.snap(syscall.ETIMEDOUT)
			})
		})
	}
	there.lose, back.lose = lose, lose
	atA = &pipeEnd{node: b, local: addrA, remote: addrB, in: back, out: there}
	atB = &pipeEnd{node: a, local: addrB, remote: addrA, in: there, out: back}
	return atA, atB
}

// PeerNode is what PeerOf reads.
func (p *pipeEnd) PeerNode() string { return p.node }

func (p *pipeEnd) Read(b []byte) (int, error)  { return p.in.read(b) }
func (p *pipeEnd) Write(b []byte) (int, error) { return p.out.write(b) }
func (p *pipeEnd) LocalAddr() net.Addr         { return p.local }
func (p *pipeEnd) RemoteAddr() net.Addr        { return p.remote }

func (p *pipeEnd) Close() error {
	p.forget()
	p.in.leave()
	p.out.finish()
	return nil
}

// die is what the kernel does to the streams of a process that was killed: the peer gets a reset,
// if it can be told.
func (p *pipeEnd) die() {
	p.forget()
	if cut, _ := p.out.road(); cut {
		p.in.leave()
		p.out.finish()
		return
	}
	p.in.snap(syscall.ECONNRESET)
	p.out.snap(syscall.ECONNRESET)
}

func (p *pipeEnd) SetDeadline(t time.Time) error {
	p.in.setReadBy(t)
	p.out.setWriteBy(t)
	return nil
}

func (p *pipeEnd) SetReadDeadline(t time.Time) error {
	p.in.setReadBy(t)
	return nil
}

func (p *pipeEnd) SetWriteDeadline(t time.Time) error {
	p.out.setWriteBy(t)
	return nil
}
