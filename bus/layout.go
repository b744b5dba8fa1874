package bus

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/nats-io/nkeys"
)

// Layout is the whole desired state of one node's bus: who its peers are, which processes may connect
// and what they may say, what this node answers, and what everybody else does. Once given to Apply it
// must not be changed.
type Layout struct {
	Peers     []Peer
	Modules   []Module
	Operators []Operator
	Services  []Service
	Directory Directory
}

// Peer is another member. Leaving one out closes its routes at once and refuses it from then on.
type Peer struct {
	ID   string // its identity; of two nodes the one with the larger id dials
	Name string
	Addr string // host:port of its routes; empty while unknown, then it is not dialled
	Pin  string // lower-case hex SHA-256 of the DER SubjectPublicKeyInfo of its route certificate
}

// Module is a key that may connect to this node, and what it may call. What it serves follows from its
// name alone.
type Module struct {
	Assignment string
	PublicKey  string // a user's nkey, U...
	Calls      []Target
}

// Operator is a key of an operator's client, which may connect to this node: it sees announcements, and
// calls what an operator may call, which is everything.
type Operator struct {
	Name      string
	PublicKey string
}

// Directory is what the log says about the whole mesh.
type Directory struct {
	Seats map[string]Seat // every mesh seat
	Nodes map[string]Node // every member, by name
}

// Seat is a mesh seat. A zero Holder says that nobody is named.
type Seat struct {
	Verbs      []string
	Idempotent []string // those of Verbs that are idempotent
	Holder     Holder
	Dark       string // why nobody may answer it, as far as the log knows; empty while somebody may
}

// Holder is the assignment that the log names for a mesh seat. Epoch grows with each naming.
type Holder struct {
	Node       string
	Assignment string
	Epoch      uint64
}

func (h Holder) String() string {
	if h.Node == "" {
		return "nobody"
	}
	return fmt.Sprintf("%s/%s, epoch %d", h.Node, h.Assignment, h.Epoch)
}

// Node is what one member answers.
type Node struct {
	Seats map[string][]string // verbs of its node seats
	Tools map[string][]string // tools of its assignments
}

// Scope says what a Service is: a mesh seat held here, a node seat, or the tools of an assignment.
type Scope int

// The scopes.
const (
	ScopeMesh Scope = iota + 1
	ScopeNode
	ScopeTools
)

func (s Scope) String() string {
	switch s {
	case ScopeMesh:
		return "mesh seat"
	case ScopeNode:
		return "node seat"
	case ScopeTools:
		return "tools"
	default:
		return fmt.Sprintf("scope %d", int(s))
	}
}

// Service is something that this node answers. A mesh seat must be the one that the Directory names
// this node for, with that assignment and epoch: a Layout that says otherwise is refused.
type Service struct {
	Scope      Scope
	Seat       string // empty for tools
	Assignment string // whose tools, or which assignment answers the seat
	Verbs      []string
	Epoch      uint64 // of a mesh seat
	Closed     string // why this node does not answer it, although it is named; empty while it does
	Gate       Gate   // optional; asked around every call
	Handler    Handler
}

// Answers reports whether the service would run a call now: it is not closed, and its gate is open.
func (s Service) Answers() bool {
	if s.Closed != "" {
		return false
	}
	if s.Gate == nil {
		return true
	}
	_, leave, err := s.Gate.Enter(s.Seat)
	if err != nil {
		return false
	}
	_, err = leave()
	return err == nil
}

func (s Service) target(name string) Target {
	if s.Scope == ScopeTools {
		return Target{Assignment: s.Assignment, Name: name}
	}
	return Target{Seat: s.Seat, Name: name}
}

// prefix is the subject, in MESH, below which the service is bound at a node.
func (s Service) prefix(node string) string {
	if s.Scope == ScopeTools {
		return "node." + node + "." + s.Assignment
	}
	return "node." + node + ".seat." + s.Seat
}

// label is the service in words, for errors and logs.
func (s Service) label() string {
	if s.Scope == ScopeTools {
		return "assignment " + s.Assignment
	}
	return s.Scope.String() + " " + s.Seat
}

// validate reports every fault of the layout for the node called self.
func (l Layout) validate(self string) error {
	var faults []error
	add := func(what string, errs ...error) {
		if err := errors.Join(errs...); err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", what, err))
		}
	}
	for _, p := range l.Peers {
		add(fmt.Sprintf("peer %q", p.ID), checkToken("node", p.Name), checkPin(p.Pin), checkAddr(p.Addr))
	}
	keys := map[string]string{}
	key := func(owner, public string) error {
		if !nkeys.IsValidPublicUserKey(public) {
			return fmt.Errorf("public key %q is not a user's nkey (U...)", public)
		}
		if first, taken := keys[public]; taken {
			return fmt.Errorf("public key is also that of %s: each needs its own", first)
		}
		keys[public] = owner
		return nil
	}
	for _, m := range l.Modules {
		errs := []error{checkToken("assignment", m.Assignment), key(m.Assignment, m.PublicKey)}
		for _, t := range m.Calls {
			errs = append(errs, t.validate())
		}
		add(fmt.Sprintf("module %q", m.Assignment), errs...)
	}
	for _, o := range l.Operators {
		add(fmt.Sprintf("operator %q", o.Name), checkToken("operator", o.Name), key(o.Name, o.PublicKey))
	}
	bound := map[string]bool{}
	for _, s := range l.Services {
		errs := []error{s.validate(self, l.Directory)}
		if subject := s.prefix(self); bound[subject] {
			errs = append(errs, errors.New("listed twice"))
		} else {
			bound[subject] = true
		}
		add(s.label(), errs...)
	}
	return errors.Join(faults...)
}

func (s Service) validate(self string, d Directory) error {
	faults := []error{checkToken("assignment", s.Assignment)}
	if s.Handler == nil {
		faults = append(faults, errors.New("has no handler"))
	}
	for _, v := range s.Verbs {
		faults = append(faults, checkToken("verb or tool", v))
	}
	switch s.Scope {
	case ScopeTools:
		if s.Seat != "" {
			faults = append(faults, fmt.Errorf("are tools, but name the seat %q", s.Seat))
		}
	case ScopeNode:
		faults = append(faults, checkToken("seat", s.Seat))
	case ScopeMesh:
		faults = append(faults, checkToken("seat", s.Seat))
		here := Holder{Node: self, Assignment: s.Assignment, Epoch: s.Epoch}
		if named := d.Seats[s.Seat].Holder; named != here {
			faults = append(faults, fmt.Errorf("the log names %v, not %v", named, here))
		}
	default:
		faults = append(faults, fmt.Errorf("%v is not known", s.Scope))
	}
	return errors.Join(faults...)
}

// names lists the keys of a map for an error's text.
func names[V any](m map[string]V) string { return list(slices.Sorted(maps.Keys(m))) }

func list(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	const most = 20 // enough to find a typing error in; the rest is counted
	out := ""
	for i, n := range names {
		if i == most {
			return fmt.Sprintf("%s and %d more", out, len(names)-most)
		}
		if i > 0 {
			out += ", "
		}
		out += n
	}
	return out
}
