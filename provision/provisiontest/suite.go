// Package provisiontest is the conformance suite of the kinds: what
// package provision promises, tried on a real service.
//
// A kind's test describes its service in a Suite and calls Run. The service is
// reached through something that can fail (Faults), by default a Proxy, so that
// the suite can end a provider's connections after its n-th message, for every
// n, and see that a new Provider finishes what the dead one had begun.
package provisiontest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"meshd/provision"
)

// Faults is the way between everything the suite does and the service.
type Faults interface {
	// Cut lets after more steps of clients reach the service, then ends all
	// connections and refuses new ones. Cut(0) does so at once.
	Cut(after int)
	// Stall leaves every later step without an answer.
	Stall()
	// Heal ends Cut and Stall.
	Heal()
}

// Session is a consumer's live session at the service.
type Session interface {
	Put(ctx context.Context, key, value string) error
	Get(ctx context.Context, key string) (string, error) // "" where there is no such key
	Close() error
}

// Suite describes one service to Run. All functions are required.
type Suite struct {
	Kind   provision.Kind
	Config provision.Config // its address, and its admin's, lead through Faults
	Faults Faults

	// Dial logs in with what was delivered and keeps the session.
	Dial func(ctx context.Context, fields map[string]string) (Session, error)
	// Trespass tries to use another resource with what was delivered for one, and
	// returns nil if that was possible.
	Trespass func(ctx context.Context, fields map[string]string, other provision.Resource) error
	// Plant makes things of these names as somebody else would, without our mark.
	// It undoes that when the test ends.
	Plant func(t *testing.T, res provision.Resource, login provision.Login)
	// Drop removes a login by hand.
	Drop func(ctx context.Context, login provision.Login) error
}

// patience bounds each wait of the suite, for a machine whose cores are taken.
const patience = 60 * time.Second

// Run runs the suite. Its tests run one after the other and leave nothing at
// the service.
func Run(t *testing.T, s Suite) {
	for _, test := range []struct {
		name string
		run  func(*bench)
	}{
		{"EnsureIsIdempotent", ensureIsIdempotent},
		{"EnsureMendsTheSecret", ensureMendsTheSecret},
		{"SessionsAreCounted", sessionsAreCounted},
		{"RotationUnderLoad", rotationUnderLoad},
		{"WithdrawEndsSessions", withdrawEndsSessions},
		{"WithdrawOfWhatIsGone", withdrawOfWhatIsGone},
		{"ReturnFindsItsData", returnFindsItsData},
		{"Purge", purge},
		{"ForeignIsRefused", foreignIsRefused},
		{"MeshesAreApart", meshesAreApart},
		{"ConsumersAreApart", consumersAreApart},
		{"HostileNames", hostileNames},
		{"ServiceAway", serviceAway},
		{"ServiceHangs", serviceHangs},
		{"CrashInEnsure", crashInEnsure},
		{"CrashInEnsureThenLeave", crashInEnsureThenLeave},
		{"CrashInWithdraw", crashInWithdraw},
		{"CrashInPurge", crashInPurge},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := &bench{T: t, Suite: s, run: strings.ToLower(rand.Text()[:6])}
			b.Provider = b.open(s.Config.Mesh)
			b.Cleanup(func() { b.ok(b.Close(), "Close") })
			b.ok(b.Preflight(b.ctx()), "Preflight")
			test.run(b)
		})
	}
}

// bench is one test of the suite, with a Provider of its own.
type bench struct {
	*testing.T
	Suite
	provision.Provider

	run     string // makes names unique at a service that outlives the test
	n       int    // names given out
	secrets []string
}

// open returns a new Provider, which the caller closes.
func (b *bench) open(mesh string) provision.Provider {
	b.Helper()
	cfg := b.Config
	cfg.Mesh = mesh
	p, err := b.Kind.Open(cfg)
	b.ok(err, "Open")
	return p
}

// restart replaces the Provider with one that knows nothing, as a crash does.
func (b *bench) restart() {
	b.Helper()
	b.ok(b.Close(), "Close")
	b.Provider = b.open(b.Config.Mesh)
}

// ctx is for one call.
func (b *bench) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.Context()), patience)
	b.Cleanup(cancel)
	return ctx
}

// resource names a resource that does not exist, and purges it after the test.
func (b *bench) resource() provision.Resource {
	b.n++
	res := provision.Resource{ID: fmt.Sprintf("id-%s-%d", b.run, b.n), Name: fmt.Sprintf("pt_%s_%d", b.run, b.n)}
	b.Cleanup(func() {
		b.Faults.Heal()
		b.ok(b.Purge(b.ctx(), res), "Purge at the end")
	})
	return res
}

// login names a login of res that does not exist, and withdraws it after the test.
func (b *bench) login(res provision.Resource) provision.Login {
	b.n++
	login := provision.Login{Name: fmt.Sprintf("pt_%s_%d", b.run, b.n), Secret: secret()}
	b.secrets = append(b.secrets, login.Secret)
	b.Cleanup(func() {
		b.Faults.Heal()
		_, err := b.Withdraw(b.ctx(), res, []provision.Login{login})
		b.ok(err, "Withdraw at the end")
	})
	return login
}

// secret has 52 of A-Z and 2-7, so 260 random bits.
func secret() string { return rand.Text() + rand.Text() }

// minted makes a resource with a login that works.
func (b *bench) minted() (provision.Resource, provision.Login) {
	b.Helper()
	res := b.resource()
	login := b.login(res)
	b.ok(b.Ensure(b.ctx(), res, login), "Ensure")
	b.ok(b.Verify(b.ctx(), res, login), "Verify")
	return res, login
}

// dial opens a consumer's session, which ends with the test at the latest.
func (b *bench) dial(res provision.Resource, login provision.Login) Session {
	b.Helper()
	s, err := b.Dial(b.ctx(), b.fields(res, login))
	b.ok(err, "Dial")
	b.Cleanup(func() { _ = s.Close() }) // many a test has ended it before
	return s
}

func (b *bench) fields(res provision.Resource, login provision.Login) map[string]string {
	return b.Kind.Fields(b.Config.Address, res, login)
}

// observed returns what the service has that is ours and of this test, by name.
func (b *bench) observed() map[string]provision.Found {
	b.Helper()
	all, err := b.Observe(b.ctx())
	b.ok(err, "Observe")
	ours := map[string]provision.Found{}
	for _, f := range all {
		if strings.Contains(f.Name, "pt_"+b.run+"_") {
			if _, twice := ours[f.Name]; twice {
				b.Errorf("Observe names %q twice", f.Name)
			}
			ours[f.Name] = f
		}
	}
	return ours
}

// wantObserved compares with exactly these.
func (b *bench) wantObserved(want ...provision.Found) {
	b.Helper()
	wanted := map[string]provision.Found{}
	for _, f := range want {
		wanted[f.Name] = f
	}
	if got := b.observed(); !maps.Equal(got, wanted) {
		b.Errorf("Observe: got %v, want %v", got, wanted)
	}
}

func (b *bench) found(res provision.Resource, login string) provision.Found {
	mark := provision.Mark(b.Config.Mesh, res.ID)
	if login != "" {
		return provision.Found{Name: login, Mark: mark, Login: true}
	}
	return provision.Found{Name: res.Name, Mark: mark}
}

// ok ends the test on an error.
func (b *bench) ok(err error, what string) {
	b.Helper()
	if err != nil {
		b.safe(err)
		b.Fatalf("%s: %v (class %s)", what, err, provision.ClassOf(err))
	}
}

// want ends the test unless err is an *Error of one of the classes.
func (b *bench) want(err error, what string, classes ...provision.Class) {
	b.Helper()
	b.safe(err)
	var e *provision.Error
	if !errors.As(err, &e) {
		b.Fatalf("%s: got %v, want an *Error of class %v", what, err, classes)
	}
	for _, c := range classes {
		if e.Class == c {
			return
		}
	}
	b.Fatalf("%s: got class %s (%v), want %v", what, e.Class, err, classes)
}

// safe checks that nothing which %+v can reach shows a secret of this test.
func (b *bench) safe(err error) {
	b.Helper()
	for _, text := range []string{fmt.Sprint(err), fmt.Sprintf("%+v", err), fmt.Sprintf("%#v", err)} {
		for _, s := range b.secrets {
			if strings.Contains(text, s) {
				b.Fatal("an error shows a secret")
			}
		}
	}
}

// until waits for a condition.
func (b *bench) until(what string, reached func() bool) {
	b.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ctx := b.ctx(); !reached(); {
		select {
		case <-ctx.Done():
			b.Fatalf("waited %v for: %s", patience, what)
		case <-tick.C:
		}
	}
}

// sessions waits until login has that many; a kind that cannot see them says -1.
func (b *bench) sessions(login provision.Login, want int) {
	b.Helper()
	if !b.Kind.Traits().SeesInUse {
		want = -1
	}
	b.until(fmt.Sprintf("InUse of %s is %d", login.Name, want), func() bool {
		n, err := b.InUse(b.ctx(), login)
		b.ok(err, "InUse")
		return n == want
	})
}

// writer is a consumer under load: it opens a session for each value it writes,
// with the newest fields that it was given.
type writer struct {
	mu     sync.Mutex // held while a session is open: giving new fields waits for it
	fields map[string]string
	wrote  int
	failed []error
}

// deliver gives the writer new fields and returns when it uses no others.
func (w *writer) deliver(fields map[string]string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fields = fields
}

// status returns how many values were written, and what went wrong.
func (w *writer) status() (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.wrote, errors.Join(w.failed...)
}

func (w *writer) loop(ctx context.Context, dial func(context.Context, map[string]string) (Session, error)) {
	once := func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		s, err := dial(ctx, w.fields)
		if err == nil {
			err = errors.Join(s.Put(ctx, "load", fmt.Sprint(w.wrote)), s.Close())
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			w.failed = append(w.failed, err)
		} else {
			w.wrote++
		}
		return nil
	}
	for once() == nil {
	}
}
