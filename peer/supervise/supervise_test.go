package supervise

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"meshd/peer/identity"
)

func TestSetStartsRestartsAndStops(t *testing.T) {
	var changes atomic.Int32
	b := run(t, newDir(t), func(c *Config) { c.Changed = func() { changes.Add(1) } })
	spec := shell("shop@a", "exec sleep 1000")
	b.Set([]Spec{spec}, nil)
	first := b.reach("shop@a", Running)
	if first.PID == 0 || first.Started.IsZero() || first.Fingerprint != "1" || first.Restarts != 0 {
		t.Errorf("status of a running process: %+v", first)
	}
	if st, err := readStat(first.PID); err != nil || st.session != first.PID || st.group != first.PID {
		t.Errorf("the process has no session and group of its own: %+v, %v", st, err)
	}

	b.Set([]Spec{spec, shell("other@a", "exec sleep 1000")}, nil)
	b.reach("other@a", Running)
	if now := b.Status()["shop@a"]; now.PID != first.PID {
		t.Errorf("the same fingerprint restarted the process: %+v", now)
	}

	spec.Fingerprint = "2"
	b.Set([]Spec{spec}, nil)
	until(t, "the new fingerprint runs", func() bool {
		st := b.Status()["shop@a"]
		return st.State == Running && st.Fingerprint == "2"
	})
	if alive(first.PID) {
		t.Error("the process with the old fingerprint lives")
	}
	if st := b.Status()["shop@a"]; st.Restarts != 0 {
		t.Errorf("a restart that was asked for is counted: %+v", st)
	}
	until(t, "the absent name is gone", func() bool { _, there := b.Status()["other@a"]; return !there })
	if changes.Load() == 0 {
		t.Error("Changed was never called")
	}

	last := b.Status()["shop@a"].PID
	if err := b.Restart("shop@a"); err != nil {
		t.Fatal(err)
	}
	until(t, "restarted", func() bool {
		st := b.Status()["shop@a"]
		return st.State == Running && st.PID != last
	})

	last = b.Status()["shop@a"].PID
	if err := b.StopAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	if alive(last) {
		t.Error("StopAll left a process")
	}
	if left, _ := os.ReadDir(filepath.Join(b.dir, "records")); len(left) != 0 {
		t.Errorf("StopAll left records: %v", left)
	}
	b.Set([]Spec{spec}, nil)
	if got := b.Status(); len(got) != 0 {
		t.Errorf("Set after StopAll: %v", got)
	}
	if b.Signal("shop@a", syscall.SIGHUP) == nil || b.Restart("shop@a") == nil {
		t.Error("a name that is not there was signalled or restarted")
	}
}

func TestChildGetsNothingOfOurs(t *testing.T) {
	t.Setenv("OUR_SECRET", "do-not-pass-on")
	b := run(t, newDir(t))
	spec := shell("env@a", `env; echo arg "$0"; tr '\0' '\n' </proc/$$/cmdline; ls -l /proc/self/fd; read x || echo no input; exec sleep 1000`)
	spec.Env = []string{"KEY=some-secret", "HOME=/elsewhere"}
	b.Set([]Spec{spec}, nil)
	b.reach("env@a", Running)
	var out string
	until(t, "the child has looked around", func() bool {
		text, err := b.Logs("env@a", 1000)
		out = string(text)
		return err == nil && strings.Contains(out, "no input")
	})
	for _, want := range []string{"KEY=some-secret\n", "HOME=/elsewhere\n", "PATH=", tokenKey + "=" + b.instance + ":env@a:"} {
		if !strings.Contains(out, want) {
			t.Errorf("the environment lacks %q", want)
		}
	}
	if strings.Contains(out, "do-not-pass-on") {
		t.Error("our own environment was passed on")
	}
	for line := range strings.Lines(out) {
		if _, target, ok := strings.Cut(line, " -> "); ok {
			target = strings.TrimSpace(target)
			if target != "/dev/null" && !strings.HasSuffix(target, "env@a.log") && !strings.HasPrefix(target, "/proc/") {
				t.Errorf("a file of ours leaked: %s", target)
			}
		}
	}
	st, err := os.Stat(filepath.Join(b.dir, "env@a.log"))
	if err != nil || st.Mode() != 0o640 {
		t.Errorf("log mode %v, %v", st.Mode(), err)
	}
}

func TestStubbornGroupIsKilled(t *testing.T) {
	b := run(t, newDir(t))
	pids := filepath.Join(b.dir, "pids")
	// One grandchild in the group, one in a session of its own; all deaf.
	spec := shell("deaf@a", `trap "" TERM; sleep 1000 & echo $! >>`+pids+`; setsid sh -c 'echo $$ >>`+pids+`; exec sleep 1000' & echo $$ >>`+pids+`; wait; sleep 1000`)
	spec.StopTimeout = 100 * time.Millisecond
	b.Set([]Spec{spec, shell("calm@a", "exec sleep 1000")}, nil)
	until(t, "all have started", func() bool { return len(readInts(t, pids)) == 3 })
	b.reach("calm@a", Running)
	began := time.Now()
	b.Set([]Spec{shell("calm@a", "exec sleep 1000")}, nil)
	b.reach("deaf@a", Stopping)
	until(t, "stopped", func() bool { _, there := b.Status()["deaf@a"]; return !there })
	if took := time.Since(began); took < spec.StopTimeout {
		t.Errorf("killed after %v, before its stop timeout", took)
	}
	for _, pid := range readInts(t, pids) {
		if alive(pid) {
			t.Errorf("process %d lives", pid)
		}
	}
	b.reach("calm@a", Running)
}

func TestOneThatHangsHoldsUpNoOther(t *testing.T) {
	b := run(t, newDir(t))
	pids := filepath.Join(b.dir, "pids")
	deaf := shell("deaf@a", `trap "" TERM; echo $$ >>`+pids+`; while :; do sleep 1; done`)
	deaf.StopTimeout = time.Hour
	b.Set([]Spec{deaf}, nil)
	until(t, "deaf", func() bool { return len(readInts(t, pids)) == 1 })
	b.Set([]Spec{shell("new@a", "exec sleep 1000")}, nil)
	b.reach("new@a", Running)
	b.reach("deaf@a", Stopping)

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := b.StopAll(ctx); err == nil || !strings.Contains(err.Error(), "deaf@a") {
		t.Errorf("StopAll with one that hangs: %v", err)
	}
}

func TestLeftoversEndWithTheirLeader(t *testing.T) {
	b := run(t, newDir(t))
	pids := filepath.Join(b.dir, "pids")
	b.Set([]Spec{shell("fork@a", `sleep 1000 & echo $! >>`+pids)}, nil)
	until(t, "several starts", func() bool { return len(readInts(t, pids)) >= 3 })
	all := readInts(t, pids)
	for _, pid := range all[:len(all)-1] {
		if alive(pid) {
			t.Errorf("leftover %d of an earlier start lives beside a later one", pid)
		}
	}
}

func TestBackoffIsVisibleAndHeals(t *testing.T) {
	b := run(t, newDir(t), func(c *Config) { c.BackoffMax = 40 * time.Millisecond })
	mended := filepath.Join(b.dir, "mended")
	b.Set([]Spec{shell("flap@a", `[ -e `+mended+` ] || exit 3; exec sleep 1000`)}, nil)
	st := b.reach("flap@a", BackingOff)
	if st.Class != Exited || st.Exit != "exited with status 3" || st.NextTry.IsZero() || st.PID != 0 || st.Fingerprint != "" {
		t.Errorf("backing off: %+v", st)
	}
	until(t, "tried again", func() bool { return b.Status()["flap@a"].Restarts >= 3 })
	if err := os.WriteFile(mended, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	st = b.reach("flap@a", Running)
	if !st.NextTry.IsZero() || st.Restarts < 3 {
		t.Errorf("healed: %+v", st)
	}
	if err := syscall.Kill(st.PID, syscall.SIGSEGV); err != nil {
		t.Fatal(err)
	}
	until(t, "the signal is told", func() bool { return b.Status()["flap@a"].Class == Signalled })
}

func TestBackoffGrowsAndResets(t *testing.T) {
	s, err := New(Config{Dir: t.TempDir(), Records: &files{}, Write: identity.WriteFile})
	if err != nil {
		t.Fatal(err)
	}
	w := newWorker(s, "x", nil)
	var got []time.Duration
	for range 8 {
		w.backOff(Exited, "")
		got = append(got, w.delay)
	}
	want := []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second,
		8 * time.Second, 16 * time.Second, 30 * time.Second, 30 * time.Second}
	if !slices.Equal(got, want) {
		t.Errorf("waits %v, want %v", got, want)
	}

	b := run(t, newDir(t), func(c *Config) {
		c.BackoffMin, c.BackoffMax, c.BackoffReset = 10*time.Millisecond, time.Hour, 50*time.Millisecond
	})
	b.Set([]Spec{shell("long@a", "sleep 0.1; exit 1")}, nil) // runs well for longer than the reset
	until(t, "ten restarts, which take 10 s if the waits double", func() bool { return b.Status()["long@a"].Restarts >= 10 })
	b.mu.Lock()
	wait := time.Until(b.workers["long@a"].status.NextTry)
	b.mu.Unlock()
	if wait > 20*time.Millisecond {
		t.Errorf("the wait grew to %v", wait)
	}
}

func TestCannotStart(t *testing.T) {
	b := run(t, newDir(t))
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(b.dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	spec := func(name, program string) Spec { return Spec{Name: name, Exec: []string{program}, Fingerprint: "1"} }
	nowhere := shell("nowhere", "exit")
	nowhere.Dir = "/does/not/exist"
	stranger := shell("stranger", "exit")
	stranger.User = "no-such-user-here"
	relative := spec("relative", "./x")
	relative.Env = []string{"TOP_SECRET"}
	cases := []struct {
		spec  Spec
		state State
		class string
		text  string
	}{
		{spec("absent", "/does/not/exist"), BackingOff, ExecNotFound, "/does/not/exist"},
		{spec("absent-name", "no-such-program-here"), BackingOff, ExecNotFound, "no-such-program-here"},
		{spec("loader", file("loader.sh", "#!/does/not/exist\n", 0o700)), BackingOff, ExecNotFound, "interpreter"},
		{spec("plain", file("plain", "x", 0o600)), BackingOff, ExecDenied, "chmod +x"},
		{spec("format", file("format", "no program", 0o700)), BackingOff, ExecFormat, "#!"},
		{spec("directory", b.dir), BackingOff, ExecDenied, "directory"},
		{nowhere, BackingOff, DirNotFound, "/does/not/exist"},
		{stranger, BackingOff, UserUnknown, "no-such-user-here"},
		{relative, Failed, SpecRefused, "relative path"},
		{Spec{Name: "nothing"}, Failed, SpecRefused, "no program"},
		{Spec{Name: "../escape", Exec: []string{"/bin/true"}}, Failed, SpecRefused, "not of the form"},
	}
	var all []Spec
	for _, c := range cases {
		all = append(all, c.spec)
	}
	b.Set(all, nil)
	for _, c := range cases {
		st := b.reach(c.spec.Name, c.state)
		if st.Class != c.class || !strings.Contains(st.Exit, c.text) {
			t.Errorf("%s: class %q, text %q; want %q, %q", c.spec.Name, st.Class, st.Exit, c.class, c.text)
		}
		if strings.Contains(st.Exit, "TOP_SECRET") {
			t.Errorf("%s: the text quotes the environment: %s", c.spec.Name, st.Exit)
		}
		if (c.state == BackingOff) == st.NextTry.IsZero() {
			t.Errorf("%s: next try %v", c.spec.Name, st.NextTry)
		}
	}
	if err := os.Chmod(filepath.Join(b.dir, "plain"), 0o700); err != nil {
		t.Fatal(err)
	}
	file("plain", "#!/bin/sh\nexec sleep 1000\n", 0o700)
	b.reach("plain", Running)
}

func TestRefusedSpecLeavesWhatRuns(t *testing.T) {
	b := run(t, newDir(t))
	good := shell("shop@a", "exec sleep 1000")
	b.Set([]Spec{good}, nil)
	pid := b.reach("shop@a", Running).PID
	bad := good
	bad.Fingerprint, bad.Dir = "2", "relative"
	b.Set([]Spec{bad}, nil)
	until(t, "refusal is shown", func() bool { return b.Status()["shop@a"].Class == SpecRefused })
	if st := b.Status()["shop@a"]; st.PID != pid || st.State != Running || st.Fingerprint != "1" {
		t.Errorf("after a refused spec: %+v", st)
	}
	b.Set([]Spec{good, good}, nil)
	until(t, "twice is refused", func() bool { return strings.Contains(b.Status()["shop@a"].Exit, "given twice") })
	b.Set([]Spec{good}, nil)
	until(t, "refusal is over", func() bool { return b.Status()["shop@a"].Class == "" })
}

func TestKeepLeavesANameAsItIs(t *testing.T) {
	b := run(t, newDir(t))
	spec := shell("shop@a", "exec sleep 1000")
	b.Set([]Spec{spec}, nil)
	pid := b.reach("shop@a", Running).PID
	b.Set([]Spec{shell("other@a", "exec sleep 1000")}, []string{"shop@a", "new@a"})
	b.reach("other@a", Running)
	if st := b.Status()["shop@a"]; st.PID != pid || st.State != Running {
		t.Errorf("a kept name: %+v", st)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.reach("shop@a", BackingOff) // and it stays there: what to start is not known
	if st := b.Status()["new@a"]; st.State != Stopped {
		t.Errorf("a kept name that never ran: %+v", st)
	}
	b.Set([]Spec{spec}, nil)
	if st := b.reach("shop@a", Running); st.PID == pid || st.Restarts != 1 {
		t.Errorf("once it is known again: %+v", st)
	}
}

func TestIsolate(t *testing.T) {
	t.Setenv("OUR_SECRET", "do-not-pass-on")
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", "sleep 1000 & echo $!; env; pwd; exec sleep 1000")
	if err := Isolate(cmd, "no-such-user-here"); err == nil {
		t.Error("an unknown user was accepted")
	}
	if err := Isolate(cmd, ""); err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd.Stdout = out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var text string
	until(t, "it has looked around", func() bool {
		b, err := os.ReadFile(out.Name())
		text = string(b)
		return err == nil && strings.HasSuffix(text, "\n/\n")
	})
	if strings.Contains(text, "do-not-pass-on") || !strings.Contains(text, "PATH=") {
		t.Error("the environment is not what it should be")
	}
	cancel()
	if err := cmd.Wait(); err == nil {
		t.Error("a killed command succeeded")
	}
	var background int
	if _, err := fmt.Sscan(text, &background); err != nil {
		t.Fatal(err)
	}
	until(t, "what it started has ended", func() bool { return !alive(background) })
}

func TestHealth(t *testing.T) {
	var sick atomic.Bool
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if sick.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer web.Close()
	dir := newDir(t)
	flag := filepath.Join(dir, "flag")
	port := func() string { // a port that nobody listens on yet
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		return l.Addr().String()
	}()
	var listener net.Listener
	cases := []struct {
		name       string
		health     Health
		mend, harm func() error
		text       string
	}{
		{"http", Health{HTTP: web.URL + "/x?token=hidden"},
			func() error { sick.Store(false); return nil }, func() error { sick.Store(true); return nil }, "status 503"},
		{"tcp", Health{TCP: port},
			func() (err error) { listener, err = net.Listen("tcp", port); return err }, func() error { return listener.Close() }, "refused"},
		{"exec", Health{Exec: []string{"/bin/sh", "-c", "echo checked; test -e " + flag}},
			func() error { return os.WriteFile(flag, nil, 0o600) }, func() error { return os.Remove(flag) }, "exit status 1"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b := run(t, newDir(t))
			sick.Store(true)
			spec := shell(c.name, "exec sleep 1000")
			h := c.health
			h.Every, h.Fails, h.Grace = 10*time.Millisecond, 2, 20*time.Millisecond
			spec.Health = &h
			b.Set([]Spec{spec}, nil)
			st := b.reach(c.name, Unhealthy)
			if !strings.Contains(st.Health, c.text) || strings.Contains(st.Health, "hidden") {
				t.Errorf("health text %q", st.Health)
			}
			pid := st.PID
			if err := c.mend(); err != nil {
				t.Fatal(err)
			}
			if st := b.reach(c.name, Healthy); st.Health != "ok" || st.PID != pid {
				t.Errorf("healthy: %+v", st)
			}
			if err := c.harm(); err != nil {
				t.Fatal(err)
			}
			if st := b.reach(c.name, Unhealthy); st.PID != pid {
				t.Errorf("an unhealthy process was restarted: %+v", st)
			}
			spec.Health = nil // the same fingerprint: no restart
			b.Set([]Spec{spec}, nil)
			if st := b.reach(c.name, Running); st.PID != pid {
				t.Errorf("a changed check restarted the process: %+v", st)
			}
		})
	}
}

func TestHealthTimeoutAndGrace(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	b := run(t, newDir(t))
	slow := shell("slow", "exec sleep 1000")
	slow.Health = &Health{HTTP: "http://" + silent.Addr().String(), Timeout: 30 * time.Millisecond, Every: 10 * time.Millisecond, Grace: time.Millisecond}
	patient := shell("patient", "exec sleep 1000")
	patient.Health = &Health{Exec: []string{"/bin/sh", "-c", "sleep 1000"}, Timeout: 20 * time.Millisecond, Every: time.Millisecond, Fails: 1, Grace: time.Hour}
	b.Set([]Spec{slow, patient}, nil)
	if st := b.reach("slow", Unhealthy); st.Health != "no answer within 30ms" {
		t.Errorf("health text %q", st.Health)
	}
	until(t, "a check has failed", func() bool { return b.Status()["patient"].Health != "" })
	if st := b.Status()["patient"]; st.State != Starting {
		t.Errorf("within its grace: %+v", st)
	}
}

// TestSignal under nohup: whoever started us ignores hangups, and a shell cannot trap
// what is ignored when it begins.
func TestSignal(t *testing.T) {
	signal.Ignore(syscall.SIGHUP)
	t.Cleanup(func() { signal.Reset(syscall.SIGHUP) })
	b := run(t, newDir(t))
	b.Set([]Spec{shell("hup@a", `trap "echo reloaded" HUP; echo ready; while :; do sleep 0.05; done`)}, nil)
	has := func(text string) func() bool {
		return func() bool {
			out, err := b.Logs("hup@a", 10)
			return err == nil && strings.Contains(string(out), text)
		}
	}
	b.reach("hup@a", Running)
	until(t, "ready", has("ready"))
	if err := b.Signal("hup@a", syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	until(t, "reloaded", has("reloaded"))
}

func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can run a process as another user: run this test as root")
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Skipf("this machine has no user nobody: %v", err)
	}
	b := run(t, newDir(t))
	spec := shell("who@a", `echo "$(id -u) $(id -g) [$(id -G)] $HOME $USER"; exec sleep 1000`)
	spec.User = "nobody"
	spec.Health = &Health{Exec: []string{"/bin/sh", "-c", "test $(id -u) = " + nobody.Uid}}
	b.Set([]Spec{spec}, nil)
	b.reach("who@a", Healthy)
	want := fmt.Sprintf("%s %s [%s] %s nobody\n", nobody.Uid, nobody.Gid, nobody.Gid, nobody.HomeDir)
	until(t, "it says who it is", func() bool {
		out, err := b.Logs("who@a", 1)
		return err == nil && string(out) == want
	})

	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), role+"=lookup", "SUPERVISE_TEST_USER=root")
	u, err := lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: u.credential()}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "only root can run a process as another user") {
		t.Errorf("asked as nobody to run as root: %s, %v", out, err)
	}
}
