package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"meshd/provision"
)

// write puts one value through what was delivered and reads it back.
func (c *consumer) write(t *testing.T, k provision.Kind, name, value string) {
	t.Helper()
	ctx := within(t)
	if k.Name() == "kv-bucket" {
		_, err := c.kv(t).PutString(ctx, name, value)
		must(t, err)
	} else {
		_, err := c.objects(t).PutString(ctx, name, value)
		must(t, err)
	}
	if got := c.read(t, k, name); got != value {
		t.Fatalf("read %q, wrote %q", got, value)
	}
}

func (c *consumer) read(t *testing.T, k provision.Kind, name string) string {
	t.Helper()
	if k.Name() == "kv-bucket" {
		entry, err := c.kv(t).Get(within(t), name)
		must(t, err)
		return string(entry.Value())
	}
	value, err := c.objects(t).GetString(within(t), name)
	must(t, err)
	return value
}

func TestLifeOfABucket(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		var log bytes.Buffer
		s := start(t, func(c *ServerConfig) { c.Log = testLog(&log) })
		k := kind(s)
		p := open(t, k, s, nil)
		ctx := within(t)
		res, a, b := resource("orders"), user("shop_a", 1), user("shop_b", 2)
		must(t, p.Preflight(ctx))
		must(t, p.Preflight(ctx))

		for range 2 { // whatever was there before
			must(t, p.Ensure(ctx, res, a))
			must(t, p.Verify(ctx, res, a))
		}
		must(t, p.Ensure(ctx, res, b))
		if n, err := p.InUse(ctx, a); n != 0 || err != nil {
			t.Fatalf("in use %d, %v before anybody connected", n, err)
		}
		ca := connect(t, k.Fields(address(s), res, a))
		connect(t, k.Fields(address(s), res, a))
		cb := connect(t, k.Fields(address(s), res, b))
		ca.write(t, k, "x", "kept")
		if n, err := p.InUse(ctx, a); n != 2 || err != nil {
			t.Fatalf("in use %d, %v, want 2", n, err)
		}
		// A repeated Ensure and a check disturb nobody.
		must(t, p.Ensure(ctx, res, a))
		must(t, k.Check(ctx, k.Fields(address(s), res, a)))
		if n, err := p.InUse(ctx, a); n != 2 || err != nil {
			t.Fatalf("in use %d, %v, want 2", n, err)
		}

		wantClass(t, p.Purge(ctx, res), provision.Blocked)
		ended, err := p.Withdraw(ctx, res, []provision.Login{{Name: a.Name}})
		if ended != 2 || err != nil {
			t.Fatalf("ended %d, %v, want 2", ended, err)
		}
		wait(t, "the withdrawn session to end", ca.IsClosed)
		wantClass(t, k.Check(ctx, k.Fields(address(s), res, a)), provision.Refused)
		wantClass(t, p.Verify(ctx, res, a), provision.Refused)
		if got := cb.read(t, k, "x"); got != "kept" { // the same session goes on
			t.Fatalf("read %q", got)
		}
		if ended, err := p.Withdraw(ctx, res, []provision.Login{a, b}); ended != 1 || err != nil {
			t.Fatalf("ended %d, %v, want 1", ended, err)
		}
		found, err := p.Observe(ctx)
		must(t, err)
		if want := []provision.Found{{Name: "orders", Mark: "meshd:m1:id-orders"}}; !reflect.DeepEqual(found, want) {
			t.Fatalf("found %v, want %v", found, want)
		}

		// The same consumer comes back to its data.
		must(t, p.Ensure(ctx, res, b))
		if got := connect(t, k.Fields(address(s), res, b)).read(t, k, "x"); got != "kept" {
			t.Fatalf("read %q", got)
		}
		_, err = p.Withdraw(ctx, res, []provision.Login{b})
		must(t, err)
		for range 2 {
			must(t, p.Purge(ctx, res))
		}
		if found, err := p.Observe(ctx); len(found) != 0 || err != nil {
			t.Fatalf("found %v, %v after purge", found, err)
		}
		// A purged name can be made again, empty.
		must(t, p.Ensure(ctx, res, a))
		must(t, p.Verify(ctx, res, a))
		if got := answer(t, p); got[0].Values != 0 {
			t.Fatalf("%+v after purge and a new start: values stayed, or a check left some", got)
		}
		for n := range 3 {
			if strings.Contains(log.String(), secret(n)) {
				t.Fatal("a secret is in the log")
			}
		}
	})
}

func answer(t *testing.T, p provision.Provider) []bucketLine {
	t.Helper()
	text, err := p.(provision.Answerer).Answer(within(t), "buckets", []byte("{}"))
	must(t, err)
	var lines []bucketLine
	must(t, json.Unmarshal(text, &lines))
	return lines
}

func TestAnswer(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		s := start(t, nil)
		k := kind(s)
		p := open(t, k, s, nil)
		if got, err := p.(provision.Answerer).Answer(within(t), "buckets", nil); string(got) != "[]" || err != nil {
			t.Fatalf("%s, %v", got, err)
		}
		must(t, p.Ensure(within(t), resource("b1"), user("u1", 1)))
		must(t, p.Ensure(within(t), resource("b2"), user("u2", 2)))
		other, err := k.Open(provision.Config{Mesh: "m2", Address: address(s)})
		must(t, err)
		must(t, other.Ensure(within(t), resource("b3"), user("u3", 3)))
		c := connect(t, k.Fields(address(s), resource("b1"), user("u1", 1)))
		c.write(t, k, "x", "1")
		c.write(t, k, "y", strings.Repeat("2", 300<<10)) // three pieces, as an object
		got := answer(t, p)
		if got[0].Bytes < 300<<10 {
			t.Errorf("bytes %d, fewer than were written", got[0].Bytes)
		}
		got[0].Bytes = 0
		want := []bucketLine{{Name: "b1", Values: 2, Sessions: 1, Ours: true}, {Name: "b2", Ours: true}, {Name: "b3"}}
		if !slices.Equal(got, want) {
			t.Errorf("answer %+v\nwant   %+v", got, want)
		}
		_, err = p.(provision.Answerer).Answer(within(t), "query", nil)
		wantClass(t, err, provision.BadConfig)
		if !strings.Contains(err.Error(), "buckets") {
			t.Errorf("%v: does not list the verbs", err)
		}
		_, err = p.(provision.Answerer).Answer(within(t), "buckets", []byte(`{"a":1}`))
		wantClass(t, err, provision.BadConfig)
	})
}

func TestNotOurs(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		s := start(t, nil)
		k := kind(s)
		ours := open(t, k, s, nil)
		theirs, err := k.Open(provision.Config{Mesh: "m2", Address: address(s)})
		must(t, err)
		ctx, res := within(t), resource("orders")
		must(t, theirs.Ensure(ctx, res, user("u1", 1)))
		connect(t, k.Fields(address(s), res, user("u1", 1))).write(t, k, "x", "theirs")

		wantClass(t, ours.Ensure(ctx, res, user("u2", 2)), provision.Foreign)
		wantClass(t, ours.Ensure(ctx, resource("mine"), user("u1", 1)), provision.Foreign)
		_, err = ours.Withdraw(ctx, res, []provision.Login{user("u1", 1)})
		wantClass(t, err, provision.Foreign)
		_, err = theirs.Withdraw(ctx, res, []provision.Login{user("u1", 1)})
		must(t, err)
		wantClass(t, ours.Purge(ctx, res), provision.Foreign)
		if found, err := ours.Observe(ctx); len(found) != 0 || err != nil {
			t.Fatalf("found %v, %v", found, err)
		}
		must(t, theirs.Ensure(ctx, res, user("u1", 1)))
		if got := connect(t, k.Fields(address(s), res, user("u1", 1))).read(t, k, "x"); got != "theirs" {
			t.Fatalf("read %q", got)
		}
	})
}

// A rotation under load: both generations work, and the writes of a consumer
// that moves over in between never fail.
func TestRotationUnderLoad(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		s := start(t, nil)
		k := kind(s)
		p := open(t, k, s, nil)
		ctx, res := within(t), resource("orders")
		must(t, p.Ensure(ctx, res, user("bystander", 99)))
		bystander := connect(t, k.Fields(address(s), res, user("bystander", 99)))
		var writes atomic.Int64
		var failed error
		stop, ready := make(chan struct{}), make(chan struct{})
		var load sync.WaitGroup
		load.Go(func() {
			js := bystander.js
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := js.Publish(ctx, map[string]string{"kv-bucket": "$KV.orders.load", "object-bucket": "$O.orders.C.load"}[k.Name()], []byte("x")); err != nil {
					failed = fmt.Errorf("write %d: %w", n, err)
				}
				if writes.Add(1) == 1 {
					close(ready)
				}
			}
		})
		<-ready
		old := user("shop_0", 0)
		must(t, p.Ensure(ctx, res, old))
		current := connect(t, k.Fields(address(s), res, old))
		for n := 1; n <= 10; n++ {
			next := user(fmt.Sprintf("shop_%d", n), n)
			must(t, p.Ensure(ctx, res, next))
			must(t, p.Verify(ctx, res, next))
			moved := connect(t, k.Fields(address(s), res, next))
			current.write(t, k, "x", "old") // both work
			moved.write(t, k, "x", "new")
			if used, err := p.InUse(ctx, next); used != 1 || err != nil {
				t.Fatalf("in use %d, %v", used, err)
			}
			if ended, err := p.Withdraw(ctx, res, []provision.Login{old}); ended != 1 || err != nil {
				t.Fatalf("ended %d, %v", ended, err)
			}
			wait(t, "the old session to end", current.IsClosed)
			old, current = next, moved
		}
		close(stop)
		load.Wait()
		must(t, failed)
		if writes.Load() < 10 || bystander.Stats().Reconnects != 0 || bystander.IsClosed() {
			t.Fatalf("%d writes, %d reconnects: the bystander was disturbed", writes.Load(), bystander.Stats().Reconnects)
		}
	})
}

func TestFullBucket(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		s := start(t, nil)
		k := kind(s)
		p := open(t, k, s, map[string]string{"max-bytes": "2MiB"})
		ctx, res, l := within(t), resource("small"), user("u", 1)
		must(t, p.Ensure(ctx, res, l))
		c := connect(t, k.Fields(address(s), res, l))
		c.write(t, k, "kept", strings.Repeat("k", 1<<20-100))
		var err error
		if k.Name() == "kv-bucket" {
			kv := c.kv(t)
			for n := 0; err == nil && n < 3<<20/1000; n++ {
				_, err = kv.PutString(ctx, fmt.Sprintf("k%d", n), strings.Repeat("v", 1000))
			}
			for n := 0; n < 100; n++ { // and the rest, which is smaller than a probe
				if _, last := kv.PutString(ctx, fmt.Sprintf("s%d", n), ""); last != nil {
					break
				}
			}
		} else {
			_, err = c.objects(t).PutString(ctx, "more", strings.Repeat("v", 2<<20))
		}
		if err == nil {
			t.Fatal("3 MiB went into a bucket of 2 MiB")
		}
		var api *jetstream.APIError
		if !errors.As(err, &api) || classifyAPI(api) != provision.Full {
			t.Fatalf("refused by %v", err)
		}
		if k.Name() == "kv-bucket" {
			wantClass(t, k.Check(ctx, k.Fields(address(s), res, l)), provision.Full)
		}
		if got := c.read(t, k, "kept"); len(got) != 1<<20-100 {
			t.Fatalf("%d bytes left of the first value", len(got))
		}
	})
}

// Limits that were changed, here or by hand, are brought back without the loss
// of a value.
func TestEnsureMends(t *testing.T) {
	s := start(t, nil)
	k := KV(s)
	ctx, res, l := within(t), resource("orders"), user("u", 1)
	must(t, open(t, k, s, nil).Ensure(ctx, res, l))
	kv := connect(t, k.Fields(address(s), res, l)).kv(t)
	admin, err := s.admin(ctx, "KV_orders")
	must(t, err)
	defer admin.Close()
	_, err = admin.js.UpdateKeyValue(ctx, jetstream.KeyValueConfig{
		Bucket: "orders", History: 5, MaxBytes: 1 << 30, Description: "meshd:m1:id-orders", Storage: jetstream.FileStorage,
	})
	must(t, err)
	for n := range 5 {
		_, err := kv.Put(ctx, "x", bytes.Repeat([]byte{'0' + byte(n)}, 900<<10))
		must(t, err)
	}
	must(t, open(t, k, s, map[string]string{"max-bytes": "2097152"}).Ensure(ctx, res, l))
	history, err := kv.History(ctx, "x")
	must(t, err)
	if len(history) != 5 || history[0].Value()[0] != '0' {
		t.Fatalf("%d values left of 5", len(history))
	}
	status, err := kv.Status(ctx)
	must(t, err)
	if got := status.Config().MaxBytes; got != 2<<20 {
		t.Fatalf("max bytes %d", got)
	}
	if _, err := kv.PutString(ctx, "y", "more"); err == nil {
		t.Fatal("the smaller limit does not hold")
	}
}

func TestStoreFull(t *testing.T) {
	s := start(t, func(c *ServerConfig) { c.MaxStore = 5 << 20 })
	p := open(t, KV(s), s, map[string]string{"max-bytes": "4MiB"})
	must(t, p.Ensure(within(t), resource("one"), user("u1", 1)))
	err := p.Ensure(within(t), resource("two"), user("u2", 2))
	wantClass(t, err, provision.Full)
	wantClass(t, p.Preflight(within(t)), provision.Full)
}

func TestOpenRefusals(t *testing.T) {
	s := start(t, nil)
	good := provision.Config{Mesh: "m1", Address: address(s)}
	for _, test := range []struct {
		name string
		kind provision.Kind
		edit func(*provision.Config)
		says string
	}{
		{"no server", KV(nil), nil, "this node runs no embedded store"},
		{"no server", Object(nil), nil, "this node runs no embedded store"},
		{"no mesh", KV(s), func(c *provision.Config) { c.Mesh = "" }, "mesh id"},
		{"no host", KV(s), func(c *provision.Config) { c.Address.Host = "" }, "a host and a port"},
		{"port", KV(s), func(c *provision.Config) { c.Address.Port = 70000 }, "a host and a port"},
		{"tls", KV(s), func(c *provision.Config) { c.Address.TLS = "on" }, `tls "on": write verify-full`},
		{"unknown option", Object(s), func(c *provision.Config) { c.Options = map[string]string{"admin": "x"} }, `option "admin": object-bucket knows only max-bytes`},
		{"not a size", KV(s), func(c *provision.Config) { c.Options = map[string]string{"max-bytes": "lots"} }, "write a number of bytes"},
		{"negative", KV(s), func(c *provision.Config) { c.Options = map[string]string{"max-bytes": "-1"} }, "write a number of bytes"},
		{"too large to count", KV(s), func(c *provision.Config) { c.Options = map[string]string{"max-bytes": "9999999999999GiB"} }, "write a number of bytes"},
		{"too small", KV(s), func(c *provision.Config) { c.Options = map[string]string{"max-bytes": "1KiB"} }, "must be from"},
		{"too large", KV(s), func(c *provision.Config) { c.Options = map[string]string{"max-bytes": "11GiB"} }, "must be from"},
	} {
		cfg := good
		if test.edit != nil {
			test.edit(&cfg)
		}
		_, err := test.kind.Open(cfg)
		if err == nil || !strings.Contains(err.Error(), test.says) || provision.ClassOf(err) != provision.BadConfig {
			t.Errorf("%s: %v, want %q", test.name, err, test.says)
		}
	}
}

func TestNamesRefused(t *testing.T) {
	s := start(t, nil)
	p := open(t, KV(s), s, nil)
	good, l := resource("orders"), user("u", 1)
	for _, test := range []struct {
		res   provision.Resource
		login provision.Login
	}{
		{provision.Resource{ID: "i", Name: "a.>"}, l},
		{provision.Resource{ID: "i", Name: ""}, l},
		{provision.Resource{ID: "i", Name: "a } b"}, l},
		{provision.Resource{ID: "i", Name: strings.Repeat("a", 41)}, l},
		{provision.Resource{Name: "a"}, l},
		{good, provision.Login{Name: "meshd-KV_orders", Secret: secret(1)}},
		{good, provision.Login{Name: "*", Secret: secret(1)}},
		{good, provision.Login{Name: "u", Secret: "short"}},
		{good, provision.Login{Name: "u", Secret: strings.Repeat("x", 73)}},
	} {
		wantClass(t, p.Ensure(within(t), test.res, test.login), provision.BadConfig)
	}
	if got := answer(t, p); len(got) != 0 {
		t.Fatalf("%v was made", got)
	}
	wantClass(t, p.Purge(within(t), provision.Resource{ID: "i", Name: "../x"}), provision.BadConfig)
}

func TestCheckClasses(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		s := start(t, nil)
		k := kind(s)
		p := open(t, k, s, nil)
		ctx, res, l := within(t), resource("orders"), user("u", 1)
		must(t, p.Ensure(ctx, res, l))
		must(t, p.Ensure(ctx, resource("other"), user("v", 2)))
		closed, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		nobody := closed.Addr().(*net.TCPAddr).Port
		must(t, closed.Close())
		at := address(s)
		for _, test := range []struct {
			name   string
			fields map[string]string
			want   provision.Class
		}{
			{"right", k.Fields(at, res, l), ""},
			{"nobody there", k.Fields(provision.Address{Host: "127.0.0.1", Port: nobody, TLS: provision.Off}, res, l), provision.Unreachable},
			{"wrong secret", k.Fields(at, res, user("u", 9)), provision.Refused},
			{"unknown login", k.Fields(at, res, user("nobody", 1)), provision.Refused},
			{"plain server", k.Fields(provision.Address{Host: at.Host, Port: at.Port, TLS: provision.Require}, res, l), provision.TLSFault},
			{"another's bucket", k.Fields(at, resource("other"), l), provision.Refused},
			{"no such bucket", k.Fields(at, resource("none"), l), provision.Refused},
			{"bad ca", k.Fields(provision.Address{Host: at.Host, Port: at.Port, TLS: provision.VerifyFull, CA: "x"}, res, l), provision.BadConfig},
			{"nothing", map[string]string{}, provision.BadConfig},
		} {
			if got := provision.ClassOf(k.Check(ctx, test.fields)); got != test.want {
				t.Errorf("%s: class %q, want %q", test.name, got, test.want)
			}
		}
		// Without a store of its own a node checks all the same.
		must(t, kind(nil).Check(ctx, kind(nil).Fields(at, res, l)))
		changed := k.Fields(at, res, l)
		changed["uri"] = strings.Replace(changed["uri"], "127.0.0.1", "127.0.0.2", 1)
		wantClass(t, k.Check(ctx, changed), provision.BadConfig)

		// The bucket was deleted by hand.
		admin, err := s.admin(ctx, p.(*provider).account(res.Name))
		must(t, err)
		defer admin.Close()
		must(t, admin.js.DeleteStream(ctx, p.(*provider).account(res.Name)))
		wantClass(t, p.Verify(ctx, res, l), provision.Internal)
		must(t, p.Ensure(ctx, res, l))
		must(t, p.Verify(ctx, res, l))

		// Another store at the address.
		there := start(t, nil)
		p2, err := k.Open(provision.Config{Mesh: "m1", Address: address(there)})
		must(t, err)
		must(t, p2.Ensure(ctx, res, l))
		wantClass(t, p2.Verify(ctx, res, l), provision.Refused)
		p3 := open(t, kind(there), there, nil)
		must(t, p3.Ensure(ctx, res, l))
		wantClass(t, p2.Verify(ctx, res, l), provision.BadConfig)

		s.Close()
		wantClass(t, p.Verify(ctx, res, l), provision.Unreachable)
		if err := p.Preflight(ctx); err == nil {
			t.Error("preflight of a stopped store passed")
		}
	})
}

// noPut is a JetStream whose object stores must not be put to.
type noPut struct {
	jetstream.JetStream
	t *testing.T
}

func (n noPut) ObjectStore(ctx context.Context, bucket string) (jetstream.ObjectStore, error) {
	store, err := n.JetStream.ObjectStore(ctx, bucket)
	return noPutStore{store, n.t}, err
}

type noPutStore struct {
	jetstream.ObjectStore
	t *testing.T
}

func (n noPutStore) PutString(ctx context.Context, name, value string) (*jetstream.ObjectInfo, error) {
	return n.Put(ctx, jetstream.ObjectMeta{Name: name}, strings.NewReader(value))
}

func (n noPutStore) PutBytes(ctx context.Context, name string, value []byte) (*jetstream.ObjectInfo, error) {
	return n.Put(ctx, jetstream.ObjectMeta{Name: name}, bytes.NewReader(value))
}

func (n noPutStore) Put(ctx context.Context, meta jetstream.ObjectMeta, r io.Reader) (*jetstream.ObjectInfo, error) {
	n.t.Error("the probe calls ObjectStore.Put, which may leave a goroutine behind")
	return n.ObjectStore.Put(ctx, meta, r)
}

// What the probe writes is an object like any other: a watcher sees it come,
// whole, and go.
func TestObjectProbe(t *testing.T) {
	s := start(t, nil)
	k := Object(s)
	ctx, res, l := within(t), resource("orders"), user("u", 1)
	must(t, open(t, k, s, nil).Ensure(ctx, res, l))
	c := connect(t, k.Fields(address(s), res, l))
	watch, err := c.objects(t).Watch(ctx, jetstream.UpdatesOnly())
	must(t, err)
	defer watch.Stop()
	must(t, probeObjects(ctx, noPut{c.js, t}, "orders"))
	for _, deleted := range []bool{false, true} {
		select {
		case seen := <-watch.Updates():
			if !strings.HasPrefix(seen.Name, probeName) || seen.Deleted != deleted || !deleted && seen.Size != uint64(len(probeValue)) {
				t.Fatalf("the watcher saw %+v, want deleted %v", seen, deleted)
			}
		case <-ctx.Done():
			t.Fatal("the watcher saw nothing")
		}
	}
	if list, err := c.objects(t).List(ctx, jetstream.ListObjectsShowDeleted()); !errors.Is(err, jetstream.ErrNoObjectsFound) {
		t.Fatalf("left behind: %v, %v", list, err)
	}
}

func TestFields(t *testing.T) {
	at := provision.Address{Host: "::1", Port: 4222, TLS: provision.VerifyFull, CA: "pem"}
	want := map[string]string{
		"type": "nats-kv", "host": "::1", "port": "4222", "tls": "verify-full", "bucket": "orders",
		"username": "u", "password": "p", "inbox": "_INBOX_u", "uri": "tls://u:p@[::1]:4222", "ca.crt": "pem",
	}
	res, l := resource("orders"), provision.Login{Name: "u", Secret: "p"}
	if got := KV(nil).Fields(at, res, l); !reflect.DeepEqual(got, want) {
		t.Errorf("kv: %v\nwant %v", got, want)
	}
	want["type"], want["tls"], want["uri"] = "nats-object", "off", "nats://u:p@[::1]:4222"
	delete(want, "ca.crt")
	at.TLS = provision.Off
	if got := Object(nil).Fields(at, res, l); !reflect.DeepEqual(got, want) {
		t.Errorf("object: %v\nwant %v", got, want)
	}
}
