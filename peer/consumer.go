package peer

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"meshd/peer/supervise"
	"meshd/provision"
	"meshd/raftfsm"
)

// consumer is one assignment on this node: what it is given, and the process
// that is started with it. It stays until its workers have ended, so that no two
// deliver to one assignment.
type consumer struct {
	n       *Peer
	name    string
	deliver *worker            // writes files
	checks  map[string]*worker // by requirement: one that hangs holds up no other

	mu      sync.Mutex
	checked map[string]string // requirement -> what of it logged in from here: need.version
	want    string            // digest of what is to be delivered, "" while that is not known
	handed  bool              // everything was delivered once since this node started
	since   time.Time         // when that was done last
	spec    *supervise.Spec   // with handed: nil where the mesh starts no process
}

func (n *Peer) newConsumer(name string) *consumer {
	return &consumer{n: n, name: name, deliver: n.newWorker(), checks: map[string]*worker{}, checked: map[string]string{}}
}

// set gives the workers what is to be done for the assignment as it is now, and
// returns the bindings that are worked on.
func (c *consumer) set(run raftfsm.RunSpec, needs []need) (busy []string) {
	for req, w := range c.checks {
		if _, still := run.Module.Requires[req]; !still {
			w.set(nil)
			if w.idle() {
				delete(c.checks, req)
			}
		}
	}
	all := ready(needs)
	for _, need := range needs {
		w := c.checks[need.Requirement]
		if w == nil {
			w = c.n.newWorker()
			c.checks[need.Requirement] = w
		}
		tasks := c.checkTasks(need)
		w.set(tasks)
		if all = all && len(tasks) == 0; len(tasks) > 0 {
			busy = append(busy, need.Binding)
		}
	}
	if !all {
		c.wants("")
		c.deliver.set(nil) // what runs goes on with what it has
		return busy
	}
	want := digest(run, needs)
	c.wants(want)
	c.deliver.set([]task{{
		key:  fmt.Sprintf("%s %s %s", verbDeliver, c.name, want),
		do:   func(context.Context) error { return c.hand(run, needs, want) },
		note: func(step, class string) { c.noteAll(needs, step, class) },
	}})
	for _, need := range needs {
		busy = append(busy, need.Binding)
	}
	return busy
}

func (c *consumer) wants(digest string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.want = digest
}

// close ends the work for the assignment, and reports whether all of it has
// ended.
func (c *consumer) close() (ended bool) {
	c.mu.Lock()
	c.want, c.handed, c.spec = "", false, nil
	clear(c.checked)
	c.mu.Unlock()
	c.deliver.set(nil)
	ended = c.deliver.idle()
	for _, w := range c.checks {
		w.set(nil)
		ended = ended && w.idle()
	}
	return ended
}

// noteAll books an outcome of the delivery, which is of all bindings at once. Of
// an assignment that has none it shows at the process, which waits for it.
func (c *consumer) noteAll(needs []need, step, class string) {
	for _, n := range needs {
		c.n.observed.trouble(raftfsm.TroubleReport{Binding: n.Binding, Side: raftfsm.SideConsumer}, step, class)
	}
	if len(needs) == 0 && class != "" {
		c.n.observed.note(func(o *sightings) {
			o.processes[c.name] = raftfsm.ProcessReport{Assignment: c.name, State: string(supervise.Failed), Class: class}
		})
	}
}

// hasChecked reports whether a login with the need's bytes worked from here. A
// credential that is delivered by the log's word was checked before a restart.
func (c *consumer) hasChecked(n need) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return n.Credential.Delivered && n.Address == n.Credential.Address || c.checked[n.Requirement] == n.version()
}

// version tells one delivery of a need from the next.
func (n need) version() string {
	return fmt.Sprintf("%d %s", n.Credential.Generation, hash([]byte(fmt.Sprint(n.ResourceID, n.Address))))
}

func (c *consumer) checkTasks(n need) []task {
	if n.Credential == nil || c.hasChecked(n) {
		return nil
	}
	about := raftfsm.TroubleReport{Binding: n.Binding, Side: raftfsm.SideConsumer}
	return []task{{
		key: fmt.Sprintf("%s %s %s", verbCheck, n.Binding, n.version()),
		do: func(ctx context.Context) error {
			kind, fields, err := c.fields(n)
			if err != nil {
				return err
			}
			if err := kind.Check(ctx, fields); err != nil {
				return err
			}
			c.mu.Lock()
			c.checked[n.Requirement] = n.version()
			c.mu.Unlock()
			return nil
		},
		note: func(step, class string) { c.n.observed.trouble(about, step, class) },
	}}
}

func unknownKind(kind string) error {
	return &provision.Error{Step: "find kind", Class: provision.BadConfig, Err: fmt.Errorf("this build knows no kind %q; run the same meshd on every node", kind)}
}

// fields are the bytes that the need delivers, and the kind that they are of.
func (c *consumer) fields(n need) (provision.Kind, map[string]string, error) {
	kind := c.n.cfg.Kinds.Find(n.Kind)
	if kind == nil {
		return nil, nil, unknownKind(n.Kind)
	}
	login, err := c.n.login(*n.Credential)
	if err != nil {
		return nil, nil, err
	}
	res := provision.Resource{ID: n.ResourceID, Name: n.Resource.Name}
	fields := kind.Fields(provision.Address(n.Address), res, login)
	fields["provider"] = n.Provider
	return kind, fields, nil
}

// BusBinding is the directory beside an assignment's bindings that holds its
// key for the bus. No requirement can take its name: that has no dot.
const BusBinding = "meshd.bus"

// hand writes the binding directories and makes the spec of the process. It is
// done again whenever anything of it changes.
func (c *consumer) hand(run raftfsm.RunSpec, needs []need, digest string) error {
	data := map[string]map[string]string{"node": c.n.nodeFields()}
	files := map[string]map[string][]byte{}
	for _, n := range needs {
		_, fields, err := c.fields(n)
		if err != nil {
			return err
		}
		data[n.Requirement] = fields
		files[n.Requirement] = bytesOf(fields)
	}
	bus, err := c.n.busFields(c.name)
	if err != nil {
		return &provision.Error{Step: "make bus key", Class: provision.Internal, Err: err}
	}
	files[BusBinding] = bytesOf(bus)
	owner, err := supervise.LookupUser(run.Module.Run.User)
	if err != nil {
		return &provision.Error{Step: "find user", Class: provision.BadConfig, Err: err}
	}
	dir, changed, err := supervise.Deliver(c.n.cfg.BindingRoot, c.name, files, owner)
	if err != nil {
		return &provision.Error{Step: "write binding files", Class: provision.Internal, Err: err}
	}
	spec, err := c.process(run, data, dir)
	if err != nil {
		return &provision.Error{Step: "render environment", Class: provision.BadConfig, Err: err}
	}
	if !c.take(spec, digest) {
		return nil // something else is wanted by now
	}
	if changed {
		if err := c.signal(run.Module, spec); err != nil {
			c.n.cfg.Log.Warn("tell a process of its new files", "assignment", c.name, "err", err)
		}
	}
	for _, n := range needs {
		if !n.Credential.Delivered {
			c.n.mark(n.Binding, n.ResourceID, n.Credential.Generation, raftfsm.FactDelivered)
		}
	}
	return nil
}

// take makes spec what runs, if it is still what is wanted.
func (c *consumer) take(spec *supervise.Spec, digest string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.want != digest {
		return false
	}
	c.spec, c.handed, c.since = spec, true, time.Now()
	return true
}

// signal tells the process that its files are others, if that is what the module
// asked for. One that is started anew reads them anyway.
func (c *consumer) signal(m raftfsm.Module, spec *supervise.Spec) error {
	name, asked := strings.CutPrefix(m.OnRotate, "signal ")
	st, runs := c.n.cfg.Processes.Status()[c.name]
	if !asked || !runs || st.PID == 0 || spec == nil || st.Fingerprint != spec.Fingerprint {
		return nil
	}
	sig := unix.SignalNum("SIG" + name)
	if sig == 0 {
		return fmt.Errorf("on-rotate of %s: there is no signal %q", m.Name, name)
	}
	return c.n.cfg.Processes.Signal(c.name, sig)
}

func bytesOf(fields map[string]string) map[string][]byte {
	out := map[string][]byte{}
	for k, v := range fields {
		out[k] = []byte(v)
	}
	return out
}

// process is the spec of the assignment's process, or nil where the mesh starts
// none. Its fingerprint covers what a restart is needed for: the command, the
// environment, and the files, with the bus's address for those that use it, unless
// the module asked not to be restarted for files.
func (c *consumer) process(run raftfsm.RunSpec, data map[string]map[string]string, dir string) (*supervise.Spec, error) {
	m := run.Module
	if m.Run.External() {
		return nil, nil
	}
	env := map[string]string{
		"SERVICE_BINDING_ROOT": dir,
		"MESHD_NODE":           c.n.cfg.Self.Name,
		"MESHD_ASSIGNMENT":     c.name,
		"MESHD_BUS":            dir + "/" + BusBinding,
	}
	for _, key := range sortedKeys(m.Env) {
		value, err := c.n.cfg.Render(m.Env[key], data)
		if err != nil {
			return nil, fmt.Errorf("env %s of %s: %w", key, c.name, err)
		}
		env[key] = value
	}
	spec := &supervise.Spec{
		Name: c.name, Exec: m.Run.Exec, Dir: m.Run.Dir, User: m.Run.User, StopTimeout: m.StopGrace,
	}
	for _, key := range sortedKeys(env) {
		spec.Env = append(spec.Env, key+"="+env[key])
	}
	if h := m.Health; h != nil {
		spec.Health = &supervise.Health{HTTP: h.HTTP, TCP: h.TCP, Exec: h.Exec, Every: h.Every, Timeout: h.Timeout, Grace: h.Grace, Fails: h.Fails}
	}
	if l := m.Limits; l != nil {
		spec.Limits = supervise.Limits{Memory: l.Memory, CPU: l.CPU, PIDs: l.PIDs}
	}
	files, bus := data, ""
	if usesBus(m) {
		bus = c.n.cfg.Bus.ClientURL()
	}
	if !restarts(m) {
		files, bus = nil, ""
	}
	sum, err := json.Marshal([]any{spec.Exec, spec.Dir, spec.User, spec.Env, spec.Limits, files, bus})
	if err != nil {
		return nil, err
	}
	spec.Fingerprint = hash(sum)
	return spec, nil
}

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// digest tells one delivery from the next.
func digest(run raftfsm.RunSpec, needs []need) string {
	var parts []string
	for _, n := range needs {
		parts = append(parts, n.Binding, n.version())
	}
	b, err := json.Marshal([]any{run.Module, parts})
	if err != nil {
		return "" // plain data: it cannot fail
	}
	return hash(b)
}

// running is the process to supervise, if the mesh starts one, and whether that
// is known yet.
func (c *consumer) running() (spec *supervise.Spec, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spec, c.handed
}

// proves reports whether a process in that state is healthy with what was
// delivered last, and not with what it had before. Its fingerprint tells which
// files it was started with. Of one that is not started anew for new files, the
// checks since their delivery tell: as many as it takes to be unhealthy.
func (c *consumer) proves(m raftfsm.Module, st supervise.Status) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case st.State != supervise.Healthy, c.want == "", c.spec == nil, c.spec.Health == nil, c.spec.Fingerprint != st.Fingerprint:
		return false
	case restarts(m):
		return true
	}
	h := *c.spec.Health
	every, timeout, fails := cmp.Or(h.Every, healthEvery), cmp.Or(h.Timeout, healthEvery), cmp.Or(h.Fails, healthFails)
	return time.Since(c.since) > time.Duration(fails)*(every+timeout)
}

// What package supervise takes where a health check says nothing.
const (
	healthEvery = 2 * time.Second
	healthFails = 3
)

// restarts reports whether the module is started anew when its files change.
func restarts(m raftfsm.Module) bool { return m.OnRotate == "" || m.OnRotate == "restart" }

// usesBus reports whether the module's process has anything to do on the bus.
func usesBus(m raftfsm.Module) bool {
	serves := func(all map[string]raftfsm.Handler) bool {
		for _, h := range all {
			if h.Bus {
				return true
			}
		}
		return false
	}
	for _, verbs := range m.Serves {
		if serves(verbs) {
			return true
		}
	}
	return len(m.Calls) > 0 || serves(m.Tools)
}

// noteProcesses compares what the supervisor says with what the log holds: the
// state of each process, and the health of those that are proven by it. n.mu is
// held.
func (n *Peer) noteProcesses(s *raftfsm.State, runs []raftfsm.RunSpec) {
	status := n.cfg.Processes.Status()
	n.observed.note(func(o *sightings) {
		for _, run := range runs {
			st, ok := status[run.Assignment]
			if !ok || st.State == supervise.Starting || st.State == supervise.Stopping || st.State == supervise.Stopped {
				continue // passes by itself: not worth an entry
			}
			o.processes[run.Assignment] = raftfsm.ProcessReport{Assignment: run.Assignment, State: string(st.State), Class: st.Class}
			if !n.consumers[run.Assignment].proves(run.Module, st) {
				continue
			}
			for _, id := range run.Bindings {
				b := s.Bindings[id]
				if c := newestMinted(b); b.Proof == raftfsm.ProofHealth && c != nil && c.Delivered && !c.Healthy {
					o.marks[raftfsm.Mark{Binding: id, Resource: b.Resource, Generation: c.Generation, Fact: raftfsm.FactHealthy}] = true
				}
			}
		}
	})
}
