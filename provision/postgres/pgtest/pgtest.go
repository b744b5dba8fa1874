// Package pgtest runs real PostgreSQL servers for tests.
//
// A Server is a process of this one, on a free port of the loopback addresses,
// with a data directory of its own that Close removes. It speaks plain text and
// TLS on the same port, logs every statement, and trades durability for speed.
// PostgreSQL refuses to run as root, so root runs it as the user "postgres".
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// ErrMissing says that PostgreSQL is not installed on this machine.
var ErrMissing = errors.New("PostgreSQL is not installed (Debian: apt-get install postgresql)")

// The logins that every Server has.
const (
	Superuser = "postgres"
	Admin     = "meshd_admin" // exactly the rights that the operator's guide asks for

	// Password is that of both, an ordinary word because the servers listen on
	// loopback only and live as long as a test.
	Password = "pgtest"
)

// startWait bounds one start or stop: measured at 0.2 s, given room for a
// machine whose cores are all taken.
const startWait = 60 * time.Second

// Options says how to run a Server. The zero value is the usual one.
type Options struct {
	Bin      string   // directory of initdb and postgres; by default $MESHD_POSTGRES_BIN, then the newest that is found
	Settings []string // more lines of postgresql.conf, such as "max_connections = 5"
}

// Server is one PostgreSQL server. Its methods are for one goroutine.
type Server struct {
	Host string // 127.0.0.1; the server listens on ::1 as well where there is IPv6
	Port int
	CA   string // PEM; signed the certificate, whose names are 127.0.0.1 and localhost

	bin  string
	dir  string
	as   *syscall.Credential
	proc *exec.Cmd
	done chan error // receives what the process ended with
}

// Need is Start for a test: the Server is closed when the test ends. Without
// PostgreSQL the test is skipped, or fails where MESHD_REQUIRE_SERVERS is 1.
func Need(t testing.TB, o Options) *Server {
	t.Helper()
	s, err := Start(o)
	switch {
	case errors.Is(err, ErrMissing) && os.Getenv("MESHD_REQUIRE_SERVERS") != "1":
		t.Skip(err)
	case err != nil:
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// Start makes a new, empty server and returns when it takes logins.
func Start(o Options) (*Server, error) {
	bin, err := findBin(o.Bin)
	if err != nil {
		return nil, err
	}
	s := &Server{Host: "127.0.0.1", bin: bin}
	if s.as, err = unprivileged(); err != nil {
		return nil, err
	}
	if s.dir, err = os.MkdirTemp("", "pgtest-"); err != nil {
		return nil, err
	}
	if err := s.create(o); err != nil {
		return nil, errors.Join(fmt.Errorf("make PostgreSQL server: %w", err), s.Close())
	}
	if err := s.Start(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), startWait)
	defer cancel()
	err = s.Exec(ctx, "postgres", fmt.Sprintf(
		`CREATE ROLE %s LOGIN CREATEROLE CREATEDB PASSWORD '%s'; GRANT pg_signal_backend TO %[1]s`, Admin, Password))
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// findBin returns the directory of the server's programs.
func findBin(dir string) (string, error) {
	if dir == "" {
		dir = os.Getenv("MESHD_POSTGRES_BIN")
	}
	if dir != "" {
		return dir, nil
	}
	newest := -1
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb") // the pattern is well formed, so no error
	for _, f := range found {
		d := filepath.Dir(f)
		if v, err := strconv.Atoi(filepath.Base(filepath.Dir(d))); err == nil && v > newest {
			newest, dir = v, d
		}
	}
	if dir != "" {
		return dir, nil
	}
	if f, err := exec.LookPath("initdb"); err == nil {
		return filepath.Dir(f), nil
	}
	return "", ErrMissing
}

// unprivileged returns whom to run the server as: nil means ourselves.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return nil, fmt.Errorf("run PostgreSQL as root: it refuses that, and the user to run it as: %w", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// create fills the data directory.
func (s *Server) create(o Options) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	s.Port = port
	cert, key, ca, err := certificate()
	if err != nil {
		return err
	}
	s.CA = string(ca)
	conf := append([]string{
		fmt.Sprintf("port = %d", port),
		"listen_addresses = '127.0.0.1,::1'",
		fmt.Sprintf("unix_socket_directories = '%s'", s.dir),
		"fsync = off", "synchronous_commit = off", "full_page_writes = off",
		"shared_buffers = 32MB", "max_connections = 50",
		"ssl = on", "ssl_cert_file = '../server.crt'", "ssl_key_file = '../server.key'",
		"log_statement = all", "log_connections = on", "log_min_messages = info",
	}, o.Settings...)
	for name, text := range map[string][]byte{
		"server.crt": cert, "server.key": key, "password": []byte(Password + "\n"), "log": nil,
		"added.conf": []byte(strings.Join(conf, "\n") + "\n"),
	} {
		if err := s.write(name, text); err != nil {
			return err
		}
	}
	if err := s.own(s.dir); err != nil {
		return err
	}
	cmd := s.command("initdb", "-D", s.data(), "-U", Superuser, "--pwfile="+s.path("password"),
		"--auth-host=scram-sha-256", "--auth-local=scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("run initdb: %w: %s", err, out)
	}
	f, err := os.OpenFile(filepath.Join(s.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("include '../added.conf'\n")
	return errors.Join(err, f.Close())
}

// Start runs the server again after Stop, with its data and on its port.
func (s *Server) Start() error {
	if s.proc != nil {
		return errors.New("start PostgreSQL: it is running")
	}
	log, err := os.OpenFile(s.path("log"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer log.Close() // the process has a descriptor of its own
	cmd := s.command("postgres", "-D", s.data())
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	s.proc, s.done = cmd, make(chan error, 1)
	go func() { s.done <- cmd.Wait() }()
	ctx, cancel := context.WithTimeout(context.Background(), startWait)
	defer cancel()
	if err := s.until(ctx, func() bool { return s.Exec(ctx, "postgres", "SELECT 1") == nil }); err != nil {
		text, _ := s.Log()
		return fmt.Errorf("start PostgreSQL: %w; its log:\n%s", err, text)
	}
	return nil
}

// Stop ends the server and its sessions, in order, as a fast shutdown. Stopping
// what is stopped succeeds.
func (s *Server) Stop() error {
	if s.proc == nil {
		return nil
	}
	// A stopped process takes no other signal before it goes on.
	errs := []error{s.signal(syscall.SIGCONT), s.signal(syscall.SIGINT)}
	select {
	case err := <-s.done:
		s.proc = nil
		if err != nil {
			errs = append(errs, fmt.Errorf("stop PostgreSQL: %w", err))
		}
	case <-time.After(startWait):
		errs = append(errs, fmt.Errorf("stop PostgreSQL: process %d is there after %v", s.proc.Process.Pid, startWait))
	}
	return errors.Join(errs...)
}

// Pause halts the process that takes new connections: they are accepted by the
// kernel and never answered. Sessions that are open go on.
func (s *Server) Pause() error { return s.signal(syscall.SIGSTOP) }

// Resume ends Pause.
func (s *Server) Resume() error { return s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig os.Signal) error {
	if s.proc == nil {
		return fmt.Errorf("send %v to PostgreSQL: it is not running", sig)
	}
	return s.proc.Process.Signal(sig)
}

// Set changes a setting for all sessions that start after it returns; an empty
// value restores what the server was started with. The setting must be one that
// a reload changes.
func (s *Server) Set(ctx context.Context, name, value string) error {
	change := fmt.Sprintf("ALTER SYSTEM SET %s = '%s'", name, value)
	if value == "" {
		change = "ALTER SYSTEM RESET " + name
	}
	// ALTER SYSTEM is allowed in no transaction block, and is not held up by the
	// read-only default that it may be here to change.
	if err := s.Exec(ctx, "postgres", change); err != nil {
		return err
	}
	var before, after time.Time
	loaded := func(at *time.Time) error {
		return s.query(ctx, "SELECT pg_conf_load_time()", at)
	}
	if err := loaded(&before); err != nil {
		return err
	}
	if err := s.signal(syscall.SIGHUP); err != nil {
		return err
	}
	return s.until(ctx, func() bool { return loaded(&after) == nil && after.After(before) })
}

// ReadOnly makes new sessions read-only, or writable again.
func (s *Server) ReadOnly(ctx context.Context, on bool) error {
	value := ""
	if on {
		value = "on"
	}
	return s.Set(ctx, "default_transaction_read_only", value)
}

// Standby restarts the server in recovery, as the standby of a primary that is
// not there, or restarts it as a primary.
func (s *Server) Standby(on bool) error {
	if err := s.Stop(); err != nil {
		return err
	}
	signal := filepath.Join("data", "standby.signal")
	if on {
		if err := s.write(signal, nil); err != nil {
			return err
		}
	} else if err := os.Remove(s.path(signal)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return s.Start()
}

// Close stops the server and removes its files.
func (s *Server) Close() error {
	return errors.Join(s.Stop(), os.RemoveAll(s.dir))
}

// URL is where a login reaches a database, in plain text.
func (s *Server) URL(login, password, database string) string {
	u := url.URL{
		Scheme: "postgresql", User: url.UserPassword(login, password),
		Host: net.JoinHostPort(s.Host, strconv.Itoa(s.Port)), Path: "/" + database, RawQuery: "sslmode=disable",
	}
	return u.String()
}

// AdminURL is the content of an admin file for this server.
func (s *Server) AdminURL() string { return s.URL(Admin, Password, "postgres") }

// SocketDir is the directory of the server's Unix socket.
func (s *Server) SocketDir() string { return s.dir }

// Exec runs statements as the superuser.
func (s *Server) Exec(ctx context.Context, database, statements string) error {
	conn, err := pgx.Connect(ctx, s.URL(Superuser, Password, database))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, statements)
	return errors.Join(err, conn.Close(ctx))
}

func (s *Server) query(ctx context.Context, query string, into any) error {
	conn, err := pgx.Connect(ctx, s.URL(Superuser, Password, "postgres"))
	if err != nil {
		return err
	}
	return errors.Join(conn.QueryRow(ctx, query).Scan(into), conn.Close(ctx))
}

// Log returns what the server has logged.
func (s *Server) Log() ([]byte, error) { return os.ReadFile(s.path("log")) }

// until waits for a condition, at most as long as ctx and the process live.
func (s *Server) until(ctx context.Context, reached func() bool) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !reached() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-s.done:
			s.proc = nil
			return fmt.Errorf("the process ended: %v", err)
		case <-tick.C:
		}
	}
	return nil
}

func (s *Server) path(name string) string { return filepath.Join(s.dir, name) }
func (s *Server) data() string            { return s.path("data") }

// write makes a file that only the server's user can read.
func (s *Server) write(name string, text []byte) error {
	if err := os.WriteFile(s.path(name), text, 0o600); err != nil {
		return err
	}
	return s.own(s.path(name))
}

func (s *Server) own(path string) error {
	if s.as == nil {
		return nil
	}
	return os.Chown(path, int(s.as.Uid), int(s.as.Gid))
}

// command runs one of the server's programs, with none of our PG variables.
func (s *Server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.Dir = s.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "TZ=UTC"}
	// The server ends with a test that is killed before it can clean up.
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.as, Pdeathsig: syscall.SIGINT}
	return cmd
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}
