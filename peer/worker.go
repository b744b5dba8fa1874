package peer

import (
	"context"
	"errors"
	"sync"
	"time"

	"meshd/provision"
)

// Back-off of a failing task: half a second finds a service that was just
// restarted, thirty seconds do not burden one that is down for a day.
const (
	firstRetry = 500 * time.Millisecond
	lastRetry  = 30 * time.Second
	// taskTimeout bounds one try: RabbitMQ takes 3 s to refuse a password,
	// PostgreSQL under load a few to make a database.
	taskTimeout = 15 * time.Second
)

// task is one thing to make true. It is idempotent, and named: a task of the
// same key goes on where it was, with its back-off.
type task struct {
	key   string
	gate  bool                            // while it has not succeeded, the tasks after it do not run
	every time.Duration                   // tried again so long after a success; 0 is once
	do    func(ctx context.Context) error // failing is a *provision.Error, or pause
	note  func(step, class string)        // told of each outcome; class is empty for a success; must not call the worker
}

// pause is returned by a task that has not failed but must look again.
type pause time.Duration

func (p pause) Error() string { return "not yet" }

// Try is what a task's owner shows of it: it stays on its node.
type Try struct {
	Key   string
	Step  string
	Class string
	Text  string // safe to show
	Since time.Time
	Tries int // 0 before the first
	Next  time.Time
	done  bool
}

// worker runs the due tasks of one list, one at a time: one backing service, or
// one consumer's end of a binding. It has a goroutine only while something is
// left to do, so a worker that hangs holds up no other, and an idle one costs
// nothing.
//
// What a task that has left the list comes to is forgotten, even when it ends
// later and is in the list again by then: it then runs again.
type worker struct {
	ctx   context.Context // of the node: the end of every task
	group *sync.WaitGroup
	after func() // called when a task has succeeded, and when the last one of an emptied list has ended

	mu      sync.Mutex
	tasks   []task
	tries   map[string]*Try // one for each of tasks
	running bool
	wake    chan struct{}
}

func newWorker(ctx context.Context, group *sync.WaitGroup, after func()) *worker {
	return &worker{ctx: ctx, group: group, after: after, tries: map[string]*Try{}, wake: make(chan struct{}, 1)}
}

// set replaces the list. Keys that are no longer in it are forgotten; a list of
// the same keys disturbs nothing.
func (w *worker) set(tasks []task) {
	w.mu.Lock()
	defer w.mu.Unlock()
	tries := make(map[string]*Try, len(tasks))
	changed := len(tasks) != len(w.tries)
	for _, t := range tasks {
		try := w.tries[t.key]
		if try == nil {
			try, changed = &Try{Key: t.key}, true
		}
		tries[t.key] = try
	}
	w.tasks, w.tries = tasks, tries
	if changed {
		poke(w.wake)
	}
	if _, left := w.next(); left && !w.running && w.ctx.Err() == nil {
		w.running = true
		w.group.Add(1)
		go w.run()
	}
}

// idle reports whether nothing of the worker runs.
func (w *worker) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.running
}

// next is when the first task is due, and whether any is left at all.
func (w *worker) next() (at time.Time, left bool) {
	for _, t := range w.tasks {
		try := w.tries[t.key]
		if try.done && t.every == 0 {
			continue
		}
		if !left || try.Next.Before(at) {
			at, left = try.Next, true
		}
		if t.gate && !try.open() {
			break
		}
	}
	return at, left
}

// open reports whether a gate lets the tasks after it run.
func (t *Try) open() bool { return t.Tries > 0 && t.Class == "" }

func (w *worker) run() {
	defer w.group.Done()
	for {
		progress := w.round()
		w.mu.Lock()
		at, left := w.next()
		end := !left || w.ctx.Err() != nil
		w.running = !end
		emptied := len(w.tasks) == 0
		w.mu.Unlock()
		if progress || end && emptied {
			w.after()
		}
		if end {
			return
		}
		timer := time.NewTimer(time.Until(at))
		select {
		case <-timer.C:
		case <-w.wake:
		case <-w.ctx.Done():
		}
		timer.Stop()
	}
}

// round tries every task that is due, and reports whether one has succeeded.
func (w *worker) round() (progress bool) {
	w.mu.Lock()
	tasks := w.tasks
	w.mu.Unlock()
	for _, t := range tasks {
		if w.ctx.Err() != nil {
			break
		}
		if try := w.due(t); try != nil && w.attempt(t, try) {
			progress = true
		}
		if t.gate && !w.isOpen(t.key) {
			break
		}
	}
	return progress
}

// due is the try of the task, or nil when it is not to be made now.
func (w *worker) due(t task) *Try {
	w.mu.Lock()
	defer w.mu.Unlock()
	try := w.tries[t.key]
	if try == nil || try.done && t.every == 0 || try.Next.After(time.Now()) {
		return nil
	}
	return try
}

func (w *worker) isOpen(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	try := w.tries[key]
	return try != nil && try.open()
}

// attempt runs one task, books the outcome, and reports whether it succeeded.
func (w *worker) attempt(t task, old *Try) (ok bool) {
	ctx, cancel := context.WithTimeout(w.ctx, taskTimeout)
	err := t.do(ctx)
	cancel()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ctx.Err() != nil || w.tries[t.key] != old {
		return false // stopped or forgotten, not failed
	}
	now := time.Now()
	try := book(t, *old, err, now)
	w.tries[t.key] = &try
	switch {
	case t.gate && try.open() && old.Class != "":
		w.hurry(now, func(other task) bool { return !other.gate })
	case suspicious(try.Class):
		w.hurry(now, func(other task) bool { return other.gate && other.key != t.key })
	}
	if t.note != nil {
		t.note(try.Step, try.Class)
	}
	return try.done
}

// suspicious reports whether a fault of that class is the service's as a whole:
// its gate is then tried at once, so that it shows as the provider's fault and
// not as each binding's own.
func suspicious(class string) bool {
	switch provision.Class(class) {
	case provision.Unreachable, provision.ReadOnly, provision.Recovery, provision.Full, provision.TimedOut, provision.MissingRight:
		return true
	}
	return false
}

// hurry makes what is waiting due now; w.mu is held.
func (w *worker) hurry(now time.Time, which func(task) bool) {
	for _, t := range w.tasks {
		if try := w.tries[t.key]; which(t) && try.Next.After(now) {
			try.Next = now
		}
	}
}

// retry makes everything that is not done due at once, and what runs once more:
// what it was tried with has changed.
func (w *worker) retry() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.tasks {
		again := *w.tries[t.key]
		if !again.done || t.every > 0 {
			again.Next = time.Time{}
			w.tries[t.key] = &again
		}
	}
	poke(w.wake)
}

// book decides what follows from an outcome.
func book(t task, old Try, err error, now time.Time) Try {
	try := Try{Key: t.key, Since: now, Tries: 1}
	var again pause
	switch {
	case err == nil:
		try.done = true
		if t.every > 0 {
			try.Next = now.Add(t.every)
		}
		return try
	case errors.As(err, &again):
		try.Next = now.Add(time.Duration(again))
		if old.Tries > 0 && old.Class == "" {
			try.Since, try.Tries = old.Since, old.Tries+1
		}
		return try
	}
	try.Class, try.Text, try.Step = string(provision.ClassOf(err)), err.Error(), t.key
	var fault *provision.Error
	if errors.As(err, &fault) {
		try.Step = fault.Step
	}
	wait := firstRetry
	if old.Class != "" {
		try.Tries = old.Tries + 1
		if old.Class == try.Class {
			try.Since = old.Since
		}
		for range min(old.Tries, 10) {
			wait = min(wait*2, lastRetry)
		}
	}
	try.Next = now.Add(wait)
	return try
}

// report lists the tries that have not succeeded.
func (w *worker) report() []Try {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []Try
	for _, t := range w.tasks {
		if try := w.tries[t.key]; try.Class != "" {
			out = append(out, *try)
		}
	}
	return out
}

// poke wakes the reader of c, which re-reads everything: a wake-up carries no
// data.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
