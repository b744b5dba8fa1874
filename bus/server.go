package bus

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

const (
	// accountMesh carries calls between meshds; accountMod is where modules connect.
	accountMesh = "MESH"
	accountMod  = "MOD"

	// maxPending is how many bytes the server holds for a client that does not read. Eight of the
	// largest messages: a burst passes, and a module that hangs costs no more memory than this.
	maxPending = 8 * (maxPayload + maxHeaders)
	// writeDeadline is how long the server waits for such a client before it cuts it off.
	writeDeadline = 2 * time.Second
	// gossipAddr is what we tell others to tell others about us. NATS cannot be kept from passing on
	// the address of a member, and members would dial one that was expelled for ever. This address
	// refuses at once, and NATS gives up on a gossiped address after one refusal. Every member is in
	// the Layout, so nothing needs the gossip.
	gossipAddr = "127.0.0.1:1"
	// startLimit bounds the start of the listeners and each log-in of a client, ours as well, which take
	// milliseconds. Nothing but this process and its machine can hold them up, and NATS's 2 s for a
	// log-in, at either end, are too few where all processors are taken.
	startLimit = 10 * time.Second
	// A lame duck tells its clients and cuts them spread over duckDuration, after duckGrace.
	duckDuration = time.Second
	duckGrace    = 200 * time.Millisecond
)

// host is the NATS server of this node with meshd's own connections to it.
type host struct {
	cfg      Config
	log      *serverLog
	srv      *server.Server
	mesh     *nats.Conn // account MESH: calls, both ways
	mod      *nats.Conn // account MOD: calls of modules, announcements
	out      *nats.Conn // account MOD: calls into modules
	accounts [2]*server.Account
	keys     [2]nkeys.KeyPair             // meshd's identities, for MESH and for MOD
	routeTLS *tls.Config                  // one for the host's life, so that no reload takes it for changed
	dialled  atomic.Pointer[map[int]bool] // the ports of other nodes' routes

	clientPort int // -1 until the server has chosen one
	routeHost  string
	routePort  int // -1 until the server has chosen one
}

// startHost starts a server without peers and without modules, and connects to it.
func startHost(ctx context.Context, cfg Config) (*host, error) {
	h := &host{cfg: cfg, log: newServerLog(cfg.Log), clientPort: cfg.ClientPort}
	if h.clientPort == 0 {
		h.clientPort = server.RANDOM_PORT
	}
	var err error
	if h.routeHost, h.routePort, err = splitRouteAddr(cfg.RouteAddr); err != nil {
		return nil, err
	}
	for i, account := range []string{accountMesh, accountMod} {
		// A reload keeps the subscriptions of an account only if it is given the same pointer.
		h.accounts[i] = server.NewAccount(account)
		if h.keys[i], err = nkeys.CreateUser(); err != nil {
			return nil, fmt.Errorf("make key for account %s: %w", account, err)
		}
	}
	h.routeTLS = h.watched(cfg.RouteTLS)
	opts, err := h.options(wiring{})
	if err != nil {
		return nil, err
	}
	if h.srv, err = server.NewServer(opts); err != nil {
		return nil, fmt.Errorf("configure NATS server: %w", err)
	}
	h.srv.SetLoggerV2(h.log, false, false, false)
	h.srv.Start()
	stop := context.AfterFunc(ctx, h.srv.Shutdown) // ends what connect waits for
	err = h.connect(ctx)
	if !stop() {
		err = fmt.Errorf("start NATS server: %w", context.Cause(ctx))
	}
	if err != nil {
		h.closeConns()
		h.srv.Shutdown()
		h.srv.WaitForShutdown()
		return nil, err
	}
	return h, nil
}

// connect waits until the server listens and opens meshd's three connections.
func (h *host) connect(ctx context.Context) error {
	// The server tells of a taken port in its log alone, and runs on half-started. Its own
	// ReadyForConnections polls every 25 ms, several times what a start takes.
	for deadline := time.Now().Add(startLimit); h.srv.ClusterAddr() == nil || h.srv.Addr() == nil; {
		if err := h.log.fatal(); err != nil {
			return fmt.Errorf("start NATS server: %w", err)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("start NATS server: not listening after %v", startLimit)
		}
		time.Sleep(50 * time.Microsecond)
	}
	if err := h.log.fatal(); err != nil {
		return fmt.Errorf("start NATS server: %w", err)
	}
	client, ok := h.srv.Addr().(*net.TCPAddr)
	if !ok {
		return fmt.Errorf("start NATS server: client address %v is not TCP", h.srv.Addr())
	}
	h.clientPort, h.routePort = client.Port, h.srv.ClusterAddr().Port
	for i, conn := range []**nats.Conn{&h.mesh, &h.mod, &h.out} {
		nc, err := h.dial(h.keys[min(i, 1)])
		if err != nil {
			return err
		}
		*conn = nc
	}
	return nil
}

func (h *host) dial(key nkeys.KeyPair) (*nats.Conn, error) {
	public, err := key.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("read own key: %w", err)
	}
	log := h.cfg.Log
	nc, err := nats.Connect("", nats.InProcessServer(h.srv), nats.Nkey(public, key.Sign), nats.Name("meshd"), nats.Timeout(startLimit),
		nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.IgnoreAuthErrorAbort(),
		nats.ErrorHandler(func(_ *nats.Conn, s *nats.Subscription, err error) {
			subject := ""
			if s != nil {
				subject = s.Subject
			}
			log.Error("own bus connection reports an error", "subject", subject, "err", err)
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("own bus connection was cut, reconnecting", "err", err)
			}
		}))
	if err != nil {
		return nil, fmt.Errorf("connect to own NATS server: %w", err)
	}
	return nc, nil
}

// options builds the complete options for a wiring, anew each time: a reload takes over what it is
// given, and every field that it does not support changing must come out the same.
func (h *host) options(w wiring) (*server.Options, error) {
	opts := &server.Options{
		ServerName: h.cfg.NodeID,
		Host:       "127.0.0.1",
		Port:       h.clientPort,
		Accounts:   []*server.Account{h.accounts[0], h.accounts[1]},
		NoSigs:     true,
		NoLog:      true,

		AuthTimeout:           startLimit.Seconds(),
		MaxPayload:            maxPayload + maxHeaders,
		MaxPending:            maxPending,
		WriteDeadline:         writeDeadline,
		NoFastProducerStall:   true, // a module that does not read must not slow one that writes
		ReconnectErrorReports: 3600, // a peer that is away is redialled every second: one line an hour
		LameDuckDuration:      duckDuration,
		LameDuckGracePeriod:   duckGrace,
		Cluster: server.ClusterOpts{
			Name:           h.cfg.Mesh,
			Host:           h.routeHost,
			Port:           h.routePort,
			Advertise:      gossipAddr,
			NoAdvertise:    true, // modules must not learn of other nodes' client ports
			PoolSize:       1,
			PinnedAccounts: []string{accountMesh}, // a connection of its own, apart from modules' traffic
			PingInterval:   routePing,
			MaxPingsOut:    routePingsOut,
			TLSConfig:      h.routeTLS,
			TLSTimeout:     2,
			TLSPinnedCerts: server.PinnedCertSet{}, // never nil: a nil set would accept every certificate
		},
	}
	for _, pin := range w.pins {
		opts.Cluster.TLSPinnedCerts[pin] = struct{}{}
	}
	for _, addr := range w.routes {
		opts.Routes = append(opts.Routes, &url.URL{Scheme: "nats-route", Host: addr})
	}
	var public [2]string
	for i, key := range h.keys {
		var err error
		if public[i], err = key.PublicKey(); err != nil {
			return nil, fmt.Errorf("read own key: %w", err)
		}
	}
	mesh, mod := meshdUsers(h.cfg.NodeName, public[0], public[1])
	opts.Nkeys = append(opts.Nkeys, nkeyUser(mesh, h.accounts[0], "IN_PROCESS"), nkeyUser(mod, h.accounts[1], "IN_PROCESS"))
	for _, u := range w.users {
		opts.Nkeys = append(opts.Nkeys, nkeyUser(u, h.accounts[1], "STANDARD"))
	}
	return opts, nil
}

// nkeyUser turns a user into the server's form. Kind is the only kind of connection that it may use,
// in the words of jwt.ConnectionType*. Rights to reply are static publish rights: those that NATS can
// derive from a request (allow_responses) are forgotten at every reload.
func nkeyUser(u user, account *server.Account, kind string) *server.NkeyUser {
	return &server.NkeyUser{
		Nkey:    u.key,
		Account: account,
		Permissions: &server.Permissions{
			Publish:   &server.SubjectPermission{Allow: append([]string(nil), u.publish...)},
			Subscribe: &server.SubjectPermission{Allow: append([]string(nil), u.subscribe...)},
		},
		AllowedConnectionTypes: map[string]struct{}{kind: {}},
	}
}

// reload makes the running server enforce w.
func (h *host) reload(w wiring) error {
	opts, err := h.options(w)
	if err != nil {
		return err
	}
	// Named before they can connect, so that a refusal is never without a name.
	h.log.name(w.users)
	dialled := ports(w.routes) // known before they are dialled
	h.dialled.Store(&dialled)
	if err := h.srv.ReloadOptions(opts); err != nil {
		return fmt.Errorf("reload NATS server: %w", err)
	}
	return nil
}

func (h *host) conns() []*nats.Conn { return []*nats.Conn{h.mesh, h.mod, h.out} }

func (h *host) closeConns() {
	for _, nc := range h.conns() {
		if nc != nil {
			nc.Close()
		}
	}
}

// close sends what is still to be sent, tells the clients, and stops the server.
func (h *host) close(ctx context.Context) error {
	var errs []error
	for _, nc := range h.conns() {
		if err := nc.FlushWithContext(ctx); err != nil {
			errs = append(errs, fmt.Errorf("flush own bus connection: %w", err))
		}
	}
	modules := h.srv.NumClients() > len(h.conns())
	h.closeConns()
	ducked := make(chan struct{})
	go func() {
		defer close(ducked)
		if modules {
			h.srv.LameDuckShutdown()
		}
	}()
	select {
	case <-ducked:
	case <-ctx.Done():
		errs = append(errs, fmt.Errorf("let modules leave: %w", ctx.Err()))
	}
	h.srv.Shutdown()
	<-ducked
	h.srv.WaitForShutdown()
	return errors.Join(errs...)
}

// peers lists the ids of the nodes that a route is up to.
func (h *host) peers() ([]string, error) {
	z, err := h.srv.Routez(nil)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	seen := map[string]bool{}
	var ids []string
	for _, r := range z.Routes {
		if !seen[r.RemoteName] {
			seen[r.RemoteName] = true
			ids = append(ids, r.RemoteName)
		}
	}
	return ids, nil
}

func splitRouteAddr(addr string) (string, int, error) {
	name, text, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, fmt.Errorf("route address %q: %w", addr, err)
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("route address %q: port is not a number from 0 to 65535", addr)
	}
	if name == "" {
		name = "0.0.0.0"
	}
	if port == 0 {
		return name, server.RANDOM_PORT, nil
	}
	return name, int(port), nil
}

// Config is what a bus needs for its whole life; what changes is in Layout.
type Config struct {
	Mesh       string      // the mesh's id: servers of another are refused
	NodeID     string      // this node's identity
	NodeName   string      // its name, as it stands in subjects
	ClientPort int         // loopback port for modules; 0 lets the system choose, see Bus.ClientPort
	RouteAddr  string      // host:port to listen on for other nodes; port 0 lets the system choose
	RouteTLS   *tls.Config // mutual TLS for both roles, with a constant ServerName
	Log        *slog.Logger

	// Clock reads the time since some instant, and counts while the machine is suspended: a caller
	// measures with it what is left of an answer's lease.
	Clock func() time.Duration
}

func (c Config) validate() error {
	var faults []error
	if c.Mesh == "" {
		faults = append(faults, errors.New("the mesh has no id"))
	}
	if c.NodeID == "" {
		faults = append(faults, errors.New("the node has no id"))
	}
	if c.Clock == nil {
		faults = append(faults, errors.New("there is no clock"))
	}
	faults = append(faults, checkToken("node", c.NodeName))
	if c.ClientPort < 0 || c.ClientPort > 65535 {
		faults = append(faults, fmt.Errorf("client port %d is not from 0 to 65535", c.ClientPort))
	}
	if _, _, err := splitRouteAddr(c.RouteAddr); err != nil {
		faults = append(faults, err)
	}
	switch {
	case c.RouteTLS == nil:
		faults = append(faults, errors.New("routes have no TLS configuration: they are never in the clear"))
	case c.RouteTLS.ClientAuth != tls.RequireAndVerifyClientCert:
		faults = append(faults, errors.New("routes do not require a client certificate"))
	case c.RouteTLS.ServerName == "":
		faults = append(faults, errors.New("routes have no server name to verify"))
	}
	if c.Log == nil {
		faults = append(faults, errors.New("there is no log"))
	}
	if err := errors.Join(faults...); err != nil {
		return fmt.Errorf("bus configuration: %w", err)
	}
	return nil
}
