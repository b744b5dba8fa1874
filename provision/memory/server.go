package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"meshd/provision"
)

// Fault is something wrong with a Server, or with the way to it.
type Fault struct {
	// Class is what refused steps report. Unreachable ends all sessions and
	// refuses every step. ReadOnly, Recovery, Full and MissingRight refuse those
	// that change something. Empty refuses nothing.
	Class provision.Class
	// Hang leaves steps without an answer until the fault is gone or the caller
	// gives up; it then goes before Class.
	Hang bool
	// Delay is how long each step takes.
	Delay time.Duration
	// Node limits the fault to calls from one node; empty means all.
	Node string
	// After is how many more steps pass before the fault begins.
	After int
}

// Server is one backing service. It is safe for concurrent use.
type Server struct {
	mu        sync.Mutex
	resources map[string]*resource
	logins    map[string]*login
	sessions  map[*Session]struct{}
	faults    []Fault
	changed   chan struct{} // closed when faults change; nil while nobody waits
	steps     int
}

type resource struct {
	mark   string
	values map[string]string
}

type login struct {
	mark     string
	secret   string
	resource string
	closed   bool // takes no new sessions
}

// Set replaces the faults; Set() makes the Server well again.
func (s *Server) Set(faults ...Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = slices.Clone(faults)
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
	s.begin()
}

// begin ends the sessions that a fault ends which has begun; s.mu is held.
func (s *Server) begin() {
	for _, f := range s.faults {
		if f.Class == provision.Unreachable && f.After <= 0 {
			for session := range s.sessions {
				if f.Node == "" || f.Node == session.node {
					delete(s.sessions, session)
				}
			}
		}
	}
}

// Steps counts the steps that were asked for, so that a test can see that
// nobody asks too often.
func (s *Server) Steps() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.steps
}

// Plant makes a resource and a login, as somebody else would, without a mark.
// An empty name makes nothing.
func (s *Server) Plant(resourceName, loginName string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if resourceName != "" {
		s.resources[resourceName] = &resource{values: map[string]string{}}
	}
	if loginName != "" {
		s.logins[loginName] = &login{resource: resourceName}
	}
}

// Drop removes a resource or a login of that name by hand, whoever made it.
func (s *Server) Drop(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.resources, name)
	delete(s.logins, name)
	for session := range s.sessions {
		if session.resource == name || session.login == name {
			delete(s.sessions, session)
		}
	}
}

// step does f as one step of a call from node. f runs with s.mu held; a nil f
// is a look.
func (s *Server) step(ctx context.Context, node, name string, write bool, f func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steps++
	counted := false
	for {
		fault := s.faultFor(node, write, !counted)
		counted = true
		switch {
		case ctx.Err() != nil:
			return failed(name, ctx.Err())
		case fault.Hang:
			if err := s.wait(ctx, s.change(), nil); err != nil {
				return failed(name, err)
			}
			continue // the faults are others now
		case fault.Delay > 0:
			timer := time.NewTimer(fault.Delay)
			err := s.wait(ctx, nil, timer.C)
			timer.Stop()
			if err != nil {
				return failed(name, err)
			}
		}
		if fault.Class != "" {
			return &provision.Error{Step: name, Class: fault.Class, Err: errors.New("the test made it so")}
		}
		if f == nil {
			return nil
		}
		return f()
	}
}

// watch returns once node cannot reach s.
func (s *Server) watch(ctx context.Context, node string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if class := s.faultFor(node, false, false).Class; class != "" {
			return &provision.Error{Step: "watch", Class: class, Err: errors.New("the test made it so")}
		}
		if err := s.wait(ctx, s.change(), nil); err != nil {
			return failed("watch", err)
		}
	}
}

// faultFor returns what all faults together do to a step; count is for the
// first look at it.
func (s *Server) faultFor(node string, write, count bool) (sum Fault) {
	for i := range s.faults {
		f := &s.faults[i]
		if f.Node != "" && f.Node != node {
			continue
		}
		if f.After > 0 {
			if count {
				f.After--
			}
			continue
		}
		sum.Hang = sum.Hang || f.Hang
		sum.Delay = max(sum.Delay, f.Delay)
		if f.Class == provision.Unreachable || write && sum.Class == "" {
			sum.Class = f.Class
		}
	}
	s.begin()
	return sum
}

// change is closed when the faults change.
func (s *Server) change() <-chan struct{} {
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// wait returns when one of the channels is ready, or the caller gives up. It lets
// go of s.mu meanwhile.
func (s *Server) wait(ctx context.Context, changed <-chan struct{}, done <-chan time.Time) error {
	s.mu.Unlock()
	defer s.mu.Lock()
	select {
	case <-changed:
	case <-done:
	case <-ctx.Done():
	}
	return ctx.Err()
}

// failed is an error of the caller's context.
func failed(step string, err error) error {
	class := provision.Internal
	if errors.Is(err, context.DeadlineExceeded) {
		class = provision.TimedOut
	}
	return &provision.Error{Step: step, Class: class, Err: err}
}

func (s *Server) logIn(ctx context.Context, node, res, name, secret string) (*Session, error) {
	session := &Session{server: s, node: node, resource: res, login: name}
	const step = "log in"
	err := s.step(ctx, node, step, false, func() error {
		l := s.logins[name]
		if l == nil || l.closed || l.secret == "" || l.secret != secret || l.resource != res || s.resources[res] == nil {
			return &provision.Error{Step: step, Class: provision.Refused, Err: fmt.Errorf("login %q is refused for resource %q", name, res)}
		}
		s.sessions[session] = struct{}{}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return session, nil
}

// Session is a live session of a login.
type Session struct {
	server   *Server
	node     string
	resource string
	login    string
	checking bool // one of our own, which nobody counts
}

// check makes s one that is not counted.
func (s *Session) check() {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.checking = true
}

// Put writes a value.
func (s *Session) Put(ctx context.Context, key, value string) error {
	return s.do(ctx, "put", true, func(r *resource) { r.values[key] = value })
}

// Get reads a value, "" where there is none.
func (s *Session) Get(ctx context.Context, key string) (value string, err error) {
	err = s.do(ctx, "get", false, func(r *resource) { value = r.values[key] })
	return value, err
}

func (s *Session) do(ctx context.Context, step string, write bool, f func(*resource)) error {
	return s.server.step(ctx, s.node, step, write, func() error {
		if _, live := s.server.sessions[s]; !live {
			return &provision.Error{Step: step, Class: provision.Unreachable, Err: errors.New("the session was ended")}
		}
		f(s.server.resources[s.resource])
		return nil
	})
}

// Close ends the session; ending what is ended succeeds.
func (s *Session) Close() error {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	delete(s.server.sessions, s)
	return nil
}
