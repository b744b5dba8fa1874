package supervise

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// DefaultStopTimeout is what a process gets between SIGTERM and SIGKILL. Ten
// seconds is what container engines give, and programs are written for.
const DefaultStopTimeout = 10 * time.Second

// Spec describes one process. A changed Fingerprint restarts it; Health and
// StopTimeout take effect on the running process, everything else at the next
// start.
type Spec struct {
	Name        string        // the assignment, such as "shop@gamma"
	Exec        []string      // program and arguments; an absolute path, or a bare name that is looked up in our PATH
	Dir         string        // working directory, absolute; "" is "/"
	User        string        // "" is the user that we run as
	Env         []string      // KEY=VALUE; may hold secrets. Nothing of our own environment is inherited but PATH
	Fingerprint string        // the caller's hash over what a restart is needed for
	Health      *Health       // nil: alive is good enough
	StopTimeout time.Duration // from SIGTERM to SIGKILL; default 10 s
	Limits      Limits
}

// Health is one check: exactly one of HTTP, TCP and Exec is set.
type Health struct {
	HTTP string   // URL; a status of 200 to 399 passes; redirects are not followed
	TCP  string   // host:port; a connection passes
	Exec []string // run as the process is; exit status 0 passes; its output goes to the log

	Every   time.Duration // between checks: default 2 s; four times a second at most, while starting
	Timeout time.Duration // of one check: default 2 s
	Grace   time.Duration // failures do not count this long after the start: default 10 s
	Fails   int           // consecutive failures that make it unhealthy: default 3, so one slow answer is none
}

// Limits are enforced by a control group; zero is no limit.
type Limits struct {
	Memory int64 // bytes
	CPU    int64 // thousandths of a core; at least 10
	PIDs   int64 // processes and threads
}

// State is one box of the diagram in the package comment.
type State string

// The states of a name.
const (
	Starting   State = "starting"    // being started, or not yet passed its check
	Running    State = "running"     // alive, and has no check
	Healthy    State = "healthy"     // alive, and its check passes
	Unhealthy  State = "unhealthy"   // alive, and its check fails
	BackingOff State = "backing-off" // ended or could not start; NextTry says when it is tried again
	Stopping   State = "stopping"    // told to end
	Stopped    State = "stopped"     // not started yet, or has just ended
	Failed     State = "failed"      // the spec breaks a rule; nothing is tried until it is changed
)

// Classes of what went wrong: few, stable, and safe to compare.
const (
	SpecRefused    = "spec-refused"    // the spec breaks a rule that Validate states
	UserRefused    = "user-refused"    // another user is asked for, and we are not root
	UserUnknown    = "user-unknown"    // no such user on this machine
	ExecNotFound   = "exec-not-found"  // the program, or its interpreter, does not exist
	ExecDenied     = "exec-denied"     // the user may not execute it
	ExecFormat     = "exec-format"     // not a program for this machine
	DirNotFound    = "dir-not-found"   // the working directory does not exist
	LimitRefused   = "limit-refused"   // a limit could not be set
	LogUnwritable  = "log-unwritable"  // the log file cannot be opened
	RecordFailed   = "record-failed"   // the start could not be recorded, so it was not made
	StartFailed    = "start-failed"    // the kernel refused for another reason
	Exited         = "exited"          // ended by itself
	Signalled      = "signalled"       // ended by a signal that we did not send
	OutOfMemory    = "out-of-memory"   // killed by the kernel at its memory limit
	EndedUnseen    = "ended-unseen"    // ended as an adopted process: its exit status went to its parent
	LeftoversStuck = "leftovers-stuck" // processes of an earlier start do not die
)

// Status is what one name is like now.
type Status struct {
	State       State
	PID         int       // 0: no process
	Started     time.Time // of the process; zero: none
	Restarts    int       // starts after an end that we did not ask for
	Health      string    // of the last check: "ok", or why it failed; "" before the first
	Class       string    // of the last failure: one of the classes above; "" none
	Exit        string    // the text of it: how the process ended or why it was not started
	NextTry     time.Time // when BackingOff
	Fingerprint string    // of the running process
}

// A name becomes a file name, and part of a token: no slash, no colon, no
// leading dot.
var validName = regexp.MustCompile(`^[a-z0-9][a-z0-9@._-]{0,127}$`)

// Validate reports every rule that s breaks, or nil. No value of Env is quoted.
func (s Spec) Validate() error {
	var faults []error
	refuse := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if !validName.MatchString(s.Name) {
		refuse("the name %q is not of the form %s", s.Name, validName)
	}
	if len(s.Exec) == 0 || s.Exec[0] == "" {
		refuse("there is no program to execute")
	} else if strings.Contains(s.Exec[0], "/") && !filepath.IsAbs(s.Exec[0]) {
		refuse("the program %q is a relative path; give an absolute path, or a name without a slash", s.Exec[0])
	}
	if strings.ContainsRune(strings.Join(s.Exec, ""), 0) {
		refuse("an argument contains a zero byte")
	}
	if s.Dir != "" && !filepath.IsAbs(s.Dir) {
		refuse("the working directory %q is not an absolute path", s.Dir)
	}
	for i, kv := range s.Env {
		key, _, ok := strings.Cut(kv, "=")
		switch {
		case !ok || key == "":
			refuse("entry %d of the environment is not of the form KEY=VALUE", i)
		case key == tokenKey:
			refuse("the environment sets %s, which is ours", tokenKey)
		case strings.ContainsRune(kv, 0):
			refuse("the environment variable %q contains a zero byte", key)
		}
	}
	if s.StopTimeout < 0 {
		refuse("the stop timeout is negative")
	}
	if l := s.Limits; l.Memory < 0 || l.CPU < 0 || l.PIDs < 0 {
		refuse("a limit is negative")
	} else if l.CPU > 0 && l.CPU < 10 {
		refuse("the CPU limit of %d thousandths of a core is below 10, the least that the kernel takes", l.CPU)
	}
	if s.Health != nil {
		if err := s.Health.validate(); err != nil {
			faults = append(faults, err)
		}
	}
	return errors.Join(faults...)
}

func (h Health) validate() error {
	var faults []error
	ways := 0
	if h.HTTP != "" {
		ways++
		if u, err := url.Parse(h.HTTP); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			faults = append(faults, errors.New("the health check's URL is not of the form http://HOST:PORT/PATH"))
		}
	}
	if h.TCP != "" {
		ways++
		if _, _, err := net.SplitHostPort(h.TCP); err != nil {
			faults = append(faults, fmt.Errorf("the health check's address %q is not of the form HOST:PORT", h.TCP))
		}
	}
	if len(h.Exec) > 0 {
		ways++
		if strings.Contains(h.Exec[0], "/") && !filepath.IsAbs(h.Exec[0]) {
			faults = append(faults, fmt.Errorf("the health check's program %q is a relative path", h.Exec[0]))
		}
	}
	if ways != 1 {
		faults = append(faults, fmt.Errorf("the health check has %d of http, tcp and exec; give exactly one", ways))
	}
	if h.Every < 0 || h.Timeout < 0 || h.Grace < 0 || h.Fails < 0 {
		faults = append(faults, errors.New("a duration or count of the health check is negative"))
	}
	return errors.Join(faults...)
}

func (s Spec) withDefaults() Spec {
	setDefault(&s.Dir, "/")
	setDefault(&s.StopTimeout, DefaultStopTimeout)
	if s.Health != nil {
		setDefault(&s.Health.Every, 2*time.Second)
		setDefault(&s.Health.Timeout, 2*time.Second)
		setDefault(&s.Health.Grace, 10*time.Second)
		setDefault(&s.Health.Fails, 3)
	}
	return s
}

// clone keeps a caller's later writes out of what workers read.
func (s Spec) clone() Spec {
	s.Exec, s.Env = slices.Clone(s.Exec), slices.Clone(s.Env)
	if s.Health != nil {
		h := *s.Health
		h.Exec = slices.Clone(h.Exec)
		s.Health = &h
	}
	return s
}

// fault is an error with its class.
type fault struct {
	class string
	err   error
}

func (f *fault) Error() string { return f.err.Error() }
func (f *fault) Unwrap() error { return f.err }

func faultf(class, format string, args ...any) *fault {
	return &fault{class, fmt.Errorf(format, args...)}
}
