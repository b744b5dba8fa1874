package peer

import (
	"context"
	"encoding/pem"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meshd/peer/manifest"
	"meshd/peer/supervise"
	"meshd/provision"
	"meshd/raftfsm"
)

// vault is a kind whose Providers know when they are closed.
type vault struct {
	provision.Kind
	opened []*opening
}

type opening struct {
	provision.Provider
	secret string
	closed bool
}

func (v *vault) Name() string { return "vault" }
func (v *vault) Open(cfg provision.Config) (provision.Provider, error) {
	o := &opening{secret: cfg.Options["admin"]}
	v.opened = append(v.opened, o)
	return o, nil
}

func (o *opening) Close() error {
	if o.closed {
		return errors.New("closed twice")
	}
	o.closed = true
	return nil
}

// bare is a service on a Peer that has nothing else.
func bare(t *testing.T, kind provision.Kind, provide raftfsm.Provide) *service {
	n := &Peer{
		cfg:   Config{Self: raftfsm.Node{Name: "alpha", Address: "10.0.0.1:7946"}, Kinds: provision.Kinds{kind}, Render: manifest.Render, Log: slog.New(slog.DiscardHandler), Host: &node{}},
		store: newStore(), ctx: t.Context(), loops: loops{reconcile: make(chan struct{}, 1)},
	}
	n.observed = newObserved(func() {})
	s := n.newService(raftfsm.ProviderSpec{Assignment: "safe", Kind: kind.Name()})
	s.set(raftfsm.ProviderSpec{Assignment: "safe", Kind: kind.Name(), Provide: provide}, nil)
	return s
}

// TestAProviderIsNotClosedBeneathACall: a seat asks beside the worker, and each
// may be the first to see other settings.
func TestAProviderIsNotClosedBeneathACall(t *testing.T) {
	file := filepath.Join(t.TempDir(), "admin")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("first")
	v := &vault{}
	s := bare(t, v, raftfsm.Provide{Address: "{{ .node.address }}:1", Options: map[string]string{"admin": "file:" + file}})
	err := s.use(func(p provision.Provider) error {
		old := p.(*opening)
		write("second")
		return s.use(func(p provision.Provider) error {
			if p == old || p.(*opening).secret != "second" {
				t.Errorf("opened with %q", p.(*opening).secret)
			}
			if old.closed {
				t.Error("closed beneath a call")
			}
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if !v.opened[0].closed || v.opened[1].closed || len(v.opened) != 2 {
		t.Errorf("after both calls, of %d the first is closed: %v, the second: %v", len(v.opened), v.opened[0].closed, v.opened[1].closed)
	}
	err = s.use(func(provision.Provider) error {
		s.close()
		if v.opened[1].closed {
			t.Error("closed beneath a call, by the end of the service")
		}
		return nil
	})
	if err != nil || !v.opened[1].closed {
		t.Errorf("after the end: %v, closed is %v", err, v.opened[1].closed)
	}
	if err := s.use(func(provision.Provider) error { return nil }); provision.ClassOf(err) != provision.BadConfig {
		t.Errorf("a call after the end: %v", err)
	}
}

func TestAnAddressIsRenderedOrRefused(t *testing.T) {
	dir := t.TempDir()
	cert := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("not looked into")}))
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return "file:" + path
	}
	for _, test := range []struct {
		name    string
		provide raftfsm.Provide
		want    provision.Address
		refused string
	}{
		{"by template", raftfsm.Provide{Address: "{{ .node.address }}:5432"}, provision.Address{Host: "10.0.0.1", Port: 5432, TLS: provision.VerifyFull}, ""},
		{"loopback", raftfsm.Provide{Address: "127.0.0.1:5432"}, provision.Address{Host: "127.0.0.1", Port: 5432, TLS: provision.Off}, ""},
		{"localhost", raftfsm.Provide{Address: "localhost:5432"}, provision.Address{Host: "localhost", Port: 5432, TLS: provision.Off}, ""},
		{"as it is said", raftfsm.Provide{Address: "db:5432", TLS: provision.Require}, provision.Address{Host: "db", Port: 5432, TLS: provision.Require}, ""},
		{"the certificates of a bundle", raftfsm.Provide{Address: "db:1", CA: file("ca", "a <comment>\n"+cert+"another\n"+cert)}, provision.Address{Host: "db", Port: 1, TLS: provision.VerifyFull, CA: cert + cert}, ""},
		{"no address", raftfsm.Provide{}, provision.Address{}, "without an address"},
		{"no port", raftfsm.Provide{Address: "db"}, provision.Address{}, "missing port"},
		{"no number", raftfsm.Provide{Address: "db:pg"}, provision.Address{}, "1 to 65535"},
		{"no such port", raftfsm.Provide{Address: "db:65536"}, provision.Address{}, "1 to 65535"},
		{"no such field", raftfsm.Provide{Address: "{{ .nobody.address }}:1"}, provision.Address{}, "nobody"},
		{"no file", raftfsm.Provide{Address: "db:1", CA: "file:" + dir + "/none"}, provision.Address{}, "no such file"},
		{"no certificate", raftfsm.Provide{Address: "db:1", CA: file("key", "-----BEGIN X-----\nAAAA\n-----END X-----\n")}, provision.Address{}, "no certificate"},
		{"every CA of the world", raftfsm.Provide{Address: "db:1", CA: file("all", strings.Repeat(cert, 300))}, provision.Address{}, "are the most"},
		{"a disk image", raftfsm.Provide{Address: "db:1", CA: file("big", strings.Repeat("x", maxReference+1))}, provision.Address{}, "more than"},
	} {
		got, err := bare(t, &vault{}, test.provide).render()
		if got != test.want || (err == nil) != (test.refused == "") || err != nil && !strings.Contains(err.Error(), test.refused) {
			t.Errorf("%s: %+v, %v; want %+v, %q", test.name, got, err, test.want, test.refused)
		}
	}
}

func TestOneBusKeyAnAssignment(t *testing.T) {
	local, err := OpenLocal(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer local.Close()
	var asked sync.WaitGroup
	var mu sync.Mutex
	keys := map[string]string{}
	for range 8 {
		asked.Go(func() {
			public, seed, err := local.busKey("shop@alpha")
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			keys[public] = seed
		})
	}
	asked.Wait()
	if len(keys) != 1 {
		t.Errorf("eight that ask at once get %d keys", len(keys))
	}
	if err := local.forgetBusKey("shop@alpha"); err != nil {
		t.Fatal(err)
	}
	if err := local.forgetBusKey("shop@alpha"); err != nil {
		t.Errorf("forgetting what is forgotten: %v", err)
	}
	public, _, err := local.busKey("shop@alpha")
	if _, old := keys[public]; old || err != nil {
		t.Errorf("a new assignment of the old name gets the old key: %v", err)
	}
}

func TestLocalRemembersMembers(t *testing.T) {
	dir := t.TempDir()
	local, err := OpenLocal(dir)
	if err != nil {
		t.Fatal(err)
	}
	for node, addr := range map[string]string{"a": "10.0.0.1:7946", "b": gone, "c": "10.0.0.3:7946"} {
		if err := local.SetAddress(node, addr); err != nil {
			t.Fatal(err)
		}
	}
	if err := local.Close(); err != nil {
		t.Fatal(err)
	}
	if local, err = OpenLocal(dir); err != nil {
		t.Fatal(err)
	}
	defer local.Close()
	if got := strings.Join(local.addressed(), " "); got != "a c" || local.Address("b") != "" || local.Address("a") != "10.0.0.1:7946" || !local.isRemoved("b") || local.isRemoved("a") {
		t.Errorf("after a restart it knows %s", got)
	}
}

type answerer struct{ opening }

func (answerer) Answer(_ context.Context, verb string, _ []byte) ([]byte, error) {
	return []byte(verb), nil
}

type oracle struct{ vault }

func (*oracle) Open(provision.Config) (provision.Provider, error) { return answerer{}, nil }

func (answerer) Close() error { return nil }

func TestASeatIsAnsweredByItsKind(t *testing.T) {
	for _, test := range []struct {
		kind provision.Kind
		ask  string
		want string
		text string
	}{
		{&oracle{}, "safe", "databases", ""},
		{&vault{}, "safe", "", "answers no verbs itself"},
		{&oracle{}, "elsewhere", "", "does not provide"},
	} {
		s := bare(t, test.kind, raftfsm.Provide{Address: "db:1"})
		s.n.services = map[string]*service{s.provider: s}
		got, err := s.n.answer(t.Context(), test.ask, "vault", "databases", nil)
		if string(got) != test.want || (err == nil) != (test.text == "") || err != nil && !strings.Contains(err.Error(), test.text) {
			t.Errorf("%T asked for %s: %q, %v", test.kind, test.ask, got, err)
		}
	}
}

// slow is a vault whose preflight hangs.
type slow struct{ vault }

func (*slow) Open(provision.Config) (provision.Provider, error) { return &hanging{}, nil }

type hanging struct{ opening }

func (*hanging) Preflight(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// TestOneWorkerAtAService: a provider that is removed and comes back while a call
// of it hangs is worked at by the same worker, after that call.
func TestOneWorkerAtAService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := bare(t, &slow{}, raftfsm.Provide{Address: "db:1"})
		n := s.n
		n.ctx, n.services = ctx, map[string]*service{}
		pass := func(specs ...raftfsm.ProviderSpec) {
			f := facts{desired: raftfsm.Desired{Provides: specs}, jobs: map[string][]job{"safe/vault": {{Verb: verbPreflight}}}}
			n.passServices(f, map[raftfsm.TroubleReport]bool{})
			synctest.Wait()
		}
		spec := raftfsm.ProviderSpec{Assignment: "safe", Kind: "vault", Provide: raftfsm.Provide{Address: "db:1"}}
		pass(spec)
		first := n.services["safe/vault"]
		pass()
		if n.services["safe/vault"] != first {
			t.Error("it is forgotten while a call runs")
		}
		pass(spec)
		if n.services["safe/vault"] != first || first.worker.idle() {
			t.Error("a second worker is at the service")
		}
		pass()
		time.Sleep(taskTimeout)
		synctest.Wait()
		pass()
		if len(n.services) != 0 {
			t.Error("it stays although nothing runs")
		}
		cancel()
		n.work.Wait()
	})
}

// TestADeliveryThatComesLateStartsNothing: the process is what is wanted when the
// files are there, not what was wanted when they were begun.
func TestADeliveryThatComesLateStartsNothing(t *testing.T) {
	c := &consumer{checked: map[string]string{}}
	first, second := &supervise.Spec{Name: "first"}, &supervise.Spec{Name: "second"}
	c.wants("2")
	if c.take(first, "1") {
		t.Error("an old delivery is taken")
	}
	if spec, known := c.running(); spec != nil || known {
		t.Errorf("runs %v, known %v", spec, known)
	}
	if !c.take(second, "2") {
		t.Error("what is wanted is refused")
	}
	c.wants("") // a need is not ready: what runs goes on
	if spec, known := c.running(); spec != second || !known {
		t.Errorf("runs %v, known %v", spec, known)
	}
	if c.take(first, "1") {
		t.Error("an old delivery is taken while nothing is wanted")
	}
}
