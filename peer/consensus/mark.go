package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc64"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// The mark says up to which entry of the log this node has applied, so that a node that starts knows
// without a leader which of its entries are committed: raft keeps that in memory alone.
//
// It is written before the entry is applied, so the state was never newer than the mark. The write is
// not synced: it survives the end of the process at any instant, and a loss of power sets it back by
// markSync at most, which the entries themselves, synced, never are.
//
// The record names the entry's term beside its index: by raft's log matching, a log that has an entry
// of that index and term has the same entries before it. A mark that fits no entry, and that no
// snapshot covers, says nothing.
//
//	8 bytes  "meshmark"
//	8 bytes  big-endian index
//	8 bytes  big-endian term
//	8 bytes  CRC-64 (ECMA) of the 24 before
const (
	markMagic = "meshmark"
	markSize  = len(markMagic) + 3*8
	// markSync is how far apart syncs of the mark are: one in the way of each commit would double its time.
	markSync = time.Second
)

// mark is the place where the mark is kept: a file, or memory alone where there is none.
type mark struct {
	log   *slog.Logger
	file  *os.File // nil: kept in memory
	dirty chan struct{}
	done  chan struct{}
	wg    sync.WaitGroup

	mu          sync.Mutex
	index, term uint64
	broken      bool // the last write failed, and was logged
}

// openMark opens or makes the file. One that is torn is as good as none.
func openMark(path string, log *slog.Logger) (*mark, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the mark of what was applied: %w", err)
	}
	m := &mark{log: log, file: f, dirty: make(chan struct{}, 1), done: make(chan struct{})}
	b := make([]byte, markSize)
	switch _, err := f.ReadAt(b, 0); {
	case err == nil:
		m.index, m.term = decodeMark(b)
	case !errors.Is(err, io.EOF):
		return nil, errors.Join(fmt.Errorf("read the mark of what was applied: %w", err), f.Close())
	}
	m.wg.Go(m.sync)
	return m, nil
}

func encodeMark(index, term uint64) []byte {
	b := binary.BigEndian.AppendUint64([]byte(markMagic), index)
	b = binary.BigEndian.AppendUint64(b, term)
	return binary.BigEndian.AppendUint64(b, checksum(b))
}

func checksum(b []byte) uint64 { return crc64.Checksum(b, crc64.MakeTable(crc64.ECMA)) }

// decodeMark returns zeros for what is no mark.
func decodeMark(b []byte) (index, term uint64) {
	body := b[:markSize-8]
	if string(b[:len(markMagic)]) != markMagic || checksum(body) != binary.BigEndian.Uint64(b[len(body):]) {
		return 0, 0
	}
	return binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])
}

// get returns the newest mark, zeros for none.
func (m *mark) get() (index, term uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.index, m.term
}

// set moves the mark forward, and never back: after an older snapshot the machine sees entries again.
func (m *mark) set(index, term uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if index <= m.index {
		return
	}
	m.index, m.term = index, term
	if m.file == nil {
		return
	}
	if _, err := m.file.WriteAt(encodeMark(index, term), 0); err != nil {
		// A mark that lags would have an old state taken for the newest. None only has the next start
		// wait for a leader.
		if err = errors.Join(err, m.file.Truncate(0)); !m.broken {
			m.log.Error("write the mark of what was applied", "index", index, "err", err)
		}
		m.broken = true
		return
	}
	m.broken = false
	select {
	case m.dirty <- struct{}{}:
	default:
	}
}

// sync brings the mark to the disk, behind the writes and not too often.
func (m *mark) sync() {
	for {
		select {
		case <-m.dirty:
		case <-m.done:
			return
		}
		if err := m.file.Sync(); err != nil {
			m.log.Warn("sync the mark of what was applied", "err", err)
		}
		pause := time.NewTimer(markSync)
		select {
		case <-pause.C:
		case <-m.done:
			pause.Stop()
			return
		}
	}
}

func (m *mark) close() error {
	if m.file == nil {
		return nil
	}
	close(m.done)
	m.wg.Wait()
	return errors.Join(m.file.Sync(), m.file.Close())
}

// LoseMark makes a MemoryDisk what an old build, or a file that is torn, leaves: nothing says how far
// this node had applied its log.
func (d *Disk) LoseMark() {
	d.mark.mu.Lock()
	defer d.mark.mu.Unlock()
	d.mark.index, d.mark.term = 0, 0
}

// record is what a node knows by itself when it starts.
type record struct {
	whole bool   // the machine contains all that this node had applied before
	index uint64 // how far that was, 0 where nothing says it
}

// Recorded reports whether the machine contains, without a leader's word, everything that this node
// had applied before it was started. If not, its state may be one of long ago.
func (n *Node) Recorded() bool { return n.record.whole }

// CaughtUp reports whether this node has applied what a leader, be it itself, has said to be committed
// since it was started, and no less than it had applied before: a new leader knows little at first.
func (n *Node) CaughtUp() bool {
	commit := n.CommitIndex()
	return commit > 0 && commit >= n.record.index && n.AppliedIndex() >= commit
}

// replay brings the machine from the newest snapshot up to the mark, without a leader. The library has
// no part in it, and is free to hand the same entries again; see driver.Apply. It must return before
// the node takes RPCs: a snapshot of a leader's could otherwise come in between.
//
// It reports whether the machine now contains all that this node had applied before it was started.
// Where nothing says how much that was it does not.
func (d *driver) replay(logs raft.LogStore) (whole bool) {
	d.mu.Lock()
	d.opened = true
	d.mu.Unlock()
	index, term := d.mark.get()
	if index == 0 || d.failure() != nil {
		return false
	}
	if index <= d.applied.Load() {
		return true // a snapshot has it
	}
	var l raft.Log
	if err := logs.GetLog(index, &l); err != nil || l.Term != term {
		return false
	}
	for at := d.contained.Load() + 1; at <= index; at++ {
		l = raft.Log{}
		if err := logs.GetLog(at, &l); err != nil {
			return false
		}
		if l.Type == raft.LogCommand && !d.again(&l) {
			return false
		}
	}
	return true
}

// again applies a committed entry of the log, unless the machine has it.
func (d *driver) again(l *raft.Log) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.apply(l).err == nil
}
