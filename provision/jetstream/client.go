package jetstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
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

// checkClient is the name that our own connections have.
const checkClient = "meshd check"

// client is a connection of ours. A refused publish, and a connection that was
// lost, show only as a request that nobody answers: both end ctx, with the reason
// as its cause. Close it.
type client struct {
	*nats.Conn
	js  jetstream.JetStream
	ctx context.Context // for everything done on the connection
	end context.CancelCauseFunc
}

func (c *client) Close() {
	c.Conn.Close() // also where the connection was never made
	c.end(nil)
}

// explain returns err with its class, or, of the same step, the reason that err
// is a consequence of.
func (c *client) explain(step string, err error) error {
	err = fault(step, err)
	var e, reason *provision.Error
	if errors.As(err, &e) && errors.As(context.Cause(c.ctx), &reason) {
		return &provision.Error{Step: e.Step, Class: reason.Class, Err: reason.Err}
	}
	return err
}

// loginOptions returns what a binding asks for.
func loginOptions(fields map[string]string) ([]nats.Option, error) {
	options := []nats.Option{nats.UserInfo(fields["username"], fields["password"]), nats.CustomInboxPrefix(fields["inbox"])}
	switch mode := fields["tls"]; mode {
	case provision.Off:
	case provision.Require:
		options = append(options, nats.Secure(notVerified()))
	case provision.VerifyFull:
		conf := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: fields["host"]}
		if pem := fields["ca.crt"]; pem != "" {
			conf.RootCAs = x509.NewCertPool()
			if !conf.RootCAs.AppendCertsFromPEM([]byte(pem)) {
				return nil, errors.New("ca.crt holds no certificate")
			}
		}
		options = append(options, nats.Secure(conf))
	default:
		return nil, fmt.Errorf("tls %q: must be verify-full, require or off", mode)
	}
	return options, nil
}

// notVerified is the mode require.
func notVerified() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true}
}

// dial connects under ctx, through inside or, where that is nil, to address.
func dial(ctx context.Context, inside nats.InProcessConnProvider, address string, options ...nats.Option) (*client, error) {
	via := &dialer{ctx: ctx, inside: inside}
	c := &client{}
	c.ctx, c.end = context.WithCancelCause(ctx)
	options = append(options, nats.Name(checkClient), nats.Timeout(dialLimit),
		nats.NoReconnect(), nats.IgnoreDiscoveredServers(), nats.SkipHostLookup(),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrPermissionViolation) {
				c.end(&provision.Error{Class: provision.Refused, Err: err})
			}
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			c.end(&provision.Error{Class: provision.Unreachable, Err: errors.Join(nats.ErrDisconnected, err)})
		}))
	if inside != nil {
		options = append(options, nats.InProcessServer(via))
	} else {
		options = append(options, nats.SetCustomDialer(via))
	}
	// The URL is without the login, because nats.go puts URLs into its errors.
	var err error
	c.Conn, err = nats.Connect("nats://"+address, options...)
	via.done()
	if err == nil {
		c.js, err = jetstream.New(c.Conn)
	}
	if err == nil {
		return c, nil
	}
	c.Close()
	switch {
	case ctx.Err() != nil:
		return nil, fault("connect", fmt.Errorf("%w: %w", ctx.Err(), err))
	case via.err != nil:
		return nil, &provision.Error{Step: "connect", Class: provision.Unreachable, Err: via.err}
	}
	return nil, fault("log in", err)
}

// dialer makes the one connection of a client. It keeps the error, which
// nats.go replaces by "no servers", and ends the handshake with ctx, which
// nats.go does not know.
type dialer struct {
	ctx    context.Context
	inside nats.InProcessConnProvider
	err    error
	stop   func() bool
}

// Dial is for nats.SetCustomDialer.
func (d *dialer) Dial(network, address string) (net.Conn, error) {
	return d.hold((&net.Dialer{Timeout: dialLimit}).DialContext(d.ctx, network, address))
}

// InProcessConn is for nats.InProcessServer.
func (d *dialer) InProcessConn() (net.Conn, error) { return d.hold(d.inside.InProcessConn()) }

func (d *dialer) hold(conn net.Conn, err error) (net.Conn, error) {
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
		errors.Is(err, nats.ErrDisconnected), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF),
		errors.Is(err, io.ErrClosedPipe), errors.Is(err, net.ErrClosed):
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
