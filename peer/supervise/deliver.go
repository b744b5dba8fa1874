package supervise

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Bounds of a delivery: far above what a credential needs, far below what would
// fill a tmpfs.
const (
	maxBindings   = 256
	maxFields     = 64
	maxFieldBytes = 1 << 20
)

// A requirement and a field are one path element each, in the form that the
// Service Binding specification gives to field names.
var validElement = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$`)

// Deliver makes the binding directories of an assignment be exactly bindings
// (requirement -> field -> bytes), in the form of the Service Binding
// specification (servicebinding.io). dir, ROOT/ASSIGNMENT, is what the process
// gets as SERVICE_BINDING_ROOT. changed is false when nothing had to be done.
//
//	ROOT/shop@gamma/db -> ../..shop@gamma/db.X7   a link, replaced at once
//	ROOT/..shop@gamma/db.X7/username              the version that it names
//
// A requirement so changes in one step: who opens its directory sees the old
// fields or the new ones, never some of each, and opens it again when a file of
// the old version is gone. Versions lie beside dir, and not in it, because
// clients take every directory in it for a binding.
//
// Files have mode 0600, directories 0700, and both belong to owner. ROOT is
// ours: it should be a tmpfs, so that no credential is on a disk, and everything
// in it is delivered again after a boot. What the owner does to the files is
// mended by the next Deliver. One goroutine at a time delivers to an assignment.
func Deliver(root, assignment string, bindings map[string]map[string][]byte, owner User) (dir string, changed bool, err error) {
	fail := func(err error) (string, bool, error) {
		return "", false, fmt.Errorf("deliver to %s: %w", assignment, err)
	}
	if err := validateDelivery(root, assignment, bindings, owner); err != nil {
		return fail(err)
	}
	// Users pass through the root and do not list it.
	if err := os.MkdirAll(root, 0o711); err != nil {
		return fail(err)
	}
	// Everything below goes through the open root, which no link can lead out of.
	r, err := os.OpenRoot(root)
	if err != nil {
		return fail(err)
	}
	defer r.Close()

	d := delivery{root: r, assignment: assignment, owner: owner}
	if err := d.sweep(); err != nil {
		return fail(err)
	}
	for _, name := range []string{d.versions(), assignment} {
		made, err := d.ownDir(name)
		if err != nil {
			return fail(err)
		}
		changed = changed || made
	}
	for _, requirement := range slices.Sorted(maps.Keys(bindings)) {
		if d.isCurrent(requirement, bindings[requirement]) {
			continue
		}
		if err := d.replace(requirement, bindings[requirement]); err != nil {
			return fail(fmt.Errorf("%s: %w", requirement, err))
		}
		changed = true
	}
	pruned, err := d.prune(bindings)
	if err != nil {
		return fail(err)
	}
	return filepath.Join(root, assignment), changed || pruned, nil
}

// Undeliver removes everything that was delivered to an assignment.
func Undeliver(root, assignment string) error {
	if !validName.MatchString(assignment) {
		return fmt.Errorf("undeliver %q: not a name of the form %s", assignment, validName)
	}
	r, err := os.OpenRoot(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("undeliver %s: %w", assignment, err)
	}
	defer r.Close()
	d := delivery{root: r, assignment: assignment}
	if err := errors.Join(r.RemoveAll(assignment), r.RemoveAll(d.versions()), d.sweep()); err != nil {
		return fmt.Errorf("undeliver %s: %w", assignment, err)
	}
	return nil
}

// Delivered lists the assignments that something is delivered to.
func Delivered(root string) ([]string, error) {
	entries, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list deliveries: %w", err)
	}
	var names []string
	for _, e := range entries {
		// Versions without their links are what a crash left of an Undeliver.
		name := strings.TrimPrefix(e.Name(), "..")
		if validName.MatchString(name) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

func validateDelivery(root, assignment string, bindings map[string]map[string][]byte, owner User) error {
	var faults []error
	refuse := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if !filepath.IsAbs(root) {
		refuse("the root %q is not an absolute path", root)
	}
	if !validName.MatchString(assignment) {
		refuse("the assignment %q is not of the form %s", assignment, validName)
	}
	if os.Geteuid() != 0 && owner.UID != os.Geteuid() {
		refuse("files for user id %d: only root can give files away, and this meshd runs as user id %d", owner.UID, os.Geteuid())
	}
	if len(bindings) > maxBindings {
		refuse("%d requirements; the most is %d", len(bindings), maxBindings)
	}
	for requirement, fields := range bindings {
		if !validElement.MatchString(requirement) {
			refuse("the requirement %q is not of the form %s", requirement, validElement)
		}
		if len(fields) > maxFields {
			refuse("%s has %d fields; the most is %d", requirement, len(fields), maxFields)
		}
		for field, value := range fields {
			if !validElement.MatchString(field) {
				refuse("the field %q of %s is not of the form %s", field, requirement, validElement)
			}
			if len(value) > maxFieldBytes {
				refuse("the field %s of %s has %d bytes; the most is %d", field, requirement, len(value), maxFieldBytes)
			}
		}
	}
	return errors.Join(faults...)
}

// delivery writes below an open root. Only the root itself is out of the owner's
// reach, so whatever is written is first made there, and given away last.
type delivery struct {
	root       *os.Root
	assignment string
	owner      User
}

func (d delivery) versions() string { return ".." + d.assignment }
func (d delivery) tempDir() string  { return "..tmp:" + d.assignment }
func (d delivery) tempLink() string { return "..link:" + d.assignment }

// sweep removes what a crash left of an earlier delivery.
func (d delivery) sweep() error {
	return errors.Join(d.root.RemoveAll(d.tempDir()), d.root.RemoveAll(d.tempLink()))
}

// owned says whether st belongs to the owner, with that mode.
func (d delivery) owned(st fs.FileInfo, mode fs.FileMode) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && st.Mode() == mode && int(sys.Uid) == d.owner.UID && int(sys.Gid) == d.owner.GID
}

// ownDir makes name a directory of the owner's.
func (d delivery) ownDir(name string) (made bool, err error) {
	st, err := d.root.Lstat(name)
	if err == nil && d.owned(st, fs.ModeDir|0o700) {
		return false, nil
	}
	if err == nil && !st.IsDir() {
		err = d.root.RemoveAll(name)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if err := d.root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	return true, errors.Join(d.root.Chmod(name, 0o700), d.root.Lchown(name, d.owner.UID, d.owner.GID))
}

// version is the directory in versions that the link of requirement names.
func (d delivery) version(requirement string) (string, bool) {
	target, err := d.root.Readlink(filepath.Join(d.assignment, requirement))
	if err != nil {
		return "", false
	}
	version, ours := strings.CutPrefix(target, filepath.Join("..", d.versions())+"/")
	return version, ours && !strings.Contains(version, "/") && strings.HasPrefix(version, requirement+".")
}

// isCurrent says whether what is there is what is to be there, to the last byte,
// owner and mode. What cannot be read is not.
func (d delivery) isCurrent(requirement string, fields map[string][]byte) bool {
	version, ok := d.version(requirement)
	if !ok {
		return false
	}
	path := filepath.Join(d.versions(), version)
	if st, err := d.root.Lstat(path); err != nil || !d.owned(st, fs.ModeDir|0o700) {
		return false
	}
	dir, err := d.root.Open(path)
	if err != nil {
		return false
	}
	defer dir.Close()
	names, err := dir.Readdirnames(len(fields) + 1)
	if err != nil && !errors.Is(err, io.EOF) || len(names) != len(fields) {
		return false
	}
	for field, want := range fields {
		if !d.holds(filepath.Join(path, field), want) {
			return false
		}
	}
	return true
}

func (d delivery) holds(path string, want []byte) bool {
	// The owner may have put a pipe there: opening it must not wait.
	f, err := d.root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !d.owned(st, 0o600) || st.Size() != int64(len(want)) {
		return false
	}
	got, err := io.ReadAll(io.LimitReader(f, int64(len(want))+1))
	return err == nil && bytes.Equal(got, want)
}

// replace writes a new version and switches the link of requirement to it.
func (d delivery) replace(requirement string, fields map[string][]byte) error {
	temp := d.tempDir()
	if err := d.root.Mkdir(temp, 0o700); err != nil {
		return err
	}
	for field, value := range fields {
		if err := d.writeField(filepath.Join(temp, field), value); err != nil {
			return err
		}
	}
	version := requirement + "." + rand.Text()
	err := errors.Join(
		d.syncDir(temp),
		d.root.Lchown(temp, d.owner.UID, d.owner.GID),
		d.root.Rename(temp, filepath.Join(d.versions(), version)),
		d.root.Symlink(filepath.Join("..", d.versions(), version), d.tempLink()),
		d.root.Lchown(d.tempLink(), d.owner.UID, d.owner.GID),
	)
	if err != nil {
		return err
	}
	link := filepath.Join(d.assignment, requirement)
	if st, err := d.root.Lstat(link); err == nil && st.IsDir() {
		if err := d.root.RemoveAll(link); err != nil { // not of our making, and in the way
			return err
		}
	}
	return errors.Join(d.root.Rename(d.tempLink(), link), d.syncDir(d.assignment))
}

func (d delivery) writeField(path string, value []byte) error {
	f, err := d.root.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(value)
	return errors.Join(err, f.Chmod(0o600), f.Chown(d.owner.UID, d.owner.GID), f.Sync(), f.Close())
}

func (d delivery) syncDir(path string) error {
	dir, err := d.root.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// prune removes requirements that are gone, and versions that no link names.
func (d delivery) prune(bindings map[string]map[string][]byte) (removed bool, err error) {
	inUse := map[string]bool{}
	for requirement := range bindings {
		if version, ok := d.version(requirement); ok {
			inUse[version] = true
		}
	}
	links, err := d.list(d.assignment)
	if err != nil {
		return false, err
	}
	for _, name := range links {
		if _, wanted := bindings[name]; wanted {
			continue
		}
		if err := d.root.RemoveAll(filepath.Join(d.assignment, name)); err != nil {
			return false, err
		}
		removed = true
	}
	versions, err := d.list(d.versions())
	if err != nil {
		return false, err
	}
	for _, name := range versions {
		if inUse[name] {
			continue
		}
		if err := d.root.RemoveAll(filepath.Join(d.versions(), name)); err != nil {
			return false, err
		}
	}
	return removed, nil
}

func (d delivery) list(path string) ([]string, error) {
	dir, err := d.root.Open(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return dir.Readdirnames(-1)
}
