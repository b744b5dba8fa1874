package supervise

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"meshd/peer/identity"
)

// role makes the test binary act as something else when it executes itself.
const role = "SUPERVISE_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "":
		goleak.VerifyTestMain(m)
	case "meshd":
		actAsMeshd()
	case "process-1":
		actAsProcess1()
	case "version-2":
		actInVersion2()
	case "lookup":
		_, err := LookupUser(os.Getenv("SUPERVISE_TEST_USER"))
		fmt.Print(err)
	default:
		fmt.Fprintln(os.Stderr, "unknown role")
		os.Exit(2)
	}
}

// files are Records in a directory, one file each.
type files struct {
	dir    string
	before func(save int) // called ahead of each Save, counted from 1
	after  func(save int)
	saves  atomic.Int32
}

func (f *files) Load() (map[string][]byte, error) {
	all := map[string][]byte{}
	entries, err := os.ReadDir(f.dir)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".tmp") {
			continue // a crash left it
		}
		b, readErr := os.ReadFile(filepath.Join(f.dir, e.Name()))
		err = errors.Join(err, readErr)
		all[e.Name()] = b
	}
	return all, err
}

func (f *files) Save(name string, record []byte) error {
	n := int(f.saves.Add(1))
	if f.before != nil {
		f.before(n)
	}
	err := identity.WriteFile(filepath.Join(f.dir, name), record)
	if f.after != nil {
		f.after(n)
	}
	return err
}

func (f *files) Delete(name string) error {
	err := os.Remove(filepath.Join(f.dir, name))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// bed is a Supervisor that runs, and whose processes end with the test.
type bed struct {
	*Supervisor
	t      *testing.T
	dir    string
	cancel context.CancelFunc
	ended  chan error
}

func newDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "records"), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func configFor(dir string) Config {
	return Config{
		Dir: dir, Records: &files{dir: filepath.Join(dir, "records")}, Write: identity.WriteFile,
		BackoffMin: 20 * time.Millisecond, BackoffMax: 200 * time.Millisecond, BackoffReset: 500 * time.Millisecond,
	}
}

// run starts a Supervisor in dir.
func run(t *testing.T, dir string, change ...func(*Config)) *bed {
	t.Helper()
	cfg := configFor(dir)
	cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	for _, c := range change {
		c(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	b := &bed{Supervisor: s, t: t, dir: dir, cancel: cancel, ended: make(chan error, 1)}
	go func() { b.ended <- s.Run(ctx) }()
	until(t, "Run has adopted", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.ctx != nil
	})
	t.Cleanup(func() {
		b.leave()
		killInstance(t, s.instance)
	})
	return b
}

// leave ends Run, which leaves the processes.
func (b *bed) leave() {
	b.t.Helper()
	if b.cancel == nil {
		return
	}
	b.cancel()
	b.cancel = nil
	if err := <-b.ended; err != nil {
		b.t.Errorf("Run: %v", err)
	}
}

// killInstance ends every process with a token of the instance.
func killInstance(t *testing.T, instance string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := (family{prefix: instance + ":"}).end(ctx, time.Nanosecond, func(string) {}); err != nil {
		t.Errorf("clean up: %v", err)
	}
	c := findCgroups(groupPrefix + instance)
	for _, own := range c.v1 {
		_ = os.Remove(filepath.Join(own, c.group))
	}
}

// until waits for a condition, which is cheap to ask for.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(30 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// reach waits until name is in state, and returns its status then.
func (b *bed) reach(name string, state State) Status {
	b.t.Helper()
	var st Status
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(30 * time.Second)
	for {
		if st = b.Status()[name]; st.State == state {
			return st
		}
		select {
		case <-tick.C:
		case <-deadline:
			b.t.Fatalf("%s is not %s within 30 s: %+v", name, state, st)
		}
	}
}

// shell is a spec that runs a script.
func shell(name, script string) Spec {
	return Spec{Name: name, Exec: []string{"/bin/sh", "-c", script}, Fingerprint: "1"}
}

func alive(pid int) bool {
	st, err := readStat(pid)
	return err == nil && !st.dead()
}

func readInts(t *testing.T, path string) []int {
	t.Helper()
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	var all []int
	for _, f := range strings.Fields(string(b)) {
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	return all
}

// plan is what a test tells the program that it executes.
type plan struct {
	Dir        string
	Specs      []Spec
	DieBefore  int // kill -9 ahead of this Save
	DieAfter   int // kill -9 behind it
	StatusFile string
}

func (p plan) command(t *testing.T, as string) *exec.Cmd {
	t.Helper()
	b, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), role+"="+as, "SUPERVISE_TEST_PLAN="+string(b))
	cmd.Stderr = t.Output()
	return cmd
}

func readPlan() plan {
	var p plan
	if err := json.Unmarshal([]byte(os.Getenv("SUPERVISE_TEST_PLAN")), &p); err != nil {
		panic(err)
	}
	return p
}

// startMeshd executes a Supervisor in a process of its own. kill ends it as
// kill -9 does.
func startMeshd(t *testing.T, p plan) (kill func()) {
	t.Helper()
	p.StatusFile = filepath.Join(p.Dir, "status.json")
	cmd := p.command(t, "meshd")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	killed := false
	kill = func() {
		if !killed {
			killed = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // it was killed: the error says so
		}
	}
	t.Cleanup(kill)
	return kill
}

func statusOf(p plan, name string) Status {
	var all map[string]Status
	b, err := os.ReadFile(filepath.Join(p.Dir, "status.json"))
	if err != nil || json.Unmarshal(b, &all) != nil {
		return Status{}
	}
	return all[name]
}

func actAsMeshd() {
	p := readPlan()
	die := func(at int) func(int) {
		return func(n int) {
			if n == at {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		}
	}
	cfg := configFor(p.Dir)
	cfg.Records = &files{dir: filepath.Join(p.Dir, "records"), before: die(p.DieBefore), after: die(p.DieAfter)}
	changed := make(chan struct{}, 1)
	cfg.Changed = func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	s, err := New(cfg)
	if err != nil {
		panic(err)
	}
	s.Set(p.Specs, nil)
	go func() {
		for range changed {
			b, err := json.Marshal(s.Status())
			if err == nil {
				err = identity.WriteFile(p.StatusFile, b)
			}
			if err != nil {
				panic(err)
			}
		}
	}()
	if err := s.Run(context.Background()); err != nil {
		panic(err)
	}
}
