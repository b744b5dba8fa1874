package bus

import (
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// maxRefusals bounds the refusals that are remembered; the one longest quiet makes room.
const maxRefusals = 100

// Refusal is a subject that the bus kept from an assignment. It cost the assignment that subject only.
type Refusal struct {
	Assignment string
	Action     string // publish, subscribe, or reply: the inbox of a call was not the caller's own
	Subject    string
	Count      uint64
	Last       time.Time
}

// serverLog receives the server's log. It passes lines on, keeps a fatal one as the start's error, and
// takes refusals out of it: the server tells of them nowhere else.
type serverLog struct {
	log *slog.Logger

	mu       sync.Mutex
	fatality error
	names    map[string]string // public key to assignment
	refusals map[refusalKey]*Refusal
}

// actionReply is a call whose reply would not have gone to its caller's own inbox.
const actionReply = "reply"

type refusalKey struct{ assignment, action, subject string }

func newServerLog(log *slog.Logger) *serverLog {
	return &serverLog{log: log, names: map[string]string{}, refusals: map[refusalKey]*Refusal{}}
}

// name takes over whose keys are whose.
func (l *serverLog) name(users []user) {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.names)
	for _, u := range users {
		l.names[u.key] = u.name
	}
}

func (l *serverLog) fatal() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatality
}

// refuse counts a refusal, and logs it the first time.
func (l *serverLog) refuse(assignment, action, subject string) {
	k := refusalKey{assignment, action, subject}
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.refusals[k]
	if r == nil {
		if len(l.refusals) >= maxRefusals {
			l.forgetQuietest()
		}
		r = &Refusal{Assignment: assignment, Action: action, Subject: subject}
		l.refusals[k] = r
		l.log.Warn("bus refused a subject", "assignment", assignment, "action", action, "subject", subject)
	}
	r.Count++
	r.Last = time.Now()
}

func (l *serverLog) forgetQuietest() {
	var quietest refusalKey
	var last time.Time
	for k, r := range l.refusals {
		if last.IsZero() || r.Last.Before(last) {
			quietest, last = k, r.Last
		}
	}
	delete(l.refusals, quietest)
}

// list gives the refusals, the newest first.
func (l *serverLog) list() []Refusal {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Refusal, 0, len(l.refusals))
	for _, r := range l.refusals {
		out = append(out, *r)
	}
	slices.SortFunc(out, func(a, b Refusal) int { return b.Last.Compare(a.Last) })
	return out
}

// violation matches what the server (v2.15) logs when it refuses a subject: ADDRESS - cid:N -
// "CLIENT" - "MOD/nkey:KEY" - Publish Violation - Subject "S". What a client may choose, its name and
// the subject, is quoted by the server, so the first unescaped match is the server's own.
var violation = regexp.MustCompile(`"MOD/nkey:(U[A-Z2-7]{55})" - (Publish|Subscription) Violation - (Subject|Reply) ("(?:[^"\\]|\\.)*")`)

// asViolation reads a refusal out of a line of the server's log.
func (l *serverLog) asViolation(line string) (assignment, action, subject string, ok bool) {
	m := violation.FindStringSubmatch(line)
	if m == nil {
		return "", "", "", false
	}
	subject, err := strconv.Unquote(m[4])
	if err != nil {
		return "", "", "", false
	}
	switch {
	case m[3] == "Reply":
		action = actionReply
	case m[2] == "Subscription":
		action = "subscribe"
	default:
		action = "publish"
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	assignment, known := l.names[m[1]]
	if !known {
		assignment = m[1]
	}
	return assignment, action, subject, true
}

// Errorf implements server.Logger.
func (l *serverLog) Errorf(format string, args ...any) {
	line := compose(format, args)
	if assignment, action, subject, ok := l.asViolation(line); ok {
		l.refuse(assignment, action, subject)
		return
	}
	if strings.Contains(line, gossipAddr) {
		return // the one dial per gossiped peer that fails by intent
	}
	l.log.Error("NATS server", "line", line)
}

// compose formats a line. The server puts the name of a client into the format itself; one with a
// percent sign in it would otherwise garble what comes after.
func compose(format string, args []any) string {
	if len(args) == 0 {
		return format
	}
	if head, ok := strings.CutSuffix(format, "%q"); ok && len(args) == 1 {
		return head + fmt.Sprintf("%q", args[0])
	}
	return fmt.Sprintf(format, args...)
}

// Fatalf implements server.Logger. The server goes on running after it.
func (l *serverLog) Fatalf(format string, args ...any) {
	line := compose(format, args)
	l.mu.Lock()
	if l.fatality == nil {
		l.fatality = errors.New(line)
	}
	l.mu.Unlock()
	l.log.Error("NATS server failed", "line", line)
}

// Warnf implements server.Logger.
func (l *serverLog) Warnf(format string, args ...any) {
	l.log.Warn("NATS server", "line", compose(format, args))
}

// Noticef implements server.Logger. Notices tell what meshd itself has just asked for.
func (l *serverLog) Noticef(format string, args ...any) {
	l.log.Debug("NATS server", "line", compose(format, args))
}

// Debugf and Tracef implement server.Logger; the server is told not to call them.
func (l *serverLog) Debugf(format string, args ...any) {
	l.log.Debug("NATS server", "line", compose(format, args))
}

// Tracef implements server.Logger.
func (l *serverLog) Tracef(format string, args ...any) {
	l.log.Debug("NATS server", "line", compose(format, args))
}
