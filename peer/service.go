package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"

	"meshd/peer/identity"
	"meshd/provision"
	"meshd/raftfsm"
)

const (
	// preflightEvery is how often a healthy service is asked again: soon enough
	// for `meshd status` to be believed.
	preflightEvery = 30 * time.Second
	// watchFirst and watchLater are how often a login is looked for among the
	// sessions: quickly while a process starts, then once a second.
	watchFirst = 40 * time.Millisecond
	watchLater = time.Second
	// watchQuick is how long watchFirst is kept up.
	watchQuick = 10 * time.Second
	// maxReference bounds a file that a manifest refers to.
	maxReference = 64 << 10
)

// service is one provider on this node: what its worker does at the backing
// service.
type service struct {
	n      *Peer
	spec   raftfsm.ProviderSpec
	kind   provision.Kind
	worker *worker

	mu       sync.Mutex // guards what follows; the worker alone opens and replaces it
	provider provision.Provider
	opened   provision.Config
	watched  map[string]time.Time // binding and generation -> first look
}

func (n *Peer) newService(spec raftfsm.ProviderSpec) *service {
	return &service{n: n, spec: spec, kind: n.cfg.Kinds.Find(spec.Kind), worker: n.newWorker(), watched: map[string]time.Time{}}
}

func (s *service) id() string { return raftfsm.ProviderID(s.spec.Assignment, s.spec.Kind) }

// tasks turns what was decided into work, with the preflight as the gate of all
// the rest.
func (s *service) tasks(jobs []job) []task {
	var out []task
	for _, j := range jobs {
		t := task{key: fmt.Sprintf("%s %s %d", j.Verb, j.Binding, j.Credential.Generation)}
		about := raftfsm.TroubleReport{Binding: j.Binding, Side: raftfsm.SideProvider}
		switch j.Verb {
		case verbPreflight:
			t.key, t.gate, t.every = string(verbPreflight), true, preflightEvery
			t.do, t.note = s.preflight, s.notePreflight
			out = append(out, t)
			continue
		case verbStage:
			t.do = func(context.Context) error { return s.stage(j) }
		case verbMint:
			t.do = func(ctx context.Context) error { return s.mint(ctx, j) }
		case verbWatch:
			t.do = func(ctx context.Context) error { return s.watch(ctx, j) }
		case verbWithdraw:
			t.key, about = string(verbWithdraw)+" "+j.Withdrawal, raftfsm.TroubleReport{Withdrawal: j.Withdrawal}
			t.do = func(ctx context.Context) error { return s.withdraw(ctx, j) }
		}
		t.note = func(step, class string) { s.note(about, step, class) }
		out = append(out, t)
	}
	return out
}

// note books one outcome. A fault of the service as a whole is looked into at
// once, so that it shows as the provider's and not as each binding's own.
func (s *service) note(about raftfsm.TroubleReport, step, class string) {
	s.n.observed.trouble(about, step, class)
	switch provision.Class(class) {
	case provision.Unreachable, provision.ReadOnly, provision.Recovery, provision.Full, provision.TimedOut:
		s.worker.expire(string(verbPreflight))
	}
}

func (s *service) notePreflight(step, class string) {
	addr, err := s.address()
	if err != nil && class == "" {
		step, class = "render address", string(provision.BadConfig)
	}
	s.n.observed.note(func(o *sightings) {
		o.providers[s.id()] = raftfsm.ProviderReport{
			Provider: s.id(), Ready: class == "", Address: raftfsm.Address(addr), Step: step, Class: class,
		}
	})
}

func (s *service) preflight(ctx context.Context) error {
	p, err := s.open()
	if err != nil {
		return err
	}
	return p.Preflight(ctx)
}

// open returns the Provider for the service as it is configured now.
func (s *service) open() (provision.Provider, error) {
	if s.kind == nil {
		return nil, unknownKind(s.spec.Kind)
	}
	cfg, err := s.config()
	if err != nil {
		return nil, &provision.Error{Step: "read provider settings", Class: provision.BadConfig, Err: err}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.provider != nil && reflect.DeepEqual(cfg, s.opened) {
		return s.provider, nil
	}
	if s.provider != nil {
		s.provider.Close()
		s.provider = nil
	}
	p, err := s.kind.Open(cfg)
	if err != nil {
		return nil, &provision.Error{Step: "open provider", Class: provision.BadConfig, Err: err}
	}
	s.provider, s.opened = p, cfg
	return p, nil
}

// close ends the service's work. A call that is under way ends first, so that
// the Provider is not closed beneath it; nobody waits for that.
func (s *service) close() {
	s.worker.set(nil)
	s.n.work.Go(func() {
		s.worker.idle.Lock()
		defer s.worker.idle.Unlock()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.provider != nil {
			s.provider.Close()
			s.provider = nil
		}
	})
}

// config resolves the file references of the manifest: admin credentials stay
// on this node.
func (s *service) config() (provision.Config, error) {
	addr, err := s.address()
	if err != nil {
		return provision.Config{}, err
	}
	cfg := provision.Config{Mesh: s.n.meshID(), Address: addr, Options: map[string]string{}}
	for key, value := range s.spec.Provide.Options {
		if cfg.Options[key], err = dereference(value); err != nil {
			return provision.Config{}, fmt.Errorf("%s of %s: %w", key, s.spec.Assignment, err)
		}
	}
	return cfg, nil
}

// address is where consumers reach the service: what the manifest says, or for
// an embedded kind where it listens.
func (s *service) address() (provision.Address, error) {
	p := s.spec.Provide
	if p.Address == "" {
		if addr, ok := s.n.cfg.Host.Embedded(s.spec.Kind); ok {
			return addr, nil
		}
		return provision.Address{}, fmt.Errorf("%s provides %s without an address; write address: \"{{ .node.address }}:PORT\"", s.spec.Assignment, s.spec.Kind)
	}
	text, err := s.n.cfg.Render(p.Address, map[string]map[string]string{"node": s.n.nodeFields()})
	if err != nil {
		return provision.Address{}, err
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return provision.Address{}, fmt.Errorf("address %q of %s: %w", text, s.spec.Assignment, err)
	}
	addr := provision.Address{Host: host, TLS: p.TLS}
	if addr.Port, err = strconv.Atoi(port); err != nil || addr.Port < 1 || addr.Port > 65535 {
		return provision.Address{}, fmt.Errorf("address %q of %s: the port is a number from 1 to 65535", text, s.spec.Assignment)
	}
	if addr.TLS == "" {
		addr.TLS = provision.VerifyFull
		if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
			addr.TLS = provision.Off
		}
	}
	if p.CA != "" {
		if addr.CA, err = dereference(p.CA); err != nil {
			return provision.Address{}, fmt.Errorf("ca of %s: %w", s.spec.Assignment, err)
		}
	}
	return addr, nil
}

// dereference returns the contents of the file that "file:/path" names, without
// the newline at its end, and any other value as it is.
func dereference(value string) (string, error) {
	path, isFile := strings.CutPrefix(value, "file:")
	if !isFile {
		return value, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxReference+1))
	if err != nil {
		return "", err
	}
	if len(b) > maxReference {
		return "", fmt.Errorf("%s has more than %d bytes", path, maxReference)
	}
	return strings.TrimRight(string(b), "\r\n"), nil
}

// stage makes the next secret durable before the service hears of it: sealed to
// this node, to the consumer's and to the recovery key.
func (s *service) stage(j job) error {
	addr, err := s.address()
	if err != nil {
		return &provision.Error{Step: "render address", Class: provision.BadConfig, Err: err}
	}
	var recipients []string
	s.n.store.view(func(state *raftfsm.State) {
		for _, id := range []string{s.n.id(), j.Consumer} {
			if r := state.Nodes[id].Recipient; r != "" {
				recipients = append(recipients, r)
			}
		}
		recipients = append(recipients, state.Mesh.Recovery)
	})
	sealed, err := identity.Seal([]byte(identity.NewSecret()), recipients...)
	if err != nil {
		return &provision.Error{Step: "seal credential", Class: provision.Internal, Err: err}
	}
	s.n.observed.note(func(o *sightings) {
		if old, was := o.staged[j.Binding]; was && old.Resource == j.ResourceID && old.To == j.Consumer && old.Generation == j.Credential.Generation {
			return
		}
		o.staged[j.Binding] = raftfsm.Staged{Binding: j.Binding, Resource: j.ResourceID, To: j.Consumer, Generation: j.Credential.Generation, Sealed: sealed, Address: raftfsm.Address(addr)}
	})
	return nil
}

func (s *service) resource(j job) provision.Resource {
	return provision.Resource{ID: j.ResourceID, Name: j.Resource.Name}
}

// login opens a credential of the log.
func (n *Peer) login(c raftfsm.Credential) (provision.Login, error) {
	secret, err := n.cfg.Keys.Open(c.Sealed)
	if err != nil {
		return provision.Login{}, &provision.Error{Step: "open sealed credential", Class: provision.Internal, Err: err}
	}
	return provision.Login{Name: c.Login, Secret: string(secret)}, nil
}

func (s *service) mint(ctx context.Context, j job) error {
	login, err := s.n.login(j.Credential)
	if err != nil {
		return err
	}
	p, err := s.open()
	if err != nil {
		return err
	}
	if err := p.Ensure(ctx, s.resource(j), login); err != nil {
		return err
	}
	if err := p.Verify(ctx, s.resource(j), login); err != nil {
		return err
	}
	s.n.mark(j.Binding, j.ResourceID, j.Credential.Generation, raftfsm.FactMinted)
	return nil
}

// watch looks for a session of the login, without being one.
func (s *service) watch(ctx context.Context, j job) error {
	p, err := s.open()
	if err != nil {
		return err
	}
	sessions, err := p.InUse(ctx, provision.Login{Name: j.Credential.Login})
	if err != nil {
		return err
	}
	key := fmt.Sprintf("%s %d", j.Binding, j.Credential.Generation)
	first, was := s.watched[key]
	if !was {
		first = time.Now()
		s.watched[key] = first
	}
	switch {
	case sessions != 0: // -1 is a kind that cannot see them: delivery is what there is to know
		delete(s.watched, key)
		s.n.mark(j.Binding, j.ResourceID, j.Credential.Generation, raftfsm.FactSeen)
		return nil
	case time.Since(first) < watchQuick:
		return pause(watchFirst)
	}
	return pause(watchLater)
}

func (s *service) withdraw(ctx context.Context, j job) error {
	p, err := s.open()
	if err != nil {
		return err
	}
	var logins []provision.Login
	for _, c := range j.Old {
		login, err := s.n.login(c)
		if errors.Is(err, identity.ErrNotForUs) {
			login = provision.Login{Name: c.Login}
		} else if err != nil {
			return err
		}
		logins = append(logins, login)
	}
	ended, err := p.Withdraw(ctx, s.resource(j), logins)
	if err != nil {
		return err
	}
	s.n.observed.note(func(o *sightings) { o.withdrawn[j.Withdrawal] = ended })
	return nil
}

// mark notes one fact about one credential.
func (n *Peer) mark(binding, resource string, generation uint64, fact string) {
	n.observed.note(func(o *sightings) {
		o.marks[raftfsm.Mark{Binding: binding, Resource: resource, Generation: generation, Fact: fact}] = true
	})
}
