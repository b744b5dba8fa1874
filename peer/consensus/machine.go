package consensus

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"
)

// Machine is the state that the log drives. Its methods are never called at the same time.
type Machine interface {
	// Apply changes the state by one committed entry. It must do the same on every node: no clock,
	// no randomness, no order of a map. What the entry asks for and the state forbids is a result,
	// not an error. An error says that this build cannot go on without diverging from the others, as
	// on an entry that it cannot decode: the node stops, and Run returns the error.
	Apply(index uint64, entry []byte) (result any, err error)
	// Snapshot captures the state, quickly, for Apply waits. What it returns is written while Apply
	// goes on. It must hold nothing that needs to be released: it may never be written.
	Snapshot() (io.WriterTo, error)
	// Restore replaces the whole state. An error stops the node.
	Restore(io.Reader) error
}

// A snapshot is this header and then what the machine wrote.
//
//	8 bytes  "meshsnap"
//	8 bytes  big-endian index of the newest entry that the state contains
const (
	snapshotMagic  = "meshsnap"
	snapshotHeader = len(snapshotMagic) + 8
)

// errStopped is what a machine that failed answers from then on.
var errStopped = errors.New("the machine has failed and applies nothing more")

// driver feeds a Machine from the library. Once the machine has failed nothing reaches it any more,
// so that its state stays the one before the entry that it could not take.
type driver struct {
	machine   Machine
	snapshots raft.SnapshotStore
	mark      *mark
	applied   atomic.Uint64 // index of the newest entry that the machine contains
	contained atomic.Uint64 // index up to which the newest snapshot that was restored contains the log
	config    atomic.Uint64 // index of the newest committed configuration

	mu     sync.Mutex // a replay and the library may both be at the machine
	handed uint64     // index of the newest entry that the library handed on
	opened bool       // what this node had by itself is restored

	once   sync.Once
	failed chan struct{} // closed after failure was set
	cause  error
}

var _ raft.ConfigurationStore = (*driver)(nil)

func newDriver(m Machine, disk *Disk) *driver {
	return &driver{machine: m, snapshots: disk.snapshots, mark: disk.mark, failed: make(chan struct{})}
}

// StoreConfiguration implements raft.ConfigurationStore. The library compares a change with the
// index of the configuration, and tells it nowhere else (GetConfiguration's index is always 0).
func (d *driver) StoreConfiguration(index uint64, _ raft.Configuration) { d.config.Store(index) }

// failure is nil while the machine works.
func (d *driver) failure() error {
	select {
	case <-d.failed:
		return d.cause
	default:
		return nil
	}
}

func (d *driver) fail(err error) error {
	d.once.Do(func() {
		d.cause = err
		close(d.failed)
	})
	return d.cause
}

// outcome is what an entry came to.
type outcome struct {
	result any
	err    error
}

// Apply implements raft.FSM. After a replay the library hands the same entries on once more.
func (d *driver) Apply(l *raft.Log) any {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.handed = l.Index
	return d.apply(l)
}

// apply applies an entry that the machine does not contain yet. d.mu is held.
func (d *driver) apply(l *raft.Log) outcome {
	if d.failure() != nil {
		return outcome{err: errStopped}
	}
	if l.Index <= d.applied.Load() {
		return outcome{}
	}
	d.mark.set(l.Index, l.Term)
	result, err := d.machine.Apply(l.Index, l.Data)
	if err != nil {
		return outcome{err: d.fail(fmt.Errorf("apply entry %d of term %d: %w", l.Index, l.Term, err))}
	}
	d.applied.Store(l.Index)
	return outcome{result: result}
}

// Snapshot implements raft.FSM. The library labels it with the index of what it handed on: while a
// replay is ahead of that, the label would be wrong.
func (d *driver) Snapshot() (raft.FSMSnapshot, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.failure() != nil:
		return nil, errStopped
	case d.handed < d.applied.Load():
		return nil, raft.ErrNothingNewToSnapshot
	}
	w, err := d.machine.Snapshot()
	if err != nil {
		return nil, fmt.Errorf("capture state at entry %d: %w", d.applied.Load(), err)
	}
	return image{d.applied.Load(), w}, nil
}

// Restore implements raft.FSM.
func (d *driver) Restore(r io.ReadCloser) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failure() != nil {
		return errStopped
	}
	br := bufio.NewReader(r)
	head := make([]byte, snapshotHeader)
	if _, err := io.ReadFull(br, head); err != nil {
		return d.fail(fmt.Errorf("restore snapshot: read header: %w", err))
	}
	if string(head[:len(snapshotMagic)]) != snapshotMagic {
		return d.fail(fmt.Errorf("restore snapshot: it begins with %q, not %q: another version wrote it",
			head[:len(snapshotMagic)], snapshotMagic))
	}
	if err := d.machine.Restore(br); err != nil {
		return d.fail(fmt.Errorf("restore snapshot: %w", err))
	}
	index := binary.BigEndian.Uint64(head[len(snapshotMagic):])
	if d.opened {
		d.mark.set(index, 0) // a leader's; no entry of this log is it
	}
	d.applied.Store(index)
	d.handed = index
	// The newest in the store is the one that is being restored; where an older one is, because the
	// newest is torn, the log still has what lies between.
	newest, err := d.snapshots.List()
	if err != nil {
		return d.fail(fmt.Errorf("restore snapshot: list snapshots: %w", err))
	}
	if len(newest) > 0 {
		d.config.Store(newest[0].ConfigurationIndex)
	}
	// Which of them it is nobody says. One that ends before the newest entry of the state it is not.
	d.contained.Store(index)
	for _, s := range newest {
		if s.Index >= index {
			d.contained.Store(s.Index)
		}
	}
	return nil
}

// image is a captured state.
type image struct {
	index uint64
	state io.WriterTo
}

// Persist implements raft.FSMSnapshot.
func (i image) Persist(s raft.SnapshotSink) error {
	if err := i.write(s); err != nil {
		return errors.Join(fmt.Errorf("write snapshot: %w", err), s.Cancel())
	}
	return s.Close()
}

func (i image) write(to io.Writer) error {
	w := bufio.NewWriter(to)
	head := binary.BigEndian.AppendUint64([]byte(snapshotMagic), i.index)
	if _, err := w.Write(head); err != nil {
		return err
	}
	if _, err := i.state.WriteTo(w); err != nil {
		return err
	}
	return w.Flush()
}

// Release implements raft.FSMSnapshot.
func (image) Release() {}
