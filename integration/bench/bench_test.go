// Package bench measures a mesh of three real nodes beside what the machine
// itself takes for the same: see README.md. It is run by hand, and asserts
// nothing.
package bench

import (
	"bufio"
	"context"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"meshd/integration"
	"meshd/provision/postgres/pgtest"
)

const (
	// repeats is how often a thing is measured: the median of 15 stands when seven
	// are spoilt by what else the machine does.
	repeats = 15
	// within bounds one of them.
	within = 60 * time.Second
)

// The budgets, for a machine with nothing else to do.
const (
	commitsAllowed = 5                      // accepted, staged, minted, delivered, seen
	extraAllowed   = 100 * time.Millisecond // for all else between push and in-use: a login is looked for every 40 ms
	startAllowed   = 500 * time.Millisecond
	memoryAllowed  = 60e6
	coreAllowed    = 0.01 // of one core, at rest
)

// absence is how long a node is away that the others have ceased to expect.
const absence = 15 * time.Second

// This binary is also the programs that it needs.
const (
	holdVerb = "hold" // what the mesh starts: see hold
	beatVerb = "beat" // what the machine takes for a heartbeat: see beat
)

func TestMain(m *testing.M) {
	var err error
	switch {
	case len(os.Args) == 2 && os.Args[1] == holdVerb:
		err = hold(filepath.Join(os.Getenv("SERVICE_BINDING_ROOT"), requirement))
	case len(os.Args) == 2 && os.Args[1] == beatVerb:
		err = beat()
	default:
		os.Exit(m.Run())
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// hold logs in with what was delivered, says so, and holds the session for as
// long as the server lives.
func hold(dir string) error {
	uri, err := os.ReadFile(filepath.Join(dir, "uri"))
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(context.Background(), string(uri))
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	fmt.Println("logged in")
	_, err = conn.WaitForNotification(context.Background()) // there are none
	return err
}

// BenchmarkMesh measures one mesh, in this order: its later parts measure what
// the earlier ones have made.
func BenchmarkMesh(b *testing.B) {
	program := build(b)
	dir := shortDir(b)
	server := pgtest.Need(b, pgtest.Options{})
	m := integration.New(program, dir)
	b.Cleanup(func() {
		if err := m.Close(); err != nil {
			b.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(b.Context(), within)
	defer cancel()
	if err := m.Start(ctx, "alpha", "beta", "gamma"); err != nil {
		b.Fatal(err)
	}
	b.Run("push", func(b *testing.B) { benchPush(b, m, server, dir) })
	b.Run("rest", func(b *testing.B) { benchRest(b, m) })
	b.Run("start", func(b *testing.B) { benchStart(b, m, program, repeats, 0) })
	b.Run("start-after-absence", func(b *testing.B) { benchStart(b, m, program, repeats/3, absence) })
	b.Run("start-alone", func(b *testing.B) {
		alone := integration.New(program, shortDir(b))
		b.Cleanup(func() {
			if err := alone.Close(); err != nil {
				b.Error(err)
			}
		})
		if err := alone.Start(b.Context(), "beta"); err != nil {
			b.Fatal(err)
		}
		benchStart(b, alone, program, repeats, 0)
	})
}

// BenchmarkBinary reports the size of the program as it is released.
func BenchmarkBinary(b *testing.B) {
	program := build(b)
	info, err := os.Stat(program)
	if err != nil {
		b.Fatal(err)
	}
	f, err := elf.Open(program)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	linked := "static"
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		linked = "dynamic"
	}
	b.Logf("the program, stripped, %s: %.1f MB", linked, float64(info.Size())/1e6)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(info.Size())/1e6, "MB")
}

// build makes the program as it is released.
func build(b *testing.B) string {
	b.Helper()
	program := filepath.Join(b.TempDir(), "meshd")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, "../..")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("build meshd: %v\n%s", err, out)
	}
	return program
}

// shortDir is a directory in which the path of a socket fits.
func shortDir(b *testing.B) string {
	b.Helper()
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			b.Error(err)
		}
	})
	return dir
}

// benchStart kills the node beta and starts it after a while, until it says that
// it serves.
func benchStart(b *testing.B, m *integration.Mesh, program string, times int, away time.Duration) {
	n, err := m.Node("beta")
	if err != nil {
		b.Fatal(err)
	}
	if err := n.Kill(); err != nil {
		b.Fatal(err)
	}
	var starts, bare []time.Duration
	for range times {
		<-time.After(away)
		bare = append(bare, timed(b, func() error {
			return exec.Command(program, "version", "--socket", filepath.Join(n.Dir, "nobody")).Run()
		}))
		d, stop, err := untilSays(" is up: ", nil, program, "start", "--dir", n.Dir)
		if err != nil {
			b.Fatal(err)
		}
		stop()
		starts = append(starts, d)
	}
	b.Logf("meshd start, killed %v before, until it serves, %d times\n  start          %s\n  meshd version  %s\n  allowed        %s: %s",
		away, times, spread(starts), spread(bare), ms(startAllowed), verdict(median(starts) <= startAllowed))
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(starts).Seconds()*1e3, "start-ms")
	b.ReportMetric(median(bare).Seconds()*1e3, "version-ms")
	if err := n.Start(b.Context()); err != nil {
		b.Fatal(err)
	}
}

// untilSays runs a program and returns how long it took to print the text. stop
// kills it.
func untilSays(text string, env []string, program string, args ...string) (d time.Duration, stop func(), err error) {
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, nil, err
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	stop = func() {
		_ = cmd.Process.Kill() // gone meanwhile is as good
		_ = cmd.Wait()         // it was killed, and says so
	}
	giveUp := time.AfterFunc(within, func() { _ = cmd.Process.Kill() })
	defer giveUp.Stop()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.Contains(lines.Text(), text) {
			d = time.Since(began)
			go io.Copy(io.Discard, out) // ends with the process
			return d, stop, nil
		}
	}
	stop()
	return 0, nil, fmt.Errorf("%s %s ended, or said nothing for %v", program, strings.Join(args, " "), within)
}

func timed(b *testing.B, f func() error) time.Duration {
	b.Helper()
	began := time.Now()
	if err := f(); err != nil {
		b.Fatal(err)
	}
	return time.Since(began)
}

func median(all []time.Duration) time.Duration { return quantile(all, 2) }

// quantile is the value that so many quarters of all are below.
func quantile(all []time.Duration, quarters int) time.Duration {
	s := slices.Sorted(slices.Values(all))
	return s[min(len(s)*quarters/4, len(s)-1)]
}

// spread is the median, and between which values the middle half lies.
func spread(all []time.Duration) string {
	return fmt.Sprintf("%s  (half of them %s to %s)", ms(median(all)), ms(quantile(all, 1)), ms(quantile(all, 3)))
}

func ms(d time.Duration) string { return fmt.Sprintf("%6.1f ms", d.Seconds()*1e3) }

func verdict(kept bool) string {
	if kept {
		return "kept"
	}
	return "MISSED"
}
