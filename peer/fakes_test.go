package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"meshd/bus"
	"meshd/peer/supervise"
	"meshd/provision/memory"
)

// fakeBus remembers its layout.
type fakeBus struct {
	mu      sync.Mutex
	layout  bus.Layout
	applies int
	reloads int         // layouts that differ in more than their handlers
	rogues  []bus.Bound // what it answers beside its layout
	down    bool        // nobody hears it
	mesh    []*node
	port    int        // of ClientURL
	serves  bus.Layout // newest of the meshd that runs
}

func (f *fakeBus) ClientURL() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return fmt.Sprintf("nats://127.0.0.1:%d", f.port)
}

func (f *fakeBus) move(port int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.port = port
}

func (f *fakeBus) Apply(l bus.Layout) error {
	plain := l
	plain.Services = slices.Clone(l.Services)
	for i := range plain.Services {
		plain.Services[i].Handler = nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.applies++
	if !reflect.DeepEqual(plain, f.layout) {
		f.reloads++
	}
	f.layout, f.serves = plain, l
	return nil
}

// serving is the layout that the meshd on this node serves: of one that has ended,
// nothing.
func (f *fakeBus) serving() bus.Layout {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.serves
}

func (f *fakeBus) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.serves = bus.Layout{}
}

func (f *fakeBus) counts() (applies, reloads int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applies, f.reloads
}

func (f *fakeBus) now() bus.Layout {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.layout
}

func (f *fakeBus) Call(context.Context, bus.Caller, bus.Target, []byte) (bus.Reply, error) {
	return bus.Reply{}, errors.New("no bus")
}

func (f *fakeBus) Forward(context.Context, string, string, bus.Call) ([]byte, error) {
	return nil, errors.New("no bus")
}

// Survey asks every member that is up, whatever the fabric between them.
func (f *fakeBus) Survey(context.Context, time.Duration) ([]bus.Answer, error) {
	members := f.now().Directory.Nodes
	var out []bus.Answer
	for _, n := range f.mesh {
		if _, member := members[n.name]; member {
			out = append(out, n.bus.answer(n.name))
		}
	}
	return out, nil
}

func (f *fakeBus) answer(name string) bus.Answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down {
		return bus.Answer{Node: name}
	}
	a := bus.Answer{Node: name, Answered: true, Bound: slices.Clone(f.rogues)}
	for _, s := range f.layout.Services {
		if s.Scope == bus.ScopeMesh {
			a.Bound = append(a.Bound, bus.Bound{Seat: s.Seat, Assignment: s.Assignment, Epoch: s.Epoch, Leaving: !s.Answers(), Interest: 1})
		}
	}
	return a
}

// forget makes it the bus of another process.
func (f *fakeBus) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.layout, f.applies, f.reloads, f.rogues = bus.Layout{}, 0, 0, nil
}

func (f *fakeBus) setDown(down bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = down
}

func (f *fakeBus) setRogues(rogues ...bus.Bound) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rogues = rogues
}

func (f *fakeBus) Admits(publicKey string) bool {
	l := f.now()
	return slices.ContainsFunc(l.Operators, func(o bus.Operator) bool { return o.PublicKey == publicKey }) ||
		slices.ContainsFunc(l.Modules, func(m bus.Module) bool { return m.PublicKey == publicKey })
}

func (f *fakeBus) Refusals() []bus.Refusal { return nil }

// processes runs apps: each reads its binding files when it is started, and
// keeps a session open with what they say, as a real one does.
type processes struct {
	kind *memory.Kind

	mu      sync.Mutex
	apps    map[string]*app
	signals []string
	health  supervise.State // of those that have a check
	held    int             // calls of Hold
	frozen  bool            // Set is not heeded: processes take their time
}

func (p *processes) setFrozen(frozen bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.frozen = frozen
}

func (p *processes) signalled() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.signals)
}

type app struct {
	spec   supervise.Spec
	status supervise.Status
	starts int
	cancel context.CancelFunc
	done   chan struct{}
}

func (p *processes) Hold(specs []supervise.Spec) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held++
	for _, spec := range specs {
		if p.apps[spec.Name] == nil {
			a := &app{}
			p.apps[spec.Name] = a
			a.start(p, spec)
		}
	}
}

func (p *processes) Set(specs []supervise.Spec, keep []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.frozen {
		return
	}
	wanted := map[string]bool{}
	for _, name := range keep {
		wanted[name] = true
	}
	for _, spec := range specs {
		wanted[spec.Name] = true
		a := p.apps[spec.Name]
		switch {
		case a == nil:
			a = &app{}
			p.apps[spec.Name] = a
		case a.spec.Fingerprint == spec.Fingerprint:
			a.spec = spec
			continue
		default:
			a.stop()
		}
		a.start(p, spec)
	}
	for name, a := range p.apps {
		if !wanted[name] {
			a.stop()
			delete(p.apps, name)
		}
	}
}

func (a *app) stop() {
	a.cancel()
	<-a.done
}

func (a *app) start(p *processes, spec supervise.Spec) {
	a.starts++
	a.spec = spec
	a.status = supervise.Status{State: supervise.Running, PID: 1, Fingerprint: spec.Fingerprint, Started: time.Now()}
	if spec.Health != nil {
		a.status.State = p.health
	}
	root := ""
	for _, kv := range spec.Env {
		if dir, ok := strings.CutPrefix(kv, "SERVICE_BINDING_ROOT="); ok {
			root = dir
		}
	}
	var ctx context.Context
	ctx, a.cancel = context.WithCancel(context.Background())
	a.done = make(chan struct{})
	done, bindings := a.done, read(root)
	go func() {
		defer close(done)
		var uses sync.WaitGroup
		for _, fields := range bindings {
			if fields["type"] == "memory" {
				uses.Go(func() { use(ctx, p.kind, fields) })
			}
		}
		uses.Wait()
	}()
}

// read returns the binding directories below root.
func read(root string) map[string]map[string]string {
	out := map[string]map[string]string{}
	dirs, _ := os.ReadDir(root) // none is no binding
	for _, d := range dirs {
		out[d.Name()] = map[string]string{}
		files, _ := os.ReadDir(filepath.Join(root, d.Name()))
		for _, f := range files {
			b, _ := os.ReadFile(filepath.Join(root, d.Name(), f.Name()))
			out[d.Name()][f.Name()] = string(b)
		}
	}
	return out
}

// use keeps a session open until ctx ends.
func use(ctx context.Context, kind *memory.Kind, fields map[string]string) {
	for ctx.Err() == nil {
		session, err := kind.Dial(ctx, fields)
		for err == nil {
			if pauseFor(ctx, 2*time.Second) {
				session.Close()
				return
			}
			_, err = session.Get(ctx, "x")
		}
		if session != nil {
			session.Close()
		}
		pauseFor(ctx, 200*time.Millisecond)
	}
}

func pauseFor(ctx context.Context, d time.Duration) (ended bool) {
	return await(ctx, d, nil, nil) != nil
}

func (p *processes) Status() map[string]supervise.Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string]supervise.Status{}
	for name, a := range p.apps {
		out[name] = a.status
	}
	return out
}

// setHealth makes every check come to that from now on.
func (p *processes) setHealth(state supervise.State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.health = state
	for _, a := range p.apps {
		if a.spec.Health != nil {
			a.status.State = state
		}
	}
}

func (p *processes) Signal(name string, sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.signals = append(p.signals, fmt.Sprint(name, " ", sig))
	return nil
}

func (p *processes) Logs(name string, _ int) ([]byte, error) { return []byte(name + " began\n"), nil }

// Follow has a line every ten seconds.
func (p *processes) Follow(ctx context.Context, _ string, w io.Writer) error {
	for !pauseFor(ctx, 10*time.Second) {
		if _, err := io.WriteString(w, "tick\n"); err != nil {
			return err
		}
	}
	return nil
}

// starts is how often each app was started.
func (p *processes) starts() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string]int{}
	for name, a := range p.apps {
		out[name] = a.starts
	}
	return out
}

func (p *processes) running() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.apps))
}

func (p *processes) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.apps {
		a.stop()
	}
	clear(p.apps)
}
