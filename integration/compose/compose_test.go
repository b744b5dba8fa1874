// Package compose is an example of meshd in containers, and the test of it: see
// docker-compose.yml.
package compose

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	project = "meshd-test"
	// within bounds every wait: a new leader takes 2 s, a dead node is noticed
	// after 7, and the machine may be busy.
	within = 40 * time.Second
	// tick is how often a condition is looked at: a look costs a process.
	tick = 200 * time.Millisecond
	// atAll bounds the whole test, which takes half a minute when all is well.
	atAll = 5 * time.Minute
	// workspace names, in the environment, the directory of the test that runs
	// inside of engine.sh. Its program meshd is there.
	workspace = "MESHD_COMPOSE_WORKSPACE"
)

// TestCompose runs three containers that hold nothing but meshd, and kills each
// in turn. Whatever dies, the others go on: there is a leader, and a push on any
// of them is accepted. What died comes back as the same node.
//
// Where no Docker engine answers, the test runs itself again with one of its own.
func TestCompose(t *testing.T) {
	if dir := os.Getenv(workspace); dir != "" {
		story(t, &bed{t: t, dir: dir})
		return
	}
	needEngine(t)
	dir := t.TempDir()
	build(t, "../..", filepath.Join(dir, "meshd"))
	build(t, "testdata/orphan/main.go", filepath.Join(dir, "orphan"))

	ctx, cancel := context.WithTimeout(t.Context(), atAll)
	defer cancel()
	cmd := exec.CommandContext(ctx, "./engine.sh", os.Args[0], "-test.run=^TestCompose$", "-test.v")
	cmd.Env = append(os.Environ(), workspace+"="+dir)
	// The death signal is sent when the thread ends that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
}

// needEngine skips the test where there can be no engine, or fails it where
// MESHD_REQUIRE_SERVERS is 1.
func needEngine(t *testing.T) {
	var missing []string
	for _, program := range []string{"docker", "docker-compose"} {
		if _, err := exec.LookPath(program); err != nil {
			missing = append(missing, program)
		}
	}
	if len(missing) == 0 && exec.Command("docker", "info").Run() != nil {
		if os.Geteuid() != 0 {
			missing = append(missing, "an engine that answers, or root to start one")
		} else if _, err := exec.LookPath("dockerd"); err != nil {
			missing = append(missing, "dockerd")
		}
	}
	if len(missing) == 0 {
		return
	}
	text := "needs " + strings.Join(missing, ", ") + " (Debian: apt-get install docker.io docker-compose)"
	if os.Getenv("MESHD_REQUIRE_SERVERS") == "1" {
		t.Fatal(text)
	}
	t.Skip(text)
}

// build makes a static program, which alone runs in an image without files.
func build(t *testing.T, source, program string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, source)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", source, err, out)
	}
}

func story(t *testing.T, b *bed) {
	b.up()
	names := []string{"n1", "n2", "n3"}
	var ids []string
	for _, n := range b.status("n1").Nodes {
		ids = append(ids, n.ID)
	}

	text, err := os.ReadFile("testdata/writer.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if out, code := b.meshd("n2", string(text), "push", "-"); code != 0 {
		t.Fatalf("push on n2 of a store on n1 and a program on n3: exit code %d\n%s", code, out)
	}
	writer := b.writer()

	for i, victim := range names {
		began := time.Now()
		b.docker("kill", "-s", "KILL", b.id(victim))
		survivors := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == victim })
		pusher := survivors[i%2]
		marker := "marker-of-" + victim
		b.until("a push on "+pusher+" without "+victim, func() bool {
			_, code := b.meshd(pusher, manifest(marker, pusher), "push", "--detach", "-")
			return code == 0
		})
		pushed := b.status(pusher)
		t.Logf("%s killed: %s leads, and a push on %s was accepted %.1f s after the kill", victim, pushed.Leader, pusher, time.Since(began).Seconds())
		if !slices.Contains(survivors, pushed.Leader) {
			t.Errorf("without %s, %s leads", victim, pushed.Leader)
		}
		if victim != "n3" && b.writer() != writer {
			t.Errorf("%s was killed, and the program on n3 did not go on running", victim)
		}

		began = time.Now()
		b.docker("start", b.id(victim))
		b.until(victim+" to be back, with what was pushed meanwhile", func() bool {
			s := b.status(victim)
			return s.Quorum && s.allUp() && slices.ContainsFunc(s.Modules, func(m module) bool { return m.Module == marker })
		})
		t.Logf("%s started again: caught up after %.1f s", victim, time.Since(began).Seconds())
		for _, n := range b.status(victim).Nodes {
			if !slices.Contains(ids, n.ID) {
				t.Errorf("%s has come back as another node: %s was not there before", n.Name, n.ID)
			}
		}
		b.ready(names)
	}
	if after := b.writer(); after == writer {
		t.Error("the program on n3 outlived its container")
	}
	if out, code := b.meshd("n2", "", "verify"); code != 0 {
		t.Errorf("verify: exit code %d\n%s", code, out)
	}
	b.reaps("n3")
	b.docker("stop", "-t", "15", b.id("n2"))
	if code := strings.TrimSpace(b.docker("inspect", "-f", "{{.State.ExitCode}}", b.id("n2"))); code != "0" {
		t.Errorf("docker stop n2: exit code %s", code)
	}
}

// manifest is something to push that no node has to do anything for.
func manifest(name, node string) string {
	return fmt.Sprintf("module: %s\nrun: {external: true}\n---\nassign: %s\nnode: %s\n", name, name, node)
}

// bed is the containers of the compose file.
type bed struct {
	t   *testing.T
	dir string
}

// up starts the three nodes, and removes everything when the test ends; what a
// killed test left in an engine that is not its own is removed before.
func (b *bed) up() {
	b.t.Helper()
	if err := os.Mkdir(filepath.Join(b.dir, "tokens"), 0o700); err != nil {
		b.t.Fatal(err)
	}
	b.compose("down", "-v", "-t", "0", "--remove-orphans")
	b.run("", "docker", "build", "-q", "-t", project, "--label", project, "-f", "Dockerfile", b.dir)
	b.t.Cleanup(b.down)
	b.compose("up", "-d", "n1")
	b.until("n1 to lead", func() bool { return b.status("n1").Quorum })
	for _, name := range []string{"n2", "n3"} {
		token, code := b.meshd("n1", "", "token")
		if code != 0 {
			b.t.Fatalf("make a token: %s", token)
		}
		// The last line: what is before it is for people.
		if err := os.WriteFile(filepath.Join(b.dir, "tokens", name), []byte(token[strings.LastIndex(strings.TrimSpace(token), "\n")+1:]), 0o600); err != nil {
			b.t.Fatal(err)
		}
	}
	b.compose("up", "-d")
	for _, name := range []string{"n1", "n2", "n3"} {
		b.until("three nodes that "+name+" sees", func() bool {
			s := b.status(name)
			return len(s.Nodes) == 3 && s.allUp() && s.votes() == 3
		})
	}
}

// down removes everything, and looks that nothing is left.
func (b *bed) down() {
	if b.t.Failed() {
		b.t.Log(b.compose("logs", "--no-color", "--tail", "50"))
	}
	b.compose("down", "-v", "-t", "0", "--remove-orphans")
	b.docker("rmi", "-f", project)
	b.docker("image", "prune", "-f", "--filter", "label="+project) // of earlier builds
	ours := "label=com.docker.compose.project=" + project
	for _, list := range [][]string{
		{"ps", "-aq", "--filter", ours}, {"volume", "ls", "-q", "--filter", ours}, {"network", "ls", "-q", "--filter", ours}, {"images", "-aq", "--filter", "label=" + project},
	} {
		if left := b.docker(list...); left != "" {
			b.t.Errorf("docker %s: there is still %s", strings.Join(list, " "), left)
		}
	}
}

func (b *bed) compose(args ...string) string {
	b.t.Helper()
	return b.run("", "docker-compose", append([]string{"-p", project}, args...)...)
}

func (b *bed) docker(args ...string) string {
	b.t.Helper()
	return b.run("", "docker", args...)
}

// run runs a command that must succeed.
func (b *bed) run(stdin, program string, args ...string) string {
	b.t.Helper()
	out, err := b.try(stdin, program, args...)
	if err != nil {
		b.t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return out
}

func (b *bed) try(stdin, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Env = append(os.Environ(), "MESHD_IMAGE="+project, "MESHD_TOKENS="+filepath.Join(b.dir, "tokens"))
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		out = append(out, errs.Bytes()...)
	}
	return string(out), err
}

// id is the container of a node.
func (b *bed) id(node string) string {
	b.t.Helper()
	id := strings.TrimSpace(b.docker("ps", "-aq", "--filter", "label=com.docker.compose.project="+project, "--filter", "label=com.docker.compose.service="+node))
	if id == "" || strings.Contains(id, "\n") {
		b.t.Fatalf("%s is not one container: %q", node, id)
	}
	return id
}

// meshd runs a command on a node, as a person would.
func (b *bed) meshd(node, stdin string, args ...string) (out string, code int) {
	b.t.Helper()
	out, err := b.try(stdin, "docker", append([]string{"exec", "-i", b.id(node), "/meshd"}, args...)...)
	var ended *exec.ExitError
	switch {
	case errors.As(err, &ended):
		return out, ended.ExitCode()
	case err != nil:
		b.t.Fatal(err)
	}
	return out, 0
}

// status is the part of meshd status -o json that the test reads.
type status struct {
	Leader  string
	Quorum  bool
	Nodes   []struct{ ID, Name, State, Role string }
	Modules []module
}

type module struct{ Module, State string }

// status asks a node; one that does not answer says nothing.
func (b *bed) status(node string) status {
	b.t.Helper()
	var s status
	out, code := b.meshd(node, "", "status", "-o", "json")
	if code == 0 || code == 2 { // 2: something is un-ready
		if err := json.Unmarshal([]byte(out), &s); err != nil {
			b.t.Fatalf("read the status of %s: %v\n%s", node, err, out)
		}
	}
	return s
}

func (s status) allUp() bool {
	for _, n := range s.Nodes {
		if n.State != "up" {
			return false
		}
	}
	return len(s.Nodes) > 0
}

func (s status) votes() int {
	votes := 0
	for _, n := range s.Nodes {
		if n.Role == "leader" || n.Role == "voter" {
			votes++
		}
	}
	return votes
}

// ready waits until no node misses anything.
func (b *bed) ready(nodes []string) {
	b.t.Helper()
	for _, name := range nodes {
		b.until(name+" to say that all is ready", func() bool {
			s := b.status(name)
			runs := slices.ContainsFunc(s.Modules, func(m module) bool { return m.Module == "writer" && m.State == "running" })
			_, code := b.meshd(name, "", "status")
			return s.allUp() && runs && code == 0
		})
	}
}

// until waits for a condition.
func (b *bed) until(what string, reached func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(within)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for !reached() {
		if time.Now().After(deadline) {
			for _, node := range []string{"n1", "n2", "n3"} {
				out, code := b.meshd(node, "", "status")
				b.t.Logf("%s, exit code %d:\n%s", node, code, out)
			}
			b.t.Fatalf("waited %v for %s", within, what)
		}
		<-ticker.C
	}
}

// writer is the process of the program on n3, as it is numbered outside.
func (b *bed) writer() (pid string) {
	b.t.Helper()
	all := b.docker("top", b.id("n3"), "-o", "pid,args")
	for line := range strings.Lines(all) {
		if strings.Contains(line, "demo-writer") {
			return strings.Fields(line)[0]
		}
	}
	b.t.Fatalf("the program does not run on n3:\n%s", all)
	return ""
}

// reaps checks that process 1 waits for the children that others leave to it.
func (b *bed) reaps(node string) {
	b.t.Helper()
	b.docker("cp", filepath.Join(b.dir, "orphan"), b.id(node)+":/orphan")
	orphan := strings.TrimSpace(b.docker("exec", b.id(node), "/orphan"))
	var was []string
	b.until("the orphan to be gone from "+node, func() bool {
		state := strings.TrimSpace(b.docker("exec", b.id(node), "/orphan", "state", orphan))
		was = append(was, state)
		return state == "gone"
	})
	b.t.Logf("process %s, left behind on %s, was seen %q", orphan, node, was)
}
