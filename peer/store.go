package peer

import (
	"fmt"
	"io"
	"sync"

	"meshd/raftfsm"
)

// store is the state machine that consensus drives, and what everything on this
// node reads. Only Apply and Restore change it.
type store struct {
	mu      sync.RWMutex
	state   *raftfsm.State
	changed chan struct{} // closed at the next change, then replaced
}

func newStore() *store {
	return &store{state: raftfsm.New(), changed: make(chan struct{})}
}

// Apply applies one entry of the log. An error stops the node: see
// raftfsm.ErrUndecodable.
func (s *store) Apply(index uint64, entry []byte) (any, error) {
	e, err := raftfsm.Decode(entry)
	if err != nil {
		return nil, fmt.Errorf("apply entry %d: %w", index, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.state.Apply(index, e)
	s.signal()
	return r, nil
}

func (s *store) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Snapshot copies the maps, not the values: milliseconds for 10,000 bindings.
func (s *store) Snapshot() (io.WriterTo, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.state.Clone(), nil
}

// Restore replaces the state by a snapshot.
func (s *store) Restore(r io.Reader) error {
	state, err := raftfsm.Restore(r)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = state
	s.signal()
	return nil
}

// view runs f on the state, which f must neither change nor keep.
func (s *store) view(f func(*raftfsm.State)) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	f(s.state)
}

// watch returns a channel that is closed when the state has changed since.
func (s *store) watch() <-chan struct{} {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.changed
}
