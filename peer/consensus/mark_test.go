package consensus_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meshd/peer/consensus"
	"meshd/peer/network"
)

// alone starts m while nobody else is up, and gives it time to hear of nobody.
func alone(t *testing.T, m *member) {
	t.Helper()
	if err := m.start(); err != nil {
		t.Fatal(err)
	}
	if m.node.CaughtUp() || m.node.CommitIndex() != 0 {
		t.Errorf("%s alone knows of a leader: commit %d", m.id, m.node.CommitIndex())
	}
}

func TestANodeThatIsAloneComesUpWithWhatItHadApplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ms := virtual(t, "a", "b", "c")
		ms.form(t)
		for i := range 20 {
			l := ms.leader(t)
			if _, _, err := l.node.Apply(t.Context(), fmt.Appendf(nil, "%d", i)); err != nil {
				t.Fatal(err)
			}
			if i == 10 {
				if err := l.node.Snapshot(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		ms.agree(t)
		before := map[string][32]byte{}
		for _, m := range ms {
			before[m.id] = m.ledger.hash()
			if err := m.down(); err != nil {
				t.Fatal(err)
			}
			f.Kill(m.id)
			m.node = nil
		}
		for _, m := range ms {
			alone(t, m)
			if !m.node.Recorded() || m.ledger.hash() != before[m.id] {
				t.Errorf("%s alone: recorded %v, and %d entries", m.id, m.node.Recorded(), len(m.ledger.all()))
			}
			if servers, _ := m.node.Servers(); len(servers) != 3 {
				t.Errorf("%s alone knows %v", m.id, servers)
			}
			// The library has handed on nothing yet, and would label a snapshot with that.
			if err := m.node.Snapshot(t.Context()); err != nil {
				t.Error(err)
			}
			time.Sleep(5 * time.Second)
			if silent := m.node.Silent(2 * time.Second); len(silent) != 2 {
				t.Errorf("%s alone misses %v", m.id, silent)
			}
			if m.node.CaughtUp() || m.ledger.hash() != before[m.id] {
				t.Errorf("%s alone went on", m.id)
			}
			if err := m.down(); err != nil {
				t.Fatal(err)
			}
			f.Kill(m.id)
			m.node = nil
		}
		// Together they go on, and see nothing twice.
		for _, m := range ms {
			if err := m.start(); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := ms.leader(t).node.Apply(t.Context(), []byte("more")); err != nil {
			t.Fatal(err)
		}
		if all := ms.agree(t); len(all) != 21 {
			t.Errorf("%d entries: %v", len(all), all)
		}
		for _, m := range ms {
			if !m.node.CaughtUp() {
				t.Errorf("%s has not caught up", m.id)
			}
			if err := m.node.Snapshot(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestNoMarkIsNoRecord: without a mark a node is at its snapshot until a leader speaks, and says so.
func TestNoMarkIsNoRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		disks := map[string]*consensus.Disk{}
		var ms mesh
		for _, id := range []string{"a", "b"} {
			disks[id] = consensus.MemoryDisk()
			ms = append(ms, &member{id: id, timing: consensus.LAN(), open: func(id string) (consensus.Streams, *consensus.Disk) {
				return f.Join(id), disks[id]
			}})
		}
		ms.form(t)
		if ms[0].node.Recorded() {
			t.Error("a new node has a record")
		}
		if _, _, err := ms.leader(t).node.Apply(t.Context(), []byte("x")); err != nil {
			t.Fatal(err)
		}
		ms.agree(t)
		for _, m := range ms {
			if err := m.down(); err != nil {
				t.Fatal(err)
			}
			f.Kill(m.id)
			disks[m.id].LoseMark()
		}
		for _, m := range ms {
			alone(t, m)
			if all := m.ledger.all(); m.node.Recorded() || len(all) != 0 {
				t.Errorf("%s without a mark: recorded %v, %v", m.id, m.node.Recorded(), all)
			}
		}
		ms.agree(t)
		for _, m := range ms {
			eventually(t, 10*time.Second, m.id+" has caught up", m.node.CaughtUp)
			if err := m.down(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestARecordIsAsLongAsTheLog: as many entries as there are behind the newest snapshot, and after one
// that came from a leader.
func TestARecordIsAsLongAsTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const entries = 10000 // the library's own replay stops at 128 batches of 64
		f, ms := virtual(t, "a", "b", "c")
		first, late := ms[:2], ms[2]
		first.form(t)
		l := first.leader(t)
		write := func(entries int) {
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() {
					for range entries / 50 {
						if _, _, err := l.node.Apply(t.Context(), []byte("x")); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
		}
		check := func(ms mesh, want int) {
			t.Helper()
			ms.agree(t)
			for _, m := range ms {
				if err := m.down(); err != nil {
					t.Fatal(err)
				}
				f.Kill(m.id)
				m.node = nil
			}
			for _, m := range ms {
				alone(t, m)
				if got := len(m.ledger.all()); !m.node.Recorded() || got != want {
					t.Errorf("%s alone: recorded %v, %d entries of %d", m.id, m.node.Recorded(), got, want)
				}
			}
			l = ms.leader(t)
			ms.agree(t)
		}
		write(entries)
		check(first, entries)
		if err := l.node.Snapshot(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := late.start(); err != nil {
			t.Fatal(err)
		}
		_, at := l.node.Servers()
		if err := l.node.AddLearner(t.Context(), late.id, at); err != nil {
			t.Fatal(err)
		}
		check(ms, entries)
		write(50)
		check(ms, entries+50)
	})
}

// children is a mesh of three in a process of its own. It says which entry each of them applies,
// before it does.
func children(dir string) {
	f := network.NewFabric()
	var ms mesh
	for _, id := range []string{"a", "b", "c"} {
		disk, err := consensus.OpenDisk(filepath.Join(dir, id), quiet())
		if err != nil {
			panic(err)
		}
		m := &member{id: id, timing: consensus.LAN(), open: func(id string) (consensus.Streams, *consensus.Disk) {
			return f.Join(id), disk
		}}
		m.applies = func(index uint64) { fmt.Println(id, index) }
		if err := m.start(); err != nil {
			panic(err)
		}
		ms = append(ms, m)
	}
	if err := ms[0].node.Bootstrap(); err != nil && !strings.Contains(err.Error(), consensus.ErrBootstrapped.Error()) {
		panic(err)
	}
	ctx := context.Background()
	for {
		for _, m := range ms {
			servers, at := m.node.Servers()
			i := slices.IndexFunc(ms, func(m *member) bool {
				return !slices.ContainsFunc(servers, func(s consensus.Server) bool { return s.ID == m.id && s.Voter })
			})
			if m.node.State() != "leader" {
				continue
			}
			if len(servers) > 0 && i >= 0 && m.node.AddLearner(ctx, ms[i].id, at) == nil {
				_, at = m.node.Servers()
				_ = m.node.Promote(ctx, ms[i].id, at) // else in the next round
			}
			if index, _, err := m.node.Apply(ctx, []byte("x")); err == nil && index%100 == 0 {
				_ = m.node.Snapshot(ctx) // one more or less
			}
		}
	}
}

func TestKillNineLeavesTheMark(t *testing.T) {
	dir := t.TempDir()
	applied := map[string]uint64{}
	for round := range 4 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "CONSENSUS_TEST_CHILDREN="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		seen := map[string]int{}
		lines, killed := bufio.NewScanner(out), false
		for lines.Scan() {
			id, number, _ := strings.Cut(lines.Text(), " ")
			index, err := strconv.ParseUint(number, 10, 64)
			if err != nil {
				t.Fatalf("the child printed %q", lines.Text())
			}
			applied[id] = max(applied[id], index)
			seen[id]++
			if !killed && seen["a"] > 50+7*round && seen["b"] > 50 && seen["c"] > 50 {
				killed = true
				cmd.Process.Kill() // what is still in the pipe was applied too
			}
		}
		cmd.Wait()
		for _, id := range []string{"a", "b", "c"} {
			disk, err := consensus.OpenDisk(filepath.Join(dir, id), quiet())
			if err != nil {
				t.Fatal(err)
			}
			m := &member{id: id, timing: consensus.LAN(), open: func(string) (consensus.Streams, *consensus.Disk) {
				return network.NewFabric().Join(id), disk
			}}
			alone(t, m)
			all := m.ledger.all()
			if _, has := all[applied[id]]; !m.node.Recorded() || !has {
				t.Errorf("%s alone: recorded %v, and entry %d is there: %v", id, m.node.Recorded(), applied[id], has)
			}
			if servers, _ := m.node.Servers(); len(servers) != 3 {
				t.Errorf("%s alone knows %v", id, servers)
			}
			if err := m.down(); err != nil {
				t.Error(err)
			}
		}
	}
}
