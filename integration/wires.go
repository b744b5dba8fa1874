package integration

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
)

// wiresLabel begins the name of every network namespace of ours: it is followed by the
// process that made it, what tells its meshes apart, and the node.
const wiresLabel = "meshd-test-"

// wires are a network namespace for each node and a bridge between them, in one more.
// Nothing of it reaches the machine's own network.
type wires struct {
	label string
	hosts []string // names; the first has the address 10.77.0.1
}

// wire makes the namespaces. It needs root, ip and iptables.
func wire(names []string) (*wires, error) {
	if err := removeDead(); err != nil {
		return nil, err
	}
	w := &wires{label: fmt.Sprintf("%s%d-%04x-", wiresLabel, os.Getpid(), rand.N(1<<16)), hosts: names}
	hub := w.space("hub")
	faults := []error{run("", "ip", "netns", "add", hub), run("link add br0 type bridge\nlink set br0 up\n", "ip", "-n", hub, "-batch", "-")}
	for _, name := range names {
		space := w.space(name)
		faults = append(faults, run("", "ip", "netns", "add", space),
			run(fmt.Sprintf("link add v-%s type veth peer name eth0 netns %s\nlink set v-%[1]s master br0 up\n", name, space), "ip", "-n", hub, "-batch", "-"),
			run(fmt.Sprintf("link set lo up\naddr add %s/24 dev eth0\nlink set eth0 up\n", w.addr(name)), "ip", "-n", space, "-batch", "-"))
	}
	if err := errors.Join(faults...); err != nil {
		return nil, errors.Join(fmt.Errorf("wire the nodes: %w", err), w.remove())
	}
	return w, nil
}

func (w *wires) space(name string) string { return w.label + name }

func (w *wires) addr(name string) string {
	return fmt.Sprintf("10.77.0.%d", slices.Index(w.hosts, name)+1)
}

// cut drops what one node sends to another.
func (w *wires) cut(from, to string) error {
	for _, name := range []string{from, to} {
		if !slices.Contains(w.hosts, name) {
			return fmt.Errorf("there is no node %q on the wires", name)
		}
	}
	return run("", "ip", "netns", "exec", w.space(to), "iptables", "-w", "-A", "INPUT", "-s", w.addr(from), "-j", "DROP")
}

// isolate cuts a node off from all others, both ways.
func (w *wires) isolate(name string) error {
	var faults []error
	for _, other := range w.hosts {
		if other != name {
			faults = append(faults, w.cut(name, other), w.cut(other, name))
		}
	}
	return errors.Join(faults...)
}

// heal ends all cuts.
func (w *wires) heal() error {
	var faults []error
	for _, name := range w.hosts {
		faults = append(faults, run("", "ip", "netns", "exec", w.space(name), "iptables", "-w", "-F", "INPUT"))
	}
	return errors.Join(faults...)
}

// remove takes all of it down. What runs in it must have ended.
func (w *wires) remove() error {
	return removeSpaces(func(space string) bool { return strings.HasPrefix(space, w.label) })
}

// removeDead removes what processes left behind that were killed.
func removeDead() error {
	return removeSpaces(func(space string) bool {
		rest, ours := strings.CutPrefix(space, wiresLabel)
		pid, _, _ := strings.Cut(rest, "-")
		if _, err := strconv.Atoi(pid); !ours || err != nil {
			return false
		}
		_, err := os.Stat("/proc/" + pid)
		return errors.Is(err, os.ErrNotExist)
	})
}

func removeSpaces(which func(space string) bool) error {
	entries, err := os.ReadDir("/run/netns")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	faults := []error{err}
	for _, e := range entries {
		if which(e.Name()) {
			faults = append(faults, run("", "ip", "netns", "del", e.Name()))
		}
	}
	return errors.Join(faults...)
}

func run(stdin, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// wirable says why this machine cannot have wires, or nothing.
func wirable() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root")
	}
	for _, tool := range []string{"ip", "iptables"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w; Debian: apt-get install iproute2 iptables", err)
		}
	}
	return nil
}
