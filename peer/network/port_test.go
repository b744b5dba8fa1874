package network_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"meshd/peer/network"
	"meshd/peer/network/networktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// refused says how the peer ended a stream that Dial thought open: in TLS 1.3 a client is done
// before the server has judged it.
func refused(t *testing.T, c net.Conn, err error) {
	t.Helper()
	if err != nil {
		return
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(5 * time.Second))
	if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
		t.Fatalf("the stream is open: read %d bytes, error %v", n, err)
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func listen(t *testing.T, n network.Network, proto string) net.Listener {
	t.Helper()
	l, err := n.Listen(proto)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestPortStreamNamesBothEnds(t *testing.T) {
	mesh := networktest.NewMesh(t)
	a, b := mesh.Port("a"), mesh.Port("b")
	l := listen(t, b, network.Raft)

	c, err := a.Dial(within(t), "b", network.Raft)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if at, from := network.PeerOf(c), network.PeerOf(s); at != "b" || from != "a" {
		t.Fatalf("dialled %q, accepted from %q; want b and a", at, from)
	}
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(s, got); err != nil || string(got) != "hello" {
		t.Fatalf("got %q, %v", got, err)
	}
}

func TestPortRefusesTheWrongNodeAtAnAddress(t *testing.T) {
	mesh := networktest.NewMesh(t)
	a, b := mesh.Port("a"), mesh.Port("b")
	listen(t, b, network.Raft)
	addr, _ := mesh.Addr("b")
	mesh.Set("c", addr) // b took over the address that c had

	cfg := mesh.Config("a") // a client whose TLS check does not look at the name
	cfg.Client = func(_, _ string) *tls.Config {
		cert := mesh.Certificate("a")
		return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: mesh.Pool(), ServerName: "b"}
	}
	lax, err := network.OpenPort(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer lax.Close()
	for _, from := range []*network.Port{a, lax} {
		if c, err := from.Dial(within(t), "c", network.Raft); err == nil {
			c.Close()
			t.Fatal("a stream to c ended at b")
		}
	}
}

func TestPortRefusesStrangersExceptForJoin(t *testing.T) {
	mesh := networktest.NewMesh(t)
	p := mesh.Port("a")
	joins := listen(t, p, network.Join)
	for _, proto := range []string{network.Raft, network.Gossip, network.Peer} {
		listen(t, p, proto)
	}
	dial := func(cfg *tls.Config, protos ...string) (net.Conn, error) {
		cfg.NextProtos = protos
		cfg.RootCAs, cfg.ServerName = mesh.Pool(), "a"
		return tls.Dial("tcp", p.Addr().String(), cfg)
	}
	for _, proto := range []string{network.Raft, network.Gossip, network.Peer} {
		c, err := dial(&tls.Config{}, proto)
		refused(t, c, err)
		other := networktest.NewMesh(t)
		c, err = dial(&tls.Config{Certificates: []tls.Certificate{other.Certificate("b")}}, proto)
		refused(t, c, err)
	}
	for _, protos := range [][]string{nil, {"h2"}, {network.Join, network.Raft}} {
		c, err := dial(&tls.Config{}, protos...)
		refused(t, c, err)
	}
	c, err := dial(&tls.Config{}, network.Join)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := joins.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if who := network.PeerOf(s); who != "" {
		t.Fatalf("a joining peer is named %q", who)
	}
}

func TestPortRefusesAProtocolThatNobodyListensTo(t *testing.T) {
	mesh := networktest.NewMesh(t)
	a, b := mesh.Port("a"), mesh.Port("b")
	l := listen(t, b, network.Raft)
	l.Close()
	if c, err := a.Dial(within(t), "b", network.Raft); err == nil {
		c.Close()
		t.Fatal("the stream was opened")
	}
}

func TestPortLimitsUnprovenConnections(t *testing.T) {
	mesh := networktest.NewMesh(t)
	cfg := mesh.Config("a")
	cfg.Limits.PerSource, cfg.Limits.Handshake = 2, time.Minute
	p, err := network.OpenPort(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	listen(t, p, network.Raft)
	// Two connections that never speak take both places; a third is closed at once.
	var silent []net.Conn
	for range 3 {
		c, err := net.Dial("tcp", p.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		silent = append(silent, c)
	}
	silent[2].SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := silent[2].Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Fatalf("the third connection is open: %v", err)
	}
	silent[0].Close()
	mesh.Set("a", p.Addr().String())
	b := mesh.Port("b")
	for { // the place comes free when the server has seen the end
		c, err := b.Dial(within(t), "a", network.Raft)
		if err == nil {
			c.Close()
			return
		}
		if t.Context().Err() != nil {
			t.Fatal(err)
		}
	}
}

func TestPortGivesUpAStalledHandshake(t *testing.T) {
	mesh := networktest.NewMesh(t)
	cfg := mesh.Config("a")
	cfg.Limits.Handshake = 50 * time.Millisecond
	p, err := network.OpenPort(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	c, err := net.Dial("tcp", p.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Fatalf("the stalled connection is open: %v", err)
	}
}

func TestPortLimitsTheRateOfJoins(t *testing.T) {
	mesh := networktest.NewMesh(t)
	cfg := mesh.Config("a")
	cfg.Limits.JoinBurst, cfg.Limits.JoinRate = 2, 0.001
	p, err := network.OpenPort(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	listen(t, p, network.Join)
	opened := 0
	for range 4 {
		c, err := tls.Dial("tcp", p.Addr().String(), &tls.Config{
			RootCAs: mesh.Pool(), ServerName: "a", NextProtos: []string{network.Join}})
		if err == nil {
			opened++
			defer c.Close()
		}
	}
	if opened != 2 {
		t.Fatalf("%d joins were let in, want 2", opened)
	}
}

func TestPortExpelEndsBothDirections(t *testing.T) {
	mesh := networktest.NewMesh(t)
	a, b := mesh.Port("a"), mesh.Port("b")
	la, lb := listen(t, a, network.Peer), listen(t, b, network.Peer)
	out, err := a.Dial(within(t), "b", network.Peer)
	if err != nil {
		t.Fatal(err)
	}
	far, err := lb.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	back, err := b.Dial(within(t), "a", network.Peer)
	if err != nil {
		t.Fatal(err)
	}
	defer back.Close()
	in, err := la.Accept()
	if err != nil {
		t.Fatal(err)
	}
	a.Expel("b")
	for _, c := range []net.Conn{out, in, far, back} {
		c.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Fatalf("a stream with the expelled node is open: %v", err)
		}
	}
}

func TestPortCloseEndsStreamsAndListeners(t *testing.T) {
	mesh := networktest.NewMesh(t)
	a, b := mesh.Port("a"), mesh.Port("b")
	l := listen(t, b, network.Peer)
	c, err := a.Dial(within(t), "b", network.Peer)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("accept after close: %v", err)
	}
	c.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Fatalf("the stream is open: %v", err)
	}
	if _, err := b.Listen(network.Raft); !errors.Is(err, network.ErrClosed) {
		t.Fatalf("listen after close: %v", err)
	}
	if _, err := b.Dial(within(t), "a", network.Peer); err == nil {
		t.Fatal("dialled from a closed port")
	}
}

func TestPortPackets(t *testing.T) {
	mesh := networktest.NewMesh(t)
	pa, err := mesh.Port("a").Packets()
	if err != nil {
		t.Fatal(err)
	}
	b := mesh.Port("b")
	pb, err := b.Packets()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Packets(); err == nil {
		t.Fatal("the packets were taken twice")
	}
	if pb.Addr() != b.Addr() {
		t.Fatalf("packets advertise %v, the port %v", pb.Addr(), b.Addr())
	}
	if err := pa.Send([]byte("hello"), pb.Addr()); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, network.MaxPacket)
	n, from, err := pb.Receive(buf)
	if err != nil || string(buf[:n]) != "hello" || from != pa.Addr() {
		t.Fatalf("got %q from %v, %v", buf[:n], from, err)
	}
}

func TestOpenPortSaysWhatIsWrong(t *testing.T) {
	mesh := networktest.NewMesh(t)
	for name, tc := range map[string]struct {
		edit func(*network.Config)
		want string
	}{
		"no address":      {func(c *network.Config) { c.Bind = "localhost" }, "must be ip:port"},
		"everywhere":      {func(c *network.Config) { c.Bind = "0.0.0.0:0" }, "which one to advertise"},
		"bad advertise":   {func(c *network.Config) { c.Advertise = "alpha" }, "must be ip or ip:port"},
		"no server":       {func(c *network.Config) { c.Server = nil }, "must all be set"},
		"no limits":       {func(c *network.Config) { c.Limits = network.Limits{} }, "join rate must be positive"},
		"nobody's number": {func(c *network.Config) { c.Limits.PerNode = 0 }, "at least 1"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := mesh.Config("a")
			tc.edit(&cfg)
			p, err := network.OpenPort(cfg)
			if err == nil {
				p.Close()
				t.Fatal("opened")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error %q does not say %q", err, tc.want)
			}
		})
	}
}

func TestPortAdvertisesWhatItWasTold(t *testing.T) {
	mesh := networktest.NewMesh(t)
	for _, want := range []string{"192.0.2.7", "192.0.2.7:9000"} {
		cfg := mesh.Config("a")
		cfg.Advertise = want
		p, err := network.OpenPort(cfg)
		if err != nil {
			t.Fatal(err)
		}
		got := p.Addr()
		p.Close()
		if got.Addr() != netip.MustParseAddr("192.0.2.7") || strings.Contains(want, ":") && got.Port() != 9000 || got.Port() == 0 {
			t.Fatalf("told %q, advertises %v", want, got)
		}
	}
}
