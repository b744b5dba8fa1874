package supervise

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// cpuPeriod is the time in microseconds that a CPU limit is counted over: the
// kernel's own default.
const cpuPeriod = 100_000

const (
	groupPrefix = "meshd-"
	self        = ".self" // the group that we move to, in version 2
)

// cgroups sets limits by control groups, version 1 or 2, whichever this machine
// has the controller in. Each name with limits has a group
// OURS/meshd-INSTANCE/NAME, below the one that we run in ourselves.
type cgroups struct {
	group string // meshd-INSTANCE
	v2    string // our own directory in the unified hierarchy; "" none
	v1    map[string]string
}

// findCgroups finds our own groups. Nothing is wrong with finding none, until
// somebody asks for a limit.
func findCgroups(group string) cgroups {
	mounts, _ := os.ReadFile("/proc/self/mountinfo") // unreadable is like empty: no group
	own, _ := os.ReadFile("/proc/self/cgroup")
	return parseCgroups(group, string(mounts), string(own))
}

// parseCgroups reads mountinfo (proc(5)) and cgroup (cgroups(7)) of /proc/self.
func parseCgroups(group, mounts, own string) cgroups {
	c := cgroups{group: group, v1: map[string]string{}}
	paths := map[string]string{} // by controller; "" is version 2
	for line := range strings.Lines(own) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		for controller := range strings.SplitSeq(f[1], ",") {
			paths[controller] = f[2]
		}
	}
	for line := range strings.Lines(mounts) {
		before, after, ok := strings.Cut(line, " - ")
		f, kind := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(kind) < 3 {
			continue
		}
		root, point := f[3], f[4]
		// The path is from the top of the hierarchy; in a container the mount can
		// begin further down.
		below := func(path string) string {
			return filepath.Join(point, strings.TrimPrefix(path, strings.TrimSuffix(root, "/")))
		}
		switch kind[0] {
		case "cgroup2":
			if path, ok := paths[""]; ok {
				// We may have moved in an earlier run.
				c.v2 = below(strings.TrimSuffix(path, "/"+group+"/"+self))
			}
		case "cgroup":
			for option := range strings.SplitSeq(kind[2], ",") {
				if path, ok := paths[option]; ok && (option == "memory" || option == "cpu" || option == "pids") {
					c.v1[option] = below(path)
				}
			}
		}
	}
	return c
}

// setting is one limit, in the words of each version.
type setting struct {
	controller      string
	fileV1, valueV1 string
	periodV1        string // a file that takes cpuPeriod; "" none
	fileV2, valueV2 string
}

func settings(l Limits) []setting {
	var all []setting
	if l.Memory > 0 {
		v := strconv.FormatInt(l.Memory, 10)
		all = append(all, setting{"memory", "memory.limit_in_bytes", v, "", "memory.max", v})
	}
	if l.CPU > 0 {
		v := strconv.FormatInt(l.CPU*cpuPeriod/1000, 10)
		all = append(all, setting{"cpu", "cpu.cfs_quota_us", v, "cpu.cfs_period_us", "cpu.max", v + " " + strconv.Itoa(cpuPeriod)})
	}
	if l.PIDs > 0 {
		v := strconv.FormatInt(l.PIDs, 10)
		all = append(all, setting{"pids", "pids.max", v, "", "pids.max", v})
	}
	return all
}

// fork runs fork so that the new process begins in the group of name, with
// limits set. A process that enters its group later could have forked before.
func (c cgroups) fork(name string, limits Limits, attr *syscall.SysProcAttr, fork func() error) error {
	c.remove(name)  // counters begin anew
	var v1 []string // our own directories of the version 1 controllers in use
	var v2 bool
	for _, set := range settings(limits) {
		var err error
		if own, ok := c.v1[set.controller]; ok {
			v1 = append(v1, own)
			err = c.setV1(own, name, set)
		} else {
			v2 = true
			err = c.setV2(name, set)
		}
		if err != nil {
			return faultf(LimitRefused, "limit %s to %s: %w; let meshd write its control group (systemd: Delegate=yes), or leave the limit out",
				set.controller, set.valueV1, err)
		}
	}
	if v2 {
		dir, err := os.Open(filepath.Join(c.v2, c.group, name))
		if err != nil {
			return faultf(LimitRefused, "enter the control group: %w", err)
		}
		defer dir.Close()
		attr.UseCgroupFD, attr.CgroupFD = true, int(dir.Fd())
	}
	if len(v1) == 0 {
		return fork()
	}
	return c.forkV1(v1, name, fork)
}

func (c cgroups) setV1(own, name string, set setting) error {
	dir := filepath.Join(own, c.group, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if set.periodV1 != "" {
		if err := writeControl(dir, set.periodV1, strconv.Itoa(cpuPeriod)); err != nil {
			return err
		}
	}
	return writeControl(dir, set.fileV1, set.valueV1)
}

// setV2 makes the controller available on the way down to the group of name. The
// kernel refuses that for a group that has processes of its own and is not the
// topmost, so we move out of ours into a group beside the children's.
func (c cgroups) setV2(name string, set setting) error {
	if c.v2 == "" {
		return fmt.Errorf("this machine has no %s control group", set.controller)
	}
	ours := filepath.Join(c.v2, c.group)
	dir := filepath.Join(ours, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	enable := "+" + set.controller
	err := writeControl(c.v2, "cgroup.subtree_control", enable)
	if errors.Is(err, unix.EBUSY) {
		if err := c.moveOut(filepath.Join(ours, self)); err != nil {
			return err
		}
		err = writeControl(c.v2, "cgroup.subtree_control", enable)
	}
	if err != nil {
		return err
	}
	if err := writeControl(ours, "cgroup.subtree_control", enable); err != nil {
		return err
	}
	return writeControl(dir, set.fileV2, set.valueV2)
}

// moveOut moves us, and the processes of ours that are in our group, to dir.
func (c cgroups) moveOut(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	pids, err := os.ReadFile(filepath.Join(c.v2, "cgroup.procs"))
	if err != nil {
		return err
	}
	for text := range strings.Lines(string(pids)) {
		text = strings.TrimSpace(text)
		pid, err := strconv.Atoi(text)
		if err != nil {
			return err
		}
		if _, ours := tokenName(token(pid), strings.TrimPrefix(c.group, groupPrefix)); !ours && pid != os.Getpid() {
			continue
		}
		if err := writeControl(dir, "cgroup.procs", text); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

// forkV1 forks from a thread that it moves into the groups: version 1 has no
// other way to begin in one. The thread moves back; if it can not, it ends with
// its goroutine.
func (c cgroups) forkV1(owns []string, name string, fork func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		tid := strconv.Itoa(unix.Gettid())
		var err error
		for _, own := range owns {
			if err == nil {
				err = writeControl(filepath.Join(own, c.group, name), "tasks", tid)
			}
		}
		if err != nil {
			err = faultf(LimitRefused, "enter the control group: %w", err)
		} else {
			err = fork()
		}
		var stay error
		for _, own := range owns {
			stay = errors.Join(stay, writeControl(own, "tasks", tid))
		}
		if stay == nil {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}

// writeControl writes one value; control files take it in one write.
func writeControl(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// dirs are all places where the group of name can be.
func (c cgroups) dirs(name string) []string {
	var dirs []string
	for _, own := range c.v1 {
		dirs = append(dirs, filepath.Join(own, c.group, name))
	}
	if c.v2 != "" {
		dirs = append(dirs, filepath.Join(c.v2, c.group, name))
	}
	return dirs
}

// remove removes the groups of name, if it has any, and the one above them if it
// was the last. A group that still has a process stays until the next start.
func (c cgroups) remove(name string) {
	for _, dir := range c.dirs(name) {
		if unix.Rmdir(dir) == nil {
			_ = unix.Rmdir(filepath.Dir(dir)) // ENOTEMPTY: others use it
		}
	}
}

// outOfMemory says whether the kernel killed something in the group of name.
func (c cgroups) outOfMemory(name string) bool {
	for _, dir := range c.dirs(name) {
		for _, file := range []string{"memory.events", "memory.oom_control"} {
			b, err := os.ReadFile(filepath.Join(dir, file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			for line := range strings.Lines(string(b)) {
				if count, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok && count != "0" {
					return true
				}
			}
		}
	}
	return false
}
