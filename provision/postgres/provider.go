package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"meshd/provision"
)

// Provider administers one server.
type Provider struct {
	mesh  string
	at    provision.Address
	admin target
	limit int // sessions of one login

	// second has room for one: whoever connects beside the one that works holds it.
	second chan struct{}
}

var (
	_ provision.Provider = (*Provider)(nil)
	_ provision.Answerer = (*Provider)(nil)
	_ provision.Watcher  = (*Provider)(nil)
)

// attempts bounds how often a change is begun again because somebody else was
// changing the same thing; under our lock that is rare.
const attempts = 3

// minVersion is the first that has pg_terminate_backend with a timeout.
const minVersion = 140000

// session is one connection of our admin.
type session struct {
	*pgx.Conn
	p       *Provider
	version int // server_version_num
}

// open connects as the admin.
func (p *Provider) open(ctx context.Context) (*session, error) {
	conn, err := p.admin.connect(ctx)
	if err != nil {
		return nil, classify(ctx, fmt.Sprintf("log in as admin %q", p.admin.user), err)
	}
	s := &session{Conn: conn, p: p}
	// A minute is ten times the slowest of our statements on a busy machine.
	const prepare = `SET statement_timeout = '60s'; SET lock_timeout = '30s'`
	if _, err = conn.Exec(ctx, prepare); err == nil {
		err = conn.QueryRow(ctx, `SELECT current_setting('server_version_num')::int`).Scan(&s.version)
	}
	if err != nil {
		hangUp(conn)
		return nil, classify(ctx, "begin the admin's session", err)
	}
	return s, nil
}

// change runs f as the only change at the server, again where somebody else's
// change of the same thing was in the way.
func (p *Provider) change(ctx context.Context, f func(context.Context, *session) error) error {
	var err error
	for range attempts {
		if err = p.changeOnce(ctx, f); !passing(err) {
			break
		}
	}
	return err
}

func (p *Provider) changeOnce(ctx context.Context, f func(context.Context, *session) error) error {
	s, err := p.open(ctx)
	if err != nil {
		return err
	}
	defer hangUp(s.Conn) // and with it goes the lock
	var recovery bool
	// The key is "meshd" in ASCII.
	err = s.QueryRow(ctx, `SELECT pg_is_in_recovery() FROM pg_advisory_lock(x'6d65736864'::bigint)`).Scan(&recovery)
	switch {
	case err != nil:
		return classify(ctx, "wait for other changes at the server", err)
	case recovery:
		return &provision.Error{Step: "begin the change", Class: provision.Recovery, Err: errStandby}
	}
	return f(ctx, s)
}

// in runs f on a second connection of the admin, in another database.
func (s *session) in(ctx context.Context, database string, f func(*pgx.Conn) error) error {
	step := fmt.Sprintf("connect to database %q", database)
	select {
	case s.p.second <- struct{}{}:
		defer func() { <-s.p.second }()
	case <-ctx.Done():
		return classify(ctx, step, ctx.Err())
	}
	conn, err := s.p.admin.in(database).connect(ctx)
	if err != nil {
		return classify(ctx, step, err)
	}
	defer hangUp(conn)
	return f(conn)
}

// exec runs statements in one transaction and one round trip.
func exec(ctx context.Context, conn *pgx.Conn, step string, statements ...string) error {
	_, err := conn.Exec(ctx, strings.Join(statements, ";\n"))
	return classify(ctx, step, err)
}

// Preflight asks for a primary that is writable and for the rights to create
// roles and databases and to end sessions. What is missing comes with the
// statements that a superuser has to run.
func (p *Provider) Preflight(ctx context.Context) error {
	s, err := p.open(ctx)
	if err != nil {
		return err
	}
	defer hangUp(s.Conn)
	const step = "check the server"
	var recovery, super, roles, databases, signal bool
	var readOnly string
	err = s.QueryRow(ctx, `SELECT pg_is_in_recovery(), current_setting('transaction_read_only'),
			rolsuper, rolcreaterole, rolcreatedb, pg_has_role(current_user, 'pg_signal_backend', 'USAGE')
		FROM pg_roles WHERE rolname = current_user`).Scan(&recovery, &readOnly, &super, &roles, &databases, &signal)
	fault := func(class provision.Class, err error) error {
		return &provision.Error{Step: step, Class: class, Err: err}
	}
	switch {
	case err != nil:
		return classify(ctx, step, err)
	case s.version < minVersion:
		return fault(provision.BadConfig, fmt.Errorf("PostgreSQL %d is too old: 14 or later is needed", s.version/10000))
	case recovery:
		return fault(provision.Recovery, errStandby)
	case readOnly == "on":
		return fault(provision.ReadOnly, errors.New("default_transaction_read_only is on"))
	case super:
		return nil
	}
	var missing, remedy []string
	for _, right := range []struct {
		has             bool
		name, statement string
	}{
		{roles, "CREATEROLE", "ALTER ROLE %s CREATEROLE"},
		{databases, "CREATEDB", "ALTER ROLE %s CREATEDB"},
		{signal, "membership in pg_signal_backend", "GRANT pg_signal_backend TO %s"},
	} {
		if !right.has {
			missing = append(missing, right.name)
			remedy = append(remedy, fmt.Sprintf(right.statement+";", quote(p.admin.user)))
		}
	}
	if len(missing) > 0 {
		return fault(provision.MissingRight, fmt.Errorf("admin %q lacks %s; as a superuser run: %s",
			p.admin.user, strings.Join(missing, ", "), strings.Join(remedy, " ")))
	}
	return nil
}

// Ensure makes role, database and login, or puts back what differs. It writes
// everything each time: a right that is there is granted again, which costs
// less than to compare, and the password cannot be compared at all.
func (p *Provider) Ensure(ctx context.Context, res provision.Resource, login provision.Login) error {
	if err := checkNames(res, login); err != nil {
		return err
	}
	if login.Secret == "" {
		return &provision.Error{Step: "check names", Class: provision.Internal, Err: fmt.Errorf("login %q has no secret", login.Name)}
	}
	return p.change(ctx, func(ctx context.Context, s *session) error {
		// What is not ours is refused before anything is made.
		owner, db, err := s.resource(ctx, res)
		if err != nil {
			return err
		}
		oid, err := s.ours(ctx, login.Name, p.loginMark(res))
		if err != nil {
			return err
		}
		if err := s.ensureOwner(ctx, res, owner); err != nil {
			return err
		}
		if err := s.ensureDatabase(ctx, res, db); err != nil {
			return err
		}
		return s.ensureLogin(ctx, res, login, oid)
	})
}

// Verify is Check at the address that consumers are given.
func (p *Provider) Verify(ctx context.Context, res provision.Resource, login provision.Login) error {
	if err := checkNames(res, login); err != nil {
		return err
	}
	return Kind{}.Check(ctx, Kind{}.Fields(p.at, res, login))
}

// InUse counts the sessions of login but for those of Verify and Check.
func (p *Provider) InUse(ctx context.Context, login provision.Login) (int, error) {
	s, err := p.open(ctx)
	if err != nil {
		return 0, err
	}
	defer hangUp(s.Conn)
	var n int
	err = s.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity
		WHERE usename = $1 AND application_name <> $2 AND `+clientBackend, login.Name, checkApplication).Scan(&n)
	return n, classify(ctx, "count sessions", err)
}

// Watch holds a session on which nothing is said: the server ends it when it is
// stopped, and the kernel when its process or its machine dies.
func (p *Provider) Watch(ctx context.Context) error {
	s, err := p.open(ctx)
	if err != nil {
		return err
	}
	defer hangUp(s.Conn)
	const step = "wait for the end of the server"
	if _, err := s.Exec(ctx, `SET idle_session_timeout = 0`); err != nil {
		return classify(ctx, step, err)
	}
	for err == nil {
		_, err = s.WaitForNotification(ctx) // nobody notifies: nothing is listened for
	}
	return classify(ctx, step, err)
}

// clientBackend leaves out parallel workers, which show their leader's login.
// Whoever may not see a session's details sees no type.
const clientBackend = `coalesce(backend_type, 'client backend') = 'client backend'`

// Withdraw closes the logins, ends their sessions, proves that they are refused,
// hands what they own themselves to the resource's role, and drops them.
func (p *Provider) Withdraw(ctx context.Context, res provision.Resource, logins []provision.Login) (int, error) {
	if err := checkNames(res, logins...); err != nil {
		return 0, err
	}
	ended := 0
	err := p.change(ctx, func(ctx context.Context, s *session) error {
		n, err := s.withdraw(ctx, res, logins)
		ended += n
		return err
	})
	return ended, err
}

// Purge drops the database and the role. It is refused while logins are left,
// and while the role owns something in another database.
func (p *Provider) Purge(ctx context.Context, res provision.Resource) error {
	if err := checkNames(res); err != nil {
		return err
	}
	return p.change(ctx, func(ctx context.Context, s *session) error { return s.purge(ctx, res) })
}

// Observe lists our databases, our roles that own one (under one name, once),
// and our logins.
func (p *Provider) Observe(ctx context.Context) ([]provision.Found, error) {
	s, err := p.open(ctx)
	if err != nil {
		return nil, err
	}
	defer hangUp(s.Conn)
	const step = "list what is ours"
	rows, err := s.Query(ctx, `SELECT name, description FROM (
			SELECT rolname::text, description FROM pg_shdescription
				JOIN pg_roles r ON classoid = 'pg_authid'::regclass AND objoid = r.oid
			UNION
			SELECT datname::text, description FROM pg_shdescription
				JOIN pg_database d ON classoid = 'pg_database'::regclass AND objoid = d.oid
		) marked (name, description) WHERE starts_with(description, $1) ORDER BY name`, provision.Mark(p.mesh, ""))
	if err != nil {
		return nil, classify(ctx, step, err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f provision.Found, err error) {
		err = row.Scan(&f.Name, &f.Mark)
		f.Mark, f.Login = strings.CutSuffix(f.Mark, loginSuffix)
		return f, err
	})
	return found, classify(ctx, step, err)
}

// Close has nothing to free.
func (p *Provider) Close() error { return nil }

// mark is the comment of a resource's role and database.
func (p *Provider) mark(res provision.Resource) string { return provision.Mark(p.mesh, res.ID) }

// loginSuffix tells a login from the role of its resource.
const loginSuffix = " login"

// loginMark is the comment of a resource's logins.
func (p *Provider) loginMark(res provision.Resource) string { return p.mark(res) + loginSuffix }
