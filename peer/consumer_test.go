package peer

import (
	"maps"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"meshd/raftfsm"
)

// A bus that had to take another port is found again by those that use it, and
// the others run on.
func TestWhoUsesTheBusIsStartedAgainForItsNewAddress(t *testing.T) {
	inMesh(t, func(b *bed) {
		alpha := b.node("alpha")
		module := func(name string, edit func(*raftfsm.Module)) raftfsm.Documents {
			m := raftfsm.Module{Name: name, Run: raftfsm.Run{Exec: []string{"/bin/" + name}}}
			edit(&m)
			return raftfsm.Documents{Modules: []raftfsm.Module{m}, Assigns: []raftfsm.Assign{{Module: name, Nodes: []string{"alpha"}}}}
		}
		alpha.do(push(
			module("plain", func(*raftfsm.Module) {}),
			module("caller", func(m *raftfsm.Module) { m.Calls = []string{"alpha/plain.size"} }),
			module("server", func(m *raftfsm.Module) { m.Tools = map[string]raftfsm.Handler{"size": {Bus: true}} }),
			module("stays", func(m *raftfsm.Module) {
				m.Tools = map[string]raftfsm.Handler{"size": {Bus: true}}
				m.OnRotate = "none"
			}),
		))
		b.eventually(10*time.Second, "all run", func() bool { return len(alpha.procs.running()) == 4 })
		alpha.kill()
		alpha.bus.move(4333)
		alpha.restart()
		want := map[string]int{"plain@alpha": 1, "caller@alpha": 2, "server@alpha": 2, "stays@alpha": 1}
		b.eventually(20*time.Second, "those that use the bus were started again", func() bool { return maps.Equal(alpha.procs.starts(), want) })
		if url := read(filepath.Join(alpha.bindings(), "stays@alpha"))[BusBinding]["url"]; !strings.HasSuffix(url, ":4333") {
			b.Errorf("its files say that the bus is at %s", url)
		}
	})
}
