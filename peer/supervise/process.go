package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is one process, held by a pidfd: it stays this one, whatever becomes
// of its number.
type process struct {
	pid   int
	start uint64
	fd    *os.File
}

// openProcess takes hold of pid. match sees what the pidfd refers to.
func openProcess(pid int, match func(stat) bool) (*process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	// A pidfd that does not block is waited for by the runtime's poller, so that
	// a sleeping child costs no thread.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	p := &process{pid: pid, fd: os.NewFile(uintptr(fd), "pidfd")}
	// After the open: a process that is older than the open, and has the number
	// now, had it at the open as well.
	st, err := readStat(pid)
	if err == nil && !match(st) {
		err = os.ErrProcessDone
	}
	if err != nil {
		p.fd.Close()
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	p.start = st.start
	return p, nil
}

// wait returns true when the process has ended, and false when p was closed.
func (p *process) wait() bool {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return false
	}
	err = conn.Read(func(fd uintptr) bool {
		return readable(int(fd)) // a pidfd becomes readable when the process ends
	})
	return err == nil
}

func readable(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

// signal sends sig to the process alone. It fails with os.ErrProcessDone when
// nothing of the process is left, not even an exit status.
func (p *process) signal(sig syscall.Signal) error {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return os.ErrProcessDone
	}
	var sent error
	if err := conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return os.ErrProcessDone // closed
	}
	if errors.Is(sent, unix.ESRCH) {
		return os.ErrProcessDone
	}
	return sent
}

// reap takes the exit status of a process that has ended. seen is false when it
// went to another parent.
func (p *process) reap() (status syscall.WaitStatus, seen bool) {
	// Only a zombie of ours holds its number until here; anything else under the
	// number is not to be waited for.
	st, err := readStat(p.pid)
	if err != nil || st.start != p.start || st.parent != os.Getpid() {
		return 0, false
	}
	for {
		pid, err := syscall.Wait4(p.pid, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		return status, err == nil && pid == p.pid
	}
}

func (p *process) close() { p.fd.Close() }

// family is all that runs for one name: the session of its leader, and whatever
// carries a token of the name.
type family struct {
	prefix string   // of the tokens: INSTANCE:NAME:
	leader *process // nil: none is known, and membership is by token alone
}

// members are the processes of the family that are alive.
func (f family) members() ([]stat, error) {
	var all []stat
	session := 0
	if f.leader != nil {
		session = f.leader.pid
		// The number of a session is not given to a new process while the session
		// has a member. So if a stranger has it, the session is empty.
		if st, err := readStat(session); err == nil && st.start != f.leader.start {
			session = 0
		}
	}
	err := processes(func(st stat) {
		if st.dead() || st.pid == os.Getpid() {
			return
		}
		if session != 0 && st.session == session || strings.HasPrefix(token(st.pid), f.prefix) {
			all = append(all, st)
		}
	})
	return all, err
}

// signal sends sig to the whole family, and returns how many members it saw.
func (f family) signal(sig syscall.Signal) (int, error) {
	group := 0
	if f.leader != nil && f.leader.signal(0) == nil {
		// The leader, or its zombie, holds the number: the group is ours. A group
		// is signalled at once, so that none of it can fork away from under us.
		group = f.leader.pid
		if err := unix.Kill(-group, sig); err != nil && !errors.Is(err, unix.ESRCH) {
			return 0, fmt.Errorf("signal the group of process %d: %w", group, err)
		}
	}
	members, err := f.members()
	if err != nil {
		return 0, err
	}
	var faults []error
	for _, m := range members {
		if m.group == group {
			continue
		}
		p, err := openProcess(m.pid, func(st stat) bool { return st.start == m.start })
		if err != nil {
			continue // ended meanwhile
		}
		if err := p.signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
			faults = append(faults, fmt.Errorf("signal process %d: %w", m.pid, err))
		}
		p.close()
	}
	return len(members), errors.Join(faults...)
}

// end makes the family end: SIGTERM, and after grace SIGKILL, again and again
// until none is left or ctx ends. report is told when it gets hard.
func (f family) end(ctx context.Context, grace time.Duration, report func(string)) error {
	left, err := f.signal(unix.SIGTERM)
	if err != nil {
		return err
	}
	began, killed := time.Now(), false
	pause := 5 * time.Millisecond // most processes end at once
	for left > 0 {
		if err := sleep(ctx, min(pause, max(time.Millisecond, grace-time.Since(began)))); err != nil {
			return err
		}
		pause = min(2*pause, 200*time.Millisecond)
		if time.Since(began) < grace {
			members, err := f.members()
			if err != nil {
				return err
			}
			left = len(members)
			continue
		}
		if left, err = f.signal(unix.SIGKILL); err != nil {
			return err
		}
		if killed && left > 0 {
			report(fmt.Sprintf("%d processes were sent SIGKILL and do not end", left))
		}
		killed = true
	}
	return nil
}

// sleep waits for d, or for the end of ctx, which is its error.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
