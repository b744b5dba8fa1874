package cli

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
)

const (
	// lowestPort is where the bus's client port is looked for: below are the ports of
	// well-known services.
	lowestPort = 10000
	// ephemeralFile says from where the kernel takes the local ports of outgoing
	// connections: a port from there may be taken just when meshd starts again.
	ephemeralFile = "/proc/sys/net/ipv4/ip_local_port_range"
	// ephemeralFirst is Linux's default, for where the file is not.
	ephemeralFirst = 32768
	// portTries is how many ports are tried: where ten thousand are looked at, so many
	// that are taken mean that something else is wrong.
	portTries = 100
)

// clientPort is the bus's client port: the one that is kept, if nothing else has
// it, so that processes find the bus again after a restart of meshd. Else it is
// chosen anew, and processes that use the bus are started again for it: see
// consumer.process.
func clientPort(kept int, others []int, log *slog.Logger) (int, error) {
	if kept != 0 {
		_, err := tryPort(kept)
		if err == nil {
			return kept, nil
		}
		log.Warn("the bus's client port is taken; another is chosen, and the modules here that use the bus are started again", "port", kept, "err", err)
	}
	return freePort(others)
}

// freePort is a TCP port of loopback that is free now, is none of the others, which
// may not be open yet, and stays free where that can be had.
func freePort(others []int) (int, error) {
	text, _ := os.ReadFile(ephemeralFile) // where it cannot be read, the default holds
	return choosePort(ephemeral(string(text)), others)
}

// ephemeral reads the first of the kernel's own ports.
func ephemeral(file string) int {
	first := 0
	if _, err := fmt.Sscan(file, &first); err != nil || first < 1 {
		return ephemeralFirst
	}
	return first
}

// choosePort takes a port from below first or, where the kernel was given nearly all
// there are, lets it choose.
func choosePort(first int, others []int) (int, error) {
	last := errors.New("each is spoken for")
	for range portTries {
		port := 0
		if first > lowestPort+portTries {
			port = lowestPort + rand.IntN(first-lowestPort)
		}
		port, err := tryPort(port)
		switch {
		case err != nil:
			last = err
		case !slices.Contains(others, port):
			return port, nil
		}
	}
	return 0, fmt.Errorf("choose a port from %d to %d: %w", lowestPort, first-1, last)
}

// tryPort opens and closes a port, one of the kernel's choice for 0.
func tryPort(port int) (int, error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}
