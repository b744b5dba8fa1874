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

const (
	// maxRefusals bounds the refusals that are remembered; the one longest quiet makes room.
	maxRefusals = 100
	// maxClients bounds the connections of one refusal that are remembered, the newest: a process has
	// one, and a restart of it that is refused as well has another.
	maxClients = 8
	// quietAfter is how long after the last time something that is refused each time that it is tried,
	// as a publication is, counts as over.
	quietAfter = 10 * time.Minute
)

// What is refused to an assignment.
const (
	ActionPublish   = "publish"
	ActionSubscribe = "subscribe"
	ActionReply     = "reply" // the inbox of a call was not the caller's own
)

// Refusal is a subject that the bus keeps from an assignment. It costs the assignment that subject only.
// It is over when those connections are closed that were refused it, when the subject is granted, or,
// but for a subscription, when it was not tried for 10 minutes.
type Refusal struct {
	Assignment string // or "(operator) NAME"
	Action     string
	Subject    string
	Count      uint64
	First      time.Time
	Last       time.Time

	clients []uint64 // ids of connections; 0 where that is not known
}

// serverLog receives the server's log. It passes lines on, keeps a fatal one as the start's error, and
// takes refusals out of it: the server tells of them nowhere else.
type serverLog struct {
	log *slog.Logger

	mu       sync.Mutex
	fatality error
	users    map[string]user // by public key
	refusals map[refusalKey]*Refusal
}

type refusalKey struct{ assignment, action, subject string }

func newServerLog(log *slog.Logger) *serverLog {
	return &serverLog{log: log, users: map[string]user{}, refusals: map[refusalKey]*Refusal{}}
}

// name takes over whose keys are whose, and what they may say.
func (l *serverLog) name(users []user) {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.users)
	for _, u := range users {
		l.users[u.key] = u
	}
}

func (l *serverLog) fatal() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatality
}

// refuse counts a refusal to a connection, and logs it the first time.
func (l *serverLog) refuse(client uint64, assignment, action, subject string) {
	k := refusalKey{assignment, action, subject}
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.refusals[k]
	now := time.Now()
	if r == nil {
		if len(l.refusals) >= maxRefusals {
			l.forgetQuietest()
		}
		r = &Refusal{Assignment: assignment, Action: action, Subject: subject, First: now}
		l.refusals[k] = r
		l.log.Warn("bus refused a subject", "assignment", assignment, "action", action, "subject", subject)
	}
	r.Count++
	r.Last = now
	if !slices.Contains(r.clients, client) {
		r.clients = append(r.clients[max(0, len(r.clients)+1-maxClients):], client)
	}
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

// list gives the refusals, the newest first, and forgets those that are over. Open says whether the
// connection of that id is.
func (l *serverLog) list(open func(client uint64) bool) []Refusal {
	l.mu.Lock()
	defer l.mu.Unlock()
	granted, now := map[refusalKey]bool{}, time.Now()
	for _, u := range l.users {
		for _, subject := range u.publish {
			granted[refusalKey{u.name, ActionPublish, subject}] = true
		}
	}
	out := make([]Refusal, 0, len(l.refusals))
	for k, r := range l.refusals {
		r.clients = slices.DeleteFunc(r.clients, func(id uint64) bool { return id != 0 && !open(id) })
		quiet := k.action != ActionSubscribe && now.Sub(r.Last) > quietAfter
		if len(r.clients) == 0 || quiet || granted[k] {
			delete(l.refusals, k)
			continue
		}
		out = append(out, *r)
		out[len(out)-1].clients = nil
	}
	slices.SortFunc(out, func(a, b Refusal) int { return b.Last.Compare(a.Last) })
	return out
}

// violation matches what the server (v2.15) logs when it refuses a subject: ADDRESS - cid:N -
// "CLIENT" - "MOD/nkey:KEY" - Publish Violation - Subject "S". What a client may choose, its name and
// the subject, is quoted by the server, so the first unescaped match is the server's own.
var violation = regexp.MustCompile(`(?s)^\S+ - cid:(\d+) - .*?"MOD/nkey:(U[A-Z2-7]{55})" - (Publish|Subscription) Violation - (Subject|Reply) ("(?:[^"\\]|\\.)*")`)

// refusedIn reads a refusal out of a line of the server's log.
func (l *serverLog) refusedIn(line string) bool {
	m := violation.FindStringSubmatch(line)
	if m == nil {
		return false
	}
	subject, err := strconv.Unquote(m[5])
	if err != nil {
		return false
	}
	client, err := strconv.ParseUint(m[1], 10, 64)
	if err != nil {
		return false
	}
	action := ActionPublish
	switch {
	case m[4] == "Reply":
		action = ActionReply
	case m[3] == "Subscription":
		action = ActionSubscribe
	}
	l.mu.Lock()
	u, known := l.users[m[2]]
	l.mu.Unlock()
	if !known {
		u.name = m[2]
	}
	l.refuse(client, u.name, action, subject)
	return true
}

// Errorf implements server.Logger.
func (l *serverLog) Errorf(format string, args ...any) {
	line := compose(format, args)
	if l.refusedIn(line) || strings.Contains(line, gossipAddr) { // the one dial per gossiped peer that fails by intent
		return
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
