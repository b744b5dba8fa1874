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
//   - A change of the logins disturbs nobody else. The server asks us about each
//     login (gate), so a change is one of our map. A reload of its configuration
//     would do too, but cuts whoever is just connecting.
//   - An acknowledged write is on disk: the store syncs before it answers. (The
//     default of JetStream syncs every two minutes and loses acknowledged writes
//     with the power: nats-io/nats-server#7564.)
package jetstream

import (
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// ServerConfig says where the store lives and how it is reached.
type ServerConfig struct {
	Dir    string       // data, logins and the chosen port; the caller holds it exclusively
	Listen string       // host:port for consumers; port 0 means chosen once and kept in Dir; an empty host means every address
	TLS    *tls.Config  // the server's side; nil speaks plain text, for loopback and tests only
	Log    *slog.Logger // required; never sees a secret
	// Write, required, puts a file there, mode 0600, whole or not at all, on disk
	// when it returns.
	Write func(path string, data []byte) error

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
	// deletes.
	probeAccount = "PROBE"

	// serverConns bounds the connections: they are file descriptors of the
	// process that also runs the mesh.
	serverConns = 4096
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
	if c.Write == nil {
		faults = append(faults, errors.New("write is nil: logins could not be kept"))
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
	way  way    // to the server, for everything that providers do
	self string // host:port of our own listener, as we reach it

	secret string // of the admin user that every account has; made anew at each start

	probing sync.Mutex // one Preflight at a time uses probeAccount

	changing sync.Mutex // held across a change: the file, then the maps
	stale    bool       // the last change stopped midway; the next one writes the file
	mu       sync.RWMutex
	accounts map[string]bool
	logins   map[string]login
}

// way is how providers reach the server. It is the server itself but in tests,
// where it fails on demand.
type way interface {
	nats.InProcessConnProvider
	Running() bool
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
	opts, err := s.options()
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
	s.way, s.self = s.nats, net.JoinHostPort(s.host, strconv.Itoa(s.port))
	if ip := net.ParseIP(s.host); s.host == "" || ip != nil && ip.IsUnspecified() {
		s.self = net.JoinHostPort("localhost", strconv.Itoa(s.port))
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
	return s.cfg.Write(s.portFile(), []byte(strconv.Itoa(s.port)+"\n"))
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

// options is the server's configuration.
func (s *Server) options() (*server.Options, error) {
	opts := &server.Options{
		ServerName: "meshd-store",
		Host:       s.host,
		Port:       s.port,
		NoSigs:     true,

		CustomClientAuthentication: gate{s},

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
	// Accounts that are in the configuration have their data back before the
	// listener opens. That an account has JetStream can be written only in the
	// configuration's own language.
	var text strings.Builder
	text.WriteString("accounts {\n")
	for _, name := range append(s.list(""), probeAccount) {
		fmt.Fprintf(&text, "%s { jetstream { max_streams: 1, max_consumers: %d } }\n", name, accountConsumers)
	}
	text.WriteString("}\n")
	if err := opts.ProcessConfigString(text.String()); err != nil {
		return nil, fmt.Errorf("build configuration: %w", err)
	}
	return opts, nil
}

// open makes the account, if it is not there.
func (s *Server) open(name string) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	if s.has(name) {
		return nil
	}
	account, err := s.nats.RegisterAccount(name)
	if errors.Is(err, server.ErrAccountExists) { // JetStream failed the last time
		account, err = s.nats.LookupAccount(name)
	}
	if err == nil {
		err = account.EnableJetStream(map[string]server.JetStreamAccountLimits{"": {
			MaxMemory: -1, MaxStore: -1, MaxStreams: 1, MaxConsumers: accountConsumers,
			MaxAckPending: -1, MemoryMaxStreamBytes: -1, StoreMaxStreamBytes: -1,
		}}, nil)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.accounts[name] = true
	return nil
}
