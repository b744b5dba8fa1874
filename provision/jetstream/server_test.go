package jetstream

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"meshd/peer/identity"
	"meshd/provision"
)

func TestConfigFaultsAreAllReported(t *testing.T) {
	err := ServerConfig{Listen: "127.0.0.1:99999", MaxStore: -1}.Validate()
	for _, says := range []string{"dir is empty", "log is nil", "write is nil", "not a number from 0 to 65535", "cannot be negative"} {
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: does not say %q", err, says)
		}
	}
	if _, err := StartServer(ServerConfig{Dir: t.TempDir(), Listen: "nowhere", Log: slog.New(slog.DiscardHandler), Write: identity.WriteFile}); err == nil {
		t.Error("a listen address without a port was taken")
	}
}

func TestPortIsKept(t *testing.T) {
	dir := t.TempDir()
	in := func(c *ServerConfig) { c.Dir = dir }
	s := start(t, in)
	_, port := s.Addr()
	s.Close()
	s = start(t, in)
	if _, again := s.Addr(); again != port {
		t.Fatalf("port %d, then %d", port, again)
	}
	s.Close()
	taken, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	must(t, err)
	defer taken.Close()
	_, err = StartServer(ServerConfig{Dir: dir, Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler), Write: identity.WriteFile})
	if err == nil || !strings.Contains(err.Error(), "free it, or remove") {
		t.Fatalf("start on a taken port: %v", err)
	}
}

// Nobody gets in without a login, on a new server least of all, and the admin
// not from outside.
func TestClosedToStrangers(t *testing.T) {
	s := start(t, nil)
	p := open(t, KV(s), s, nil)
	for range 2 {
		for _, option := range []nats.Option{
			nats.UserInfo("", ""),
			nats.UserInfo(adminName(probeAccount), s.secret),
			nats.UserInfo(adminName("KV_orders"), s.secret),
			nats.Token("x"),
		} {
			host, port := s.Addr()
			c, err := nats.Connect(fmt.Sprintf("nats://%s:%d", host, port), option, nats.NoReconnect())
			if err == nil {
				c.Close()
				t.Fatal("a stranger was let in")
			}
			if !errors.Is(err, nats.ErrAuthorization) {
				t.Fatalf("refused by %v", err)
			}
		}
		must(t, p.Ensure(within(t), resource("orders"), user("u", 1)))
	}
}

func TestLoginsFile(t *testing.T) {
	dir := t.TempDir()
	s := start(t, func(c *ServerConfig) { c.Dir = dir })
	must(t, open(t, KV(s), s, nil).Ensure(within(t), resource("orders"), user("u", 1)))
	s.Close()
	path := filepath.Join(dir, "logins.json")
	text, err := os.ReadFile(path)
	must(t, err)
	if bytes.Contains(text, []byte(secret(1))) {
		t.Error("the secret is in the file")
	}
	stat, err := os.Stat(path)
	must(t, err)
	if stat.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", stat.Mode())
	}
	for _, bad := range []string{"", "{", "{}", `{"format":2,"logins":[]}`, `{"format":1,"logins":[],"more":1}`,
		`{"format":1,"logins":[{"name":"u"}]}`, string(text) + "x"} {
		must(t, os.WriteFile(path, []byte(bad), 0o600))
		if s, err := StartServer(ServerConfig{Dir: dir, Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler), Write: identity.WriteFile}); err == nil {
			s.Close()
			t.Errorf("started with %q", bad)
		}
	}
}

// A file that cannot be written stops the change, and the next one does it all.
func TestChangeThatFails(t *testing.T) {
	dir := t.TempDir()
	full := false
	s := start(t, func(c *ServerConfig) {
		c.Dir = dir
		c.Write = func(path string, data []byte) error {
			if full {
				return syscall.ENOSPC
			}
			return identity.WriteFile(path, data)
		}
	})
	k := KV(s)
	p := open(t, k, s, nil)
	ctx, res, l := within(t), resource("orders"), user("u", 1)
	must(t, p.Ensure(ctx, res, l))
	full = true
	if _, err := p.Withdraw(ctx, res, []provision.Login{l}); err == nil {
		t.Fatal("withdrawn without a record of it")
	}
	must(t, k.Check(ctx, k.Fields(address(s), res, l)))
	full = false
	_, err := p.Withdraw(ctx, res, []provision.Login{l})
	must(t, err)
	s.Close()
	s = start(t, func(c *ServerConfig) { c.Dir = dir })
	wantClass(t, k.Check(ctx, k.Fields(address(s), res, l)), provision.Refused)
}

// Logins lost with their file leave the buckets: they are found, kept, and
// belong again to who made them.
func TestLostLoginsFile(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		dir := t.TempDir()
		s := start(t, func(c *ServerConfig) { c.Dir = dir })
		k := kind(s)
		ctx, res, l := within(t), resource("orders"), user("u", 1)
		must(t, open(t, k, s, nil).Ensure(ctx, res, l))
		connect(t, k.Fields(address(s), res, l)).write(t, k, "x", "kept")
		s.Close()
		must(t, os.Remove(filepath.Join(dir, "logins.json")))
		s = start(t, func(c *ServerConfig) { c.Dir = dir })
		k = kind(s)
		p := open(t, k, s, nil)
		if found, err := p.Observe(ctx); err != nil || len(found) != 1 || found[0].Name != "orders" {
			t.Fatalf("found %v, %v", found, err)
		}
		must(t, p.Ensure(ctx, res, l))
		if got := connect(t, k.Fields(address(s), res, l)).read(t, k, "x"); got != "kept" {
			t.Fatalf("read %q", got)
		}
	})
}

// child is a store in a process of its own, with a bucket and a login. It
// prints the port and waits to be killed.
func child(dir string) int {
	s, err := StartServer(ServerConfig{Dir: dir, Listen: "127.0.0.1:0", Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Write: identity.WriteFile})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	for _, k := range []provision.Kind{KV(s), Object(s)} {
		p, err := k.Open(provision.Config{Mesh: "m1", Address: address(s)})
		if err == nil {
			err = p.Ensure(context.Background(), resource("orders"), user("u_"+k.Name()[:2], 1))
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
	}
	_, port := s.Addr()
	fmt.Println("port", port)
	_, _ = bufio.NewReader(os.Stdin).ReadByte() // until the parent goes away
	s.Close()
	return 0
}

func TestKilledServerKeepsWhatItAcknowledged(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		dir := t.TempDir()
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childDir+"="+dir)
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		must(t, err)
		defer in.Close()
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		line, err := bufio.NewReader(out).ReadString('\n')
		must(t, err)
		var port int
		if _, err := fmt.Sscanf(line, "port %d\n", &port); err != nil {
			t.Fatalf("the child says %q", line)
		}
		at := provision.Address{Host: "127.0.0.1", Port: port, TLS: provision.Off}
		k := kind(nil)
		l := user("u_"+k.Name()[:2], 1)
		fields := k.Fields(at, resource("orders"), l)
		c := connect(t, fields)
		for n := range 50 {
			c.write(t, k, fmt.Sprintf("k%d", n), fmt.Sprintf("v%d", n))
		}
		must(t, cmd.Process.Signal(syscall.SIGKILL))
		_ = cmd.Wait() // "killed" is what is wanted

		s := start(t, func(c *ServerConfig) { c.Dir = dir })
		if _, again := s.Addr(); again != port {
			t.Fatalf("port %d, then %d", port, again)
		}
		c = connect(t, fields)
		for n := range 50 {
			if got := c.read(t, k, fmt.Sprintf("k%d", n)); got != fmt.Sprintf("v%d", n) {
				t.Fatalf("k%d is %q", n, got)
			}
		}
		must(t, open(t, kind(s), s, nil).Verify(within(t), resource("orders"), l))
	})
}

func TestTwoServersInOneProcess(t *testing.T) {
	one, two := start(t, nil), start(t, nil)
	res, l := resource("orders"), user("u", 1)
	for n, s := range []*Server{one, two} {
		must(t, open(t, KV(s), s, nil).Ensure(within(t), res, l))
		connect(t, KV(s).Fields(address(s), res, l)).write(t, KV(s), "x", fmt.Sprint(n))
	}
	for n, s := range []*Server{one, two} {
		if got := connect(t, KV(s).Fields(address(s), res, l)).read(t, KV(s), "x"); got != fmt.Sprint(n) {
			t.Fatalf("store %d has %q", n, got)
		}
	}
	one.Close()
	must(t, KV(two).Check(within(t), KV(two).Fields(address(two), res, l)))
}

// Buckets and logins come and go while an application writes, watches and
// connects: it never notices.
func TestChangesDisturbNobody(t *testing.T) {
	s := start(t, nil)
	k := KV(s)
	p := open(t, k, s, map[string]string{"max-bytes": "2MiB"})
	ctx, res, l := within(t), resource("orders"), user("u", 1)
	must(t, p.Ensure(ctx, res, l))
	fields := k.Fields(address(s), res, l)
	c := connect(t, fields)
	kv := c.kv(t)
	watch, err := kv.WatchAll(ctx, jetstream.UpdatesOnly())
	must(t, err)
	defer watch.Stop()
	stop := make(chan struct{})
	var connected int
	var failed error
	var comers sync.WaitGroup
	comers.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			c, err := nats.Connect(fields["uri"], nats.NoReconnect())
			if err != nil {
				failed = errors.Join(failed, err)
				return
			}
			connected++
			c.Close()
		}
	})
	for n := range 30 {
		other, ol := resource(fmt.Sprintf("other%d", n%3)), user(fmt.Sprintf("o%d", n), n)
		must(t, p.Ensure(ctx, other, ol))
		rev, err := kv.PutString(ctx, "x", "during")
		must(t, err)
		_, err = p.Withdraw(ctx, other, []provision.Login{ol})
		must(t, err)
		must(t, p.Purge(ctx, other))
		select {
		case entry := <-watch.Updates():
			if entry.Revision() != rev {
				t.Fatalf("the watch saw revision %d, want %d", entry.Revision(), rev)
			}
		case <-ctx.Done():
			t.Fatal("the watch is dead")
		}
	}
	close(stop)
	comers.Wait()
	if failed != nil || connected == 0 {
		t.Fatalf("after %d connections: %v", connected, failed)
	}
	if c.Stats().Reconnects != 0 || c.IsClosed() {
		t.Fatal("the application was cut")
	}
}

// A secret that is replaced takes the sessions made with it along.
func TestReplacedSecretEndsSessions(t *testing.T) {
	s := start(t, nil)
	k := KV(s)
	p := open(t, k, s, nil)
	res := resource("orders")
	must(t, p.Ensure(within(t), res, user("u", 1)))
	must(t, p.Ensure(within(t), res, user("v", 2)))
	old := connect(t, k.Fields(address(s), res, user("u", 1)))
	other := connect(t, k.Fields(address(s), res, user("v", 2)))
	must(t, p.Ensure(within(t), res, user("u", 3)))
	wait(t, "the old session to end", old.IsClosed)
	other.write(t, k, "x", "undisturbed")
	must(t, k.Check(within(t), k.Fields(address(s), res, user("u", 3))))
}

// certificate makes a CA and a server certificate for 127.0.0.1.
func certificate(t *testing.T) (ca string, conf *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	cert := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		&tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &cert, nil }}
}

func TestTLS(t *testing.T) {
	both(t, func(t *testing.T, kind func(*Server) provision.Kind) {
		ca, conf := certificate(t)
		strange, _ := certificate(t)
		s := start(t, func(c *ServerConfig) { c.TLS = conf })
		k := kind(s)
		at := address(s)
		at.TLS, at.CA = provision.VerifyFull, ca
		p, err := k.Open(provision.Config{Mesh: "m1", Address: at})
		must(t, err)
		ctx, res, l := within(t), resource("orders"), user("u", 1)
		must(t, p.Preflight(ctx))
		must(t, p.Ensure(ctx, res, l))
		must(t, p.Verify(ctx, res, l))
		for _, test := range []struct {
			name string
			at   provision.Address
			want provision.Class
		}{
			{"verified", at, ""},
			{"not verified", provision.Address{Host: at.Host, Port: at.Port, TLS: provision.Require}, ""},
			{"another CA", provision.Address{Host: at.Host, Port: at.Port, TLS: provision.VerifyFull, CA: strange}, provision.TLSFault},
			{"system roots", provision.Address{Host: at.Host, Port: at.Port, TLS: provision.VerifyFull}, provision.TLSFault},
			{"another name", provision.Address{Host: "localhost", Port: at.Port, TLS: provision.VerifyFull, CA: ca}, provision.TLSFault},
			{"plain text", provision.Address{Host: at.Host, Port: at.Port, TLS: provision.Off}, provision.TLSFault},
		} {
			if err := k.Check(ctx, k.Fields(test.at, res, l)); provision.ClassOf(err) != test.want {
				t.Errorf("%s: %v, want class %q", test.name, err, test.want)
			}
		}
		ended, err := p.Withdraw(ctx, res, []provision.Login{l})
		if ended != 0 || err != nil {
			t.Fatalf("ended %d, %v", ended, err)
		}
		wantClass(t, p.Verify(ctx, res, l), provision.Refused)
	})
}
