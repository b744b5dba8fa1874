package postgres

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"meshd/provision"
)

const (
	// defaultRows and maxRows bound the rows of an answer.
	defaultRows = 100
	maxRows     = 1000
	// maxRowBytes bounds the values of an answer together: as JSON, with its commas
	// and quotes, it must fit into what the bus carries, 1 MiB.
	maxRowBytes = 512 << 10
	// queryTimeout bounds the statement at the server.
	queryTimeout = 10 * time.Second
	// readerFor is how long the reader's password is good: it is made for one login.
	readerFor = time.Minute

	queryApplication = "meshd query"
)

// Question is the request of the verb "query".
type Question struct {
	Database string `json:"database"` // one of this mesh
	Query    string `json:"query"`    // one statement, with $1, $2, ... for Args
	Args     []any  `json:"args"`     // texts, numbers, true, false and null
	Limit    int    `json:"limit"`    // rows: 1 to 1000, 0 is 100
}

// Rows is the answer. A value is null, true, false, a number or JSON where the column
// is of such a type, else PostgreSQL's own text of it.
type Rows struct {
	Columns []string            `json:"columns"`
	Rows    [][]json.RawMessage `json:"rows"`
	More    bool                `json:"more"` // than the limit
}

// Query answers q by a login of its own, the reader, which is a member of the role that
// owns the database and of nothing else. What it runs is one statement in a transaction
// that may only read, and that is rolled back whatever it was: so nothing lasts of it, not
// even of what a transaction that may only read does not refuse in older versions, such
// as changes of large objects.
func (p *Provider) Query(ctx context.Context, q Question) (Rows, error) {
	switch {
	case q.Database == "":
		return Rows{}, badQuestion("no database: the verb databases lists them")
	case strings.TrimSpace(q.Query) == "":
		return Rows{}, badQuestion("no query")
	case q.Limit < 0 || q.Limit > maxRows:
		return Rows{}, badQuestion(fmt.Sprintf("limit %d is not from 1 to %d", q.Limit, maxRows))
	case q.Limit == 0:
		q.Limit = defaultRows
	}
	args, err := texts(q.Args)
	if err != nil {
		return Rows{}, badQuestion(err.Error())
	}
	ctx, cancel := context.WithTimeout(ctx, queryTimeout+connectTimeout)
	defer cancel()
	conn, err := p.reader(ctx, q.Database)
	if err != nil {
		return Rows{}, err
	}
	defer hangUp(conn)
	begin := fmt.Sprintf(`SET statement_timeout = %d; SET idle_in_transaction_session_timeout = %[1]d; BEGIN READ ONLY`, queryTimeout.Milliseconds())
	if _, err := conn.Exec(ctx, begin); err != nil {
		return Rows{}, consumerError(ctx, "begin to read", err)
	}
	rows, err := read(ctx, conn, q, args)
	return rows, consumerError(ctx, "query", err) // the transaction ends with the connection
}

func badQuestion(text string) error {
	return &provision.Error{Step: "read the question", Class: provision.BadConfig,
		Err: errors.New(text + `; write {"database": "...", "query": "SELECT ...", "args": [...], "limit": 100}`)}
}

// reader makes the reader what it has to be, with a password that is good for a minute,
// and logs it in. Nobody else logs it in meanwhile: that takes the lock of a change.
func (p *Provider) reader(ctx context.Context, database string) (conn *pgx.Conn, err error) {
	login := provision.Login{Name: "meshd_reader_" + p.mesh, Secret: rand.Text() + rand.Text()}
	secret, err := verifier(login.Secret)
	if err != nil {
		return nil, classify(ctx, "hash the reader's password", err)
	}
	err = p.change(ctx, func(ctx context.Context, s *session) error {
		var owner string
		err := s.QueryRow(ctx, `SELECT d.datname FROM pg_database d JOIN pg_roles r ON r.rolname = d.datname
			WHERE d.datname = $1 AND starts_with(shobj_description(d.oid, 'pg_database'), $2)
			AND shobj_description(r.oid, 'pg_authid') = shobj_description(d.oid, 'pg_database')`, database, provision.Mark(p.mesh, "")).Scan(&owner)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return badQuestion(fmt.Sprintf("database %q is none of this mesh: the verb databases lists them", database))
		case err != nil:
			return classify(ctx, "look for database "+database, err)
		}
		oid, err := s.ours(ctx, login.Name, p.readerMark())
		if err != nil {
			return err
		}
		name := quote(login.Name)
		var until time.Time
		if err := s.QueryRow(ctx, `SELECT now() + $1::interval`, readerFor.String()).Scan(&until); err != nil {
			return classify(ctx, "ask for the server's time", err)
		}
		attributes := fmt.Sprintf(` LOGIN INHERIT NOCREATEROLE NOCREATEDB CONNECTION LIMIT 4 PASSWORD %s VALID UNTIL %s`,
			literal(secret), literal(until.UTC().Format(time.RFC3339)))
		statements := []string{`ALTER ROLE ` + name + attributes}
		if oid == 0 {
			statements = []string{`CREATE ROLE ` + name + attributes, `COMMENT ON ROLE ` + name + ` IS ` + literal(p.readerMark())}
		}
		if err := exec(ctx, s.Conn, "make the reader", append(statements, s.grant(owner, name))...); err != nil {
			return err
		}
		t, err := delivered(Kind{}.Fields(p.at, provision.Resource{Name: database}, login))
		if err != nil {
			return &provision.Error{Step: "log in as the reader", Class: provision.Internal, Err: err}
		}
		t.application = queryApplication
		conn, err = t.connect(ctx)
		return consumerError(ctx, "log in as the reader", err)
	})
	return conn, err
}

// readerMark does not begin as the marks of resources do: the reader is none, and no stray.
func (p *Provider) readerMark() string { return "meshd reader of " + p.mesh }

// read runs the one statement. The extended protocol takes no second.
func read(ctx context.Context, conn *pgx.Conn, q Question, args [][]byte) (Rows, error) {
	out := Rows{Columns: []string{}, Rows: [][]json.RawMessage{}}
	result := conn.PgConn().ExecParams(ctx, q.Query, args, nil, nil, nil)
	fields := result.FieldDescriptions()
	for _, f := range fields {
		out.Columns = append(out.Columns, f.Name)
	}
	size := 0
	for result.NextRow() {
		if len(out.Rows) == q.Limit {
			out.More = true
			break
		}
		row := make([]json.RawMessage, len(fields))
		for i, v := range result.Values() {
			row[i] = value(fields[i].DataTypeOID, v)
			size += len(row[i])
		}
		if size > maxRowBytes {
			return Rows{}, fmt.Errorf("the answer has more than %d bytes: ask for less, or for fewer rows", maxRowBytes)
		}
		out.Rows = append(out.Rows, row)
	}
	if out.More {
		return out, nil // what is left is not read: the connection ends with the question
	}
	_, err := result.Close()
	return out, err
}

// value is PostgreSQL's text of a value as JSON.
func value(oid uint32, text []byte) json.RawMessage {
	switch {
	case text == nil:
		return json.RawMessage("null")
	case oid == pgtype.BoolOID:
		return json.RawMessage(map[bool]string{true: "true", false: "false"}[string(text) == "t"])
	case oid == pgtype.JSONOID, oid == pgtype.JSONBOID,
		oid == pgtype.Int2OID, oid == pgtype.Int4OID, oid == pgtype.Int8OID, oid == pgtype.Float4OID, oid == pgtype.Float8OID, oid == pgtype.NumericOID:
		if json.Valid(text) { // NaN is not
			return json.RawMessage(bytes.Clone(text))
		}
	}
	out, _ := json.Marshal(string(text)) // a string always can
	return out
}

// texts are the arguments as PostgreSQL reads them.
func texts(args []any) ([][]byte, error) {
	var out [][]byte
	for i, a := range args {
		switch a := a.(type) {
		case nil:
			out = append(out, nil)
		case string, bool, json.Number:
			out = append(out, fmt.Append(nil, a))
		default:
			return nil, fmt.Errorf("argument %d is no text, number, true, false or null", i+1)
		}
	}
	return out, nil
}

// question reads the request; what it does not know, it refuses.
func question(arg []byte) (q Question, err error) {
	d := json.NewDecoder(bytes.NewReader(arg))
	d.DisallowUnknownFields()
	d.UseNumber()
	if err := d.Decode(&q); err != nil {
		return Question{}, badQuestion(err.Error())
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Question{}, badQuestion("something follows the question")
	}
	return q, nil
}
