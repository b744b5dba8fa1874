package peer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"time"

	"github.com/nats-io/nkeys"

	"meshd/bus"
	"meshd/peer/supervise"
	"meshd/provision"
	"meshd/raftfsm"
)

// layout is what the bus of this node is to be: all of it follows from the log,
// but for the keys of the processes, which never leave their node.
func (n *Peer) layout(s *raftfsm.State, d raftfsm.Desired) (bus.Layout, error) {
	l := bus.Layout{Directory: bus.Directory{Seats: map[string]bus.Seat{}, Nodes: map[string]bus.Node{}}}
	for _, id := range sortedKeys(s.Nodes) {
		m := s.Nodes[id]
		there := d
		if id != n.id() {
			l.Peers = append(l.Peers, bus.Peer{ID: id, Name: m.Name, Addr: dialable(n.routeOf(m)), Pin: m.Pin})
			there = s.Desired(id)
		}
		l.Directory.Nodes[m.Name] = directory(there)
	}
	for seat, name := range d.Holders {
		to := bus.Seat{Verbs: name.Verbs, Idempotent: name.Idempotent, Dark: name.Dark}
		if name.Node != "" {
			to.Holder = bus.Holder{Node: name.Node, Assignment: name.Assignment, Epoch: name.Epoch}
		}
		l.Directory.Seats[seat] = to
	}
	l.Operators = n.operatorKeys()
	for _, g := range d.Grants {
		public, _, err := n.local.busKey(g.Assignment)
		if err != nil {
			return l, err
		}
		m := bus.Module{Assignment: g.Assignment, PublicKey: public}
		for _, t := range g.Calls {
			m.Calls = append(m.Calls, busTarget(t))
		}
		l.Modules = append(l.Modules, m)
	}
	for _, seat := range d.Seats {
		svc := bus.Service{
			Scope: bus.ScopeNode, Seat: seat.Seat, Assignment: seat.Assignment, Verbs: sortedKeys(seat.Verbs), Epoch: seat.Epoch,
			Handler: n.handler(seat.Assignment, seat.Verbs),
		}
		if seat.Scope == raftfsm.ScopeMesh {
			svc.Scope, svc.Gate = bus.ScopeMesh, n.leases.gate
		}
		l.Services = append(l.Services, svc)
	}
	for _, t := range d.Tools {
		l.Services = append(l.Services, bus.Service{
			Scope: bus.ScopeTools, Assignment: t.Assignment, Verbs: sortedKeys(t.Tools), Handler: n.handler(t.Assignment, t.Tools),
		})
	}
	return l, nil
}

// dialable is addr, or nothing where it cannot be dialled: one bad record of a
// node must not hold up the bus of the others.
func dialable(addr string) string {
	if _, port, err := net.SplitHostPort(addr); err != nil || port == "" {
		return ""
	}
	return addr
}

func busTarget(t raftfsm.Target) bus.Target {
	return bus.Target{Seat: t.Seat, Node: t.Node, Assignment: t.Assignment, Name: t.Name}
}

// directory is what a node answers besides mesh seats.
func directory(d raftfsm.Desired) bus.Node {
	out := bus.Node{Seats: map[string][]string{}, Tools: map[string][]string{}}
	for _, seat := range d.Seats {
		if seat.Scope == raftfsm.ScopeNode {
			out.Seats[seat.Seat] = sortedKeys(seat.Verbs)
		}
	}
	for _, t := range d.Tools {
		out.Tools[t.Assignment] = sortedKeys(t.Tools)
	}
	return out
}

// busFields are what an assignment's process needs to connect to the bus of its
// node with any NATS client.
func (n *Peer) busFields(assignment string) (map[string]string, error) {
	_, seed, err := n.local.busKey(assignment)
	if err != nil {
		return nil, err
	}
	self := bus.Caller{Node: n.cfg.Self.Name, Assignment: assignment}
	return map[string]string{
		"type": "meshd-bus", "url": n.cfg.Bus.ClientURL(), "nkey-seed": seed, "node": self.Node, "assignment": assignment,
		"inbox-prefix": bus.Inbox(self.Node, assignment), "serve-prefix": bus.Private(self.Node, assignment),
		"call-prefix": "call." + self.Node + "." + assignment,
	}, nil
}

func newBusKey() (public, seed string, err error) {
	pair, err := nkeys.CreateUser()
	if err != nil {
		return "", "", err
	}
	defer pair.Wipe()
	if public, err = pair.PublicKey(); err != nil {
		return "", "", err
	}
	b, err := pair.Seed()
	return public, string(b), err
}

// handler answers a seat's verbs or an assignment's tools, each as its module
// says.
func (n *Peer) handler(assignment string, verbs map[string]raftfsm.Handler) bus.Handler {
	return func(ctx context.Context, c bus.Call) ([]byte, error) {
		h, ok := verbs[c.Name]
		switch {
		case !ok:
			return nil, &bus.CallError{Code: bus.CodeNoSuchVerb, Text: fmt.Sprintf("%s has no %q; it has %s", assignment, c.Name, strings.Join(sortedKeys(verbs), ", "))}
		case h.Bus:
			return n.cfg.Bus.Forward(ctx, assignment, c.Suffix(), c)
		case h.HTTP != "":
			return post(ctx, h.HTTP, c)
		case h.Builtin != "":
			return n.answer(ctx, assignment, h.Builtin, c.Name, c.Data)
		}
		return n.run(ctx, assignment, h.Exec, c)
	}
}

// maxAnswer bounds what a handler may answer: what the bus carries.
const maxAnswer = 1 << 20

func tooLarge(c bus.Call) error {
	return &bus.CallError{Code: bus.CodeTooLarge, Text: fmt.Sprintf("the answer of %s has more than %d bytes; a seat is a control plane: hand out an address for bulk data; it did run", c.Target, maxAnswer)}
}

// post asks an HTTP handler on loopback. The epoch goes along as the fencing
// token of side effects.
func post(ctx context.Context, url string, c bus.Call) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(c.Data))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Meshd-Caller", c.Caller.String())
	req.Header.Set("Meshd-Epoch", fmt.Sprint(c.Epoch))
	client := http.Client{
		Transport:     &http.Transport{DialContext: dialLoopback, DisableKeepAlives: true, Proxy: nil},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, err
	case len(body) > maxAnswer:
		return nil, tooLarge(c)
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answered %s: %.200s", url, resp.Status, body)
	}
	return body, nil
}

func dialLoopback(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: 2 * time.Second}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	if tcp, ok := conn.RemoteAddr().(*net.TCPAddr); !ok || !tcp.IP.IsLoopback() {
		conn.Close()
		return nil, fmt.Errorf("%s is not on loopback, where a handler must be", addr)
	}
	return conn, nil
}

// run asks a command: the call's data on its standard input, the answer on its
// standard output. It runs as the module's user and in its own group, which
// ends with the call.
func (n *Peer) run(ctx context.Context, assignment string, argv []string, c bus.Call) ([]byte, error) {
	var user string
	n.store.view(func(s *raftfsm.State) { user = s.Modules[s.Assignments[assignment].Module].Run.User })
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	if err := supervise.Isolate(cmd, user); err != nil {
		return nil, err
	}
	cmd.Env = append(cmd.Env, "MESHD_CALLER="+c.Caller.String(), "MESHD_EPOCH="+fmt.Sprint(c.Epoch), "MESHD_NODE="+n.cfg.Self.Name, "MESHD_ASSIGNMENT="+assignment)
	cmd.Stdin = bytes.NewReader(c.Data)
	out, errs := limited{max: maxAnswer}, limited{max: 4 << 10}
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case out.over:
		return nil, tooLarge(c)
	case err != nil:
		return nil, fmt.Errorf("%s: %w: %s", argv[0], err, bytes.TrimSpace(errs.kept))
	}
	return out.kept, nil
}

// limited keeps what comes up to max, and says whether there was more. It is a Writer
// and nothing else: io.Copy would fill a buffer by itself.
type limited struct {
	kept []byte
	max  int
	over bool
}

func (l *limited) Write(b []byte) (int, error) {
	room := min(len(b), l.max-len(l.kept))
	l.kept = append(l.kept, b[:room]...)
	l.over = l.over || room < len(b)
	return len(b), nil
}

// answer asks the provisioner of a kind, beside whatever its worker does.
func (n *Peer) answer(ctx context.Context, assignment, kind, verb string, data []byte) ([]byte, error) {
	svc := n.serviceOf(raftfsm.ProviderID(assignment, kind))
	if svc == nil {
		return nil, fmt.Errorf("%s does not provide %s on this node", assignment, kind)
	}
	var out []byte
	err := svc.use(func(p provision.Provider) (err error) {
		a, ok := p.(provision.Answerer)
		if !ok {
			return fmt.Errorf("kind %s answers no verbs itself; say in the module's serves: what answers %s", kind, verb)
		}
		out, err = a.Answer(ctx, verb, data)
		return err
	})
	return out, err
}
