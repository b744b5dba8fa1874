package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// TestRights is the whole table of what a module may say, asked of the server itself.
func TestRights(t *testing.T) {
	m := newMesh(t, "alpha")
	m.hold("store", "alpha", 7, says("alpha"), "query", "databases")
	m.tools("alpha", "other", says("other"), "size", "drop")
	m.dir.Nodes["alpha"].Seats["clock"] = []string{"now", "set"}
	shop := m.module("alpha", "shop@alpha", Target{Seat: "store", Name: "query"},
		Target{Node: "alpha", Seat: "clock", Name: "now"}, Target{Node: "beta", Assignment: "other", Name: "size"})
	m.module("alpha", "other")
	m.apply()
	shop.connect()

	publish := map[string]bool{
		"call.alpha.shop@alpha.seat.store.query":         true,
		"call.alpha.shop@alpha.nodeseat.alpha.clock.now": true,
		"call.alpha.shop@alpha.tool.beta.other.size":     true,
		"r.alpha.shop@alpha.X":                           true,

		"call.alpha.shop@alpha.seat.store.databases":     false,
		"call.alpha.shop@alpha.seat.store":               false,
		"call.alpha.shop@alpha.seat.store.query.x":       false,
		"call.alpha.shop@alpha.nodeseat.beta.clock.now":  false,
		"call.alpha.shop@alpha.nodeseat.alpha.clock.set": false,
		"call.alpha.shop@alpha.tool.beta.other.drop":     false,
		"call.alpha.shop@alpha.tool.alpha.other.size":    false,
		"call.alpha.other.seat.store.query":              false,
		"call.beta.shop@alpha.seat.store.query":          false,
		"m.alpha.shop@alpha.tool.x":                      false,
		"m.alpha.other.tool.size":                        false,
		"_I.alpha.shop@alpha.x":                          false,
		"_I.alpha.other.x":                               false,
		"_O.alpha.eye.x":                                 false,
		"_INBOX.x":                                       false,
		"r.alpha.other.x":                                false,
		"r.beta.shop@alpha.x":                            false,
		"node.alpha.seat.store.query":                    false,
		"meshd.survey":                                   false,
		"$SRV.PING":                                      false,
		"$SYS.REQ.SERVER.PING":                           false,
		"$JS.API.INFO":                                   false,
		"anything":                                       false,
	}
	for subject, want := range publish {
		must(t, shop.Publish(subject, nil))
		if got := !shop.refused(subject); got != want {
			t.Errorf("publish %s: allowed is %v, want %v", subject, got, want)
		}
	}
	subscribe := map[string]bool{
		"m.alpha.shop@alpha.>":               true,
		"m.alpha.shop@alpha.seat.store.x":    true,
		"_I.alpha.shop@alpha.>":              true,
		"_I.alpha.shop@alpha.q.*":            true,
		">":                                  false,
		"*":                                  false,
		"m.>":                                false,
		"m.alpha.*.>":                        false,
		"m.alpha.shop@alpha":                 false,
		"m.alpha.other.>":                    false,
		"m.beta.shop@alpha.>":                false,
		"_I.>":                               false,
		"_I.alpha.>":                         false,
		"_I.alpha.other.>":                   false,
		"_O.>":                               false,
		"_INBOX.>":                           false,
		"r.alpha.>":                          false,
		"r.alpha.shop@alpha.>":               false,
		"call.alpha.>":                       false,
		"call.alpha.shop@alpha.>":            false,
		"node.alpha.seat.store.query":        false,
		"node.alpha.shop@alpha.>":            false,
		"seat.store.query":                   false,
		"meshd.survey":                       false,
		"$SRV.>":                             false,
		"$SYS.>":                             false,
		"$SYS.ACCOUNT.>":                     false,
		"$JS.>":                              false,
		"node.alpha.seat.store.databases":    false,
		"call.alpha.other.seat.store.query":  false,
		"node.beta.seat.store.query.and.not": false,
	}
	for subject, want := range subscribe {
		_, err := shop.SubscribeSync(subject)
		must(t, err)
		if got := !shop.refused(subject); got != want {
			t.Errorf("subscribe %s: allowed is %v, want %v", subject, got, want)
		}
	}
	// What is refused is refused to a member of a queue group too.
	_, err := shop.QueueSubscribeSync("m.alpha.other.tool.size", "q")
	must(t, err)
	if !shop.refused("m.alpha.other.tool.size") {
		t.Error("a queue subscription passed")
	}
	if shop.Statistics.Reconnects != 0 || !shop.IsConnected() {
		t.Error("refusals cost the connection")
	}
}

func TestStrangersCannotConnect(t *testing.T) {
	m := newMesh(t, "alpha")
	key, err := nkeys.CreateUser()
	must(t, err)
	public, err := key.PublicKey()
	must(t, err)
	own, err := m.nodes["alpha"].host.keys[0].PublicKey()
	must(t, err)
	for name, opts := range map[string][]nats.Option{
		"anonymous":   nil,
		"unknown key": {nats.Nkey(public, key.Sign)},
		"forged key":  {nats.Nkey(own, key.Sign)},
		"meshd's own key, from outside": {nats.Nkey(own, func(b []byte) ([]byte, error) {
			return m.nodes["alpha"].host.keys[0].Sign(b)
		})},
	} {
		if nc, err := nats.Connect(m.nodes["alpha"].ClientURL(), opts...); err == nil {
			nc.Close()
			t.Errorf("%s: connected", name)
		}
	}
}

// TestForgedSubscriptionCostsThatSubjectOnly is failure B where it hurt last: an old build subscribes
// to the seat itself. The bus refuses that subject, and the same connection goes on serving.
func TestForgedSubscriptionCostsThatSubjectOnly(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	m.hold("store", "alpha", 4, says("alpha"), "query")
	pg := m.module("beta", "pg")
	m.tools("beta", "pg", m.nodes["beta"].forwarded("pg"), "size")
	m.apply()
	pg.connect()
	id, err := pg.GetClientID()
	must(t, err)
	_, err = pg.Subscribe(Private("beta", "pg")+".tool.size", func(msg *nats.Msg) {
		check(t, msg.Respond([]byte("42 for "+msg.Header.Get("Meshd-Caller"))))
	})
	must(t, err)
	stolen := make(chan *nats.Msg, 10)
	for _, subject := range []string{"node.alpha.seat.store.query", "node.beta.seat.store.query", "seat.store.>"} {
		_, err = pg.ChanSubscribe(subject, stolen)
		must(t, err)
	}
	must(t, pg.Flush())
	for range 20 {
		r, err := m.nodes["alpha"].Call(within(t, patience), Caller{Node: "alpha"}, Target{Seat: "store", Name: "query"}, nil)
		must(t, err)
		if r.Node != "alpha" || r.Epoch != 4 {
			t.Fatalf("answered by %s under epoch %d", r.Node, r.Epoch)
		}
		r, err = m.nodes["alpha"].Call(within(t, patience), Caller{Node: "alpha"}, Target{Node: "beta", Assignment: "pg", Name: "size"}, nil)
		must(t, err)
		if string(r.Data) != "42 for alpha/(operator)" || r.Node != "beta" {
			t.Fatalf("tool answered %q from %s", r.Data, r.Node)
		}
	}
	if len(stolen) != 0 {
		t.Errorf("the module received %d calls of a seat it does not hold", len(stolen))
	}
	if now, err := pg.GetClientID(); err != nil || now != id || pg.Statistics.Reconnects != 0 {
		t.Errorf("connection %d became %d (%v)", id, now, err)
	}
	var got []string
	for _, r := range m.nodes["beta"].Refusals() {
		got = append(got, fmt.Sprint(r.Assignment, " ", r.Action, " ", r.Subject, " ", r.Count))
	}
	for _, want := range []string{"pg subscribe node.alpha.seat.store.query 1", "pg subscribe node.beta.seat.store.query 1", "pg subscribe seat.store.> 1"} {
		if !strings.Contains(strings.Join(got, "\n"), want) {
			t.Errorf("refusals %q lack %q", got, want)
		}
	}
}

func TestModuleCallsThroughItsMeshd(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	m.hold("store", "beta", 9, says("beta"), "query")
	query := Target{Seat: "store", Name: "query"}
	typo := Target{Node: "beta", Assignment: "pg", Name: "sizes"}
	m.tools("beta", "pg", says("pg"), "size")
	shop := m.module("alpha", "shop@alpha", query, typo)
	m.apply()
	shop.connect()
	r, err := shop.call(query, "q1")
	must(t, err)
	if string(r.Data) != "beta to alpha/shop@alpha: query q1" {
		t.Errorf("answer is %q", r.Data)
	}
	for header, want := range map[string]string{"Meshd-Seat": "store", "Meshd-Epoch": "9", "Meshd-Node": "beta", "Meshd-Error": ""} {
		if got := r.Header.Get(header); got != want {
			t.Errorf("header %s is %q, want %q", header, got, want)
		}
	}
	r, err = shop.call(typo, "")
	must(t, err)
	if r.Header.Get("Meshd-Error") != "no-such-verb" || r.Header.Get("Nats-Service-Error-Code") != "404" ||
		!strings.Contains(r.Header.Get("Nats-Service-Error"), "it has: size") {
		t.Errorf("error headers are %v", r.Header)
	}
}

// TestReplyElsewhereIsRefused: a module may not make meshd publish to a subject of its choosing.
func TestReplyElsewhereIsRefused(t *testing.T) {
	m := newMesh(t, "alpha")
	ran := make(chan string, 100)
	m.hold("store", "alpha", 1, func(_ context.Context, c Call) ([]byte, error) { ran <- string(c.Data); return nil, nil }, "query")
	query := Target{Seat: "store", Name: "query"}
	shop := m.module("alpha", "shop", query)
	victim := m.module("alpha", "victim")
	m.apply()
	shop.connect()
	victim.connect()
	got := make(chan *nats.Msg, 100)
	for _, subject := range []string{Private("alpha", "victim") + ".>", Inbox("alpha", "victim") + ".>"} {
		_, err := victim.ChanSubscribe(subject, got)
		must(t, err)
	}
	must(t, victim.Flush())
	subject := query.CallSubject(Caller{"alpha", "shop"})
	elsewhere := []string{"m.alpha.victim.tool.x", "_I.alpha.victim.x", "_I.alpha.shop", "_I.alpha.shop.>", "_I.alpha.shop.*",
		"_I.beta.shop.x", "r.alpha.shop.x", "call.alpha.victim.seat.store.query", "node.alpha.seat.store.query", "$SRV.PING", "_I.alpha.shopx.y"}
	for _, reply := range elsewhere {
		must(t, shop.PublishRequest(subject, reply, []byte(reply)))
	}
	_, err := shop.call(query, "honest")
	must(t, err)
	if first := <-ran; first != "honest" || len(ran) != 0 {
		t.Errorf("a call with reply %q ran", first)
	}
	if len(got) != 0 {
		t.Errorf("the victim received %v", (<-got).Subject)
	}
	refused := map[string]bool{}
	for _, r := range m.nodes["alpha"].Refusals() {
		if r.Assignment == "shop" && r.Action == "reply" {
			refused[r.Subject] = true
		}
	}
	for _, reply := range elsewhere {
		if !refused[reply] {
			t.Errorf("refusal of reply %q is not recorded", reply)
		}
	}
}

// TestModuleCannotAnswerForAnother: the reply subject of a forwarded call belongs to its assignment.
func TestModuleCannotAnswerForAnother(t *testing.T) {
	m := newMesh(t, "alpha")
	pg, thief := m.module("alpha", "pg"), m.module("alpha", "thief")
	m.apply()
	pg.connect()
	thief.connect()
	_, err := pg.Subscribe("m.alpha.pg.>", func(msg *nats.Msg) {
		// Even one that knows the reply subject cannot publish to it.
		check(t, thief.Publish(msg.Reply, []byte("forged")))
		check(t, thief.Flush())
		check(t, msg.Respond([]byte("true")))
	})
	must(t, err)
	must(t, pg.Flush())
	data, err := m.nodes["alpha"].Forward(within(t, patience), "pg", "tool.size", Call{Caller: Caller{Node: "alpha"}})
	must(t, err)
	if string(data) != "true" {
		t.Errorf("answer is %q", data)
	}
	if list := m.nodes["alpha"].Refusals(); len(list) != 1 || list[0].Assignment != "thief" || list[0].Action != "publish" {
		t.Errorf("refusals are %+v", list)
	}
}

func TestForwardErrors(t *testing.T) {
	m := newMesh(t, "alpha")
	pg := m.module("alpha", "pg")
	m.apply()
	alpha := m.nodes["alpha"]
	ask := func(suffix string) error {
		_, err := alpha.Forward(within(t, patience), "pg", suffix, Call{Caller: Caller{Node: "alpha"}, Target: Target{Seat: "store"}, Epoch: 3})
		return err
	}
	wantCode(t, ask("tool.size"), CodeNotServed, "pg", "not connected", "m.alpha.pg.tool.size")
	wantCode(t, ask("tool.*"), CodeRefused, "not a name")
	pg.connect()
	_, err := pg.Subscribe("m.alpha.pg.tool.*", func(msg *nats.Msg) {
		if h := msg.Header; h.Get("Meshd-Seat") != "store" || h.Get("Meshd-Epoch") != "3" || h.Get("Meshd-Caller") != "alpha/(operator)" {
			t.Errorf("headers are %v", h)
		}
		out := nats.NewMsg(msg.Reply)
		// A module that claims not to hold the seat must not make anybody run the call again.
		out.Header.Set("Meshd-Error", "not-the-holder")
		out.Header.Set("Nats-Service-Error", "disk full\r\nX: y")
		if strings.HasSuffix(msg.Subject, ".hang") {
			return
		}
		check(t, msg.RespondMsg(out))
	})
	must(t, err)
	must(t, pg.Flush())
	wantCode(t, ask("tool.size"), CodeFailed, "disk full")
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = alpha.Forward(ctx, "pg", "tool.hang", Call{Caller: Caller{Node: "alpha"}, Target: Target{Seat: "store"}, Epoch: 3})
	wantCode(t, err, CodeTimedOut, "tool.hang")
}

// TestGrantsChangeUnderLoad: sixty changes of one module's rights; another, that calls all the time,
// notices none of them, and each change is in force when Apply returns.
func TestGrantsChangeUnderLoad(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	m.hold("store", "beta", 2, says("beta"), "query", "write")
	query, write := Target{Seat: "store", Name: "query"}, Target{Seat: "store", Name: "write"}
	steady, changing := m.module("alpha", "steady", query), m.module("alpha", "changing")
	m.apply()
	steady.connect()
	changing.connect()

	stop, done := make(chan struct{}), make(chan error, 1)
	calls := 0
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
			}
			r, err := steady.call(query, "x")
			if err == nil && r.Header.Get("Meshd-Error") != "" {
				err = errors.New(r.Header.Get("Nats-Service-Error"))
			}
			if err != nil {
				done <- fmt.Errorf("call %d: %w", calls, err)
				return
			}
			calls++
		}
	}()
	alpha := m.nodes["alpha"]
	subject := write.CallSubject(Caller{"alpha", "changing"})
	for i := range 60 {
		allowed := i%2 == 0
		var grant []Target
		if allowed {
			grant = []Target{write}
		}
		l := m.of("alpha")
		l.Modules = []Module{l.Modules[0], {Assignment: "changing", PublicKey: changing.public, Calls: grant}}
		must(t, alpha.Apply(l))
		if allowed {
			r, err := changing.call(write, "y")
			must(t, err)
			if string(r.Data) != "beta to alpha/changing: write y" {
				t.Fatalf("change %d: answer is %q %v", i, r.Data, r.Header)
			}
			continue
		}
		must(t, changing.Publish(subject, nil))
		must(t, changing.Flush())
	}
	close(stop)
	must(t, <-done)
	if steady.Statistics.Reconnects+changing.Statistics.Reconnects != 0 {
		t.Error("a change cut a connection")
	}
	for _, r := range alpha.Refusals() {
		if r.Subject == subject && r.Count == 30 {
			return
		}
	}
	t.Errorf("refusals are %+v, want 30 of %s", alpha.Refusals(), subject)
}

func TestRemovedModuleIsCutAloneAndApplyIsIdempotent(t *testing.T) {
	m := newMesh(t, "alpha")
	gone, stays := m.module("alpha", "gone"), m.module("alpha", "stays")
	m.apply()
	gone.connect(nats.NoReconnect())
	stays.connect()
	alpha := m.nodes["alpha"]
	before := alpha.host.srv.ConfigTime()
	for range 5 {
		m.apply()
	}
	if !alpha.host.srv.ConfigTime().Equal(before) {
		t.Error("an equal layout reloaded the server")
	}
	alpha.layout.Modules = alpha.layout.Modules[1:]
	m.apply()
	wait(t, "the removed module to be cut", gone.IsClosed)
	must(t, stays.Flush())
	if stays.Statistics.Reconnects != 0 {
		t.Error("the other was cut too")
	}
}

// TestARefusalGoesWhenItIsGone: a subscription with the connection that asked for it, a publication when
// it is granted.
func TestARefusalGoesWhenItIsGone(t *testing.T) {
	m := newMesh(t, "alpha")
	m.hold("store", "alpha", 2, says("alpha"), "query")
	m.hold("mail", "alpha", 3, says("alpha"), "send")
	send := Target{Seat: "mail", Name: "send"}
	old, fresh := m.module("alpha", "old"), m.module("alpha", "fresh")
	m.apply()
	alpha := m.nodes["alpha"]
	list := func() string {
		var out []string
		for _, r := range alpha.Refusals() {
			out = append(out, r.Assignment+" "+r.Action+" "+r.Subject)
		}
		slices.Sort(out)
		return strings.Join(out, ", ")
	}
	const stolen = "old subscribe seat.store.query"
	hear := func() {
		old.connect(nats.NoReconnect())
		_, err := old.SubscribeSync("seat.store.query")
		must(t, err)
		must(t, old.Flush())
	}
	fresh.connect()
	hear()
	subject := send.CallSubject(Caller{"alpha", "fresh"})
	must(t, fresh.Publish(subject, nil))
	must(t, fresh.PublishRequest("r.alpha.fresh.x", "_R_.x", nil))
	must(t, fresh.Flush())
	if got := list(); got != "fresh publish "+subject+", fresh reply _R_.x, "+stolen {
		t.Errorf("refused are %s", got)
	}
	first := alpha.Refusals()[2].First

	// A second build of the same beside the first: it is over when both are gone.
	one := old.Conn
	hear()
	one.Close()
	wait(t, "one connection to be gone", func() bool { return alpha.host.srv.NumClients() == 3+2 })
	if r := alpha.Refusals(); !strings.Contains(list(), stolen) || !slices.ContainsFunc(r, func(r Refusal) bool { return r.Count == 2 && r.First.Equal(first) }) {
		t.Errorf("with one of two gone, refused are %+v", r)
	}
	old.Close()
	wait(t, "the old build's refusal to be over", func() bool { return !strings.Contains(list(), stolen) })
	hear()
	if !strings.Contains(list(), stolen) {
		t.Errorf("when it is back, refused are %s", list())
	}

	// The grant ends the refusal of what is granted, and cuts nobody.
	id, err := fresh.GetClientID()
	must(t, err)
	alpha.layout.Modules = slices.Clone(alpha.layout.Modules)
	alpha.layout.Modules[1].Calls = []Target{send}
	m.apply()
	if got := list(); got != "fresh reply _R_.x, "+stolen {
		t.Errorf("after the grant, refused are %s", got)
	}
	r, err := fresh.call(send, "x")
	must(t, err)
	if string(r.Data) != "alpha to alpha/fresh: send x" {
		t.Errorf("granted, it got %q %v", r.Data, r.Header)
	}
	if now, err := fresh.GetClientID(); err != nil || now != id {
		t.Errorf("connection %d became %d (%v)", id, now, err)
	}
	// So does the end of the assignment.
	alpha.layout.Modules = alpha.layout.Modules[1:]
	m.apply()
	wait(t, "the refusal of a removed module to be over", func() bool { return list() == "fresh reply _R_.x" })
}
