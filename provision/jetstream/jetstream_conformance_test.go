package jetstream

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"meshd/provision"
	"meshd/provision/provisiontest"
)

func TestConformance(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		s := start(t, nil)
		faults := disturb(t, s)
		k := kind(s)
		provisiontest.Run(t, provisiontest.Suite{
			Kind: k,
			Config: provision.Config{
				Mesh:    "m1",
				Address: provision.Address{Host: faults.login.Host(), Port: faults.login.Port(), TLS: provision.Off},
				Options: map[string]string{"max-bytes": "4MiB"},
			},
			Faults: faults,
			Dial: func(ctx context.Context, fields map[string]string) (provisiontest.Session, error) {
				return dialSession(k, fields)
			},
			Trespass: func(ctx context.Context, fields map[string]string, other provision.Resource) error {
				changed := k.Fields(provision.Address{Host: faults.login.Host(), Port: faults.login.Port(), TLS: provision.Off},
					other, provision.Login{Name: fields["username"], Secret: fields["password"]})
				return k.Check(ctx, changed)
			},
			Plant: func(t *testing.T, res provision.Resource, l provision.Login) { plant(t, s, k, res, l) },
			Drop: func(_ context.Context, l provision.Login) error {
				return s.change(func(logins map[string]login) error {
					delete(logins, l.Name)
					return nil
				})
			},
		})
	})
}

// plant makes a bucket and a login as somebody else's.
func plant(t *testing.T, s *Server, k provision.Kind, res provision.Resource, l provision.Login) {
	t.Helper()
	theirs, err := k.Open(provision.Config{Mesh: "theirs", Address: address(s)})
	must(t, err)
	must(t, theirs.Ensure(within(t), res, l))
	t.Cleanup(func() {
		ctx := context.Background()
		if _, err := theirs.Withdraw(ctx, res, []provision.Login{l}); err != nil {
			t.Error(err)
		}
		if err := theirs.Purge(ctx, res); err != nil {
			t.Error(err)
		}
	})
}

// app is a consumer for the suite.
type app struct {
	*nats.Conn
	kv      jetstream.KeyValue
	objects jetstream.ObjectStore
}

func dialSession(k provision.Kind, fields map[string]string) (*app, error) {
	c, err := nats.Connect(fields["uri"], nats.CustomInboxPrefix(fields["inbox"]), nats.NoReconnect(),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		return nil, err
	}
	s := &app{Conn: c}
	js, err := jetstream.New(c)
	if err == nil && k.Name() == "kv-bucket" {
		s.kv, err = js.KeyValue(context.Background(), fields["bucket"])
	} else if err == nil {
		s.objects, err = js.ObjectStore(context.Background(), fields["bucket"])
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return s, nil
}

func (s *app) Put(ctx context.Context, key, value string) (err error) {
	if s.kv != nil {
		_, err = s.kv.PutString(ctx, key, value)
	} else {
		_, err = s.objects.PutString(ctx, key, value)
	}
	return err
}

func (s *app) Get(ctx context.Context, key string) (string, error) {
	if s.kv != nil {
		entry, err := s.kv.Get(ctx, key)
		if errors.Is(err, jetstream.ErrKeyNotFound) {
			return "", nil
		} else if err != nil {
			return "", err
		}
		return string(entry.Value()), nil
	}
	value, err := s.objects.GetString(ctx, key)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return "", nil
	}
	return value, err
}

func (s *app) Close() error {
	s.Conn.Close()
	return nil
}

// faulty is a server that is away on demand: to logins, which come over TCP, and
// to providers, which come from inside the process and take a detour here.
type faulty struct {
	login, inside *provisiontest.Proxy
	away          atomic.Bool
}

// disturb puts faults between s and everybody.
func disturb(t *testing.T, s *Server) *faulty {
	t.Helper()
	f := &faulty{login: provisiontest.NewProxy(t, s.self), inside: provisiontest.NewProxy(t, bridge(t, s))}
	s.self = net.JoinHostPort(f.login.Host(), port(f.login))
	s.way = f
	return f
}

func port(p *provisiontest.Proxy) string { return strconv.Itoa(p.Port()) }

func (f *faulty) both() []*provisiontest.Proxy { return []*provisiontest.Proxy{f.login, f.inside} }

func (f *faulty) Cut(after int) {
	f.away.Store(after == 0)
	for _, p := range f.both() {
		p.Cut(after)
	}
}

func (f *faulty) Stall() {
	for _, p := range f.both() {
		p.Stall()
	}
}

func (f *faulty) Heal() {
	f.away.Store(false)
	for _, p := range f.both() {
		p.Heal()
	}
}

// Running and InProcessConn are the way of the providers.
func (f *faulty) Running() bool { return !f.away.Load() }

func (f *faulty) InProcessConn() (net.Conn, error) {
	return net.Dial("tcp", net.JoinHostPort(f.inside.Host(), port(f.inside)))
}

// bridge leads a port of 127.0.0.1 to the inside of s, until the test ends.
func bridge(t *testing.T, s *Server) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var (
		mu    sync.Mutex
		conns []net.Conn
		all   sync.WaitGroup
	)
	pass := func(to, from net.Conn) {
		_, _ = io.Copy(to, from) // ends when either side does
		_, _ = to.Close(), from.Close()
	}
	all.Go(func() {
		for {
			outer, err := l.Accept()
			if err != nil {
				return
			}
			inner, err := s.nats.InProcessConn()
			if err != nil {
				_ = outer.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, outer, inner)
			mu.Unlock()
			all.Go(func() { pass(inner, outer) })
			all.Go(func() { pass(outer, inner) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range slices.Clone(conns) {
			_ = c.Close()
		}
		mu.Unlock()
		all.Wait()
	})
	return l.Addr().String()
}
