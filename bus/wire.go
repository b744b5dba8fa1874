package bus

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// Headers of requests and replies. Those named Nats-Service-* are the error convention of the NATS
// services protocol (ADR-32), so that a stock client sees an error as one.
const (
	headerCaller   = "Meshd-Caller"      // request: NODE/ASSIGNMENT, stamped by the caller's meshd
	headerDeadline = "Meshd-Deadline-ms" // request: milliseconds that are left
	headerSeat     = "Meshd-Seat"        // both: the seat, absent for a tool
	headerEpoch    = "Meshd-Epoch"       // both: the epoch under which it is answered
	headerNode     = "Meshd-Node"        // reply: the node that answered
	headerLeft     = "Meshd-Left-us"     // reply: microseconds since it was made in which nobody else can answer
	headerHolder   = "Meshd-Holder"      // reply not-the-holder: NODE/ASSIGNMENT/EPOCH named now
	headerCode     = "Meshd-Error"       // reply: one of the codes below
	headerText     = "Nats-Service-Error"
	headerStatus   = "Nats-Service-Error-Code"
)

const (
	// maxPayload bounds a request and a reply, in bytes: a seat is a control plane, bulk goes elsewhere.
	maxPayload = 1 << 20
	// maxHeaders is what the server allows on top of it for our own headers.
	maxHeaders = 64 << 10
	// maxErrorText bounds the text of an error on the wire, in bytes.
	maxErrorText = 2 << 10
	// defaultDeadline is for a call that names none; maxDeadline cuts one that asks for more.
	defaultDeadline = 5 * time.Second
	maxDeadline     = 60 * time.Second
)

// Code says what became of a call that was not answered.
type Code string

// The codes. After those of the first group the handler has certainly not run; after those of the
// second it has, or may have.
const (
	CodeNotHolder   Code = "not-the-holder" // the node asked does not hold the seat, or not any more
	CodeNoSuchVerb  Code = "no-such-verb"   // the text lists those that there are
	CodeNoHolder    Code = "no-holder"      // the log names nobody for the seat
	CodeUnknown     Code = "unknown"        // the log has no such seat, node or assignment
	CodeUnreachable Code = "unreachable"    // the node that should answer is silent, or stopping
	CodeNotServed   Code = "not-served"     // the module is not connected, or does not serve it
	CodeBusy        Code = "busy"           // too many calls at once
	CodeRefused     Code = "refused"        // not a well-formed call

	CodeFailed    Code = "handler-failed"
	CodeTooLarge  Code = "too-large" // the request (did not run) or the reply (did)
	CodeTimedOut  Code = "timed-out"
	CodeUncertain Code = "uncertain" // lost on the way, or the seat was lost while the handler ran
	CodeOldEpoch  Code = "old-epoch" // answered by a holder that has been replaced since
)

// ErrOldEpoch is what errors.Is finds in the refusal of a reply older than one already seen.
var ErrOldEpoch = &CallError{Code: CodeOldEpoch}

// CallError is the only kind of error that Call, Forward and a served reply carry.
type CallError struct {
	Code Code
	Text string
}

func (e *CallError) Error() string { return string(e.Code) + ": " + e.Text }

// Is matches a CallError without a text by its code alone.
func (e *CallError) Is(target error) bool {
	want, ok := target.(*CallError)
	return ok && want.Text == "" && want.Code == e.Code
}

func fail(code Code, format string, args ...any) *CallError {
	return &CallError{Code: code, Text: fmt.Sprintf(format, args...)}
}

// status gives the nearest HTTP number, which is what stock clients of NATS services expect.
func (c Code) status() int {
	switch c {
	case CodeNoSuchVerb, CodeUnknown:
		return 404
	case CodeRefused:
		return 403
	case CodeTooLarge:
		return 413
	case CodeBusy:
		return 429
	case CodeNotHolder, CodeNoHolder, CodeUnreachable, CodeNotServed:
		return 503
	case CodeTimedOut:
		return 504
	default:
		return 500
	}
}

// Reply is an answer, and whose it is. Epoch is 0 for a tool.
type Reply struct {
	Data  []byte
	Seat  string
	Epoch uint64
	Node  string
	Left  time.Duration // since it was made, in which nobody else can answer; 0 where no Gate says
}

// encode makes the message that carries r, or err in its place.
func encode(subject string, r Reply, err error) *nats.Msg {
	m := nats.NewMsg(subject)
	m.Header.Set(headerNode, r.Node)
	if r.Seat != "" {
		m.Header.Set(headerSeat, r.Seat)
		m.Header.Set(headerEpoch, strconv.FormatUint(r.Epoch, 10))
	}
	if r.Left > 0 {
		m.Header.Set(headerLeft, strconv.FormatInt(r.Left.Microseconds(), 10))
	}
	if err == nil {
		m.Data = r.Data
		return m
	}
	var ce *CallError
	if !errors.As(err, &ce) {
		ce = fail(CodeFailed, "%v", err)
	}
	m.Header.Set(headerCode, string(ce.Code))
	m.Header.Set(headerText, shorten(ce.Text))
	m.Header.Set(headerStatus, strconv.Itoa(ce.Code.status()))
	return m
}

// decode is the inverse of encode.
func decode(m *nats.Msg) (Reply, error) {
	r := Reply{Data: m.Data, Seat: m.Header.Get(headerSeat), Node: m.Header.Get(headerNode)}
	if s := m.Header.Get(headerEpoch); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			return Reply{}, fail(CodeUncertain, "reply of node %q: header %s is %q, not a number", r.Node, headerEpoch, s)
		}
		r.Epoch = n
	}
	if s := m.Header.Get(headerLeft); s != "" {
		us, err := strconv.ParseInt(s, 10, 32) // half an hour: no lease is longer
		if err != nil || us < 0 {
			return Reply{}, fail(CodeUncertain, "reply of node %q: header %s is %q, not a number of microseconds", r.Node, headerLeft, s)
		}
		r.Left = time.Duration(us) * time.Microsecond
	}
	if code := m.Header.Get(headerCode); code != "" {
		return r, &CallError{Code: Code(code), Text: m.Header.Get(headerText)}
	}
	return r, nil
}

// shorten makes an error's text fit into one header, and says so where it cut.
func shorten(text string) string {
	text = strings.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, text)
	if len(text) <= maxErrorText {
		return text
	}
	return strings.ToValidUTF8(text[:maxErrorText], "") + fmt.Sprintf("... (%d bytes cut)", len(text)-maxErrorText)
}

// timeLeft reads the deadline that a request carries.
func timeLeft(h nats.Header) time.Duration {
	ms, err := strconv.ParseInt(h.Get(headerDeadline), 10, 32)
	if err != nil || ms <= 0 {
		return defaultDeadline
	}
	return min(time.Duration(ms)*time.Millisecond, maxDeadline)
}
