package network

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/time/rate"
)

const (
	// keepAlive finds a peer that vanished without a word on an idle stream: 5 s idle, then three
	// probes a second apart.
	keepAlive = 5 * time.Second
	// userTimeout is how long sent bytes may stay unacknowledged before the kernel ends a stream.
	// Above two retransmissions on a lossy link, below the 5 s within which a write must have failed.
	userTimeout = 3 * time.Second
	// dialTimeout bounds Dial for a caller whose context has no deadline.
	dialTimeout = 5 * time.Second
	// udpBuffer is asked of the kernel for received packets: a burst of gossip from a whole mesh.
	udpBuffer = 2 << 20
)

// Config says how a Port listens and how it proves identities. Identity itself is the caller's.
type Config struct {
	Bind      string // ip:port of TCP and UDP; port 0 takes a free one
	Advertise string // ip or ip:port that peers are told; empty for the bound address

	// Server is used for every inbound stream, with NextProtos set by the Port. It must verify client
	// certificates where they are given. It may ask for one always, except of a client that offers Join.
	Server *tls.Config
	// Client makes the configuration for one outbound stream. It is cloned; NextProtos is set by the Port.
	Client func(node, proto string) *tls.Config
	// PeerNode names the node that a verified peer is. Empty, or an error, refuses every protocol but Join.
	PeerNode func(tls.ConnectionState) (string, error)
	// Resolver gives the newest known host:port of a node.
	Resolver func(node string) (addr string, ok bool)

	Limits Limits
	Log    *slog.Logger
}

func (c Config) validate() error {
	faults := []error{c.Limits.validate()}
	if c.Server == nil || c.Client == nil || c.PeerNode == nil || c.Resolver == nil || c.Log == nil {
		faults = append(faults, errors.New("server, client, peer node, resolver and log must all be set"))
	}
	if _, err := netip.ParseAddrPort(c.Bind); err != nil {
		faults = append(faults, fmt.Errorf("bind address %q: must be ip:port: %w", c.Bind, err))
	}
	return errors.Join(faults...)
}

// Port is the mesh port of a real node. It owns its goroutines; Close ends them.
//
// TLS handshakes run in a goroutine of each connection, never in the accept loop, so that a peer
// that stalls holds up nobody else. A client offers exactly one protocol.
type Port struct {
	cfg       Config
	tcp       *net.TCPListener
	udp       *net.UDPConn
	advertise netip.AddrPort
	server    *tls.Config
	lobby     *lobby
	joins     *rate.Limiter

	ctx    context.Context // ends handshakes
	cancel context.CancelFunc
	wg     sync.WaitGroup

	desk    desk                            // its lock guards streams
	streams map[string]map[*stream]struct{} // by node; "" for those without an identity
}

var _ Network = (*Port)(nil)

// OpenPort binds the port and serves it.
func OpenPort(cfg Config) (*Port, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("open mesh port: %w", err)
	}
	tcp, udp, err := bind(netip.MustParseAddrPort(cfg.Bind))
	if err != nil {
		return nil, fmt.Errorf("open mesh port: %w", err)
	}
	advertise, err := advertised(cfg.Advertise, tcp.Addr().(*net.TCPAddr).AddrPort())
	if err != nil {
		tcp.Close()
		udp.Close()
		return nil, fmt.Errorf("open mesh port: %w", err)
	}
	p := &Port{
		cfg:       cfg,
		tcp:       tcp,
		udp:       udp,
		advertise: advertise,
		lobby:     newLobby(cfg.Limits),
		joins:     rate.NewLimiter(cfg.Limits.JoinRate, cfg.Limits.JoinBurst),
		desk:      desk{listeners: map[string]*listener{}},
		streams:   map[string]map[*stream]struct{}{},
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.server = cfg.Server.Clone()
	p.server.GetConfigForClient = p.configFor
	p.wg.Go(p.accept)
	return p, nil
}

// bind opens TCP and UDP on one number. With port 0 the number that TCP got may be taken for UDP.
func bind(at netip.AddrPort) (*net.TCPListener, *net.UDPConn, error) {
	const tries = 10 // a clash is rare: ten in a row mean something else is wrong
	var last error
	for range tries {
		tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if err != nil {
			return nil, nil, err
		}
		same := netip.AddrPortFrom(at.Addr(), tcp.Addr().(*net.TCPAddr).AddrPort().Port())
		udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(same))
		if err == nil {
			// Best effort: the kernel caps it, and gossip survives lost packets.
			_ = udp.SetReadBuffer(udpBuffer)
			return tcp, udp, nil
		}
		tcp.Close()
		last = err
		if at.Port() != 0 {
			break
		}
	}
	return nil, nil, last
}

func advertised(want string, bound netip.AddrPort) (netip.AddrPort, error) {
	if want == "" {
		if bound.Addr().IsUnspecified() {
			return netip.AddrPort{}, fmt.Errorf("bound to every address (%s): say which one to advertise to the other nodes", bound)
		}
		return netip.AddrPortFrom(bound.Addr().Unmap(), bound.Port()), nil
	}
	if ip, err := netip.ParseAddr(want); err == nil {
		return netip.AddrPortFrom(ip, bound.Port()), nil
	}
	addr, err := netip.ParseAddrPort(want)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("advertised address %q: must be ip or ip:port: %w", want, err)
	}
	return addr, nil
}

// Addr is the address that other nodes are told.
func (p *Port) Addr() netip.AddrPort { return p.advertise }

// Listen takes the streams of a protocol; see Network.
func (p *Port) Listen(proto string) (net.Listener, error) { return p.desk.listen(proto, p.tcp.Addr()) }

// accept never waits for a peer: a connection over the limits is closed, any other gets a goroutine.
func (p *Port) accept() {
	const shortest, longest = 5 * time.Millisecond, time.Second // out of descriptors: wait for some to be closed
	pause := shortest
	for {
		raw, err := p.tcp.AcceptTCP()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			p.cfg.Log.Warn("accept on the mesh port failed", "err", err, "retry", pause)
			select {
			case <-p.ctx.Done():
				return
			case <-time.After(pause):
			}
			pause = min(2*pause, longest)
			continue
		}
		pause = shortest
		from := raw.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		leave, ok := p.lobby.enter(from)
		if !ok {
			p.cfg.Log.Debug("connection refused: too many unproven ones", "from", from)
			raw.Close()
			continue
		}
		p.wg.Go(func() {
			if err := p.serve(raw, leave); err != nil {
				p.cfg.Log.Debug("connection refused", "from", from, "err", err)
			}
		})
	}
}

// serve proves who is there and hands the stream to whoever listens for its protocol.
func (p *Port) serve(raw *net.TCPConn, leave func()) (err error) {
	defer func() {
		if err != nil {
			leave()
			raw.Close()
		}
	}()
	if err := tune(raw); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.ctx, p.cfg.Limits.Handshake)
	defer cancel()
	tc := tls.Server(raw, p.server)
	if err := tc.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	state := tc.ConnectionState()
	proto := state.NegotiatedProtocol
	node, err := p.cfg.PeerNode(state)
	if err != nil {
		return fmt.Errorf("identify %s peer: %w", proto, err)
	}
	if node == "" && proto != Join {
		return fmt.Errorf("open %s stream: the peer has no certificate; only %s works without one", proto, Join)
	}
	l := p.desk.listener(proto)
	if l == nil {
		return fmt.Errorf("open %s stream: nobody listens for it", proto)
	}
	s, err := p.track(tc, node, p.cfg.Limits.PerNode)
	if err != nil {
		return fmt.Errorf("open %s stream: %w", proto, err)
	}
	if proto == Join {
		s.leave = leave // keeps its place among the unproven until it is closed: no member needs it
	} else {
		leave()
	}
	if !l.deliver(s, p.cfg.Limits.Handshake) {
		s.Close()
		return fmt.Errorf("open %s stream: nobody accepts it", proto)
	}
	return nil
}

// configFor refuses what needs no signature to be refused, and pins the protocol.
func (p *Port) configFor(hello *tls.ClientHelloInfo) (*tls.Config, error) {
	if len(hello.SupportedProtos) != 1 {
		return nil, fmt.Errorf("a client must offer exactly one protocol, not %d", len(hello.SupportedProtos))
	}
	proto := hello.SupportedProtos[0]
	if p.desk.listener(proto) == nil {
		return nil, fmt.Errorf("protocol %q: nobody listens for it", proto)
	}
	if proto == Join && !p.joins.Allow() {
		return nil, errors.New("too many joins: try again in some seconds")
	}
	cfg := p.cfg.Server
	if cfg.GetConfigForClient != nil {
		own, err := cfg.GetConfigForClient(hello)
		if err != nil {
			return nil, err
		}
		if own != nil {
			cfg = own
		}
	}
	return pinned(cfg, proto), nil
}

func pinned(cfg *tls.Config, proto string) *tls.Config {
	c := cfg.Clone()
	c.GetConfigForClient = nil
	c.NextProtos = []string{proto}
	c.MinVersion = tls.VersionTLS13
	return c
}

func tune(raw *net.TCPConn) error {
	if err := raw.SetNoDelay(true); err != nil {
		return err
	}
	err := raw.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepAlive, Interval: time.Second, Count: 3})
	if err != nil {
		return err
	}
	var rc syscall.RawConn
	if rc, err = raw.SyscallConn(); err != nil {
		return err
	}
	return setUserTimeout(rc, userTimeout)
}

// Dial opens a stream to a node; see Network.
func (p *Port) Dial(ctx context.Context, node, proto string) (net.Conn, error) {
	s, err := p.dial(ctx, node, proto)
	if err != nil {
		return nil, fmt.Errorf("dial %s of node %s: %w", proto, node, err)
	}
	return s, nil
}

func (p *Port) dial(ctx context.Context, node, proto string) (*stream, error) {
	addr, ok := p.cfg.Resolver(node)
	if !ok {
		return nil, errors.New("no address of the node is known")
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)() // Close ends a dial
	var d net.Dialer
	raw, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	tc := tls.Client(raw, pinned(p.cfg.Client(node, proto), proto))
	s, err := p.prove(ctx, tc, raw.(*net.TCPConn), node, proto)
	if err != nil {
		raw.Close()
		return nil, err
	}
	return s, nil
}

func (p *Port) prove(ctx context.Context, tc *tls.Conn, raw *net.TCPConn, node, proto string) (*stream, error) {
	if err := tune(raw); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Limits.Handshake)
	defer cancel()
	if err := tc.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("handshake with %s: %w", raw.RemoteAddr(), err)
	}
	state := tc.ConnectionState()
	if state.NegotiatedProtocol != proto {
		return nil, fmt.Errorf("%s does not speak %s", raw.RemoteAddr(), proto)
	}
	who, err := p.cfg.PeerNode(state)
	if err != nil {
		return nil, fmt.Errorf("identify %s: %w", raw.RemoteAddr(), err)
	}
	if who != node {
		return nil, fmt.Errorf("%s is node %q", raw.RemoteAddr(), who)
	}
	return p.track(tc, node, 0)
}

// track remembers an open stream, so that Expel and Close find it. most bounds the open streams of
// its node; 0 is no bound, for the streams that this side opened.
func (p *Port) track(tc *tls.Conn, node string, most int) (*stream, error) {
	p.desk.mu.Lock()
	defer p.desk.mu.Unlock()
	if p.desk.closed {
		return nil, ErrClosed
	}
	if most > 0 && node != "" && len(p.streams[node]) >= most {
		return nil, fmt.Errorf("node %s has %d streams open, the most there may be", node, most)
	}
	s := &stream{Conn: tc, node: node}
	s.untrack = func() {
		p.desk.mu.Lock()
		defer p.desk.mu.Unlock()
		if delete(p.streams[node], s); len(p.streams[node]) == 0 {
			delete(p.streams, node)
		}
	}
	if p.streams[node] == nil {
		p.streams[node] = map[*stream]struct{}{}
	}
	p.streams[node][s] = struct{}{}
	return s, nil
}

// Expel ends every open stream from and to a node at once. That it gets no new one is for the
// identity checks of Server, Client and PeerNode.
func (p *Port) Expel(node string) {
	for _, s := range p.open(node) {
		s.cut()
	}
}

// open lists the streams of some nodes, or of all.
func (p *Port) open(nodes ...string) []*stream {
	p.desk.mu.Lock()
	defer p.desk.mu.Unlock()
	var all []*stream
	for node, streams := range p.streams {
		if len(nodes) > 0 && !slices.Contains(nodes, node) {
			continue
		}
		for s := range streams {
			all = append(all, s)
		}
	}
	return all
}

// Close ends everything of the port; see Network.
func (p *Port) Close() error {
	ls, first := p.desk.close()
	if !first {
		return nil
	}
	p.cancel()
	err := errors.Join(p.tcp.Close(), ignoreClosed(p.udp.Close()))
	for _, l := range ls {
		l.Close()
	}
	for _, s := range p.open() {
		s.cut()
	}
	p.wg.Wait()
	return err
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// stream is one proven connection.
type stream struct {
	*tls.Conn
	node    string
	untrack func()
	leave   func() // its place in the lobby, if it still has one
	once    sync.Once
}

// PeerNode is what PeerOf reads.
func (s *stream) PeerNode() string { return s.node }

func (s *stream) gone() {
	s.once.Do(func() {
		s.untrack()
		if s.leave != nil {
			s.leave()
		}
	})
}

// Close says goodbye to the peer and ends the stream.
func (s *stream) Close() error {
	s.gone()
	return s.Conn.Close()
}

// cut ends the stream without a goodbye, which could wait for the peer.
func (s *stream) cut() {
	s.gone()
	s.NetConn().Close()
}

// Packets takes the UDP side; see Network. Closing it closes UDP for good.
func (p *Port) Packets() (Packets, error) {
	if err := p.desk.take(); err != nil {
		return nil, err
	}
	return datagrams{p}, nil
}

type datagrams struct{ p *Port }

func (d datagrams) Send(b []byte, to netip.AddrPort) error {
	_, err := d.p.udp.WriteToUDPAddrPort(b, to)
	return err
}

func (d datagrams) Receive(b []byte) (int, netip.AddrPort, error) {
	n, from, err := d.p.udp.ReadFromUDPAddrPort(b)
	return n, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), err
}

func (d datagrams) Addr() netip.AddrPort { return d.p.advertise }

func (d datagrams) Close() error { return ignoreClosed(d.p.udp.Close()) }
