package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"meshd/provision"
)

// kvOperations does everything that a program does with a bucket.
func kvOperations(ctx context.Context, js jetstream.JetStream, bucket string) error {
	kv, err := js.KeyValue(ctx, bucket)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	rev, err := kv.PutString(ctx, "a.b", "1")
	if err != nil {
		return fmt.Errorf("put: %w", err)
	}
	if _, err := kv.Get(ctx, "a.b"); err != nil {
		return fmt.Errorf("get: %w", err)
	}
	if _, err := kv.GetRevision(ctx, "a.b", rev); err != nil {
		return fmt.Errorf("get revision: %w", err)
	}
	if _, err := kv.Update(ctx, "a.b", []byte("2"), rev); err != nil {
		return fmt.Errorf("update: %w", err)
	}
	if keys, err := kv.Keys(ctx); err != nil || len(keys) == 0 {
		return fmt.Errorf("keys %v: %w", keys, err)
	}
	if _, err := kv.History(ctx, "a.b"); err != nil {
		return fmt.Errorf("history: %w", err)
	}
	if _, err := kv.Status(ctx); err != nil {
		return fmt.Errorf("status: %w", err)
	}
	for n := range 32 { // 8 MiB: far past flow control
		if _, err := kv.Put(ctx, fmt.Sprintf("large.%d", n), make([]byte, 256<<10)); err != nil {
			return fmt.Errorf("put: %w", err)
		}
	}
	all, err := kv.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("watch all: %w", err)
	}
	defer all.Stop()
	for more := true; more; {
		select {
		case entry := <-all.Updates():
			more = entry != nil
		case <-ctx.Done():
			return fmt.Errorf("watch all: %w", ctx.Err())
		}
	}
	watch, err := kv.Watch(ctx, "a.>", jetstream.UpdatesOnly())
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	defer watch.Stop()
	if err := kv.Delete(ctx, "a.b"); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	select {
	case <-watch.Updates():
	case <-ctx.Done():
		return fmt.Errorf("watch: %w", ctx.Err())
	}
	if _, err := kv.Create(ctx, "a.b", nil); err != nil {
		return fmt.Errorf("create: %w", err)
	}
	if err := kv.Purge(ctx, "a.b"); err != nil {
		return fmt.Errorf("purge: %w", err)
	}
	if err := kv.PurgeDeletes(ctx, jetstream.DeleteMarkersOlderThan(-1)); err != nil {
		return fmt.Errorf("purge deletes: %w", err)
	}
	return nil
}

// objectOperations does everything that a program does with an object store.
func objectOperations(ctx context.Context, js jetstream.JetStream, bucket string) error {
	store, err := js.ObjectStore(ctx, bucket)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	large := bytes.Repeat([]byte("0123456789abcdef"), 1<<19) // 8 MiB: far past flow control
	if _, err := store.PutBytes(ctx, "dir/large", large); err != nil {
		return fmt.Errorf("put: %w", err)
	}
	if got, err := store.GetBytes(ctx, "dir/large"); err != nil || !bytes.Equal(got, large) {
		return fmt.Errorf("get: %d bytes, %w", len(got), err)
	}
	if _, err := store.PutString(ctx, "dir/large", "small now"); err != nil {
		return fmt.Errorf("replace: %w", err)
	}
	if _, err := store.Status(ctx); err != nil {
		return fmt.Errorf("status: %w", err)
	}
	watch, err := store.Watch(ctx)
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	defer watch.Stop()
	select {
	case <-watch.Updates():
	case <-ctx.Done():
		return fmt.Errorf("watch: %w", ctx.Err())
	}
	if list, err := store.List(ctx); err != nil || len(list) == 0 {
		return fmt.Errorf("list %v: %w", list, err)
	}
	if err := store.UpdateMeta(ctx, "dir/large", jetstream.ObjectMeta{Name: "other"}); err != nil {
		return fmt.Errorf("rename: %w", err)
	}
	if _, err := store.GetInfo(ctx, "other"); err != nil {
		return fmt.Errorf("get info: %w", err)
	}
	if err := store.Delete(ctx, "other"); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	return nil
}

func operations(k provision.Kind) func(context.Context, jetstream.JetStream, string) error {
	if k.Name() == "kv-bucket" {
		return kvOperations
	}
	return objectOperations
}

func TestEveryOperationIsAllowed(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		s := start(t, nil)
		k := kind(s)
		p := open(t, k, s, nil)
		must(t, p.Ensure(within(t), resource("orders"), user("u", 1)))
		c := connect(t, k.Fields(address(s), resource("orders"), user("u", 1)))
		must(t, operations(k)(within(t), c.js, "orders"))
		if got := answer(t, p)[0].Bytes; k.Name() == "object-bucket" && got > 1<<20 {
			t.Errorf("%d bytes of replaced and deleted objects remain", got)
		}
		if err := c.LastError(); err != nil {
			t.Fatalf("something was refused on the way: %v", err)
		}
	})
}

// plain starts a server of one account with these users and an admin, and
// returns the admin's access and the URL.
func plain(t *testing.T, users ...*server.User) (js jetstream.JetStream, url string) {
	t.Helper()
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, NoLog: true, NoSigs: true,
		JetStream: true, StoreDir: t.TempDir(),
		Users: append(users, &server.User{Username: "admin", Password: "admin"}),
	})
	must(t, err)
	s.Start()
	t.Cleanup(s.WaitForShutdown)
	t.Cleanup(s.Shutdown)
	if !s.ReadyForConnections(startLimit) {
		t.Fatal("not ready")
	}
	admin, err := nats.Connect(s.ClientURL(), nats.UserInfo("admin", "admin"))
	must(t, err)
	t.Cleanup(admin.Close)
	js, err = jetstream.New(admin)
	must(t, err)
	return js, s.ClientURL()
}

// Without any one of the rights something fails. The three exceptions are for
// clients other than nats.go: the account's state, reads of a server that is not
// the store's leader, acknowledgements.
func TestEveryRightIsNeeded(t *testing.T) {
	spare := []string{"$JS.API.INFO", "$JS.API.STREAM.MSG.GET.", "$JS.ACK."}
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		f := kind(nil).(bucketKind)
		all := rights(login{Name: "u", Account: f.account("orders")})
		var users []*server.User
		for n, right := range all.Publish.Allow {
			if slices.ContainsFunc(spare, func(p string) bool { return strings.HasPrefix(right, p) }) {
				continue
			}
			users = append(users, &server.User{
				Username: fmt.Sprint(n), Password: "x",
				Permissions: &server.Permissions{Subscribe: all.Subscribe, Publish: &server.SubjectPermission{
					Allow: slices.Delete(slices.Clone(all.Publish.Allow), n, n+1),
				}},
			})
		}
		js, url := plain(t, users...)
		must(t, f.ensure(within(t), js, "orders", "", defaultMaxBytes))
		for _, u := range users {
			// A download that stalls sees the deadline, and not that ctx was cancelled.
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			c, err := nats.Connect(url, nats.UserInfo(u.Username, u.Password), nats.CustomInboxPrefix(inbox("u")),
				nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) { cancel() }))
			must(t, err)
			js, err := jetstream.New(c)
			must(t, err)
			err = operations(f)(ctx, js, "orders")
			if !errors.Is(c.LastError(), nats.ErrPermissionViolation) {
				n, _ := strconv.Atoi(u.Username)
				t.Errorf("without %s: %v", all.Publish.Allow[n], err)
			}
			cancel()
			c.Close()
		}
	})
}

// Whatever a login of bucket a asks for, bucket b stays as it is and unseen:
// within a kind, across kinds, and through the subjects that the server fills in
// for a client.
func TestForeignBucketsAreOutOfReach(t *testing.T) {
	s := start(t, nil)
	ctx := within(t)
	kvs, objects := open(t, KV(s), s, nil), open(t, Object(s), s, nil)
	a, b := resource("a"), resource("b")
	must(t, kvs.Ensure(ctx, a, user("ua", 1)))
	must(t, kvs.Ensure(ctx, a, user("ua2", 5)))
	must(t, kvs.Ensure(ctx, b, user("ub", 2)))
	must(t, objects.Ensure(ctx, a, user("oa", 3)))
	must(t, objects.Ensure(ctx, b, user("ob", 4)))
	victimKV := connect(t, KV(s).Fields(address(s), b, user("ub", 2)))
	victimKV.write(t, KV(s), "k", "good")
	victimObjects := connect(t, Object(s).Fields(address(s), b, user("ob", 4)))
	victimObjects.write(t, Object(s), "k", "good")
	before := [][]bucketLine{answer(t, kvs), answer(t, objects)}

	attacker := connect(t, KV(s).Fields(address(s), a, user("ua", 1)))
	objectAttacker := connect(t, Object(s).Fields(address(s), a, user("oa", 3)))
	for _, c := range []*consumer{attacker, objectAttacker} {
		for _, subject := range []string{
			"$KV.b.k", "$O.b.M.x", "$O.b.C.x",
			"$JS.API.STREAM.INFO.KV_b", "$JS.API.STREAM.INFO.OBJ_b", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST",
			"$JS.API.STREAM.DELETE.KV_b", "$JS.API.STREAM.DELETE.KV_a", "$JS.API.STREAM.DELETE.OBJ_a",
			"$JS.API.STREAM.UPDATE.KV_a", "$JS.API.STREAM.UPDATE.OBJ_a", "$JS.API.STREAM.CREATE.more",
			"$JS.API.STREAM.PURGE.KV_b", "$JS.API.STREAM.PURGE.OBJ_b",
			"$JS.API.STREAM.MSG.GET.KV_b", "$JS.API.STREAM.MSG.DELETE.KV_a",
			"$JS.API.DIRECT.GET.KV_b.$KV.b.k", "$JS.API.DIRECT.GET.OBJ_b",
			"$JS.API.CONSUMER.CREATE.KV_b.x.$KV.b.>", "$JS.API.CONSUMER.CREATE.OBJ_b.x",
			"$SYS.REQ.SERVER.PING", "$SRV.PING", "anything",
		} {
			short, cancel := context.WithTimeout(ctx, 5*time.Second)
			heard := make(chan error, 1)
			c.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { heard <- err })
			must(t, c.PublishRequest(subject, c.NewInbox(), []byte("{}")))
			select {
			case err := <-heard:
				if !strings.Contains(err.Error(), "Permissions Violation for Publish to \""+subject) {
					t.Errorf("%s: %v", subject, err)
				}
			case <-short.Done():
				t.Errorf("%s: not refused", subject)
			}
			cancel()
		}
		// What other logins hear, of the same bucket and of others.
		for _, subject := range []string{">", "$KV.>", "$O.>", "_INBOX.>", "_INBOX_ub.>", "_INBOX_ua2.>", "$JS.>", "$SYS.>"} {
			heard := make(chan error, 1)
			c.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { heard <- err })
			sub, err := c.SubscribeSync(subject)
			must(t, err)
			select {
			case err := <-heard:
				if !strings.Contains(err.Error(), "Permissions Violation for Subscription") {
					t.Errorf("%s: %v", subject, err)
				}
			case <-time.After(5 * time.Second):
				t.Errorf("hearing %s: not refused", subject)
			}
			_ = sub.Unsubscribe() // it was never made
		}
	}

	// The subjects that the server fills in: a reply, and a delivery.
	must(t, attacker.PublishRequest("$KV.a.x", "$KV.b.k", []byte("evil")))
	must(t, attacker.PublishRequest("$JS.API.STREAM.INFO.KV_a", "$KV.b.k", nil))
	must(t, objectAttacker.PublishRequest("$O.a.C.x", "$O.b.M.k", []byte("evil")))
	_, err := attacker.js.CreatePushConsumer(ctx, "KV_a", jetstream.ConsumerConfig{
		Name: "p", DeliverSubject: "$KV.b.k", FilterSubject: "$KV.a.x", AckPolicy: jetstream.AckNonePolicy,
	})
	t.Logf("the server takes a delivery into another bucket with: %v", err)
	attacker.write(t, KV(s), "x", "evil") // answered after all of the above was

	if got := victimKV.read(t, KV(s), "k"); got != "good" {
		t.Errorf("the key is %q", got)
	}
	if got := victimObjects.read(t, Object(s), "k"); got != "good" {
		t.Errorf("the object is %q", got)
	}
	for n, p := range []provision.Provider{kvs, objects} {
		if after := answer(t, p); after[1] != before[n][1] {
			t.Errorf("bucket b was %+v and is %+v", before[n][1], after[1])
		}
	}
}

// One account for all would not do: this is why each bucket has its own. When
// this test fails, the server checks reply subjects, and the accounts may go.
func TestPermissionsAloneDoNotKeepBucketsApart(t *testing.T) {
	js, url := plain(t, &server.User{Username: "u", Password: "u", Permissions: rights(login{Name: "u", Account: "KV_a"})})
	for _, bucket := range []string{"a", "b"} {
		_, err := js.CreateKeyValue(within(t), jetstream.KeyValueConfig{Bucket: bucket})
		must(t, err)
	}
	kv, err := js.KeyValue(within(t), "b")
	must(t, err)
	_, err = kv.PutString(within(t), "k", "good")
	must(t, err)
	u, err := nats.Connect(url, nats.UserInfo("u", "u"), nats.CustomInboxPrefix(inbox("u")))
	must(t, err)
	defer u.Close()
	must(t, u.PublishRequest("$KV.a.x", "$KV.b.k", []byte("x")))
	wait(t, "the acknowledgement to overwrite the other bucket's key", func() bool {
		entry, err := kv.Get(within(t), "k")
		return err == nil && string(entry.Value()) != "good"
	})
}
