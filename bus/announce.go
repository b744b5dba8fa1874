package bus

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
)

// announceVersion is the version of the subjects and headers of this package, which is what the NATS
// services protocol wants to know of each service.
const announceVersion = "1.0.0"

// serveAnnouncements answers $SRV.PING, INFO and STATS, each also .NAME and .NAME.ID, for the seats
// and tools that this node serves (NATS services protocol, ADR-32). The types are those of the micro
// package; its machinery is not used, for it would put seats into a queue group and stops without
// waiting. Answers go to operators' inboxes only: no asker can aim them elsewhere.
func (b *Bus) serveAnnouncements() error {
	_, err := b.host.mod.Subscribe("$SRV.>", b.announce)
	if err != nil {
		return fmt.Errorf("serve announcements: %w", err)
	}
	return b.host.mod.FlushTimeout(bindLimit)
}

func (b *Bus) announce(m *nats.Msg) {
	part := strings.Split(m.Subject, ".")
	if !below("_O", m.Reply) || len(part) > 4 {
		return
	}
	for _, s := range b.announced() {
		id := s.identity(b.cfg.NodeName)
		if (len(part) > 2 && part[2] != id.Name) || (len(part) > 3 && part[3] != id.ID) {
			continue
		}
		var body any
		switch part[1] {
		case "PING":
			body = micro.Ping{ServiceIdentity: id, Type: micro.PingResponseType}
		case "INFO":
			body = micro.Info{ServiceIdentity: id, Type: micro.InfoResponseType, Description: s.label(), Endpoints: s.endpoints(b.cfg.NodeName)}
		case "STATS":
			body = micro.Stats{ServiceIdentity: id, Type: micro.StatsResponseType, Started: s.tally.started, Endpoints: s.stats(b.cfg.NodeName)}
		default:
			return
		}
		data, err := json.Marshal(body)
		if err == nil {
			err = b.host.mod.Publish(m.Reply, data)
		}
		if err != nil {
			b.cfg.Log.Warn("announcement was not sent", "service", id.Name, "err", err)
		}
	}
}

// announcement is a service that answers: it is neither leaving nor closed, and its gate is open.
type announcement struct {
	Service
	tally *tally
}

func (b *Bus) announced() []announcement {
	var out []announcement
	for _, s := range b.bound.Load().list {
		if spec, leaving := s.state(); !leaving && spec.Answers() {
			out = append(out, announcement{spec, &s.tally})
		}
	}
	return out
}

// identity names the service within the protocol's alphabet, which has no '@'. No name of the mesh has
// an underscore, so ids stay distinct.
func (a announcement) identity(node string) micro.ServiceIdentity {
	id := micro.ServiceIdentity{
		Version:  announceVersion,
		Metadata: map[string]string{"node": node, "assignment": a.Assignment, "scope": a.Scope.String()},
	}
	switch a.Scope {
	case ScopeTools:
		id.Name = strings.ReplaceAll(a.Assignment, "@", "_")
		id.ID = "tools_" + id.Name + "_" + node
	default:
		id.Name = a.Seat
		id.ID = "seat_" + a.Seat + "_" + node
		id.Metadata["seat"] = a.Seat
	}
	if a.Scope == ScopeMesh {
		id.Metadata["epoch"] = strconv.FormatUint(a.Epoch, 10)
	}
	return id
}

// endpoint is the subject that a module calls, with stars in the place of the module's own name.
func (a announcement) endpoint(node, verb string) string {
	t := a.target(verb)
	if a.Scope != ScopeMesh {
		t.Node = node
	}
	return t.CallSubject(Caller{Node: "*", Assignment: "*"})
}

func (a announcement) endpoints(node string) []micro.EndpointInfo {
	out := make([]micro.EndpointInfo, 0, len(a.Verbs))
	for _, verb := range a.Verbs {
		out = append(out, micro.EndpointInfo{Name: verb, Subject: a.endpoint(node, verb)})
	}
	return out
}

func (a announcement) stats(node string) []*micro.EndpointStats {
	out := make([]*micro.EndpointStats, 0, len(a.Verbs))
	for _, verb := range a.Verbs {
		e := a.tally.of(verb)
		e.Name, e.Subject = verb, a.endpoint(node, verb)
		if e.NumRequests > 0 {
			e.AverageProcessingTime = e.ProcessingTime / time.Duration(e.NumRequests)
		}
		out = append(out, &e)
	}
	return out
}

// tally counts what a service has answered since it was bound.
type tally struct {
	started time.Time

	mu     sync.Mutex
	byVerb map[string]*micro.EndpointStats
}

func (t *tally) init() {
	t.started = time.Now().UTC()
	t.byVerb = map[string]*micro.EndpointStats{}
}

// count takes in one answer. Of an error only the code is kept: its text is for
// whoever called.
func (t *tally) count(verb string, took time.Duration, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byVerb[verb]
	if e == nil {
		e = &micro.EndpointStats{}
		t.byVerb[verb] = e
	}
	e.NumRequests++
	e.ProcessingTime += took
	if err != nil {
		e.NumErrors++
		e.LastError = string(CodeFailed)
		var ce *CallError
		if errors.As(err, &ce) {
			e.LastError = string(ce.Code)
		}
	}
}

func (t *tally) of(verb string) micro.EndpointStats {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.byVerb[verb]; e != nil {
		return *e
	}
	return micro.EndpointStats{}
}
