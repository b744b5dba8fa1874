package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

const demoManifest = `# What the mesh is told. Pushed once, on any machine.
module: notes
claims: [notes-store]
provides:
  kv-bucket: {}                    # built into meshd: needs no other software
---
seat: notes-store                  # a role that one machine answers for all
delivers: kv-bucket
verbs: [buckets]
holder: notes-main
---
assign: notes
node: alpha
as: notes-main
---
module: writer
run: {exec: [%s, demo-writer]}
requires:
  pad: {kind: kv-bucket, provider: notes-main}
---
assign: writer
node: gamma
`

// demoStep bounds the wait for anything in the demo: gossip needs 7 s to find a
// dead machine.
const demoStep = 30 * time.Second

func newDemoCommand() *cobra.Command {
	var keep bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "A mesh of three nodes on this machine: the whole story in a minute, no other software needed",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d := &demo{out: cmd.OutOrStdout(), keep: keep, began: time.Now(), procs: map[string]*exec.Cmd{}}
			err := d.run(cmd.Context())
			if err != nil {
				fmt.Fprintln(d.out)
				return fmt.Errorf("the demo stopped at step %d: %w", d.step, err)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the mesh running and print how to talk to it")
	return cmd
}

// demo is one run: three nodes as three processes of this program.
type demo struct {
	out   io.Writer
	keep  bool
	began time.Time
	step  int
	dir   string
	bin   string
	procs map[string]*exec.Cmd
}

func (d *demo) run(ctx context.Context) (err error) {
	if d.dir, err = os.MkdirTemp("", "meshd-demo-"); err != nil {
		return err
	}
	defer func() {
		if err != nil || !d.keep {
			err = errors.Join(err, d.cleanUp())
		}
	}()
	if err := d.copyBinary(); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{d.startMesh, d.push, d.call, d.kill, d.back, d.remove} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	if d.keep {
		d.explainKeep()
		return nil
	}
	d.say("Everything above was seen to happen. It took %.0f seconds. Cleaning up.", time.Since(d.began).Seconds())
	return nil
}

// copyBinary keeps this program beside the nodes' data: `go run` deletes its own.
func (d *demo) copyBinary() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	b, err := os.ReadFile(self)
	if err != nil {
		return err
	}
	d.bin = filepath.Join(d.dir, "meshd")
	return os.WriteFile(d.bin, b, 0o700)
}

func (d *demo) head(format string, args ...any) {
	d.step++
	fmt.Fprintf(d.out, "\n%d. %s\n", d.step, fmt.Sprintf(format, args...))
}

func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.out, "   "+format+"\n", args...) }

func (d *demo) place(node string) place { return place{filepath.Join(d.dir, node)} }

func (d *demo) client(node string) *api.Client { return api.NewClient(d.place(node).socket()) }

// meshd runs a command line on a node, as a person would, and shows it.
func (d *demo) meshd(ctx context.Context, node string, args ...string) (code int, output string) {
	fmt.Fprintf(d.out, "\n   %s$ meshd %s\n", node, strings.Join(args, " "))
	var seen bytes.Buffer
	out := io.MultiWriter(&seen, &indented{to: d.out})
	code = Main(ctx, append(args, "--socket", d.place(node).socket()), strings.NewReader(""), out, out)
	return code, seen.String()
}

// indented begins every line with blanks.
type indented struct {
	to    io.Writer
	begun bool
}

func (w *indented) Write(b []byte) (int, error) {
	for _, line := range bytes.SplitAfter(b, []byte("\n")) {
		if len(line) == 0 {
			continue
		}
		if !w.begun && len(bytes.TrimSpace(line)) > 0 {
			if _, err := io.WriteString(w.to, "   "); err != nil {
				return 0, err
			}
		}
		if _, err := w.to.Write(line); err != nil {
			return 0, err
		}
		w.begun = line[len(line)-1] != '\n'
	}
	return len(b), nil
}

// startMesh starts the first node and lets two more in, each with a token.
func (d *demo) startMesh(ctx context.Context) error {
	d.head("Three machines, here three processes on this one: alpha makes a mesh, beta and gamma join it.")
	if err := d.node(ctx, "alpha", "init"); err != nil {
		return err
	}
	for _, name := range []string{"beta", "gamma"} {
		token, err := d.client("alpha").Token(ctx, time.Minute)
		if err != nil {
			return err
		}
		file := filepath.Join(d.dir, name+".token")
		if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
			return err
		}
		if err := d.node(ctx, name, "join", "--token-file", file); err != nil {
			return err
		}
	}
	err := d.until(ctx, "gamma", "three voters that see each other", func(o api.Overview) bool {
		return len(o.Voters) == 3 && o.Alive["alpha"] && o.Alive["beta"] && o.Alive["gamma"]
	})
	if err != nil {
		return err
	}
	d.say("No machine is special: any of them takes any command, and any may die.")
	return nil
}

// node starts one node of its own session, which so outlives a demo that keeps it.
func (d *demo) node(ctx context.Context, name string, verb ...string) error {
	args := append(verb, "--dir", d.place(name).dir)
	if verb[0] != "start" {
		args = append(args, "--name", name, "--bind", "127.0.0.1")
		var ports []int
		for _, flag := range []string{"--port", "--bus-port", "--store-port"} {
			port, err := freePort(ports)
			if err != nil {
				return err
			}
			ports, args = append(ports, port), append(args, flag, strconv.Itoa(port))
		}
	}
	log, err := os.OpenFile(filepath.Join(d.dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(d.bin, args...)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = log, log, &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	d.procs[name] = cmd
	if err := d.until(ctx, name, "node "+name+" to serve", func(o api.Overview) bool { return o.Quorum && o.State.Mesh.ID != "" }); err != nil {
		text, _ := os.ReadFile(log.Name()) // what is there of it is better than nothing
		return fmt.Errorf("%w; it said: %s", err, bytes.TrimSpace(text))
	}
	d.say("%-5s is up, process %d", name, cmd.Process.Pid)
	return nil
}

// until waits for a condition as a node sees it.
func (d *demo) until(ctx context.Context, node, what string, done func(api.Overview) bool) error {
	ctx, cancel := context.WithTimeout(ctx, demoStep)
	defer cancel()
	client := d.client(node)
	defer client.Close()
	for {
		o, err := client.Overview(ctx)
		if err == nil && done(o) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited %v for %s", demoStep, what)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

const demoBinding = "writer@gamma/pad"

// push is the main job: a program on gamma gets a bucket of alpha's.
func (d *demo) push(ctx context.Context) error {
	d.head("One push, on beta: a program on gamma needs a bucket from the store on alpha.")
	file := filepath.Join(d.dir, "demo.yaml")
	text := fmt.Sprintf(demoManifest, d.bin)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	fmt.Fprintln(d.out)
	if _, err := io.WriteString(&indented{to: d.out}, strings.ReplaceAll(text, d.bin, "meshd")); err != nil {
		return err
	}
	if code, _ := d.meshd(ctx, "beta", "push", file); code != 0 {
		return fmt.Errorf("the push ended with exit code %d", code)
	}
	d.say("")
	d.say("alpha made the bucket and a login of its own for the program; gamma got it, proved that it")
	d.say("works from there, started the program; and alpha saw the program use it. Nothing was pushed twice.")
	return nil
}

// call asks the seat from the machine that neither holds it nor uses it.
func (d *demo) call(ctx context.Context) error {
	d.head("A question to the mesh's store, asked on beta. The log names who answers: alpha, and nobody else.")
	code, output := d.meshd(ctx, "beta", "call", "notes-store.buckets", "-v")
	if code != 0 || !strings.Contains(output, "alpha") {
		return fmt.Errorf("the call ended with exit code %d", code)
	}
	if code, _ = d.meshd(ctx, "beta", "verify"); code != 0 {
		return fmt.Errorf("verify ended with exit code %d", code)
	}
	return nil
}

// kill takes alpha down without a word.
func (d *demo) kill(ctx context.Context) error {
	d.head("alpha dies (kill -9).")
	before, err := d.writer()
	if err != nil {
		return err
	}
	alpha := d.procs["alpha"]
	if err := alpha.Process.Kill(); err != nil {
		return err
	}
	_ = alpha.Wait() // it was killed, and says so
	err = d.until(ctx, "beta", "beta and gamma to go on without alpha", func(o api.Overview) bool {
		return !o.Alive["alpha"] && o.Leader != "" && o.Leader != "alpha"
	})
	if err != nil {
		return err
	}
	if code, _ := d.meshd(ctx, "beta", "status"); code == exitFailed {
		return errors.New("beta shows no status")
	}
	if code, _ := d.meshd(ctx, "gamma", "call", "notes-store.buckets"); code != exitFailed {
		return errors.New("somebody answered in the place of alpha")
	}
	after, err := d.writer()
	if err != nil {
		return err
	}
	if before != after {
		return fmt.Errorf("the program on gamma did not go on running: it was process %d, and is %d", before, after)
	}
	d.say("")
	d.say("beta and gamma still decide, the program on gamma still runs, and nobody answers for alpha's data.")
	return nil
}

// writer is the pid of the program on gamma.
func (d *demo) writer() (int, error) {
	for pid := range d.own() {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && bytes.Contains(line, []byte("demo-writer")) {
			return pid, nil
		}
	}
	return 0, errors.New("the program on gamma does not run")
}

// own yields the pids of all that runs the demo's own copy of meshd: the nodes,
// and what they supervise.
func (d *demo) own() iter.Seq[int] {
	return func(yield func(int) bool) {
		links, _ := filepath.Glob("/proc/[0-9]*/exe") // the pattern is good
		for _, link := range links {
			var pid int
			exe, err := os.Readlink(link)
			if err != nil || exe != d.bin {
				continue
			}
			if _, err := fmt.Sscanf(link, "/proc/%d/exe", &pid); err == nil && !yield(pid) {
				return
			}
		}
	}
}

// back starts alpha again: the same node, with everything that it had.
func (d *demo) back(ctx context.Context) error {
	d.head("alpha comes back, and needs to be told nothing.")
	if err := d.node(ctx, "alpha", "start"); err != nil {
		return err
	}
	err := d.until(ctx, "gamma", "alpha to answer again", func(o api.Overview) bool {
		if !o.Alive["alpha"] || o.State.Bindings[demoBinding].Phase() != raftfsm.PhaseInUse {
			return false
		}
		_, err := d.client("gamma").Call(ctx, "notes-store.buckets", nil, 0)
		return err == nil
	})
	if err != nil {
		return err
	}
	if code, _ := d.meshd(ctx, "gamma", "call", "notes-store.buckets"); code != 0 {
		return errors.New("alpha does not answer")
	}
	return nil
}

// remove withdraws the login and keeps the data.
func (d *demo) remove(ctx context.Context) error {
	if d.keep {
		return nil
	}
	d.head("The program is removed: its login stops working, its data stays.")
	if code, _ := d.meshd(ctx, "gamma", "rm", "module", "writer"); code != 0 {
		return fmt.Errorf("the removal ended with exit code %d", code)
	}
	if code, output := d.meshd(ctx, "gamma", "retained"); code != 0 || !strings.Contains(output, "kv-bucket") {
		return errors.New("the data is not listed as retained")
	}
	fmt.Fprintln(d.out)
	return nil
}

func (d *demo) explainKeep() {
	fmt.Fprintln(d.out)
	d.say("The mesh is left running in %s. Talk to it:", d.dir)
	fmt.Fprintf(d.out, "\n   export PATH=%s:$PATH\n   export MESHD_SOCKET=%s\n   meshd status\n\n", d.dir, d.place("beta").socket())
	d.say("The other nodes' sockets are %s and %s.", d.place("alpha").socket(), d.place("gamma").socket())
	var pids []string
	for _, name := range []string{"alpha", "beta", "gamma"} {
		pids = append(pids, fmt.Sprint(d.procs[name].Process.Pid))
	}
	d.say("To end it: meshd rm module writer; kill %s; rm -r %s", strings.Join(pids, " "), d.dir)
}

// cleanUp stops what the nodes supervise, the nodes, and removes their data.
func (d *demo) cleanUp() error {
	var errs []error
	for _, cmd := range d.procs {
		if cmd.ProcessState != nil {
			continue
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			errs = append(errs, err)
			continue
		}
		stuck := time.AfterFunc(2*stopWithin, func() { _ = cmd.Process.Kill() }) // gone meanwhile is as good
		_ = cmd.Wait()                                                           // how it ended does not matter
		stuck.Stop()
	}
	for pid := range d.own() { // what the nodes left running, as nodes do
		_ = syscall.Kill(pid, syscall.SIGKILL) // gone meanwhile is as good
	}
	return errors.Join(append(errs, os.RemoveAll(d.dir))...)
}
