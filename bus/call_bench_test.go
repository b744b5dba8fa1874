package bus

import (
	"fmt"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// BenchmarkCall tells what a call takes beside a request of NATS alone between the same
// two places, one after the other in turns, so that what else the machine does meets both:
//
//	go test -run '^$' -bench Call -benchtime 5000x ./bus
//
// ratio is of the medians. The limits are what the design allows: 1.3 for a seat that
// meshd answers itself on the same node; from module to module, by way of the meshd of
// each, 2.0 on one node and 1.6 across two.
func BenchmarkCall(b *testing.B) {
	payload := make([]byte, 128)
	echo := func(nc *nats.Conn, subject string) {
		_, err := nc.Subscribe(subject, func(m *nats.Msg) {
			if err := m.Respond(m.Data); err != nil {
				b.Error(err)
			}
		})
		must(b, err)
		must(b, nc.Flush())
	}

	b.Run("built-in, one node", func(b *testing.B) {
		m := newMesh(b, "alpha")
		m.hold("store", "alpha", 2, says("alpha"), "query")
		m.apply()
		alpha := m.nodes["alpha"]
		echo(alpha.host.mesh, "raw.echo")
		beside(b, 1.3, func() error {
			_, err := alpha.Call(b.Context(), Caller{Node: "alpha"}, query, payload)
			return err
		}, func() error {
			_, err := alpha.host.mesh.Request("raw.echo", payload, patience)
			return err
		})
	})
	for _, c := range []struct {
		name  string
		names []string
		limit float64
	}{{"modules, one node", []string{"alpha"}, 2}, {"modules, two nodes", []string{"alpha", "beta"}, 1.6}} {
		b.Run(c.name, func(b *testing.B) {
			m := newMesh(b, c.names...)
			here, there := c.names[0], c.names[len(c.names)-1]
			asked := Target{Node: there, Assignment: "server", Name: "echo"}
			m.tools(there, "server", m.nodes[there].forwarded("server"), "echo")
			caller, callee := m.module(here, "caller", asked), m.module(there, "server")
			m.apply()
			caller.connect()
			callee.connect()
			echo(callee.Conn, Private(there, "server")+".tool.echo")
			from, to := rawPair(b, m, len(c.names))
			echo(to, "raw.echo")
			wait(b, "the raw servers to know of each other", func() bool {
				_, err := from.Request("raw.echo", payload, patience)
				return err == nil
			})
			beside(b, c.limit, func() error {
				got, err := caller.Request(asked.CallSubject(Caller{here, "caller"}), payload, patience)
				if err == nil && len(got.Data) != len(payload) {
					err = fmt.Errorf("the answer is %q %v", got.Data, got.Header)
				}
				return err
			}, func() error {
				_, err := from.Request("raw.echo", payload, patience)
				return err
			})
		})
	}
}

// beside times both in turns and reports their medians and the ratio.
func beside(b *testing.B, limit float64, ours, raw func() error) {
	b.Helper()
	times := [2][]time.Duration{}
	for b.Loop() {
		for i, do := range []func() error{ours, raw} {
			began := time.Now()
			must(b, do())
			times[i] = append(times[i], time.Since(began))
		}
	}
	at := func(i int, share float64) float64 {
		slices.Sort(times[i])
		return float64(times[i][int(share*float64(len(times[i])-1))]) / float64(time.Microsecond)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(at(0, 0.5), "p50-µs")
	b.ReportMetric(at(0, 0.99), "p99-µs")
	b.ReportMetric(at(1, 0.5), "raw-p50-µs")
	b.ReportMetric(at(1, 0.99), "raw-p99-µs")
	b.ReportMetric(at(0, 0.5)/at(1, 0.5), "ratio")
	b.ReportMetric(limit, "allowed-ratio")
}

// rawPair is two clients of one server of NATS alone, or of two with a route between
// them under TLS, as the mesh's.
func rawPair(b *testing.B, m *mesh, servers int) (from, to *nats.Conn) {
	b.Helper()
	var urls []string
	var routes []*url.URL
	for i := range servers {
		o := &server.Options{ServerName: fmt.Sprint("raw-", i), Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, Routes: routes}
		if servers > 1 {
			conf, _ := m.ca.issue(b, o.ServerName)
			o.Cluster = server.ClusterOpts{Name: "raw", Host: "127.0.0.1", Port: server.RANDOM_PORT, TLSConfig: conf, TLSTimeout: patience.Seconds()}
		}
		srv, err := server.NewServer(o)
		must(b, err)
		srv.Start()
		b.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
		wait(b, "the raw server", func() bool { return srv.ReadyForConnections(patience) })
		urls = append(urls, srv.ClientURL())
		if servers > 1 {
			routes = []*url.URL{{Scheme: "nats", Host: srv.ClusterAddr().String()}}
		}
	}
	var conns [2]*nats.Conn
	for i, at := range []string{urls[0], urls[len(urls)-1]} {
		nc, err := nats.Connect(at)
		must(b, err)
		b.Cleanup(nc.Close)
		conns[i] = nc
	}
	return conns[0], conns[1]
}
