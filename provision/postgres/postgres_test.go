package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"meshd/provision"
	"meshd/provision/postgres"
	"meshd/provision/postgres/pgtest"
	"meshd/provision/provisiontest"
)

// shared is the server of the tests that leave it as it was; nil without
// PostgreSQL.
var shared *pgtest.Server

func TestMain(m *testing.M) {
	s, err := pgtest.Start(pgtest.Options{})
	if err != nil && (!errors.Is(err, pgtest.ErrMissing) || os.Getenv("MESHD_REQUIRE_SERVERS") == "1") {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	shared = s
	code := m.Run()
	if s != nil {
		if err := s.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// need returns the shared server.
func need(t *testing.T) *pgtest.Server {
	t.Helper()
	if shared == nil {
		t.Skip(pgtest.ErrMissing)
	}
	return shared
}

func TestConformance(t *testing.T) {
	pg := need(t)
	way := provisiontest.NewProxy(t, net.JoinHostPort(pg.Host, strconv.Itoa(pg.Port)))
	admin := url.URL{Scheme: "postgresql", User: url.UserPassword(pgtest.Admin, pgtest.Password),
		Host: net.JoinHostPort(way.Host(), strconv.Itoa(way.Port())), Path: "/postgres"}
	provisiontest.Run(t, provisiontest.Suite{
		Kind: postgres.Kind{},
		Config: provision.Config{
			Mesh:    "m1",
			Address: provision.Address{Host: way.Host(), Port: way.Port(), TLS: provision.Off},
			Options: map[string]string{"admin": admin.String() + "\n"},
		},
		Faults: way,
		Dial:   dial,
		Trespass: func(ctx context.Context, fields map[string]string, other provision.Resource) error {
			u, err := url.Parse(fields["uri"])
			if err != nil {
				return nil // not a refusal
			}
			u.Path = "/" + other.Name
			conn, err := pgx.Connect(ctx, u.String())
			if err != nil {
				return err
			}
			return conn.Close(ctx)
		},
		Plant: func(t *testing.T, res provision.Resource, login provision.Login) {
			mustExec(t, "postgres", `CREATE DATABASE `+res.Name, `CREATE ROLE `+login.Name+` LOGIN`)
			t.Cleanup(func() { mustExec(t, "postgres", `DROP DATABASE `+res.Name, `DROP ROLE `+login.Name) })
		},
		Drop: func(ctx context.Context, login provision.Login) error {
			return pg.Exec(ctx, "postgres", `DROP ROLE `+login.Name)
		},
	})
}

// mustExec runs statements at the shared server as the superuser.
func mustExec(t *testing.T, database string, statements ...string) {
	t.Helper()
	for _, s := range statements {
		ok(t, s, shared.Exec(context.WithoutCancel(t.Context()), database, s))
	}
}

// table is a consumer that keeps its values in a table of its own.
type table struct{ conn *pgx.Conn }

func dial(ctx context.Context, fields map[string]string) (provisiontest.Session, error) {
	conn, err := pgx.Connect(ctx, fields["uri"])
	if err != nil {
		return nil, err
	}
	return table{conn}, nil
}

func (t table) Put(ctx context.Context, key, value string) error {
	_, err := t.conn.Exec(ctx, `CREATE TABLE IF NOT EXISTS kept (key text PRIMARY KEY, value text)`)
	if err != nil {
		return err
	}
	_, err = t.conn.Exec(ctx, `INSERT INTO kept VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = $2`, key, value)
	return err
}

func (t table) Get(ctx context.Context, key string) (value string, err error) {
	var there bool
	if err := t.conn.QueryRow(ctx, `SELECT to_regclass('kept') IS NOT NULL`).Scan(&there); err != nil || !there {
		return "", err
	}
	err = t.conn.QueryRow(ctx, `SELECT value FROM kept WHERE key = $1`, key).Scan(&value)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	return value, err
}

func (t table) Close() error { return t.conn.Close(context.Background()) }
