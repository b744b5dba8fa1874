// Package jetstream is the embedded store: the kinds kv-bucket and
// object-bucket, on a NATS JetStream server that runs inside this process, so
// that the first mesh needs no other software.
//
// What holds:
//
//   - The server stands alone. It has no cluster port, so it never joins
//     another node's JetStream: a bucket lives on its node, does not follow a
//     seat, and is as available as that node.
//   - A bucket has an account of its own, named like its stream (KV_orders,
//     OBJ_reports). Subject permissions alone do not keep buckets apart: the
//     server does not ask whether a client may use the reply subject or the
//     delivery subject that it names, so within one account a login of bucket a
//     overwrites keys of bucket b by asking for the acknowledgement of its own
//     write to be sent there. Between accounts no such subject exists.
//   - Within its account a login reads, writes and watches its bucket, hears
//     nothing but its own inbox, and cannot delete or reconfigure the bucket.
//   - The accounts are the buckets found on disk, the logins are logins.json:
//     both survive kill -9, and nothing else is remembered.
//   - A change of the logins is a reload, which disturbs nobody else.
//   - An acknowledged write is on disk: the store syncs before it answers. (The
//     default of JetStream syncs every two minutes and loses acknowledged writes
//     with the power: nats-io/nats-server#7564.)
package jetstream

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"golang.org/x/crypto/bcrypt"

	"meshd/provision"
)

// ServerConfig says where the store lives and how it is reached.
type ServerConfig struct {
	Dir    string       // data, logins and the chosen port; the caller holds it exclusively
	Listen string       // host:port for consumers; port 0 means chosen once and kept in Dir; an empty host means every address
	TLS    *tls.Config  // the server's side; nil speaks plain text, for loopback and tests only
	Log    *slog.Logger // required; never sees a secret

	MaxStore  int64 // bytes on disk that buckets may reserve together; 0 means DefaultMaxStore
	MaxMemory int64 // bytes of memory that streams in memory may use; 0 means DefaultMaxMemory
}

const (
	// DefaultMaxStore is room for 160 buckets of the default size: generous
	// for a first mesh, and small beside the smallest disk that runs one.
	DefaultMaxStore = 10 << 30
	// DefaultMaxMemory is small because buckets are kept on disk.
	DefaultMaxMemory = 64 << 20
)

const (
	// probeAccount holds nothing but the bucket that Preflight makes and
	// deletes. It is always there, so the server always has a user and never
	// falls back to serving everybody without a login.
	probeAccount = "PROBE"

	// accountConns bounds the connections to one bucket, and serverConns all of
	// them: they are file descriptors of the process that also runs the mesh.
	accountConns = 512
	serverConns  = 4096
	// accountConsumers bounds the watches and downloads open on one bucket.
	accountConsumers = 1024

	maxPayload = 1 << 20  // bytes of one value; the limit that every NATS client expects
	maxPending = 16 << 20 // bytes queued for a slow client before it is cut
	writeLimit = 2 * time.Second
	tlsLimit   = 2 * time.Second
	// A machine that vanished is a live session until two pings went
	// unanswered, and a rotation waits for it: so 30 s, not the default of 4
	// minutes.
	pingEvery = 15 * time.Second

	// startLimit bounds the wait for the listener. Recovery of the data comes
	// before that wait and takes as long as it takes.
	startLimit = 10 * time.Second
)

// Validate reports every fault of c.
func (c ServerConfig) Validate() error {
	var faults []error
	if c.Dir == "" {
		faults = append(faults, errors.New("dir is empty: name the folder for the data"))
	}
	if c.Log == nil {
		faults = append(faults, errors.New("log is nil"))
	}
	if _, port, err := net.SplitHostPort(c.Listen); err != nil {
		faults = append(faults, fmt.Errorf("listen %q: %w: write host:port", c.Listen, err))
	} else if n, err := strconv.ParseUint(port, 10, 16); err != nil {
		faults = append(faults, fmt.Errorf("listen %q: port %d is not a number from 0 to 65535", c.Listen, n))
	}
	if c.MaxStore < 0 || c.MaxMemory < 0 {
		faults = append(faults, errors.New("max store and max memory are bytes and cannot be negative"))
	}
	return errors.Join(faults...)
}

// Server is the running store of one node. Its methods are safe for concurrent
// use.
type Server struct {
	cfg  ServerConfig
	host string
	port int
	nats *server.Server

	secret string // of the admin user that every account has; made anew at each start
	hash   string // its bcrypt

	probing sync.Mutex // one Preflight at a time uses probeAccount

	mu       sync.Mutex // held across a change: file, reload, then these
	accounts map[string]bool
	logins   map[string]login
	stale    bool // the last change stopped midway; the next one may skip nothing
}

// StartServer starts the store and returns once it answers. Everything that was
// in Dir is back by then.
func StartServer(cfg ServerConfig) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("start store: %w", err)
	}
	if cfg.MaxStore == 0 {
		cfg.MaxStore = DefaultMaxStore
	}
	if cfg.MaxMemory == 0 {
		cfg.MaxMemory = DefaultMaxMemory
	}
	s := &Server{cfg: cfg, secret: rand.Text()}
	if err := s.recall(); err != nil {
		return nil, fmt.Errorf("start store: %w", err)
	}
	opts, err := s.options(s.accounts, s.logins)
	if err != nil {
		return nil, fmt.Errorf("start store: %w", err)
	}
	if s.nats, err = server.NewServer(opts); err != nil {
		return nil, fmt.Errorf("start store: %w", err)
	}
	// The server reports a taken port or an unusable disk through Fatalf alone,
	// and goes on half started.
	log := &natsLog{to: cfg.Log}
	s.nats.SetLoggerV2(log, false, false, false)
	s.nats.Start()
	err = log.fault()
	if err != nil && s.port != 0 && strings.HasSuffix(cfg.Listen, ":0") {
		err = fmt.Errorf("%w (port %d was chosen at the first start: free it, or remove %s and consumers get another)",
			err, s.port, s.portFile())
	}
	if err == nil && !s.nats.ReadyForConnections(startLimit) {
		err = fmt.Errorf("no listener on %s after %v", cfg.Listen, startLimit)
	}
	if err == nil && !s.nats.JetStreamEnabled() {
		err = errors.New("the store did not come up on " + cfg.Dir)
	}
	if err == nil {
		err = s.keepPort()
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("start store: %w", err)
	}
	return s, nil
}

// Addr returns where the server listens. An empty host means every address of
// the machine: the caller knows which of them consumers can reach.
func (s *Server) Addr() (host string, port int) { return s.host, s.port }

// Close stops the server and returns when it has stopped. Sessions end without
// notice; the data stays.
func (s *Server) Close() {
	s.nats.Shutdown()
	s.nats.WaitForShutdown()
}

// recall reads what the last run left in Dir.
func (s *Server) recall() error {
	if err := os.MkdirAll(s.cfg.Dir, 0o700); err != nil {
		return err
	}
	hash, err := hashSecret(s.secret)
	if err != nil {
		return err
	}
	s.hash = hash
	host, port, err := net.SplitHostPort(s.cfg.Listen)
	if err != nil {
		return err
	}
	s.host = host
	if s.port, err = strconv.Atoi(port); err != nil {
		return err
	}
	if s.port == 0 {
		if s.port, err = readPort(s.portFile()); err != nil {
			return err
		}
	}
	if s.logins, err = readLogins(s.loginsFile()); err != nil {
		return err
	}
	s.accounts = map[string]bool{}
	for _, l := range s.logins {
		s.accounts[l.Account] = true
	}
	// The layout is jetstream/ACCOUNT/streams/STREAM.
	found, err := fs.Glob(os.DirFS(s.cfg.Dir), server.JetStreamStoreDir+"/*/streams/*")
	for _, dir := range found {
		if account := path.Base(dir); accountName.MatchString(account) {
			s.accounts[account] = true
		}
	}
	return err
}

func (s *Server) portFile() string   { return filepath.Join(s.cfg.Dir, "port") }
func (s *Server) loginsFile() string { return filepath.Join(s.cfg.Dir, "logins.json") }

// keepPort makes the port that the server got the port of every later start:
// consumers were given it.
func (s *Server) keepPort() error {
	got, ok := s.nats.Addr().(*net.TCPAddr)
	if !ok {
		return fmt.Errorf("listen on %s: not a TCP address: %v", s.cfg.Listen, s.nats.Addr())
	}
	if s.port == got.Port {
		return nil
	}
	s.port = got.Port
	return writeFile(s.portFile(), []byte(strconv.Itoa(s.port)+"\n"))
}

func readPort(file string) (int, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	port, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 16)
	if err != nil {
		return 0, fmt.Errorf("read %s: not a port: remove the file to have another one chosen", file)
	}
	return int(port), nil
}

// options builds the server's whole configuration from the desired state; a
// reload takes nothing less. Only the users and accounts may differ from one
// build to the next.
func (s *Server) options(accounts map[string]bool, logins map[string]login) (*server.Options, error) {
	names := append(slices.Sorted(maps.Keys(accounts)), probeAccount)
	opts := &server.Options{
		ServerName: "meshd-store",
		Host:       s.host,
		Port:       s.port,
		NoSigs:     true,
		NoLog:      true, // a reload keeps our logger only with this

		MaxConn:       serverConns,
		MaxPayload:    maxPayload,
		MaxPending:    maxPending,
		WriteDeadline: writeLimit,
		PingInterval:  pingEvery,
		MaxPingsOut:   1,

		JetStream:              true,
		StoreDir:               s.cfg.Dir,
		SyncAlways:             true,
		JetStreamMaxStore:      s.cfg.MaxStore,
		JetStreamMaxMemory:     s.cfg.MaxMemory,
		DisableJetStreamBanner: true,
	}
	if s.port == 0 {
		opts.Port = server.RANDOM_PORT
	}
	if s.cfg.TLS != nil {
		opts.TLS, opts.TLSConfig, opts.TLSTimeout = true, s.cfg.TLS.Clone(), tlsLimit.Seconds()
	}
	// An account's right to JetStream can be written only in the server's
	// configuration language: what its Go API enables is lost at a reload.
	var text strings.Builder
	text.WriteString("accounts {\n")
	for _, name := range names {
		fmt.Fprintf(&text, "%s { jetstream { max_streams: 1, max_consumers: %d }, limits { max_connections: %d } }\n",
			name, accountConsumers, accountConns)
	}
	text.WriteString("}\n")
	if err := opts.ProcessConfigString(text.String()); err != nil {
		return nil, fmt.Errorf("build configuration: %w", err)
	}
	made := make(map[string]*server.Account, len(names))
	for _, account := range opts.Accounts {
		made[account.Name] = account
		opts.Users = append(opts.Users, &server.User{
			Username: adminName(account.Name), Password: s.hash, Account: account,
			AllowedConnectionTypes: map[string]struct{}{jwt.ConnectionTypeInProcess: {}},
		})
	}
	for _, name := range slices.Sorted(maps.Keys(logins)) {
		l := logins[name]
		opts.Users = append(opts.Users, &server.User{
			Username: l.Name, Password: l.Hash, Account: made[l.Account], Permissions: rights(l),
		})
	}
	return opts, nil
}

// change makes the state what edit makes of it: on disk first, then in the
// server. The maps that edit gets are copies.
func (s *Server) change(edit func(accounts map[string]bool, logins map[string]login) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	accounts, logins := maps.Clone(s.accounts), maps.Clone(s.logins)
	if err := edit(accounts, logins); err != nil {
		return err
	}
	sameLogins := maps.Equal(logins, s.logins)
	if sameLogins && maps.Equal(accounts, s.accounts) && !s.stale {
		return nil
	}
	opts, err := s.options(accounts, logins)
	if err != nil {
		return err
	}
	if !sameLogins || s.stale {
		s.stale = true
		if err := writeLogins(s.loginsFile(), logins); err != nil {
			return err
		}
	}
	if err := s.nats.ReloadOptions(opts); err != nil {
		s.stale = true
		return fmt.Errorf("reload the store's logins: %w", err)
	}
	s.accounts, s.logins, s.stale = accounts, logins, false
	return nil
}

// has reports whether the account exists.
func (s *Server) has(account string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accounts[account]
}

// list returns the accounts whose name begins with prefix, in order.
func (s *Server) list(prefix string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Sorted(maps.Keys(s.accounts)), func(name string) bool {
		return !strings.HasPrefix(name, prefix)
	})
}

// snapshot returns a copy of the logins.
func (s *Server) snapshot() map[string]login {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.logins)
}

// adminName is the admin user of an account. The dash keeps it apart from every
// login, which has none.
func adminName(account string) string { return "meshd-" + account }

// admin connects to account with every right, without leaving the process. Close
// it.
func (s *Server) admin(account string) (*nats.Conn, error) {
	return nats.Connect("", nats.InProcessServer(s.nats), nats.UserInfo(adminName(account), s.secret),
		nats.NoReconnect(), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
}

// sessions counts the live connections of a user, or of all logins of an
// account where user is empty; the checks among them apart, because a check is
// no use of a login.
func (s *Server) sessions(account, user string) (live, checks int, err error) {
	conns, err := s.nats.Connz(&server.ConnzOptions{
		Account: account, User: user, Username: true, State: server.ConnOpen, Limit: math.MaxInt32,
	})
	if err != nil {
		return 0, 0, err
	}
	for _, c := range conns.Conns {
		switch {
		case c.AuthorizedUser == adminName(account):
		case c.Name == checkClient:
			checks++
		default:
			live++
		}
	}
	return live, checks, nil
}

// try logs in as a consumer would and returns what came of it.
func (s *Server) try(ctx context.Context, user, secret string) error {
	host := s.host
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	mode := provision.Off
	if s.cfg.TLS != nil {
		mode = provision.Require
	}
	c, err := dial(ctx, map[string]string{
		"host": host, "port": strconv.Itoa(s.port), "tls": mode,
		"username": user, "password": secret, "inbox": inbox(user),
	}, func() {})
	if err == nil {
		c.Close()
	}
	return err
}

// hashSecret returns the bcrypt of a secret. The lowest cost is right: the
// secrets are random, at least 32 characters of 62, beyond any search; and every
// reload compares every live session again, one millisecond each at this cost
// and sixty at the default.
func hashSecret(secret string) (string, error) {
	hash, err := bcrypt.GenerateFromPassword([]byte(secret), bcrypt.MinCost)
	return string(hash), err
}

// natsLog hands the server's log to slog and keeps its fatal error, which is
// how the server says that it could not start.
type natsLog struct {
	to    *slog.Logger
	mu    sync.Mutex
	fatal error
}

func (l *natsLog) fault() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatal
}

func (l *natsLog) Fatalf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fatal = errors.Join(l.fatal, fmt.Errorf(format, args...))
}

func (l *natsLog) Errorf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if strings.Contains(text, "authentication error") {
		// One line for each attempt of a withdrawn login, for as long as its
		// application goes on trying.
		l.to.Debug("store refused a login", "text", text)
		return
	}
	l.to.Warn("store error", "text", text)
}

func (l *natsLog) Warnf(format string, args ...any) {
	l.to.Warn("store warning", "text", fmt.Sprintf(format, args...))
}

func (l *natsLog) Noticef(format string, args ...any) {
	l.to.Debug("store notice", "text", fmt.Sprintf(format, args...))
}

func (l *natsLog) Debugf(string, ...any) {}
func (l *natsLog) Tracef(string, ...any) {}
