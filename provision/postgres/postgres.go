// Package postgres is the kind "postgres-database": a database of its own for
// each resource, on a PostgreSQL server of version 14 or later.
//
// What a resource o with the logins o_a and o_b is at the server:
//
//	database o     owned by our admin, so that no consumer can drop, rename or
//	               reconfigure it; closed to PUBLIC; open to role o
//	role o         cannot log in; owns the schema public and all that the
//	               consumers make; stays when logins come and go
//	role o_a, o_b  the logins; members of o that act as o in database o, so
//	               what one generation makes, the next one owns
//
// Roles and databases carry the mark as their COMMENT. The password goes to the
// server as a SCRAM verifier that is computed here, so no statement, and no
// server log, holds it.
//
// Invariants:
//
//   - A role exists only with its mark: both are made in one transaction. A
//     database cannot be; it is made closed to connections and opened in the
//     transaction that marks it, so an unmarked, closed database of our admin
//     beside a marked role of that name is one that we had begun.
//   - Changes at one server are made one at a time, also by several meshes: each
//     holds the same advisory lock of the admin's database.
//   - A Provider keeps no connection between calls, and has at most two as the
//     admin during one. Watch is a call: it has one, and does nothing on it.
package postgres

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"meshd/provision"
)

// Kind is "postgres-database".
//
// The options of a provider:
//
//	admin             postgresql://USER:PASSWORD@HOST:PORT/postgres?sslmode=..., or
//	                  postgresql://USER@/postgres?host=/var/run/postgresql for the
//	                  Unix socket. USER must have what Preflight asks for. Without
//	                  sslmode it is disable on loopback and verify-full elsewhere.
//	connection-limit  how many sessions each login may have; 10 by default
type Kind struct{}

var _ provision.Kind = Kind{}

// Name is "postgres-database".
func (Kind) Name() string { return "postgres-database" }

// Traits says that PostgreSQL can do everything that a kind can be asked for.
func (Kind) Traits() provision.Traits {
	return provision.Traits{Overlap: true, SeesInUse: true, TLS: true}
}

// defaultLimit protects the server's own limit (100 by default) from one
// consumer whose pool has no bound.
const defaultLimit = 10

// Open checks cfg and reports everything that is wrong with it.
func (Kind) Open(cfg provision.Config) (provision.Provider, error) {
	p := &Provider{mesh: cfg.Mesh, at: cfg.Address, limit: defaultLimit, second: make(chan struct{}, 1)}
	var faults []error
	for key, value := range cfg.Options {
		var err error
		switch key {
		case "admin":
			p.admin, err = parseURL(strings.TrimSpace(value))
			p.admin.ca, p.admin.application = cfg.Address.CA, "meshd"
		case "connection-limit":
			p.limit, err = strconv.Atoi(value)
			if err != nil || p.limit < 1 || p.limit > 10000 {
				err = fmt.Errorf("%q is not a number from 1 to 10000", value)
			}
		default:
			err = errors.New("no such option; there are admin and connection-limit")
		}
		if err != nil {
			faults = append(faults, fmt.Errorf("option %q: %w", key, err))
		}
	}
	if cfg.Options["admin"] == "" {
		faults = append(faults, errors.New(`option "admin" is missing: `+urlForm))
	}
	if cfg.Mesh == "" {
		faults = append(faults, errors.New("the mesh has no id"))
	}
	if _, err := checked(cfg.Address); err != nil {
		faults = append(faults, fmt.Errorf("address: %w", err))
	}
	if len(faults) > 0 {
		return nil, &provision.Error{Step: "open postgres-database", Class: provision.BadConfig, Err: errors.Join(faults...)}
	}
	return p, nil
}

// sslmode translates the TLS mode of an address to PostgreSQL's word.
func sslmode(tls string) string {
	if tls == provision.Off {
		return "disable"
	}
	return tls
}

// checked returns the target of an address, without login and database.
func checked(at provision.Address) (target, error) {
	t := target{host: at.Host, port: at.Port, sslmode: sslmode(at.TLS), ca: at.CA}
	return t, t.validate()
}

// Fields returns type, host, port, database, username, password, sslmode
// (disable, require or verify-full), uri, and, where the address has one, the
// PEM bundle ca.crt.
func (Kind) Fields(at provision.Address, res provision.Resource, login provision.Login) map[string]string {
	port := strconv.Itoa(at.Port)
	uri := url.URL{
		Scheme: "postgresql", User: url.UserPassword(login.Name, login.Secret),
		Host: net.JoinHostPort(at.Host, port), Path: "/" + res.Name,
		RawQuery: url.Values{"sslmode": {sslmode(at.TLS)}}.Encode(),
	}
	fields := map[string]string{
		"type":     "postgresql",
		"host":     at.Host,
		"port":     port,
		"database": res.Name,
		"username": login.Name,
		"password": login.Secret,
		"sslmode":  sslmode(at.TLS),
		"uri":      uri.String(),
	}
	if at.CA != "" {
		fields["ca.crt"] = at.CA
	}
	return fields
}

// Check logs in with the fields and nothing else, acts as the owner of the
// database, and makes a table that is never committed. A URI that says other
// than the single fields is a fault.
func (Kind) Check(ctx context.Context, fields map[string]string) error {
	t, err := delivered(fields)
	if err != nil {
		return &provision.Error{Step: "read the fields", Class: provision.BadConfig, Err: err}
	}
	conn, err := t.connect(ctx)
	if err != nil {
		return consumerError(ctx, "log in", err)
	}
	defer hangUp(conn)
	return probe(ctx, conn, t.user, t.database)
}

// delivered reads what Fields wrote.
func delivered(fields map[string]string) (target, error) {
	var missing []string
	for _, name := range []string{"host", "port", "database", "username", "password", "sslmode"} {
		if fields[name] == "" {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return target{}, fmt.Errorf("missing: %s", strings.Join(missing, ", "))
	}
	port, err := strconv.Atoi(fields["port"])
	if err != nil {
		return target{}, fmt.Errorf("port %q is not a number", fields["port"])
	}
	t := target{
		host: fields["host"], port: port, sslmode: fields["sslmode"], ca: fields["ca.crt"],
		user: fields["username"], password: fields["password"], database: fields["database"],
	}
	if err := t.validate(); err != nil {
		return target{}, err
	}
	if uri := fields["uri"]; uri != "" {
		u, err := parseURL(uri)
		u.ca = t.ca
		if err != nil {
			return target{}, fmt.Errorf("uri: %w", err)
		}
		if u != t {
			return target{}, errors.New("uri and the other fields differ")
		}
	}
	t.application = checkApplication
	return t, nil
}

// probe proves that conn, logged in as login, acts as owner and can make things.
func probe(ctx context.Context, conn *pgx.Conn, login, owner string) error {
	var session, current string
	var recovery bool
	err := conn.QueryRow(ctx, `SELECT session_user::text, current_user::text, pg_is_in_recovery()`).
		Scan(&session, &current, &recovery)
	switch {
	case err != nil:
		return consumerError(ctx, "ask who is logged in", err)
	case recovery:
		return &provision.Error{Step: "log in", Class: provision.Recovery, Err: errStandby}
	case session != login || current != owner:
		return &provision.Error{Step: "log in", Class: provision.Refused,
			Err: fmt.Errorf("logged in as %q acting as %q, not as %q acting as %q", session, current, login, owner)}
	}
	// A name that nothing else has, so that probes neither wait for each other nor
	// meet a table of the consumer.
	name := pgx.Identifier{"meshd_probe_" + strings.ToLower(rand.Text())}.Sanitize()
	// 5 s: it takes a millisecond, unless somebody locks the catalog.
	const begin = `BEGIN; SET LOCAL statement_timeout = '5s'; `
	_, err = conn.Exec(ctx, begin+`CREATE TABLE public.`+name+` (i int); ROLLBACK`)
	if code(err) == invalidSchema {
		// The consumer owns the schema public and may have dropped it.
		_, err = conn.Exec(ctx, `ROLLBACK; `+begin+`CREATE SCHEMA `+name+`; ROLLBACK`)
	}
	if err != nil {
		return consumerError(ctx, "make a table", err)
	}
	return nil
}

var (
	// nameForm is stricter than PostgreSQL: what it admits needs no quoting in any
	// tool that a consumer may use. 63 bytes is where PostgreSQL would cut
	// (NAMEDATALEN), and "pg_" is reserved by it.
	nameForm   = regexp.MustCompile(`^[a-z0-9_]{1,63}$`)
	secretForm = regexp.MustCompile(`^[A-Za-z0-9]{32,256}$`)
)

func checkName(what, name string) error {
	switch {
	case !nameForm.MatchString(name):
		return fmt.Errorf("%s name %q: a name is 1 to 63 of a-z, 0-9 and _", what, name)
	case strings.HasPrefix(name, "pg_"), name == "public", name == "none":
		return fmt.Errorf("%s name %q is reserved by PostgreSQL", what, name)
	}
	return nil
}

// checkNames refuses what the caller should not have sent.
func checkNames(res provision.Resource, logins ...provision.Login) error {
	faults := []error{checkName("resource", res.Name)}
	if res.ID == "" {
		faults = append(faults, fmt.Errorf("resource %q has no ID", res.Name))
	}
	for _, l := range logins {
		faults = append(faults, checkName("login", l.Name))
		if l.Secret != "" && !secretForm.MatchString(l.Secret) {
			faults = append(faults, fmt.Errorf("login %q: its secret is not 32 to 256 of A-Z, a-z and 0-9", l.Name))
		}
	}
	if err := errors.Join(faults...); err != nil {
		return &provision.Error{Step: "check names", Class: provision.Internal, Err: err}
	}
	return nil
}
