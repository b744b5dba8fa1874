package bus

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait for a condition: long, for a machine that is busy with other tests.
const patience = 20 * time.Second

const serverName = "route.mesh.internal"

// authority signs the route certificates of one mesh.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test mesh"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, &x509.Certificate{Subject: pkix.Name{CommonName: "test mesh"}}, key.Public(), key)
	must(t, err)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	return authority{cert, key}
}

// issue makes the TLS configuration and the pin of one node.
func (a authority) issue(t testing.TB, id string) (*tls.Config, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: id}, DNSNames: []string{serverName},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, key.Public(), a.key)
	must(t, err)
	spki, err := x509.MarshalPKIXPublicKey(key.Public())
	must(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	sum := sha256.Sum256(spki)
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: pool, ClientCAs: pool, ServerName: serverName,
		ClientAuth:   tls.RequireAndVerifyClientCert,
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	}, hex.EncodeToString(sum[:])
}

// mesh is some buses in this process, and the layouts that they were last given.
type mesh struct {
	edit  func(*Config)
	t     testing.TB
	ca    authority
	nodes map[string]*node
	dir   Directory
}

type node struct {
	*Bus
	id, name, pin string
	log           *lines
	layout        Layout
}

// newMesh starts one node per name and waits until all have routes to all.
func newMesh(t testing.TB, names ...string) *mesh {
	t.Helper()
	return newMeshOf(t, func(*Config) {}, names...)
}

// newMeshOf is newMesh with an edit of each node's configuration.
func newMeshOf(t testing.TB, edit func(*Config), names ...string) *mesh {
	t.Helper()
	m := &mesh{t: t, edit: edit, ca: newAuthority(t), nodes: map[string]*node{}, dir: Directory{Seats: map[string]Seat{}, Nodes: map[string]Node{}}}
	for _, name := range names {
		m.start(name)
	}
	m.apply()
	m.waitRoutes()
	return m
}

var began = time.Now()

func monotonic() time.Duration { return time.Since(began) }

func (m *mesh) start(name string) *node {
	m.t.Helper()
	n := &node{id: "id-" + name, name: name, log: &lines{}}
	var conf *tls.Config
	conf, n.pin = m.ca.issue(m.t, n.id)
	var err error
	c := Config{Mesh: "test-mesh", NodeID: n.id, NodeName: name, RouteAddr: "127.0.0.1:0", RouteTLS: conf, Log: slog.New(n.log), Clock: monotonic}
	m.edit(&c)
	n.Bus, err = Start(m.t.Context(), c)
	must(m.t, err)
	m.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		must(m.t, n.Close(ctx))
	})
	m.nodes[name] = n
	if _, ok := m.dir.Nodes[name]; !ok {
		m.dir.Nodes[name] = Node{Seats: map[string][]string{}, Tools: map[string][]string{}}
	}
	return n
}

// apply gives every node its layout with the mesh's peers and directory in it.
func (m *mesh) apply() {
	m.t.Helper()
	for _, name := range slices.Sorted(maps.Keys(m.nodes)) {
		must(m.t, m.nodes[name].Apply(m.of(name)))
	}
}

// of completes the layout of one node.
func (m *mesh) of(name string) Layout {
	l := m.nodes[name].layout
	l.Peers = nil
	for _, p := range m.nodes {
		if _, member := m.dir.Nodes[p.name]; member && p.name != name {
			l.Peers = append(l.Peers, Peer{ID: p.id, Name: p.name, Addr: p.RouteAddr(), Pin: p.pin})
		}
	}
	l.Directory = Directory{Seats: maps.Clone(m.dir.Seats), Nodes: maps.Clone(m.dir.Nodes)}
	return l
}

func (m *mesh) waitRoutes() {
	m.t.Helper()
	for _, n := range m.nodes {
		wait(m.t, "routes of "+n.name, func() bool { return n.host.srv.NumRoutes() == 3*(len(m.nodes)-1) })
	}
}

// hold names a node as the holder of a mesh seat, in the directory and in the layouts, and gives every
// node the same handler, so that only the layouts decide who answers.
func (m *mesh) hold(seat, holder string, epoch uint64, h Handler, verbs ...string) {
	m.dir.Seats[seat] = Seat{Verbs: verbs, Holder: Holder{Node: holder, Assignment: "pg", Epoch: epoch}}
	for _, n := range m.nodes {
		n.layout.Services = slices.DeleteFunc(slices.Clone(n.layout.Services), func(s Service) bool { return s.Seat == seat })
		if n.name == holder {
			n.layout.Services = append(n.layout.Services, Service{Scope: ScopeMesh, Seat: seat, Assignment: "pg", Verbs: verbs, Epoch: epoch, Handler: h})
		}
	}
}

// tools puts an assignment with tools on a node.
func (m *mesh) tools(name, assignment string, h Handler, tools ...string) {
	m.dir.Nodes[name].Tools[assignment] = tools
	m.nodes[name].layout.Services = append(m.nodes[name].layout.Services,
		Service{Scope: ScopeTools, Assignment: assignment, Verbs: tools, Handler: h})
}

// forwarded is the handler of what the assignment serves on its own connection.
func (n *node) forwarded(assignment string) Handler {
	return func(ctx context.Context, c Call) ([]byte, error) {
		return n.Forward(ctx, assignment, c.Suffix(), c)
	}
}

// module adds an assignment that may connect to a node; it applies with the next apply.
func (m *mesh) module(name, assignment string, calls ...Target) *module {
	m.t.Helper()
	key, err := nkeys.CreateUser()
	must(m.t, err)
	public, err := key.PublicKey()
	must(m.t, err)
	n := m.nodes[name]
	n.layout.Modules = append(slices.Clone(n.layout.Modules), Module{Assignment: assignment, PublicKey: public, Calls: calls})
	return &module{t: m.t, node: n, assignment: assignment, key: key, public: public}
}

// module is a process of the user's, as the bus sees it: a stock NATS client.
type module struct {
	t          testing.TB
	node       *node
	assignment string
	key        nkeys.KeyPair
	public     string
	*nats.Conn
}

func (m *module) connect(opts ...nats.Option) {
	m.t.Helper()
	nc, err := nats.Connect(m.node.ClientURL(), append([]nats.Option{
		nats.Nkey(m.public, m.key.Sign), nats.CustomInboxPrefix(Inbox(m.node.name, m.assignment)),
		nats.Name(m.assignment), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}),
	}, opts...)...)
	must(m.t, err)
	m.Conn = nc
	m.t.Cleanup(nc.Close)
}

// call asks as a module does: a plain request.
func (m *module) call(t Target, data string) (*nats.Msg, error) {
	return m.Request(t.CallSubject(Caller{m.node.name, m.assignment}), []byte(data), patience)
}

// refused says whether the server's last word to this client was a refusal of the subject.
func (m *module) refused(subject string) bool {
	m.t.Helper()
	must(m.t, m.Flush())
	err := m.LastError()
	return err != nil && errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), `"`+subject+`"`)
}

// lines is a slog.Handler that remembers what was logged.
type lines struct {
	mu   sync.Mutex
	list []string
}

func (l *lines) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }
func (l *lines) WithAttrs([]slog.Attr) slog.Handler               { return l }
func (l *lines) WithGroup(string) slog.Handler                    { return l }
func (l *lines) Handle(_ context.Context, r slog.Record) error {
	text := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, text)
	return nil
}

func (l *lines) since(n int) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.list[n:])
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// check is must for a goroutine that is not the test's own.
func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

func wait(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("waited %v for %s", patience, what)
		}
	}
}

// within is a context for one operation.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// says is a handler that answers who it is and who asked.
func says(who string) Handler {
	return func(_ context.Context, c Call) ([]byte, error) {
		return fmt.Appendf(nil, "%s to %s: %s %s", who, c.Caller, c.Name, c.Data), nil
	}
}

func wantCode(t testing.TB, err error, code Code, words ...string) {
	t.Helper()
	if !errors.Is(err, &CallError{Code: code}) {
		t.Fatalf("got error %v, want code %s", err, code)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}
