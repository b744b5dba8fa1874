package consensus_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"meshd/peer/consensus"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("CONSENSUS_TEST_CHILD"); dir != "" {
		child(dir)
		return
	}
	if dir := os.Getenv("CONSENSUS_TEST_CHILDREN"); dir != "" {
		children(dir)
		return
	}
	goleak.VerifyTestMain(m)
}

// ledger is a machine that remembers every entry and a hash over all of them.
type ledger struct {
	mu      sync.Mutex
	Entries []string
	Indexes []uint64
	Hash    [32]byte

	applies func(index uint64) // called before an entry is applied, if it is there
}

var errPoison = errors.New("unknown command")

func (l *ledger) Apply(index uint64, entry []byte) (any, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if strings.HasPrefix(string(entry), "poison") {
		return nil, errPoison
	}
	if l.applies != nil {
		l.applies(index)
	}
	l.Entries = append(l.Entries, string(entry))
	l.Indexes = append(l.Indexes, index)
	l.Hash = sha256.Sum256(fmt.Appendf(l.Hash[:], "%d %s", index, entry))
	return len(l.Entries), nil
}

type page []byte

func (p page) WriteTo(w io.Writer) (int64, error) {
	n, err := w.Write(p)
	return int64(n), err
}

func (l *ledger) Snapshot() (io.WriterTo, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b, err := json.Marshal(l)
	return page(b), err
}

func (l *ledger) Restore(r io.Reader) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Entries, l.Indexes = nil, nil
	return json.NewDecoder(r).Decode(l)
}

// all returns the entries by index.
func (l *ledger) all() map[uint64]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := map[uint64]string{}
	for i, e := range l.Entries {
		m[l.Indexes[i]] = e
	}
	return m
}

func (l *ledger) hash() [32]byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Hash
}

// member is one node of a test mesh, which may be down.
type member struct {
	id      string
	timing  consensus.Timing
	lead    func(ctx context.Context, term uint64)
	open    func(id string) (consensus.Streams, *consensus.Disk)
	applies func(index uint64) // see ledger
	node    *consensus.Node
	ledger  *ledger
	stop    context.CancelFunc
	ran     chan error
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func (m *member) start() error {
	streams, disk := m.open(m.id)
	m.ledger = &ledger{applies: m.applies}
	n, err := consensus.Open(consensus.Config{
		Node: m.id, Streams: streams, Disk: disk, Machine: m.ledger,
		Timing: m.timing, Lead: m.lead, Log: quiet(),
	})
	if err != nil {
		return err
	}
	m.node = n
	var ctx context.Context
	ctx, m.stop = context.WithCancel(context.Background())
	m.ran = make(chan error, 1)
	go func() { m.ran <- n.Run(ctx) }()
	return nil
}

func (m *member) down() error {
	m.stop()
	err := <-m.ran
	return errors.Join(err, m.node.Close())
}

// mesh is some members of which the first made the mesh.
type mesh []*member

// eventually polls until ok, in real or virtual time.
func eventually(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	end := time.NewTimer(within)
	defer end.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-end.C:
			t.Fatalf("not within %v: %s", within, what)
		case <-tick.C:
		}
	}
}

// leader waits for a member that leads and can commit.
func (ms mesh) leader(t *testing.T) *member {
	t.Helper()
	var l *member
	eventually(t, 20*time.Second, "a leader that commits", func() bool {
		for _, m := range ms {
			if m.node != nil && m.node.State() == "leader" && m.node.Barrier(t.Context()) == nil {
				l = m
				return true
			}
		}
		return false
	})
	return l
}

// form makes all members voters.
func (ms mesh) form(t *testing.T) {
	t.Helper()
	for _, m := range ms {
		if err := m.start(); err != nil {
			t.Fatal(err)
		}
	}
	if err := ms[0].node.Bootstrap(); err != nil {
		t.Fatal(err)
	}
	for _, m := range ms[1:] {
		// A new voter that is slow to answer can cost the leadership, so each step is tried again.
		eventually(t, 30*time.Second, m.id+" votes", func() bool {
			l := ms.leader(t)
			servers, at := l.node.Servers()
			for _, s := range servers {
				if s.ID != m.id {
					continue
				}
				if !s.Voter && l.node.Promote(t.Context(), m.id, at) != nil {
					return false
				}
				return true
			}
			l.node.AddLearner(t.Context(), m.id, at)
			return false
		})
	}
}

// agree waits until every member has applied the same, and returns it.
func (ms mesh) agree(t *testing.T) map[uint64]string {
	t.Helper()
	l := ms.leader(t)
	eventually(t, 20*time.Second, "all members up to date and equal", func() bool {
		want := l.ledger.hash()
		for _, m := range ms {
			if m.ledger.hash() != want || m.node.AppliedIndex() < l.node.CommitIndex() {
				return false
			}
		}
		return true
	})
	return l.ledger.all()
}
