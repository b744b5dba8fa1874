package postgres

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"meshd/provision"
)

// checkApplication is the application_name of our own logins as a consumer:
// InUse does not count them.
const checkApplication = "meshd check"

// connectTimeout bounds one connection attempt to one address; on a network
// that works it takes milliseconds.
const connectTimeout = 5 * time.Second

// target is one place to log in to, complete: nothing is added from the
// environment, a password file or a service file.
type target struct {
	host     string // name, IP literal, or the directory of a Unix socket
	port     int
	sslmode  string // disable, require or verify-full
	ca       string // PEM for verify-full; empty means the system's roots
	user     string
	password string
	database string

	application string // application_name of the session
}

// urlForm is what to write, for errors, which never quote a URL: it may hold a
// password in the wrong place.
const urlForm = "write postgresql://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=disable|require|verify-full, " +
	"or ?host=/DIRECTORY for a Unix socket; special characters are percent-encoded"

// parseURL reads a PostgreSQL URL. What it does not know, it refuses.
func parseURL(text string) (target, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "postgresql" && u.Scheme != "postgres" || u.User.Username() == "" || u.Opaque != "" {
		return target{}, errors.New("not a PostgreSQL URL: " + urlForm)
	}
	t := target{host: u.Hostname(), port: 5432, user: u.User.Username()}
	t.password, _ = u.User.Password()
	t.database = cmp.Or(strings.TrimPrefix(u.Path, "/"), "postgres")
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return target{}, errors.New("bad query in the PostgreSQL URL: " + urlForm)
	}
	for key, values := range query {
		switch {
		case key == "sslmode" && len(values) == 1:
			t.sslmode = values[0]
		case key == "host" && len(values) == 1 && t.host == "" && strings.HasPrefix(values[0], "/"):
			t.host = values[0]
		default:
			return target{}, fmt.Errorf("parameter %q of the PostgreSQL URL is not supported: %s", key, urlForm)
		}
	}
	if u.Port() != "" {
		if t.port, err = strconv.Atoi(u.Port()); err != nil {
			return target{}, errors.New("bad port in the PostgreSQL URL: " + urlForm)
		}
	}
	if t.sslmode == "" {
		t.sslmode = provision.VerifyFull
		if ip := net.ParseIP(t.host); t.local() || t.host == "localhost" || ip != nil && ip.IsLoopback() {
			t.sslmode = "disable"
		}
	}
	return t, t.validate()
}

// local says whether t is a Unix socket.
func (t target) local() bool { return strings.HasPrefix(t.host, "/") }

func (t target) validate() error {
	var faults []error
	if t.host == "" {
		faults = append(faults, errors.New("no host"))
	}
	if t.port < 1 || t.port > 65535 {
		faults = append(faults, fmt.Errorf("port %d is not from 1 to 65535", t.port))
	}
	switch t.sslmode {
	case "disable", provision.Require, provision.VerifyFull:
	default:
		faults = append(faults, fmt.Errorf("TLS mode %q: there are %s, %s and %s (sslmode=disable)",
			t.sslmode, provision.VerifyFull, provision.Require, provision.Off))
	}
	if t.ca != "" && !x509.NewCertPool().AppendCertsFromPEM([]byte(t.ca)) {
		faults = append(faults, errors.New("the CA holds no PEM certificate"))
	}
	return errors.Join(faults...)
}

// in is t in another database.
func (t target) in(database string) target {
	t.database = database
	return t
}

// tls returns nil for plain text.
func (t target) tls() *tls.Config {
	if t.sslmode == "disable" || t.local() {
		return nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.host}
	cfg.InsecureSkipVerify = t.sslmode == provision.Require
	if t.ca != "" {
		cfg.RootCAs = x509.NewCertPool()
		cfg.RootCAs.AppendCertsFromPEM([]byte(t.ca)) // validate has seen that it holds one
	}
	return cfg
}

// blank names every setting whose value in the environment could make the
// parser fail; connect overrides what the parser makes of the others.
const blank = `host=localhost port=1 user=x password=x database=x passfile='' sslmode=disable sslcert='' sslkey='' ` +
	`sslrootcert='' sslcertmode=disable sslnegotiation='' channel_binding=prefer require_auth='' connect_timeout=1 ` +
	`target_session_attrs=any min_protocol_version='' max_protocol_version=''`

// connect logs in. Its errors are for classify, which takes the login and the
// password out of reach.
func (t target) connect(ctx context.Context) (*pgx.Conn, error) {
	// The driver makes a Config only by parsing, and parsing reads PG* variables.
	cfg, err := pgx.ParseConfig(blank)
	if err != nil {
		return nil, &environmentError{err}
	}
	cfg.Host, cfg.Port = t.host, uint16(t.port)
	cfg.User, cfg.Password, cfg.Database = t.user, t.password, t.database
	cfg.TLSConfig, cfg.Fallbacks = t.tls(), nil
	cfg.KerberosSrvName, cfg.KerberosSpn = "", ""
	cfg.RuntimeParams = map[string]string{"application_name": t.application}
	cfg.ConnectTimeout = connectTimeout
	// Our largest answer is a row of names; this only bounds what a stranger at the
	// address can make us hold.
	cfg.MaxProtocolMessageBodyLen = 1 << 20
	if cfg.TLSConfig == nil && !t.local() {
		// In plain text, whoever sits between could ask for the password itself.
		cfg.RequireAuth = "!password"
	}
	dialer := &net.Dialer{}
	cfg.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dialer.DialContext(ctx, network, address)
		if err != nil {
			return nil, &dialError{err}
		}
		return conn, nil
	}
	// The driver would shake hands with its first message, and report what goes
	// wrong as a failed write.
	cfg.AfterNetConnect = func(ctx context.Context, _ *pgconn.Config, conn net.Conn) (net.Conn, error) {
		if c, ok := conn.(*tls.Conn); ok {
			if err := c.HandshakeContext(ctx); err != nil {
				return conn, &handshakeError{err}
			}
		}
		return conn, nil
	}
	// One round trip a statement, nothing prepared: it works through poolers.
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec
	return pgx.ConnectConfig(ctx, cfg)
}

// hangUp closes conn in order, or, where the server no longer answers, anyway.
func hangUp(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // the outcome of the call is known; a failed goodbye changes nothing
}
