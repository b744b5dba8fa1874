package peer

import (
	"context"
	"reflect"

	"meshd/bus"
	"meshd/peer/supervise"
	"meshd/raftfsm"
)

// facts is what one pass decides by.
type facts struct {
	desired  raftfsm.Desired
	jobs     map[string][]job  // by provider id
	needs    map[string][]need // by assignment
	secrets  string            // the mesh's own keys, sealed to this node
	removed  []string          // ids of nodes that are members no more
	members  map[string]string // id -> address of every member
	isMember bool
}

// reconcile is the one loop: it makes this node what the log asks of it. It does
// nothing slow itself.
func (n *Peer) reconcile(ctx context.Context) error {
	for {
		changed := n.store.watch()
		n.pass()
		if await(ctx, everythingEvery, changed, n.loops.reconcile) != nil {
			return nil
		}
	}
}

func (n *Peer) gather() facts {
	f := facts{jobs: map[string][]job{}, needs: map[string][]need{}, members: map[string]string{}}
	n.store.view(func(s *raftfsm.State) {
		var self raftfsm.Node
		self, f.isMember = s.Nodes[n.id()]
		f.secrets, f.removed = self.Secrets, sortedKeys(s.Removed)
		for id, m := range s.Nodes {
			f.members[id] = m.Address
		}
		f.desired = s.Desired(n.id())
		for _, spec := range f.desired.Provides {
			f.jobs[raftfsm.ProviderID(spec.Assignment, spec.Kind)] = decideService(s, spec)
		}
		for _, run := range f.desired.Runs {
			f.needs[run.Assignment] = decideNeeds(s, run)
		}
	})
	return f
}

func (n *Peer) pass() {
	f := n.gather()
	if !f.isMember {
		return // the log has not reached this node: what runs goes on
	}
	n.keepSecrets(f.secrets)
	n.keepMembers(f)
	n.layBus()
	n.passServices(f)
	n.passConsumers(f)
	n.mu.Lock()
	defer n.mu.Unlock()
	var specs []supervise.Spec
	var keep []string
	for _, run := range f.desired.Runs {
		switch spec, known := n.consumers[run.Assignment].running(); {
		case spec != nil:
			specs = append(specs, *spec)
		case !known:
			keep = append(keep, run.Assignment)
		}
	}
	n.cfg.Processes.Set(specs, keep)
	n.store.view(func(s *raftfsm.State) { n.noteProcesses(s, f.desired.Runs) })
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
		n.cfg.Host.Expel(id)
	}
	for _, id := range sortedKeys(f.members) {
		if err := n.local.SetAddress(id, f.members[id]); err != nil {
			n.cfg.Log.Error("remember the members", "err", err)
			return
		}
	}
}

// layBus gives the bus its layout: routes, keys, grants and what is answered
// here.
func (n *Peer) layBus() {
	var l bus.Layout
	var err error
	n.store.view(func(s *raftfsm.State) { l, err = n.layout(s, s.Desired(n.id())) })
	if err == nil {
		err = n.cfg.Bus.Apply(l)
	}
	if err != nil {
		n.cfg.Log.Error("lay out the bus", "err", err)
	}
}

func (n *Peer) passServices(f facts) {
	n.mu.Lock()
	defer n.mu.Unlock()
	wanted := map[string]bool{}
	for _, spec := range f.desired.Provides {
		id := raftfsm.ProviderID(spec.Assignment, spec.Kind)
		wanted[id] = true
		svc := n.services[id]
		if svc == nil || !reflect.DeepEqual(svc.spec, spec) {
			if svc != nil {
				svc.close()
			}
			svc = n.newService(spec)
			n.services[id] = svc
		}
		svc.worker.set(svc.tasks(f.jobs[id]))
	}
	for id, svc := range n.services {
		if !wanted[id] {
			svc.close()
			delete(n.services, id)
		}
	}
}

func (n *Peer) passConsumers(f facts) {
	n.mu.Lock()
	defer n.mu.Unlock()
	wanted := map[string]bool{}
	for _, run := range f.desired.Runs {
		wanted[run.Assignment] = true
		c := n.consumers[run.Assignment]
		if c == nil {
			c = n.newConsumer(run.Assignment)
			n.consumers[run.Assignment] = c
		}
		c.set(run, f.needs[run.Assignment])
	}
	for name, c := range n.consumers {
		if !wanted[name] {
			c.close()
			delete(n.consumers, name)
			if err := supervise.Undeliver(n.cfg.BindingRoot, name); err != nil {
				n.cfg.Log.Error("remove binding files", "assignment", name, "err", err)
			}
		}
	}
}
