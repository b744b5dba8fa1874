package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sync/errgroup"

	"meshd/peer/api"
	"meshd/provision/postgres/pgtest"
)

const (
	// patience bounds everything that a script waits for.
	patience = 30 * time.Second * slowness
	// joinWithin is the 10 s that meshd join may take, and its start.
	joinWithin = 12 * time.Second * slowness
	// glance is how often a script looks whether it came true.
	glance = 100 * time.Millisecond
	// callsAtOnce is how many calls are under way together: enough that the order
	// of the answers is not that of the calls.
	callsAtOnce = 4
)

// stage is what one script plays on: a mesh, and servers beside it.
type stage struct {
	t       testscript.T
	mesh    *Mesh
	servers map[string]*pgtest.Server
	code    int // exit code of the last command on a node
	loop    *loop
}

type stageKey struct{}

func newStage(t testscript.T, m *Mesh) *stage {
	return &stage{t: t, mesh: m, servers: map[string]*pgtest.Server{}}
}

func stageOf(ts *testscript.TestScript) *stage { return ts.Value(stageKey{}).(*stage) }

// close ends everything. What the nodes said is shown when the script failed.
func (s *stage) close() {
	if tb, ok := s.t.(testing.TB); ok && tb.Failed() {
		for _, n := range s.mesh.nodes {
			text, _ := os.ReadFile(n.LogPath()) // nothing to show is no fault
			tb.Logf("%s said at the end:\n%s", n.Name, text[max(0, len(text)-8<<10):])
		}
	}
	errs := []error{s.mesh.Close()}
	if s.loop != nil {
		s.loop.end()
	}
	for _, server := range s.servers {
		errs = append(errs, server.Close())
	}
	if err := errors.Join(errs...); err != nil {
		s.t.Fatal(err)
	}
}

// command is one word of the scripts: it returns what went wrong.
type command func(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error

// commands are the words that the scripts have beside those of testscript:
//
//	mesh NAME...                  start these nodes, the first makes the mesh; $NAME_PORT
//	                              and $NAME_BUS are ports of a node, $NAME_DIR is its data
//	                              directory, $NAME_FILES the one that it finds at $HERE
//	another-mesh NAME             start a node that is a mesh by itself
//	join NAME TOKEN FLAG...       add a node with meshd join, which says within 10 s
//	                              what is wrong
//	on NODE COMMAND...            run a command with MESHD_SOCKET of the node
//	code N                        the last command on a node ended with this code
//	until PATTERN NODE COMMAND... repeat the command on the node until its output
//	                              matches (exit codes do not matter)
//	while PATTERN NODE COMMAND... repeat it until its output matches no longer
//	apart NODE...                 mesh, with a network of its own for each node
//	cut NODE NODE                 drop what the first sends to the second
//	isolate NODE                  cut it off from all others, both ways
//	heal                          end all cuts
//	kill-node|stop-node|start-node NODE...
//	                              kill -9, stop in order, start again
//	pause-node|resume-node NODE...
//	                              SIGSTOP and SIGCONT
//	blob BYTES FILE               make a file of so many bytes
//	postgres NAME                 start a PostgreSQL server, and set $NAME_PORT and
//	                              $NAME_ADMIN, the path of its admin file
//	postgres NAME stop|start|read-only|writable|standby|primary
//	sql NAME STATEMENT            run a statement there as the superuser
//	login URI                     log in to PostgreSQL
//	expand FILE...                replace $NAME in files
//	let NAME                      set $NAME to what the last command printed
//	pid ASSIGNMENT                print the process id of what runs for it
//	end ASSIGNMENT                kill -9 what runs for it
//	delivered ASSIGNMENT REQUIREMENT FIELD
//	                              print a file that was delivered
//	calls N NODE TARGET           call N times through the node, and print how often each
//	                              node answered what
//	calling NODE TARGET           begin to call through the node, again and again
//	called                        end that, and print how often each node answered; it
//	                              fails if a call did
//	leader                        print the node that leads
//	holder SEAT                   print the node that answers a seat
//	another NODE...               print a node that runs and is none of these
//
// A ! in front means that it must fail.
func commands() map[string]func(*testscript.TestScript, bool, []string) {
	all := map[string]command{
		"mesh": mesh, "apart": apart, "cut": cut, "isolate": isolate, "heal": heal, "another-mesh": anotherMesh, "join": join, "blob": blob, "on": on, "code": code, "until": untilMatch, "while": whileMatch,
		"kill-node": each((*Node).Kill), "stop-node": each((*Node).Stop), "start-node": start,
		"pause-node": each((*Node).Pause), "resume-node": each((*Node).Resume),
		"postgres": postgres, "sql": sql, "login": login, "expand": expand, "let": let,
		"pid": pid, "end": end, "delivered": delivered, "calls": calls,
		"calling": calling, "called": called, "leader": leader, "holder": holder, "another": another,
	}
	out := map[string]func(*testscript.TestScript, bool, []string){}
	for name, run := range all {
		out[name] = func(ts *testscript.TestScript, neg bool, args []string) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			err := run(ctx, stageOf(ts), ts, args)
			switch {
			case err != nil && !neg:
				ts.Fatalf("%s: %v", name, err)
			case err == nil && neg:
				ts.Fatalf("%s succeeded, and it must not", name)
			case err != nil:
				ts.Logf("[%v]", err)
			}
		}
	}
	return out
}

var errUsage = errors.New("wrong arguments; see commands in commands_test.go")

func mesh(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	if err := s.mesh.Start(ctx, args...); err != nil {
		return err
	}
	for _, n := range s.mesh.nodes {
		describe(ts, n)
	}
	ts.Setenv("HERE", "/proc/self/cwd")
	return nil
}

func apart(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	var err error
	if s.mesh.wires, err = wire(args); err != nil {
		return err
	}
	return mesh(ctx, s, ts, args)
}

func cut(_ context.Context, s *stage, _ *testscript.TestScript, args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	return s.mesh.wires.cut(args[0], args[1])
}

func isolate(_ context.Context, s *stage, _ *testscript.TestScript, args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	return s.mesh.wires.isolate(args[0])
}

func heal(_ context.Context, s *stage, _ *testscript.TestScript, _ []string) error {
	return s.mesh.wires.heal()
}

// describe gives the script what it may need to know of a node.
func describe(ts *testscript.TestScript, n *Node) {
	name := strings.ToUpper(n.Name)
	ts.Setenv(name+"_FILES", n.Files)
	ts.Setenv(name+"_DIR", n.Dir)
	ts.Setenv(name+"_PORT", strconv.Itoa(n.MeshPort))
	ts.Setenv(name+"_BUS", strconv.Itoa(n.BusPort))
}

func anotherMesh(ctx context.Context, s *stage, _ *testscript.TestScript, args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	return s.mesh.add(ctx, args[0], true)
}

func join(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	if len(args) < 2 {
		return errUsage
	}
	ctx, cancel := context.WithTimeout(ctx, joinWithin)
	defer cancel()
	err := s.mesh.Join(ctx, args[0], args[1], args[2:]...)
	if ctx.Err() != nil {
		ts.Fatalf("meshd join took longer than %v: %v", joinWithin, err)
	}
	if err != nil {
		fmt.Fprintln(ts.Stderr(), err)
		return err
	}
	describe(ts, s.mesh.nodes[len(s.mesh.nodes)-1])
	return nil
}

func blob(_ context.Context, _ *stage, ts *testscript.TestScript, args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	size, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	return os.WriteFile(ts.MkAbs(args[1]), bytes.Repeat([]byte("a: b\n"), size/5), 0o600)
}

// again is what meshd says of a change that was lost with its leader: on a
// machine whose processors are all taken that happens, and a person does what it
// says.
var again = []byte("giving the same command again is safe")

// on runs a command on a node, and keeps what it prints for stdout and stderr.
func on(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	stdout, stderr, err := s.run(ctx, ts, args)
	for err != nil && ctx.Err() == nil && bytes.Contains(stderr, again) {
		ts.Logf("[again, because of: %s]", stderr)
		stdout, stderr, err = s.run(ctx, ts, args)
	}
	ts.Stdout().Write(stdout)
	ts.Stderr().Write(stderr)
	return err
}

func (s *stage) run(ctx context.Context, ts *testscript.TestScript, args []string) (stdout, stderr []byte, err error) {
	if len(args) < 2 {
		return nil, nil, errUsage
	}
	n, err := s.mesh.Node(args[0])
	if err != nil {
		return nil, nil, err
	}
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, args[1], args[2:]...)
	cmd.Dir = ts.Getenv("WORK")
	cmd.Env = append(os.Environ(), "MESHD_SOCKET="+n.Socket())
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err = cmd.Run()
	s.code = cmd.ProcessState.ExitCode()
	if ctx.Err() != nil {
		err = fmt.Errorf("it takes longer than %v", patience)
	}
	return out.Bytes(), errs.Bytes(), err
}

func code(_ context.Context, s *stage, _ *testscript.TestScript, args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	if args[0] != strconv.Itoa(s.code) {
		return fmt.Errorf("the exit code is %d", s.code)
	}
	return nil
}

func untilMatch(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	return s.repeat(ctx, ts, args, true)
}

func whileMatch(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	return s.repeat(ctx, ts, args, false)
}

func (s *stage) repeat(ctx context.Context, ts *testscript.TestScript, args []string, want bool) error {
	if len(args) < 3 {
		return errUsage
	}
	pattern, err := regexp.Compile(`(?m)` + args[0])
	if err != nil {
		return err
	}
	for {
		stdout, stderr, err := s.run(ctx, ts, args[1:])
		if ctx.Err() == nil && s.code >= 0 && pattern.Match(append(stdout, stderr...)) == want {
			ts.Stdout().Write(stdout)
			ts.Stderr().Write(stderr)
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("it did not come true within %v; the last output (%v):\n%s%s", patience, err, stdout, stderr)
		case <-time.After(glance):
		}
	}
}

// each is a command that does something to some nodes.
func each(do func(*Node) error) command {
	return func(_ context.Context, s *stage, _ *testscript.TestScript, args []string) error {
		for _, name := range args {
			n, err := s.mesh.Node(name)
			if err != nil {
				return err
			}
			if err := do(n); err != nil {
				return err
			}
		}
		return nil
	}
}

// start starts nodes side by side: one by itself may have no quorum.
func start(ctx context.Context, s *stage, _ *testscript.TestScript, args []string) error {
	var group errgroup.Group
	for _, name := range args {
		n, err := s.mesh.Node(name)
		if err != nil {
			return err
		}
		group.Go(func() error { return n.Start(ctx) })
	}
	return group.Wait()
}

func postgres(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	switch len(args) {
	case 1:
		return s.startServer(ts, args[0])
	case 2:
	default:
		return errUsage
	}
	server, ok := s.servers[args[0]]
	if !ok {
		return fmt.Errorf("there is no server %s", args[0])
	}
	switch args[1] {
	case "stop":
		return server.Stop()
	case "start":
		return server.Start()
	case "read-only":
		return server.ReadOnly(ctx, true)
	case "writable":
		return server.ReadOnly(ctx, false)
	case "standby":
		return server.Standby(true)
	case "primary":
		return server.Standby(false)
	}
	return errUsage
}

func (s *stage) startServer(ts *testscript.TestScript, name string) error {
	server, err := pgtest.Start(pgtest.Options{})
	if errors.Is(err, pgtest.ErrMissing) && os.Getenv("MESHD_REQUIRE_SERVERS") != "1" {
		s.t.Skip(err)
	}
	if err != nil {
		return err
	}
	s.servers[name] = server
	admin := filepath.Join(ts.Getenv("WORK"), name+".admin")
	if err := os.WriteFile(admin, []byte(server.AdminURL()+"\n"), 0o600); err != nil {
		return err
	}
	ts.Setenv(strings.ToUpper(name)+"_PORT", strconv.Itoa(server.Port))
	ts.Setenv(strings.ToUpper(name)+"_ADMIN", admin)
	return nil
}

func sql(ctx context.Context, s *stage, _ *testscript.TestScript, args []string) error {
	if len(args) != 2 || s.servers[args[0]] == nil {
		return errUsage
	}
	return s.servers[args[0]].Exec(ctx, "postgres", args[1])
}

func login(ctx context.Context, _ *stage, ts *testscript.TestScript, args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	conn, err := pgx.Connect(ctx, args[0])
	if err != nil {
		fmt.Fprintln(ts.Stderr(), err)
		return err
	}
	return conn.Close(ctx)
}

func expand(_ context.Context, _ *stage, ts *testscript.TestScript, args []string) error {
	for _, name := range args {
		path := ts.MkAbs(name)
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(os.Expand(string(text), ts.Getenv)), 0o666); err != nil {
			return err
		}
	}
	return nil
}

func let(_ context.Context, _ *stage, ts *testscript.TestScript, args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
	return nil
}

func pid(_ context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	pids, err := s.mesh.Processes(args[0])
	if err != nil {
		return err
	}
	if len(pids) != 1 {
		return fmt.Errorf("%d processes run for %s: %v", len(pids), args[0], pids)
	}
	fmt.Fprintln(ts.Stdout(), pids[0])
	return nil
}

func end(ctx context.Context, s *stage, _ *testscript.TestScript, args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	return until(ctx, func() bool {
		pids, err := s.mesh.Processes(args[0])
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL) // one that is gone is what is wanted
		}
		return err == nil && len(pids) == 0
	})
}

func delivered(_ context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	if len(args) != 3 {
		return errUsage
	}
	found, err := filepath.Glob(filepath.Join(s.mesh.dir, "*", "run", "bindings", args[0], args[1], args[2]))
	if err != nil {
		return err
	}
	if len(found) != 1 {
		return fmt.Errorf("it is delivered %d times", len(found))
	}
	text, err := os.ReadFile(found[0])
	if err == nil {
		_, err = ts.Stdout().Write(text)
	}
	return err
}

// calls counts who answered.
func calls(ctx context.Context, s *stage, ts *testscript.TestScript, args []string) error {
	if len(args) != 3 {
		return errUsage
	}
	times, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	n, err := s.mesh.Node(args[1])
	if err != nil {
		return err
	}
	client := api.NewClient(n.Socket())
	defer client.Close()
	var mu sync.Mutex
	who := map[string]int{}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(callsAtOnce)
	for range times {
		group.Go(func() error {
			r, err := client.Call(ctx, args[2], []byte("{}"), 0)
			if err != nil {
				return err
			}
			answerer := fmt.Sprintf("%s: %s", r.Node, bytes.TrimSpace(r.Data))
			mu.Lock()
			defer mu.Unlock()
			who[answerer]++
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for _, answerer := range slices.Sorted(maps.Keys(who)) {
		if _, err := io.WriteString(ts.Stdout(), fmt.Sprintf("%d by %s\n", who[answerer], answerer)); err != nil {
			return err
		}
	}
	return nil
}
