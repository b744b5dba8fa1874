package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// eventful is a mesh in which much has happened: a seat that is held and one that
// is dark, a shop in use, a shop that is stuck, one that waits for a provider,
// and data that is retained.
func eventful(t *testing.T) *mesh {
	m := newMesh(t)
	m.push(t, seat+`---
seat: clock
scope: node
verbs: [now]
---
seat: billing
scope: mesh
verbs: [charge]
---
`+database+`---
module: shop
run: {exec: [/usr/local/bin/shop, --serve], user: shop}
claims: [clock]
requires: {db: {kind: postgres-database}}
tools: {size: {exec: [/usr/local/bin/size]}}
calls: [mesh-store.databases]
ready-within: 20s
---
assign: shop
nodes: [beta, gamma]
bind: {db: pg-main}
---
module: report
run: {external: true}
requires: {db: {kind: postgres-database, provider: pg-main}}
---
assign: report
node: beta
---
module: mail
run: {exec: [/usr/local/bin/mail]}
requires: {queue: {kind: amqp-vhost, provider: rabbit}}
---
assign: mail
node: alpha
`)
	m.play(t, provides(pgMain, true, "", ""))
	m.lease(t, "alpha")
	m.do(t, "alpha", raftfsm.Hold{Seat: "mesh-store", Assignment: "pg-main"})
	m.play(t, inUse(shopDB)...)
	m.play(t, process("shop@gamma", "running", ""))
	m.play(t, inUse("report@beta/db")...)
	m.play(t, inUse("shop@beta/db")[:2]...)
	m.play(t, held("shop@beta/db", "consumer", "log in", "unreachable"))
	m.do(t, "alpha", raftfsm.Remove{What: raftfsm.WhatModule, Name: "report"})
	m.tries = []api.Try{
		{Key: "check shop@beta/db 1", Step: "log in", Class: "unreachable", Text: "dial tcp 10.0.0.1:5432: connect: connection refused", Since: noon.Add(15 * time.Second), Tries: 12, Next: noon.Add(95 * time.Second)},
		{Key: "pg-main/postgres-database: withdraw report@beta/db#22", Step: "end sessions", Class: "denied", Text: "permission denied", Since: noon.Add(15 * time.Second), Tries: 2, Next: noon},
	}
	m.over.Refused = []api.Refusal{{Assignment: "shop@gamma", Action: "publish", Subject: "call.beta.>", Count: 3, First: noon.Add(-time.Hour), Last: noon}}
	m.later = 70 * time.Second
	return m
}

func TestListings(t *testing.T) {
	m := eventful(t)
	for _, c := range []struct {
		name string
		code int
		args []string
	}{
		{"status", 2, []string{"status"}},
		{"status-name", 2, []string{"status", "shop"}},
		{"status-ready", 0, []string{"status", "mesh-store"}},
		{"status-unknown", 1, []string{"status", "shpo"}},
		{"status-json", 2, []string{"status", "-o", "json", "shop@beta"}},
		{"node-ls", 0, []string{"node", "ls"}},
		{"providers", 0, []string{"providers"}},
		{"providers-name", 0, []string{"providers", "pg-main"}},
		{"providers-unknown", 1, []string{"providers", "pg"}},
		{"bindings", 0, []string{"bindings"}},
		{"bindings-stuck", 0, []string{"bindings", "shop@beta/db"}},
		{"bindings-in-use", 0, []string{"bindings", "shop@gamma"}},
		{"bindings-unbound", 0, []string{"bindings", "mail"}},
		{"bindings-withdrawn", 0, []string{"bindings", "report@beta/db"}},
		{"bindings-json", 0, []string{"bindings", "-o", "json", "shop@gamma/db"}},
		{"seats", 0, []string{"seats"}},
		{"seats-name", 0, []string{"seats", "mesh-store"}},
		{"seats-dark", 0, []string{"seats", "billing"}},
		{"modules", 0, []string{"modules"}},
		{"modules-name", 0, []string{"modules", "shop"}},
		{"retained", 0, []string{"retained"}},
		{"tools", 0, []string{"tools"}},
		{"tools-json", 0, []string{"tools", "-o", "json"}},
		{"logs-ambiguous", 1, []string{"logs", "shop"}},
		{"logs", 0, []string{"logs", "-n", "7", "mail"}},
		{"logs-none", 0, []string{"logs", "shop@beta"}},
		{"logs-external", 1, []string{"logs", "postgres"}},
		{"token", 0, []string{"token", "--ttl", "30m"}},
		{"node-rm", 0, []string{"node", "rm", "gamma"}},
		{"node-rm-unknown", 1, []string{"node", "rm", "gama"}},
		{"leave", 0, []string{"leave"}},
		{"bad-output", 1, []string{"seats", "-o", "xml"}},
		{"bad-flag", 1, []string{"push", "--force"}},
		{"bad-arguments", 1, []string{"rm", "seat"}},
		{"bad-verb", 1, []string{"bindngs"}},
	} {
		t.Run(c.name, func(t *testing.T) { m.golden(t, c.name, c.code, c.args...) })
	}
}

// TestStatusOnTheWay: the last line is true before anything is overdue as well.
func TestStatusOnTheWay(t *testing.T) {
	m := newMesh(t)
	m.push(t, database+separator+shop)
	m.golden(t, "status-new", 0, "status")
	m.play(t, provides(pgMain, false, badSettings.Step, badSettings.Class))
	m.tries = []api.Try{badSettings}
	m.golden(t, "status-on-the-way", 0, "status", "shop")
	m.later = time.Hour
	m.golden(t, "status-bad-settings", 2, "status", "pg-main")
	m.play(t, append([]func(*mesh) error{provides(pgMain, true, "", "")}, inUse(shopDB)...)...)
	m.play(t, process("shop@gamma", "running", ""))
	m.golden(t, "status-all-ready", 0, "status")
	m.do(t, "beta", raftfsm.Remove{What: raftfsm.WhatModule, Name: "shop"})
	m.later = 0
	m.golden(t, "status-withdrawing", 0, "status", "shop@gamma/db")
	m.over.Self, m.over.Alive["alpha"] = "beta", false
	m.golden(t, "status-of-a-lost-node", 2, "status", "pg-main")
}

func TestRetainedByAProviderThatIsGone(t *testing.T) {
	m := newMesh(t)
	m.push(t, database+separator+shop)
	m.play(t, append([]func(*mesh) error{provides(pgMain, true, "", "")}, inUse(shopDB)...)...)
	m.do(t, "beta", raftfsm.Remove{What: raftfsm.WhatModule, Name: "shop"})
	for id := range m.state.Withdrawals {
		m.play(t, func(m *mesh) error {
			return m.from("pg-main", raftfsm.NodeReport{Withdrawn: []raftfsm.Withdrawn{{ID: id, Ended: 1}}})
		})
	}
	m.do(t, "beta", raftfsm.Remove{What: raftfsm.WhatModule, Name: "postgres"})
	m.golden(t, "retained-gone", 0, "retained")
}

func TestStatusWithoutAQuorum(t *testing.T) {
	m := eventful(t)
	m.over.Quorum, m.over.Leader, m.over.Age = false, "", 2*time.Minute
	m.over.Missing, m.over.Alive = []string{"beta", "gamma"}, map[string]bool{"alpha": true}
	m.golden(t, "status-no-quorum", 2, "status")
	m.over.Alive = map[string]bool{"alpha": true, "beta": true, "gamma": true}
	m.golden(t, "status-silent", 2, "status", "beta")
	for _, args := range [][]string{{"bindings"}, {"modules"}, {"node", "ls"}, {"seats"}, {"providers"}, {"plan", file(t, "db.yaml", database)}} {
		if got := m.command(t, args...); !strings.Contains(strings.ReplaceAll(got.err, "\n", " "), "This is index 22, 2m00s old") {
			t.Errorf("meshd %v without a quorum does not say how old it is: %q", args, got.err)
		}
	}
	m.over.Age = -1
	if got := standing(m.look()); !strings.Contains(got, "This is index 22, its own record: it has heard no leader since it started.") {
		t.Error(got)
	}
	m.over.Quorum, m.over.Leader = true, "beta"
	if got := standing(m.look()); !strings.Contains(got, "index 22, its own record; it is reading what beta, the leader, has since then") {
		t.Error(got)
	}
}

func TestEveryListingHasJSON(t *testing.T) {
	m := eventful(t)
	socket := m.serve(t)
	for _, args := range [][]string{
		{"status"}, {"node", "ls"}, {"providers"}, {"providers", "pg-main"}, {"bindings"}, {"bindings", "shop"}, {"seats"}, {"seats", "billing"},
		{"modules"}, {"modules", "shop"}, {"retained"}, {"tools"}, {"events"}, {"verify"}, {"version"},
	} {
		got := invoke(t.Context(), socket, "", append(args, "-o", "json")...)
		if !json.Valid([]byte(got.out)) || got.code == 1 {
			t.Errorf("meshd %s -o json: exit code %d\n%s%s", strings.Join(args, " "), got.code, got.out, got.err)
		}
		if strings.Contains(got.out, "SEALED") {
			t.Errorf("meshd %s -o json prints a sealed secret", strings.Join(args, " "))
		}
	}
}

func TestNamesOfAnyLengthFit(t *testing.T) {
	m := newMesh(t)
	long := strings.Repeat("abcdefghij", 4)
	m.push(t, fmt.Sprintf("module: %[1]s\nrun: {exec: [/bin/x]}\nrequires: {%[1]s: {kind: %[1]s, provider: %[1]s}}\n---\nassign: %[1]s\nnode: gamma\n", long))
	m.later = time.Hour
	m.golden(t, "status-long-names", 2, "status")
}

func TestCall(t *testing.T) {
	m := eventful(t)
	m.reply = func(target string, data []byte) (api.CallReply, error) {
		if target == "billing.charge" {
			return api.CallReply{}, &raftfsm.Rejection{Code: "no-holder", Text: "seat billing has no holder on record"}
		}
		return api.CallReply{Data: data, Seat: "mesh-store", Epoch: 9, Node: "alpha"}, nil
	}
	socket := m.serve(t)
	for _, c := range []struct {
		stdin string
		args  []string
		want  outcome
	}{
		{"", []string{"call", "mesh-store.query", `{"a": "<1>"}`}, outcome{0, `{"a":"<1>"}` + "\n", ""}},
		{"", []string{"call", "mesh-store.query"}, outcome{0, "{}\n", ""}},
		{"[1]\n", []string{"call", "-v", "mesh-store.query", "-"}, outcome{0, "[1]\n", "seat mesh-store, epoch 9, node alpha\n"}},
		{"", []string{"call", "billing.charge"}, outcome{1, "", "meshd: no-holder: seat billing has no holder on record\n"}},
		{"", []string{"call", "mesh-store.query", "--timeout", "2m"}, outcome{1, "", "meshd: bad-timeout: a call cannot take 2m0s; choose up to 1m0s: what takes longer answers with where it will be seen\n"}},
		{"", []string{"call", "mesh-store.query", "{a"}, outcome{1, "", "meshd: the request is not JSON; write it in single quotes: '{\"key\": \"value\"}'\n"}},
	} {
		if got := invoke(t.Context(), socket, c.stdin, c.args...); got != c.want {
			t.Errorf("meshd %s:\ngot  %+v\nwant %+v", strings.Join(c.args, " "), got, c.want)
		}
	}
}

func TestVerify(t *testing.T) {
	m := newMesh(t)
	m.golden(t, "verify-same", 0, "verify")
	m.unasked = fmt.Errorf("beta does not answer")
	m.golden(t, "verify-unasked", 1, "verify")
	m.finds = []api.Finding{{Node: "beta", Seat: "mesh-store", Text: "announces it, and alpha holds it"}}
	m.golden(t, "verify-differs", 3, "verify")
}

func TestEvents(t *testing.T) {
	m := eventful(t)
	got := m.command(t, "events", "-n", "2")
	lines := strings.Split(strings.TrimSpace(got.out), "\n")
	if got.code != 0 || len(lines) < 2 || !strings.Contains(lines[len(lines)-1], "module report removed") {
		t.Errorf("events: %+v", got)
	}

	ctx, cancel := context.WithCancel(t.Context())
	m.script = []func(*mesh) error{process("mail@alpha", "failed", "no such file")}
	r, w := io.Pipe()
	done := make(chan int, 1)
	socket := m.serve(t)
	go func() {
		done <- Main(ctx, []string{"--socket", socket, "events", "-f", "-n", "1", "-o", "json"}, strings.NewReader(""), w, io.Discard)
		w.Close()
	}()
	d := json.NewDecoder(r)
	for _, want := range []string{"module report removed", "mail@alpha is failed"} {
		var e raftfsm.Event
		if err := d.Decode(&e); err != nil || e.Text != want {
			t.Errorf("got %q, %v, want %q", e.Text, err, want)
		}
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("the end of events -f: exit code %d, want 0", code)
	}
}

func TestCompletion(t *testing.T) {
	m := eventful(t)
	socket := m.serve(t)
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"status", "shop@b"}, []string{"shop@beta", "shop@beta/db"}},
		{[]string{"rm", "seat", ""}, []string{"billing", "clock", "mesh-store"}},
		{[]string{"rm", ""}, []string{"module", "assignment", "seat"}},
		{[]string{"call", "gamma/"}, []string{"gamma/clock.now", "gamma/shop.size"}},
		{[]string{"node", "rm", "g"}, []string{"gamma"}},
		{[]string{"seats", "billing", ""}, nil},
	} {
		got := invoke(t.Context(), socket, "", append([]string{"__complete"}, c.args...)...)
		lines := strings.Split(got.out, "\n")
		i := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, ":") })
		if i < 0 || !slices.Equal(lines[:i], c.want) && (len(c.want) > 0 || i > 0) {
			t.Errorf("completion of %v: %q, want %v", c.args, got.out, c.want)
		}
	}
}

func TestColour(t *testing.T) {
	rows := table{heads: []string{"NODE", "STATE"}, state: 1, rows: [][]string{{"alpha", "up"}, {"beta", "away"}}}
	var plain, coloured1 bytes.Buffer
	rows.write(&plain, "", false)
	rows.write(&coloured1, "", true)
	if strings.Contains(plain.String(), "\x1b") {
		t.Errorf("colour that nobody asked for: %q", plain.String())
	}
	if want := "NODE   STATE\nalpha  \x1b[32mup\x1b[0m\nbeta   \x1b[31maway\x1b[0m\n"; coloured1.String() != want {
		t.Errorf("got  %q\nwant %q", coloured1.String(), want)
	}
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if coloured(f) || coloured(&plain) {
		t.Error("colour on what is no terminal")
	}
}

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0.0s", 250 * time.Millisecond: "0.2s", 12 * time.Second: "12s", 190 * time.Second: "3m10s",
		5*time.Hour + 2*time.Minute: "5h02m", 99 * time.Hour: "4d03h",
	} {
		if got := span(d); got != want {
			t.Errorf("span(%v) = %q, want %q", d, got, want)
		}
	}
}

func TestWrap(t *testing.T) {
	for _, c := range []struct {
		text  string
		width int
		want  []string
	}{
		{"a  b", 10, []string{"a  b"}},
		{"one two three", 7, []string{"one two", "three"}},
		{"abcdefghij", 4, []string{"abcd", "efgh", "ij"}},
		{"", 4, []string{""}},
		{"a\nb", 10, []string{"a b"}},
	} {
		if got := wrap(c.text, c.width); !slices.Equal(got, c.want) {
			t.Errorf("wrap(%q, %d) = %q, want %q", c.text, c.width, got, c.want)
		}
	}
}

// What the leader found is un-ready for as long as it is on record.
func TestADifferenceIsUnready(t *testing.T) {
	m := eventful(t)
	differs := func() (text string) {
		unready, _ := problems(m.look())
		for _, p := range unready {
			if p.State == "differs" {
				text += p.What + " " + p.Name + ": " + p.Text
			}
		}
		return text
	}
	m.do(t, "alpha", raftfsm.Compared{Differences: []raftfsm.Difference{{Seat: "mesh-store", Node: "beta", Text: "answers, and nobody is named"}}})
	if got := differs(); got != "seat mesh-store: beta answers, and nobody is named; meshd verify looks again" {
		t.Errorf("un-ready is %q", got)
	}
	m.do(t, "alpha", raftfsm.Compared{})
	if got := differs(); got != "" {
		t.Errorf("when it is over, un-ready is %q", got)
	}
}
