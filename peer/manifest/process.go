package manifest

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"meshd/raftfsm"
)

func (r *reader) health(into **raftfsm.Health) take {
	return func(v value, path string) {
		var h raftfsm.Health
		var fails int64
		r.keys(v, path, "write {http: http://127.0.0.1:PORT/PATH}", map[string]take{
			"http": r.rule(&h.HTTP, func(text string) (string, string) { return webAddress(text, false) }),
			"tcp": r.rule(&h.TCP, func(text string) (string, string) {
				if !hostPort(text) {
					return "KEY must be HOST:PORT", "write one such as 127.0.0.1:8080"
				}
				return "", ""
			}),
			"exec":    r.command(&h.Exec),
			"every":   r.duration(&h.Every),
			"timeout": r.duration(&h.Timeout),
			"grace":   r.duration(&h.Grace),
			"fails":   r.count(&fails, 1, 100),
		})
		r.exactlyOne(v, path, "http", "tcp", "exec")
		h.Fails = int(fails)
		*into = &h
	}
}

// Bounds of the limits. Less memory than leastMemory kills any program at its
// start. leastCPU is the kernel's: a quota of 1 ms in a period of 100 ms.
// mostPIDs is its PID_MAX_LIMIT on 64 bits.
const (
	leastMemory = 1 << 20
	leastCPU    = 10
	mostCPU     = 1024 * 1000
	mostPIDs    = 1 << 22
)

func (r *reader) limits(into **raftfsm.Limits) take {
	return func(v value, path string) {
		var l raftfsm.Limits
		r.keys(v, path, "write {memory: 256MiB, cpu: 500m, pids: 100}", map[string]take{
			"memory": func(v value, path string) {
				var text string
				r.rule(&text, func(text string) (rule, suggestion string) {
					l.Memory, rule, suggestion = memory(text)
					return rule, suggestion
				})(v, path)
			},
			"cpu": func(v value, path string) {
				var text string
				r.rule(&text, func(text string) (rule, suggestion string) {
					l.CPU, rule, suggestion = cpu(text)
					return rule, suggestion
				})(v, path)
			},
			"pids": r.count(&l.PIDs, 1, mostPIDs),
		})
		*into = &l
	}
}

// units of memory, in bytes: the binary ones of IEC 80000-13, and SI's.
func unit(name string) int64 {
	switch name {
	case "KiB":
		return 1 << 10
	case "MiB":
		return 1 << 20
	case "GiB":
		return 1 << 30
	case "TiB":
		return 1 << 40
	case "kB":
		return 1e3
	case "MB":
		return 1e6
	case "GB":
		return 1e9
	case "TB":
		return 1e12
	}
	return 0
}

var quantity = regexp.MustCompile(`^([0-9]{1,12}) ?([A-Za-z]*)$`)

// memory reads a whole number with a unit, into bytes.
func memory(text string) (n int64, rule, suggestion string) {
	const want = "KEY must be a whole number with a unit, such as 256MiB"
	m := quantity.FindStringSubmatch(text)
	if m == nil {
		return 0, fmt.Sprintf("%s, and is %q", want, clip(text)), "the units are KiB, MiB, GiB, TiB, kB, MB, GB and TB"
	}
	n, _ = strconv.ParseInt(m[1], 10, 64) // at most 12 digits
	size := unit(m[2])
	switch {
	case m[2] == "":
		return 0, fmt.Sprintf("%s, and %s has no unit", want, text), fmt.Sprintf("write %sMiB?", text)
	case size == 0:
		short := strings.ToUpper(m[2][:1])
		if unit(short+"iB") != 0 {
			return 0, fmt.Sprintf("KEY has the unit %q, which is none", clip(m[2])), fmt.Sprintf("write %s%siB", m[1], short)
		}
		return 0, fmt.Sprintf("KEY has the unit %q, which is none", clip(m[2])), "the units are KiB, MiB, GiB, TiB, kB, MB, GB and TB"
	case n > math.MaxInt64/size:
		return 0, fmt.Sprintf("KEY is more than any machine has: %s", text), ""
	case n*size < leastMemory:
		return 0, fmt.Sprintf("KEY must be at least 1MiB, and is %s", text), ""
	}
	return n * size, "", ""
}

var (
	thousandths = regexp.MustCompile(`^([0-9]{1,9})m$`)
	cores       = regexp.MustCompile(`^([0-9]{1,6})(?:\.([0-9]{1,3}))?$`)
)

// cpu reads cores, such as 0.5, or thousandths of one, such as 500m.
func cpu(text string) (n int64, rule, suggestion string) {
	if m := thousandths.FindStringSubmatch(text); m != nil {
		n, _ = strconv.ParseInt(m[1], 10, 64)
	} else if m := cores.FindStringSubmatch(text); m != nil {
		n, _ = strconv.ParseInt(m[1]+(m[2] + "000")[:3], 10, 64)
	} else {
		return 0, fmt.Sprintf("KEY must be cores, such as 0.5, or thousandths of one, such as 500m, and is %q", clip(text)), ""
	}
	if n < leastCPU || n > mostCPU {
		return 0, fmt.Sprintf("KEY must be from 10m to 1024 cores, and is %s", text), ""
	}
	return n, "", ""
}

// portNumber says whether the text is a port to connect to.
func portNumber(text string) bool {
	n, err := strconv.ParseUint(text, 10, 16)
	return err == nil && n > 0
}
