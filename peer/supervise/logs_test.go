package supervise

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRotationLosesNothing rotates under a writer, on a file system where
// nothing may be lost and on one where only what is written during the
// truncation may.
func TestRotationLosesNothing(t *testing.T) {
	for _, base := range []string{t.TempDir(), "/dev/shm"} {
		dir, err := os.MkdirTemp(base, "rotate")
		if err != nil {
			t.Logf("%s: not there: %v", base, err)
			continue
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		exact := collapses(t, dir)
		t.Run(fmt.Sprintf("exact=%v", exact), func(t *testing.T) { rotateUnderWriter(t, dir, exact) })
	}
}

// collapses says whether files of dir can be cut at the front.
func collapses(t *testing.T, dir string) bool {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "probe"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	defer os.Remove(f.Name())
	if _, err := f.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_COLLAPSE_RANGE, 0, 64<<10) == nil
}

func rotateUnderWriter(t *testing.T, dir string, exact bool) {
	const rotations = 5
	l := newLogs(dir, 64<<10, 10*rotations)
	out, err := l.open("x")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	enough := make(chan struct{})
	written := make(chan int)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-enough:
				fmt.Fprintf(out, "line %d\n", i) // with no rotation any more
				written <- i + 1
				return
			default:
				fmt.Fprintf(out, "line %d\n", i)
			}
		}
	}()
	until(t, "rotations under the writer", func() bool {
		if err := l.rotateIfFull("x"); err != nil {
			t.Error(err)
		}
		return l.rotations["x"] >= rotations
	})
	close(enough)
	lines := <-written

	var all []byte
	for age := l.rotations["x"]; age >= 0; age-- {
		b, err := os.ReadFile(l.path("x", age))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b...)
	}
	next, gaps := 0, 0
	for line := range strings.Lines(string(all)) {
		n, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(line, "line ")))
		if err != nil && !exact { // the gap begins within a line
			continue
		}
		if err != nil || n < next {
			t.Fatalf("after line %d: %q", next-1, line)
		}
		if n > next {
			gaps++
		}
		next = n + 1
	}
	switch {
	case next != lines:
		t.Errorf("the last line is %d, want %d", next-1, lines-1)
	case exact && gaps > 0:
		t.Errorf("%d gaps on a file system that needs none", gaps)
	case gaps > rotations:
		t.Errorf("%d gaps, more than rotations", gaps)
	}
}

func TestRotationKeepsSoMany(t *testing.T) {
	b := run(t, newDir(t), func(c *Config) { c.LogBytes, c.LogKeep = 4<<10, 1 })
	b.Set([]Spec{shell("loud@a", `i=0; while :; do i=$((i+1)); echo "this is the line with the number $i"; [ $((i % 200)) = 0 ] && sleep 0.02; done`)}, nil)
	rotated := func() int {
		b.logs.mu.RLock()
		defer b.logs.mu.RUnlock()
		return b.logs.rotations["loud@a"]
	}
	until(t, "three rotations", func() bool { return rotated() >= 3 })
	kept, err := filepath.Glob(filepath.Join(b.dir, "loud@a.log*"))
	if err != nil || len(kept) != 2 {
		t.Errorf("kept %v, %v; want the log and one rotated one", kept, err)
	}
	for _, path := range kept {
		if st, err := os.Stat(path); err != nil || st.Mode() != 0o640 {
			t.Errorf("%s: mode %v, %v", path, st.Mode(), err)
		}
	}
	if pid := b.reach("loud@a", Running).PID; !alive(pid) {
		t.Error("the writer did not survive the rotations")
	}
}

func TestTail(t *testing.T) {
	b := run(t, newDir(t))
	for file, text := range map[string]string{"x.log.2": "1\n2\n3", "x.log.1": "3\n4\n", "x.log": "5\n6"} {
		if err := os.WriteFile(filepath.Join(b.dir, file), []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	for lines, want := range map[int]string{1: "6", 2: "5\n6", 3: "4\n5\n6", 4: "33\n4\n5\n6", 6: "1\n2\n33\n4\n5\n6", 100: "1\n2\n33\n4\n5\n6"} {
		if got, err := b.Logs("x", lines); err != nil || string(got) != want {
			t.Errorf("%d lines: %q, %v; want %q", lines, got, err, want)
		}
	}
	if err := os.WriteFile(filepath.Join(b.dir, "x.log"), bytes.Repeat([]byte("y\n"), tailBytes), 0o640); err != nil {
		t.Fatal(err)
	}
	if got, err := b.Logs("x", 1<<30); err != nil || len(got) > tailBytes {
		t.Errorf("%d bytes, %v; the bound is %d", len(got), err, tailBytes)
	}
	if got, err := b.Logs("absent", 1); err != nil || len(got) != 0 {
		t.Errorf("a log that is not there: %q, %v; want no lines", got, err)
	}
	if _, err := b.Logs("../etc/passwd", 1); err == nil {
		t.Error("a path was taken for a name")
	}
	if _, err := b.Logs("x", 0); err == nil {
		t.Error("no lines were asked for")
	}
}

// TestFollowAcrossRotations follows a writer whose log is rotated meanwhile.
func TestFollowAcrossRotations(t *testing.T) {
	b := run(t, newDir(t), func(c *Config) { c.LogBytes = 1 << 40 })
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		err := b.Follow(ctx, "x", w)
		w.Close()
		done <- err
	}()
	out, err := b.logs.open("x")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	write := func(text string) {
		if _, err := out.WriteString(text); err != nil {
			t.Error(err)
		}
	}
	lines := make(chan string, 10_000)
	go func() {
		defer close(lines)
		for in := bufio.NewScanner(r); in.Scan(); {
			lines <- in.Text()
		}
	}()
	until(t, "the follower is there", func() bool { write("hello\n"); return len(lines) > 0 })
	write("begin\n")
	for line := range lines {
		if line == "begin" {
			break
		}
	}
	// Each round goes on when the one before was seen, so no rotation is missed.
	for round := range 4 {
		want := fmt.Sprintf("round %d", round)
		write(strings.Repeat(want+"\n", 1000))
		b.logs.mu.Lock()
		err := b.logs.rotate("x")
		b.logs.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			if got := <-lines; got != want {
				t.Fatalf("followed %q, want %q", got, want)
			}
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Follow: %v", err)
	}
	for range lines { // its goroutine ends with the pipe
	}
	r.Close()
}
