package peer

import (
	"context"
	"errors"
	"slices"
	"time"

	"meshd/bus"
	"meshd/peer/supervise"
	"meshd/raftfsm"
)

// facts is what one pass decides by.
type facts struct {
	state    *raftfsm.State // a copy: a pass needs no lock on what the log goes on changing
	desired  raftfsm.Desired
	jobs     map[string][]job  // by provider id
	needs    map[string][]need // by assignment
	secrets  string            // the mesh's own keys, sealed to this node
	removed  []string          // ids of nodes that are members no more
	members  map[string]string // id -> address of every member
	isMember bool
}

const (
	// settle is how far apart passes are: a single change is acted on at once, and
	// of a burst of them all but the first are one pass.
	settle = 5 * time.Millisecond
)

// reconcile is the one loop: it makes this node what the log asks of it. It does
// nothing slow itself.
func (n *Peer) reconcile(ctx context.Context) error {
	for {
		changed := n.store.watch()
		if _, out := n.removed(); out || n.hasHeard() { // a removal is for ever: it needs no leader's word
			n.basis.record = nil
			n.pass()
		} else {
			n.passOnRecord()
			changed = nil // what is applied until then is of long ago
		}
		next := time.Now().Add(settle)
		if await(ctx, n.untilNextPass(), changed, n.loops.reconcile) != nil {
			return nil
		}
		if wait := time.Until(next); wait > 0 && await(ctx, wait, nil, nil) != nil {
			return nil
		}
	}
}

func (n *Peer) gather() facts {
	f := facts{jobs: map[string][]job{}, needs: map[string][]need{}, members: map[string]string{}}
	n.store.view(func(s *raftfsm.State) { f.state = s.Clone() })
	if told := n.exit.told.Load(); told != nil {
		f.state = raftfsm.New() // its own copy is one of before the removal
		f.state.Removed[n.id()] = *told
	}
	_, f.isMember = f.state.Nodes[n.id()]
	f.secrets, f.removed = f.state.SecretsOf(n.id()), sortedKeys(f.state.Removed)
	for id, m := range f.state.Nodes {
		f.members[id] = m.Address
	}
	f.desired = f.state.Desired(n.id())
	for _, spec := range f.desired.Provides {
		f.jobs[raftfsm.ProviderID(spec.Assignment, spec.Kind)] = decideService(f.state, spec)
	}
	for _, run := range f.desired.Runs {
		f.needs[run.Assignment] = decideNeeds(f.state, run)
	}
	return f
}

// pass makes this node what the log asks of it now. A node that was removed
// stops what it runs, and one that the log does not name yet leaves it as it is.
func (n *Peer) pass() {
	f := n.gather()
	switch {
	case f.isMember:
		n.keepSecrets(f.secrets)
		n.keepMembers(f)
		n.layBus(f, "")
	case slices.Contains(f.removed, n.id()):
		n.clearBus()
	default:
		return
	}
	n.basis.lay()
	n.mu.Lock()
	defer n.mu.Unlock()
	work := map[raftfsm.TroubleReport]bool{}
	n.passServices(f, work)
	n.passConsumers(f, work)
	n.passProcesses(f)
	var over []raftfsm.TroubleReport
	n.store.view(func(s *raftfsm.State) { over = decideOver(s, n.id(), work) })
	n.observed.settle(over, work)
	n.sweep()
}

// keepSecrets remembers the mesh's keys for the next start, when the log is not
// readable yet.
func (n *Peer) keepSecrets(sealed string) {
	if sealed == "" || sealed == n.local.Setting(SecretsSetting) {
		return
	}
	if err := n.local.Set(SecretsSetting, sealed); err != nil {
		n.cfg.Log.Error("keep the mesh's keys", "err", err)
		return
	}
	n.cfg.Host.Rekeyed()
}

// keepMembers remembers who is a member and where, for the next start: the log
// is readable only once a leader has spoken, and to be spoken to a node must let
// the right ones in.
func (n *Peer) keepMembers(f facts) {
	for _, id := range f.removed {
		f.members[id] = gone
		if n.exit.farewells.Load() == 0 {
			n.cfg.Host.Expel(id)
		}
	}
	for _, id := range sortedKeys(f.members) {
		if err := n.local.SetAddress(id, f.members[id]); err != nil {
			n.cfg.Log.Error("remember the members", "err", err)
			return
		}
	}
}

// layBus gives the bus its layout: routes, keys, grants and what is answered
// here. Closed is why mesh seats are not; empty where they are.
func (n *Peer) layBus(f facts, closed string) {
	l, err := n.layout(f.state, f.desired)
	for i := range l.Services {
		if l.Services[i].Scope == bus.ScopeMesh {
			l.Services[i].Closed = closed
		}
	}
	if err == nil {
		err = n.cfg.Bus.Apply(l)
	}
	if err != nil {
		n.cfg.Log.Error("lay out the bus", "err", err)
	}
}

// clearBus closes the bus to all others and to every process: this node is no
// member any more.
func (n *Peer) clearBus() {
	if err := n.cfg.Bus.Apply(bus.Layout{}); err != nil {
		n.cfg.Log.Error("clear the bus", "err", err)
	}
}

// passServices gives each provider's worker its jobs, and adds to work what they
// are about. n.mu is held, as in the passes below.
func (n *Peer) passServices(f facts, work map[raftfsm.TroubleReport]bool) {
	wanted := map[string]bool{}
	for _, spec := range f.desired.Provides {
		id := raftfsm.ProviderID(spec.Assignment, spec.Kind)
		wanted[id] = true
		if n.services[id] == nil {
			n.services[id] = n.newService(spec)
		}
		n.services[id].set(spec, f.jobs[id])
		for _, j := range f.jobs[id] {
			work[j.about()] = true
		}
	}
	for id, svc := range n.services {
		if wanted[id] {
			continue
		}
		if svc.close(); svc.worker.idle() {
			delete(n.services, id)
		}
	}
}

func (n *Peer) passConsumers(f facts, work map[raftfsm.TroubleReport]bool) {
	wanted := map[string]bool{}
	for _, run := range f.desired.Runs {
		wanted[run.Assignment] = true
		c := n.consumers[run.Assignment]
		if c == nil {
			c = n.newConsumer(run.Assignment)
			n.consumers[run.Assignment] = c
		}
		for _, binding := range c.set(run, f.needs[run.Assignment]) {
			work[raftfsm.TroubleReport{Binding: binding, Side: raftfsm.SideConsumer}] = true
		}
	}
	for name, c := range n.consumers {
		if !wanted[name] && c.close() {
			delete(n.consumers, name)
		}
	}
}

func (n *Peer) passProcesses(f facts) {
	n.cfg.Processes.Set(n.processes(f))
	n.store.view(func(s *raftfsm.State) { n.noteProcesses(s, f.desired.Runs) })
}

// processes are what is to run, and the names of which that is not known yet.
func (n *Peer) processes(f facts) (specs []supervise.Spec, keep []string) {
	for _, run := range f.desired.Runs {
		switch spec, known := n.consumers[run.Assignment].running(); {
		case spec != nil:
			specs = append(specs, *spec)
		case !known:
			keep = append(keep, run.Assignment)
		}
	}
	return specs, keep
}

// sweep removes what was delivered to assignments that are gone, whoever
// delivered it: this run of meshd, or one before in which the log moved on. What
// is being delivered yet is left to the pass after.
func (n *Peer) sweep() {
	delivered, err := supervise.Delivered(n.cfg.BindingRoot)
	if err != nil {
		n.cfg.Log.Error("look for old binding files", "err", err)
		return
	}
	for _, name := range delivered {
		if n.consumers[name] != nil {
			continue
		}
		if err := errors.Join(supervise.Undeliver(n.cfg.BindingRoot, name), n.local.forgetBusKey(name)); err != nil {
			n.cfg.Log.Error("remove binding files", "assignment", name, "err", err)
		}
	}
}
