package supervise

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// reapOrphans is run when we are process 1 of a container: every process whose
// parent has ended becomes our child, and stays a zombie until we wait for it.
//
// It must not take the exit status of a process that somebody in this program
// waits for. Those are in s.children, or in our own session, because os/exec
// starts them there; an orphan comes from a process of ours, so from another
// session. What is neither, and still a zombie a second after it was seen first,
// nobody waits for.
func (s *Supervisor) reapOrphans(ctx context.Context) {
	const second = time.Second
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	defer signal.Stop(died)
	seen := map[int]time.Time{}
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-died:
		case <-again:
		}
		zombies, err := s.orphanZombies()
		if err != nil {
			s.cfg.Log.Warn("reap orphans", "err", err)
		}
		for pid := range seen {
			if !zombies[pid] {
				delete(seen, pid)
			}
		}
		for pid := range zombies {
			if since, ok := seen[pid]; !ok {
				seen[pid] = time.Now()
			} else if time.Since(since) >= second {
				var status syscall.WaitStatus
				if _, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil); err != nil && !errors.Is(err, syscall.EINTR) {
					s.cfg.Log.Warn("reap an orphan", "pid", pid, "err", err)
				}
			}
		}
		again = nil
		if len(zombies) > 0 {
			again = time.After(second)
		}
	}
}

func (s *Supervisor) orphanZombies() (map[int]bool, error) {
	self, err := readStat(os.Getpid())
	if err != nil {
		return nil, err
	}
	zombies := map[int]bool{}
	err = processes(func(st stat) {
		if st.parent == self.pid && st.session != self.session && st.dead() {
			zombies[st.pid] = true
		}
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	for pid := range zombies {
		if s.children[pid] {
			delete(zombies, pid)
		}
	}
	return zombies, err
}
