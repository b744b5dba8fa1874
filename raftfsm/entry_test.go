package raftfsm

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"
)

// everyCommand has each command once, with every field set.
func everyCommand() []Command {
	docs := Documents{Modules: []Module{fullModule()}, Assigns: []Assign{{
		Module: "full", Nodes: []string{"alpha"}, As: "one", Bind: map[string]string{"db": "pg-main"}, Default: []string{pgKind}, Exclusive: true,
		Address: "10.0.0.1:5432", Env: map[string]string{"A": "b"}, Health: &Health{TCP: "127.0.0.1:1"}, Limits: &Limits{PIDs: 5},
	}, {Module: "full", All: true}}, Seats: []Seat{{
		Name: "store", Scope: ScopeMesh, Delivers: pgKind, Verbs: []string{"query"}, Want: "one", Failover: FailoverAuto,
	}}}
	return []Command{
		Init{Mesh{"mesh-1", 1, 2, 1, "pem", "age1", "", 0, nil}, member("alpha")},
		AddToken{"token-beta", epochStart},
		Admit{"token-beta", member("beta"), 0},
		UpdateNode{"id-alpha", "a:1", "a:2", 1},
		RemoveNode{"id-beta", []string{"id-alpha"}, "sealed"},
		PushPart{"p", 0, docs},
		Push{"p", 1, docs, true, 7},
		Remove{WhatModule, "pg"},
		NodeReport{
			Staged:    []Staged{{"shop@beta/db", "r", "id-beta", 1, "sealed", Address{"h", 1, "require", "pem"}}},
			Marks:     []Mark{{"shop@beta/db", "r", 1, FactMinted}},
			Withdrawn: []Withdrawn{{"shop@beta/db#7", 3}},
			Troubles:  []TroubleReport{{"shop@beta/db", SideConsumer, "w", "login", "refused"}},
			Processes: []ProcessReport{{"shop@beta", "running", "exit"}},
			Providers: []ProviderReport{{"pg-main/" + pgKind, true, Address{Host: "h", Port: 1, TLS: "off"}, "connect", "down"}},
		},
		Hold{"store", "pg-main", 9, 7},
		OpenSession{"id-alpha", "run-1", time.Second},
		CloseSession{"id-alpha", 9, map[string]string{"store": "pg-apps"}},
		MoveSeat{"store", "alpha", "pg-main"},
		Compared{[]Difference{{"store", "beta", "answers, and nobody is named", epochStart}}},
	}
}

func fullModule() Module {
	return Module{
		Name: "full", Run: Run{[]string{"/bin/full", "-v"}, "full", "/srv"}, Claims: []string{"store"},
		Provides: map[string]Provide{pgKind: {"a:1", "require", "file:/ca", map[string]string{"admin": "file:/x"}}},
		Requires: map[string]Requirement{"db": {pgKind, "pg-main", "", ProofHealth}, "cache": {Kind: "redis", Node: "alpha"}},
		Calls:    []string{"store.query"}, Tools: map[string]Handler{"size": {Exec: []string{"/bin/size"}}, "stat": {Bus: true}},
		Serves: map[string]map[string]Handler{"store": {"query": {Builtin: pgKind}, "list": {HTTP: "http://127.0.0.1/"}}},
		Env:    map[string]string{"URL": "{{ .db.uri }}"}, Health: &Health{HTTP: "http://127.0.0.1/", Every: time.Second, Timeout: time.Second, Grace: time.Second, Fails: 3},
		Limits: &Limits{1 << 20, 500, 10}, OnRotate: "signal HUP", ReadyWithin: time.Minute, StopGrace: time.Second,
	}
}

func TestEveryCommandComesBackFromTheLogAsItWas(t *testing.T) {
	for _, c := range everyCommand() {
		e := Entry{Header{Format, Level, "root@alpha", "id-alpha", epochStart, "e1"}, c}
		b, err := Encode(e)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Decode(b)
		if err != nil || !reflect.DeepEqual(got, e) {
			t.Errorf("%T came back as %+v, %v", c, got, err)
		}
		if same, err := canonical(c); err != nil || !reflect.DeepEqual(same, c) {
			t.Errorf("%T is canonically %+v, %v", c, same, err)
		}
	}
}

func TestDecodeIsStrict(t *testing.T) {
	good := `{"Format":1,"Level":1,"Actor":"a","Node":"n","Time":"2026-03-01T12:00:00Z","ID":"e","Name":"rm","Body":{"What":"seat","Name":"s"}}`
	if _, err := Decode([]byte(good)); err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]string{
		"unknown command":    strings.Replace(good, `"rm"`, `"zap"`, 1),
		"no command":         strings.Replace(good, `"rm"`, `""`, 1),
		"unknown field":      strings.Replace(good, `"What"`, `"Sort"`, 1),
		"unknown header":     strings.Replace(good, `"Actor"`, `"Author"`, 1),
		"newer format":       strings.Replace(good, `"Format":1`, `"Format":2`, 1),
		"newer level":        strings.Replace(good, `"Level":1`, `"Level":2`, 1),
		"no level":           strings.Replace(good, `"Level":1,`, ``, 1),
		"something after it": good + "{}",
		"half of it":         good[:len(good)/2],
		"no body":            strings.Replace(good, `,"Body":{"What":"seat","Name":"s"}`, "", 1),
		"other type":         strings.Replace(good, `"seat"`, `5`, 1),
		"time not in UTC":    strings.Replace(good, `12:00:00Z`, `12:00:00+02:00`, 1),
		"too long":           strings.Replace(good, `"s"`, `"`+strings.Repeat("s", MaxEntry)+`"`, 1),
		"nothing":            "",
	} {
		if _, err := Decode([]byte(bad)); !errors.Is(err, ErrUndecodable) {
			t.Errorf("%s: Decode says %v", name, err)
		}
	}
}

func TestEncodeRefusesWhatTheLogCannotTake(t *testing.T) {
	if _, err := Encode(Entry{}); err == nil || err.Error() != "encode entry: it has no command" {
		t.Error(err)
	}
	_, err := Encode(Entry{Command: AddToken{Hash: strings.Repeat("x", MaxEntry)}})
	if err == nil || !strings.Contains(err.Error(), "an entry has at most 65536") {
		t.Error(err)
	}
	b, err := Encode(Entry{Header{Time: epochStart.In(time.FixedZone("east", 7200))}, Remove{}})
	if err != nil {
		t.Fatal(err)
	}
	if e, err := Decode(b); err != nil || !e.Time.Equal(epochStart) || e.Time.Location() != time.UTC {
		t.Errorf("an entry made elsewhere came back at %v, %v", e.Time, err)
	}
}

// A time that can be read and not written again would keep every snapshot from
// being made.
func TestDecodeRefusesWhatCannotBeEncodedAgain(t *testing.T) {
	good, err := Encode(Entry{Header: Header{Node: "n"}, Command: AddToken{Hash: "h", Expires: time.Unix(1e9, 0).UTC()}})
	if err != nil {
		t.Fatal(err)
	}
	bad := bytes.Replace(good, []byte(`2001-09-09T01:46:40Z`), []byte(`2001-09-09T01:46:40+24:00`), 1)
	if bytes.Equal(good, bad) {
		t.Fatal("the entry holds no time to spoil")
	}
	if e, err := Decode(bad); !errors.Is(err, ErrUndecodable) {
		t.Errorf("decoded as %+v, %v", e, err)
	}
}
