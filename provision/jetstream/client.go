package jetstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"meshd/provision"
)

const (
	// dialLimit bounds the connection itself, so that a firewall that drops
	// packets is told apart from a store that is slow.
	dialLimit = 5 * time.Second
	// checkLimit bounds a whole check: a dozen requests, of which the slowest
	// waits for a disk.
	checkLimit = 15 * time.Second
)

// checkClient is the name that a check gives its connection.
const checkClient = "meshd check"

// client is a connection made from a binding. A refused publish shows only as a
// request that nobody answers: the client ends the wait and keeps the reason.
type client struct {
	*nats.Conn
	giveUp  context.CancelFunc
	mu      sync.Mutex
	refused error
}

// dial connects and logs in with fields and nothing else, under ctx. Afterwards
// the client calls giveUp when the server refuses what it does.
func dial(ctx context.Context, fields map[string]string, giveUp context.CancelFunc) (*client, error) {
	const step = "log in"
	via := &dialer{ctx: ctx}
	c := &client{giveUp: giveUp}
	options := []nats.Option{
		nats.Name(checkClient), nats.NoReconnect(), nats.IgnoreDiscoveredServers(),
		nats.SetCustomDialer(via), nats.SkipHostLookup(), nats.Timeout(dialLimit),
		nats.UserInfo(fields["username"], fields["password"]), nats.CustomInboxPrefix(fields["inbox"]),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { c.note(err) }),
	}
	switch mode := fields["tls"]; mode {
	case provision.Off:
	case provision.Require:
		options = append(options, nats.Secure(&tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true}))
	case provision.VerifyFull:
		conf := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: fields["host"]}
		if pem := fields["ca.crt"]; pem != "" {
			conf.RootCAs = x509.NewCertPool()
			if !conf.RootCAs.AppendCertsFromPEM([]byte(pem)) {
				return nil, &provision.Error{Step: "read binding", Class: provision.BadConfig,
					Err: errors.New("ca.crt holds no certificate")}
			}
		}
		options = append(options, nats.Secure(conf))
	default:
		return nil, &provision.Error{Step: "read binding", Class: provision.BadConfig,
			Err: fmt.Errorf("tls %q: must be verify-full, require or off", mode)}
	}
	// The URL is without the login, because nats.go puts URLs into its errors.
	conn, err := nats.Connect("nats://"+net.JoinHostPort(fields["host"], fields["port"]), options...)
	via.done()
	switch {
	case via.err != nil:
		return nil, &provision.Error{Step: "connect", Class: provision.Unreachable, Err: via.err}
	case err != nil && ctx.Err() != nil:
		return nil, &provision.Error{Step: step, Class: provision.TimedOut, Err: fmt.Errorf("%w: %w", ctx.Err(), err)}
	case err != nil:
		return nil, fault(step, err)
	}
	c.Conn = conn
	return c, nil
}

func (c *client) note(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refused == nil && errors.Is(err, nats.ErrPermissionViolation) {
		c.refused = err
		c.giveUp()
	}
}

// explain returns err, or the refusal that err is a consequence of.
func (c *client) explain(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var e *provision.Error
	if c.refused == nil || !errors.As(err, &e) {
		return err
	}
	return &provision.Error{Step: e.Step, Class: provision.Refused, Err: c.refused}
}

// dialer makes the one connection of a client. It keeps the error, which
// nats.go replaces by "no servers", and ends the handshake with ctx, which
// nats.go does not know.
type dialer struct {
	ctx  context.Context
	err  error
	stop func() bool
}

func (d *dialer) Dial(network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: dialLimit}).DialContext(d.ctx, network, address)
	if d.err = err; err != nil {
		return nil, err
	}
	// An error of closing is of no use: the handshake fails either way.
	d.stop = context.AfterFunc(d.ctx, func() { _ = conn.Close() })
	return conn, nil
}

// done ends the hold of ctx on the connection.
func (d *dialer) done() {
	if d.stop != nil {
		d.stop()
	}
}

// fault wraps err, which came of step, with its class.
func fault(step string, err error) error {
	var known *provision.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	return &provision.Error{Step: step, Class: classify(err), Err: err}
}

func classify(err error) provision.Class {
	var (
		api    *jetstream.APIError
		record tls.RecordHeaderError
		alert  tls.AlertError
		cert   *tls.CertificateVerificationError
		op     *net.OpError
	)
	switch {
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired),
		errors.Is(err, nats.ErrAuthRevoked), errors.Is(err, nats.ErrAccountAuthExpired),
		errors.Is(err, nats.ErrPermissionViolation):
		return provision.Refused
	case errors.As(err, &record), errors.As(err, &alert), errors.As(err, &cert),
		errors.Is(err, nats.ErrSecureConnRequired), errors.Is(err, nats.ErrSecureConnWanted):
		return provision.TLSFault
	case errors.As(err, &api):
		return classifyAPI(api)
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, nats.ErrNoResponders):
		return provision.Recovery
	case errors.Is(err, nats.ErrMaxConnectionsExceeded), errors.Is(err, nats.ErrMaxAccountConnectionsExceeded),
		errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return provision.Full
	case errors.Is(err, os.ErrPermission), errors.Is(err, syscall.EROFS):
		return provision.ReadOnly
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout), errors.Is(err, os.ErrDeadlineExceeded):
		return provision.TimedOut
	case errors.As(err, &op), errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrConnectionClosed),
		errors.Is(err, nats.ErrDisconnected):
		return provision.Unreachable
	}
	return provision.Internal
}

// The server's numbers for running out of something
// (nats-server/server/errors.json).
const (
	errAccountResources jetstream.ErrorCode = 10002
	errResources        jetstream.ErrorCode = 10023
	errMaxConsumers     jetstream.ErrorCode = 10026
	errStorage          jetstream.ErrorCode = 10047
	errStoreFailed      jetstream.ErrorCode = 10077 // its text says why
)

func classifyAPI(err *jetstream.APIError) provision.Class {
	switch err.ErrorCode {
	case errAccountResources, errResources, errMaxConsumers, errStorage:
		return provision.Full
	case errStoreFailed:
		if strings.Contains(err.Description, "maximum") || strings.Contains(err.Description, syscall.ENOSPC.Error()) {
			return provision.Full
		}
	case jetstream.JSErrCodeJetStreamNotEnabled, jetstream.JSErrCodeJetStreamNotEnabledForAccount:
		return provision.Recovery
	}
	return provision.Internal
}
