package supervise

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

type bindings = map[string]map[string][]byte

var versionSuffix = regexp.MustCompile(`\.[A-Z2-7]{26}`)

func self0(t *testing.T) User {
	t.Helper()
	u, err := LookupUser("")
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func deliver(t *testing.T, root string, b bindings, owner User, wantChanged bool) string {
	t.Helper()
	dir, changed, err := Deliver(root, "shop@a", b, owner)
	if err != nil {
		t.Fatal(err)
	}
	if changed != wantChanged {
		t.Errorf("changed is %v, want %v", changed, wantChanged)
	}
	return dir
}

// tree lists what is below root, versions without their random part.
func tree(t *testing.T, root string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err == nil && path != root {
			rel, _ := filepath.Rel(root, path)
			all = append(all, versionSuffix.ReplaceAllString(rel, ".*"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestDeliver(t *testing.T) {
	root := filepath.Join(t.TempDir(), "bindings")
	me := self0(t)
	b := bindings{
		"db":    {"type": []byte("postgresql"), "password": []byte("p1\n")},
		"cache": {"type": []byte("redis"), "empty": nil},
	}
	dir := deliver(t, root, b, me, true)
	if dir != filepath.Join(root, "shop@a") {
		t.Errorf("dir is %s", dir)
	}
	deliver(t, root, b, me, false)
	if got, err := os.ReadFile(filepath.Join(dir, "db", "password")); err != nil || string(got) != "p1\n" {
		t.Errorf("password %q, %v", got, err)
	}
	want := []string{
		"..shop@a", "..shop@a/cache.*", "..shop@a/cache.*/empty", "..shop@a/cache.*/type",
		"..shop@a/db.*", "..shop@a/db.*/password", "..shop@a/db.*/type",
		"shop@a", "shop@a/cache", "shop@a/db",
	}
	if got := tree(t, root); !slices.Equal(got, want) {
		t.Errorf("tree %q\nwant %q", got, want)
	}
	checkModes(t, root, me)

	cache, err := os.Readlink(filepath.Join(dir, "cache"))
	if err != nil {
		t.Fatal(err)
	}
	b["db"] = map[string][]byte{"password": []byte("p2")}
	deliver(t, root, b, me, true)
	if got, err := os.ReadFile(filepath.Join(dir, "db", "password")); err != nil || string(got) != "p2" {
		t.Errorf("password %q, %v", got, err)
	}
	if now, err := os.Readlink(filepath.Join(dir, "cache")); err != nil || now != cache {
		t.Errorf("a requirement that did not change was written again: %s, %v", now, err)
	}

	delete(b, "cache")
	deliver(t, root, b, me, true)
	want = []string{"..shop@a", "..shop@a/db.*", "..shop@a/db.*/password", "shop@a", "shop@a/db"}
	if got := tree(t, root); !slices.Equal(got, want) {
		t.Errorf("tree %q\nwant %q", got, want)
	}
	if names, err := Delivered(root); err != nil || !slices.Equal(names, []string{"shop@a"}) {
		t.Errorf("delivered %v, %v", names, err)
	}
	for range 2 {
		if err := Undeliver(root, "shop@a"); err != nil {
			t.Fatal(err)
		}
	}
	if got := tree(t, root); len(got) != 0 {
		t.Errorf("left %q", got)
	}
	if err := Undeliver(filepath.Join(root, "absent"), "shop@a"); err != nil {
		t.Error(err)
	}
}

func checkModes(t *testing.T, root string, owner User) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		want := fs.FileMode(0o600)
		switch {
		case path == root:
			want = fs.ModeDir | 0o711
		case st.IsDir():
			want = fs.ModeDir | 0o700
		case st.Mode()&fs.ModeSymlink != 0:
			want = st.Mode()
		}
		if st.Mode() != want {
			t.Errorf("%s: mode %v, want %v", path, st.Mode(), want)
		}
		if sys := st.Sys().(*syscall.Stat_t); path != root && int(sys.Uid) != owner.UID {
			t.Errorf("%s belongs to %d, want %d", path, sys.Uid, owner.UID)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestDeliverMendsAndFollowsNoLink(t *testing.T) {
	root := filepath.Join(t.TempDir(), "bindings")
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	owner := self0(t)
	if os.Geteuid() == 0 {
		if u, err := lookup("nobody"); err == nil {
			owner = u
		}
	}
	b := bindings{"db": {"password": []byte("p1")}}
	dir := deliver(t, root, b, owner, true)
	checkModes(t, root, owner)
	field := filepath.Join(dir, "db", "password")
	replace := func(path string, with func(string) error) func() error {
		return func() error { return errors.Join(os.RemoveAll(path), with(path)) }
	}
	cases := map[string]func() error{
		"field changed":           func() error { return os.WriteFile(field, []byte("xx"), 0o600) },
		"field readable":          func() error { return os.Chmod(field, 0o644) },
		"field removed":           func() error { return os.Remove(field) },
		"field added":             func() error { return os.WriteFile(field+"2", nil, 0o600) },
		"field is a link":         replace(field, func(p string) error { return os.Symlink(outside, p) }),
		"field is a pipe":         replace(field, func(p string) error { return unix.Mkfifo(p, 0o600) }),
		"requirement is a link":   replace(filepath.Join(dir, "db"), func(p string) error { return os.Symlink(filepath.Dir(outside), p) }),
		"requirement is a folder": replace(filepath.Join(dir, "db"), func(p string) error { return os.MkdirAll(p+"/sub", 0o700) }),
		"requirement added":       func() error { return os.Mkdir(filepath.Join(dir, "more"), 0o700) },
		"folder open to all":      func() error { return os.Chmod(dir, 0o755) },
		"folder is a file":        replace(dir, func(p string) error { return os.WriteFile(p, nil, 0o600) }),
		"leftovers of a crash":    func() error { return errors.Join(os.Mkdir(root+"/..tmp:shop@a", 0o700), os.Remove(field)) },
	}
	for name, harm := range cases {
		t.Run(name, func(t *testing.T) {
			if err := harm(); err != nil {
				t.Fatal(err)
			}
			deliver(t, root, b, owner, true)
			deliver(t, root, b, owner, false)
			if got, err := os.ReadFile(field); err != nil || string(got) != "p1" {
				t.Errorf("password %q, %v", got, err)
			}
			checkModes(t, root, owner)
			if got := tree(t, root); len(got) != 5 {
				t.Errorf("tree %q", got)
			}
		})
	}
	st, err := os.Stat(outside)
	if got, readErr := os.ReadFile(outside); err != nil || readErr != nil || string(got) != "mine" || st.Mode() != 0o644 {
		t.Errorf("the file outside was touched: %q, %v", got, st.Mode())
	}
}

func TestDeliverRefuses(t *testing.T) {
	root := filepath.Join(t.TempDir(), "bindings")
	many := map[string][]byte{}
	for i := range maxFields + 1 {
		many[fmt.Sprint("f", i)] = nil
	}
	cases := []struct {
		root, assignment string
		bindings         bindings
		want             string
	}{
		{"relative", "shop@a", nil, "absolute"},
		{root, "..", nil, "assignment"},
		{root, "a/b", nil, "assignment"},
		{root, "shop@a", bindings{"..": nil}, "requirement"},
		{root, "shop@a", bindings{"": nil}, "requirement"},
		{root, "shop@a", bindings{"a/b": nil}, "requirement"},
		{root, "shop@a", bindings{"db": {"../x": []byte("top-secret")}}, "field"},
		{root, "shop@a", bindings{"db": {".hidden": []byte("top-secret")}}, "field"},
		{root, "shop@a", bindings{"db": {"a\x00": []byte("top-secret")}}, "field"},
		{root, "shop@a", bindings{"db": many}, "the most is 64"},
		{root, "shop@a", bindings{"db": {"big": make([]byte, maxFieldBytes+1)}}, "bytes"},
	}
	for _, c := range cases {
		_, _, err := Deliver(c.root, c.assignment, c.bindings, self0(t))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "top-secret") {
			t.Errorf("%q %q: error %v, want %q in it", c.assignment, c.want, err, c.want)
		}
	}
	if _, err := os.Stat(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a refused delivery wrote: %v", err)
	}
}

// TestDeliverIsAtomic reads a binding as fast as it is replaced.
func TestDeliverIsAtomic(t *testing.T) {
	root := filepath.Join(t.TempDir(), "bindings")
	me := self0(t)
	fields := func(n int) map[string][]byte {
		v := []byte(fmt.Sprint(n))
		return map[string][]byte{"a": v, "b": v, "c": v}
	}
	dir := deliver(t, root, bindings{"db": fields(0)}, me, true)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			whole := 0
			for {
				select {
				case <-stop:
					if whole == 0 {
						t.Error("no version was ever read whole")
					}
					return
				default:
				}
				got, err := readVersion(filepath.Join(dir, "db"))
				switch {
				case errors.Is(err, errReplaced):
				case err != nil:
					t.Error(err)
					return
				case got[0] != got[1] || got[1] != got[2]:
					t.Errorf("a mixture was read: %v", got)
					return
				default:
					whole++
				}
			}
		})
	}
	for n := 1; n <= 60; n++ {
		deliver(t, root, bindings{"db": fields(n)}, me, true)
	}
	close(stop)
	readers.Wait()
}

var errReplaced = errors.New("replaced while it was read")

// readVersion reads as a careful client does: it opens the directory once.
func readVersion(path string) ([3]string, error) {
	var got [3]string
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		// Between reading the link and opening what it named: the link itself must
		// always be there.
		if _, err := os.Lstat(path); err != nil {
			return got, err
		}
		return got, errReplaced
	}
	if err != nil {
		return got, err
	}
	defer unix.Close(fd)
	for i, field := range []string{"a", "b", "c"} {
		file, err := unix.Openat(fd, field, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) {
			return got, errReplaced
		}
		if err != nil {
			return got, err
		}
		buf := make([]byte, 16)
		n, err := unix.Read(file, buf)
		unix.Close(file)
		if err != nil {
			return got, err
		}
		got[i] = string(buf[:n])
	}
	return got, nil
}
