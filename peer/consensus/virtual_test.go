package consensus_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"meshd/peer/consensus"
	"meshd/peer/network"
)

// virtual makes members on a fabric, with disks in memory that outlive them, and ends those that run
// when the test does: the timers of one that runs on would keep a bubble's clock going for ever.
func virtual(t *testing.T, ids ...string) (*network.Fabric, mesh) {
	f := network.NewFabric()
	var ms mesh
	for _, id := range ids {
		disk := consensus.MemoryDisk()
		ms = append(ms, &member{id: id, timing: consensus.LAN(), open: func(id string) (consensus.Streams, *consensus.Disk) {
			return f.Join(id), disk
		}})
	}
	t.Cleanup(func() {
		f.Heal()
		for _, m := range ms {
			if m.node == nil {
				continue
			}
			if err := m.down(); err != nil {
				t.Errorf("end %s: %v", m.id, err)
			}
			f.Kill(m.id)
		}
	})
	return f, ms
}

func TestElectionAfterTheLeaderIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		old := ms.leader(t)
		term := old.node.Term()
		f.Isolate(old.id)
		cut := time.Now()
		eventually(t, 5*time.Second, "another leader", func() bool {
			return slices.ContainsFunc(ms, func(m *member) bool { return m != old && m.node.State() == "leader" })
		})
		if d := time.Since(cut); d > 3*time.Second {
			t.Errorf("the election took %v", d)
		}
		if old.node.State() == "leader" {
			t.Error("the old leader leads on, long after its lease ran out")
		}
		f.Heal()
		l := ms.leader(t)
		if l.node.Term() <= term {
			t.Errorf("term %d after %d", l.node.Term(), term)
		}
		for _, m := range ms {
			eventually(t, 5*time.Second, "one leader everywhere", func() bool {
				id, known := m.node.Leader()
				return known && id == l.id
			})
		}
	})
}

// write is one proposal of a test and what became of it.
type write struct {
	value string
	index uint64
	err   error
}

func TestNothingAcknowledgedIsLostUnderFaults(t *testing.T) {
	const rounds = 100
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		rng := rand.New(rand.NewPCG(7, uint64(rounds)))

		var mu sync.Mutex // guards members while they are down, and the record
		var record []write
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for w := range 3 {
			wg.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					mu.Lock()
					n := ms[(w+i)%len(ms)].node
					mu.Unlock()
					x := write{value: fmt.Sprintf("%d-%d", w, i)}
					x.index, _, x.err = n.Apply(ctx, []byte(x.value))
					mu.Lock()
					record = append(record, x)
					mu.Unlock()
					time.Sleep(100 * time.Millisecond)
				}
			})
		}
		for range rounds {
			m, o := ms[rng.IntN(3)], ms[rng.IntN(3)]
			switch rng.IntN(6) {
			case 0:
				f.Isolate(m.id)
			case 1:
				f.Cut(m.id, o.id)
			case 2:
				f.CutOneWay(m.id, o.id)
			case 3:
				f.Slow(m.id, o.id, time.Duration(rng.IntN(300))*time.Millisecond)
			case 4: // the machine loses its network and its power, and boots
				f.Isolate(m.id)
				f.Kill(m.id)
				if err := m.down(); err != nil {
					t.Errorf("kill %s: %v", m.id, err)
				}
				mu.Lock()
				if err := m.start(); err != nil {
					t.Errorf("start %s: %v", m.id, err)
				}
				mu.Unlock()
			case 5: // whoever leads
				for _, l := range ms {
					if l.node.State() == "leader" {
						f.Isolate(l.id)
					}
				}
			}
			time.Sleep(time.Duration(rng.IntN(3000)) * time.Millisecond)
			f.Heal()
			time.Sleep(time.Duration(rng.IntN(1500)) * time.Millisecond)
		}
		ms.leader(t)
		cancel()
		wg.Wait()
		all := ms.agree(t)
		committed := map[string]bool{}
		for _, v := range all {
			if committed[v] {
				t.Errorf("%s was committed twice", v)
			}
			committed[v] = true
		}
		acked, unknown := 0, 0
		for _, w := range record {
			switch {
			case w.err == nil:
				acked++
				if all[w.index] != w.value {
					t.Errorf("%s was acknowledged at %d, where %q is", w.value, w.index, all[w.index])
				}
			case errors.Is(w.err, consensus.ErrUnknown):
				unknown++
			case committed[w.value]:
				t.Errorf("%s is committed, and its writer was told: %v", w.value, w.err)
			}
		}
		if acked < 1000 {
			t.Errorf("only %d of %d writes were acknowledged", acked, len(record))
		}
		t.Logf("%d writes, %d acknowledged, %d unknown, %d entries", len(record), acked, unknown, len(all))
	})
}

func TestLeadIsOneAtATimeAndEndsWithTheLeadership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		type span struct {
			term       uint64
			start, end time.Time
		}
		var mu sync.Mutex
		spans := map[string][]span{}
		for _, m := range ms {
			var here atomic.Int32
			m.lead = func(ctx context.Context, term uint64) {
				if here.Add(1) != 1 {
					t.Errorf("two at once on %s", m.id)
				}
				defer here.Add(-1)
				s := span{term: term, start: time.Now()}
				<-ctx.Done()
				s.end = time.Now()
				mu.Lock()
				defer mu.Unlock()
				spans[m.id] = append(spans[m.id], s)
			}
		}
		ms.form(t)
		for range 10 {
			l := ms.leader(t)
			time.Sleep(time.Second)
			f.Isolate(l.id)
			cut := time.Now()
			time.Sleep(3 * time.Second)
			f.Heal()
			time.Sleep(time.Second)
			mu.Lock()
			last := spans[l.id][len(spans[l.id])-1]
			mu.Unlock()
			if d := last.end.Sub(cut); d < 0 || d > time.Second {
				t.Errorf("%s led for %v after it was cut off", l.id, d)
			}
		}
		for _, m := range ms {
			if err := m.down(); err != nil {
				t.Error(err)
			}
			m.node = nil
		}
		terms := map[uint64]string{}
		for id, ss := range spans {
			for _, s := range ss {
				if o, ok := terms[s.term]; ok && o != id {
					t.Errorf("%s and %s both led in term %d", id, o, s.term)
				}
				terms[s.term] = id
			}
		}
		if len(terms) < 10 {
			t.Errorf("%d terms with a leader", len(terms))
		}
	})
}

func TestALeaderWithoutQuorumSaysWhoIsMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		l := ms.leader(t)
		if s := l.node.Silent(time.Second); len(s) != 0 {
			t.Fatalf("silent in a healthy mesh: %v", s)
		}
		var others []string
		for _, m := range ms {
			if m != l {
				others = append(others, m.id)
			}
		}
		slices.Sort(others)
		f.Isolate(l.id)
		start := time.Now()
		_, _, err := l.node.Apply(t.Context(), []byte("x"))
		var missing *consensus.NoQuorumError
		if !errors.As(err, &missing) || !errors.Is(err, consensus.ErrNoQuorum) || !errors.Is(err, consensus.ErrUnknown) {
			t.Fatalf("apply without quorum: %v", err)
		}
		slices.Sort(missing.Silent)
		if !slices.Equal(missing.Silent, others) || missing.Voters != 3 {
			t.Errorf("missing %v of %d, want %v of 3", missing.Silent, missing.Voters, others)
		}
		if d := time.Since(start); d > 5*time.Second {
			t.Errorf("it took %v", d)
		}
		// It steps down. Nobody is elected here; a later write was never proposed, and says the same.
		time.Sleep(3 * time.Second)
		start = time.Now()
		_, _, err = l.node.Apply(t.Context(), []byte("y"))
		if !errors.As(err, &missing) || errors.Is(err, consensus.ErrUnknown) || time.Since(start) > 5*time.Second {
			t.Fatalf("apply on a node alone: %v after %v", err, time.Since(start))
		}
		slices.Sort(missing.Silent)
		if !slices.Equal(missing.Silent, others) {
			t.Errorf("missing %v, want %v", missing.Silent, others)
		}
	})
}

func TestApplyOnAFollowerNamesTheLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		l := ms.leader(t)
		for _, m := range ms {
			if m == l {
				continue
			}
			eventually(t, 5*time.Second, "the leader is known", func() bool { _, known := m.node.Leader(); return known })
			_, _, err := m.node.Apply(t.Context(), []byte("x"))
			var not *consensus.NotLeaderError
			if !errors.As(err, &not) || !errors.Is(err, consensus.ErrNotLeader) || not.Leader != l.id {
				t.Errorf("apply on %s: %v; %s leads", m.id, err, l.id)
			}
			if s := m.node.Silent(0); s != nil {
				t.Errorf("a follower of a live leader calls %v silent", s)
			}
		}
		index, result, err := l.node.Apply(t.Context(), []byte("y"))
		if err != nil || result != 1 {
			t.Fatalf("apply on the leader: %v, %v", result, err)
		}
		if all := ms.agree(t); all[index] != "y" || len(all) != 1 {
			t.Errorf("the machines hold %v", all)
		}
		if _, _, err := l.node.Apply(t.Context(), make([]byte, consensus.MaxEntry+1)); !errors.Is(err, consensus.ErrTooLarge) {
			t.Errorf("a large entry: %v", err)
		}
	})
}

func TestBootstrapIsRefusedWhereThereIsALog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ms := virtual(t, "a", "b")
		ms.form(t)
		ms.agree(t) // a node that was added and has heard nothing yet has no log
		for _, m := range ms {
			if err := m.node.Bootstrap(); !errors.Is(err, consensus.ErrBootstrapped) {
				t.Errorf("bootstrap of %s: %v", m.id, err)
			}
		}
	})
}

func TestAnEntryThatCannotBeAppliedStopsTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		l := ms.leader(t)
		before, _, err := l.node.Apply(t.Context(), []byte("good"))
		if err != nil {
			t.Fatal(err)
		}
		ms.agree(t)
		if _, _, err := l.node.Apply(t.Context(), []byte("poison")); !errors.Is(err, errPoison) {
			t.Fatalf("apply: %v", err)
		}
		// The last of three may never learn that the entry is committed: nobody is left to tell it.
		stopped := func() bool {
			n := 0
			for _, m := range ms {
				n += len(m.ran)
			}
			return n >= 2
		}
		check := func() {
			t.Helper()
			eventually(t, 20*time.Second, "a majority stops", stopped)
			for _, m := range ms {
				m.stop()
				err := <-m.ran
				m.ran <- nil // for the next to wait
				stopped := errors.Is(err, errPoison)
				if !stopped && err != nil {
					t.Errorf("%s ran until %v", m.id, err)
				}
				if all := m.ledger.all(); len(all) > 1 || len(all) == 1 && all[before] != "good" {
					t.Errorf("%s holds %v", m.id, all)
				}
				if !stopped {
					continue
				}
				if _, _, err := m.node.Apply(t.Context(), []byte("more")); !errors.Is(err, consensus.ErrClosed) {
					t.Errorf("apply on a stopped node: %v", err)
				}
				if err := m.node.Snapshot(t.Context()); err == nil {
					t.Error("a stopped node made a snapshot, without the entry that it could not take")
				}
			}
		}
		check()
		for _, m := range ms {
			if err := m.down(); err != nil {
				t.Fatal(err)
			}
			f.Kill(m.id)
		}
		// The entry is still there, so the same build stops again.
		for _, m := range ms {
			if err := m.start(); err != nil {
				t.Fatal(err)
			}
		}
		check()
	})
}

func TestAcksProveALeadership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		l := ms.leader(t)
		now, term := time.Now(), l.node.Term()
		eventually(t, time.Second, "acknowledgements of what was sent from now on", func() bool {
			return l.node.AckedSince(term, now)
		})
		if l.node.AckedSince(term+1, now) || l.node.AckedSince(term, time.Now().Add(time.Hour)) {
			t.Error("acknowledged before it was sent")
		}
		// One voter of three is enough beside itself; none is not.
		var others []*member
		for _, m := range ms {
			if m != l {
				others = append(others, m)
			}
		}
		f.Cut(l.id, others[0].id)
		time.Sleep(time.Millisecond) // what was sent at this very instant crossed the link
		now = time.Now()
		eventually(t, time.Second, "acknowledgements of one voter", func() bool { return l.node.AckedSince(term, now) })
		f.Isolate(l.id)
		time.Sleep(time.Millisecond)
		now = time.Now()
		time.Sleep(2 * time.Second)
		if l.node.AckedSince(term, now) {
			t.Error("acknowledged over cut links")
		}
		f.Heal()
		next := ms.leader(t)
		// What a voter remembers of the old leader is not before the cut by more than a heartbeat.
		for _, m := range ms {
			at := m.node.LastAppendBefore(next.node.Term())
			if m != l && m == others[1] && now.Sub(at) > time.Second {
				t.Errorf("%s heard of an old leader %v before the cut", m.id, now.Sub(at))
			}
			if at.After(now.Add(10 * time.Millisecond)) {
				t.Errorf("%s heard of an old leader %v after the cut", m.id, at.Sub(now))
			}
		}
	})
}

func TestALearnerCatchesUpBySnapshotAndIsPromoted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ms := virtual(t, "a", "b", "c")
		first, late := ms[:2], ms[2]
		first.form(t)
		l := first.leader(t)
		for i := range 6000 { // more than are kept behind a snapshot
			if _, _, err := l.node.Apply(t.Context(), fmt.Appendf(nil, "%d", i)); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.node.Snapshot(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := late.start(); err != nil {
			t.Fatal(err)
		}
		facts := func() consensus.Facts {
			servers, _ := l.node.Servers()
			return consensus.Facts{
				Self: l.id, Servers: servers, Last: l.node.LastIndex(), Now: time.Now(),
				Members: []consensus.Member{{ID: "a"}, {ID: "b"}, {ID: "c"}},
			}
		}
		for _, want := range []consensus.Change{{Op: consensus.AddLearner, Node: "c"}, {Op: consensus.Promote, Node: "c"}} {
			var c consensus.Change
			eventually(t, 10*time.Second, string(want.Op), func() bool {
				var ok bool
				c, ok = consensus.DecideVoters(facts())
				return ok
			})
			if c.Op != want.Op || c.Node != want.Node {
				t.Fatalf("decided %+v, want %+v", c, want)
			}
			_, at := l.node.Servers()
			var err error
			if c.Op == consensus.AddLearner {
				err = l.node.AddLearner(t.Context(), c.Node, at)
			} else {
				err = l.node.Promote(t.Context(), c.Node, at)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if c, ok := consensus.DecideVoters(facts()); ok {
			t.Errorf("three voters, and still %+v", c)
		}
		if all := ms.agree(t); len(all) != 6000 {
			t.Errorf("%d entries", len(all))
		}
	})
}

func TestAChangeOfAnOldConfigurationIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ms := virtual(t, "a", "b")
		ms.form(t)
		l := ms.leader(t)
		_, old := l.node.Servers()
		if err := l.node.AddLearner(t.Context(), "x", old); err != nil {
			t.Fatal(err)
		}
		if err := l.node.AddLearner(t.Context(), "y", old); err == nil {
			t.Fatal("a change was made on a configuration that it was not decided for")
		}
		_, at := l.node.Servers()
		if err := l.node.Remove(t.Context(), "x", at); err != nil {
			t.Fatal(err)
		}
		servers, _ := l.node.Servers()
		if len(servers) != 2 {
			t.Errorf("servers %+v", servers)
		}
	})
}

func TestTransferAtExitLeavesALeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		old := ms.leader(t)
		start := time.Now()
		if err := old.node.TransferLeadership(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := old.down(); err != nil {
			t.Fatal(err)
		}
		f.Kill(old.id)
		old.node = nil
		ms.leader(t)
		if d := time.Since(start); d > 400*time.Millisecond {
			t.Errorf("the next leader came after %v: by a time-out, not by the transfer", d)
		}
	})
}
