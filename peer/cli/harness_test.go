package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"meshd/peer/api"
	"meshd/peer/manifest"
	"meshd/raftfsm"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// noon is when every test mesh was made. Each entry after the first comes a
// second later than the one before.
var noon = time.Date(2030, 1, 2, 12, 0, 0, 0, time.UTC)

// mesh is a node's backend over a real state: three nodes, alpha, beta and
// gamma, and a script. The script is the rest of the world: each time somebody
// waits for news and there is none, its next step happens.
type mesh struct {
	mu      sync.Mutex
	state   *raftfsm.State
	over    api.Overview // all but State, Index and Now
	later   time.Duration
	script  []func(*mesh) error
	tries   []api.Try
	unasked error
	reply   func(target string, data []byte) (api.CallReply, error)
	finds   []api.Finding
	fails   error  // of every proposal
	docs    int    // pushes committed
	own     uint64 // of every plan
	keys    []api.BusCredential

	meanwhile func(*mesh) error // happens once, between the plan and its push
}

func newMesh(t *testing.T) *mesh {
	t.Helper()
	m := &mesh{state: raftfsm.New(), over: api.Overview{
		Self: "alpha", Version: "v1.2.3", Leader: "alpha", Quorum: true, Age: 120 * time.Millisecond,
		Alive: map[string]bool{"alpha": true, "beta": true, "gamma": true}, Voters: []string{"alpha", "beta", "gamma"},
	}}
	node := func(name string) raftfsm.Node {
		return raftfsm.Node{ID: "id-" + name, Name: name, Address: name + ".example:7946", Joined: noon}
	}
	m.do(t, "alpha", raftfsm.Init{Mesh: raftfsm.Mesh{ID: "5f3a", Level: 1}, Node: node("alpha")})
	for _, name := range []string{"beta", "gamma"} {
		m.do(t, "alpha", raftfsm.AddToken{Hash: name, Expires: noon})
		m.do(t, "alpha", raftfsm.Admit{Token: name, Node: node(name)})
	}
	return m
}

// commit applies one command as the node proposed it, through its encoding.
func (m *mesh) commit(node string, c raftfsm.Command) (raftfsm.Result, error) {
	h := raftfsm.Header{Actor: "root@" + node, Node: "id-" + node, Time: noon.Add(time.Duration(m.state.Index) * time.Second), ID: "x"}
	b, err := raftfsm.Encode(raftfsm.Entry{Header: h, Command: c})
	if err != nil {
		return raftfsm.Result{}, err
	}
	e, err := raftfsm.Decode(b)
	if err != nil {
		return raftfsm.Result{}, err
	}
	return m.state.Apply(m.state.Index+1, e), nil
}

func (m *mesh) do(t *testing.T, node string, c raftfsm.Command) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if r, err := m.commit(node, c); err != nil || r.Rejection != nil {
		t.Fatalf("%T: %v, %v", c, err, r.Rejection)
	}
}

// push makes a manifest what is desired.
func (m *mesh) push(t *testing.T, yaml string) {
	t.Helper()
	parsed, err := manifest.Parse(manifest.Source{Name: "test.yaml", Data: []byte(yaml)})
	if err != nil {
		t.Fatal(err)
	}
	m.do(t, "alpha", raftfsm.Push{Documents: parsed.Documents, Pending: true})
}

// lease opens the session of the node.
func (m *mesh) lease(t *testing.T, node string) {
	t.Helper()
	m.do(t, node, raftfsm.OpenSession{Node: "id-" + node, Incarnation: "run of " + node, TTL: 1500 * time.Millisecond})
}

// The reports that bring a binding from waiting to in-use, made from the state
// as it is when they come.
func staged(binding string) func(*mesh) error {
	return func(m *mesh) error {
		b := m.state.Bindings[binding]
		return m.from(b.Provider, raftfsm.NodeReport{Staged: []raftfsm.Staged{{
			Binding: binding, Resource: b.Resource, To: m.state.Assignments[b.Consumer].Node, Generation: m.state.Resources[b.Resource].Last + 1, Sealed: "SEALED",
			Address: raftfsm.Address{Host: "db.example", Port: 5432, TLS: "verify-full"},
		}}})
	}
}

func marked(binding, fact string) func(*mesh) error {
	return func(m *mesh) error {
		b := m.state.Bindings[binding]
		by := b.Provider
		if fact == raftfsm.FactDelivered || fact == raftfsm.FactHealthy {
			by = b.Consumer
		}
		if b.Newest() == nil {
			return fmt.Errorf("%s has no credential to mark", binding)
		}
		return m.from(by, raftfsm.NodeReport{Marks: []raftfsm.Mark{{Binding: binding, Resource: b.Resource, Generation: b.Newest().Generation, Fact: fact}}})
	}
}

func held(binding, side, step, class string) func(*mesh) error {
	return func(m *mesh) error {
		b := m.state.Bindings[binding]
		by := b.Provider
		if side == raftfsm.SideConsumer {
			by = b.Consumer
		}
		return m.from(by, raftfsm.NodeReport{Troubles: []raftfsm.TroubleReport{{Binding: binding, Side: side, Step: step, Class: class}}})
	}
}

func provides(id string, ready bool, step, class string) func(*mesh) error {
	return func(m *mesh) error {
		name, _ := cutProvider(id)
		return m.from(name, raftfsm.NodeReport{Providers: []raftfsm.ProviderReport{{
			Provider: id, Ready: ready, Step: step, Class: class, Address: raftfsm.Address{Host: "db.example", Port: 5432, TLS: "verify-full"},
		}}})
	}
}

func process(assignment, state, class string) func(*mesh) error {
	return func(m *mesh) error {
		return m.from(assignment, raftfsm.NodeReport{Processes: []raftfsm.ProcessReport{{Assignment: assignment, State: state, Class: class}}})
	}
}

// from commits what the assignment's node reports.
func (m *mesh) from(assignment string, r raftfsm.NodeReport) error {
	_, err := m.commit(m.state.NodeName(m.state.Assignments[assignment].Node), r)
	return err
}

// play takes the steps at once.
func (m *mesh) play(t *testing.T, steps ...func(*mesh) error) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, step := range steps {
		if err := step(m); err != nil {
			t.Fatal(err)
		}
	}
}

// inUse are the steps that bring a binding into use.
func inUse(binding string) []func(*mesh) error {
	return []func(*mesh) error{staged(binding), marked(binding, raftfsm.FactMinted), marked(binding, raftfsm.FactDelivered), marked(binding, raftfsm.FactSeen)}
}

func (m *mesh) Overview(context.Context) (api.Overview, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.look(), nil
}

func (m *mesh) look() api.Overview {
	o := m.over
	o.State, o.Index = m.state.Clone(), m.state.Index
	o.Now = noon.Add(time.Duration(m.state.Index)*time.Second + m.later)
	return o
}

func (m *mesh) Wait(ctx context.Context, after uint64) error {
	m.mu.Lock()
	if m.state.Index <= after && len(m.script) > 0 {
		next := m.script[0]
		m.script = m.script[1:]
		if err := next(m); err != nil {
			m.mu.Unlock()
			return err
		}
	}
	news := m.state.Index > after
	m.mu.Unlock()
	if news {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func (m *mesh) Detail(context.Context, string) ([]api.Try, error) { return m.tries, m.unasked }

func (m *mesh) Propose(_ context.Context, _ string, c raftfsm.Command) (raftfsm.Result, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fails != nil {
		return raftfsm.Result{}, m.fails
	}
	if m.meanwhile != nil {
		if err := m.meanwhile(m); err != nil {
			return raftfsm.Result{}, err
		}
		m.meanwhile = nil
	}
	r, err := m.commit("alpha", c)
	if r.Rejection == nil {
		m.docs++
	}
	return r, err
}

func (m *mesh) Preview(_ context.Context, _ string, c raftfsm.Command) (api.Plan, *raftfsm.Rejection) {
	m.mu.Lock()
	defer m.mu.Unlock()
	plan, refused := m.state.Preview(raftfsm.Header{Actor: "root@alpha", Node: "id-alpha", Time: noon}, c)
	return api.Plan{Plan: plan, Own: m.own}, refused
}

func (m *mesh) Call(_ context.Context, target string, data []byte) (api.CallReply, error) {
	return m.reply(target, data)
}

func (m *mesh) Verify(context.Context) ([]api.Finding, error) { return m.finds, m.unasked }

func (m *mesh) Token(_ context.Context, _ string, ttl time.Duration) (string, error) {
	return "meshd-token-for-" + ttl.String(), nil
}

func (m *mesh) RemoveNode(_ context.Context, _, name string) error {
	if name != "gamma" {
		return &raftfsm.Rejection{Code: "no-node", Text: fmt.Sprintf("there is no node %q", name), Remedy: "meshd node ls lists them", Candidates: []string{"gamma"}}
	}
	return nil
}

func (m *mesh) Leave(context.Context, string, bool) error { return m.fails }

func (m *mesh) AddBusCredential(_ context.Context, actor, publicKey string, ttl time.Duration) (api.BusLogin, error) {
	if ttl > time.Hour {
		return api.BusLogin{}, &raftfsm.Rejection{Code: "bad-ttl", Text: "a bus credential cannot be good for so long", Remedy: "choose less"}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c := api.BusCredential{Name: "k3j9x2ab", PublicKey: publicKey, Actor: actor, Expires: time.Now().Add(ttl)}
	m.keys = append(m.keys, c)
	return api.BusLogin{BusCredential: c, URL: "nats://127.0.0.1:4222", Inbox: "_O.alpha.k3j9x2ab", Calls: "call.alpha._k3j9x2ab"}, nil
}

func (m *mesh) BusCredentials() []api.BusCredential {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.keys)
}

func (m *mesh) RemoveBusCredential(_ context.Context, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.keys = slices.DeleteFunc(m.keys, func(c api.BusCredential) bool { return c.Name == name })
	return nil
}

func (m *mesh) Logs(_ context.Context, assignment string, lines int, _ bool, w io.Writer) error {
	if assignment == "shop@beta" {
		return nil // it was not started yet
	}
	_, err := fmt.Fprintf(w, "the last %d lines of %s\n", lines, assignment)
	return err
}

// serve answers on a socket until the test ends.
func (m *mesh) serve(t *testing.T) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "meshd.sock")
	l, err := api.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	s := &api.Server{Reader: m, Writer: m, Caller: m, Members: m, Bus: m, Logs: m, Node: "alpha", Log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return socket
}

// outcome is what a command line came to.
type outcome struct {
	code     int
	out, err string
}

func invoke(ctx context.Context, socket, stdin string, args ...string) outcome {
	var out, errs bytes.Buffer
	code := Main(ctx, append([]string{"--socket", socket}, args...), strings.NewReader(stdin), &out, &errs)
	return outcome{code, out.String(), errs.String()}
}

// command runs one command line against m.
func (m *mesh) command(t *testing.T, args ...string) outcome {
	t.Helper()
	return invoke(t.Context(), m.serve(t), "", args...)
}

// What differs from run to run: times, and folders of files.
var (
	elapsed = regexp.MustCompile(`\+\d+\.\d\ds|after \d+(\.\d)?s`)
	folders = regexp.MustCompile(`/[^ :]*/`)
	digit   = regexp.MustCompile(`\d`)
)

// golden compares what a command line printed with testdata/NAME.golden.
func (m *mesh) golden(t *testing.T, name string, wantCode int, args ...string) {
	t.Helper()
	got := m.command(t, args...)
	if got.code != wantCode {
		t.Errorf("meshd %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), got.code, wantCode, got.out, got.err)
	}
	text := fmt.Sprintf("%s-- stderr\n%s-- exit %d\n", got.out, folders.ReplaceAllString(got.err, ""), got.code)
	text = elapsed.ReplaceAllStringFunc(text, func(s string) string { return digit.ReplaceAllString(s, "#") })
	for _, line := range strings.Split(got.out, "\n") {
		if n := len([]rune(line)); n > columns && !slices.Contains(args, "json") {
			t.Errorf("a line of %d columns, over %d: %s", n, columns, line)
		}
	}
	checkGolden(t, name, text)
}

func checkGolden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), text); diff != "" {
		t.Errorf("%s differs (run with -update to accept):\n%s", path, diff)
	}
}

// file writes a manifest and returns its path.
func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// The documents that most tests push: a database on alpha, a shop on gamma.
const (
	database = `module: postgres
run: {external: true}
claims: [mesh-store]
provides:
  postgres-database: {admin: "file:/etc/meshd/pg-admin.url", address: "{{ .node.address }}:5432"}
---
assign: postgres
node: alpha
as: pg-main
`
	shop = `module: shop
run: {exec: [/usr/local/bin/shop]}
requires:
  db: {kind: postgres-database, provider: pg-main}
env: {DATABASE_URL: "{{ .db.uri }}"}
---
assign: shop
nodes: [gamma]
`
	seat = `seat: mesh-store
scope: mesh
delivers: postgres-database
verbs: [databases, query]
`
	separator = "---\n"
)
