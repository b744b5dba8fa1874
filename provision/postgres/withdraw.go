package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"meshd/provision"
)

// endRounds bounds how often sessions are ended that came while others were
// being ended: a login that is closed gets no more than those under way.
const endRounds = 5

func (s *session) withdraw(ctx context.Context, res provision.Resource, logins []provision.Login) (ended int, err error) {
	oids := make([]uint32, len(logins)) // 0 for one that is gone
	var closing []string
	for i, l := range logins {
		if oids[i], err = s.ours(ctx, l.Name, s.p.loginMark(res)); err != nil {
			return 0, err
		}
		if oids[i] != 0 {
			closing = append(closing, `ALTER ROLE `+quote(l.Name)+` NOLOGIN`, s.grantUs(l.Name))
		}
	}
	if len(closing) > 0 {
		// Somebody has to take over what the logins own.
		owner, err := s.ours(ctx, res.Name, s.p.mark(res))
		if err != nil {
			return 0, err
		}
		if err := s.ensureOwner(ctx, res, owner); err != nil {
			return 0, err
		}
		if err := exec(ctx, s.Conn, "close the logins", closing...); err != nil {
			return 0, err
		}
	}
	for i, l := range logins {
		n, err := s.end(ctx, l.Name, oids[i])
		ended += n
		if err != nil {
			return ended, err
		}
	}
	for i, l := range logins {
		if err := s.proveRefused(ctx, res, l); err != nil {
			return ended, err
		}
		if oids[i] == 0 {
			continue
		}
		if err := s.handOver(ctx, l.Name, oids[i], res.Name); err != nil {
			return ended, err
		}
		if err := exec(ctx, s.Conn, "drop login "+l.Name, `DROP ROLE IF EXISTS `+quote(l.Name)); err != nil {
			return ended, err
		}
		// A login that was past its password check when the role was closed can have
		// become a session since. It shows by its oid, even without the role.
		n, err := s.end(ctx, l.Name, oids[i])
		ended += n
		if err != nil {
			return ended, err
		}
	}
	return ended, nil
}

// end ends the sessions of a role until there are none, and counts them without
// our own checks.
func (s *session) end(ctx context.Context, name string, oid uint32) (ended int, err error) {
	if oid == 0 {
		return 0, nil
	}
	step := "end the sessions of " + name
	var left []int32
	for range endRounds {
		// 2 s for each: a session ends in milliseconds, unless its process hangs.
		rows, err := s.Query(ctx, `SELECT pid, application_name = $2, pg_terminate_backend(pid, 2000)
			FROM pg_stat_activity WHERE usesysid = $1 AND `+clientBackend, oid, checkApplication)
		if err != nil {
			return ended, classify(ctx, step, err)
		}
		var pid int32
		var check, gone bool
		left = left[:0]
		_, err = pgx.ForEachRow(rows, []any{&pid, &check, &gone}, func() error {
			left = append(left, pid)
			if gone && !check {
				ended++
			}
			return nil
		})
		if err != nil {
			return ended, classify(ctx, step, err)
		}
		if len(left) == 0 {
			return ended, nil
		}
	}
	return ended, &provision.Error{Step: step, Class: provision.Blocked,
		Err: fmt.Errorf("processes %d of the server do not end, or go on coming", left)}
}

// proveRefused reads that the login is closed or gone, and then tries to log in
// where consumers do or, where that cannot be reached, where our admin does.
// Without the secret there is nothing to try.
func (s *session) proveRefused(ctx context.Context, res provision.Resource, login provision.Login) error {
	step := "prove that " + login.Name + " is refused"
	works := func(text string) error {
		return &provision.Error{Step: step, Class: provision.Blocked, Err: errors.New(text)}
	}
	var open bool
	err := s.QueryRow(ctx, `SELECT coalesce(bool_or(rolcanlogin), false) FROM pg_roles WHERE rolname = $1`, login.Name).Scan(&open)
	switch {
	case err != nil:
		return classify(ctx, step, err)
	case open:
		return works("somebody has opened the login again")
	case login.Secret == "":
		return nil
	}
	consumers, err := delivered(Kind{}.Fields(s.p.at, res, login))
	if err != nil {
		return &provision.Error{Step: step, Class: provision.Internal, Err: err}
	}
	places := []target{consumers}
	if direct := s.p.admin.in(res.Name); !direct.local() { // a socket may refuse for who we are in the system
		direct.user, direct.password, direct.application = login.Name, login.Secret, checkApplication
		places = append(places, direct)
	}
	var failed error
	for _, place := range places {
		conn, err := place.connect(ctx)
		if err == nil {
			hangUp(conn)
			return works("it can still log in at " + place.host + "; a pooler there may keep old passwords")
		}
		if strings.HasPrefix(code(err), "28") { // not permitted, no such login, or wrong password
			return nil
		}
		if failed == nil {
			failed = err // where consumers go says most
		}
	}
	return classify(ctx, step, failed)
}

// handOver gives what a login owns itself to the resource's role, and takes
// back what it was granted, in every database where there is any of it.
func (s *session) handOver(ctx context.Context, login string, oid uint32, owner string) error {
	step := "hand over what " + login + " owns"
	rows, err := s.Query(ctx, `SELECT DISTINCT coalesce(datname::text, current_database()) FROM pg_shdepend
		LEFT JOIN pg_database d ON d.oid = dbid
		WHERE refclassid = 'pg_authid'::regclass AND refobjid = $1`, oid)
	if err != nil {
		return classify(ctx, step, err)
	}
	databases, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return classify(ctx, step, err)
	}
	for _, name := range databases {
		err := s.in(ctx, name, func(conn *pgx.Conn) error {
			// In one transaction: DROP OWNED drops what REASSIGN OWNED has left.
			return exec(ctx, conn, step+" in database "+name,
				`REASSIGN OWNED BY `+quote(login)+` TO `+quote(owner), `DROP OWNED BY `+quote(login))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *session) purge(ctx context.Context, res provision.Resource) error {
	oid, d, err := s.resource(ctx, res)
	if err != nil {
		return err
	}
	var left []string
	err = s.QueryRow(ctx, `SELECT coalesce(array_agg(rolname::text), '{}') FROM pg_roles
		WHERE shobj_description(oid, 'pg_authid') = $1`, s.p.loginMark(res)).Scan(&left)
	if err != nil {
		return classify(ctx, "look for logins of "+res.Name, err)
	}
	if len(left) > 0 {
		return &provision.Error{Step: "purge " + res.Name, Class: provision.Blocked,
			Err: fmt.Errorf("logins are left, withdraw them first: %s", strings.Join(left, ", "))}
	}
	if d.exists {
		if err := exec(ctx, s.Conn, "drop database "+res.Name, `DROP DATABASE IF EXISTS `+quote(res.Name)+` WITH (FORCE)`); err != nil {
			return err
		}
	}
	if oid == 0 {
		return nil
	}
	return exec(ctx, s.Conn, "drop role "+res.Name, `DROP ROLE IF EXISTS `+quote(res.Name))
}
