package supervise

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestHoldEndsNothing: before Set what runs goes on, listed or not, and what is
// listed and does not run is started.
func TestHoldEndsNothing(t *testing.T) {
	dir := newDir(t)
	listed, unlisted := shell("listed@a", "exec sleep 1000"), shell("unlisted@a", "exec sleep 1000")
	a := run(t, dir)
	a.Set([]Spec{listed, unlisted}, nil)
	pids := map[string]int{"listed@a": a.reach("listed@a", Running).PID, "unlisted@a": a.reach("unlisted@a", Running).PID}
	a.leave()

	b := run(t, dir)
	other := listed
	other.Fingerprint = "2"
	b.Hold([]Spec{other, shell("fresh@a", "exec sleep 1000")})
	fresh := b.reach("fresh@a", Running).PID
	for name, pid := range pids {
		if st := b.reach(name, Running); st.PID != pid {
			t.Errorf("%s was touched: %+v, want the process %d", name, st, pid)
		}
	}
	b.Set([]Spec{listed, shell("fresh@a", "exec sleep 1000")}, nil)
	until(t, "what is not wanted is gone", func() bool { _, is := b.Status()["unlisted@a"]; return !is })
	if st := b.reach("listed@a", Running); st.PID != pids["listed@a"] {
		t.Errorf("taken over: %+v, want the process %d", st, pids["listed@a"])
	}
	if st := b.reach("fresh@a", Running); st.PID != fresh {
		t.Errorf("taken over: %+v, want the process %d", st, fresh)
	}
}

// TestKillNineAndAdopt kills a whole meshd and lets others take over.
func TestKillNineAndAdopt(t *testing.T) {
	dir := newDir(t)
	starts := filepath.Join(dir, "starts")
	spec := shell("shop@a", "echo $$ >>"+starts+"; while :; do echo alive; sleep 0.02; done")
	p := plan{Dir: dir, Specs: []Spec{spec}}
	kill := startMeshd(t, p)
	until(t, "the first meshd runs it", func() bool { return statusOf(p, "shop@a").State == Running })
	pid := statusOf(p, "shop@a").PID
	kill()
	if !alive(pid) {
		t.Fatal("the process died with its meshd")
	}

	b := run(t, dir)
	if st := b.reach("shop@a", Running); st.PID != pid || st.Fingerprint != "1" {
		t.Errorf("before Set: %+v, want the process %d", st, pid)
	}
	b.Set([]Spec{spec}, nil)
	// A check of the second meshd passes: it looks after the process.
	checked := spec
	checked.Health = &Health{Exec: []string{"/bin/true"}, Every: 10 * time.Millisecond}
	b.Set([]Spec{checked}, nil)
	if st := b.reach("shop@a", Healthy); st.PID != pid {
		t.Errorf("adopted: %+v, want the process %d", st, pid)
	}
	if got := readInts(t, starts); len(got) != 1 {
		t.Errorf("started %d times: %v", len(got), got)
	}
	b.leave() // and a third, in the ordinary way
	c := run(t, dir)
	c.Set([]Spec{spec}, nil)
	if st := c.reach("shop@a", Running); st.PID != pid {
		t.Errorf("adopted again: %+v, want the process %d", st, pid)
	}

	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, "the end of an adopted process is noticed", func() bool {
		st := c.Status()["shop@a"]
		return st.State == Running && st.PID != pid && st.Restarts == 1 && st.Class == EndedUnseen
	})
	until(t, "one more start", func() bool { return len(readInts(t, starts)) == 2 })
	if err := c.StopAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, pid := range readInts(t, starts) {
		if alive(pid) {
			t.Errorf("process %d lives after StopAll", pid)
		}
	}
}

// TestCrashAroundAStart kills meshd at each instant of a start: with the record
// not yet written, with it written and nothing started, with the process started
// and its number not yet written, and with that written.
func TestCrashAroundAStart(t *testing.T) {
	cases := []struct {
		name    string
		before  int
		after   int
		running bool // at the crash
	}{
		{"ahead of the first record", 1, 0, false},
		{"between record and start", 0, 1, false},
		{"between start and record", 2, 0, true},
		{"behind the second record", 0, 2, true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			dir := newDir(t)
			starts := filepath.Join(dir, "starts")
			spec := shell("shop@a", "echo $$ >>"+starts+"; sleep 1000 & wait")
			p := plan{Dir: dir, Specs: []Spec{spec}, DieBefore: c.before, DieAfter: c.after, StatusFile: filepath.Join(dir, "status.json")}
			if err := p.command(t, "meshd").Run(); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Fatalf("meshd did not die as planned: %v", err)
			}
			b := run(t, dir)
			if _, known := b.Status()["shop@a"]; c.running && !known {
				t.Error("the process was not found")
			}
			b.Set([]Spec{spec}, nil)
			st := b.reach("shop@a", Running)
			until(t, "it has started", func() bool { return len(readInts(t, starts)) > 0 })
			if got := readInts(t, starts); len(got) != 1 || got[0] != st.PID {
				t.Errorf("starts %v, running %d", got, st.PID)
			}
			if err := b.StopAll(t.Context()); err != nil {
				t.Fatal(err)
			}
			if alive(st.PID) {
				t.Error("the process lives after StopAll")
			}
		})
	}
}

func TestReusedNumberIsNotTouched(t *testing.T) {
	stranger := exec.Command("/bin/sleep", "1000")
	stranger.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stranger.Process.Kill()
		_ = stranger.Wait()
	})
	st, err := readStat(stranger.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]record{
		"another start time": {Version: recordVersion, Token: "x", Boot: boot, Fingerprint: "1", PID: st.pid, Start: st.start - 1},
		"another boot":       {Version: recordVersion, Token: "x", Boot: "other", Fingerprint: "1", PID: st.pid, Start: st.start},
		"another version":    {Version: recordVersion + 1, Token: "x", Boot: boot, Fingerprint: "1", PID: st.pid, Start: st.start},
	}
	for name, rec := range cases {
		t.Run(name, func(t *testing.T) {
			dir := newDir(t)
			raw, err := json.Marshal(rec)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"shop@a", "gone@a"} {
				if err := os.WriteFile(filepath.Join(dir, "records", name), raw, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			b := run(t, dir)
			b.Set([]Spec{shell("shop@a", "exec sleep 1000")}, nil)
			if now := b.reach("shop@a", Running); now.PID == st.pid {
				t.Error("a stranger was adopted")
			}
			until(t, "the absent name is gone", func() bool { _, there := b.Status()["gone@a"]; return !there })
			if err := b.StopAll(t.Context()); err != nil {
				t.Fatal(err)
			}
			if now, err := readStat(st.pid); err != nil || now.dead() || now.start != st.start {
				t.Errorf("the stranger was touched: %+v, %v", now, err)
			}
		})
	}
}

func TestProcessesWithoutARecordAreEnded(t *testing.T) {
	dir := newDir(t)
	b := run(t, dir)
	b.Set([]Spec{shell("lost@a", "exec sleep 1000"), shell("kept@a", "exec sleep 1000")}, nil)
	lost, kept := b.reach("lost@a", Running).PID, b.reach("kept@a", Running).PID
	b.leave()
	for _, name := range []string{"lost@a", "kept@a"} {
		if err := os.Remove(filepath.Join(dir, "records", name)); err != nil {
			t.Fatal(err)
		}
	}
	c := run(t, dir)
	c.Set([]Spec{shell("kept@a", "exec sleep 1000")}, nil)
	if st := c.reach("kept@a", Running); st.PID == kept || alive(kept) {
		t.Errorf("beside the process without a record (%d) another was started: %+v", kept, st)
	}
	until(t, "the one that is not wanted has ended", func() bool { return !alive(lost) })
}

func TestOneSupervisorPerDirectory(t *testing.T) {
	b := run(t, newDir(t))
	s, err := New(configFor(b.dir))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "another meshd") {
		t.Errorf("a second Run in one directory: %v", err)
	}
	if err := s.StopAll(t.Context()); err == nil {
		t.Error("StopAll without Run succeeded")
	}
	if err := b.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "runs once") {
		t.Errorf("a second Run of one Supervisor: %v", err)
	}
}

func TestConfigReportsEveryFault(t *testing.T) {
	_, err := New(Config{Dir: "relative", LogKeep: -1})
	for _, want := range []string{"absolute", "Records", "Write", "negative"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
}

func TestParseStat(t *testing.T) {
	st, err := parseStat("42 (a) Z (b c) S 1 42 41 0 -1 0 0 0 0 0 0 0 0 0 20 0 7 0 987654 1 2\n")
	want := stat{pid: 42, state: 'S', parent: 1, group: 42, session: 41, threads: 7, start: 987654}
	if err != nil || st != want {
		t.Errorf("got %+v, %v, want %+v", st, err, want)
	}
	for _, bad := range []string{"", "1 x", "1 (x) S 1 2", "1 (x) S a b c 0 -1 0 0 0 0 0 0 0 0 0 20 0 7 0 9"} {
		if _, err := parseStat(bad); err == nil {
			t.Errorf("parsed %q", bad)
		}
	}
}

// TestProcess1 runs a Supervisor as process 1 of a namespace.
func TestProcess1(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can make a process namespace: run this test as root")
	}
	dir := newDir(t)
	p := plan{Dir: dir, Specs: []Spec{shell("shop@a", `(sleep 0.1 &); (exit 5); echo status $?; exec sleep 1000`)}}
	p.Specs[0].Health = &Health{Exec: []string{"/bin/sh", "-c", "(sleep 0.1 &)"}, Every: time.Hour}
	cmd := p.command(t, "process-1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	out, err := cmd.Output()
	if err != nil || string(out) != "reaped" {
		t.Errorf("%s, %v", out, err)
	}
}

func actAsProcess1() {
	p := readPlan()
	must := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	must(syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""))
	must(syscall.Mount("proc", "/proc", "proc", 0, ""))
	cfg := configFor(p.Dir)
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	s, err := New(cfg)
	must(err)
	s.Set(p.Specs, nil)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- s.Run(ctx) }()

	// Somebody else's child ends now, and is waited for much later.
	other := exec.Command("/bin/sh", "-c", "echo; exit 7")
	out, err := other.StdoutPipe()
	must(err)
	must(other.Start())
	_, err = bufio.NewReader(out).ReadString('\n')
	must(err)

	await := func(what string, ok func() bool) {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		deadline := time.After(20 * time.Second)
		for !ok() {
			select {
			case <-tick.C:
			case <-deadline:
				must(errors.New("not reached: " + what))
			}
		}
	}
	zombies := func() int {
		all, err := s.orphanZombies()
		must(err)
		return len(all)
	}
	await("an orphan became a zombie", func() bool { return zombies() > 0 })
	await("the orphan was reaped", func() bool { return zombies() == 0 })
	if err := other.Wait(); err == nil || err.Error() != "exit status 7" {
		must(fmt.Errorf("the exit status of another's child was taken: %w", err))
	}
	if st := s.Status()["shop@a"]; st.State != Healthy {
		must(fmt.Errorf("the process: %+v", st))
	}
	must(s.StopAll(ctx))
	cancel()
	must(<-ended)
	fmt.Print("reaped")
}
