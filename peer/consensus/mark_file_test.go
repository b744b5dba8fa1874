package consensus

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"
)

func TestATornMarkSaysNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mark")
	open := func() (index, term uint64) {
		t.Helper()
		m, err := openMark(path, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := m.close(); err != nil {
				t.Error(err)
			}
		}()
		index, term = m.get()
		m.set(7, 3)
		m.set(5, 2) // never back
		return index, term
	}
	if index, term := open(); index != 0 || term != 0 {
		t.Errorf("a new one is %d of term %d", index, term)
	}
	if index, term := open(); index != 7 || term != 3 {
		t.Errorf("read %d of term %d, written 7 of 3", index, term)
	}
	whole, err := os.ReadFile(path)
	if err != nil || len(whole) != markSize {
		t.Fatalf("%d bytes, %v", len(whole), err)
	}
	for i := range whole {
		torn := append([]byte(nil), whole...)
		torn[i] ^= 0x40
		if index, term := decodeMark(torn); index != 0 || term != 0 {
			t.Errorf("with byte %d torn it says %d of term %d", i, index, term)
		}
		if err := os.WriteFile(path, whole[:i], 0o600); err != nil {
			t.Fatal(err)
		}
		if index, term := open(); index != 0 || term != 0 {
			t.Errorf("of %d bytes it says %d of term %d", i, index, term)
		}
	}
}

// TestAMarkOfAnotherLogSaysNothing: a mark fits a log that has its very entry.
func TestAMarkOfAnotherLogSaysNothing(t *testing.T) {
	for _, x := range []struct {
		name        string
		index, term uint64
		whole       bool
	}{
		{"the newest entry", 3, 2, true},
		{"one of another term", 3, 1, false},
		{"one that is not there", 4, 2, false},
		{"none", 0, 0, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			disk := MemoryDisk()
			disk.mark.set(x.index, x.term)
			err := disk.logs.StoreLogs([]*raft.Log{{Index: 1, Term: 1}, {Index: 2, Term: 2, Type: raft.LogNoop}, {Index: 3, Term: 2}})
			if err != nil {
				t.Fatal(err)
			}
			var m counter
			d := newDriver(&m, disk)
			if whole := d.replay(disk.logs); whole != x.whole {
				t.Errorf("whole is %v", whole)
			}
			if want := map[bool]int{true: 2}[x.whole]; int(m) != want {
				t.Errorf("%d entries were applied, want %d", m, want)
			}
		})
	}
}

// counter is a machine that counts.
type counter int

func (c *counter) Apply(uint64, []byte) (any, error) { *c++; return nil, nil }
func (c *counter) Snapshot() (io.WriterTo, error)    { return nil, errors.New("a counter has none") }
func (c *counter) Restore(io.Reader) error           { return errors.New("a counter has none") }
