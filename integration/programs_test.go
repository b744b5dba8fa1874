package integration

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// The programs that the scripts run stand for a user's own: they know nothing of
// meshd but what is delivered to them.

// app logs in to a database with the files of its requirement, db unless its
// argument says another, and holds the session. It logs in anew when it is cut
// off.
func app() {
	endWithTheTest()
	requirement := "db"
	if len(os.Args) > 1 {
		requirement = os.Args[1]
	}
	ctx := context.Background()
	for {
		err := hold(ctx, filepath.Join(os.Getenv("SERVICE_BINDING_ROOT"), requirement))
		fmt.Println("cut off:", err)
		<-time.After(200 * time.Millisecond)
	}
}

// hold logs in, and returns when the session ends.
func hold(ctx context.Context, dir string) error {
	uri, err := os.ReadFile(filepath.Join(dir, "uri"))
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, string(uri))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var user, database string
	if err := conn.QueryRow(ctx, "SELECT session_user, current_database()").Scan(&user, &database); err != nil {
		return err
	}
	fmt.Println("logged in as", user, "to", database)
	_, err = conn.WaitForNotification(ctx) // there are none
	return err
}

// kvapp writes and reads a key of a bucket with the files of its requirement
// notes, holds the connection, and says what it read.
func kvapp() {
	endWithTheTest()
	field := func(name string) string {
		text, err := os.ReadFile(filepath.Join(os.Getenv("SERVICE_BINDING_ROOT"), "notes", name))
		if err != nil {
			log.Fatal(err)
		}
		return string(text)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(field("ca.crt"))) {
		log.Fatal("ca.crt has no certificate")
	}
	nc, err := nats.Connect(field("uri"), nats.CustomInboxPrefix(field("inbox")), nats.Secure(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}))
	if err != nil {
		log.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	bucket, err := js.KeyValue(ctx, field("bucket"))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := bucket.PutString(ctx, "greeting", "hello from "+os.Getenv("MESHD_ASSIGNMENT")); err != nil {
		log.Fatal(err)
	}
	entry, err := bucket.Get(ctx, "greeting")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("read %q\n", entry.Value())
	select {}
}

// aliveFile is locked for as long as the test runs.
const aliveFile = "alive"

// holdAlive locks the file of root until the result is closed or this process
// ends, however it does.
func holdAlive(root string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(root, aliveFile), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	return f, syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
}

// endWithTheTest ends this process when the test does. What meshd supervises
// outlives meshd, so nothing else would when the test is killed.
func endWithTheTest() {
	for dir := os.Getenv("SERVICE_BINDING_ROOT"); dir != "/" && dir != "."; dir = filepath.Dir(dir) {
		f, err := os.Open(filepath.Join(dir, aliveFile))
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			log.Fatal(err)
		}
		go func() {
			for {
				err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH)
				if err != syscall.EINTR {
					log.Fatal("the test has ended")
				}
			}
		}()
		return
	}
	log.Fatal(fs.ErrNotExist)
}
