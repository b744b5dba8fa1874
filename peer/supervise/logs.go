package supervise

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	tailBytes   = 1 << 20                // most that Logs returns: enough for a terminal, little enough to send
	followEvery = 200 * time.Millisecond // how late a follower may be
	rotateEvery = time.Second            // how late a rotation may be
	orphanedFor = 14 * 24 * time.Hour    // logs of names that are gone are kept this long, to look into
)

// logs are the files that processes write to: NAME.log, and rotated ones from
// NAME.log.1, the newest, upwards. A process holds its file open for append and
// goes on writing to it, whoever watches; so a rotation copies and then cuts.
//
// On a file system that can remove a range from the front of a file (ext4, xfs)
// a rotation loses nothing. On others, what is written between the last read and
// the truncation, which follow each other, is lost.
type logs struct {
	dir  string
	max  int64
	keep int

	mu        sync.RWMutex   // a reader sees no rotation half done
	rotations map[string]int // by name, so that a follower knows of them
	cut       map[string]int64
}

func newLogs(dir string, max int64, keep int) *logs {
	return &logs{dir: dir, max: max, keep: keep, rotations: map[string]int{}, cut: map[string]int64{}}
}

func (l *logs) path(name string, age int) string {
	p := filepath.Join(l.dir, name+".log")
	if age > 0 {
		p += "." + strconv.Itoa(age)
	}
	return p
}

// open is the file that the process of name writes to. The process inherits it
// open, so its user needs no right to the path.
func (l *logs) open(name string) (*os.File, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	f, err := os.OpenFile(l.path(name, 0), os.O_CREATE|os.O_WRONLY|os.O_APPEND|unix.O_NOFOLLOW, 0o640)
	if err != nil {
		return nil, fmt.Errorf("open the log: %w", err)
	}
	now := time.Now()                                                                   // prune sees that it is in use again
	if err := errors.Join(f.Chmod(0o640), os.Chtimes(f.Name(), now, now)); err != nil { // whatever the umask
		f.Close()
		return nil, fmt.Errorf("open the log: %w", err)
	}
	return f, nil
}

// run rotates until ctx ends, and removes the logs of names that are long gone.
func (l *logs) run(ctx context.Context, log *slog.Logger, wanted func(string) bool) {
	failing := map[string]bool{}
	for sleep(ctx, rotateEvery) == nil {
		paths, err := filepath.Glob(filepath.Join(l.dir, "*.log"))
		if err != nil {
			log.Error("list logs", "err", err) // the directory's name is a bad pattern: nothing to wait for
			return
		}
		for _, path := range paths {
			name := strings.TrimSuffix(filepath.Base(path), ".log")
			err := l.rotateIfFull(name)
			if err == nil && !wanted(name) {
				err = l.prune(name)
			}
			if err != nil && !failing[name] { // said once, not every second
				log.Error("rotate a log", "name", name, "err", err)
			}
			failing[name] = err != nil
		}
	}
}

func (l *logs) prune(name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	st, err := os.Stat(l.path(name, 0))
	if err != nil || time.Since(st.ModTime()) < orphanedFor {
		return err
	}
	delete(l.rotations, name)
	delete(l.cut, name)
	for age := range l.keep + 1 {
		if err := os.Remove(l.path(name, age)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (l *logs) rotateIfFull(name string) error {
	st, err := os.Stat(l.path(name, 0))
	if err != nil || st.Size() < l.max {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rotate(name)
}

// rotate copies NAME.log to NAME.log.1 and cuts what it copied. A crash in
// between repeats lines, and loses none.
func (l *logs) rotate(name string) error {
	src, err := os.OpenFile(l.path(name, 0), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer src.Close()
	st, err := src.Stat()
	if err != nil {
		return err
	}
	// Whole blocks can be removed from the front, but never all of the file.
	var vfs unix.Statfs_t
	if err := unix.Fstatfs(int(src.Fd()), &vfs); err != nil {
		return fmt.Errorf("stat the file system of the log: %w", err)
	}
	n := (st.Size() - 1) / vfs.Bsize * vfs.Bsize

	dst, err := os.CreateTemp(l.dir, ".tmp-log-*")
	if err != nil {
		return err
	}
	defer dst.Close()
	defer os.Remove(dst.Name()) // fails once it is renamed
	if _, err := io.CopyN(dst, src, n); err != nil {
		return fmt.Errorf("copy the log: %w", err)
	}
	if err := errors.Join(dst.Chmod(0o640), dst.Sync()); err != nil {
		return fmt.Errorf("copy the log: %w", err)
	}
	for age := l.keep - 1; age >= 1; age-- {
		if err := os.Rename(l.path(name, age), l.path(name, age+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := os.Rename(dst.Name(), l.path(name, 1)); err != nil {
		return err
	}
	cut := n
	if n == 0 || unix.Fallocate(int(src.Fd()), unix.FALLOC_FL_COLLAPSE_RANGE, 0, n) != nil {
		rest, err := io.Copy(dst, src)
		if err != nil {
			return fmt.Errorf("copy the log: %w", err)
		}
		if err := src.Truncate(0); err != nil {
			return fmt.Errorf("truncate the log: %w", err)
		}
		cut += rest
	}
	l.rotations[name]++
	l.cut[name] = cut
	return errors.Join(dst.Sync(), syncDir(l.dir))
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// Logs returns the last lines of what the process of name wrote, at most 1 MiB
// of them. They stay for 14 days after a name is gone. A name without a log, such
// as one that was not started yet, has no lines.
func (s *Supervisor) Logs(name string, lines int) ([]byte, error) {
	if !validName.MatchString(name) {
		return nil, fmt.Errorf("read the log of %q: not a name of the form %s", name, validName)
	}
	if lines <= 0 {
		return nil, fmt.Errorf("read the log of %s: %d lines asked for; ask for at least one", name, lines)
	}
	b, err := s.logs.tail(name, lines)
	if err != nil {
		return nil, fmt.Errorf("read the log of %s: %w", name, err)
	}
	return b, nil
}

func (l *logs) tail(name string, lines int) ([]byte, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	var b []byte
	for age := 0; age <= l.keep && len(b) < tailBytes && bytes.Count(b, []byte("\n")) <= lines; age++ {
		older, err := readEnd(l.path(name, age), tailBytes-len(b))
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil {
			return nil, err
		}
		b = append(older, b...)
	}
	return lastLines(b, lines), nil
}

// readEnd reads the last limit bytes of a file.
func readEnd(path string, limit int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-int64(limit)), int64(limit)))
}

// lastLines cuts b to its last n lines; the last one may not be ended yet.
func lastLines(b []byte, n int) []byte {
	end := len(bytes.TrimSuffix(b, []byte("\n")))
	for ; n > 0; n-- {
		if end = bytes.LastIndexByte(b[:end], '\n'); end < 0 {
			return b
		}
	}
	return b[end+1:]
}

// Follow writes to w what the process of name writes from now on, until ctx
// ends, which is no error. w may be slow: it holds up nobody else.
func (s *Supervisor) Follow(ctx context.Context, name string, w io.Writer) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("follow the log of %q: not a name of the form %s", name, validName)
	}
	at, err := s.logs.end(name)
	if err != nil {
		return fmt.Errorf("follow the log of %s: %w", name, err)
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := s.logs.next(name, &at, buf)
		if err != nil {
			return fmt.Errorf("follow the log of %s: %w", name, err)
		}
		if n == 0 {
			if sleep(ctx, followEvery) != nil {
				return nil
			}
			continue
		}
		if _, err := w.Write(buf[:n]); err != nil {
			return fmt.Errorf("follow the log of %s: %w", name, err)
		}
		if ctx.Err() != nil {
			return nil
		}
	}
}

// position is where a follower is: offset bytes into NAME.log as it was after so
// many rotations.
type position struct {
	rotation int
	offset   int64
}

func (l *logs) end(name string) (position, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	st, err := os.Stat(l.path(name, 0))
	if errors.Is(err, fs.ErrNotExist) {
		return position{rotation: l.rotations[name]}, nil // nothing written yet
	}
	if err != nil {
		return position{}, err
	}
	return position{l.rotations[name], st.Size()}, nil
}

// next reads on from at. 0 bytes is the end so far. A follower that is more than
// one rotation late has missed what is in between, and goes on from there.
func (l *logs) next(name string, at *position, buf []byte) (int, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	now := l.rotations[name]
	if at.rotation == now-1 && at.offset < l.cut[name] {
		n, err := readAt(l.path(name, 1), at.offset, buf)
		at.offset += int64(n)
		if n > 0 || err != nil {
			return n, err
		}
	}
	switch {
	case at.rotation == now-1: // what was not cut is at the front now
		at.offset = max(0, at.offset-l.cut[name])
	case at.rotation != now:
		at.offset = 0
	}
	at.rotation = now
	n, err := readAt(l.path(name, 0), at.offset, buf)
	at.offset += int64(n)
	return n, err
}

func readAt(path string, offset int64, buf []byte) (int, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	n, err := f.ReadAt(buf, offset)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}
