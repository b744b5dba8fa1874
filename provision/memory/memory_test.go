package memory_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"meshd/provision"
	"meshd/provision/memory"
	"meshd/provision/provisiontest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// way adapts a Server to the suite.
type way struct{ *memory.Server }

func (w way) Cut(after int) {
	w.Set(memory.Fault{Class: provision.Unreachable, After: after})
}
func (w way) Stall() { w.Set(memory.Fault{Hang: true}) }
func (w way) Heal()  { w.Set() }

func TestConformance(t *testing.T) {
	world := memory.NewWorld()
	server := world.Serve("db", 1)
	kind := world.Kind("alpha")
	provisiontest.Run(t, provisiontest.Suite{
		Kind:   kind,
		Config: provision.Config{Mesh: "m1", Address: provision.Address{Host: "db", Port: 1, TLS: provision.Off}},
		Faults: way{server},
		Dial: func(ctx context.Context, fields map[string]string) (provisiontest.Session, error) {
			return kind.Dial(ctx, fields)
		},
		Trespass: func(ctx context.Context, fields map[string]string, other provision.Resource) error {
			fields["database"] = other.Name
			s, err := kind.Dial(ctx, fields)
			if err != nil {
				return err
			}
			return s.Close()
		},
		Plant: func(t *testing.T, res provision.Resource, login provision.Login) {
			server.Plant(res.Name, login.Name)
			t.Cleanup(func() { server.Drop(res.Name); server.Drop(login.Name) })
		},
		Drop: func(_ context.Context, login provision.Login) error {
			server.Drop(login.Name)
			return nil
		},
	})
}

var (
	res   = provision.Resource{ID: "r", Name: "r"}
	login = provision.Login{Name: "r_1", Secret: "0123456789abcdef0123456789abcdef"}
	at    = provision.Address{Host: "db", Port: 1, TLS: provision.Off}
)

// minted returns a world with one login on one server, and its provider on alpha.
func minted(t *testing.T) (*memory.World, *memory.Server, provision.Provider) {
	t.Helper()
	world := memory.NewWorld()
	server := world.Serve("db", 1)
	p, err := world.Kind("alpha").Open(provision.Config{Mesh: "m", Address: at})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Ensure(t.Context(), res, login); err != nil {
		t.Fatal(err)
	}
	return world, server, p
}

func wantClass(t *testing.T, what string, err error, want provision.Class) {
	t.Helper()
	if got := provision.ClassOf(err); got != want {
		t.Errorf("%s: got class %q (%v), want %q", what, got, err, want)
	}
}

func TestFaultsRefuse(t *testing.T) {
	for _, class := range []provision.Class{provision.ReadOnly, provision.Recovery, provision.Full, provision.MissingRight} {
		_, server, p := minted(t)
		server.Set(memory.Fault{Class: class})
		wantClass(t, "Preflight", p.Preflight(t.Context()), class)
		wantClass(t, "Ensure", p.Ensure(t.Context(), res, login), class)
		wantClass(t, "Verify, which writes nothing", p.Verify(t.Context(), res, login), "")
		server.Set()
		wantClass(t, "Ensure after the fault", p.Ensure(t.Context(), res, login), "")
	}
}

func TestFaultOfOneNode(t *testing.T) {
	world, server, p := minted(t)
	beta := world.Kind("beta")
	fields := beta.Fields(at, res, login)
	app, err := beta.Dial(t.Context(), fields)
	if err != nil {
		t.Fatal(err)
	}
	server.Set(memory.Fault{Class: provision.Unreachable, Node: "beta"})
	wantClass(t, "Check from beta", beta.Check(t.Context(), fields), provision.Unreachable)
	wantClass(t, "Put in beta's session", app.Put(t.Context(), "k", "v"), provision.Unreachable)
	wantClass(t, "Verify from alpha", p.Verify(t.Context(), res, login), "")
	if n, err := p.InUse(t.Context(), login); n != 0 || err != nil {
		t.Errorf("InUse: got %d, %v; the cut has ended beta's session", n, err)
	}
}

func TestHangAndDelayInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, server, p := minted(t)
		server.Set(memory.Fault{Hang: true, After: 2})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		wantClass(t, "Ensure of a hanging server", p.Ensure(ctx, res, login), provision.TimedOut)
		if took := time.Since(began); took != time.Hour {
			t.Errorf("it hung for %v", took)
		}

		done := make(chan error, 1)
		go func() { done <- p.Ensure(t.Context(), res, login) }()
		synctest.Wait()
		server.Set(memory.Fault{Delay: time.Second})
		began = time.Now()
		if err := <-done; err != nil {
			t.Error(err)
		}
		// All four steps: the first two had passed, before the hang, in the other call.
		if took := time.Since(began); took != 4*time.Second {
			t.Errorf("four steps of a second took %v", took)
		}

		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		if err := p.Ensure(ctx, res, login); !errors.Is(err, context.Canceled) {
			t.Errorf("Ensure for a caller that has gone: got %v", err)
		}
	})
}

func TestStepsAreCounted(t *testing.T) {
	_, server, p := minted(t)
	before := server.Steps()
	if _, err := p.Observe(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := server.Steps() - before; got != 1 {
		t.Errorf("Observe took %d steps, want 1", got)
	}
}

func TestOpenNamesEveryFault(t *testing.T) {
	_, err := memory.NewWorld().Kind("alpha").Open(provision.Config{Options: map[string]string{"x": "", "admin": "nowhere"}})
	wantClass(t, "Open", err, provision.BadConfig)
	for _, part := range []string{`"x"`, "admin", "mesh"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not name %s", err, part)
		}
	}
}
