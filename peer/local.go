package peer

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// Local is what is one node's own and no business of the log: ports that it
// chose, children to adopt, the bus keys of its processes and its operators,
// addresses of the others that worked. Losing it costs a restart of the children
// and the operators' bus credentials, and nothing else.
type Local struct {
	db *bbolt.DB
}

// lockTimeout is how long OpenLocal waits for another process to let go of the
// data directory: a node that is being restarted needs no longer.
const lockTimeout = 3 * time.Second

var (
	bucketKeys     = []byte("bus-keys")  // assignment -> public key, newline, seed
	bucketChildren = []byte("children")  // name -> the supervisor's record
	bucketSettings = []byte("settings")  // name -> value
	bucketPeers    = []byte("addresses") // node id -> host:port
)

// OpenLocal opens the node's own file in dir. It is locked: two processes never
// run one data directory.
func OpenLocal(dir string) (*Local, error) {
	path := filepath.Join(dir, "local.db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockTimeout, NoFreelistSync: true, FreelistType: bbolt.FreelistMapType})
	if err != nil {
		if errors.Is(err, bolterrors.ErrTimeout) {
			return nil, fmt.Errorf("open %s: another meshd runs on this data directory; stop it first", path)
		}
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, b := range [][]byte{bucketKeys, bucketChildren, bucketSettings, bucketPeers, bucketOperators} {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("prepare %s: %w", path, err)
	}
	return &Local{db: db}, nil
}

// Close releases the lock.
func (l *Local) Close() error { return l.db.Close() }

func (l *Local) get(bucket []byte, key string) string {
	var out string
	_ = l.db.View(func(tx *bbolt.Tx) error { // a view of an open file does not fail
		out = string(tx.Bucket(bucket).Get([]byte(key)))
		return nil
	})
	return out
}

func (l *Local) put(bucket []byte, key, value string) error {
	if l.get(bucket, key) == value {
		return nil
	}
	err := l.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucket).Put([]byte(key), []byte(value)) })
	if err != nil {
		return fmt.Errorf("write %s: %w", l.db.Path(), err)
	}
	return nil
}

// Setting returns what Set stored, or "".
func (l *Local) Setting(name string) string { return l.get(bucketSettings, name) }

// Set stores a setting.
func (l *Local) Set(name, value string) error { return l.put(bucketSettings, name, value) }

// Address is where the node was reached last, or "".
func (l *Local) Address(node string) string {
	if l.isRemoved(node) {
		return ""
	}
	return l.get(bucketPeers, node)
}

// SetAddress remembers where a node was reached.
func (l *Local) SetAddress(node, address string) error { return l.put(bucketPeers, node, address) }

// gone stands in the place of a removed node's address.
const gone = "removed"

func (l *Local) isRemoved(node string) bool { return l.get(bucketPeers, node) == gone }

// addressed are the ids of the nodes that have an address.
func (l *Local) addressed() []string {
	var ids []string
	_ = l.db.View(func(tx *bbolt.Tx) error { // a view of an open file does not fail
		return tx.Bucket(bucketPeers).ForEach(func(k, v []byte) error {
			if string(v) != gone {
				ids = append(ids, string(k))
			}
			return nil
		})
	})
	return ids
}

// busKey is the key with which the assignment's process connects to the bus,
// made the first time that it is asked for.
func (l *Local) busKey(assignment string) (public, seed string, err error) {
	public, seed, ok := strings.Cut(l.get(bucketKeys, assignment), "\n")
	if ok {
		return public, seed, nil
	}
	err = l.db.Update(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketKeys)
		if public, seed, ok = strings.Cut(string(b.Get([]byte(assignment))), "\n"); ok {
			return nil // somebody else was quicker
		}
		if public, seed, err = newBusKey(); err != nil {
			return err
		}
		return b.Put([]byte(assignment), []byte(public+"\n"+seed))
	})
	if err != nil {
		return "", "", fmt.Errorf("make bus key of %s: %w", assignment, err)
	}
	return public, seed, nil
}

// forgetBusKey ends the key of an assignment that is gone.
func (l *Local) forgetBusKey(assignment string) error { return l.delete(bucketKeys, assignment) }

func (l *Local) delete(bucket []byte, key string) error {
	if l.get(bucket, key) == "" {
		return nil
	}
	err := l.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucket).Delete([]byte(key)) })
	if err != nil {
		return fmt.Errorf("write %s: %w", l.db.Path(), err)
	}
	return nil
}

// Children is the supervisor's memory across restarts of meshd.
type Children struct{ *Local }

// Load returns every record.
func (c Children) Load() (map[string][]byte, error) {
	out := map[string][]byte{}
	err := c.db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketChildren).ForEach(func(k, v []byte) error {
			out[string(k)] = append([]byte(nil), v...)
			return nil
		})
	})
	return out, err
}

// Save stores the record of one child durably.
func (c Children) Save(name string, record []byte) error {
	return c.put(bucketChildren, name, string(record))
}

// Delete forgets one child; one that is not there is forgotten.
func (c Children) Delete(name string) error {
	return c.delete(bucketChildren, name)
}
