// Package integration runs whole meshes for tests and benchmarks. Every node is
// a real meshd: a process of its own, with its ports on loopback and a data
// directory of its own.
//
// Contract: nothing outlives a Mesh. Its nodes end with the process that started
// them, however that ends; what the nodes supervise is meant to outlive them, so
// Close looks for it by the mesh's directory in its environment, and ends it.
package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Ports are taken from below 32768, where Linux begins to choose the local ports
// of outgoing connections: one from there can be gone when a node comes back.
const (
	firstPort = 10000
	lastPort  = 32000
)

const (
	// tick is how often a condition is looked at.
	tick = 20 * time.Millisecond
	// stopWithin bounds the orderly stop of a node: its parts have 5 s each.
	stopWithin = 20 * time.Second
	// tries is how often a node is made anew because a port was taken.
	tries = 5
)

// Mesh is some nodes on this machine. Its methods are for one goroutine.
type Mesh struct {
	dir   string
	meshd string
	nodes []*Node
	wires *wires // nil: all nodes are on loopback
}

// New returns a mesh without nodes. meshd is the path of the program; dir holds
// a directory for each node and should be short: the path of a unix socket in it
// has 107 bytes at most.
func New(meshd, dir string) *Mesh { return &Mesh{dir: dir, meshd: meshd} }

// Node is one of the mesh's nodes, running or not.
type Node struct {
	Name      string
	Dir       string
	Files     string // its working directory: what would be in /etc of a machine of its own
	MeshPort  int
	BusPort   int
	StorePort int

	meshd  string
	addr   string
	space  string // network namespace, "" for the machine's own
	paused bool
	cmd    *exec.Cmd
	ended  chan struct{} // closed when cmd has ended
}

// Node finds a node by name.
func (m *Mesh) Node(name string) (*Node, error) {
	i := slices.IndexFunc(m.nodes, func(n *Node) bool { return n.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("there is no node %q in this mesh", name)
	}
	return m.nodes[i], nil
}

// Start makes a mesh of the named nodes and returns when each knows all of them
// alive and, of three or more, three with a vote.
func (m *Mesh) Start(ctx context.Context, names ...string) error {
	for i, name := range names {
		if err := m.add(ctx, name, i == 0); err != nil {
			return err
		}
	}
	return m.Settle(ctx)
}

// add makes a node: the first one of the mesh, or one that joins with a token of
// the first. It is made anew where one of its ports was taken meanwhile.
func (m *Mesh) add(ctx context.Context, name string, first bool) error {
	var faults []error
	for range tries {
		var err error
		if first {
			err = m.make(ctx, name, "init")
		} else {
			var token []byte
			if token, err = m.nodes[0].Command(ctx, "token").Output(); err == nil {
				err = m.Join(ctx, name, strings.TrimSpace(string(token)))
			}
		}
		faults = append(faults, err)
		if err == nil || !strings.Contains(err.Error(), syscall.EADDRINUSE.Error()) {
			return err
		}
	}
	return errors.Join(faults...)
}

// Join makes one more node with a token of the mesh. Nothing is left of a node
// that did not come up. flags are added to those of meshd join, and win.
func (m *Mesh) Join(ctx context.Context, name, token string, flags ...string) error {
	return m.make(ctx, name, append([]string{"join", token}, flags...)...)
}

func (m *Mesh) make(ctx context.Context, name string, args ...string) error {
	n := &Node{Name: name, Dir: filepath.Join(m.dir, name), Files: filepath.Join(m.dir, name+".etc"), meshd: m.meshd, addr: "127.0.0.1"}
	if m.wires != nil {
		n.addr, n.space = m.wires.addr(name), m.wires.space(name)
	}
	if err := os.MkdirAll(n.Files, 0o700); err != nil {
		return err
	}
	if err := n.choosePorts(); err != nil {
		return err
	}
	all := []string{args[0], "--dir", n.Dir, "--name", name, "--bind", n.addr,
		"--port", strconv.Itoa(n.MeshPort), "--bus-port", strconv.Itoa(n.BusPort), "--store-port", strconv.Itoa(n.StorePort)}
	if err := n.run(ctx, append(all, args[1:]...)...); err != nil {
		return errors.Join(err, os.RemoveAll(n.Dir))
	}
	m.nodes = append(m.nodes, n)
	return nil
}

// choosePorts takes three ports in a row that are free for TCP and UDP.
func (n *Node) choosePorts() error {
	for range 100 {
		p := firstPort + rand.IntN(lastPort-firstPort)
		if free(p) && free(p+1) && free(p+2) {
			n.MeshPort, n.BusPort, n.StorePort = p, p+1, p+2
			return nil
		}
	}
	return fmt.Errorf("choose ports: no three in a row are free from %d to %d", firstPort, lastPort)
}

func free(port int) bool {
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	stream, err := net.Listen("tcp", addr)
	if err != nil {
		return false
	}
	defer stream.Close()
	packets, err := net.ListenPacket("udp", addr)
	if err != nil {
		return false
	}
	return packets.Close() == nil
}

// Start runs a node again that was killed or stopped, and returns when it
// serves.
func (n *Node) Start(ctx context.Context) error {
	if n.Running() {
		return fmt.Errorf("start %s: it is running", n.Name)
	}
	return n.run(ctx, "start", "--dir", n.Dir)
}

// run starts the program and returns when it says that it serves. Its output is
// added to the node's log.
func (n *Node) run(ctx context.Context, args ...string) error {
	log, err := os.OpenFile(n.LogPath(), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() // the process has a descriptor of its own
	from, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	argv := append(append([]string{n.meshd}, args...), "-v")
	if n.space != "" {
		argv = append([]string{"ip", "netns", "exec", n.space}, argv...) // which becomes meshd
	}
	n.cmd = exec.Command(argv[0], argv[1:]...)
	n.cmd.Dir = n.Files
	n.cmd.Stdout, n.cmd.Stderr = log, log
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := n.cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", n.Name, err)
	}
	n.ended, n.paused = make(chan struct{}), false
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // how it ended is in its log
		close(ended)
	}(n.cmd, n.ended)
	said := func() []byte {
		text, _ := os.ReadFile(n.LogPath()) // no text is no sign of life
		return text[min(int(from), len(text)):]
	}
	err = until(ctx, func() bool { return serving.Match(said()) || !n.Running() })
	if err == nil && n.Running() {
		return nil
	}
	text := said()
	return errors.Join(fmt.Errorf("start %s: %w; it said:\n%s", n.Name, errors.Join(err, errNotUp), text), n.Kill())
}

// serving is what a node says once it takes commands, with a quorum or without.
var serving = regexp.MustCompile(`Node .* (is up: |runs, and has found no leader yet)`)

var errNotUp = errors.New("it did not come up")

// Running reports whether the node's process is there.
func (n *Node) Running() bool {
	if n.cmd == nil {
		return false
	}
	select {
	case <-n.ended:
		return false
	default:
		return true
	}
}

// LogPath is the file that holds all that the node's processes have printed.
func (n *Node) LogPath() string { return n.Dir + ".log" }

// PID is the process id of the node, 0 while it does not run.
func (n *Node) PID() int {
	if !n.Running() {
		return 0
	}
	return n.cmd.Process.Pid
}

// Kill ends the node at once, as kill -9 does. To kill what does not run
// succeeds.
func (n *Node) Kill() error { return n.end(syscall.SIGKILL) }

// Stop ends the node in order.
func (n *Node) Stop() error { return n.end(syscall.SIGTERM) }

// Pause stops the node's process where it is, as SIGSTOP does. Resume, Kill and the end of
// the mesh end that.
func (n *Node) Pause() error {
	n.paused = true
	return n.cmd.Process.Signal(syscall.SIGSTOP)
}

// Resume has a paused node go on.
func (n *Node) Resume() error {
	n.paused = false
	return n.cmd.Process.Signal(syscall.SIGCONT)
}

// Answers reports whether the node runs and is not paused.
func (n *Node) Answers() bool { return n.Running() && !n.paused }

func (n *Node) end(sig os.Signal) error {
	if !n.Running() {
		return nil
	}
	if err := n.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end %s: %w", n.Name, err)
	}
	select {
	case <-n.ended:
		return nil
	case <-time.After(stopWithin):
		err := n.cmd.Process.Kill()
		<-n.ended
		return errors.Join(fmt.Errorf("end %s: it did not heed %v within %v, and was killed", n.Name, sig, stopWithin), err)
	}
}

// Socket is where the node's commands ask it.
func (n *Node) Socket() string { return filepath.Join(n.Dir, "meshd.sock") }

// Command is a command line of meshd that asks this node.
func (n *Node) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, n.meshd, args...)
	cmd.Env = append(os.Environ(), "MESHD_SOCKET="+n.Socket())
	return cmd
}

// Settle waits until each running node knows every running one alive, a leader,
// and as many votes as there should be: three of three to six nodes, one of
// fewer.
func (m *Mesh) Settle(ctx context.Context) error {
	var names []string
	for _, n := range m.nodes {
		if n.Running() {
			names = append(names, n.Name)
		}
	}
	votes := 1
	if len(m.nodes) >= 3 {
		votes = 3
	}
	for _, n := range m.nodes {
		if !n.Running() {
			continue
		}
		var last overview
		var err error
		if late := until(ctx, func() bool {
			last, err = n.overview(ctx)
			all := !slices.ContainsFunc(names, func(name string) bool { return !last.Alive[name] })
			return err == nil && last.Quorum && all && len(last.Voters) == votes
		}); late != nil {
			return fmt.Errorf("wait for the mesh to settle: %w; %s says %+v (%v)", late, n.Name, last, err)
		}
	}
	return nil
}

// overview is the part of what a node knows that tells whether it is settled.
type overview struct {
	Quorum bool
	Alive  map[string]bool // by node name
	Voters []string        // node names
}

func (n *Node) overview(ctx context.Context) (o overview, err error) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", n.Socket())
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://meshd/v1/overview", nil)
	if err != nil {
		return o, err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return o, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return o, fmt.Errorf("%s answers %s", n.Name, resp.Status)
	}
	return o, json.NewDecoder(resp.Body).Decode(&o)
}

// until waits for a condition for as long as ctx lasts.
func until(ctx context.Context, reached func() bool) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for !reached() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
	return nil
}

// Processes are the ids of the processes that nodes of this mesh started for the
// assignment, or for any with "".
func (m *Mesh) Processes(assignment string) ([]int, error) {
	return find(func(env string) bool {
		ours := strings.Contains(env, "\x00SERVICE_BINDING_ROOT="+m.dir+"/")
		return ours && (assignment == "" || strings.Contains(env, "\x00MESHD_ASSIGNMENT="+assignment+"\x00"))
	})
}

// find lists the processes whose environment matches. Every variable in it has a
// zero byte on both sides. A process that ends meanwhile does not match.
func find(matches func(env string) bool) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err == nil && matches("\x00"+string(env)) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// Close kills the nodes and everything that they started.
func (m *Mesh) Close() error {
	var errs []error
	for _, n := range m.nodes {
		errs = append(errs, n.Kill())
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	var left []int
	err := until(ctx, func() bool {
		var err error
		if left, err = m.Processes(""); err != nil {
			errs = append(errs, err)
			return true
		}
		for _, pid := range left {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				errs = append(errs, err)
			}
		}
		return len(left) == 0
	})
	if err != nil {
		errs = append(errs, fmt.Errorf("end the processes of the mesh: %w: %v are there still", err, left))
	}
	if m.wires != nil {
		errs = append(errs, m.wires.remove())
	}
	return errors.Join(errs...)
}
