package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"github.com/nats-io/nkeys"
)

func TestConfigFaultsAreAllReported(t *testing.T) {
	_, err := Start(t.Context(), Config{NodeName: "A", ClientPort: -1, RouteAddr: "x"})
	if err == nil {
		t.Fatal("it started")
	}
	for _, w := range []string{"mesh has no id", "node has no id", `node "A"`, "client port -1", `route address "x"`, "TLS", "no log", "no clock"} {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error does not say %q: %v", w, err)
		}
	}
}

// TestTakenPortFailsTheStart: the server itself only logs it, and would run on without its listener.
func TestTakenPortFailsTheStart(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()
	ca := newAuthority(t)
	conf, _ := ca.issue(t, "id-alpha")
	base := Config{Mesh: "m", NodeID: "id-alpha", NodeName: "alpha", RouteAddr: "127.0.0.1:0", RouteTLS: conf, Log: slog.New(&lines{}), Clock: monotonic}
	client, route := base, base
	client.ClientPort = taken.Addr().(*net.TCPAddr).Port
	route.RouteAddr = taken.Addr().String()
	for name, c := range map[string]Config{"client": client, "route": route} {
		b, err := Start(t.Context(), c)
		if err == nil {
			check(t, b.Close(within(t, patience)))
			t.Fatalf("%s port: it started", name)
		}
		if !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("%s port: error is %v", name, err)
		}
	}
}

// TestAStartWaitsForASlowMachineAndNotForAnEndedOne: a log-in to a server in this process is late only
// where the machine is.
func TestAStartWaitsForASlowMachineAndNotForAnEndedOne(t *testing.T) {
	m := newMesh(t, "alpha")
	h := m.nodes["alpha"].host
	opts, err := h.options(wiring{})
	must(t, err)
	if d := time.Duration(opts.AuthTimeout * float64(time.Second)); d != startLimit {
		t.Errorf("the server gives a log-in %v, want %v", d, startLimit)
	}
	for _, nc := range h.conns() {
		if nc.Opts.Timeout != startLimit {
			t.Errorf("our own connection gives the server %v, want %v", nc.Opts.Timeout, startLimit)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	conf, _ := m.ca.issue(t, "id-beta")
	_, err = Start(ctx, Config{Mesh: "m", NodeID: "id-beta", NodeName: "beta", RouteAddr: "127.0.0.1:0", RouteTLS: conf, Log: slog.New(&lines{}), Clock: monotonic})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a start that is called off: %v", err)
	}
}

// TestModulesOutliveARestart: the client port is kept, so a module finds its new meshd by itself.
func TestModulesOutliveARestart(t *testing.T) {
	m := newMesh(t, "alpha")
	m.hold("store", "alpha", 1, says("alpha"), "query")
	shop := m.module("alpha", "shop", query)
	m.apply()
	shop.connect(nats.ReconnectWait(5*time.Millisecond), nats.MaxReconnects(-1), nats.ReconnectJitter(0, 0), nats.IgnoreAuthErrorAbort())
	alpha := m.nodes["alpha"]
	layout, conf := m.of("alpha"), alpha.cfg
	conf.ClientPort, conf.RouteAddr = alpha.ClientPort(), alpha.RouteAddr()
	must(t, alpha.Close(within(t, patience)))
	if err := alpha.Apply(layout); err == nil {
		t.Error("a closed bus took a layout")
	}
	_, err := alpha.Call(within(t, patience), Caller{Node: "alpha"}, query, nil)
	wantCode(t, err, CodeUnreachable, "stopping")
	alpha.Bus, err = Start(t.Context(), conf)
	must(t, err)
	if alpha.ClientPort() != conf.ClientPort || alpha.RouteAddr() != conf.RouteAddr {
		t.Fatal("ports were not kept")
	}
	m.apply()
	wait(t, "the module to be back", shop.IsConnected)
	r, err := shop.call(query, "again")
	must(t, err)
	if string(r.Data) != "alpha to alpha/shop: query again" {
		t.Errorf("answer is %q", r.Data)
	}
}

func TestCloseWaitsForHandlers(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	inside, release := make(chan struct{}, 1), make(chan struct{})
	m.hold("store", "alpha", 1, func(context.Context, Call) ([]byte, error) {
		inside <- struct{}{}
		<-release
		return []byte("late"), nil
	}, "query")
	m.apply()
	alpha, beta := m.nodes["alpha"], m.nodes["beta"]
	done := make(chan error, 1)
	go func() {
		r, err := beta.Call(context.Background(), Caller{Node: "beta"}, query, nil)
		if err == nil && string(r.Data) != "late" {
			err = fmt.Errorf("answer is %q", r.Data)
		}
		done <- err
	}()
	<-inside
	closed := make(chan error, 1)
	go func() { closed <- alpha.Close(within(t, patience)) }()
	<-alpha.work.quit
	_, err := beta.Call(within(t, time.Second), Caller{Node: "beta"}, query, nil)
	wantCode(t, err, CodeUnreachable, "alpha is stopping")
	close(release)
	must(t, <-done)
	must(t, <-closed)
}

func TestCloseGivesUpOnAHandlerThatHangs(t *testing.T) {
	m := newMesh(t, "alpha")
	inside := make(chan struct{})
	ended := make(chan struct{})
	m.hold("store", "alpha", 1, func(ctx context.Context, _ Call) ([]byte, error) {
		defer close(ended)
		close(inside)
		<-ctx.Done()
		return nil, ctx.Err()
	}, "query")
	m.apply()
	alpha := m.nodes["alpha"]
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		if _, err := alpha.Call(within(t, patience), Caller{Node: "alpha"}, query, nil); err == nil {
			t.Error("it was answered")
		}
	}()
	<-inside
	err := alpha.Close(within(t, 50*time.Millisecond))
	if err == nil || !strings.Contains(err.Error(), "running calls") {
		t.Errorf("close says %v", err)
	}
	<-ended
	<-asked
}

// TestExpulsion: a member that is left out is cut off at once and stays out, and those that stay
// neither lose a route nor fill their logs with attempts to reach it.
func TestExpulsion(t *testing.T) {
	m := newMesh(t, "alpha", "beta", "gamma", "delta")
	m.hold("store", "alpha", 1, says("alpha"), "query")
	m.apply()
	var before atomic.Int64
	for _, n := range m.nodes {
		_, err := n.Call(within(t, patience), Caller{Node: n.name}, query, nil)
		must(t, err)
		before.Add(1)
	}
	out := m.nodes["gamma"]
	delete(m.dir.Nodes, "gamma")
	rest := []*node{m.nodes["alpha"], m.nodes["beta"], m.nodes["delta"]}
	marks := map[string]int{}
	for _, n := range rest {
		marks[n.name] = len(n.log.since(0))
		must(t, n.Apply(m.of(n.name)))
	}
	gone := func() bool {
		for _, n := range rest {
			if n.host.srv.NumRoutes() != 6 {
				return false
			}
		}
		return out.host.srv.NumRoutes() == 0
	}
	wait(t, "the routes of gamma to close", gone)
	// Gamma, which does not know, redials once a second. Let it be refused a few times.
	refused := func(n *node) (tries int, other []string) {
		for _, line := range n.log.since(marks[n.name]) {
			if strings.Contains(line, "not pinned") || strings.Contains(line, "remote error: tls") || strings.Contains(line, "handshake error") {
				tries++
			} else {
				other = append(other, line)
			}
		}
		return tries, other
	}
	wait(t, "gamma to be refused three times", func() bool { n, _ := refused(rest[0]); return n >= 3 })
	if !gone() {
		t.Error("gamma is back")
	}
	for _, n := range rest {
		tries, other := refused(n)
		if tries > 60 || len(other) > 0 {
			t.Errorf("%s logged %d refusals, and %q", n.name, tries, other)
		}
		peers, err := n.Routes()
		must(t, err)
		if len(peers) != 2 || slices.Contains(peers, out.id) {
			t.Errorf("%s has routes to %v", n.name, peers)
		}
		_, err = n.Call(within(t, patience), Caller{Node: n.name}, query, nil)
		must(t, err)
	}
	_, err := out.Call(within(t, time.Second), Caller{Node: "gamma"}, query, nil)
	wantCode(t, err, CodeUnreachable, "alpha is silent")
	// It may come back when it is listed again.
	m.dir.Nodes["gamma"] = Node{}
	m.apply()
	m.waitRoutes()
}

// TestStrangerOfTheSameAuthority: a certificate of the mesh's CA is not enough for a route.
func TestStrangerOfTheSameAuthority(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	stranger := m.start("zeta")
	must(t, stranger.Apply(m.of("zeta")))
	wait(t, "alpha to refuse it", func() bool {
		return slices.ContainsFunc(m.nodes["alpha"].log.since(0), func(s string) bool { return strings.Contains(s, "handshake error") })
	})
	if n := stranger.host.srv.NumRoutes(); n != 0 {
		t.Errorf("the stranger has %d routes", n)
	}
	if n := m.nodes["alpha"].host.srv.NumRoutes(); n != 3 {
		t.Errorf("alpha has %d routes, want 3", n)
	}
}

// TestMembersComeAndGoUnderCalls: six joins and six expulsions of one node; calls between the others
// all succeed.
func TestMembersComeAndGoUnderCalls(t *testing.T) {
	m := newMesh(t, "alpha", "beta", "gamma")
	m.hold("store", "beta", 1, says("beta"), "query")
	m.apply()
	stop := make(chan struct{})
	var callers sync.WaitGroup
	for _, name := range []string{"alpha", "beta"} {
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := m.nodes[name].Call(context.Background(), Caller{Node: name}, query, nil); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	member := m.dir.Nodes["gamma"]
	for range 6 {
		delete(m.dir.Nodes, "gamma")
		m.apply()
		wait(t, "gamma to be out", func() bool { return m.nodes["alpha"].host.srv.NumRoutes() == 3 })
		m.dir.Nodes["gamma"] = member
		m.apply()
		m.waitRoutes()
	}
	close(stop)
	callers.Wait()
}

// TestStockClientSeesAnnouncements does what `nats micro info` does: one request, many answers.
func TestStockClientSeesAnnouncements(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	m.hold("store", "beta", 8, says("beta"), "query", "databases")
	m.tools("alpha", "pg@alpha", says("pg"), "size")
	m.dir.Nodes["beta"].Seats["clock"] = []string{"now"}
	m.nodes["beta"].layout.Services = append(m.nodes["beta"].layout.Services,
		Service{Scope: ScopeNode, Seat: "clock", Assignment: "ntp", Verbs: []string{"now"}, Handler: says("clock")})
	key, err := nkeys.CreateUser()
	must(t, err)
	public, err := key.PublicKey()
	must(t, err)
	alpha := m.nodes["alpha"]
	alpha.layout.Operators = []Operator{{Name: "eye", PublicKey: public}}
	m.apply()
	_, err = m.nodes["beta"].Call(within(t, patience), Caller{Node: "beta"}, query, nil)
	must(t, err)
	eye, err := nats.Connect(alpha.ClientURL(), nats.Nkey(public, key.Sign), nats.CustomInboxPrefix(OperatorInbox("alpha", "eye")),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	must(t, err)
	defer eye.Close()
	ask := func(subject string, want int) []*nats.Msg {
		t.Helper()
		var got []*nats.Msg
		wait(t, fmt.Sprintf("%d answers to %s", want, subject), func() bool {
			inbox := eye.NewInbox()
			sub, err := eye.SubscribeSync(inbox)
			must(t, err)
			defer func() { check(t, sub.Unsubscribe()) }()
			must(t, eye.PublishRequest(subject, inbox, nil))
			got = nil
			for {
				msg, err := sub.NextMsg(200 * time.Millisecond)
				if err != nil {
					break
				}
				got = append(got, msg)
			}
			return len(got) == want
		})
		return got
	}
	var seen []string
	for _, msg := range ask("$SRV.INFO", 3) {
		var i micro.Info
		must(t, json.Unmarshal(msg.Data, &i))
		if i.Type != micro.InfoResponseType || i.Version == "" || i.ID == "" {
			t.Errorf("info is %s", msg.Data)
		}
		for _, e := range i.Endpoints {
			seen = append(seen, i.Name+" "+i.Metadata["node"]+" "+i.Metadata["epoch"]+" "+e.Name+" "+e.Subject)
			if e.QueueGroup != "" {
				t.Error("it claims a queue group")
			}
		}
	}
	slices.Sort(seen)
	want := []string{
		"clock beta  now call.*.*.nodeseat.beta.clock.now",
		"pg_alpha alpha  size call.*.*.tool.alpha.pg@alpha.size",
		"store beta 8 databases call.*.*.seat.store.databases",
		"store beta 8 query call.*.*.seat.store.query",
	}
	if !slices.Equal(seen, want) {
		t.Errorf("announced is\n%s", strings.Join(seen, "\n"))
	}
	ask("$SRV.PING", 3)
	ask("$SRV.PING.store", 1)
	ask("$SRV.PING.store.seat_store_beta", 1)
	ask("$SRV.PING.store.other", 0)
	var s micro.Stats
	must(t, json.Unmarshal(ask("$SRV.STATS.store", 1)[0].Data, &s))
	if len(s.Endpoints) != 2 || s.Endpoints[0].NumRequests != 1 || s.Endpoints[0].NumErrors != 0 || s.Started.IsZero() {
		t.Errorf("stats are %+v", s)
	}
	// It calls through its node's meshd, as an operator of that node.
	called, err := eye.Request(OperatorCalls("alpha", "eye")+".seat.store.query", []byte("{}"), patience)
	must(t, err)
	if string(called.Data) != "beta to alpha/(operator): query {}" || called.Header.Get(headerNode) != "beta" {
		t.Errorf("called, it got %q, %v", called.Data, called.Header)
	}
	// It may do nothing else: not in another's name, nor send answers to somebody else's inbox.
	for _, subject := range []string{"call.alpha.eye.seat.store.query", "call.alpha._ear.seat.store.query", "call.beta._eye.seat.store.query", "m.alpha.pg@alpha.tool.size", "_I.alpha.shop.x", "_O.alpha.eye.x"} {
		must(t, eye.Publish(subject, nil))
		must(t, eye.Flush())
		if err := eye.LastError(); err == nil || !strings.Contains(err.Error(), `"`+subject+`"`) {
			t.Errorf("publish %s: %v", subject, err)
		}
	}
	// A seat that is gone is not announced any more, though it still answers.
	m.dir.Seats["store"] = Seat{Verbs: []string{"query"}}
	m.nodes["beta"].layout.Services = m.nodes["beta"].layout.Services[1:]
	m.apply()
	ask("$SRV.PING", 2)
}

// TestReadingTheLog covers what a client can do to the lines that refusals are read from.
func TestReadingTheLog(t *testing.T) {
	m := newMesh(t, "alpha")
	other := m.module("alpha", "other")
	odd := m.module("alpha", "odd")
	m.apply()
	names := []string{"%s%d %q", `x" - "MOD/nkey:` + other.public + `" - Publish Violation - Subject "y"`,
		`"MOD/nkey:` + other.public + `" - Subscription Violation - Subject "y", SID 1`, "a\r\nb"}
	for _, name := range names {
		odd.connect(nats.Name(name))
		must(t, odd.Publish("forbidden.%s.%d", nil))
		must(t, odd.Publish(`quote."`, nil))
		_, err := odd.Subscribe("also.%v", func(*nats.Msg) {})
		must(t, err)
		must(t, odd.PublishRequest("r.alpha.odd.x", "_R_.x", nil))
		must(t, odd.Flush())
	}
	got := map[string]uint64{}
	for _, r := range m.nodes["alpha"].Refusals() {
		got[r.Assignment+" "+r.Action+" "+r.Subject] = r.Count
	}
	for _, want := range []string{"odd publish forbidden.%s.%d", `odd publish quote."`, "odd subscribe also.%v", "odd reply _R_.x"} {
		if got[want] != uint64(len(names)) {
			t.Errorf("%s was counted %d times", want, got[want])
		}
	}
	if len(got) != 4 {
		t.Errorf("refusals are %v", got)
	}
	// The list is bounded, and keeps what is newest.
	odd.connect()
	for i := range 3 * maxRefusals {
		must(t, odd.Publish(fmt.Sprintf("flood.%d", i), nil))
	}
	must(t, odd.Flush())
	list := m.nodes["alpha"].Refusals()
	if len(list) != maxRefusals || list[0].First.After(list[0].Last) || list[0].Subject != fmt.Sprintf("flood.%d", 3*maxRefusals-1) {
		t.Errorf("%d refusals, the newest %s", len(list), list[0].Subject)
	}
}
