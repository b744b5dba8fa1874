package consensus_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"meshd/peer/consensus"
	"meshd/peer/network"
	"meshd/peer/network/networktest"
)

func TestRestartOverTLSWithFiles(t *testing.T) {
	tm := networktest.NewMesh(t)
	ports := map[string]*network.Port{}
	var ms mesh
	for _, id := range []string{"a", "b", "c"} {
		dir := filepath.Join(t.TempDir(), "raft")
		ms = append(ms, &member{id: id, timing: consensus.Slow(), open: func(id string) (consensus.Streams, *consensus.Disk) {
			disk, err := consensus.OpenDisk(dir, quiet())
			if err != nil {
				t.Fatal(err)
			}
			ports[id] = tm.Port(id) // at another port number each time: same node, new address
			return ports[id], disk
		}})
	}
	ms.form(t)
	for i := range 20 {
		if _, _, err := ms.leader(t).node.Apply(t.Context(), fmt.Appendf(nil, "%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	// Each in turn goes without a word, the leader among them, and comes back elsewhere.
	for i, m := range ms {
		ports[m.id].Close()
		if err := m.down(); err != nil {
			t.Fatal(err)
		}
		m.node = nil
		if _, _, err := ms.leader(t).node.Apply(t.Context(), fmt.Appendf(nil, "without %d", i)); err != nil {
			t.Fatal(err)
		}
		if err := m.start(); err != nil {
			t.Fatal(err)
		}
		ms.agree(t)
	}
	// And all at once.
	for _, m := range ms {
		ports[m.id].Close()
		if err := m.down(); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range ms {
		if err := m.start(); err != nil {
			t.Fatal(err)
		}
	}
	if all := ms.agree(t); len(all) != 23 {
		t.Errorf("%d entries after the restarts, want 23: %v", len(all), all)
	}
	for _, m := range ms {
		if err := m.down(); err != nil {
			t.Error(err)
		}
	}
}

func TestTheDiskIsOneProcesses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "raft")
	open := func() (*consensus.Node, error) {
		disk, err := consensus.OpenDisk(dir, quiet())
		if err != nil {
			return nil, err
		}
		return consensus.Open(consensus.Config{
			Node: "a", Streams: network.NewFabric().Join("a"), Disk: disk, Machine: &ledger{},
			Timing: consensus.LAN(), Log: quiet(),
		})
	}
	n, err := open()
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, "raft.db"): 0o600} {
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != want {
			t.Errorf("mode of %s: %v, %v", path, fi.Mode(), err)
		}
	}
	if _, err := open(); err == nil {
		t.Fatal("opened twice")
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err = open(); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
}

// child is a one-node mesh in a process of its own, which prints each index that it acknowledges.
func child(dir string) {
	disk, err := consensus.OpenDisk(dir, quiet())
	if err != nil {
		panic(err)
	}
	n, err := consensus.Open(consensus.Config{
		Node: "a", Streams: network.NewFabric().Join("a"), Disk: disk, Machine: &ledger{},
		Timing: consensus.LAN(), Log: quiet(),
	})
	if err != nil {
		panic(err)
	}
	if err := n.Bootstrap(); err != nil && !strings.Contains(err.Error(), consensus.ErrBootstrapped.Error()) {
		panic(err)
	}
	for {
		if index, _, err := n.Apply(context.Background(), fmt.Appendf(nil, "pid %d", os.Getpid())); err == nil {
			fmt.Println(index)
		}
		if index := n.AppliedIndex(); index%10 == 0 {
			if err := n.Snapshot(context.Background()); err != nil {
				panic(err)
			}
		}
	}
}

func TestKillNineLosesNothingAcknowledged(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "raft")
	acked := map[uint64]string{}
	for range 4 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "CONSENSUS_TEST_CHILD="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); n++ {
			index, err := strconv.ParseUint(lines.Text(), 10, 64)
			if err != nil {
				t.Fatalf("the child printed %q", lines.Text())
			}
			acked[index] = fmt.Sprintf("pid %d", cmd.Process.Pid)
			if n == 15 {
				cmd.Process.Kill() // what is still in the pipe was acknowledged too
			}
		}
		cmd.Wait()
	}
	disk, err := consensus.OpenDisk(dir, quiet())
	if err != nil {
		t.Fatal(err)
	}
	m := &member{id: "a", timing: consensus.LAN(), open: func(string) (consensus.Streams, *consensus.Disk) {
		return network.NewFabric().Join("a"), disk
	}}
	if err := m.start(); err != nil {
		t.Fatal(err)
	}
	all := mesh{m}.agree(t)
	for index, want := range acked {
		if all[index] != want {
			t.Errorf("entry %d is %q, acknowledged as %q", index, all[index], want)
		}
	}
	if len(acked) < 60 {
		t.Errorf("only %d entries were acknowledged", len(acked))
	}
	if err := m.down(); err != nil {
		t.Error(err)
	}
}

func TestATornSnapshotIsPassedOver(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "raft")
	m := &member{id: "a", timing: consensus.LAN(), open: func(string) (consensus.Streams, *consensus.Disk) {
		disk, err := consensus.OpenDisk(dir, quiet())
		if err != nil {
			t.Fatal(err)
		}
		return network.NewFabric().Join("a"), disk
	}}
	if err := m.start(); err != nil {
		t.Fatal(err)
	}
	if err := m.node.Bootstrap(); err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		l := mesh{m}.leader(t)
		if _, _, err := l.node.Apply(t.Context(), fmt.Appendf(nil, "%d", i)); err != nil {
			t.Fatal(err)
		}
		if err := m.node.Snapshot(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.down(); err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(filepath.Join(dir, "snapshots", "*", "state.bin"))
	if err != nil || len(found) != 2 {
		t.Fatalf("snapshots %v, %v", found, err)
	}
	newest := found[len(found)-1]
	b, err := os.ReadFile(newest)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(newest, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.start(); err != nil {
		t.Fatal(err)
	}
	if all := (mesh{m}).agree(t); len(all) != 4 {
		t.Errorf("%d entries: %v", len(all), all)
	}
	if err := m.down(); err != nil {
		t.Fatal(err)
	}
	// Without any that holds, the node does not start as an empty one.
	for _, p := range found {
		if err := os.Truncate(p, 10); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now()
	if err := m.start(); err == nil {
		m.down()
		t.Fatal("started without its state")
	}
	if d := time.Since(start); d > 30*time.Second {
		t.Errorf("refused after %v", d)
	}
	disk, err := consensus.OpenDisk(dir, quiet())
	if err != nil {
		t.Fatalf("a failed Open left the disk locked: %v", err)
	}
	_, err = consensus.Open(consensus.Config{Disk: disk})
	if err == nil || !strings.Contains(err.Error(), "must have an id") {
		t.Errorf("an empty config: %v", err)
	}
}
