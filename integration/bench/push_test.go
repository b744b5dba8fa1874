package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"meshd/integration"
	"meshd/peer/api"
	"meshd/peer/manifest"
	"meshd/provision"
	"meshd/provision/postgres"
	"meshd/provision/postgres/pgtest"
	"meshd/raftfsm"
)

const requirement = "db"

const providerYAML = `module: postgres
provides:
  postgres-database: {admin: "file:%s", address: "127.0.0.1:%d"}
---
assign: postgres
node: alpha
as: pg-main
`

const consumerYAML = `module: %[1]s
run: {exec: [%[2]s, %[3]s]}
requires:
  %[4]s: {kind: postgres-database, provider: pg-main}
---
assign: %[1]s
node: gamma
`

// hops are the phases of a binding on its way, each seen from the node that was
// pushed on.
var hops = []raftfsm.Phase{raftfsm.PhaseWaiting, raftfsm.PhaseStaged, raftfsm.PhaseMinted, raftfsm.PhaseDelivered, raftfsm.PhaseInUse}

// benchPush pushes new consumers on beta, one after another, for gamma, of a
// PostgreSQL on alpha. Between two pushes it takes the machine's own time for
// each part, so that what else the machine does falls on all alike.
func benchPush(b *testing.B, m *integration.Mesh, server *pgtest.Server, dir string) {
	admin := filepath.Join(dir, "admin")
	if err := os.WriteFile(admin, []byte(server.AdminURL()), 0o600); err != nil {
		b.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	n, err := m.Node("beta")
	if err != nil {
		b.Fatal(err)
	}
	client := api.NewClient(n.Socket())
	defer client.Close()
	p := &pushes{b: b, client: client, server: server, self: self, hops: map[raftfsm.Phase][]time.Duration{}}
	p.push(fmt.Sprintf(providerYAML, admin, server.Port))
	p.until(func(o api.Overview) bool { return o.State.Providers["pg-main/postgres-database"].Ready })
	for i := range repeats {
		p.one(fmt.Sprintf("app-%d", i))
		p.alone(fmt.Sprintf("alone_%d", i), filepath.Join(dir, "alone"))
		p.commit = append(p.commit, timed(b, func() error {
			_, err := client.Token(b.Context(), time.Minute)
			return err
		}))
	}
	p.report()
}

// pushes are the measurements, one of each for every push.
type pushes struct {
	b      *testing.B
	client *api.Client
	server *pgtest.Server
	self   string // path of the program that logs in

	total  []time.Duration
	hops   map[raftfsm.Phase][]time.Duration // since the hop before
	sql    []time.Duration                   // what the mesh does at the server, by one client
	start  []time.Duration                   // of the program, until it has logged in
	commit []time.Duration                   // of one small entry
}

func (p *pushes) push(yaml string) {
	p.b.Helper()
	parsed, err := manifest.Parse(manifest.Source{Name: "bench.yaml", Data: []byte(yaml)})
	if err != nil {
		p.b.Fatal(err)
	}
	if _, err := p.client.Push(p.b.Context(), api.Push{Documents: parsed.Documents}); err != nil {
		p.b.Fatal(err)
	}
}

// until waits for what beta's own copy of the log says.
func (p *pushes) until(reached func(api.Overview) bool) {
	p.b.Helper()
	ctx, cancel := context.WithTimeout(p.b.Context(), within)
	defer cancel()
	o, err := p.client.Overview(ctx)
	for err == nil && !reached(o) {
		o, err = p.client.Newer(ctx, o.Index, time.Second)
	}
	if err != nil {
		p.b.Fatal(err)
	}
}

// one pushes a consumer, and takes the time of each hop.
func (p *pushes) one(name string) {
	p.b.Helper()
	began := time.Now()
	last, next := began, 0
	p.push(fmt.Sprintf(consumerYAML, name, p.self, holdVerb, requirement))
	p.until(func(o api.Overview) bool {
		now := time.Now()
		for is := o.State.Bindings[name+"@gamma/"+requirement].Phase().Rank(); next < len(hops) && hops[next].Rank() <= is; next++ {
			p.hops[hops[next]] = append(p.hops[hops[next]], now.Sub(last))
			last = now
		}
		return next == len(hops)
	})
	p.total = append(p.total, last.Sub(began))
}

// alone does the same without a mesh: the statements by one client, and then the
// program, started by nobody but this.
func (p *pushes) alone(name, dir string) {
	p.b.Helper()
	kind := postgres.Kind{}
	at := provision.Address{Host: p.server.Host, Port: p.server.Port, TLS: provision.Off}
	login := provision.Login{Name: name + "_1", Secret: strings.Repeat("x", 40)}
	res := provision.Resource{ID: name, Name: name}
	fields := kind.Fields(at, res, login)
	p.sql = append(p.sql, timed(p.b, func() error {
		server, err := kind.Open(provision.Config{Mesh: "bench", Address: at, Options: map[string]string{"admin": p.server.AdminURL()}})
		if err != nil {
			return err
		}
		ctx := p.b.Context()
		return errors.Join(server.Ensure(ctx, res, login), server.Verify(ctx, res, login), kind.Check(ctx, fields), server.Close())
	}))
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, requirement), 0o700),
		os.WriteFile(filepath.Join(dir, requirement, "uri"), []byte(fields["uri"]), 0o600)); err != nil {
		p.b.Fatal(err)
	}
	d, stop, err := untilSays("logged in", []string{"SERVICE_BINDING_ROOT=" + dir}, p.self, holdVerb)
	if err != nil {
		p.b.Fatal(err)
	}
	stop()
	p.start = append(p.start, d)
}

func (p *pushes) report() {
	var left []time.Duration
	for i, total := range p.total {
		left = append(left, total-p.sql[i]-p.start[i])
	}
	allowed := commitsAllowed*median(p.commit) + extraAllowed
	var text strings.Builder
	fmt.Fprintf(&text, "push to in-use, %d pushes of new consumers\n", len(p.total))
	fmt.Fprintf(&text, "  total          %s\n", spread(p.total))
	fmt.Fprintf(&text, "  the SQL alone  %s\n", spread(p.sql))
	fmt.Fprintf(&text, "  start alone    %s\n", spread(p.start))
	fmt.Fprintf(&text, "  left           %s\n", spread(left))
	fmt.Fprintf(&text, "  one commit     %s\n", spread(p.commit))
	fmt.Fprintf(&text, "  allowed        %s, %d commits + %s: %s\n", ms(allowed), commitsAllowed, extraAllowed, verdict(median(left) <= allowed))
	fmt.Fprintf(&text, "  medians of the hops:")
	for _, hop := range hops {
		fmt.Fprintf(&text, " %s %.0f", hop, median(p.hops[hop]).Seconds()*1e3)
	}
	p.b.Log(text.String())
	p.b.ReportMetric(0, "ns/op")
	p.b.ReportMetric(median(p.total).Seconds()*1e3, "total-ms")
	p.b.ReportMetric(median(left).Seconds()*1e3, "left-ms")
	p.b.ReportMetric(allowed.Seconds()*1e3, "allowed-ms")
}
