// Package supervise makes the processes of this machine be what it is told, and
// puts the bindings that they read on disk (Deliver).
//
// The caller hands over the whole desired set with Set, as often as it likes;
// one worker per name then starts, stops, checks and restarts its process, so
// that one which hangs holds up no other. The states of a name:
//
//	          Set                        check passes
//	stopped -------> starting ------------------------------> healthy
//	                  |  |  \  no check to make                 | ^
//	                  |  |   `-----------------> running        v |
//	   cannot be      |  |  checks fail                       unhealthy
//	   started        |  `------------------------------------> '
//	                  v        any live state: the process ends
//	              backing-off <---------------------------------
//	                  |  the wait is over
//	                  `--------------> starting
//
//	any live state: absent from Set, other fingerprint, Restart -> stopping
//	any live state: ended, and left processes behind            -> stopping
//	a spec that breaks a rule, and no process of it is running  -> failed
//
// An unhealthy process is shown, and not killed: most of the time it is waiting
// for something that its own restart does not mend.
//
// Invariants:
//
//   - A process of a name is never started while another one of it lives. Each
//     start writes a record first (Config.Records) and gives the process a
//     random token in its environment (MESHD_CHILD), so that whatever instant
//     this program is killed at, its successor finds the process: by record, or
//     by token.
//   - Processes outlive this program. They write straight to a log file, hold no
//     pipe of ours, and are adopted by the next Run.
//   - No process is adopted or signalled by its number alone. It is adopted by
//     number, start time and boot; it is signalled through a pidfd, and a group
//     only while its leader, so verified, holds the number.
//   - Before a start, and after an end, nothing is left of what went before: the
//     session of the process and everything that inherited the token are told to
//     end, and then killed.
//   - Environments can hold secrets. They are never logged, never part of an
//     error, and never an argument.
//
// The package needs Linux 5.3 (pidfd_open with poll).
package supervise

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Records remembers children across restarts of this program. The bytes are
// this package's own (under 4 KiB each). Save must be durable when it returns.
type Records interface {
	Load() (map[string][]byte, error)
	Save(name string, record []byte) error
	Delete(name string) error // deleting what is not there succeeds
}

// Config is what New needs. The zero value of every number is its default.
type Config struct {
	Dir     string                               // holds NAME.log, the lock and the instance id; made if absent
	Records Records                              // where adopted children are remembered
	Write   func(path string, data []byte) error // puts a file there, whole or not at all, on disk when it returns
	Log     *slog.Logger                         // nil discards
	Changed func()                               // called after a Status changed; must not block; may be nil

	BackoffMin   time.Duration // first wait after an end: 0.5 s, short enough for a crash nobody should notice
	BackoffMax   time.Duration // longest wait: 30 s, so what was mended is up within half a minute
	BackoffReset time.Duration // running well for this long forgets the waits: 60 s, twice the longest

	LogBytes int64 // size at which a log is rotated: 10 MiB, four of them fit any disk
	LogKeep  int   // rotated logs kept per name: 3
}

func (c Config) withDefaults() Config {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Changed == nil {
		c.Changed = func() {}
	}
	setDefault(&c.BackoffMin, 500*time.Millisecond)
	setDefault(&c.BackoffMax, 30*time.Second)
	setDefault(&c.BackoffReset, time.Minute)
	setDefault(&c.LogBytes, 10<<20)
	setDefault(&c.LogKeep, 3)
	return c
}

func setDefault[T comparable](v *T, value T) {
	var zero T
	if *v == zero {
		*v = value
	}
}

// Validate reports every fault of c, or nil.
func (c Config) Validate() error {
	var faults []error
	if !filepath.IsAbs(c.Dir) {
		faults = append(faults, fmt.Errorf("the directory %q is not an absolute path", c.Dir))
	}
	if c.Records == nil {
		faults = append(faults, errors.New("no Records: children could not be found again after a restart"))
	}
	if c.Write == nil {
		faults = append(faults, errors.New("no Write: the instance id could not be kept"))
	}
	if c.BackoffMin < 0 || c.BackoffMax < 0 || c.BackoffReset < 0 || c.LogBytes < 0 || c.LogKeep < 0 {
		faults = append(faults, errors.New("a duration, size or count is negative"))
	}
	return errors.Join(faults...)
}

// Supervisor is safe for concurrent use. Its zero value is not usable: see New.
type Supervisor struct {
	cfg      Config
	instance string // marks our processes; kept in Dir, so it is the data directory's
	boot     string // this boot of the kernel
	logs     *logs
	limits   cgroups

	mu       sync.Mutex
	wishes   map[string]wish
	told     bool // Set was called: until then adopted processes are left alone
	leaving  bool // StopAll was called: nothing starts any more
	ran      bool // Run was called
	workers  map[string]*worker
	children map[int]bool    // pids that a worker will wait for
	ctx      context.Context // Run's, while it runs
	wg       sync.WaitGroup  // everything that Run waits for
}

// wish is what Set asked for one name. err is the rule that spec breaks.
type wish struct {
	spec Spec
	err  error // why spec is refused
	keep bool  // spec is not known yet: what runs goes on, and nothing is started
}

// New prepares a Supervisor. It starts nothing.
func New(cfg Config) (*Supervisor, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configure supervision: %w", err)
	}
	if fd, err := unix.PidfdOpen(os.Getpid(), 0); err != nil {
		return nil, fmt.Errorf("open a pidfd: %w; supervision needs Linux 5.3 or newer", err)
	} else if err := unix.Close(fd); err != nil {
		return nil, fmt.Errorf("close a pidfd: %w", err)
	}
	// Go closes its own files at exec. What we inherited open ourselves must not
	// go on to children either; before Linux 5.11 it does.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		cfg.Log.Warn("inherited files stay open in children", "err", err)
	}
	hearIgnored()
	if err := os.MkdirAll(cfg.Dir, 0o750); err != nil {
		return nil, fmt.Errorf("make the supervision directory: %w", err)
	}
	instance, err := readInstance(cfg.Dir, cfg.Write)
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	return &Supervisor{
		cfg: cfg, instance: instance, boot: boot,
		logs:     newLogs(cfg.Dir, cfg.LogBytes, cfg.LogKeep),
		limits:   findCgroups(groupPrefix + instance),
		wishes:   map[string]wish{},
		workers:  map[string]*worker{},
		children: map[int]bool{},
	}, nil
}

// hearIgnored makes this process ignore by itself what it was started to ignore, as by
// nohup: what is ignored at exec stays so in children, for good, and they could not be
// told to reload.
func hearIgnored() {
	for _, sig := range []os.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGTERM} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
}

// Run adopts the children of the run before, and supervises until ctx ends. It
// then leaves them running: they are adopted again by the next Run. It is called
// once.
func (s *Supervisor) Run(ctx context.Context) error {
	s.mu.Lock()
	again := s.ran
	s.ran = true
	s.mu.Unlock()
	if again {
		return errors.New("supervise: Run was called before; a Supervisor runs once")
	}
	lock, err := lockDir(ctx, s.cfg.Dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	found, err := s.adopt(ctx)
	if err != nil {
		return err
	}

	s.mu.Lock()
	s.ctx = ctx
	for name, c := range found {
		s.launch(name, c)
	}
	for name := range s.wishes {
		if s.workers[name] == nil {
			s.launch(name, nil)
		}
	}
	s.wg.Go(func() { s.logs.run(ctx, s.cfg.Log, s.wanted) })
	if os.Getpid() == 1 {
		s.wg.Go(func() { s.reapOrphans(ctx) })
	}
	s.mu.Unlock()

	<-ctx.Done()
	s.mu.Lock()
	s.ctx = nil // wake adds no worker from here on
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

// launch starts the worker of name; c is its adopted process, or nil. The caller
// holds s.mu, and s.ctx is set.
func (s *Supervisor) launch(name string, c *child) {
	w := newWorker(s, name, c)
	s.workers[name] = w
	ctx := s.ctx
	s.wg.Go(func() { w.run(ctx) })
}

// Set replaces the desired set: what is absent from it is stopped, what has
// another Fingerprint than the running process is restarted. A name in keep is
// left as it is, running or not: what it should be is not known yet, as after a
// restart of meshd until everything has been read again. A spec that breaks
// a rule is refused by itself (see Status); a process of that name which runs is
// then left as it is.
func (s *Supervisor) Set(specs []Spec, keep []string) { s.wish(specs, keep, true) }

// Hold starts what of specs does not run, and ends nothing: it is for before the
// first Set, while it is not known what else should run, or how.
func (s *Supervisor) Hold(specs []Spec) { s.wish(specs, nil, false) }

func (s *Supervisor) wish(specs []Spec, keep []string, all bool) {
	wishes := make(map[string]wish, len(specs))
	for _, spec := range specs {
		spec = spec.clone()
		err := spec.Validate()
		if _, twice := wishes[spec.Name]; twice {
			err = fmt.Errorf("the name %q is given twice; names are unique on a machine", spec.Name)
		}
		wishes[spec.Name] = wish{spec: spec.withDefaults(), err: err}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leaving {
		return
	}
	for _, name := range keep {
		if _, set := wishes[name]; !set {
			wishes[name] = wish{keep: true}
		}
	}
	s.wishes, s.told = wishes, s.told || all
	s.wake()
}

// wake starts a worker for every wish that has none, and makes all of them look
// again. The caller holds s.mu.
func (s *Supervisor) wake() {
	if s.ctx == nil || s.ctx.Err() != nil {
		return
	}
	for name := range s.wishes {
		if s.workers[name] == nil {
			s.launch(name, nil)
		}
	}
	for _, w := range s.workers {
		w.poke()
	}
}

// Status is the state of every name that is wanted or still has a process.
func (s *Supervisor) Status() map[string]Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[string]Status, len(s.workers))
	for name := range s.wishes {
		all[name] = Status{State: Stopped}
	}
	for name, w := range s.workers {
		all[name] = w.status
	}
	return all
}

// StopAll stops every process and returns when they are gone. It is final: Set
// does nothing afterwards. Run must be running; it may be called again after an
// error, which names what is still there.
func (s *Supervisor) StopAll(ctx context.Context) error {
	s.mu.Lock()
	if s.ctx == nil || s.ctx.Err() != nil {
		s.mu.Unlock()
		return errors.New("stop all processes: supervision is not running; call StopAll while Run runs")
	}
	s.wishes, s.told, s.leaving = map[string]wish{}, true, true
	s.wake()
	waiting := maps.Clone(s.workers)
	run := s.ctx
	s.mu.Unlock()

	for _, w := range waiting {
		select {
		case <-w.done:
		case <-ctx.Done():
			return fmt.Errorf("stop all processes: still there: %s: %w", s.remaining(), context.Cause(ctx))
		case <-run.Done():
			return fmt.Errorf("stop all processes: supervision ended; still there: %s", s.remaining())
		}
	}
	return nil
}

func (s *Supervisor) remaining() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(slices.Sorted(maps.Keys(s.workers)), ", ")
}

// Signal sends sig to the process of name, and to it alone.
func (s *Supervisor) Signal(name string, sig syscall.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[name]
	if w == nil || w.target == nil {
		return fmt.Errorf("signal %s: no process of that name is running", name)
	}
	if err := w.target.signal(sig); err != nil {
		return fmt.Errorf("signal %s: %w", name, err)
	}
	return nil
}

// Restart stops the process of name and starts it again, without waiting for
// either. A name that is backing off is started at once.
func (s *Supervisor) Restart(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[name]
	wish, wanted := s.wishes[name]
	if w == nil || !wanted {
		return fmt.Errorf("restart %s: nothing of that name is supervised", name)
	}
	if wish.err != nil {
		return fmt.Errorf("restart %s: its spec is refused, so it could not start again: %w", name, wish.err)
	}
	w.restart = true
	w.poke()
	return nil
}

// wanted says whether name is to be running, or has a process.
func (s *Supervisor) wanted(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, wished := s.wishes[name]
	return wished || s.workers[name] != nil || !s.told
}
