package postgres

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"meshd/provision"
)

// Database is one database of the server.
type Database struct {
	Name     string `json:"name"`
	Bytes    int64  `json:"bytes"`    // -1 where our admin may not look
	Sessions int    `json:"sessions"` // of everybody, at this moment
	Ours     bool   `json:"ours"`     // carries the mark of this mesh
}

// Answer knows the verbs "databases", whose reply is a JSON array of Database, and
// "query", which takes a Question and replies with Rows.
func (p *Provider) Answer(ctx context.Context, verb string, arg []byte) ([]byte, error) {
	var reply any
	var err error
	switch verb {
	case "databases":
		reply, err = p.Databases(ctx)
	case "query":
		var q Question
		if q, err = question(arg); err == nil {
			reply, err = p.Query(ctx, q)
		}
	default:
		err = &provision.Error{Step: "answer", Class: provision.BadConfig,
			Err: fmt.Errorf("no verb %q; postgres-database answers: databases, query", verb)}
	}
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(reply)
	return text, classify(ctx, "write the answer", err)
}

// Databases lists the databases that take connections, by name. It may be called
// beside every other method.
func (p *Provider) Databases(ctx context.Context) ([]Database, error) {
	const step = "list databases"
	s := &session{p: p}
	list := []Database{}
	err := s.in(ctx, p.admin.database, func(conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `SELECT d.datname::text,
				CASE WHEN has_database_privilege(d.oid, 'CONNECT') OR pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')
					THEN pg_database_size(d.oid) ELSE -1 END,
				(SELECT count(*) FROM pg_stat_activity a WHERE a.datid = d.oid AND a.pid <> pg_backend_pid() AND `+clientBackend+`)::int,
				starts_with(coalesce(shobj_description(d.oid, 'pg_database'), ''), $1)
			FROM pg_database d WHERE d.datallowconn ORDER BY 1`, provision.Mark(p.mesh, ""))
		if err != nil {
			return classify(ctx, step, err)
		}
		found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Database])
		list = append(list, found...)
		return classify(ctx, step, err)
	})
	return list, err
}
