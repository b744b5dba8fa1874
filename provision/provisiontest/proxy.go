package provisiontest

import (
	"errors"
	"net"
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
		p.endAll()
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

func (p *Proxy) endAll() {
	for c := range p.conns {
		_ = c.Close() // its pump ends with an error of its own
	}
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.goOn()
	p.endAll()
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
		p.pump(client, server, func() (bool, bool) { return true, false })
		_ = client.Close()
	})
	p.pump(server, client, p.step)
	_ = server.Close()
	back.Wait()
}

// pump copies until one side ends. step says of each chunk whether to pass it on
// and whether everything ends after it.
func (p *Proxy) pump(to, from net.Conn, step func() (pass, last bool)) {
	chunk := make([]byte, 64<<10)
	for {
		n, err := from.Read(chunk)
		if n > 0 {
			p.hold()
			pass, last := step()
			if !pass {
				return
			}
			if _, err := to.Write(chunk[:n]); err != nil {
				return
			}
			if last {
				p.mu.Lock()
				p.endAll()
				p.mu.Unlock()
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// step counts one step of a client.
func (p *Proxy) step() (pass, last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left > 0 {
		p.left--
		return true, p.left == 0
	}
	return p.left < 0, false
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
