package postgres_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"meshd/provision"
	"meshd/provision/postgres"
	"meshd/provision/postgres/pgtest"
)

// open returns a Provider of pg whose consumers are sent to at.
func open(t *testing.T, pg *pgtest.Server, at provision.Address, options map[string]string) *postgres.Provider {
	t.Helper()
	all := map[string]string{"admin": pg.AdminURL()}
	for k, v := range options {
		all[k] = v
	}
	p, err := postgres.Kind{}.Open(provision.Config{Mesh: "m1", Address: at, Options: all})
	if err != nil {
		t.Fatal(err)
	}
	return p.(*postgres.Provider)
}

func plain(pg *pgtest.Server) provision.Address {
	return provision.Address{Host: pg.Host, Port: pg.Port, TLS: provision.Off}
}

// names returns a resource and a login called after the test.
func names(t *testing.T) (provision.Resource, provision.Login) {
	name := strings.ToLower(strings.NewReplacer("/", "_", "Test", "").Replace(t.Name()))
	name = name[:min(len(name), 25)]
	return provision.Resource{ID: "id-" + name, Name: name},
		provision.Login{Name: name + "_1", Secret: "Secret0123456789abcdefghijklmnop" + name[:1]}
}

// minted makes the test's login and leaves nothing after the test.
func minted(t *testing.T, p provision.Provider) (provision.Resource, provision.Login) {
	t.Helper()
	res, login := names(t)
	ok(t, "Ensure", p.Ensure(t.Context(), res, login))
	ok(t, "Verify", p.Verify(t.Context(), res, login))
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_, err := p.Withdraw(ctx, res, []provision.Login{login})
		ok(t, "Withdraw", err)
		ok(t, "Purge", p.Purge(ctx, res))
	})
	return res, login
}

func ok(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v (class %s)", what, err, provision.ClassOf(err))
	}
}

func want(t *testing.T, what string, err error, class provision.Class) {
	t.Helper()
	if got := provision.ClassOf(err); got != class {
		t.Errorf("%s: got class %q (%v), want %q", what, got, err, class)
	}
}

// until waits for a condition.
func until(t *testing.T, what string, reached func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(time.Minute); !reached(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("waited a minute for: %s", what)
		}
	}
}

func check(t *testing.T, at provision.Address, res provision.Resource, login provision.Login) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	return postgres.Kind{}.Check(ctx, postgres.Kind{}.Fields(at, res, login))
}

func TestPreflightNamesEachMissingRight(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	rights := map[string][2]string{ // by what the error names: how to take it, how to give it back
		"CREATEROLE":        {`ALTER ROLE meshd_admin NOCREATEROLE`, `ALTER ROLE "meshd_admin" CREATEROLE;`},
		"CREATEDB":          {`ALTER ROLE meshd_admin NOCREATEDB`, `ALTER ROLE "meshd_admin" CREATEDB;`},
		"pg_signal_backend": {`REVOKE pg_signal_backend FROM meshd_admin`, `GRANT pg_signal_backend TO "meshd_admin";`},
	}
	for name, r := range rights {
		mustExec(t, "postgres", r[0])
		err := p.Preflight(t.Context())
		mustExec(t, "postgres", r[1])
		want(t, "Preflight without "+name, err, provision.MissingRight)
		for other, o := range rights {
			if got := strings.Contains(err.Error(), o[1]); got != (other == name) {
				t.Errorf("without %s: names the remedy for %s: %v: %v", name, other, got, err)
			}
		}
	}
	ok(t, "Preflight with all rights", p.Preflight(t.Context()))
}

// TestServerStates has a server of its own and changes it from state to state.
func TestServerStates(t *testing.T) {
	need(t)
	pg := pgtest.Need(t, pgtest.Options{})
	p := open(t, pg, plain(pg), map[string]string{"connection-limit": "1"})
	res, login := minted(t, p)
	fields := postgres.Kind{}.Fields(plain(pg), res, login)

	ok(t, "ReadOnly", pg.ReadOnly(t.Context(), true))
	want(t, "Preflight, read-only", p.Preflight(t.Context()), provision.ReadOnly)
	want(t, "Ensure, read-only", p.Ensure(t.Context(), res, login), provision.ReadOnly)
	want(t, "Verify, read-only", p.Verify(t.Context(), res, login), provision.ReadOnly)
	ok(t, "ReadOnly", pg.ReadOnly(t.Context(), false))
	ok(t, "Verify, writable again", p.Verify(t.Context(), res, login))

	ok(t, "Standby", pg.Standby(true))
	want(t, "Preflight, standby", p.Preflight(t.Context()), provision.Recovery)
	want(t, "Ensure, standby", p.Ensure(t.Context(), res, login), provision.Recovery)
	want(t, "Verify, standby", p.Verify(t.Context(), res, login), provision.Recovery)
	ok(t, "Standby", pg.Standby(false))
	ok(t, "Verify, primary again", p.Verify(t.Context(), res, login))

	ok(t, "Pause", pg.Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	want(t, "Preflight, paused", p.Preflight(ctx), provision.TimedOut)
	cancel()
	ok(t, "Resume", pg.Resume())
	ok(t, "Verify, resumed", p.Verify(t.Context(), res, login))

	ok(t, "Stop", pg.Stop())
	want(t, "Preflight, stopped", p.Preflight(t.Context()), provision.Unreachable)
	want(t, "Verify, stopped", p.Verify(t.Context(), res, login), provision.Unreachable)
	ok(t, "Start", pg.Start())
	ok(t, "Verify, started again", p.Verify(t.Context(), res, login))

	// One session is the consumer's, two are spare for our checks.
	var live []*pgx.Conn
	until(t, "three sessions", func() bool { // those of the checks above may take a moment to end
		conn, err := pgx.Connect(t.Context(), fields["uri"])
		if err == nil {
			live = append(live, conn)
		}
		return len(live) == 3
	})
	want(t, "Verify above the limit", p.Verify(t.Context(), res, login), provision.Full)
	for _, conn := range live {
		ok(t, "close", conn.Close(t.Context()))
	}

	ok(t, "Set", pg.Set(t.Context(), "ssl", "off"))
	at := plain(pg)
	at.TLS = provision.Require
	want(t, "Check with TLS at a server without", check(t, at, res, login), provision.TLSFault)
}

func TestDriftIsMended(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	for _, drift := range []struct {
		name, in, by string
		shows        bool   // Verify fails until it is mended
		mended       string // a query that is true then
	}{
		{"login closed", "postgres", `ALTER ROLE {l} NOLOGIN`, true, ""},
		{"membership revoked", "postgres", `REVOKE {r} FROM {l} GRANTED BY meshd_admin`, true, ""},
		{"password changed", "postgres", `ALTER ROLE {l} PASSWORD 'other'`, true, ""},
		{"password gone", "postgres", `ALTER ROLE {l} PASSWORD NULL`, true, ""},
		{"password expired", "postgres", `ALTER ROLE {l} VALID UNTIL '2000-01-01'`, true, ""},
		{"no connections", "postgres", `ALTER ROLE {l} CONNECTION LIMIT 0`, true, ""},
		{"acts as itself", "postgres", `ALTER ROLE {l} IN DATABASE {r} RESET role`, true, ""},
		{"may create roles", "postgres", `ALTER ROLE {l} CREATEROLE CREATEDB`, false,
			`SELECT NOT rolcreaterole AND NOT rolcreatedb FROM pg_roles WHERE rolname = '{l}'`},
		{"owner can log in", "postgres", `ALTER ROLE {r} LOGIN`, false, `SELECT NOT rolcanlogin FROM pg_roles WHERE rolname = '{r}'`},
		{"database closed", "postgres", `ALTER DATABASE {r} ALLOW_CONNECTIONS false`, true, ""},
		{"database open to all", "postgres", `GRANT CONNECT ON DATABASE {r} TO PUBLIC`, false,
			`SELECT NOT has_database_privilege('public', '{r}', 'CONNECT')`},
		{"database owned by the consumer", "postgres", `ALTER DATABASE {r} OWNER TO {r}`, false,
			`SELECT datdba = 'meshd_admin'::regrole FROM pg_database WHERE datname = '{r}'`},
		{"rights on the database revoked", "postgres", `REVOKE ALL ON DATABASE {r} FROM {r}`, true, ""},
		{"schema owned by another", res.Name, `ALTER SCHEMA public OWNER TO pg_database_owner; REVOKE ALL ON SCHEMA public FROM PUBLIC`, true, ""},
		{"admin's memberships revoked", "postgres", `REVOKE {r} FROM meshd_admin; REVOKE {l} FROM meshd_admin`, false,
			`SELECT pg_has_role('meshd_admin', '{r}', 'USAGE') AND pg_has_role('meshd_admin', '{l}', 'USAGE')`},
	} {
		t.Run(drift.name, func(t *testing.T) {
			if strings.Contains(drift.by, "FROM meshd_admin") && version(t) >= 16 {
				t.Log("from version 16 on this takes the right to administer the role, which only a superuser gives back")
				return
			}
			fill := strings.NewReplacer("{r}", res.Name, "{l}", login.Name)
			mustExec(t, drift.in, fill.Replace(drift.by))
			if err := p.Verify(t.Context(), res, login); drift.shows && err == nil {
				t.Error("Verify does not see it")
			}
			ok(t, "Ensure", p.Ensure(t.Context(), res, login))
			ok(t, "Verify", p.Verify(t.Context(), res, login))
			if drift.mended != "" && ask[bool](t, "postgres", fill.Replace(drift.mended)) != true {
				t.Error("not mended")
			}
		})
	}
}

// ask returns the only value of a query at the shared server.
func ask[T any](t *testing.T, database, query string) (value T) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), shared.URL(pgtest.Superuser, pgtest.Password, database))
	ok(t, "connect", err)
	defer conn.Close(t.Context())
	ok(t, query, conn.QueryRow(t.Context(), query).Scan(&value))
	return value
}

func version(t *testing.T) int {
	return ask[int](t, "postgres", `SELECT current_setting('server_version_num')::int / 10000`)
}

// TestSchemaOfTheConsumer is a consumer that has no schema public any more.
func TestSchemaOfTheConsumer(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	mustExec(t, res.Name, `DROP SCHEMA public`)
	ok(t, "Ensure", p.Ensure(t.Context(), res, login))
	ok(t, "Verify", p.Verify(t.Context(), res, login))
}

// TestConsumerOwnsNoDatabase tries what would take the database from us.
func TestConsumerOwnsNoDatabase(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	conn, err := pgx.Connect(t.Context(), pg.URL(login.Name, login.Secret, "postgres"))
	ok(t, "connect", err)
	defer conn.Close(t.Context())
	for _, statement := range []string{
		`DROP DATABASE ` + res.Name,
		`SET ROLE ` + res.Name + `; DROP DATABASE ` + res.Name,
		`ALTER DATABASE ` + res.Name + ` RENAME TO elsewhere`,
		`GRANT CONNECT ON DATABASE ` + res.Name + ` TO PUBLIC`,
		`CREATE ROLE somebody`,
		`DROP ROLE ` + res.Name,
	} {
		tag, err := conn.Exec(t.Context(), statement)
		if err == nil && !strings.HasPrefix(tag.String(), "GRANT") {
			t.Errorf("the consumer may: %s", statement)
		}
	}
	// A GRANT without the right to it is a warning and changes nothing.
	if ask[bool](t, "postgres", `SELECT has_database_privilege('public', '`+res.Name+`', 'CONNECT')`) {
		t.Error("the consumer has opened the database to everybody")
	}
}

// TestWithdrawHandsOverWhatTheLoginOwns is a consumer that has stepped out of
// its role: what it made then is its login's own, here and in another database.
func TestWithdrawHandsOverWhatTheLoginOwns(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	elsewhere, other := provision.Resource{ID: "elsewhere", Name: "elsewhere"}, login
	other.Name = "elsewhere_1"
	ok(t, "Ensure", p.Ensure(t.Context(), elsewhere, other))
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_, err := p.Withdraw(ctx, elsewhere, []provision.Login{other})
		ok(t, "Withdraw", err)
		ok(t, "Purge", p.Purge(ctx, elsewhere))
	})
	mustExec(t, "elsewhere", `CREATE SCHEMA lent AUTHORIZATION `+login.Name, `GRANT CREATE ON DATABASE elsewhere TO `+login.Name)
	mustExec(t, res.Name, `SET ROLE `+login.Name+`; CREATE TABLE public.mine AS SELECT 42 AS n`)

	_, err := p.Withdraw(t.Context(), res, []provision.Login{login})
	ok(t, "Withdraw", err)
	if owner := ask[string](t, res.Name, `SELECT tableowner::text FROM pg_tables WHERE tablename = 'mine'`); owner != res.Name {
		t.Errorf("the table belongs to %s", owner)
	}
	if owner := ask[string](t, "elsewhere", `SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'lent'`); owner != res.Name {
		t.Errorf("the schema elsewhere belongs to %s", owner)
	}

	// The role that owns something in another database cannot go before that does.
	err = p.Purge(t.Context(), res)
	want(t, "Purge", err, provision.Blocked)
	if !strings.Contains(err.Error(), "elsewhere") {
		t.Errorf("Purge does not say where the blocker is: %v", err)
	}
	mustExec(t, "elsewhere", `DROP SCHEMA lent`)
}

// TestWithdrawNeedsNoConsumerAddress has a pooler that has gone.
func TestWithdrawNeedsNoConsumerAddress(t *testing.T) {
	pg := need(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, "listen", err)
	gone := provision.Address{Host: "127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port, TLS: provision.Off}
	ok(t, "close", l.Close())
	p := open(t, pg, gone, nil)
	res, login := names(t)
	ok(t, "Ensure", p.Ensure(t.Context(), res, login))
	want(t, "Verify", p.Verify(t.Context(), res, login), provision.Unreachable)
	ok(t, "Check at the server itself", check(t, plain(pg), res, login))
	_, err = p.Withdraw(t.Context(), res, []provision.Login{login})
	ok(t, "Withdraw", err)
	want(t, "Check after it", check(t, plain(pg), res, login), provision.Refused)
	ok(t, "Purge", p.Purge(t.Context(), res))
}

func TestPurgeIsRefusedWhileLoginsAreLeft(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	err := p.Purge(t.Context(), res)
	want(t, "Purge", err, provision.Blocked)
	if !strings.Contains(err.Error(), login.Name) {
		t.Errorf("the error does not name the login: %v", err)
	}
	ok(t, "Verify", p.Verify(t.Context(), res, login))
}

// TestUnmarkedDatabaseBesideOurRole tells what we had begun from what somebody
// else has made under the name since.
func TestUnmarkedDatabaseBesideOurRole(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	mustExec(t, "postgres", `COMMENT ON DATABASE `+res.Name+` IS NULL`)
	want(t, "Ensure on an open database", p.Ensure(t.Context(), res, login), provision.Foreign)
	mustExec(t, "postgres", `ALTER DATABASE `+res.Name+` ALLOW_CONNECTIONS false`)
	ok(t, "Ensure on a closed one", p.Ensure(t.Context(), res, login))
	ok(t, "Verify", p.Verify(t.Context(), res, login))
}

func TestMeshesTakeTurns(t *testing.T) {
	pg := need(t)
	var all errgroup.Group
	for i := range 6 {
		mesh := "turn" + strconv.Itoa(i)
		p, err := postgres.Kind{}.Open(provision.Config{Mesh: mesh, Address: plain(pg), Options: map[string]string{"admin": pg.AdminURL()}})
		ok(t, "Open", err)
		res := provision.Resource{ID: "r", Name: mesh}
		login := provision.Login{Name: mesh + "_1", Secret: strings.Repeat("s", 32)}
		all.Go(func() error {
			ctx := t.Context()
			_, withdraw := p.Withdraw(ctx, res, nil)
			return errors.Join(withdraw, p.Ensure(ctx, res, login), p.Verify(ctx, res, login), func() error {
				_, err := p.Withdraw(ctx, res, []provision.Login{login})
				return err
			}(), p.Purge(ctx, res))
		})
	}
	ok(t, "six meshes at once", all.Wait())
}

func TestAddresses(t *testing.T) {
	pg := need(t)
	six := net.JoinHostPort("::1", strconv.Itoa(pg.Port))
	conn, err := net.Dial("tcp", six)
	if err != nil {
		t.Skipf("no IPv6 on the loopback interface: %v", err)
	}
	ok(t, "close", conn.Close())
	at := provision.Address{Host: "::1", Port: pg.Port, TLS: provision.Off}
	admin := strings.Replace(pg.AdminURL(), net.JoinHostPort(pg.Host, strconv.Itoa(pg.Port)), six, 1)
	p := open(t, pg, at, map[string]string{"admin": admin})
	ok(t, "Preflight", p.Preflight(t.Context()))
	res, login := minted(t, p)

	u, err := url.Parse(postgres.Kind{}.Fields(at, res, login)["uri"])
	ok(t, "parse uri", err)
	if u.Host != six {
		t.Errorf("uri has host %q, want %q", u.Host, six)
	}
	driver, err := pgx.Connect(t.Context(), u.String())
	ok(t, "connect with the uri", err)
	ok(t, "close", driver.Close(t.Context()))

	socket := url.URL{Scheme: "postgresql", User: url.UserPassword(pgtest.Admin, pgtest.Password), Host: ":" + strconv.Itoa(pg.Port),
		Path: "/postgres", RawQuery: url.Values{"host": {pg.SocketDir()}}.Encode()}
	ok(t, "Preflight by socket", open(t, pg, at, map[string]string{"admin": socket.String()}).Preflight(t.Context()))
}

func TestTLS(t *testing.T) {
	pg := need(t)
	full := provision.Address{Host: pg.Host, Port: pg.Port, TLS: provision.VerifyFull, CA: pg.CA}
	p := open(t, pg, full, map[string]string{"admin": strings.Replace(pg.AdminURL(), "disable", "verify-full", 1)})
	res, login := minted(t, p)
	fields := postgres.Kind{}.Fields(full, res, login)
	if fields["ca.crt"] != pg.CA || fields["sslmode"] != "verify-full" {
		t.Errorf("fields: ca.crt %q, sslmode %q", fields["ca.crt"], fields["sslmode"])
	}
	for _, c := range []struct {
		name  string
		edit  func(*provision.Address)
		class provision.Class
	}{
		{"verify-full by name", func(at *provision.Address) { at.Host = "localhost" }, ""},
		{"verify-full, wrong name", func(at *provision.Address) { at.Host = "::1" }, provision.TLSFault},
		{"verify-full, system's roots", func(at *provision.Address) { at.CA = "" }, provision.TLSFault},
		{"require", func(at *provision.Address) { at.TLS = provision.Require }, ""},
		{"require, wrong name", func(at *provision.Address) { at.TLS, at.Host = provision.Require, "::1" }, ""},
		{"off", func(at *provision.Address) { at.TLS = provision.Off }, ""},
	} {
		at := full
		c.edit(&at)
		want(t, c.name, check(t, at, res, login), c.class)
	}
}

// TestServerLogHoldsNoSecret reads a log of every statement.
func TestServerLogHoldsNoSecret(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	wrong := login
	wrong.Secret = strings.Repeat("Wrong", 8)
	want(t, "Verify with a wrong secret", p.Verify(t.Context(), res, wrong), provision.Refused)
	log, err := pg.Log()
	ok(t, "read the log", err)
	if !bytes.Contains(log, []byte("SCRAM-SHA-256$4096:")) {
		t.Error("the log does not show the statements, so it proves nothing")
	}
	for _, secret := range []string{login.Secret, wrong.Secret} {
		if bytes.Contains(log, []byte(secret)) {
			t.Error("the log shows a password")
		}
	}
}

func TestCheckTakesNothingFromTheEnvironment(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	for name, value := range map[string]string{
		"PGHOST": "192.0.2.1", "PGPORT": "no number", "PGUSER": "nobody", "PGDATABASE": "nothing", "PGPASSWORD": "wrong",
		"PGSSLMODE": "no mode", "PGSSLROOTCERT": "/nonexistent", "PGSSLCERT": "/nonexistent", "PGOPTIONS": "-c role=nobody",
		"PGTARGETSESSIONATTRS": "standby", "PGCONNECT_TIMEOUT": "no number", "PGSSLCERTMODE": "", "PGREQUIREAUTH": "x",
		"PGCHANNELBINDING": "x", "PGMINPROTOCOLVERSION": "x", "PGAPPNAME": "x", "PGSSLNEGOTIATION": "direct",
	} {
		t.Setenv(name, value)
	}
	ok(t, "Check", check(t, plain(pg), res, login))
	t.Run("PGSERVICE", func(t *testing.T) {
		t.Setenv("PGSERVICE", "nowhere")
		t.Setenv("PGSERVICEFILE", "/nonexistent")
		err := check(t, plain(pg), res, login)
		want(t, "Check", err, provision.BadConfig)
		if !strings.Contains(err.Error(), "PGSERVICE") {
			t.Errorf("the error does not name the variable: %v", err)
		}
	})
}

func TestCheckRefusesBadFields(t *testing.T) {
	res, login := names(t)
	at := provision.Address{Host: "127.0.0.1", Port: 5432, TLS: provision.Off}
	for name, edit := range map[string]func(map[string]string){
		"no host":           func(f map[string]string) { delete(f, "host") },
		"no sslmode":        func(f map[string]string) { delete(f, "sslmode") },
		"sslmode prefer":    func(f map[string]string) { f["sslmode"] = "prefer" },
		"port":              func(f map[string]string) { f["port"] = "70000" },
		"no number":         func(f map[string]string) { f["port"] = "x" },
		"other uri":         func(f map[string]string) { f["uri"] = strings.Replace(f["uri"], res.Name, "other", 1) },
		"uri of no kind":    func(f map[string]string) { f["uri"] = "http://x" },
		"no certificate":    func(f map[string]string) { f["ca.crt"] = "x" },
		"other parameters":  func(f map[string]string) { f["uri"] += "&passfile=/etc/passwd" },
		"uri with no close": func(f map[string]string) { f["uri"] = "postgresql://u:" + login.Secret + "@[::1" },
	} {
		fields := postgres.Kind{}.Fields(at, res, login)
		edit(fields)
		err := postgres.Kind{}.Check(t.Context(), fields)
		want(t, name, err, provision.BadConfig)
		if err != nil && strings.Contains(err.Error(), login.Secret) {
			t.Errorf("%s: the error shows the password", name)
		}
	}
}

func TestOpenReportsEveryFault(t *testing.T) {
	_, err := postgres.Kind{}.Open(provision.Config{
		Address: provision.Address{Host: "", Port: 0, TLS: "maybe", CA: "none"},
		Options: map[string]string{"admin": "postgres://u:p/w@h", "connection-limit": "many", "color": "red"},
	})
	want(t, "Open", err, provision.BadConfig)
	for _, part := range []string{"admin", "connection-limit", "color", "mesh", "host", "port 0", "maybe", "PEM"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("does not name %s: %v", part, err)
		}
	}
	if strings.Contains(err.Error(), "p/w") {
		t.Errorf("shows the password: %v", err)
	}
}

func TestAnswer(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	conn, err := pgx.Connect(t.Context(), pg.URL(login.Name, login.Secret, res.Name))
	ok(t, "connect", err)
	defer conn.Close(t.Context())
	mustExec(t, "postgres", `CREATE DATABASE closed_to_us`, `REVOKE ALL ON DATABASE closed_to_us FROM PUBLIC`)
	defer mustExec(t, "postgres", `DROP DATABASE closed_to_us`)

	find := func(name string) postgres.Database {
		text, err := p.Answer(t.Context(), "databases", nil)
		ok(t, "Answer", err)
		var list []postgres.Database
		ok(t, "read the answer", json.Unmarshal(text, &list))
		i := slices.IndexFunc(list, func(d postgres.Database) bool { return d.Name == name })
		if i < 0 {
			t.Fatalf("no %s in %s", name, text)
		}
		return list[i]
	}
	until(t, "one session of "+res.Name, func() bool { return find(res.Name).Sessions == 1 })
	if d := find(res.Name); !d.Ours || d.Bytes < 1<<20 {
		t.Errorf("got %+v, want ours, with some megabytes", d)
	}
	if d := find("closed_to_us"); d.Ours || d.Bytes != -1 {
		t.Errorf("got %+v, want not ours, and no size", d)
	}

	_, err = p.Answer(t.Context(), "sing", nil)
	want(t, "Answer to an unknown verb", err, provision.BadConfig)
	if !strings.Contains(err.Error(), "databases") {
		t.Errorf("does not list the verbs: %v", err)
	}
}
