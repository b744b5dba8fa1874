package postgres_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"meshd/provision"
	"meshd/provision/postgres"
)

func TestQuery(t *testing.T) {
	pg := need(t)
	p := open(t, pg, plain(pg), nil)
	res, login := minted(t, p)
	other, _ := minted(t, p)
	conn, err := pgx.Connect(t.Context(), pg.URL(login.Name, login.Secret, res.Name))
	ok(t, "connect", err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), `CREATE TABLE goods (id bigint PRIMARY KEY, name text, price numeric, sold bool, more jsonb, at date);
		INSERT INTO goods SELECT i, 'good ' || i, i + 0.5, i % 2 = 0, jsonb_build_object('i', i), '2026-01-01'::date + i FROM generate_series(1, 200) i;
		CREATE SEQUENCE numbers`)
	ok(t, "fill", err)

	ask := func(q string) (string, error) {
		text, err := p.Answer(t.Context(), "query", []byte(strings.ReplaceAll(q, "DB", res.Name)))
		return string(text), err
	}
	for q, want := range map[string]string{
		`{"database": "DB", "query": "SELECT * FROM goods WHERE id = $1 AND name = $2", "args": [7, "good 7"]}`: `{"columns":["id","name","price","sold","more","at"],"rows":[[7,"good 7",7.5,false,{"i":7},"2026-01-08"]],"more":false}`,
		`{"database": "DB", "query": "SELECT NULL, 'NaN'::float, $1::text", "args": [null]}`:                    `{"columns":["?column?","float8","text"],"rows":[[null,"NaN",null]],"more":false}`,
		`{"database": "DB", "query": "SELECT id FROM goods ORDER BY id", "limit": 2}`:                           `{"columns":["id"],"rows":[[1],[2]],"more":true}`,
		`{"database": "DB", "query": "SELECT 1 WHERE false"}`:                                                   `{"columns":["?column?"],"rows":[],"more":false}`,
		`{"database": "DB", "query": "SHOW transaction_read_only"}`:                                             `{"columns":["transaction_read_only"],"rows":[["on"]],"more":false}`,
		`{"database": "DB", "query": "SELECT lo_create(4711) = 4711"}`:                                          "", // refused from 16 on; see below
	} {
		got, err := ask(q)
		if want == "" {
			continue
		}
		if err != nil || got != want {
			t.Errorf("%s\ngot  %s, %v\nwant %s", q, got, err, want)
		}
	}
	text, err := ask(`{"database": "DB", "query": "SELECT id FROM goods"}`)
	var rows postgres.Rows
	if err == nil {
		err = json.Unmarshal([]byte(text), &rows)
	}
	if err != nil || len(rows.Rows) != 100 || !rows.More {
		t.Errorf("without a limit: %d rows, more %t, %v", len(rows.Rows), rows.More, err)
	}

	// Nothing is changed, by whatever way, and nothing else is read.
	for q, words := range map[string]string{
		`{"database": "DB", "query": "INSERT INTO goods VALUES (1000)"}`:                            "read-only transaction",
		`{"database": "DB", "query": "SELECT nextval('numbers')"}`:                                  "read-only transaction",
		`{"database": "DB", "query": "DROP TABLE goods"}`:                                           "read-only transaction",
		`{"database": "DB", "query": "SELECT 1; DROP TABLE goods"}`:                                 "multiple commands",
		`{"database": "DB", "query": "SELECT set_config('transaction_read_only', 'off', true), 1"}`: "read-write mode",
		`{"database": "DB", "query": "DO $$ BEGIN COMMIT; DROP TABLE goods; END $$"}`:               "invalid transaction termination",
		`{"database": "DB", "query": "COPY goods TO PROGRAM 'cat'"}`:                                "pg_execute_server_program",
		`{"database": "DB", "query": "SELECT pg_read_file('/etc/passwd')"}`:                         "permission denied",
		`{"database": "DB", "query": "SELECT rolpassword FROM pg_authid"}`:                          "permission denied",
		`{"database": "DB", "query": "SET ROLE postgres"}`:                                          "permission denied",
		`{"database": "DB", "query": "SELECT repeat('x', 600000)"}`:                                 "more than 524288 bytes",
		`{"database": "DB", "query": "SELEC 1"}`:                                                    "syntax error",
		`{"database": "postgres", "query": "SELECT 1"}`:                                             "none of this mesh: the verb databases lists them",
		`{"database": "DB"}`:    "no query",
		`{"query": "SELECT 1"}`: "no database",
		`{"database": "DB", "query": "SELECT 1", "limit": 1001}`: "limit 1001 is not from 1 to 1000",
		`{"database": "DB", "query": "SELECT 1", "args": [[1]]}`: "argument 1 is no text",
		`{"database": "DB", "query": "SELECT 1", "rows": 1}`:     `unknown field "rows"`,
		`{"database": "DB", "query": "SELECT 1"} {}`:             "something follows",
		``: "write {",
	} {
		if _, err := ask(q); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s\ngot %v, want an error that says %q", q, err, words)
		}
	}
	var count, objects int
	ok(t, "count", conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM goods), (SELECT count(*) FROM pg_largeobject_metadata WHERE oid = 4711)`).Scan(&count, &objects))
	if count != 200 || objects != 0 {
		t.Errorf("%d goods and %d large objects", count, objects)
	}

	// The reader is no resource and no login, and its password is of no use soon.
	found, err := p.Observe(t.Context())
	ok(t, "Observe", err)
	for _, f := range found {
		if strings.Contains(f.Name, "reader") {
			t.Errorf("the reader is observed as %+v", f)
		}
	}
	mustExec(t, "postgres", `DO $$ BEGIN ASSERT (SELECT count(*) FROM pg_roles
		WHERE rolname LIKE 'meshd_reader_%' AND rolvaliduntil < now() + interval '61s' AND NOT rolsuper) = 1; END $$`)
	// What it was not asked of, it cannot enter.
	if _, err := p.Query(t.Context(), postgres.Question{Database: other.Name, Query: "SELECT 1"}); err != nil {
		t.Errorf("another database of the mesh: %v", err)
	}
	want(t, "a foreign database", errOf(p.Query(t.Context(), postgres.Question{Database: "template1", Query: "SELECT 1"})), provision.BadConfig)
}

func errOf[T any](_ T, err error) error { return err }
