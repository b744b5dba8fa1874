package provisiontest

import (
	"errors"
	"maps"
	"net"
	"slices"
	"sync"
	"testing"
)

// Proxy is a Faults for a service that is reached over TCP. A step is what a
// client sends in one write.
type Proxy struct {
	listener net.Listener
	target   string

	mu      sync.Mutex
	conns   map[net.Conn]struct{}
	left    int           // steps before the cut; negative without one
	stalled chan struct{} // closed by Heal; nil while nothing is stalled
	closed  bool
	running sync.WaitGroup
}

// NewProxy forwards a free port of 127.0.0.1 to target, which is host:port,
// until the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: l, target: target, conns: map[net.Conn]struct{}{}, left: -1}
	p.running.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// Host is 127.0.0.1.
func (p *Proxy) Host() string { return p.listener.Addr().(*net.TCPAddr).IP.String() }

// Port is where clients connect.
func (p *Proxy) Port() int { return p.listener.Addr().(*net.TCPAddr).Port }

// Cut forwards after more steps. The last of them still reaches the service,
// whose answer does not come back.
func (p *Proxy) Cut(after int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left = after
	if after == 0 {
		closeAll(p.all())
	}
}

// Stall holds back everything in both directions.
func (p *Proxy) Stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stalled == nil {
		p.stalled = make(chan struct{})
	}
}

// Heal forwards what was held back, and takes connections again.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left = -1
	p.goOn()
}

func (p *Proxy) goOn() {
	if p.stalled != nil {
		close(p.stalled)
		p.stalled = nil
	}
}

// all returns the connections that there are; p.mu is held.
func (p *Proxy) all() []net.Conn { return slices.Collect(maps.Keys(p.conns)) }

func closeAll(conns []net.Conn) {
	for _, c := range conns {
		_ = c.Close() // its pump ends with an error of its own
	}
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.goOn()
	closeAll(p.all())
	_ = p.listener.Close()
	p.mu.Unlock()
	p.running.Wait()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // the client has gone
		}
		p.running.Go(func() { p.serve(client) })
	}
}

// serve is one connection.
func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	if !p.add(client) {
		return
	}
	defer p.remove(client)
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	if !p.add(server) {
		return
	}
	defer p.remove(server)
	var back sync.WaitGroup
	back.Go(func() {
		p.pump(client, server, func() (bool, []net.Conn) { return true, nil })
		_ = client.Close()
	})
	p.pump(server, client, p.step)
	_ = server.Close()
	back.Wait()
}

// pump copies until one side ends. step says of each chunk whether to pass it
// on, and which connections end after it.
func (p *Proxy) pump(to, from net.Conn, step func() (pass bool, end []net.Conn)) {
	chunk := make([]byte, 64<<10)
	for {
		n, err := from.Read(chunk)
		if n > 0 {
			p.hold()
			pass, end := step()
			if !pass {
				return
			}
			_, err := to.Write(chunk[:n])
			closeAll(end)
			if err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// step counts one step of a client. The last one ends the connections of this
// moment, not those that come after Heal.
func (p *Proxy) step() (pass bool, end []net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left > 0 {
		p.left--
		if p.left == 0 {
			end = p.all()
		}
		return true, end
	}
	return p.left < 0, nil
}

// hold waits while the proxy is stalled.
func (p *Proxy) hold() {
	p.mu.Lock()
	stalled := p.stalled
	p.mu.Unlock()
	if stalled != nil {
		<-stalled
	}
}

func (p *Proxy) add(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.left == 0 {
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *Proxy) remove(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}
