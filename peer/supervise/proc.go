package supervise

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// tokenKey is the environment variable that marks a process, and what it starts,
// as ours. Its value is INSTANCE:NAME:NONCE.
const tokenKey = "MESHD_CHILD"

// environBytes bounds what is read of a process's environment: the kernel's
// limit for one string is 128 KiB, and ours is the first one.
const environBytes = 256 << 10

// stat is the part of /proc/PID/stat that tells processes apart; see proc(5).
type stat struct {
	pid     int
	state   byte // 'Z' once the first thread has ended
	parent  int
	group   int
	session int
	threads int
	start   uint64 // in clock ticks since boot
}

// dead is true of a process of which nothing runs any more. A process whose
// first thread alone has ended is alive.
func (s stat) dead() bool {
	return s.state == 'X' || s.state == 'Z' && s.threads <= 1
}

func readStat(pid int) (stat, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return stat{}, err
	}
	return parseStat(string(b))
}

// parseStat starts after the last ')': the command name before it is the
// process's own to choose, parentheses and spaces included.
func parseStat(line string) (stat, error) {
	open, end := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if open < 0 || end < open {
		return stat{}, errors.New("parse /proc/PID/stat: no command name")
	}
	f := strings.Fields(line[end+1:]) // f[0] is field 3
	if len(f) < 20 {
		return stat{}, fmt.Errorf("parse /proc/PID/stat: %d fields after the command name, want at least 20", len(f))
	}
	s := stat{state: f[0][0]}
	var err error
	number := func(text string) int {
		n, e := strconv.Atoi(text)
		err = errors.Join(err, e)
		return n
	}
	s.pid = number(strings.TrimSpace(line[:open]))
	s.parent, s.group, s.session, s.threads = number(f[1]), number(f[2]), number(f[3]), number(f[17])
	start, e := strconv.ParseUint(f[19], 10, 64)
	s.start = start
	if err = errors.Join(err, e); err != nil {
		return stat{}, fmt.Errorf("parse /proc/PID/stat: %w", err)
	}
	return s, nil
}

// processes calls visit for every process there is. One that ends meanwhile, or
// that we may not look at, is not ours and is passed over.
func processes(visit func(stat)) error {
	d, err := os.Open("/proc")
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if st, err := readStat(pid); err == nil {
			visit(st)
		}
	}
	return nil
}

// token is the value of MESHD_CHILD in the environment of pid, or "". It is
// readable to root and to the process's own user.
func token(pid int) string {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return ""
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, environBytes))
	if err != nil {
		return ""
	}
	for kv := range bytes.SplitSeq(b, []byte{0}) {
		if v, ok := bytes.CutPrefix(kv, []byte(tokenKey+"=")); ok {
			return string(v)
		}
	}
	return ""
}

// tokenName is the name in a token of the instance.
func tokenName(token, instance string) (name string, ok bool) {
	rest, ours := strings.CutPrefix(token, instance+":")
	name, _, ok = strings.Cut(rest, ":")
	return name, ours && ok && validName.MatchString(name)
}

// bootID names this boot of the kernel, so that a process number and start time
// of an earlier one are not taken for today's.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
