package supervise

import (
	"os/exec"
	"syscall"
	"time"
)

// Isolate prepares a short-lived command to run as the user ("" is the user that
// we run as), in a process group of its own that ends as a whole when the
// command's context does, and with nothing of our environment but PATH.
func Isolate(cmd *exec.Cmd, user string) error {
	u, err := LookupUser(user)
	if err != nil {
		return err
	}
	cmd.Dir = "/"
	cmd.Env = environment(u, nil)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: u.credential()}
	cmd.WaitDelay = time.Second // for who left the group and holds the pipes
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return nil
}
