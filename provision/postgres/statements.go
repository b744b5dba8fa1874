package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"meshd/provision"
)

// DDL takes no parameters, so names and texts are quoted.

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

// literal is right whatever standard_conforming_strings is.
func literal(text string) string {
	text = strings.ReplaceAll(text, `'`, `''`)
	if strings.Contains(text, `\`) {
		return `E'` + strings.ReplaceAll(text, `\`, `\\`) + `'`
	}
	return `'` + text + `'`
}

// grant makes member a member of role that can act as it. From version 16 on,
// whoever creates a role may administer it but not act as it, and a membership
// can be without either right: both are spelled out.
func (s *session) grant(role, member string) string {
	statement := `GRANT ` + quote(role) + ` TO ` + member
	if s.version >= 160000 {
		statement += ` WITH INHERIT TRUE, SET TRUE`
	}
	return statement
}

// grantUs is grant to our admin.
func (s *session) grantUs(role string) string { return s.grant(role, `CURRENT_USER`) }

// ours returns the oid of a role, 0 where there is none, and refuses one that
// does not carry the mark.
func (s *session) ours(ctx context.Context, name, mark string) (oid uint32, err error) {
	var comment string
	err = s.QueryRow(ctx, `SELECT oid, coalesce(shobj_description(oid, 'pg_authid'), '') FROM pg_roles WHERE rolname = $1`,
		name).Scan(&oid, &comment)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, nil
	case err != nil:
		return 0, classify(ctx, "look for role "+name, err)
	case comment != mark:
		return 0, foreign("role", name, mark)
	}
	return oid, nil
}

func foreign(what, name, mark string) error {
	return &provision.Error{Step: "look for " + what + " " + name, Class: provision.Foreign, Err: fmt.Errorf(
		"%s %q exists without the mark %q: meshd did not make it for this; rename or drop it", what, name, mark)}
}

// database is what the catalog says about a database.
type database struct {
	exists  bool
	comment string
	open    bool // it takes connections
	admins  bool // it is owned by our admin
}

// resource returns what there is of res: the oid of its role, 0 for none, and
// its database. It refuses what is not ours.
func (s *session) resource(ctx context.Context, res provision.Resource) (owner uint32, d database, err error) {
	mark := s.p.mark(res)
	if owner, err = s.ours(ctx, res.Name, mark); err != nil {
		return 0, database{}, err
	}
	err = s.QueryRow(ctx, `SELECT true, coalesce(shobj_description(oid, 'pg_database'), ''), datallowconn,
			pg_get_userbyid(datdba) = current_user
		FROM pg_database WHERE datname = $1`, res.Name).Scan(&d.exists, &d.comment, &d.open, &d.admins)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return 0, database{}, classify(ctx, "look for database "+res.Name, err)
	}
	begun := owner != 0 && d.comment == "" && !d.open && d.admins
	if d.exists && d.comment != mark && !begun {
		return 0, database{}, foreign("database", res.Name, mark)
	}
	return owner, d, nil
}

// ensureOwner makes, or mends where oid is not 0, the role that owns everything
// in the resource's database.
func (s *session) ensureOwner(ctx context.Context, res provision.Resource, oid uint32) error {
	if oid != 0 {
		return exec(ctx, s.Conn, "mend role "+res.Name,
			`ALTER ROLE `+quote(res.Name)+` NOLOGIN INHERIT NOCREATEROLE NOCREATEDB`,
			s.grantUs(res.Name))
	}
	return exec(ctx, s.Conn, "create role "+res.Name,
		`CREATE ROLE `+quote(res.Name)+` NOLOGIN INHERIT`,
		`COMMENT ON ROLE `+quote(res.Name)+` IS `+literal(s.p.mark(res)),
		s.grantUs(res.Name))
}

// ensureDatabase makes or mends the database; its role is there.
func (s *session) ensureDatabase(ctx context.Context, res provision.Resource, d database) error {
	name := quote(res.Name)
	switch {
	case !d.exists:
		create := `CREATE DATABASE ` + name + ` TEMPLATE template0 ENCODING 'UTF8'` +
			` LC_COLLATE 'C.UTF-8' LC_CTYPE 'C.UTF-8' ALLOW_CONNECTIONS false`
		if s.version >= 150000 {
			// An empty database: copying the template's files is faster than its log.
			create += ` STRATEGY file_copy`
		}
		if err := exec(ctx, s.Conn, "create database "+res.Name, create); err != nil {
			return err
		}
	case !d.admins:
		if err := exec(ctx, s.Conn, "take back database "+res.Name, `ALTER DATABASE `+name+` OWNER TO CURRENT_USER`); err != nil {
			return err
		}
	}
	err := exec(ctx, s.Conn, "open database "+res.Name,
		`COMMENT ON DATABASE `+name+` IS `+literal(s.p.mark(res)),
		`REVOKE ALL ON DATABASE `+name+` FROM PUBLIC`,
		`GRANT CONNECT, CREATE, TEMPORARY ON DATABASE `+name+` TO `+name,
		`ALTER DATABASE `+name+` ALLOW_CONNECTIONS true`)
	if err != nil {
		return err
	}
	return s.in(ctx, res.Name, func(conn *pgx.Conn) error {
		err := exec(ctx, conn, "own schema public of database "+res.Name, `ALTER SCHEMA public OWNER TO `+name)
		if code(err) == invalidSchema {
			return nil // the consumer owns it and has dropped it
		}
		return err
	})
}

// ensureLogin makes the login, or mends it where oid is not 0; its role and
// database are there.
func (s *session) ensureLogin(ctx context.Context, res provision.Resource, login provision.Login, oid uint32) error {
	secret, err := verifier(login.Secret)
	if err != nil {
		return classify(ctx, "hash the password of "+login.Name, err)
	}
	name := quote(login.Name)
	// Two above the consumer's own: the provider's and the consumer's node each
	// check with one session, also while the consumer's pool is full.
	attributes := fmt.Sprintf(` LOGIN INHERIT CONNECTION LIMIT %d PASSWORD %s`, s.p.limit+2, literal(secret))
	step := "create login " + login.Name
	statements := []string{`CREATE ROLE ` + name + attributes, `COMMENT ON ROLE ` + name + ` IS ` + literal(s.p.loginMark(res))}
	if oid != 0 {
		step = "mend login " + login.Name
		statements = []string{`ALTER ROLE ` + name + attributes + ` NOCREATEROLE NOCREATEDB VALID UNTIL 'infinity'`}
	}
	return exec(ctx, s.Conn, step, append(statements,
		s.grant(res.Name, name),
		s.grantUs(login.Name), // REASSIGN OWNED asks for it when the login goes
		`ALTER ROLE `+name+` IN DATABASE `+quote(res.Name)+` SET role = `+literal(res.Name))...)
}
