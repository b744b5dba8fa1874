package jetstream

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"meshd/peer/identity"
	"meshd/provision"
)

// childDir makes this test binary a store on that folder, to be killed.
const childDir = "MESHD_TEST_STORE_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		os.Exit(child(dir))
	}
	goleak.VerifyTestMain(m,
		// The applications of these tests put objects, and ObjectStore.Put may
		// leave this behind (see putObject). Our own code never calls it:
		// TestObjectProbe.
		goleak.IgnoreTopFunction("github.com/nats-io/nats.go/jetstream.(*jetStream).resetPendingAcksOnReconnect"))
}

// wait fails the test unless ok comes true within ten seconds.
func wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(10 * time.Second)
	defer limit.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			t.Fatalf("waited 10 s for %s", what)
		}
	}
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// testLog is a log whose lines the test can search for secrets.
func testLog(to *bytes.Buffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(to, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func start(t *testing.T, edit func(*ServerConfig)) *Server {
	t.Helper()
	cfg := ServerConfig{Dir: t.TempDir(), Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler), Write: identity.WriteFile}
	if edit != nil {
		edit(&cfg)
	}
	s, err := StartServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func address(s *Server) provision.Address {
	host, port := s.Addr()
	return provision.Address{Host: host, Port: port, TLS: provision.Off}
}

func open(t *testing.T, k provision.Kind, s *Server, options map[string]string) provision.Provider {
	t.Helper()
	p, err := k.Open(provision.Config{Mesh: "m1", Address: address(s), Options: options})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func secret(n int) string { return fmt.Sprintf("Secret%032d", n) }

func user(name string, n int) provision.Login { return provision.Login{Name: name, Secret: secret(n)} }

func resource(name string) provision.Resource {
	return provision.Resource{ID: "id-" + name, Name: name}
}

// consumer is an application that uses what was delivered to it.
type consumer struct {
	*nats.Conn
	js     jetstream.JetStream
	bucket string
}

func connect(t *testing.T, fields map[string]string) *consumer {
	t.Helper()
	c, err := nats.Connect(fields["uri"], nats.CustomInboxPrefix(fields["inbox"]), nats.NoReconnect(),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	js, err := jetstream.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return &consumer{c, js, fields["bucket"]}
}

func (c *consumer) kv(t *testing.T) jetstream.KeyValue {
	t.Helper()
	kv, err := c.js.KeyValue(within(t), c.bucket)
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

func (c *consumer) objects(t *testing.T) jetstream.ObjectStore {
	t.Helper()
	store, err := c.js.ObjectStore(within(t), c.bucket)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// both runs a test for each kind.
func both(t *testing.T, test func(t *testing.T, kind func(*Server) provision.Kind)) {
	t.Run("kv", func(t *testing.T) { test(t, KV) })
	t.Run("object", func(t *testing.T) { test(t, Object) })
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantClass(t *testing.T, err error, want provision.Class) {
	t.Helper()
	if got := provision.ClassOf(err); got != want {
		t.Fatalf("class %q, want %q: %v", got, want, err)
	}
}
