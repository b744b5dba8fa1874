package bus

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestSilentPeer: when the network between two nodes swallows everything, both close their routes long
// before a ping would have told them, and a call then works over new ones.
func TestSilentPeer(t *testing.T) {
	m := newMesh(t, "alpha", "beta")
	m.hold("store", "beta", 1, says("beta"), "query")
	m.apply()
	alpha, beta := m.nodes["alpha"], m.nodes["beta"]
	ask := func() error {
		_, err := alpha.Call(within(t, patience), Caller{Node: "alpha"}, query, nil)
		return err
	}
	must(t, ask())
	before := map[*node]map[uint64]bool{alpha: alpha.routeIDs(t), beta: beta.routeIDs(t)}
	for n, ids := range before {
		if len(ids) != 3 {
			t.Fatalf("%s has the routes %v, want three", n.name, ids)
		}
	}
	if cut := swallow(t, ports([]string{alpha.RouteAddr(), beta.RouteAddr()})); cut != 6 {
		t.Fatalf("%d ends of connections were made deaf, want both of three", cut)
	}
	for n, ids := range before {
		wait(t, "the silent routes of "+n.name+" to be closed", func() bool {
			for id := range n.routeIDs(t) {
				if ids[id] {
					return false
				}
			}
			return true
		})
	}
	for n := range before {
		if by := n.host.srv.NumStaleConnectionsRoutes(); by != 0 {
			t.Errorf("%s closed %d of them for want of an answer to a ping", n.name, by)
		}
	}
	m.waitRoutes()
	must(t, ask())
}

// TestRoutesAreWatched: the kernel watches over both ends of every route, and over nothing of a module.
func TestRoutesAreWatched(t *testing.T) {
	m := newMesh(t, "alpha", "beta", "gamma")
	app := m.module("alpha", "app")
	m.apply()
	app.connect()
	var addrs []string
	for _, n := range m.nodes {
		addrs = append(addrs, n.RouteAddr())
	}
	routes, seen, modules := ports(addrs), 0, 0
	clients := m.nodes["alpha"].ClientPort()
	must(t, eachStream(func(fd, local, remote int) error {
		silence, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		must(t, err)
		probes, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE)
		must(t, err)
		switch {
		case routes[local] || routes[remote]:
			seen++
			if silence != int(routeSilence.Milliseconds()) || probes != 1 {
				t.Errorf("route from port %d to %d: silence of %d ms, keep-alive %d", local, remote, silence, probes)
			}
		case local == clients:
			modules++
			if silence != 0 || probes != 0 {
				t.Errorf("module's connection: silence of %d ms, keep-alive %d", silence, probes)
			}
		}
		return nil
	}))
	if seen != 2*3*3 || modules != 1 {
		t.Errorf("%d ends of routes and %d modules were found, want two of three to each of three pairs, and 1", seen, modules)
	}
}

// swallow makes both ends of the connections to the ports deaf to every segment, as a cut network does,
// and returns how many ends there were.
func swallow(t *testing.T, ports map[int]bool) (ends int) {
	t.Helper()
	nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K} // of 0 bytes
	must(t, eachStream(func(fd, local, remote int) error {
		if !ports[local] && !ports[remote] {
			return nil
		}
		ends++
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing})
	}))
	return ends
}

func (n *node) routeIDs(t *testing.T) map[uint64]bool {
	t.Helper()
	z, err := n.host.srv.Routez(nil)
	must(t, err)
	ids := map[uint64]bool{}
	for _, r := range z.Routes {
		ids[r.Rid] = true
	}
	return ids
}
