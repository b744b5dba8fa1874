package api

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// Group is the group whose members may open the socket, where it exists.
const Group = "meshd"

// systemSocket is where a node that root runs listens.
const systemSocket = "/run/meshd/meshd.sock"

// maxPath is the longest path of a unix socket on Linux, without the zero byte
// at its end (unix(7)).
const maxPath = 107

// DefaultSocket is where a node of this user listens.
func DefaultSocket() string {
	if os.Geteuid() == 0 {
		return systemSocket
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "meshd.sock")
	}
	return filepath.Join(os.Getenv("HOME"), ".meshd", "meshd.sock")
}

// FindSocket is the socket that a command of this user talks to: what
// MESHD_SOCKET says, the user's own, or else that of the machine's node.
func FindSocket() string {
	if path := os.Getenv("MESHD_SOCKET"); path != "" {
		return path
	}
	own := DefaultSocket()
	if _, err := os.Stat(own); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(systemSocket); err == nil {
			return systemSocket
		}
	}
	return own
}

// Listen opens the socket at path, with its directory, in place of one that a
// dead node left. It is refused where a living one listens.
func Listen(path string) (net.Listener, error) {
	fresh := path + ".new" // renamed once its mode is right, so that it never stands open
	if len(fresh) > maxPath {
		return nil, fmt.Errorf("listen on %s: the path of a socket has at most %d bytes; choose a shorter one with --socket", path, maxPath-len(".new"))
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return nil, fmt.Errorf("listen on %s: another meshd answers there; stop it first, or choose another socket with --socket", path)
	}
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fresh, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	if err := publish(fresh, path); err != nil {
		l.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, errors.Join(err, os.Remove(fresh)))
	}
	return &socket{l, path}, nil
}

// publish gives the socket its mode and group, and its name.
func publish(fresh, path string) error {
	if err := os.Chmod(fresh, 0o660); err != nil {
		return err
	}
	if g, err := user.LookupGroup(Group); err == nil && os.Geteuid() == 0 {
		gid, err := strconv.Atoi(g.Gid)
		if err != nil {
			return fmt.Errorf("group %s has the id %q: %w", Group, g.Gid, err)
		}
		if err := os.Chown(fresh, -1, gid); err != nil {
			return err
		}
	}
	return os.Rename(fresh, path)
}

// socket removes its file when it is closed.
type socket struct {
	*net.UnixListener
	path string
}

func (s *socket) Close() error {
	err := s.UnixListener.Close()
	if err != nil {
		return err
	}
	if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// unreachable says in a sentence why nothing answers at path.
func unreachable(path string, err error) *Error {
	e := &Error{Code: CodeNoNode, Text: fmt.Sprintf("no meshd answers at %s", path), Remedy: "start it with meshd start; the first time with meshd init for a new mesh, or meshd join TOKEN for one that is there"}
	switch {
	case errors.Is(err, fs.ErrPermission):
		e.Text, e.Remedy = fmt.Sprintf("you may not open %s", path), "be root or in the group "+Group
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED):
		e.Text = fmt.Sprintf("no meshd answers at %s: %v", path, err)
	}
	return e
}

// CodeNoNode says that there is no node to talk to.
const CodeNoNode = "no-node-here"
