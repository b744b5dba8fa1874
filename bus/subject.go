package bus

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// tokenPattern is what a name in a subject may look like: a name of the mesh, or MODULE@NODE. It
// leaves out everything that NATS gives a meaning to inside a subject: dots, stars, '>' and blanks.
var tokenPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}(@[a-z0-9][a-z0-9-]{0,39})?$`)

// checkToken is the only judge of what may become a token of a subject.
func checkToken(what, token string) error {
	if tokenPattern.MatchString(token) {
		return nil
	}
	return fmt.Errorf("%s %q is not a name: want [a-z0-9][a-z0-9-]{0,39}, for an assignment also NAME@NODE", what, token)
}

// Target is what a call is addressed to. The fields that are set say which of three it is:
//
//	Seat, Name               a verb of a mesh seat, wherever the log says that it is held
//	Node, Seat, Name         a verb of a node seat, as that node answers it
//	Node, Assignment, Name   a tool of an assignment on that node
type Target struct {
	Seat       string
	Node       string
	Assignment string
	Name       string
}

// String is the form that people type: SEAT.VERB, NODE/SEAT.VERB or NODE/ASSIGNMENT.TOOL.
func (t Target) String() string {
	who := t.Seat + t.Assignment
	if t.Node != "" {
		who = t.Node + "/" + who
	}
	return who + "." + t.Name
}

func (t Target) meshSeat() bool { return t.Seat != "" && t.Node == "" }

func (t Target) validate() error {
	faults := []error{checkToken("verb or tool", t.Name)}
	switch {
	case t.Seat != "" && t.Assignment != "":
		faults = append(faults, errors.New("names a seat and an assignment: want one of them"))
	case t.Seat != "":
		faults = append(faults, checkToken("seat", t.Seat))
	default:
		faults = append(faults, checkToken("assignment", t.Assignment), checkToken("node", t.Node))
	}
	if t.Node != "" {
		faults = append(faults, checkToken("node", t.Node))
	}
	if err := errors.Join(faults...); err != nil {
		return fmt.Errorf("target %q: %w", t.String(), err)
	}
	return nil
}

// Suffix is the target without its place: what a module sees behind its own private prefix.
func (t Target) Suffix() string {
	if t.Seat != "" {
		return "seat." + t.Seat + "." + t.Name
	}
	return "tool." + t.Name
}

// at is the subject, in the account MESH, on which the given node serves the target.
func (t Target) at(node string) string {
	if t.Seat != "" {
		return "node." + node + ".seat." + t.Seat + "." + t.Name
	}
	return "node." + node + "." + t.Assignment + "." + t.Name
}

// CallSubject is the subject, in the account MOD, on which the caller asks its own meshd for t.
func (t Target) CallSubject(caller Caller) string {
	own := "call." + caller.Node + "." + caller.Assignment
	switch {
	case t.meshSeat():
		return own + ".seat." + t.Seat + "." + t.Name
	case t.Seat != "":
		return own + ".nodeseat." + t.Node + "." + t.Seat + "." + t.Name
	default:
		return own + ".tool." + t.Node + "." + t.Assignment + "." + t.Name
	}
}

// parseCall is the inverse of CallSubject.
func parseCall(subject string) (Caller, Target, error) {
	part := strings.Split(subject, ".")
	if len(part) < 6 || part[0] != "call" {
		return Caller{}, Target{}, fmt.Errorf("subject %q is not a call", subject)
	}
	caller, rest := Caller{Node: part[1], Assignment: part[2]}, part[4:]
	var t Target
	switch {
	case part[3] == "seat" && len(rest) == 2:
		t = Target{Seat: rest[0], Name: rest[1]}
	case part[3] == "nodeseat" && len(rest) == 3:
		t = Target{Node: rest[0], Seat: rest[1], Name: rest[2]}
	case part[3] == "tool" && len(rest) == 3:
		t = Target{Node: rest[0], Assignment: rest[1], Name: rest[2]}
	default:
		return caller, Target{}, fmt.Errorf("subject %q is not a call", subject)
	}
	return caller, t, t.validate()
}

// Caller is who calls: an assignment on a node, or, without an assignment, an operator there.
type Caller struct {
	Node       string
	Assignment string
}

// operator stands in the place of an assignment. Its brackets keep it from being one's name.
const operator = "(operator)"

// String is the form of the header Meshd-Caller: NODE/ASSIGNMENT or NODE/(operator).
func (c Caller) String() string {
	if c.Assignment == "" {
		return c.Node + "/" + operator
	}
	return c.Node + "/" + c.Assignment
}

func parseCaller(s string) Caller {
	node, who, _ := strings.Cut(s, "/")
	if who == operator {
		who = ""
	}
	return Caller{Node: node, Assignment: who}
}

// Inbox is the prefix under which an assignment receives its replies. Its client must be told so
// (nats.CustomInboxPrefix): NATS's default, shared by all, would let modules read each other's replies.
func Inbox(node, assignment string) string { return "_I." + node + "." + assignment }

// Private is the prefix of the subjects that an assignment serves for its own meshd: a verb of a seat
// at PREFIX.seat.SEAT.VERB, a tool at PREFIX.tool.TOOL.
func Private(node, assignment string) string { return "m." + node + "." + assignment }

// OperatorInbox is the prefix under which an operator's client receives announcements and replies.
func OperatorInbox(node, name string) string { return "_O." + node + "." + name }

// operatorMark begins what stands in the place of an assignment in the calls of an operator's client. No
// assignment begins with it.
const operatorMark = "_"

// OperatorCalls is the prefix of the subjects on which an operator's client calls: see Target.CallSubject
// for what follows.
func OperatorCalls(node, name string) string { return "call." + node + "." + operatorMark + name }

// client is who published a call, as its subject says.
type client struct {
	Caller
	who   string // for bounds and refusals
	inbox string // the only place that replies to it may go to
}

// clientOf is the client of a call's caller as parseCall read it.
func clientOf(c Caller) client {
	if name, ok := strings.CutPrefix(c.Assignment, operatorMark); ok {
		return client{Caller{Node: c.Node}, operatorLabel(name), OperatorInbox(c.Node, name)}
	}
	return client{c, c.Assignment, Inbox(c.Node, c.Assignment)}
}

// operatorLabel is what an operator's client goes by in refusals.
func operatorLabel(name string) string { return operator + " " + name }

// replies is the prefix under which an assignment answers its own meshd. It is one per assignment so
// that none can answer in the place of another, whatever it guesses.
func replies(node, assignment string) string { return "r." + node + "." + assignment }

// below says whether subject lies under prefix and names exactly one place there.
func below(prefix, subject string) bool {
	rest, ok := strings.CutPrefix(subject, prefix+".")
	return ok && rest != "" && !strings.ContainsAny(rest, "*> \t\r\n")
}
