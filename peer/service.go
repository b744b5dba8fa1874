package peer

import (
	"context"
	"encoding/pem"
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
	// maxCA bounds the CA of an address, in bytes. It is in every report of the
	// provider and in every credential, and all of a report must fit an entry: one
	// bundle of a private CA takes 1 to 4 KiB, that of all public ones is too much
	// and not needed.
	maxCA = 16 << 10
	// stageAgain is how soon a staged credential is looked for in the log. What
	// became of the one before was in vain by then, when the consumer moved.
	stageAgain = time.Second
	// attendAgain is how soon a service that went away is watched again: one that
	// ends every idle session is asked every preflightEvery, as if it had no watch.
	attendAgain = 5 * time.Second
)

// service is one provider on this node: what its worker does at the backing
// service. It stays until its worker has ended, so that no two ever work at one
// service: a login that is being made cannot outlive its withdrawal.
type service struct {
	n        *Peer
	provider string // id
	kind     provision.Kind
	worker   *worker
	watched  map[string]time.Time // the worker's own: binding and generation -> first look

	mu      sync.Mutex
	spec    raftfsm.ProviderSpec
	closed  bool
	address provision.Address // as it was rendered last
	current *handle           // opened with spec, or with an older one until the next call
}

// handle is one opened Provider. It is closed when it was replaced and nobody is
// in a call of it any more.
type handle struct {
	provision.Provider
	cfg   provision.Config
	calls int
	stale bool

	unwatch context.CancelFunc // ends the call of Watch that runs, or nil
	watched time.Time          // when Watch was called last
}

func (n *Peer) newService(spec raftfsm.ProviderSpec) *service {
	return &service{
		n: n, provider: raftfsm.ProviderID(spec.Assignment, spec.Kind), kind: n.cfg.Kinds.Find(spec.Kind),
		worker: n.newWorker(), watched: map[string]time.Time{}, closed: true,
	}
}

// set makes the service work off jobs as spec says now.
func (s *service) set(spec raftfsm.ProviderSpec, jobs []job) {
	s.mu.Lock()
	changed := s.closed || !reflect.DeepEqual(s.spec, spec)
	s.spec, s.closed = spec, false
	s.mu.Unlock()
	s.worker.set(s.tasks(jobs))
	if changed {
		s.worker.retry()
	}
}

// close ends the service's work. A call that is under way ends first; nobody
// waits for that.
func (s *service) close() {
	s.worker.set(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.retire()
}

// tasks turns what was decided into work, with the preflight as the gate of all
// the rest.
func (s *service) tasks(jobs []job) []task {
	var out []task
	for _, j := range jobs {
		t := task{key: fmt.Sprintf("%s %s %d", j.Verb, j.Binding, j.Credential.Generation)}
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
			t.key = string(verbWithdraw) + " " + j.Withdrawal
			t.do = func(ctx context.Context) error { return s.withdraw(ctx, j) }
		}
		t.note = func(step, class string) { s.n.observed.trouble(j.about(), step, class) }
		out = append(out, t)
	}
	return out
}

// about is what trouble with the job is reported of.
func (j job) about() raftfsm.TroubleReport {
	if j.Verb == verbWithdraw {
		return raftfsm.TroubleReport{Withdrawal: j.Withdrawal}
	}
	return raftfsm.TroubleReport{Binding: j.Binding, Side: raftfsm.SideProvider}
}

func (s *service) notePreflight(step, class string) {
	s.mu.Lock()
	addr := s.address
	s.mu.Unlock()
	s.n.observed.note(func(o *sightings) {
		o.providers[s.provider] = raftfsm.ProviderReport{
			Provider: s.provider, Ready: class == "", Address: raftfsm.Address(addr), Step: step, Class: class,
		}
	})
}

// preflight proves that the service can be worked at, and finds out where
// consumers reach it.
func (s *service) preflight(ctx context.Context) error {
	addr, err := s.render()
	if err != nil {
		return &provision.Error{Step: "render address", Class: provision.BadConfig, Err: err}
	}
	s.mu.Lock()
	s.address = addr
	s.mu.Unlock()
	err = s.use(func(p provision.Provider) error { return p.Preflight(ctx) })
	if err == nil {
		s.attend()
	}
	return err
}

// attend waits, beside the worker, for a healthy service to go away, and has it
// looked at then: that shows within moments, and not at the next preflight.
func (s *service) attend() {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.current
	if h == nil || h.unwatch != nil || time.Since(h.watched) < attendAgain {
		return
	}
	w, can := h.Provider.(provision.Watcher)
	if !can {
		return
	}
	ctx, cancel := context.WithCancel(s.n.ctx)
	h.calls++
	h.unwatch, h.watched = cancel, time.Now()
	s.n.work.Go(func() {
		defer s.release(h)
		_ = w.Watch(ctx) // whatever it was, the preflight says what is wrong
		s.mu.Lock()
		h.unwatch = nil
		s.mu.Unlock()
		if ctx.Err() == nil {
			s.worker.retry()
		}
		cancel()
	})
}

// use calls f with the Provider for the service as it is configured now. Calls
// may overlap: the worker's, and those of a seat.
func (s *service) use(f func(provision.Provider) error) error {
	h, err := s.open()
	if err != nil {
		return err
	}
	defer s.release(h)
	return f(h.Provider)
}

func (s *service) open() (*handle, error) {
	if s.kind == nil {
		return nil, unknownKind(s.now().Kind)
	}
	cfg, err := s.config()
	if err != nil {
		return nil, &provision.Error{Step: "read provider settings", Class: provision.BadConfig, Err: err}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, &provision.Error{Step: "open provider", Class: provision.BadConfig, Err: fmt.Errorf("%s is not provided on this node any more", s.provider)}
	case s.current == nil || !reflect.DeepEqual(cfg, s.current.cfg):
		p, err := s.kind.Open(cfg)
		if err != nil {
			return nil, &provision.Error{Step: "open provider", Class: provision.BadConfig, Err: err}
		}
		s.retire()
		s.current = &handle{Provider: p, cfg: cfg}
	}
	s.current.calls++
	return s.current, nil
}

func (s *service) release(h *handle) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h.calls--
	s.shut(h)
}

// retire lets the current Provider go; s.mu is held.
func (s *service) retire() {
	if s.current != nil {
		s.current.stale = true
		if s.current.unwatch != nil {
			s.current.unwatch()
		}
		s.shut(s.current)
		s.current = nil
	}
}

func (s *service) shut(h *handle) {
	if h.calls > 0 || !h.stale {
		return
	}
	if err := h.Close(); err != nil {
		s.n.cfg.Log.Warn("close provider", "provider", s.provider, "err", err)
	}
}

// now is the service as the log describes it now.
func (s *service) now() raftfsm.ProviderSpec {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.spec
}

// config resolves the file references of the manifest: admin credentials stay
// on this node.
func (s *service) config() (provision.Config, error) {
	addr, err := s.render()
	if err != nil {
		return provision.Config{}, err
	}
	cfg := provision.Config{Mesh: s.n.meshID(), Address: addr, Options: map[string]string{}}
	spec := s.now()
	for key, value := range spec.Provide.Options {
		if cfg.Options[key], err = dereference(value); err != nil {
			return provision.Config{}, fmt.Errorf("%s of %s: %w", key, spec.Assignment, err)
		}
	}
	return cfg, nil
}

// render says where consumers reach the service: what the manifest says, or for
// an embedded kind where it listens.
func (s *service) render() (provision.Address, error) {
	spec := s.now()
	p := spec.Provide
	if p.Address == "" {
		if addr, ok := s.n.cfg.Host.Embedded(spec.Kind); ok {
			return addr, nil
		}
		return provision.Address{}, fmt.Errorf("%s provides %s without an address; write address: \"{{ .node.address }}:PORT\"", spec.Assignment, spec.Kind)
	}
	text, err := s.n.cfg.Render(p.Address, map[string]map[string]string{"node": s.n.nodeFields()})
	if err != nil {
		return provision.Address{}, err
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return provision.Address{}, fmt.Errorf("address %q of %s: %w", text, spec.Assignment, err)
	}
	addr := provision.Address{Host: host, TLS: p.TLS}
	if addr.Port, err = strconv.Atoi(port); err != nil || addr.Port < 1 || addr.Port > 65535 {
		return provision.Address{}, fmt.Errorf("address %q of %s: the port is a number from 1 to 65535", text, spec.Assignment)
	}
	if addr.TLS == "" {
		addr.TLS = provision.VerifyFull
		if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
			addr.TLS = provision.Off
		}
	}
	if p.CA != "" {
		text, err := dereference(p.CA)
		if err == nil {
			addr.CA, err = certificates(text)
		}
		if err != nil {
			return provision.Address{}, fmt.Errorf("ca of %s: %w", spec.Assignment, err)
		}
	}
	return addr, nil
}

// certificates returns the certificates in text and leaves out what else is
// there: comments would go into every entry.
func certificates(text string) (string, error) {
	var out strings.Builder
	for rest := []byte(text); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type == "CERTIFICATE" {
			_ = pem.Encode(&out, &pem.Block{Type: block.Type, Bytes: block.Bytes}) // a Builder takes everything
		}
	}
	switch {
	case out.Len() == 0:
		return "", errors.New("there is no certificate in it; it is a PEM bundle")
	case out.Len() > maxCA:
		return "", fmt.Errorf("its certificates have %d bytes, and %d are the most; name the one that signed the service's", out.Len(), maxCA)
	}
	return out.String(), nil
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
// this node, to the consumer's and to the recovery key. It is done when the log
// has it, and then no job any more.
func (s *service) stage(j job) error {
	var noted bool
	s.n.observed.look(func(o *sightings) {
		old, was := o.staged[j.Binding]
		noted = was && old.Resource == j.ResourceID && old.To == j.Consumer && old.Generation == j.Credential.Generation
	})
	if noted {
		return pause(stageAgain)
	}
	addr, err := s.render()
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
		o.staged[j.Binding] = raftfsm.Staged{Binding: j.Binding, Resource: j.ResourceID, To: j.Consumer, Generation: j.Credential.Generation, Sealed: sealed, Address: raftfsm.Address(addr)}
	})
	return pause(stageAgain)
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
	err = s.use(func(p provision.Provider) error {
		if err := p.Ensure(ctx, s.resource(j), login); err != nil {
			return err
		}
		return p.Verify(ctx, s.resource(j), login)
	})
	if err == nil {
		s.n.mark(j.Binding, j.ResourceID, j.Credential.Generation, raftfsm.FactMinted)
	}
	return err
}

// watch looks for a session of the login, without being one.
func (s *service) watch(ctx context.Context, j job) error {
	var sessions int
	err := s.use(func(p provision.Provider) (err error) {
		sessions, err = p.InUse(ctx, provision.Login{Name: j.Credential.Login})
		return err
	})
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
	var ended int
	err := s.use(func(p provision.Provider) (err error) {
		ended, err = p.Withdraw(ctx, s.resource(j), logins)
		return err
	})
	if err == nil {
		s.n.observed.note(func(o *sightings) { o.withdrawn[j.Withdrawal] = ended })
	}
	return err
}

// mark notes one fact about one credential.
func (n *Peer) mark(binding, resource string, generation uint64, fact string) {
	n.observed.note(func(o *sightings) {
		o.marks[raftfsm.Mark{Binding: binding, Resource: resource, Generation: generation, Fact: fact}] = true
	})
}
