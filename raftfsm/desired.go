package raftfsm

import (
	"maps"
	"slices"
	"strings"
)

// Desired is what the state asks of one node. It is a pure function of the
// state: what a module may publish and answer follows from here and from
// nothing that a module claims.
type Desired struct {
	Runs      []RunSpec           // assignments on this node, by name
	Provides  []ProviderSpec      // providers on this node
	Seats     []SeatService       // seats answered here: mesh seats held, while the node's lease grants them, and node seats
	Tools     []ToolService       // tools of the assignments here
	Grants    []Grant             // what each assignment here may call
	Holders   map[string]Holder   // every mesh seat: who answers it
	NodeSeats map[string][]string // every node seat: its verbs
}

// RunSpec is one assignment as it is to run: the module with the assignment's
// overrides laid over it.
type RunSpec struct {
	Assignment string
	Module     Module
	Revision   uint64
	Bindings   []string // ids, one per requirement
}

// ProviderSpec is one provider on this node.
type ProviderSpec struct {
	Assignment string
	Kind       string
	Provide    Provide
}

// SeatService is one seat answered on this node by one assignment.
type SeatService struct {
	Seat       string
	Scope      string
	Assignment string
	Epoch      uint64 // 0 for node seats
	Verbs      map[string]Handler
}

// ToolService is the tools of one assignment.
type ToolService struct {
	Assignment string
	Module     string
	Tools      map[string]Handler
}

// Holder is who the log names as a mesh seat's holder.
type Holder struct {
	Node       string // name; "" when nobody holds it
	Assignment string
	Epoch      uint64
	Verbs      []string
	Idempotent []string // idempotent verbs
	Dark       string   // why nobody may answer it, for users; "" when Assignment may, as long as its node's lease lasts
}

// Grant is what one assignment may call.
type Grant struct {
	Assignment string
	Calls      []Target
}

// Target is something to call: a mesh seat's verb, a node's seat's verb, or a
// module's tool on a node.
type Target struct {
	Node       string `json:",omitempty"` // name; "" for a mesh seat
	Seat       string `json:",omitempty"`
	Assignment string `json:",omitempty"` // with Name a tool
	Name       string // verb or tool
}

// ParseTarget reads SEAT.VERB, NODE/SEAT.VERB or NODE/MODULE.TOOL. What follows
// a node is put into Seat: only the state knows which of the two it is.
func ParseTarget(s string) (Target, bool) {
	var t Target
	rest := s
	if node, after, ok := strings.Cut(s, "/"); ok {
		t.Node, rest = node, after
		if !nameRule.MatchString(node) {
			return t, false
		}
	}
	var ok bool
	t.Seat, t.Name, ok = strings.Cut(rest, ".")
	return t, ok && assignmentRule(t.Seat) && nameRule.MatchString(t.Name)
}

// assignmentRule accepts a name and MODULE@NODE.
func assignmentRule(s string) bool {
	module, node, at := strings.Cut(s, "@")
	return nameRule.MatchString(module) && (!at || nameRule.MatchString(node))
}

// Targets resolves what ParseTarget read: a seat as it is, a module's name to
// its assignments on that node. It is empty when there is no such thing, which
// is no fault: it may come with a later push.
func (s *State) Targets(t Target) []Target {
	seat, isSeat := s.Seats[t.Seat]
	isVerb := isSeat && slices.Contains(seat.Verbs, t.Name)
	if t.Node == "" {
		if isVerb && seat.Scope == ScopeMesh {
			return []Target{t}
		}
		return nil
	}
	n, ok := s.NodeNamed(t.Node)
	switch {
	case !ok:
		return nil
	case isVerb && seat.Scope == ScopeNode:
		return []Target{t}
	}
	var out []Target
	for _, name := range s.assignmentsOn(n.ID) {
		m := s.Modules[s.Assignments[name].Module]
		if _, has := m.Tools[t.Name]; has && (m.Name == t.Seat || name == t.Seat) {
			out = append(out, Target{Node: t.Node, Assignment: name, Name: t.Name})
		}
	}
	return out
}

// assignmentsOn lists the assignments on the node, in order.
func (s *State) assignmentsOn(node string) []string {
	var out []string
	for name, a := range s.Assignments {
		if a.Node == node {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Desired derives what node id is to do.
func (s *State) Desired(id string) Desired {
	d := Desired{Holders: map[string]Holder{}, NodeSeats: map[string][]string{}}
	here := s.assignmentsOn(id)
	for _, name := range here {
		a := s.Assignments[name]
		m := s.Modules[a.Module].with(a)
		d.Runs = append(d.Runs, RunSpec{Assignment: name, Module: m, Revision: a.Revision, Bindings: s.bindingsOf(name)})
		for _, kind := range sorted(m.Provides) {
			d.Provides = append(d.Provides, ProviderSpec{Assignment: name, Kind: kind, Provide: m.Provides[kind]})
		}
		if len(m.Tools) > 0 {
			d.Tools = append(d.Tools, ToolService{Assignment: name, Module: m.Name, Tools: m.Tools})
		}
		grant := Grant{Assignment: name}
		for _, call := range m.Calls {
			if t, ok := ParseTarget(call); ok {
				grant.Calls = append(grant.Calls, s.Targets(t)...)
			}
		}
		d.Grants = append(d.Grants, grant)
	}
	for _, name := range sorted(s.Seats) {
		s.desiredSeat(&d, s.Seats[name], id, here)
	}
	return d
}

func (s *State) desiredSeat(d *Desired, seat Seat, id string, here []string) {
	if seat.Scope == ScopeMesh {
		holder := Holder{Epoch: seat.Epoch, Verbs: seat.Verbs, Idempotent: seat.Idempotent, Dark: s.Dark(seat)}
		if a, ok := s.Assignments[seat.Holder]; ok {
			holder.Node, holder.Assignment = s.NodeName(a.Node), a.Name
			if a.Node == id {
				d.Seats = append(d.Seats, s.service(seat, a))
			}
		}
		d.Holders[seat.Name] = holder
		return
	}
	d.NodeSeats[seat.Name] = seat.Verbs
	for _, name := range here {
		if s.claims(name, seat.Name) {
			d.Seats = append(d.Seats, s.service(seat, s.Assignments[name]))
			return // one answers a seat on a node: the first by name
		}
	}
}

// service says how the assignment answers the seat's verbs. A module that
// provides the kind that a seat delivers needs not say: the kind's provisioner
// answers what it does not.
func (s *State) service(seat Seat, a Assignment) SeatService {
	m := s.Modules[a.Module]
	svc := SeatService{Seat: seat.Name, Scope: seat.Scope, Assignment: a.Name, Verbs: map[string]Handler{}}
	if seat.Scope == ScopeMesh {
		svc.Epoch = seat.Epoch
	}
	_, provides := m.Provides[seat.Delivers]
	for _, verb := range seat.Verbs {
		h, written := m.Serves[seat.Name][verb]
		switch {
		case written:
			svc.Verbs[verb] = h
		case provides:
			svc.Verbs[verb] = Handler{Builtin: seat.Delivers}
		default:
			svc.Verbs[verb] = Handler{Bus: true}
		}
	}
	return svc
}

// with is the module with the assignment's overrides, key by key.
func (m Module) with(a Assignment) Module {
	if len(a.Env) > 0 {
		env := map[string]string{}
		maps.Copy(env, m.Env)
		maps.Copy(env, a.Env)
		m.Env = env
	}
	if a.Health != nil {
		m.Health = a.Health
	}
	if a.Limits != nil {
		m.Limits = a.Limits
	}
	if a.Address != "" && len(m.Provides) > 0 {
		provides := maps.Clone(m.Provides)
		for kind, p := range provides {
			p.Address = a.Address
			provides[kind] = p
		}
		m.Provides = provides
	}
	return m
}

// launch is the part of a module whose change needs a restart of its process.
type launch struct {
	Run    Run
	Env    map[string]string
	Limits *Limits
}

func (m Module) launch() launch { return launch{m.Run, m.Env, m.Limits} }
