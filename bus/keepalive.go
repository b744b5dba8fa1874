package bus

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// A dead route must be closed soon: then a call over it fails at once, as one that has not run, and is
// tried again, where it would else be in doubt. A peer that ended closes its routes itself. The silent
// one, whose machine or network is gone, is found by the kernel: it is told so by keepAlive for every
// route, and wakes this process only when a route is dead. NATS's own pings, as fast as that, are most
// of what a node at rest does (eight messages a second on each of three connections to each peer), and
// they cut routes when it is only the process that is short of time.
const (
	// routeSilence is how long what was sent on a route may stay unacknowledged, or unread by a peer that
	// has no room left, from the first retransmission on: 200 to 400 ms after it was sent on a LAN, which
	// makes 1.0 to 1.3 s in all. At least one more retransmission fits in, and a second without a
	// processor for a peer that is sent a lot.
	routeSilence = 800 * time.Millisecond
	// routeProbe is how long a route is idle before the kernel asks whether the peer is there, and again:
	// the shortest that it can be told. So a route that nobody sends on is closed within 2 s.
	routeProbe = time.Second
	// A peer whose kernel answers and whose process hangs is found after one ping without answer: in 10
	// to 20 s, somewhat later than gossip finds it. Nothing waits for this one: its seats are moved by
	// the log.
	routePing     = 10 * time.Second
	routePingsOut = 1
)

// watched is the TLS configuration of routes that makes the kernel watch each one as it is proven. NATS
// opens the connections itself, without keep-alive and without a way to ask for it.
func (h *host) watched(conf *tls.Config) *tls.Config {
	conf = conf.Clone()
	prove := conf.VerifyConnection
	conf.VerifyConnection = func(s tls.ConnectionState) error {
		if prove != nil {
			if err := prove(s); err != nil {
				return err
			}
		}
		if err := h.watchRoutes(); err != nil {
			h.cfg.Log.Warn("a route is not watched: if its peer goes silent, calls to it will be in doubt for a while", "err", err)
		}
		return nil
	}
	return conf
}

// watchRoutes finds the connections to and from other nodes among what this process has open. TLS does
// not tell which of them a handshake is of, so all are told again, which changes nothing for them.
func (h *host) watchRoutes() error {
	own := 0
	if addr := h.srv.ClusterAddr(); addr != nil {
		own = addr.Port
	}
	dialled := h.dialled.Load()
	return eachStream(func(fd, local, remote int) error {
		if local == own || dialled != nil && (*dialled)[remote] {
			return keepAlive(fd)
		}
		return nil
	})
}

// keepAlive lets the kernel close a connection whose peer is silent.
func keepAlive(fd int) error {
	return errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(routeProbe.Seconds())),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(routeProbe.Seconds())),
		// With this one the number of probes does not count.
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(routeSilence.Milliseconds())),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1),
	)
}

// eachStream calls f for every TCP connection of this process with the ports of its two ends. fd is
// valid during the call only.
func eachStream(f func(fd, local, remote int) error) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list open connections: %w", err)
	}
	var faults []error
	for _, e := range entries {
		number, err := strconv.Atoi(e.Name())
		if err != nil || !isStream(number) {
			continue
		}
		// The owner may close the number at any moment, and open something else under it. It cannot do
		// that to a duplicate.
		fd, err := unix.FcntlInt(uintptr(number), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			continue
		}
		local, remote := port(unix.Getsockname(fd)), port(unix.Getpeername(fd))
		if isStream(fd) && local != 0 && remote != 0 {
			faults = append(faults, f(fd, local, remote))
		}
		unix.Close(fd)
	}
	return errors.Join(faults...)
}

func isStream(fd int) bool {
	protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	return err == nil && protocol == unix.IPPROTO_TCP
}

// port is that of an address, or 0 if there is none.
func port(a unix.Sockaddr, err error) int {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return a.Port
	case *unix.SockaddrInet6:
		return a.Port
	}
	return 0
}

// ports are those of some host:port.
func ports(addrs []string) map[int]bool {
	all := map[int]bool{}
	for _, addr := range addrs {
		if _, text, err := net.SplitHostPort(addr); err == nil {
			if n, err := strconv.Atoi(text); err == nil {
				all[n] = true
			}
		}
	}
	return all
}
