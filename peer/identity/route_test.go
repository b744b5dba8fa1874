package identity

import (
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// The bus gives Route and Pin to a NATS server, which clones the configuration
// and plays both roles with it. Two such servers meet under one pin; one that was
// removed gets no route.
func TestRoutesOfNATSServers(t *testing.T) {
	mesh := newMesh(t)
	alpha, beta, removed := mesh.node(t, "alpha"), mesh.node(t, "beta"), mesh.node(t, "gamma")
	asked := make(chan struct{}, 1)
	alpha.cred.Allow = func(id string) error {
		if id != removed.id() {
			return nil
		}
		select {
		case asked <- struct{}{}:
		default:
		}
		return errors.New("removed from the mesh")
	}
	hub := startNATS(t, mesh, alpha, nil, beta, removed)

	out := startNATS(t, mesh, removed, hub, alpha)
	select {
	case <-asked:
	case <-time.After(10 * time.Second):
		t.Fatal("the removed node was never judged")
	}
	in := startNATS(t, mesh, beta, hub, alpha)
	waitFor(t, "a route", func() bool { return in.NumRoutes() > 0 && hub.NumRoutes() == in.NumRoutes() })
	if n := out.NumRoutes(); n != 0 {
		t.Errorf("the removed node has %d routes", n)
	}
}

// startNATS runs a server with routes as n, which dials the server given and
// takes the keys of peers.
func startNATS(t *testing.T, mesh *testMesh, n *node, dial *server.Server, peers ...*node) *server.Server {
	t.Helper()
	pins := server.PinnedCertSet{}
	for _, p := range peers {
		pins[Pin(p.keys.Public())] = struct{}{}
	}
	opts := &server.Options{
		ServerName: n.id(), Host: "127.0.0.1", Port: -1, NoSigs: true, NoLog: true,
		Cluster: server.ClusterOpts{
			Name: mesh.id, Host: "127.0.0.1", Port: -1, Advertise: "127.0.0.1:1", NoAdvertise: true,
			PoolSize: 1, TLSConfig: n.cred.Route(), TLSTimeout: 2, TLSPinnedCerts: pins,
		},
	}
	if dial != nil {
		opts.Routes = []*url.URL{{Scheme: "nats-route", Host: dial.ClusterAddr().String()}}
	}
	s, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	waitFor(t, "the route port", func() bool { return s.ClusterAddr() != nil })
	return s
}

func waitFor(t *testing.T, what string, holds func() bool) {
	t.Helper()
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	limit := time.After(10 * time.Second)
	for !holds() {
		select {
		case <-poll.C:
		case <-limit:
			t.Fatalf("no %s after 10 s", what)
		}
	}
}
