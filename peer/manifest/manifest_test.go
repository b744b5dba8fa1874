package manifest

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"meshd/raftfsm"
)

var update = flag.Bool("update", false, "write testdata/*.want from what Parse says")

// TestFaults parses each testdata/*.yaml and compares what is said of it with
// the .want file beside it: the faults, or the documents as JSON.
func TestFaults(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 30 {
		t.Fatalf("%d files in testdata, err %v", len(files), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			m, err := Parse(Source{filepath.Base(file), text})
			var got string
			if err != nil {
				got = err.Error() + "\n"
			} else {
				b, err := json.MarshalIndent(m.Documents, "", "  ")
				if err != nil {
					t.Fatal(err)
				}
				got = string(b) + "\n"
			}
			want := strings.TrimSuffix(file, ".yaml") + ".want"
			if *update {
				if err := os.WriteFile(want, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			expected, err := os.ReadFile(want)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(expected), got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

const story = `seat: mesh-store
scope: mesh
delivers: postgres-database
verbs: [databases, query]
---
module: postgres
claims: [mesh-store]
provides:
  postgres-database: {admin: file:/etc/meshd/pg-admin.url, address: "{{ .node.address }}:5432"}
---
assign: postgres
node: alpha
as: pg-main
---
assign: postgres
node: beta
as: pg-apps
---
module: shop
run: {exec: [/usr/local/bin/shop], user: shop}        # or {external: true}
requires:
  db: {kind: postgres-database}
env: {DATABASE_URL: "{{ .db.uri }}"}
health: {http: "http://127.0.0.1:8080/healthz"}
---
assign: shop
nodes: [beta]
bind: {db: pg-main}
`

func TestStory(t *testing.T) {
	m, err := Parse(Source{"mesh.yaml", []byte(story)})
	if err != nil {
		t.Fatal(err)
	}
	want := raftfsm.Documents{
		Seats: []raftfsm.Seat{{Name: "mesh-store", Scope: "mesh", Delivers: "postgres-database", Verbs: []string{"databases", "query"}, Failover: "manual"}},
		Modules: []raftfsm.Module{
			{Name: "postgres", Claims: []string{"mesh-store"}, Provides: map[string]raftfsm.Provide{"postgres-database": {
				Address: "{{ .node.address }}:5432", Options: map[string]string{"admin": "file:/etc/meshd/pg-admin.url"}}}},
			{Name: "shop", Run: raftfsm.Run{Exec: []string{"/usr/local/bin/shop"}, User: "shop"},
				Requires: map[string]raftfsm.Requirement{"db": {Kind: "postgres-database"}},
				Env:      map[string]string{"DATABASE_URL": "{{ .db.uri }}"}, Health: &raftfsm.Health{HTTP: "http://127.0.0.1:8080/healthz"}},
		},
		Assigns: []raftfsm.Assign{
			{Module: "postgres", Nodes: []string{"alpha"}, As: "pg-main"}, {Module: "postgres", Nodes: []string{"beta"}, As: "pg-apps"},
			{Module: "shop", Nodes: []string{"beta"}, Bind: map[string]string{"db": "pg-main"}},
		},
	}
	if diff := cmp.Diff(want, m.Documents); diff != "" {
		t.Fatalf("(-want +got)\n%s", diff)
	}
	// Through the log and back it is the same: what a push says and what the
	// mesh then holds compare equal.
	b, err := json.Marshal(m.Documents)
	if err != nil {
		t.Fatal(err)
	}
	var back raftfsm.Documents
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m.Documents, back); diff != "" {
		t.Fatalf("changed by the log (-pushed +read)\n%s", diff)
	}
}

// The fields of every key, so that one that is read into the wrong field shows.
func TestEveryKey(t *testing.T) {
	const text = `module: app
run: {exec: [app, -v, 3], user: app, dir: /srv/app}
claims: [front]
provides:
  kv-bucket: {}
  redis:
  s3-bucket: {admin: file:/a, address: "s3.example:443", tls: require, ca: file:/ca, region: eu-1, path-style: true}
requires:
  db: {kind: postgres-database, provider: pg@alpha, proof: health}
  my-cache: {kind: redis, node: beta, proof: delivered}
calls: [store.query, alpha/front.render, alpha/app.size]
tools:
  size: {exec: [/bin/size]}
  ping: {http: "http://[::1]:80/ping"}
serves:
  front: {render: {bus: true}, list: {builtin: redis}}
env:
  PORT: 8080
  DEBUG: true
  VERSION: 1.10
  OCTAL: 010
  URL: "{{.my-cache.uri}} on {{ .node.name }}, literally {{ \"{{\" }} .x }}"
  EMPTY: ""
  BLOCK: |
    a
    b
health: {tcp: "127.0.0.1:8080", every: 500ms, timeout: 1s, grace: 2m, fails: 4}
limits: {memory: 256MiB, cpu: 500m, pids: 100}
on-rotate: restart
ready-within: 90s
stop-timeout: 20s
---
assign: app
nodes: all
default: [redis, s3-bucket]
exclusive: true
address: "{{ .node.address }}:6379"
env: {PORT: "{{ .db.port }}"}
health: {exec: [/bin/true]}
limits: {cpu: 1.25, memory: 1 GB}
---
assign: app
node: gamma
as: one
bind: {db: pg-main, my-cache: cache@beta}
default: redis
---
seat: front
scope: node
verbs: [render]
---
seat: lead
holder: one
failover: manual
`
	m, err := Parse(Source{"a.yaml", []byte(text)})
	if err != nil {
		t.Fatal(err)
	}
	want := raftfsm.Documents{
		Modules: []raftfsm.Module{{
			Name: "app", Run: raftfsm.Run{Exec: []string{"app", "-v", "3"}, User: "app", Dir: "/srv/app"}, Claims: []string{"front"},
			Provides: map[string]raftfsm.Provide{"kv-bucket": {}, "redis": {}, "s3-bucket": {Address: "s3.example:443", TLS: "require", CA: "file:/ca",
				Options: map[string]string{"admin": "file:/a", "region": "eu-1", "path-style": "true"}}},
			Requires: map[string]raftfsm.Requirement{"db": {Kind: "postgres-database", Provider: "pg@alpha", Proof: "health"},
				"my-cache": {Kind: "redis", Node: "beta", Proof: "delivered"}},
			Calls:  []string{"store.query", "alpha/front.render", "alpha/app.size"},
			Tools:  map[string]raftfsm.Handler{"size": {Exec: []string{"/bin/size"}}, "ping": {HTTP: "http://[::1]:80/ping"}},
			Serves: map[string]map[string]raftfsm.Handler{"front": {"render": {Bus: true}, "list": {Builtin: "redis"}}},
			Env: map[string]string{"PORT": "8080", "DEBUG": "true", "VERSION": "1.10", "OCTAL": "010", "EMPTY": "", "BLOCK": "a\nb\n",
				"URL": `{{.my-cache.uri}} on {{ .node.name }}, literally {{ "{{" }} .x }}`},
			Health: &raftfsm.Health{TCP: "127.0.0.1:8080", Every: 500 * time.Millisecond, Timeout: time.Second, Grace: 2 * time.Minute, Fails: 4},
			Limits: &raftfsm.Limits{Memory: 256 << 20, CPU: 500, PIDs: 100}, OnRotate: "restart", ReadyWithin: 90 * time.Second, StopGrace: 20 * time.Second,
		}},
		Assigns: []raftfsm.Assign{
			{Module: "app", All: true, Default: []string{"redis", "s3-bucket"}, Exclusive: true, Address: "{{ .node.address }}:6379",
				Env: map[string]string{"PORT": "{{ .db.port }}"}, Health: &raftfsm.Health{Exec: []string{"/bin/true"}}, Limits: &raftfsm.Limits{Memory: 1e9, CPU: 1250}},
			{Module: "app", Nodes: []string{"gamma"}, As: "one", Bind: map[string]string{"db": "pg-main", "my-cache": "cache@beta"}, Default: []string{"redis"}},
		},
		Seats: []raftfsm.Seat{{Name: "front", Scope: "node", Verbs: []string{"render"}}, {Name: "lead", Scope: "mesh", Want: "one", Failover: "manual"}},
	}
	if diff := cmp.Diff(want, m.Documents); diff != "" {
		t.Fatalf("(-want +got)\n%s", diff)
	}
}

func TestPosition(t *testing.T) {
	m, err := Parse(Source{"a.yaml", []byte(story)}, Source{"b.yaml", []byte("# b\nassign: shop\nnode: gamma\n")})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ path, want string }{
		{"seat/mesh-store", "a.yaml:1:7"},
		{"seat/mesh-store/scope", "a.yaml:2:8"},
		{"seat/mesh-store/verbs", "a.yaml:4:1"},
		{"seat/mesh-store/verbs/1", "a.yaml:4:20"},
		{"seat/mesh-store/holder", "a.yaml:1:7"}, // not written: the seat's name
		{"module/postgres/provides/postgres-database", "a.yaml:9:3"},
		{"module/postgres/provides/postgres-database/admin", "a.yaml:9:30"},
		{"module/shop/requires/db/provider", "a.yaml:22:3"}, // not written: the requirement
		{"module/shop/requires/db/kind", "a.yaml:22:14"},
		{"assign/0", "a.yaml:11:9"},
		{"assign/0/nodes/0", "a.yaml:12:7"}, // written as node
		{"assign/2/nodes/0", "a.yaml:27:9"},
		{"assign/2/bind/db", "a.yaml:28:12"},
		{"assign/2/bind/other/far", "a.yaml:28:1"},
		{"assign/3/node", "b.yaml:3:7"},
		{"assign/4", ""}, {"module/nosuch/run", ""}, {"module", ""}, {"", ""}, {"/", ""},
	} {
		got := ""
		if file, line, col, ok := m.Position(c.path); ok {
			got = fmt.Sprintf("%s:%d:%d", file, line, col)
		}
		if got != c.want {
			t.Errorf("Position(%q) = %q, want %q", c.path, got, c.want)
		}
	}
}

// Line ends, a byte order mark and letters of several bytes do not shift a
// position.
func TestPositionsOfCharacters(t *testing.T) {
	text := "module: shop\nrun: {exec: [\"/bin/ü\", 'é', ö]}\nrequires: {db: {kind: redis}}\nenv:\n  # größer\n  A: \"äöü {{ .dp.uri }}\"\n  B: ß{{ .dq.uri }}\n  C: |\n    ä\n    ä {{ .dr.uri }}\nbad: 1\n"
	want := []string{"6:11:", "7:7:", "10:7:", "11:1:"}
	for _, c := range []struct{ name, text string }{
		{"plain", text}, {"crlf", strings.ReplaceAll(text, "\n", "\r\n")}, {"mark", "\ufeff" + text},
	} {
		_, err := Parse(Source{"f", []byte(c.text)})
		lines := strings.Split(fmt.Sprint(err), "\n")
		if len(lines) != len(want) {
			t.Fatalf("%s: %v", c.name, err)
		}
		for i := range want {
			if !strings.HasPrefix(lines[i], "f:"+want[i]) {
				t.Errorf("%s: %q, want it at %s", c.name, lines[i], want[i])
			}
		}
	}
}

func TestBounds(t *testing.T) {
	start := time.Now()
	var many strings.Builder
	for i := range raftfsm.MaxDocuments + 5 {
		fmt.Fprintf(&many, "assign: a\nnode: n%d\n---\n", i)
	}
	comment := "#" + strings.Repeat("x", 79) + "\n"
	for _, c := range []struct {
		name string
		src  []Source
		want string
	}{
		{"10 MB", []Source{{"big", make([]byte, 10<<20)}}, "big:1:1: all files of a push together have at most 4 MiB (push fewer files at a time)"},
		{"2 MB", []Source{{"big", make([]byte, 2<<20)}}, "big:1:1: the file has 2097152 bytes; a manifest has at most 1048576 (1 MiB) (split it into several files)"},
		{"many files", []Source{{"a", []byte("module: a\n")}, {"b", make([]byte, 4<<20)}}, "b:1:1: all files of a push"},
		{"document", []Source{{"f", []byte("module: a\n---\n" + strings.Repeat(comment, 820))}}, "f:2:1: the document has 66425 bytes; one has at most 65536 (64 KiB) (split it)"},
		{"documents", []Source{{"f", []byte(many.String())}}, "f:3001:1: a push has at most 1000 documents (push fewer at a time)"},
		{"flow depth", []Source{{"f", []byte("module: " + strings.Repeat("[", 60000))}}, "f:1:28: maps and lists nest deeper than 20"},
		{"list depth", []Source{{"f", []byte(strings.Repeat("- ", 30000))}}, "f:1:41: maps and lists nest deeper than 20"},
		{"block depth", []Source{{"f", []byte(staircase(300))}}, "f:21:22: maps and lists nest deeper than 20"},
		{"empty", []Source{{"f", nil}}, "f:1:1: the file has no document (begin one with seat:, module: or assign:)"},
		{"comments", []Source{{"f", []byte("# a\n---\n# b\n---\n")}}, "f:1:1: the file has no document"},
		{"not UTF-8", []Source{{"f", []byte("module: a\nü\xff")}}, "f:2:2: the file is not UTF-8"},
		{"control", []Source{{"f", []byte("module: a\x00b")}}, "f:1:10: the file has a control character (U+0000)"},
		{"carriage return", []Source{{"f", []byte("module: a\rrun: b")}}, "f:1:10: a carriage return ends no line"},
		{"zero byte", []Source{{"f", []byte("module: a\nrun: {exec: [\"a\\0b\"]}")}}, "f:2:14: a text with a zero byte"},
		{"none", nil, "parse manifest: no file was given"},
	} {
		_, err := Parse(c.src...)
		if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: %v\nwant %s", c.name, err, c.want)
		}
		if faults := Faults(nil); c.src != nil && !(errors.As(err, &faults) && len(faults) > 0) {
			t.Errorf("%s: %T is not Faults", c.name, err)
		}
	}
	if d := time.Since(start); d > 30*time.Second {
		t.Errorf("refusing took %v", d)
	}
}

func staircase(steps int) string {
	var b strings.Builder
	for i := range steps {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

func TestManyFaults(t *testing.T) {
	_, err := Parse(Source{"f", []byte("module: a\n" + strings.Repeat("zzz", 1) + ": 1\n" + unknown(40))})
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != maxShown+1 || lines[maxShown] != "... and 21 more" {
		t.Fatalf("%d lines, the last %q", len(lines), lines[len(lines)-1])
	}
	if len(err.(Faults)) != 41 {
		t.Fatalf("%d faults", len(err.(Faults)))
	}
}

func unknown(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "zzz%d: 1\n", i)
	}
	return b.String()
}

// Faults of several files come in the order of the files, and a document that is
// in two of them names both.
func TestFiles(t *testing.T) {
	_, err := Parse(Source{"z", []byte("module: a\nfoo: 1\n")}, Source{"a", []byte("seat: s\n---\nmodule: a\n---\nassign: a\nnodes: [x, y]\n")}, Source{"b", []byte("assign: a\nnode: y\n")})
	want := `z:2:1: unknown key "foo" (there are calls, claims, env, health, limits, module, on-rotate, provides, ready-within, requires, run, serves, stop-timeout and tools)
a:3:9: module a is described twice, first in z:1 (keep one of the two)
b:1:9: assignment a@y is described twice, first in a:5 (keep one of the two)`
	if diff := cmp.Diff(want, fmt.Sprint(err)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// No value that may be a secret is in what is said of a manifest.
func TestFaultsKeepSecrets(t *testing.T) {
	_, err := Parse(Source{"f", []byte(`module: a
run: {exec: "/bin/a --password hunter2", user: [hunter2]}
provides:
  redis: {admin: "redis://:hunter2@localhost", ca: hunter2, address: "hunter2", option: [hunter2]}
tools:
  one: {http: "http://u:hunter2@127.0.0.1/"}
  two: {http: "http://10.0.0.1/?hunter2"}
  three: {exec: [./bin/hunter2]}
env:
  A: [hunter2]
  B: {hunter2: 1}
  C: "hunter2 {{ .nosuch.field }}"
  D: "hunter2 {{ bad }} hunter2"
health: {http: "ftp://hunter2"}
`)})
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("%v", err)
	}
	if n := len(err.(Faults)); n < 12 {
		t.Errorf("only %d faults: %v", n, err)
	}
}

func TestRender(t *testing.T) {
	data := map[string]map[string]string{"node": {"name": "alpha", "address": "10.0.0.1"}, "my-db": {"uri": "postgres://secret", "host": "h"}, "db": {"long": strings.Repeat("x", 100<<10)}}
	for _, c := range []struct{ template, want, fault string }{
		{"", "", ""},
		{"plain }} text", "plain }} text", ""},
		{"{{ .node.address }}:5432", "10.0.0.1:5432", ""},
		{"{{.my-db.uri}}?x={{   .node.name   }}", "postgres://secret?x=alpha", ""},
		{`{{ "{{" }} .x }}`, "{{ .x }}", ""},
		{"{{ .my-db.urn }}", "", "render {{ .my-db.urn }}: my-db has no field urn; it has host and uri"},
		{"{{ .cache.uri }}", "", "render {{ .cache.uri }}: there is no cache; there are db, my-db and node"},
		{"a {{ .my-db }} b", "", "render {{ .my-db }}: it is no reference; " + form},
		{"{{ .my-db.uri | upper }}", "", "render {{ .my-db.uri | upper }}: it is no reference; " + form},
		{"{{ .my-db.uri", "", "render {{ .my-db.uri: it is no reference; " + form},
		{"{{ .db.long }}{{ .db.long }}", "", "render a template: the result is longer than 128 KiB, the most that a variable may have"},
	} {
		got, err := Render(c.template, data)
		if said := ""; got != c.want {
			t.Errorf("Render(%q) = %q, want %q", c.template, got, c.want)
		} else if err != nil {
			if said = err.Error(); said != c.fault {
				t.Errorf("Render(%q): %s, want %q", c.template, said, c.fault)
			}
		} else if c.fault != "" {
			t.Errorf("Render(%q) is no error, want %q", c.template, c.fault)
		}
	}
}

// Every example of the reference is a manifest.
func TestReference(t *testing.T) {
	page, err := os.ReadFile("../../docs/manifest.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllSubmatch(page, -1)
	if len(blocks) < 10 {
		t.Fatalf("%d examples", len(blocks))
	}
	for i, b := range blocks {
		if _, err := Parse(Source{fmt.Sprintf("example %d", i+1), b[1]}); err != nil {
			t.Errorf("%v\n%s", err, b[1])
		}
	}
	// And every key is in it.
	for _, key := range strings.Fields("seat scope delivers verbs holder failover module run exec user dir external claims provides admin address tls ca requires kind provider node proof calls tools serves http bus builtin env health tcp every timeout grace fails limits memory cpu pids on-rotate ready-within stop-timeout assign nodes as bind default exclusive") {
		if !strings.Contains(string(page), "`"+key+"`") {
			t.Errorf("docs/manifest.md does not explain `%s`", key)
		}
	}
}
