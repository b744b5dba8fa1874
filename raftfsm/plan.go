package raftfsm

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"
)

// Effects of a plan's change.
const (
	EffectMint     = "mint"     // a credential is made
	EffectWithdraw = "withdraw" // logins are ended; the data is kept
	EffectStart    = "start"    // a process is started
	EffectRestart  = "restart"  // a process is started anew
	EffectStop     = "stop"     // a process is stopped, or what has none is removed
	EffectName     = "name"     // a seat gets or changes its holder
	EffectWait     = "wait"     // accepted, and something must appear before it goes on
	EffectRecord   = "record"   // the mesh knows something else, and nothing is done
)

// Change is one thing that a command would do.
type Change struct {
	Effect string
	What   string // WhatNode, WhatBinding, WhatAssignment, WhatSeat or WhatModule
	Name   string
	Nodes  []string // names of the machines that it touches, sorted
	Text   string   // one line for a person
}

// Plan is what a command would change. One without changes changes nothing
// that is desired of any node.
type Plan struct {
	At      uint64   // Mesh.Changed that it was made at: a push with this At is refused once the mesh has moved on
	Changes []Change // nodes, bindings, assignments, seats, modules; each by name
	Nodes   []string // names of every machine whose desired state changes, sorted
}

// Preview applies c to a copy of s and returns the difference, for every node.
// It takes c as the log would give it back.
func (s *State) Preview(h Header, c Command) (Plan, *Rejection) {
	c, err := canonical(c)
	if err != nil {
		return Plan{}, reject("bad-command", "", "the command cannot be written to the log: "+err.Error(), "correct what it names")
	}
	after := s.Clone()
	if r := after.Apply(s.Index+1, Entry{h, c}); r.Rejection != nil {
		return Plan{}, r.Rejection
	}
	return difference(s, after), nil
}

// difference is what leads from one state to another.
func difference(before, after *State) Plan {
	p := Plan{At: before.Mesh.Changed}
	p.nodes(before, after)
	p.bindings(before, after)
	p.assignments(before, after)
	p.seats(before, after)
	p.modules(before, after)
	touched := map[string]bool{}
	for _, c := range p.Changes {
		for _, n := range c.Nodes {
			touched[n] = true
		}
	}
	for id, n := range after.Nodes {
		if !touched[n.Name] && !reflect.DeepEqual(before.Desired(id).planned(), after.Desired(id).planned()) {
			touched[n.Name] = true
		}
	}
	p.Nodes = slices.Sorted(maps.Keys(touched))
	return p
}

// planned is d without what comes and goes with sessions, which is no part of a
// plan: epochs, and why a seat is dark.
func (d Desired) planned() Desired {
	d.Holders = maps.Clone(d.Holders)
	for name, h := range d.Holders {
		h.Epoch, h.Dark = 0, ""
		d.Holders[name] = h
	}
	d.Seats = slices.Clone(d.Seats)
	for i := range d.Seats {
		d.Seats[i].Epoch = 0
	}
	return d
}

// planned is the seat without what comes and goes with sessions.
func (s Seat) planned() Seat {
	s.Epoch, s.Session, s.Since = 0, 0, time.Time{}
	return s
}

func (p *Plan) add(effect, what, name string, nodes []string, format string, args ...any) {
	slices.Sort(nodes)
	p.Changes = append(p.Changes, Change{effect, what, name, slices.Compact(nodes), fmt.Sprintf(format, args...)})
}

func (p *Plan) nodes(before, after *State) {
	for _, id := range both(before.Nodes, after.Nodes) {
		switch {
		case !has(after.Nodes, id):
			p.add(EffectRecord, WhatNode, before.NodeName(id), []string{before.NodeName(id)}, "node %s is removed", before.NodeName(id))
		case !has(before.Nodes, id):
			p.add(EffectRecord, WhatNode, after.NodeName(id), []string{after.NodeName(id)}, "node %s joins", after.NodeName(id))
		}
	}
}

func (p *Plan) bindings(before, after *State) {
	for _, id := range both(before.Bindings, after.Bindings) {
		old, was := before.Bindings[id]
		b, is := after.Bindings[id]
		moved := was && is && len(old.Credentials) > 0 && len(b.Credentials) == 0
		if was && is && old.Provider == b.Provider && old.Kind == b.Kind && !moved {
			if old.Refusal != b.Refusal {
				p.add(EffectWait, WhatBinding, id, after.homes(b.Consumer), "%s stays unbound: %s", id, b.Refusal)
			} else if old.Naming != b.Naming || old.Proof != b.Proof {
				p.add(EffectRecord, WhatBinding, id, after.homes(b.Consumer), "%s goes on with %s, on other terms", id, b.Provider)
			}
			continue
		}
		switch {
		case !was || old.Provider == "":
		case len(old.Credentials) > 0:
			p.add(EffectWithdraw, WhatBinding, id, before.homes(old.Provider, old.Consumer), "the login of %s at %s is ended, its data is kept", id, old.Provider)
		case !moved:
			p.add(EffectRecord, WhatBinding, id, before.homes(old.Provider, old.Consumer), "%s is no longer bound to %s", id, old.Provider)
		}
		switch {
		case !is:
		case b.Provider == "":
			p.add(EffectWait, WhatBinding, id, after.homes(b.Consumer), "%s stays unbound: %s", id, b.Refusal)
		default:
			p.add(EffectMint, WhatBinding, id, after.homes(b.Provider, b.Consumer), "%s gets a login on %s at %s on %s (%s)",
				id, before.kept(b), b.Provider, after.NodeName(after.Assignments[b.Provider].Node), b.Chosen)
		}
	}
}

// kept names what a new login of b would work on.
func (s *State) kept(b Binding) string {
	if s.Resources[b.Resource].Made {
		return "the " + b.Kind + " that is there"
	}
	return "a new " + b.Kind
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
		oldModule, module := before.Modules[old.Module].with(old), after.Modules[a.Module].with(a)
		ran, runs := was && !oldModule.Run.External(), is && !module.Run.External()
		on := after.homes(name)
		switch {
		case !is && ran:
			p.add(EffectStop, WhatAssignment, name, before.homes(name), "%s is stopped and removed", name)
		case !is:
			p.add(EffectStop, WhatAssignment, name, before.homes(name), "%s is removed", name)
		case was && old.Node != a.Node:
			p.add(EffectRestart, WhatAssignment, name, append(on, before.homes(name)...), "%s moves from %s to %s", name, before.NodeName(old.Node), after.NodeName(a.Node))
		case runs && !ran:
			p.add(EffectStart, WhatAssignment, name, on, "%s is started on %s%s", name, after.NodeName(a.Node), onceDelivered(module))
		case ran && !runs:
			p.add(EffectStop, WhatAssignment, name, on, "%s is stopped, and is external from now on", name)
		case !was:
			p.add(EffectRecord, WhatAssignment, name, on, "%s is on %s, and no process is started for it", name, after.NodeName(a.Node))
		case runs && old.Revision != a.Revision:
			p.add(EffectRestart, WhatAssignment, name, on, "%s is restarted: what it is started with changed", name)
		case runs && rebound(before, after, name) && restarts(module.OnRotate):
			p.add(EffectRestart, WhatAssignment, name, on, "%s is restarted with its new credentials", name)
		case !same(oldModule, module) || !same(old, a):
			p.add(EffectRecord, WhatAssignment, name, on, "%s changes and goes on running", name)
		}
	}
}

func onceDelivered(m Module) string {
	if len(m.Requires) == 0 {
		return ""
	}
	return " once its bindings are delivered"
}

// rebound reports whether the assignment gets another credential.
func rebound(before, after *State, assignment string) bool {
	return slices.ContainsFunc(after.bindingsOf(assignment), func(id string) bool {
		b := after.Bindings[id]
		return b.Provider != "" && b.Resource != before.Bindings[id].Resource
	})
}

// restarts reports whether a module is restarted for a new credential.
func restarts(onRotate string) bool {
	return onRotate != "none" && !strings.HasPrefix(onRotate, "signal ")
}

func (p *Plan) seats(before, after *State) {
	for _, name := range both(before.Seats, after.Seats) {
		old, was := before.Seats[name]
		seat, is := after.Seats[name]
		wanted := is && seat.Want != "" && seat.Want != seat.Holder && (seat.Want != old.Want || seat.Holder != old.Holder)
		switch {
		case !is:
			p.add(EffectRecord, WhatSeat, name, before.homes(old.Holder), "seat %s is removed", name)
		case wanted && !has(after.Assignments, seat.Want):
			p.add(EffectWait, WhatSeat, name, after.homes(seat.Holder), "seat %s waits for its holder %s, which is not there yet", name, seat.Want)
		case wanted && old.Holder != "":
			p.add(EffectName, WhatSeat, name, append(after.homes(seat.Want), before.homes(old.Holder)...), "seat %s moves from %s to %s", name, old.Holder, seat.Want)
		case wanted:
			p.add(EffectName, WhatSeat, name, after.homes(seat.Want), "seat %s is to be held by %s", name, seat.Want)
		case seat.Holder != old.Holder && old.Holder != "":
			p.add(EffectName, WhatSeat, name, before.homes(old.Holder), "seat %s loses its holder %s", name, old.Holder)
		case !was:
			p.add(EffectRecord, WhatSeat, name, nil, "seat %s is new", name)
		case !same(old.planned(), seat.planned()):
			p.add(EffectRecord, WhatSeat, name, after.homes(seat.Holder), "seat %s changes", name)
		}
	}
}

func (p *Plan) modules(before, after *State) {
	for _, name := range both(before.Modules, after.Modules) {
		old, was := before.Modules[name]
		m, is := after.Modules[name]
		switch {
		case !is:
			p.add(EffectRecord, WhatModule, name, nil, "module %s is removed", name)
		case !was:
			p.add(EffectRecord, WhatModule, name, nil, "module %s is new", name)
		case !same(old, m):
			p.add(EffectRecord, WhatModule, name, nil, "module %s changes", name)
		}
	}
	for _, name := range both(before.Everywhere, after.Everywhere) {
		rule, is := after.Everywhere[name]
		if is && !same(before.Everywhere[name], rule) {
			p.add(EffectRecord, WhatModule, name, nil, "module %s is on all nodes, and on those that join later", name)
		}
	}
}

// both returns the keys of either map, in order.
func both[V any](a, b map[string]V) []string {
	keys := append(sorted(a), sorted(b)...)
	slices.Sort(keys)
	return slices.Compact(keys)
}
