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
	note  func(step, class string)        // told of each outcome; class is empty for a success
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
	Tries int
	Next  time.Time
	done  bool
}

// worker runs the due tasks of one list, one at a time: one backing service, or
// one consumer's end of a binding. It has a goroutine only while something is
// left to do, so a worker that hangs holds up no other, and an idle one costs
// nothing.
type worker struct {
	ctx   context.Context // of the node: the end of every task
	group *sync.WaitGroup
	after func()     // poked after each round
	idle  sync.Mutex // held while a task runs

	mu      sync.Mutex
	tasks   []task
	tries   map[string]*Try
	running bool
	wake    chan struct{}
}

func newWorker(ctx context.Context, group *sync.WaitGroup, after func()) *worker {
	return &worker{ctx: ctx, group: group, after: after, tries: map[string]*Try{}, wake: make(chan struct{}, 1)}
}

// set replaces the list. Keys that are no longer in it are forgotten.
func (w *worker) set(tasks []task) {
	w.mu.Lock()
	defer w.mu.Unlock()
	keep := map[string]bool{}
	for _, t := range tasks {
		keep[t.key] = true
	}
	for key := range w.tries {
		if !keep[key] {
			delete(w.tries, key)
		}
	}
	w.tasks = tasks
	poke(w.wake)
	if _, due := w.next(time.Now()); due && !w.running && w.ctx.Err() == nil {
		w.running = true
		w.group.Add(1)
		go w.run()
	}
}

// next is the first task whose time has come or will come, and whether there is
// one at all.
func (w *worker) next(now time.Time) (at time.Time, any bool) {
	for _, t := range w.tasks {
		try := w.tries[t.key]
		if try != nil && try.done && t.every == 0 {
			continue
		}
		var due time.Time
		if try != nil {
			due = try.Next
		}
		if !any || due.Before(at) {
			at, any = due, true
		}
		if t.gate && (try == nil || try.Class != "") {
			break
		}
	}
	return at, any
}

func (w *worker) run() {
	defer w.group.Done()
	for {
		w.round()
		w.after()
		w.mu.Lock()
		at, any := w.next(time.Now())
		if !any || w.ctx.Err() != nil {
			w.running = false
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		timer := time.NewTimer(time.Until(at))
		select {
		case <-timer.C:
		case <-w.wake:
		case <-w.ctx.Done():
		}
		timer.Stop()
	}
}

// round tries every task that is due.
func (w *worker) round() {
	w.mu.Lock()
	tasks := w.tasks
	w.mu.Unlock()
	for _, t := range tasks {
		if w.ctx.Err() != nil {
			return
		}
		if w.due(t.key) {
			w.attempt(t)
		}
		if t.gate && w.failing(t.key) {
			return
		}
	}
}

func (w *worker) due(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	try := w.tries[key]
	return try == nil || !try.Next.After(time.Now()) && !try.Next.IsZero()
}

func (w *worker) failing(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	try := w.tries[key]
	return try == nil || try.Class != ""
}

// attempt runs one task and books the outcome.
func (w *worker) attempt(t task) {
	ctx, cancel := context.WithTimeout(w.ctx, taskTimeout)
	w.idle.Lock()
	err := t.do(ctx)
	w.idle.Unlock()
	cancel()
	if w.ctx.Err() != nil {
		return // stopped, not failed
	}
	now := time.Now()
	w.mu.Lock()
	old := w.tries[t.key]
	try := book(t, old, err, now)
	w.tries[t.key] = &try
	w.mu.Unlock()
	if t.note != nil {
		t.note(try.Step, try.Class)
	}
}

// book decides what follows from an outcome.
func book(t task, old *Try, err error, now time.Time) Try {
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
		if old != nil {
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
	if old != nil && old.Class != "" {
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

// expire makes the task of that key due at once.
func (w *worker) expire(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if try := w.tries[key]; try != nil {
		try.Next = time.Now()
		poke(w.wake)
	}
}

// report lists the tries that have not succeeded.
func (w *worker) report() []Try {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []Try
	for _, t := range w.tasks {
		if try := w.tries[t.key]; try != nil && try.Class != "" {
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
