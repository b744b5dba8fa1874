package supervise

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const recordVersion = 1

// record is what is remembered of a child, as JSON. With PID 0 it is an intent:
// the process with that token may exist or not.
type record struct {
	Version     int           `json:"version"`
	Token       string        `json:"token"`
	Boot        string        `json:"boot"`
	Fingerprint string        `json:"fingerprint"`
	StopTimeout time.Duration `json:"stop_timeout"` // nanoseconds
	Started     time.Time     `json:"started"`
	Restarts    int           `json:"restarts"`
	PID         int           `json:"pid,omitempty"`
	Start       uint64        `json:"start,omitempty"` // clock ticks since boot
}

func (s *Supervisor) save(name string, rec record) error {
	b, err := json.Marshal(rec)
	if err == nil {
		err = s.cfg.Records.Save(name, b)
	}
	if err != nil {
		return fmt.Errorf("save the record of %s: %w", name, err)
	}
	return nil
}

func decodeRecord(b []byte) (record, error) {
	var rec record
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&rec); err != nil {
		return record{}, err
	}
	if rec.Version != recordVersion {
		return record{}, fmt.Errorf("version %d, want %d", rec.Version, recordVersion)
	}
	return rec, nil
}

// adopt finds the processes of the run before. A nil child is a name of which
// only a record or leftovers exist; its worker clears them away.
func (s *Supervisor) adopt(ctx context.Context) (map[string]*child, error) {
	raw, err := s.cfg.Records.Load()
	if err != nil {
		return nil, fmt.Errorf("load the records of children: %w", err)
	}
	found := map[string]*child{}
	intents, recorded := map[string]record{}, map[string]record{}
	for name, b := range raw {
		found[name] = nil
		rec, err := decodeRecord(b)
		switch {
		case err != nil:
			// Whatever runs under the name carries a token, and is ended before a
			// new start; so the loss is a restart.
			s.cfg.Log.Warn("adopt: unreadable record; the process will be restarted", "name", name, "err", err)
		case rec.Boot != s.boot: // all ended with that boot
		case rec.PID == 0:
			intents[name] = rec
		default:
			recorded[name] = rec
		}
	}
	leaders, names, err := s.orphans(ctx, intents)
	if err != nil {
		return nil, err
	}
	for name, rec := range recorded {
		p, err := openProcess(rec.PID, func(st stat) bool { return st.start == rec.Start })
		if err != nil {
			s.cfg.Log.Info("adopt: ended while nobody watched", "name", name, "pid", rec.PID)
			continue
		}
		found[name] = s.adopted(name, p, rec)
	}
	for name, rec := range intents {
		st, ok := leaders[rec.Token]
		if !ok {
			continue
		}
		p, err := openProcess(st.pid, func(now stat) bool { return now.start == st.start })
		if err != nil {
			continue
		}
		rec.PID, rec.Start = p.pid, p.start
		if err := s.save(name, rec); err != nil {
			s.cfg.Log.Warn("adopt: record a found process", "name", name, "err", err)
		}
		found[name] = s.adopted(name, p, rec)
	}
	for name := range names {
		if _, known := found[name]; !known {
			s.cfg.Log.Warn("adopt: processes without a record; they will be ended", "name", name)
			found[name] = nil
		}
	}
	return found, nil
}

func (s *Supervisor) adopted(name string, p *process, rec record) *child {
	s.cfg.Log.Info("adopted", "name", name, "pid", p.pid, "started", rec.Started)
	s.mu.Lock()
	s.children[p.pid] = true // ours to wait for, if Run is called twice in one process
	s.mu.Unlock()
	return s.watchChild(p, rec)
}

// orphans scans for processes with a token of ours: by token, the oldest session
// leader, which is the one that we started; and every name that has any.
func (s *Supervisor) orphans(ctx context.Context, intents map[string]record) (map[string]stat, map[string]bool, error) {
	// A process that was forked as its parent was killed is seen with an empty
	// environment for the microseconds in which exec builds the new one. (It can
	// not be earlier than that: before, it holds our lock.) So an intent is looked
	// for more than once.
	for try := 0; ; try++ {
		leaders, names := map[string]stat{}, map[string]bool{}
		err := processes(func(st stat) {
			if st.dead() {
				return
			}
			tok := token(st.pid)
			name, ours := tokenName(tok, s.instance)
			if !ours {
				return
			}
			names[name] = true
			if old, ok := leaders[tok]; st.session == st.pid && (!ok || st.start < old.start) {
				leaders[tok] = st
			}
		})
		if err != nil {
			return nil, nil, err
		}
		missing := 0
		for _, rec := range intents {
			if _, ok := leaders[rec.Token]; !ok {
				missing++
			}
		}
		if missing == 0 || try == 5 {
			return leaders, names, nil
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return nil, nil, err
		}
	}
}

// readInstance is the id of dir, made on first use. It is in every token, so
// that two meshd on one machine never take each other's processes.
func readInstance(dir string, write func(path string, data []byte) error) (string, error) {
	path := filepath.Join(dir, "instance")
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		b = []byte(strings.ToLower(rand.Text())[:16])
		err = write(path, b)
	}
	if err != nil {
		return "", fmt.Errorf("read the instance id: %w", err)
	}
	id := strings.TrimSpace(string(b))
	if len(id) != 16 || strings.Trim(id, "abcdefghijklmnopqrstuvwxyz234567") != "" {
		return "", fmt.Errorf("read the instance id: %s does not hold 16 characters of a-z and 2-7; restore it, or stop what meshd started here and remove it", path)
	}
	return id, nil
}

// lockDir makes one Supervisor the only one of dir. A child between fork and
// exec of a killed predecessor still holds the lock, so we wait a little, and
// know afterwards that there is none.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the supervision directory: %w", err)
	}
	for deadline := time.Now().Add(2 * time.Second); ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			f.Close()
			return nil, fmt.Errorf("lock the supervision directory: %w; another meshd supervises from %s: stop it, or use another directory", err, dir)
		}
		if err := sleep(ctx, 10*time.Millisecond); err != nil {
			f.Close()
			return nil, err
		}
	}
}
