package supervise

import (
	"context"
	"time"
)

// worker looks after one name: one goroutine, which does one thing at a time and
// looks at the wish again after each.
type worker struct {
	s      *Supervisor
	name   string
	wakeup chan struct{} // size one: something may have changed
	done   chan struct{} // closed when nothing of the name is left

	// Guarded by s.mu.
	status  Status
	restart bool
	target  *process // that Signal reaches

	// The goroutine's own.
	child    *child
	probe    *probe    // of child; nil: none
	well     time.Time // since when child runs as it should; zero: it does not
	delay    time.Duration
	nextTry  time.Time
	tried    string // fingerprint of the last try
	restarts int
}

func newWorker(s *Supervisor, name string, c *child) *worker {
	w := &worker{s: s, name: name, child: c, wakeup: make(chan struct{}, 1), done: make(chan struct{})}
	w.status = Status{State: Stopped}
	if c != nil {
		w.took(c)
	}
	return w
}

func (w *worker) poke() {
	select {
	case w.wakeup <- struct{}{}:
	default:
	}
}

// order is what the worker is to do, as of one look.
type order struct {
	wish
	wanted  bool
	told    bool
	restart bool
}

func (w *worker) order() order {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	o := order{told: w.s.told, restart: w.restart}
	o.wish, o.wanted = w.s.wishes[w.name]
	return o
}

// ends says whether a running process must not go on.
func (o order) ends(c *child) bool {
	switch {
	case !o.told || o.keep:
		return false
	case !o.wanted:
		return true
	}
	return o.err == nil && (o.restart || o.spec.Fingerprint != c.record.Fingerprint)
}

func (w *worker) run(ctx context.Context) {
	defer w.leave()
	for ctx.Err() == nil {
		o := w.order()
		switch {
		case w.child != nil && w.child.ended():
			w.bury(ctx, false)
		case w.child != nil && o.ends(w.child):
			w.bury(ctx, true)
		case w.child != nil:
			w.watch(ctx, o)
		case !o.told && !o.wanted, o.keep:
			w.pause(ctx, 0)
		case !o.wanted:
			if w.clear(ctx) && w.retire() {
				return
			}
		case o.err != nil:
			w.update(func(st *Status) {
				*st = Status{State: Failed, Restarts: w.restarts, Class: SpecRefused, Exit: o.err.Error()}
			})
			w.pause(ctx, 0)
		default:
			w.start(ctx, o)
		}
	}
}

// leave lets go of the process, which goes on.
func (w *worker) leave() {
	w.dropProbe()
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	w.target = nil
	if w.child != nil {
		w.child.close()
	}
}

// retire ends the worker of a name that is not wanted, unless it is again.
func (w *worker) retire() bool {
	if err := w.s.cfg.Records.Delete(w.name); err != nil {
		// Harmless: a record without a process is cleared by the next run.
		w.s.cfg.Log.Warn("delete a record", "name", w.name, "err", err)
	}
	w.s.limits.remove(w.name)
	w.s.mu.Lock()
	if _, again := w.s.wishes[w.name]; again {
		w.s.mu.Unlock()
		return false
	}
	delete(w.s.workers, w.name)
	w.s.mu.Unlock()
	close(w.done)
	w.s.cfg.Changed()
	return true
}

// update changes the visible status, and says so if it did.
func (w *worker) update(change func(*Status)) {
	w.s.mu.Lock()
	before := w.status
	change(&w.status)
	changed := w.status != before
	w.s.mu.Unlock()
	if changed {
		w.s.cfg.Changed()
	}
}

// pause waits for a wake-up, at most for d if d is not 0.
func (w *worker) pause(ctx context.Context, d time.Duration) {
	var over <-chan time.Time
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		over = t.C
	}
	select {
	case <-ctx.Done():
	case <-w.wakeup:
	case <-over:
	}
}

// took makes c the worker's process. The caller holds s.mu, or is the only one
// that knows w.
func (w *worker) took(c *child) {
	w.child, w.target, w.tried = c, c.process, c.record.Fingerprint
	w.restarts = c.record.Restarts
	w.status.State, w.status.PID, w.status.Started = Starting, c.pid, c.record.Started
	w.status.Fingerprint, w.status.Restarts = c.record.Fingerprint, c.record.Restarts
	w.status.Health, w.status.NextTry = "", time.Time{}
}

// start makes one try, if it is time for one.
func (w *worker) start(ctx context.Context, o order) {
	if o.restart || o.spec.Fingerprint != w.tried {
		w.delay, w.nextTry = 0, time.Time{}
	}
	if wait := time.Until(w.nextTry); wait > 0 {
		w.pause(ctx, wait)
		return
	}
	w.tried = o.spec.Fingerprint
	w.s.mu.Lock()
	w.restart = false
	w.s.mu.Unlock()
	w.update(func(st *Status) { st.State, st.NextTry = Starting, time.Time{} })
	if !w.clear(ctx) {
		return
	}
	c, bad := w.s.spawn(o.spec, w.restarts)
	if bad != nil {
		w.backOff(bad.class, bad.Error())
		return
	}
	w.s.cfg.Log.Info("started", "name", w.name, "pid", c.pid)
	w.s.mu.Lock()
	w.took(c)
	w.s.mu.Unlock()
	w.s.cfg.Changed()
}

// clear ends what earlier starts of the name left behind. It returns false if
// that did not succeed.
func (w *worker) clear(ctx context.Context) bool {
	err := w.family().end(ctx, DefaultStopTimeout, w.stuck)
	if err != nil && ctx.Err() == nil {
		w.backOff(LeftoversStuck, err.Error())
		w.pause(ctx, time.Until(w.nextTry))
	}
	return err == nil
}

func (w *worker) family() family {
	f := family{prefix: w.s.instance + ":" + w.name + ":"}
	if w.child != nil {
		f.leader = w.child.process
	}
	return f
}

// stuck shows that even SIGKILL does not end something: it waits in the kernel,
// for a disk or a network file system.
func (w *worker) stuck(text string) {
	w.update(func(st *Status) { st.State, st.Class, st.Exit = Stopping, LeftoversStuck, text })
}

// backOff sets when the next try is.
func (w *worker) backOff(class, text string) {
	w.delay = min(max(2*w.delay, w.s.cfg.BackoffMin), w.s.cfg.BackoffMax)
	w.nextTry = time.Now().Add(w.delay)
	w.s.cfg.Log.Warn("not running", "name", w.name, "class", class, "reason", text, "retry_in", w.delay)
	w.update(func(st *Status) {
		*st = Status{State: BackingOff, Restarts: w.restarts, Class: class, Exit: text, NextTry: w.nextTry}
	})
}

// bury ends what is left of the child, and the child itself if it is asked to.
func (w *worker) bury(ctx context.Context, asked bool) {
	c := w.child
	w.dropProbe()
	if asked {
		w.s.cfg.Log.Info("stopping", "name", w.name, "pid", c.pid)
	}
	w.update(func(st *Status) { st.State = Stopping })
	grace := c.record.StopTimeout
	if o := w.order(); o.wanted && !o.keep && o.err == nil {
		grace = o.spec.StopTimeout
	}
	if grace <= 0 {
		grace = DefaultStopTimeout
	}
	if err := w.family().end(ctx, grace, w.stuck); err != nil {
		if ctx.Err() == nil {
			w.stuck(err.Error())
			w.pause(ctx, w.s.cfg.BackoffMin)
		}
		return
	}
	select {
	case <-c.gone:
	case <-ctx.Done():
		return
	}
	class, text := w.reap(c)
	if asked {
		w.s.cfg.Log.Info("stopped", "name", w.name, "pid", c.pid, "exit", text)
		w.delay, w.nextTry = 0, time.Time{}
		w.update(func(st *Status) { *st = Status{State: Stopped, Restarts: w.restarts} })
		return
	}
	if !w.well.IsZero() && time.Since(w.well) >= w.s.cfg.BackoffReset {
		w.delay = 0
	}
	w.restarts++
	w.well = time.Time{}
	w.backOff(class, text)
}

// reap takes the exit status and forgets the process.
func (w *worker) reap(c *child) (class, text string) {
	status, seen := c.reap()
	class, text = lastWords(status, seen, w.s.limits.outOfMemory(w.name))
	w.s.limits.remove(w.name)
	w.s.mu.Lock()
	w.target = nil
	delete(w.s.children, c.pid)
	w.s.mu.Unlock()
	c.close()
	w.child = nil
	return class, text
}

// watch waits until something happens to a process that is as it should be.
func (w *worker) watch(ctx context.Context, o order) {
	w.follow(o)
	var due <-chan time.Time
	var result <-chan error
	if p := w.probe; p != nil {
		result = p.result
		if !p.busy {
			t := time.NewTimer(time.Until(p.due))
			defer t.Stop()
			due = t.C
		}
	}
	select {
	case <-ctx.Done():
	case <-w.child.gone:
	case <-w.wakeup:
	case <-due:
		w.s.check(ctx, w.probe)
	case err := <-result:
		w.probe.judge(err)
		w.show(o)
	}
}

// follow makes the check of a running process the one that is wished for.
func (w *worker) follow(o order) {
	if !o.told || o.keep || o.err != nil {
		w.show(o)
		return
	}
	if w.probe != nil && !w.probe.is(o.spec.Health) {
		w.dropProbe()
	}
	if w.probe == nil && o.spec.Health != nil {
		w.probe = newProbe(o.spec, w.child.record.Started)
	}
	w.show(o)
}

// show makes the status of a running process what it is.
func (w *worker) show(o order) {
	state, text := Running, ""
	if w.probe != nil {
		state, text = w.probe.state, w.probe.text
	}
	switch {
	case state == Unhealthy || state == Starting:
		w.well = time.Time{}
	case w.well.IsZero():
		w.well = time.Now()
	}
	w.update(func(st *Status) {
		st.State, st.Health = state, text
		if o.err != nil {
			st.Class, st.Exit = SpecRefused, "the new spec is refused, the process runs by the old one: "+o.err.Error()
		} else if st.Class == SpecRefused {
			st.Class, st.Exit = "", ""
		}
	})
}

func (w *worker) dropProbe() {
	if w.probe != nil {
		w.probe.stop()
		w.probe = nil
	}
}

// ended says whether the process has ended, and perhaps left others behind.
func (c *child) ended() bool {
	select {
	case <-c.gone:
		return true
	default:
		return false
	}
}
