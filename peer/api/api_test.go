package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"meshd/raftfsm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// mesh is a backend over a real state, in memory: what it proposes it applies.
type mesh struct {
	mu      sync.Mutex
	state   *raftfsm.State
	changed chan struct{}
	actors  []string
	fail    error
	parts   int
	keys    []BusCredential
}

func newMesh(t *testing.T) *mesh {
	t.Helper()
	m := &mesh{state: raftfsm.New(), changed: make(chan struct{})}
	node := raftfsm.Node{ID: "n1", Name: "alpha", Recipient: "age1x", Secrets: "SEALED"}
	m.apply(t, raftfsm.Init{Mesh: raftfsm.Mesh{ID: "m1", Level: 1}, Node: node})
	return m
}

func (m *mesh) apply(t *testing.T, c raftfsm.Command) {
	t.Helper()
	if r, err := m.Propose(t.Context(), "test", c); err != nil || r.Rejection != nil {
		t.Fatalf("propose %T: %v %v", c, err, r.Rejection)
	}
}

func (m *mesh) Propose(_ context.Context, actor string, c raftfsm.Command) (raftfsm.Result, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return raftfsm.Result{}, m.fail
	}
	m.actors = append(m.actors, actor)
	if _, part := c.(raftfsm.PushPart); part {
		m.parts++
	}
	b, err := raftfsm.Encode(raftfsm.Entry{Header: raftfsm.Header{Actor: actor, Node: "n1", Time: time.Unix(1, 0), ID: "x"}, Command: c})
	if err != nil {
		return raftfsm.Result{}, err
	}
	e, err := raftfsm.Decode(b)
	if err != nil {
		return raftfsm.Result{}, err
	}
	r := m.state.Apply(m.state.Index+1, e)
	close(m.changed)
	m.changed = make(chan struct{})
	return r, nil
}

func (m *mesh) Preview(_ context.Context, actor string, c raftfsm.Command) (Plan, *raftfsm.Rejection) {
	m.mu.Lock()
	defer m.mu.Unlock()
	plan, refused := m.state.Preview(raftfsm.Header{Actor: actor, Node: "n1", Time: time.Unix(1, 0)}, c)
	return Plan{Plan: plan}, refused
}

func (m *mesh) Overview(context.Context) (Overview, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return Overview{Self: "alpha", State: m.state.Clone(), Index: m.state.Index, Quorum: true, Leader: "alpha", Alive: map[string]bool{"alpha": true}}, nil
}

func (m *mesh) Wait(ctx context.Context, after uint64) error {
	for {
		m.mu.Lock()
		index, changed := m.state.Index, m.changed
		m.mu.Unlock()
		if index > after {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (m *mesh) Detail(_ context.Context, name string) ([]Try, error) {
	return []Try{{Key: "mint " + name, Class: "unreachable", Tries: 3}}, errors.New("beta does not answer")
}

func (m *mesh) Call(_ context.Context, target string, data []byte) (CallReply, error) {
	switch target {
	case "store.size":
		return CallReply{Data: data, Seat: "store", Epoch: 7, Node: "alpha"}, nil
	case "store.text":
		return CallReply{Data: []byte("not json"), Node: "alpha"}, nil
	}
	return CallReply{}, &Error{Code: "unknown", Text: "the mesh has no seat \"x\""}
}

func (m *mesh) Verify(context.Context) ([]Finding, error) {
	return []Finding{{Node: "beta", Seat: "store", Text: "announces it and does not hold it"}}, nil
}

func (m *mesh) Token(_ context.Context, actor string, ttl time.Duration) (string, error) {
	return fmt.Sprintf("token for %s, %v", actor, ttl), nil
}

func (m *mesh) RemoveNode(_ context.Context, _, name string) error {
	return &raftfsm.Rejection{Code: "no-node", Text: "there is no node " + name, Remedy: "meshd node ls lists them", Candidates: []string{"alpha"}}
}

func (m *mesh) Leave(context.Context, string, bool) error { return context.DeadlineExceeded }

func (m *mesh) AddBusCredential(_ context.Context, actor, publicKey string, ttl time.Duration) (BusLogin, error) {
	if ttl > time.Hour {
		return BusLogin{}, &raftfsm.Rejection{Code: "bad-ttl", Text: "too long", Remedy: "choose less"}
	}
	m.keys = append(m.keys, BusCredential{Name: "eye", PublicKey: publicKey, Actor: actor})
	return BusLogin{BusCredential: m.keys[0], URL: "nats://127.0.0.1:1", Inbox: "_O.alpha.eye", Calls: "call.alpha._eye"}, nil
}

func (m *mesh) BusCredentials() []BusCredential { return m.keys }

func (m *mesh) RemoveBusCredential(_ context.Context, name string) error {
	m.keys = slices.DeleteFunc(m.keys, func(c BusCredential) bool { return c.Name == name })
	return nil
}

func (m *mesh) Logs(ctx context.Context, assignment string, lines int, follow bool, w io.Writer) error {
	if assignment == "gone" {
		return &raftfsm.Rejection{Code: "no-assignment", Text: "there is no assignment"}
	}
	if _, err := fmt.Fprintf(w, "%s %d\n", assignment, lines); err != nil {
		return err
	}
	if assignment == "breaks" {
		return errors.New("read: input/output error")
	}
	if follow {
		<-ctx.Done()
	}
	return nil
}

// serve runs a server over m on a socket of its own until the test ends.
func serve(t *testing.T, m *mesh) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "run", "meshd.sock")
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Reader: m, Writer: m, Caller: m, Members: m, Bus: m, Logs: m, Node: "alpha", Log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return path
}

func client(t *testing.T, path string) *Client {
	c := NewClient(path)
	t.Cleanup(c.Close)
	return c
}

func documents(module string) raftfsm.Documents {
	return raftfsm.Documents{Modules: []raftfsm.Module{{Name: module, Run: raftfsm.Run{Exec: []string{"/bin/true"}}}}}
}

func TestOverviewKeepsSecretsBack(t *testing.T) {
	m := newMesh(t)
	sealed := []raftfsm.Credential{{Generation: 1, Login: "m_x", Sealed: "SEALED"}}
	m.state.Bindings["shop@alpha/db"] = raftfsm.Binding{Consumer: "shop@alpha", Requirement: "db", Provider: "pg", Credentials: sealed}
	m.state.Mesh.Secrets = "SEALED"
	m.state.Withdrawals["shop@alpha/db#4"] = raftfsm.Withdrawal{Provider: "pg", Credentials: sealed}
	path := serve(t, m)
	o, err := client(t, path).Overview(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(b, []byte("SEALED")) {
		t.Errorf("a sealed secret crossed the socket: %s", b)
	}
	if o.State.Bindings["shop@alpha/db"].Credentials[0].Login != "m_x" || o.Leader != "alpha" {
		t.Errorf("the overview lost something: %s", b)
	}
	if m.state.Nodes["n1"].Secrets != "SEALED" || sealed[0].Sealed != "SEALED" {
		t.Error("the node's own state was changed")
	}
}

func TestNewerWaitsForAChange(t *testing.T) {
	m := newMesh(t)
	c := client(t, serve(t, m))
	got := make(chan Overview, 1)
	go func() {
		o, err := c.Newer(context.Background(), 1, MaxWait)
		if err != nil {
			t.Error(err)
		}
		got <- o
	}()
	if _, err := c.Push(t.Context(), Push{Documents: documents("shop")}); err != nil {
		t.Fatal(err)
	}
	if o := <-got; o.Index != 2 {
		t.Errorf("index %d, want 2", o.Index)
	}
	o, err := c.Newer(t.Context(), 2, time.Millisecond)
	if err != nil || o.Index != 2 {
		t.Errorf("after the wait: index %d, %v; want 2", o.Index, err)
	}
}

func TestPushNamesTheActorByTheKernel(t *testing.T) {
	m := newMesh(t)
	c := client(t, serve(t, m))
	done, err := c.Push(t.Context(), Push{Documents: documents("shop")})
	if err != nil || done.Index != 2 {
		t.Fatalf("push: %+v, %v", done, err)
	}
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := m.actors[len(m.actors)-1], me.Username+"@alpha"; got != want {
		t.Errorf("actor %q, want %q", got, want)
	}
	if _, known := m.state.Modules["shop"]; !known {
		t.Error("the module was not pushed")
	}
}

func TestPushOfMoreThanAnEntryIsSplit(t *testing.T) {
	m := newMesh(t)
	c := client(t, serve(t, m))
	var docs raftfsm.Documents
	for i := range 40 {
		name := fmt.Sprintf("m%d", i)
		docs.Modules = append(docs.Modules, raftfsm.Module{Name: name, Env: map[string]string{"A": strings.Repeat("<", 2000)}})
		docs.Assigns = append(docs.Assigns, raftfsm.Assign{Module: name, Nodes: []string{"alpha"}})
	}
	docs.Seats = []raftfsm.Seat{{Name: "store", Scope: raftfsm.ScopeMesh}}
	if _, err := c.Push(t.Context(), Push{Documents: docs}); err != nil {
		t.Fatal(err)
	}
	if len(m.state.Modules) != 40 || len(m.state.Assignments) != 40 || len(m.state.Seats) != 1 || len(m.state.Parts) != 0 {
		t.Errorf("%d modules, %d assignments, %d seats, %d open pushes", len(m.state.Modules), len(m.state.Assignments), len(m.state.Seats), len(m.state.Parts))
	}
	if m.parts < 8 {
		t.Errorf("%d parts, which cannot hold 480 KB", m.parts)
	}

	docs.Assigns[33].Nodes = []string{"omega"}
	_, err := c.Push(t.Context(), Push{Documents: docs})
	var e *Error
	if !errors.As(err, &e) || e.Path != "assign/33/nodes/0" {
		t.Errorf("the place of a refusal in a split push: %+v", err)
	}

	docs.Modules[5].Env = map[string]string{"A": strings.Repeat("a", 70_000)}
	if _, err = c.Push(t.Context(), Push{Documents: docs}); !errors.As(err, &e) || e.Code != CodeTooBig || e.Path != "module/m5" {
		t.Errorf("a document over an entry: %+v", err)
	}
}

func TestPlanAndRefusal(t *testing.T) {
	m := newMesh(t)
	c := client(t, serve(t, m))
	docs := documents("shop")
	docs.Assigns = []raftfsm.Assign{{Module: "shop", Nodes: []string{"alpha"}}}
	plan, err := c.Plan(t.Context(), Change{Push: &Push{Documents: docs}})
	if err != nil || len(plan.Changes) != 2 {
		t.Fatalf("plan: %+v, %v", plan, err)
	}
	if len(m.state.Modules) != 0 {
		t.Error("a plan changed something")
	}
	if _, err = c.Push(t.Context(), Push{Documents: docs, At: plan.At}); err != nil {
		t.Fatal(err)
	}
	docs.Modules[0].OnRotate = "none"
	_, err = c.Push(t.Context(), Push{Documents: docs, At: plan.At})
	var e *Error
	if !errors.As(err, &e) || e.Code != "stale-plan" || e.Status != http.StatusConflict || e.Remedy == "" {
		t.Errorf("a stale plan: %+v", err)
	}
	if _, err = c.Plan(t.Context(), Change{}); !errors.As(err, &e) || e.Code != CodeBadRequest {
		t.Errorf("a plan of nothing: %+v", err)
	}
	plan, err = c.Plan(t.Context(), Change{Remove: &raftfsm.Remove{What: raftfsm.WhatModule, Name: "shop"}})
	if err != nil || len(plan.Changes) != 2 {
		t.Errorf("plan of a removal: %+v, %v", plan, err)
	}
	if _, err = c.Remove(t.Context(), raftfsm.Remove{What: raftfsm.WhatModule, Name: "shop"}); err != nil || len(m.state.Modules) != 0 {
		t.Errorf("remove: %v, %d modules", err, len(m.state.Modules))
	}
}

func TestASeatIsMoved(t *testing.T) {
	m := newMesh(t)
	c := client(t, serve(t, m))
	m.apply(t, raftfsm.Push{Documents: raftfsm.Documents{
		Modules: []raftfsm.Module{{Name: "lamp", Claims: []string{"lamp"}}}, Assigns: []raftfsm.Assign{{Module: "lamp", Nodes: []string{"alpha"}}},
		Seats: []raftfsm.Seat{{Name: "lamp", Scope: raftfsm.ScopeMesh}},
	}})
	var e *Error
	if _, err := c.MoveSeat(t.Context(), raftfsm.MoveSeat{Seat: "lamp", Node: "alpha"}); !errors.As(err, &e) || e.Code != "no-lease" || e.Status != http.StatusConflict {
		t.Errorf("a node without a lease: %+v", err)
	}
	m.apply(t, raftfsm.OpenSession{Node: "n1", Incarnation: "x", TTL: time.Second})
	done, err := c.MoveSeat(t.Context(), raftfsm.MoveSeat{Seat: "lamp", Node: "alpha"})
	if err != nil || done.Index != m.state.Index || m.state.Seats["lamp"].Want != "lamp@alpha" {
		t.Errorf("%+v, %v: the seat is %+v", done, err, m.state.Seats["lamp"])
	}
}

func TestTheOtherRoutes(t *testing.T) {
	m := newMesh(t)
	c := client(t, serve(t, m))
	d, err := c.Detail(t.Context(), "shop@alpha/db")
	want := Detail{Tries: []Try{{Key: "mint shop@alpha/db", Class: "unreachable", Tries: 3}}, Problem: "beta does not answer"}
	if diff := cmp.Diff(want, d); diff != "" || err != nil {
		t.Errorf("detail: %v %s", err, diff)
	}
	login, err := c.AddBusCredential(t.Context(), "UX", time.Hour)
	if err != nil || login.Calls != "call.alpha._eye" || !strings.HasSuffix(login.Actor, "@alpha") {
		t.Errorf("bus credential: %+v, %v", login, err)
	}
	if _, err := c.AddBusCredential(t.Context(), "UX", 2*time.Hour); err == nil || !strings.Contains(err.Error(), "too long") {
		t.Errorf("a bus credential that is refused: %v", err)
	}
	if all, err := c.BusCredentials(t.Context()); err != nil || len(all) != 1 || all[0] != login.BusCredential {
		t.Errorf("bus credentials: %+v, %v", all, err)
	}
	if err := c.RemoveBusCredential(t.Context(), "eye"); err != nil || len(m.keys) != 0 {
		t.Errorf("after its removal: %+v, %v", m.keys, err)
	}
	v, err := c.Verify(t.Context())
	if err != nil || len(v.Findings) != 1 || v.Findings[0].Node != "beta" {
		t.Errorf("verify: %+v, %v", v, err)
	}
	if token, err := c.Token(t.Context(), time.Hour); err != nil || !strings.HasSuffix(token, "@alpha, 1h0m0s") {
		t.Errorf("token: %q, %v", token, err)
	}
	var e *Error
	if _, err := c.Token(t.Context(), -1); !errors.As(err, &e) || e.Status != http.StatusBadRequest {
		t.Errorf("a token of the past: %v", err)
	}
	if err := c.RemoveNode(t.Context(), "omega"); !errors.As(err, &e) || e.Code != "no-node" || len(e.Candidates) != 1 {
		t.Errorf("node rm: %+v", err)
	}
	if err := c.Leave(t.Context(), false); !errors.As(err, &e) || e.Code != CodeTimeout || e.Status != http.StatusGatewayTimeout {
		t.Errorf("leave: %+v", err)
	}
	r, err := c.Call(t.Context(), "store.size", []byte(`{"a":"<1>"}`), 0)
	if err != nil || string(r.Data) != `{"a":"<1>"}` || r.Epoch != 7 || r.Node != "alpha" {
		t.Errorf("call: %+v, %v", r, err)
	}
	if _, err = c.Call(t.Context(), "store.text", nil, 0); !errors.As(err, &e) || e.Code != CodeBadReply {
		t.Errorf("a reply that is not JSON: %+v", err)
	}
	if _, err = c.Call(t.Context(), "x.y", nil, 0); !errors.As(err, &e) || e.Code != "unknown" {
		t.Errorf("a call of nothing: %+v", err)
	}
	m.fail = errors.New("no quorum: beta and gamma do not answer")
	if _, err = c.Push(t.Context(), Push{Documents: documents("shop")}); !errors.As(err, &e) || e.Status != http.StatusServiceUnavailable || e.Text != m.fail.Error() {
		t.Errorf("a push without a quorum: %+v", err)
	}
}

func TestLogsAreStreamed(t *testing.T) {
	c := client(t, serve(t, newMesh(t)))
	var out bytes.Buffer
	if err := c.Logs(t.Context(), "shop@alpha", 5, false, &out); err != nil || out.String() != "shop@alpha 5\n" {
		t.Errorf("logs: %q, %v", out.String(), err)
	}
	var e *Error
	if err := c.Logs(t.Context(), "gone", 5, false, &out); !errors.As(err, &e) || e.Code != "no-assignment" {
		t.Errorf("logs of nothing: %+v", err)
	}
	if err := c.Logs(t.Context(), "breaks", 5, false, &out); !errors.As(err, &e) || e.Text != "read: input/output error" {
		t.Errorf("an error in the middle: %+v", err)
	}
	if err := c.Logs(t.Context(), "shop@alpha", 20_000, false, &out); !errors.As(err, &e) || e.Status != http.StatusBadRequest {
		t.Errorf("too many lines: %+v", err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- c.Logs(ctx, "shop@alpha", 1, true, w) }()
	line := make([]byte, 64)
	if n, err := r.Read(line); err != nil || string(line[:n]) != "shop@alpha 1\n" {
		t.Errorf("the first line of a followed log: %q, %v", line[:n], err)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("the end of a followed log: %v", err)
	}
}

// raw sends bytes as they are.
func raw(t *testing.T, path, request string) (status int, body Error) {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go io.WriteString(c, request) // it ends with c: a refusal may come before it is read whole
	b, err := io.ReadAll(c)
	if err != nil && len(b) == 0 {
		t.Fatal(err)
	}
	head, rest, _ := strings.Cut(string(b), "\r\n\r\n")
	if _, err := fmt.Sscanf(head, "HTTP/1.1 %d", &status); err != nil {
		t.Fatalf("no HTTP: %q", b)
	}
	if err := json.Unmarshal([]byte(rest), &body); err != nil {
		t.Fatalf("the error is not JSON: %q", rest)
	}
	return status, body
}

func post(path, body string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: meshd\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
}

func TestBadRequestsAreRefused(t *testing.T) {
	m := newMesh(t)
	path := serve(t, m)
	for name, c := range map[string]struct {
		request string
		status  int
		code    string
		says    string
	}{
		"not JSON":        {post("/v1/push", "{documents"), 400, CodeBadRequest, "invalid character"},
		"unknown field":   {post("/v1/push", `{"Documents":{},"Force":true}`), 400, CodeBadRequest, `unknown field "Force"`},
		"unknown inside":  {post("/v1/push", `{"Documents":{"Modules":[{"Nmae":"x"}]}}`), 400, CodeBadRequest, `"Nmae"`},
		"two values":      {post("/v1/rm", `{"What":"seat","Name":"x"}{}`), 400, CodeBadRequest, "something follows"},
		"empty":           {post("/v1/rm", ""), 400, CodeBadRequest, "EOF"},
		"too big":         {post("/v1/push", `{"At":1,"x":"`+strings.Repeat("a", MaxBody)+`"}`), 413, CodeTooBig, "4 MiB"},
		"no such route":   {post("/v1/format", "{}"), 404, CodeBadRequest, "/v1/format"},
		"wrong method":    {"GET /v1/push HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n", 404, CodeBadRequest, "GET /v1/push"},
		"bad index":       {"GET /v1/overview?after=x HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n", 400, CodeBadRequest, "index"},
		"wait too long":   {"GET /v1/overview?after=1&wait=1h HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n", 400, CodeBadRequest, "wait"},
		"detail of what":  {"GET /v1/detail HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n", 400, CodeBadRequest, "a detail is of"},
		"refused by rule": {post("/v1/rm", `{"What":"seat","Name":"x"}`), 409, "no-seat", "no seat"},
	} {
		t.Run(name, func(t *testing.T) {
			status, e := raw(t, path, c.request)
			if status != c.status || e.Code != c.code || !strings.Contains(e.Text, c.says) {
				t.Errorf("got %d %+v, want %d %s with %q", status, e, c.status, c.code, c.says)
			}
		})
	}
	if m.state.Index != 2 { // the init, and the refusal
		t.Errorf("index %d: a refused request reached the log", m.state.Index)
	}
}

func TestSocketFile(t *testing.T) {
	m := newMesh(t)
	path := serve(t, m)
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o660 {
		t.Errorf("mode %v, %v; want 0660", st.Mode(), err)
	}
	if st, err = os.Stat(filepath.Dir(path)); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("mode of the directory %v, %v; want 0755", st.Mode(), err)
	}
	if _, err := Listen(path); err == nil || !strings.Contains(err.Error(), "another meshd") {
		t.Errorf("listening twice: %v", err)
	}
	if _, err := Listen("/tmp/" + strings.Repeat("a", 110)); err == nil || !strings.Contains(err.Error(), "103 bytes") {
		t.Errorf("a long path: %v", err)
	}

	stale := filepath.Join(t.TempDir(), "meshd.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	l, err := Listen(stale)
	if err != nil {
		t.Fatalf("in place of a dead socket: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("the socket stays after its node: %v", err)
	}
}

func TestNobodyThere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meshd.sock")
	_, err := client(t, path).Overview(t.Context())
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeNoNode || !strings.Contains(e.Error(), path) || !strings.Contains(e.Remedy, "meshd start") {
		t.Errorf("without a node: %v", err)
	}
}

func TestFindSocket(t *testing.T) {
	t.Setenv("MESHD_SOCKET", "/x/y.sock")
	if got := FindSocket(); got != "/x/y.sock" {
		t.Errorf("FindSocket() = %q, want what MESHD_SOCKET says", got)
	}
	t.Setenv("MESHD_SOCKET", "")
	if got := FindSocket(); got != DefaultSocket() && got != systemSocket {
		t.Errorf("FindSocket() = %q", got)
	}
}

func TestServeEndsWithALongPollOpen(t *testing.T) {
	m := newMesh(t)
	l, err := Listen(filepath.Join(t.TempDir(), "meshd.sock"))
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Reader: m, Writer: m, Caller: m, Members: m, Bus: m, Logs: m, Node: "alpha", Log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l) }()
	c := client(t, l.(*socket).path)
	asked := make(chan error, 1)
	go func() { _, err := c.Newer(context.Background(), 99, MaxWait); asked <- err }()
	if _, err := c.Overview(t.Context()); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-served; err != nil {
		t.Errorf("serve: %v", err)
	}
	if err := <-asked; err == nil {
		t.Error("a long poll outlived its server and had an answer")
	}
}
