package supervise

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// needV1 skips where the version 1 controllers cannot be written.
func needV1(t *testing.T) cgroups {
	t.Helper()
	c := findCgroups(groupPrefix + "probe")
	for _, controller := range []string{"memory", "cpu", "pids"} {
		dir := filepath.Join(c.v1[controller], c.group)
		if c.v1[controller] == "" || os.Mkdir(dir, 0o755) != nil {
			t.Skipf("no writable %s control group of version 1 here: run as root where it is mounted", controller)
		}
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

func TestLimits(t *testing.T) {
	c := needV1(t)
	b := run(t, newDir(t))
	limited := shell("limited@a", "cat /proc/self/cgroup; exec sleep 1000")
	limited.Limits = Limits{Memory: 64 << 20, CPU: 250, PIDs: 20}
	fat := shell("fat@a", "exec tail /dev/zero") // keeps all that it reads
	fat.Limits = Limits{Memory: 16 << 20}
	forks := shell("forks@a", "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1000 & done; wait")
	forks.Limits = Limits{PIDs: 5}
	b.Set([]Spec{limited, fat, forks}, nil)

	b.reach("limited@a", Running)
	group := "/" + groupPrefix + b.instance + "/limited@a"
	until(t, "it tells its groups", func() bool {
		out, err := b.Logs("limited@a", 100)
		return err == nil && strings.Count(string(out), group) == 3
	})
	for _, want := range [][3]string{
		{"memory", "memory.limit_in_bytes", "67108864"},
		{"cpu", "cpu.cfs_quota_us", "25000"}, {"cpu", "cpu.cfs_period_us", "100000"},
		{"pids", "pids.max", "20"},
	} {
		got, err := os.ReadFile(filepath.Join(c.v1[want[0]], group, want[1]))
		if err != nil || strings.TrimSpace(string(got)) != want[2] {
			t.Errorf("%s is %q, %v; want %s", want[1], got, err, want[2])
		}
	}
	until(t, "it was killed at its limit", func() bool { return b.Status()["fat@a"].Class == OutOfMemory })
	until(t, "it could not fork", func() bool {
		out, err := b.Logs("forks@a", 100)
		return err == nil && strings.Contains(strings.ToLower(string(out)), "fork")
	})
	// No thread of ours stayed behind in a group, so they can all go.
	if err := b.StopAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, own := range c.v1 {
		if _, err := os.Stat(filepath.Join(own, groupPrefix+b.instance)); !os.IsNotExist(err) {
			t.Errorf("a group is left in %s: %v", own, err)
		}
	}
}

func TestLimitThatCannotBeSet(t *testing.T) {
	b := run(t, newDir(t), func(*Config) {})
	b.limits = cgroups{group: "x"} // as on a machine without control groups
	spec := shell("shop@a", "exec sleep 1000")
	spec.Limits = Limits{PIDs: 5}
	b.Set([]Spec{spec, shell("free@a", "exec sleep 1000")}, nil)
	st := b.reach("shop@a", BackingOff)
	if st.Class != LimitRefused || !strings.Contains(st.Exit, "limit pids to 5") || !strings.Contains(st.Exit, "Delegate=yes") {
		t.Errorf("status %+v", st)
	}
	b.reach("free@a", Running)
}

// TestLimitsVersion2 uses whatever controller the unified hierarchy of this
// machine has, in a group that a process of the test sits in as a service would,
// and with a file that every group there has.
func TestLimitsVersion2(t *testing.T) {
	c := findCgroups(groupPrefix + "test")
	controllers, err := os.ReadFile(filepath.Join(c.v2, "cgroup.controllers"))
	fields := strings.Fields(string(controllers))
	if c.v2 == "" || err != nil || len(fields) == 0 || os.Geteuid() != 0 {
		t.Skip("no writable control group of version 2 with a controller here: run as root where one is mounted")
	}
	controller := fields[0]
	enabled, err := os.ReadFile(filepath.Join(c.v2, "cgroup.subtree_control"))
	if err != nil {
		t.Fatal(err)
	}
	service := filepath.Join(c.v2, "meshd-test-service")
	if err := os.Mkdir(service, 0o755); err != nil {
		t.Skipf("control groups of version 2 are not ours to make: %v", err)
	}
	t.Cleanup(func() {
		for _, dir := range []string{"meshd-i/x", "meshd-i/" + self, "meshd-i", ""} {
			if err := os.Remove(filepath.Join(service, dir)); err != nil && !os.IsNotExist(err) {
				t.Error(err)
			}
		}
		if !slices.Contains(strings.Fields(string(enabled)), controller) {
			if err := writeControl(c.v2, "cgroup.subtree_control", "-"+controller); err != nil {
				t.Error(err)
			}
		}
	})
	if err := writeControl(c.v2, "cgroup.subtree_control", "+"+controller); err != nil {
		t.Skipf("the controller %s is not ours to use: %v", controller, err)
	}
	dir, err := os.Open(service)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	for _, try := range []string{"first", "moved in an earlier run"} {
		cmd := plan{Dir: controller}.command(t, "version-2")
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
		out, err := cmd.Output()
		if want := "0::/meshd-test-service/meshd-i/x limit 3"; err != nil || !strings.HasSuffix(string(out), want) {
			t.Errorf("%s: %s, %v; want %s", try, out, err, want)
		}
		// A group with controllers for its children takes no process itself.
		dir.Close()
		if dir, err = os.Open(filepath.Join(service, "meshd-i", self)); err != nil {
			t.Fatal(err)
		}
	}
}

// actInVersion2 limits a process, as one that sits in a group with controllers.
func actInVersion2() {
	c := findCgroups("meshd-i")
	if err := c.setV2("x", setting{controller: readPlan().Dir, fileV2: "cgroup.max.depth", valueV2: "3"}); err != nil {
		fmt.Print(err)
		os.Exit(1)
	}
	group := filepath.Join(c.v2, c.group, "x")
	dir, err := os.Open(group)
	if err != nil {
		fmt.Print(err)
		os.Exit(1)
	}
	cmd := exec.Command("/bin/grep", "^0::", "/proc/self/cgroup")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	where, err := cmd.Output()
	limit, readErr := os.ReadFile(filepath.Join(group, "cgroup.max.depth"))
	if err := errors.Join(err, readErr); err != nil {
		fmt.Print(err)
		os.Exit(1)
	}
	fmt.Printf("%s limit %s", strings.TrimSpace(string(where)), strings.TrimSpace(string(limit)))
}

func TestParseCgroups(t *testing.T) {
	cases := []struct {
		name, mounts, own string
		want              cgroups
	}{
		{"version 2 under systemd",
			"31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
			"0::/system.slice/meshd.service\n",
			cgroups{group: "meshd-i", v2: "/sys/fs/cgroup/system.slice/meshd.service", v1: map[string]string{}}},
		{"version 2, moved in an earlier run",
			"31 24 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
			"0::/system.slice/meshd.service/meshd-i/.self\n",
			cgroups{group: "meshd-i", v2: "/sys/fs/cgroup/system.slice/meshd.service", v1: map[string]string{}}},
		{"version 1 in a container",
			"40 24 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n" +
				"41 24 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n" +
				"42 24 0:32 / /sys/fs/cgroup/freezer ro - cgroup cgroup rw,freezer\n",
			"3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc/sub\n1:freezer:/\n",
			cgroups{group: "meshd-i", v1: map[string]string{"cpu": "/sys/fs/cgroup/cpu,cpuacct", "memory": "/sys/fs/cgroup/memory/sub"}}},
		{"none", "", "", cgroups{group: "meshd-i", v1: map[string]string{}}},
	}
	for _, c := range cases {
		got := parseCgroups("meshd-i", c.mounts, c.own)
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(cgroups{})); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
	}
}
