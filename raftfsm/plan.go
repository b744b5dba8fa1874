package raftfsm

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
)

// Effects of a plan's change.
const (
	EffectMint     = "mint"     // a credential is made
	EffectWithdraw = "withdraw" // logins are ended; the data is kept
	EffectStart    = "start"
	EffectRestart  = "restart"
	EffectStop     = "stop"
	EffectName     = "name" // a seat gets or changes its holder
	EffectWait     = "wait" // accepted, and something must appear before it goes on
	EffectRecord   = "record"
)

// Change is one thing that a command would do.
type Change struct {
	Effect string
	What   string // binding, assignment, seat or module
	Name   string
	Nodes  []string // names of the machines that it touches, sorted
	Text   string   // one line for a person
}

// Plan is what a command would change.
type Plan struct {
	At      uint64 // Mesh.Changed that it was made at; push refuses with At when it has moved on
	Changes []Change
	Nodes   []string // every machine whose desired state changes, sorted
}

// Preview applies c to a copy of s and returns the difference, for every node.
func (s *State) Preview(h Header, c Command) (Plan, *Rejection) {
	after := s.Clone()
	if r := after.Apply(s.Index+1, Entry{h, c}); r.Rejection != nil {
		return Plan{}, r.Rejection
	}
	p := Plan{At: s.Mesh.Changed}
	p.bindings(s, after)
	p.assignments(s, after)
	p.seats(s, after)
	p.modules(s, after)
	touched := map[string]bool{}
	for _, c := range p.Changes {
		for _, n := range c.Nodes {
			touched[n] = true
		}
	}
	for _, id := range sorted(after.Nodes) {
		if !reflect.DeepEqual(s.Desired(id), after.Desired(id)) {
			touched[after.NodeName(id)] = true
		}
	}
	p.Nodes = slices.Sorted(maps.Keys(touched))
	return p, nil
}

func (p *Plan) add(effect, what, name string, nodes []string, format string, args ...any) {
	slices.Sort(nodes)
	p.Changes = append(p.Changes, Change{effect, what, name, slices.Compact(nodes), fmt.Sprintf(format, args...)})
}

func (p *Plan) bindings(before, after *State) {
	for _, id := range both(before.Bindings, after.Bindings) {
		old, was := before.Bindings[id]
		b, is := after.Bindings[id]
		if was && old.Provider != "" && (!is || old.Provider != b.Provider || old.Kind != b.Kind) {
			nodes := before.homes(old.Provider, old.Consumer)
			if len(old.Credentials) > 0 {
				p.add(EffectWithdraw, "binding", id, nodes, "the login of %s at %s is ended, its data is kept", id, old.Provider)
			} else {
				p.add(EffectRecord, "binding", id, nodes, "%s is no longer bound to %s", id, old.Provider)
			}
		}
		switch {
		case !is || was && old.Provider == b.Provider && old.Kind == b.Kind:
		case b.Provider == "":
			p.add(EffectWait, "binding", id, after.homes(b.Consumer), "%s stays unbound: %s", id, b.Refusal)
		case !after.provides(b.Provider, b.Kind):
			p.add(EffectWait, "binding", id, after.homes(b.Consumer), "%s waits for %s, which is not there yet", id, b.Provider)
		default:
			_, kept := before.Resources[b.Resource]
			data := "a new " + b.Kind
			if kept {
				data = "the " + b.Kind + " that it had"
			}
			p.add(EffectMint, "binding", id, after.homes(b.Provider, b.Consumer), "%s gets a login on %s at %s on %s (%s)", id, data, b.Provider, after.NodeName(after.Assignments[b.Provider].Node), b.Chosen)
		}
	}
}

// homes are the names of the nodes of these assignments.
func (s *State) homes(assignments ...string) []string {
	var out []string
	for _, name := range assignments {
		if a, ok := s.Assignments[name]; ok {
			out = append(out, s.NodeName(a.Node))
		}
	}
	return out
}

func (p *Plan) assignments(before, after *State) {
	for _, name := range both(before.Assignments, after.Assignments) {
		old, was := before.Assignments[name]
		a, is := after.Assignments[name]
		runs := is && !after.Modules[a.Module].Run.External()
		ran := was && !before.Modules[old.Module].Run.External()
		switch {
		case !is:
			verb := "is removed"
			if ran {
				verb = "is stopped and removed"
			}
			p.add(EffectStop, "assignment", name, before.homes(name), "%s %s", name, verb)
		case !was && runs:
			p.add(EffectStart, "assignment", name, after.homes(name), "%s is started on %s once its bindings are delivered", name, after.NodeName(a.Node))
		case !was:
			p.add(EffectRecord, "assignment", name, after.homes(name), "%s is on %s; no process of ours", name, after.NodeName(a.Node))
		case old.Node != a.Node:
			p.add(EffectRestart, "assignment", name, append(before.homes(name), after.homes(name)...), "%s moves to %s", name, after.NodeName(a.Node))
		case runs && !reflect.DeepEqual(launch(before.effective(old)), launch(after.effective(a))):
			p.add(EffectRestart, "assignment", name, after.homes(name), "%s is restarted: what it runs changed", name)
		case old.Revision != a.Revision:
			p.add(EffectRecord, "assignment", name, after.homes(name), "%s changes and goes on running", name)
		}
	}
}

// launch is the part of a module whose change needs a restart of its process.
type launchSpec struct {
	Run    Run
	Env    map[string]string
	Limits *Limits
}

func launch(m Module) launchSpec { return launchSpec{m.Run, m.Env, m.Limits} }

func (p *Plan) seats(before, after *State) {
	for _, name := range both(before.Seats, after.Seats) {
		old, was := before.Seats[name]
		seat, is := after.Seats[name]
		switch {
		case !is:
			p.add(EffectRecord, "seat", name, before.homes(old.Holder), "seat %s is removed", name)
		case seat.Scope == ScopeMesh && seat.Holder == "" && seat.Want != "":
			p.add(EffectName, "seat", name, after.homes(seat.Want), "seat %s is to be held by %s", name, seat.Want)
		case seat.Scope == ScopeMesh && seat.Want != "" && seat.Want != seat.Holder && seat.Want != old.Want:
			p.add(EffectName, "seat", name, after.homes(seat.Holder, seat.Want), "seat %s moves from %s to %s", name, seat.Holder, seat.Want)
		case seat.Holder != old.Holder:
			p.add(EffectName, "seat", name, before.homes(old.Holder), "seat %s loses its holder %s", name, old.Holder)
		case !was:
			p.add(EffectRecord, "seat", name, nil, "seat %s is new", name)
		case !reflect.DeepEqual(old, seat):
			p.add(EffectRecord, "seat", name, after.homes(seat.Holder), "seat %s changes", name)
		}
	}
}

func (p *Plan) modules(before, after *State) {
	for _, name := range both(before.Modules, after.Modules) {
		_, was := before.Modules[name]
		_, is := after.Modules[name]
		switch {
		case !is:
			p.add(EffectRecord, "module", name, nil, "module %s is removed", name)
		case !was:
			p.add(EffectRecord, "module", name, nil, "module %s is new", name)
		case !reflect.DeepEqual(before.Modules[name], after.Modules[name]):
			p.add(EffectRecord, "module", name, nil, "module %s changes", name)
		}
	}
}

// both returns the keys of either map, in order.
func both[V any](a, b map[string]V) []string {
	keys := append(sorted(a), sorted(b)...)
	slices.Sort(keys)
	return slices.Compact(keys)
}
