package supervise

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// child is a process that a worker looks after.
type child struct {
	*process
	record record
	gone   chan struct{} // closed when the process has ended
}

// watchChild begins to wait for the end of p.
func (s *Supervisor) watchChild(p *process, rec record) *child {
	c := &child{process: p, record: rec, gone: make(chan struct{})}
	s.wg.Go(func() {
		if c.wait() {
			close(c.gone)
		}
	})
	return c
}

// spawn starts spec. The record is saved before the process exists, and again
// with its number: see the package's invariants.
func (s *Supervisor) spawn(spec Spec, restarts int) (*child, *fault) {
	attr, argv0, bad := s.prepare(spec)
	if bad != nil {
		return nil, bad
	}
	output, err := s.logs.open(spec.Name)
	if err != nil {
		return nil, &fault{LogUnwritable, err}
	}
	defer output.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, &fault{StartFailed, err}
	}
	defer null.Close()
	attr.Files = []uintptr{null.Fd(), output.Fd(), output.Fd()}

	rec := record{
		Version: recordVersion, Token: s.instance + ":" + spec.Name + ":" + rand.Text(), Boot: s.boot,
		Fingerprint: spec.Fingerprint, StopTimeout: spec.StopTimeout, Started: time.Now().UTC(), Restarts: restarts,
	}
	// First in the environment, where a reader of /proc finds it soonest.
	attr.Env = append([]string{tokenKey + "=" + rec.Token}, attr.Env...)
	if err := s.save(spec.Name, rec); err != nil {
		return nil, &fault{RecordFailed, err}
	}

	var pid int
	fork := func() error {
		pid, err = syscall.ForkExec(argv0, spec.Exec, attr)
		return err
	}
	if spec.Limits == (Limits{}) {
		err = fork()
	} else {
		err = s.limits.fork(spec.Name, spec.Limits, attr.Sys, fork)
	}
	if err != nil {
		return nil, explain(argv0, err)
	}

	// The process may have ended by now: its zombie, which only we reap, still
	// holds the number.
	s.mu.Lock()
	s.children[pid] = true
	s.mu.Unlock()
	p, err := openProcess(pid, func(st stat) bool { return st.parent == os.Getpid() })
	if err != nil {
		return nil, s.abandon(pid, err)
	}
	rec.PID, rec.Start = p.pid, p.start
	if err := s.save(spec.Name, rec); err != nil {
		// It runs, and its token finds it: no reason to end it.
		s.cfg.Log.Warn("record a started process", "name", spec.Name, "err", err)
	}
	return s.watchChild(p, rec), nil
}

// abandon ends a process that we started and cannot get hold of.
func (s *Supervisor) abandon(pid int, cause error) *fault {
	_ = syscall.Kill(pid, syscall.SIGKILL) // our own unreaped child: the number is its own
	var status syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	s.forget(pid)
	return &fault{StartFailed, cause}
}

// forget says that nobody waits for pid any more.
func (s *Supervisor) forget(pid int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.children, pid)
}

// prepare finds the program, the user and the directory, and says in words which
// of them is missing. It also is where a program on a hanging file system hangs:
// here that holds up one worker, in a fork it would hold up all forks.
func (s *Supervisor) prepare(spec Spec) (*syscall.ProcAttr, string, *fault) {
	u, err := LookupUser(spec.User)
	if err != nil {
		return nil, "", asFault(StartFailed, err)
	}
	if st, err := os.Stat(spec.Dir); err != nil {
		return nil, "", faultf(DirNotFound, "use the working directory: %w", err)
	} else if !st.IsDir() {
		return nil, "", faultf(DirNotFound, "use the working directory: %s is not a directory", spec.Dir)
	}
	argv0 := spec.Exec[0]
	if !filepath.IsAbs(argv0) {
		if argv0, err = exec.LookPath(argv0); err != nil {
			return nil, "", faultf(ExecNotFound, "find the program: %w", err)
		}
	}
	st, err := os.Stat(argv0)
	switch {
	case errors.Is(err, os.ErrPermission):
		return nil, "", faultf(ExecDenied, "find the program: %w", err)
	case err != nil:
		return nil, "", faultf(ExecNotFound, "find the program: %w", err)
	case st.IsDir():
		return nil, "", faultf(ExecDenied, "execute %s: it is a directory", argv0)
	case st.Mode()&0o111 == 0:
		return nil, "", faultf(ExecDenied, "execute %s: no execute permission (mode %v); run: chmod +x %s", argv0, st.Mode().Perm(), argv0)
	}
	return &syscall.ProcAttr{
		Dir: spec.Dir,
		Env: environment(u, spec.Env),
		// A session of its own is a process group of its own as well.
		Sys: &syscall.SysProcAttr{Setsid: true, Credential: u.credential()},
	}, argv0, nil
}

// environment is what a process gets: who and where it is, and then what the
// spec says. Our own environment can hold secrets of ours, and stays here.
func environment(u User, spec []string) []string {
	path := os.Getenv("PATH")
	if path == "" {
		path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	}
	set := map[string]bool{}
	for _, kv := range spec {
		key, _, _ := strings.Cut(kv, "=")
		set[key] = true
	}
	var env []string
	for _, kv := range [][2]string{{"PATH", path}, {"HOME", u.Home}, {"USER", u.Name}, {"LOGNAME", u.Name}} {
		if kv[1] != "" && !set[kv[0]] {
			env = append(env, kv[0]+"="+kv[1])
		}
	}
	return append(env, spec...)
}

// explain gives a failed fork or exec its class. The program was there a moment
// ago, so that ENOENT is about what it needs.
func explain(argv0 string, err error) *fault {
	var known *fault
	switch {
	case errors.As(err, &known):
		return known
	case errors.Is(err, syscall.ENOENT):
		return faultf(ExecNotFound, "execute %s: its interpreter (the #! line) or dynamic loader does not exist: %w", argv0, err)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return faultf(ExecDenied, "execute %s: %w; the user must be able to execute it, and to enter its directory and the working directory", argv0, err)
	case errors.Is(err, syscall.ENOEXEC):
		return faultf(ExecFormat, "execute %s: %w; it is neither a program for this machine nor a script that begins with #!", argv0, err)
	}
	return faultf(StartFailed, "execute %s: %w", argv0, err)
}

func asFault(class string, err error) *fault {
	var known *fault
	if errors.As(err, &known) {
		return known
	}
	return &fault{class, err}
}

// lastWords says how a process ended, from its exit status.
func lastWords(status syscall.WaitStatus, seen, outOfMemory bool) (class, text string) {
	switch {
	case !seen:
		return EndedUnseen, "ended; its exit status is not known, because it was started by an earlier run of meshd"
	case status.Signaled() && outOfMemory:
		return OutOfMemory, fmt.Sprintf("killed at its memory limit (%v)", status.Signal())
	case status.Signaled() && status.CoreDump():
		return Signalled, fmt.Sprintf("ended by signal: %v (core dumped)", status.Signal())
	case status.Signaled():
		return Signalled, fmt.Sprintf("ended by signal: %v", status.Signal())
	}
	return Exited, fmt.Sprintf("exited with status %d", status.ExitStatus())
}
