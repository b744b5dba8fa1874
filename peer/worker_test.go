package peer

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"meshd/provision"
)

// shift runs workers in virtual time.
type shift struct {
	*testing.T
	group sync.WaitGroup
	ctx   context.Context
	pokes int
	began time.Time
	mu    sync.Mutex
	log   []string
}

func inShift(t *testing.T, f func(s *shift)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := &shift{T: t, ctx: ctx, began: time.Now()}
		f(s)
		cancel()
		s.group.Wait()
	})
}

func (s *shift) worker() *worker {
	return newWorker(s.ctx, &s.group, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.pokes++
	})
}

func (s *shift) say(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, time.Since(s.began).String()+" "+line)
}

// said returns what was said since the last time.
func (s *shift) said() []string {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.log
	s.log = nil
	return out
}

func (s *shift) want(what string, lines ...string) {
	s.Helper()
	if got := s.said(); !slices.Equal(got, lines) {
		s.Errorf("%s: %q, want %q", what, got, lines)
	}
}

// task says when it runs, and comes to what outcome says.
func (s *shift) task(key string, outcome func() error) task {
	return task{key: key, do: func(context.Context) error {
		s.say(key)
		return outcome()
	}}
}

func fine() error { return nil }

func failing(class provision.Class) func() error {
	return func() error { return &provision.Error{Step: "try", Class: class, Err: errors.New("it does not")} }
}

// answer is an outcome that a test may change while tasks run: a class, "" for
// success.
type answer struct{ atomic.Value }

func answering(class provision.Class) *answer {
	var a answer
	a.Store(class)
	return &a
}

func (a *answer) now() error {
	if class := a.Load().(provision.Class); class != "" {
		return failing(class)()
	}
	return nil
}

func TestAHangingTaskHoldsUpNoOtherWorker(t *testing.T) {
	inShift(t, func(s *shift) {
		stuck, well := s.worker(), s.worker()
		var class string
		stuck.set([]task{
			{key: "hang", do: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, note: func(_, c string) { class = c }},
			s.task("after", fine),
		})
		well.set([]task{s.task("well", fine)})
		s.want("while it hangs", "0s well")
		time.Sleep(taskTimeout)
		s.want("when it was given up", "15s after")
		if class != string(provision.TimedOut) {
			s.Errorf("noted as %q", class)
		}
	})
}

func TestBackOff(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		w.set([]task{s.task("x", failing(provision.Internal))})
		time.Sleep(2 * time.Minute)
		s.want("back-off", "0s x", "500ms x", "1.5s x", "3.5s x", "7.5s x", "15.5s x", "31.5s x", "1m1.5s x", "1m31.5s x")
		r := w.report()
		if len(r) != 1 || r[0].Tries != 9 || !r[0].Since.Equal(s.began) || !r[0].Next.Equal(s.began.Add(121500*time.Millisecond)) || r[0].Text != "try: it does not" {
			s.Errorf("report: %+v", r)
		}
		w.set([]task{s.task("x", failing(provision.Internal))}) // a pass
		time.Sleep(time.Second)
		s.want("a pass tries nothing early")
		if s.pokes != 0 {
			s.Errorf("%d pokes of a pass that could do nothing", s.pokes)
		}
	})
}

func TestSinceIsKeptWhileTheClassIs(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		x := answering(provision.MissingRight)
		w.set([]task{s.task("x", x.now)})
		time.Sleep(10 * time.Second)
		if since := w.report()[0].Since; !since.Equal(s.began) {
			s.Errorf("since %v", since.Sub(s.began))
		}
		x.Store(provision.Foreign)
		time.Sleep(10 * time.Second)
		if r := w.report()[0]; r.Since.Equal(s.began) || r.Class != string(provision.Foreign) {
			s.Errorf("another class is since %v", r.Since.Sub(s.began))
		}
	})
}

func TestAGateHoldsBackWhatFollowsIt(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		service, slow := answering(provision.Unreachable), answering(provision.Internal)
		gate := s.task("gate", service.now)
		gate.gate, gate.every = true, 30*time.Second
		w.set([]task{gate, s.task("after", slow.now)})
		time.Sleep(10 * time.Second)
		s.want("closed", "0s gate", "500ms gate", "1.5s gate", "3.5s gate", "7.5s gate")
		service.Store(provision.Class(""))
		time.Sleep(6 * time.Second)
		s.want("open", "15.5s gate", "15.5s after", "16s after")
		time.Sleep(25 * time.Second)
		s.want("what follows backs off by itself", "17s after", "19s after", "23s after", "31s after")

		// A fault of the service as a whole is asked about at once; when it is over,
		// what waited does not wait on.
		slow.Store(provision.ReadOnly)
		service.Store(provision.ReadOnly)
		time.Sleep(6 * time.Second)
		s.want("suspicion", "45.5s gate", "46s gate", "47s gate")
		slow.Store(provision.Class(""))
		service.Store(provision.Class(""))
		time.Sleep(time.Minute)
		s.want("mended", "49s gate", "49s after", "1m19s gate")
	})
}

func TestAGateThatOpensLetsThrough(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		service, login := answering(""), answering(provision.Internal)
		gate := s.task("gate", service.now)
		gate.gate, gate.every = true, 10*time.Second
		w.set([]task{gate, s.task("after", login.now)})
		time.Sleep(39 * time.Second) // what follows was tried after 31.5 s, and is due 30 s later
		service.Store(provision.Unreachable)
		login.Store(provision.Class(""))
		time.Sleep(2 * time.Second)
		s.said()
		service.Store(provision.Class(""))
		time.Sleep(time.Second)
		s.want("at once", "41.5s gate", "41.5s after")
	})
}

func TestASuspiciousFaultHurriesTheGate(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		gate := s.task("gate", fine)
		gate.gate, gate.every = true, 30*time.Second
		w.set([]task{gate, s.task("after", failing(provision.Unreachable))})
		time.Sleep(time.Second)
		s.want("each failure", "0s gate", "0s after", "0s gate", "500ms after", "500ms gate")
	})
}

func TestForgottenKeysBeginAnew(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		x := s.task("x", failing(provision.Internal))
		w.set([]task{x})
		time.Sleep(4 * time.Second)
		s.said()
		w.set(nil)
		time.Sleep(time.Minute)
		s.want("not in the list")
		w.set([]task{x})
		time.Sleep(time.Second)
		s.want("again in the list", "1m4s x", "1m4.5s x")
		if r := w.report(); r[0].Tries != 2 {
			s.Errorf("tries %d", r[0].Tries)
		}
	})
}

// TestAnOutcomeThatComesLateIsForgotten: a, while it runs, is replaced by b and
// wanted again. What b did in between stands in the world, so a must be done again.
func TestAnOutcomeThatComesLateIsForgotten(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		noted := 0
		a := s.task("a", func() error { time.Sleep(time.Second); return nil })
		a.note = func(string, string) { noted++ }
		b := s.task("b", fine)
		w.set([]task{a})
		synctest.Wait()
		w.set([]task{b})
		w.set([]task{a})
		time.Sleep(5 * time.Second)
		s.want("a again", "0s a", "1s a")
		if noted != 1 {
			s.Errorf("noted %d outcomes, want that of the second", noted)
		}
		w.set([]task{b})
		time.Sleep(time.Second)
		w.set([]task{a})
		time.Sleep(5 * time.Second)
		s.want("each after the other", "5s b", "6s a")
	})
}

func TestOneTaskAtATime(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		running := 0
		busy := func() error {
			if running++; running > 1 {
				s.Error("two at once")
			}
			time.Sleep(time.Second)
			running--
			return nil
		}
		w.set([]task{s.task("a", busy), s.task("b", busy)})
		synctest.Wait()
		w.set([]task{s.task("c", busy)})
		time.Sleep(10 * time.Second)
		s.want("what has left the list is not begun", "0s a", "1s c")
	})
}

func TestAWorkerWithNothingToDoHasNoGoroutine(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		idle := func(when string, want bool) {
			s.Helper()
			synctest.Wait()
			if w.idle() != want {
				s.Errorf("%s: idle is %v", when, !want)
			}
		}
		idle("new", true)
		w.set([]task{s.task("x", fine)})
		idle("done", true)
		w.set([]task{s.task("x", fine)})
		idle("done before", true)
		s.want("once", "0s x")
		if s.pokes != 1 {
			s.Errorf("%d pokes of one success", s.pokes)
		}
		w.set([]task{s.task("y", failing(provision.Internal))})
		idle("waiting to try again", false)
		w.set(nil)
		idle("emptied", true)
		if s.pokes != 2 {
			s.Errorf("%d pokes: who waits for its end is told", s.pokes)
		}
	})
}

func TestRetryIsAtOnce(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		outcome := answering(provision.BadConfig)
		done := s.task("done", fine)
		x := s.task("x", outcome.now)
		w.set([]task{done, x})
		time.Sleep(20 * time.Second)
		s.said()
		outcome.Store(provision.Class(""))
		w.retry()
		s.want("what is not done", "20s x")
	})
}

func TestAPauseIsNoFailure(t *testing.T) {
	inShift(t, func(s *shift) {
		w := s.worker()
		looks := 0
		var classes []string
		w.set([]task{{
			key:  "look",
			do:   func(context.Context) error { looks++; return pause(time.Second) },
			note: func(_, class string) { classes = append(classes, class) },
		}})
		time.Sleep(3500 * time.Millisecond)
		synctest.Wait()
		if looks != 4 || slices.ContainsFunc(classes, func(c string) bool { return c != "" }) || len(w.report()) != 0 || s.pokes != 0 {
			s.Errorf("%d looks, classes %q, report %v, %d pokes", looks, classes, w.report(), s.pokes)
		}
	})
}

func TestWorkersEndWithTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		noted := false
		w := newWorker(ctx, &group, func() {})
		w.set([]task{{key: "x", do: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, note: func(string, string) { noted = true }}})
		synctest.Wait()
		cancel()
		group.Wait()
		w.set([]task{{key: "y", do: func(context.Context) error { t.Error("begun after the end"); return nil }}})
		group.Wait()
		if noted {
			t.Error("what was stopped is noted as failed")
		}
	})
}
