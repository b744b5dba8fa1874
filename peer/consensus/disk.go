package consensus

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"
)

const (
	// retained is how many snapshots are kept: the newest, and one to fall back to when its
	// checksum does not hold.
	retained = 2
	// lockTimeout is how long to wait for the process that has the log open.
	lockTimeout = time.Second
)

// Disk is where a node keeps its log, its term and vote, and its snapshots. A node whose disk was
// lost must come back under a new id: with its old one it could vote twice in a term.
type Disk struct {
	logs      raft.LogStore
	stable    raft.StableStore
	snapshots raft.SnapshotStore
	mark      *mark
	lock      string
	close     func() error
}

// Lock names the exclusive lock that an open Disk holds until its process ends: of this machine, and of
// this file. Who holds a lock of that name later proves that this process is dead. A copy of the
// directory has another name, and so has one on another machine.
func (d *Disk) Lock() string { return d.lock }

// lockName names the lock of a file that is open.
func lockName(path string) (string, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return "", fmt.Errorf("name the lock of %s: %w", path, err)
	}
	// machine-id(5) survives a boot. Where there is none, as in some containers, a boot has a name of
	// its own, and after one an old lease is waited out.
	for _, path := range []string{"/etc/machine-id", "/proc/sys/kernel/random/boot_id"} {
		if id, err := os.ReadFile(path); err == nil && len(bytes.TrimSpace(id)) > 0 {
			return fmt.Sprintf("%s:%d:%d", bytes.TrimSpace(id), st.Dev, st.Ino), nil
		}
	}
	return "", fmt.Errorf("name the lock of %s: this machine has neither /etc/machine-id nor a boot id", path)
}

// OpenDisk opens or makes the files of a node in a directory of its own, mode 0700: raft.db (bbolt,
// synced at every write, mode 0600), snapshots/ (each with a CRC-64, the newest two are kept) and mark,
// which says how far the log was applied.
func OpenDisk(dir string, log *slog.Logger) (*Disk, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open consensus disk: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open consensus disk: %w", err)
	}
	path := filepath.Join(dir, "raft.db")
	db, err := raftboltdb.New(raftboltdb.Options{
		Path: path,
		BoltOptions: &bbolt.Options{
			Timeout: lockTimeout,
			// The free list is found again by a scan at start. Writing it at each commit costs a
			// sixth of the rate, and more as the file grows.
			NoFreelistSync: true,
			FreelistType:   bbolt.FreelistMapType,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("open consensus log %s: %w", path, err)
	}
	snapshots, err := raft.NewFileSnapshotStoreWithLogger(dir, retained, newLogger(log))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open snapshots in %s: %w", dir, err), db.Close())
	}
	lock, err := lockName(path)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	m, err := openMark(filepath.Join(dir, "mark"), log)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &Disk{logs: db, stable: db, snapshots: snapshots, mark: m, lock: lock, close: func() error {
		return errors.Join(m.close(), db.Close())
	}}, nil
}

// MemoryDisk keeps everything in memory, for tests in virtual time. It outlives the node that uses
// it, so that the node can be opened on it again. Stall makes it slow.
func MemoryDisk() *Disk {
	db := &memory{InmemStore: raft.NewInmemStore()}
	return &Disk{
		logs:      db,
		stable:    db,
		snapshots: raft.NewInmemSnapshotStore(),
		mark:      &mark{},
		lock:      fmt.Sprintf("memory:%p", db),
		close:     func() error { return nil },
	}
}

// Stall keeps what is written to a MemoryDisk waiting until resume is called.
func (d *Disk) Stall() (resume func()) {
	on := make(chan struct{})
	d.logs.(*memory).stalled.Store(&on)
	return sync.OnceFunc(func() {
		d.logs.(*memory).stalled.CompareAndSwap(&on, nil)
		close(on)
	})
}

// memory is a store whose writes can be made to wait.
type memory struct {
	*raft.InmemStore
	stalled atomic.Pointer[chan struct{}]
}

func (m *memory) wait() {
	if on := m.stalled.Load(); on != nil {
		<-*on
	}
}

func (m *memory) StoreLog(l *raft.Log) error {
	m.wait()
	return m.InmemStore.StoreLog(l)
}

func (m *memory) StoreLogs(ls []*raft.Log) error {
	m.wait()
	return m.InmemStore.StoreLogs(ls)
}

func (m *memory) DeleteRange(first, last uint64) error {
	m.wait()
	return m.InmemStore.DeleteRange(first, last)
}

func (m *memory) Set(key, value []byte) error {
	m.wait()
	return m.InmemStore.Set(key, value)
}

func (m *memory) SetUint64(key []byte, value uint64) error {
	m.wait()
	return m.InmemStore.SetUint64(key, value)
}
