package bench

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"meshd/integration"
)

const (
	// settled is how long after the last change a node counts as at rest: longer
	// than gossip spreads news, and than one retry of anything.
	settled = 10 * time.Second
	// observed is how long it is looked at: every period of a node but that of 30 s
	// fits in ten times.
	observed = 20 * time.Second
	// beats is about how many heartbeats a leader of three sends in a second.
	beats = 12
)

// usage is what a process has taken.
type usage struct {
	cpu            time.Duration
	resident, anon int64 // bytes; anon without the pages of the program itself
}

// benchRest measures each node while nobody asks anything of it, and beside them
// a program that does nothing but beat.
func benchRest(b *testing.B, m *integration.Mesh) {
	beater := exec.Command(os.Args[0], beatVerb)
	beater.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := beater.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = beater.Process.Kill() // gone meanwhile is as good
		_ = beater.Wait()         // it was killed, and says so
	})
	names, pids := []string{"alpha", "beta", "gamma"}, map[string]int{"beat": beater.Process.Pid}
	for _, name := range names {
		n, err := m.Node(name)
		if err != nil {
			b.Fatal(err)
		}
		pids[name] = n.PID()
	}
	look := func() map[string]usage {
		all := map[string]usage{}
		for name, pid := range pids {
			u, err := used(pid)
			if err != nil {
				b.Fatal(err)
			}
			all[name] = u
		}
		return all
	}
	<-time.After(settled)
	before, began := look(), time.Now()
	<-time.After(observed)
	after, wall := look(), time.Since(began)
	core := func(name string) float64 { return (after[name].cpu - before[name].cpu).Seconds() / wall.Seconds() }

	var text strings.Builder
	var mostCore, mostMemory float64
	fmt.Fprintf(&text, "at rest, over %v, with %d programs on gamma\n", observed, repeats)
	for _, name := range names {
		u := after[name]
		mostCore, mostMemory = max(mostCore, core(name)), max(mostMemory, float64(u.resident))
		fmt.Fprintf(&text, "  %-6s  %4.2f %% of a core  %5.1f MB resident, %5.1f MB of that not the program's own pages\n",
			name, core(name)*100, float64(u.resident)/1e6, float64(u.anon)/1e6)
	}
	fmt.Fprintf(&text, "  beat    %4.2f %% of a core, for %d round trips a second with itself and nothing else\n", core("beat")*100, beats)
	fmt.Fprintf(&text, "  allowed %4.2f %% of a core: %s; %.0f MB: %s\n", coreAllowed*100, verdict(mostCore <= coreAllowed), memoryAllowed/1e6, verdict(mostMemory <= memoryAllowed))
	fmt.Fprintf(&text, "  %d goroutines on beta", goroutines(b, m))
	b.Log(text.String())
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(mostCore*100, "%core")
	b.ReportMetric(core("beat")*100, "%core-beat")
	b.ReportMetric(mostMemory/1e6, "MB")
}

// beat sends a few bytes to itself over loopback, and back.
func beat() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	there, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	here, err := l.Accept()
	if err != nil {
		return err
	}
	go io.Copy(here, here) // ends with the process
	ticker := time.NewTicker(time.Second / beats)
	defer ticker.Stop()
	buffer := make([]byte, 200) // about a heartbeat
	for range ticker.C {
		if _, err := there.Write(buffer); err != nil {
			return err
		}
		if _, err := io.ReadFull(there, buffer); err != nil {
			return err
		}
	}
	return nil
}

// used reads proc(5): the time that each thread ran, and the status.
func used(pid int) (usage, error) {
	var u usage
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(threads) == 0 {
		return u, fmt.Errorf("process %d has no threads (%v)", pid, err)
	}
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if err != nil {
			return u, err
		}
		var ran time.Duration
		if _, err := fmt.Sscan(string(text), &ran); err != nil {
			return u, fmt.Errorf("read %s: %w", path, err)
		}
		u.cpu += ran
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	for field, into := range map[string]*int64{"VmRSS:": &u.resident, "RssAnon:": &u.anon} {
		_, rest, _ := bytes.Cut(status, []byte(field))
		if _, err := fmt.Sscan(string(rest), into); err != nil {
			return u, fmt.Errorf("read %s of process %d: %w", field, pid, err)
		}
		*into <<= 10 // kB
	}
	return u, nil
}

// goroutines ends beta with the signal on which Go prints them all, and counts.
func goroutines(b *testing.B, m *integration.Mesh) int {
	b.Helper()
	n, err := m.Node("beta")
	if err != nil {
		b.Fatal(err)
	}
	if err := syscall.Kill(n.PID(), syscall.SIGQUIT); err != nil {
		b.Fatal(err)
	}
	for deadline := time.Now().Add(within); n.Running(); <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatal("beta did not end")
		}
	}
	text, err := os.ReadFile(n.LogPath())
	if err != nil {
		b.Fatal(err)
	}
	return len(regexp.MustCompile(`(?m)^goroutine \d+ .*\[`).FindAll(text, -1))
}
