package raftfsm

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The corpus is logs that some build wrote, and the state that they lead to. It
// is kept for ever: a build that reads an old log differently would split a mesh
// in an upgrade. -update adds a log that is missing and never rewrites one.
const corpusDir = "testdata/corpus"

// corpus makes the logs, each a scenario by name.
func corpus(t *testing.T) map[string][]Entry {
	every := &bed{TB: t, State: New()}
	for _, c := range everyCommand() { // most of them are refused, and all are read
		every.apply("alpha", c)
	}
	life := story(t)
	life.ok("alpha", Hold{Seat: "store", Assignment: "pg-main"})
	life.ok("alpha", push(on("shop", "gamma", bound("db", "pg-apps"))))
	life.use("shop@gamma/db")
	life.ok("alpha", NodeReport{Withdrawn: []Withdrawn{{ID: sorted(life.Withdrawals)[0], Ended: 2}}})
	life.ok("alpha", push(app("agent", Requirement{}), on("agent", "all")))
	life.join("delta")
	life.ok("alpha", pending(push(app("late", Requirement{Provider: "pg-late"}), on("late", "beta"))))
	life.ok("alpha", push(on("pg", "delta", as("pg-late"))))
	life.ok("alpha", Remove{WhatModule, "shop"})
	life.ok("alpha", removal(life.State, "gamma"))
	life.apply("alpha", push(app("bad", Requirement{}), on("bad", "delta,nowhere")))

	sessions := story(t)
	sessions.open("alpha")
	sessions.open("beta")
	sessions.ok("alpha", Hold{Seat: "store", Assignment: "pg-main"})
	sessions.close("alpha", "store", "pg-apps")
	sessions.open("alpha")
	sessions.ok("alpha", Hold{Seat: "store", Assignment: "pg-main", IfEpoch: sessions.Seats["store"].Epoch, Released: sessions.Seats["store"].Epoch})
	sessions.ok("alpha", Remove{WhatSeat, "store"})
	sessions.ok("beta", removal(sessions.State, "beta"))

	moved, _, _, _ := lamps(t)
	moved.apply("beta", MoveSeat{Seat: "lamp", Node: "alpha"})
	moved.apply("beta", MoveSeat{Seat: "lamp", Node: "gamma"})
	moved.ok("beta", MoveSeat{Seat: "lamp", Node: "alpha", Assignment: "lamp-z"})
	moved.ok("alpha", hold(moved, "lamp", "lamp-z", 0))
	moved.ok("beta", MoveSeat{Seat: "lamp", Node: "beta"})
	moved.ok("alpha", hold(moved, "lamp", "lamp-b", moved.Seats["lamp"].Epoch))

	compared := story(t)
	compared.ok("alpha", Compared{[]Difference{{Seat: "store", Node: "beta", Text: "answers"}}})
	compared.ok("beta", Compared{[]Difference{{Seat: "store", Node: "beta", Text: "answers"}, {Seat: "store", Node: "alpha", Text: "does not answer"}}})
	compared.ok("alpha", Compared{[]Difference{{Seat: "store", Node: "alpha", Text: "does not answer"}}})

	parts := newBed(t, "alpha", "beta")
	parts.ok("alpha", PushPart{"p", 0, push(pg(), fullModule()).Documents})
	parts.ok("alpha", PushPart{"p", 1, push(on("pg", "alpha", as("pg-main"), deflt(pgKind), exclusive)).Documents})
	parts.ok("alpha", Push{ID: "p", Parts: 2})
	parts.ok("alpha", PushPart{"open", 0, push(pg()).Documents})
	return map[string][]Entry{"every-command": every.log, "life": life.log, "sessions": sessions.log, "moved": moved.log, "compared": compared.log, "parts": parts.log}
}

func TestCorpus(t *testing.T) {
	if *update {
		for name, log := range corpus(t) {
			addToCorpus(t, name, log)
		}
	}
	logs, err := filepath.Glob(corpusDir + "/*.jsonl")
	if err != nil || len(logs) < 4 {
		t.Fatalf("the corpus has %d logs, %v", len(logs), err)
	}
	for _, path := range logs {
		t.Run(filepath.Base(path), func(t *testing.T) {
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var log []Entry
			for line := range bytes.Lines(raw) {
				e, err := Decode(bytes.TrimSpace(line))
				if err != nil {
					t.Fatalf("entry %d: %v", len(log)+1, err)
				}
				log = append(log, e)
			}
			got := replay(t, log, -1)
			for cut := range log {
				if again := replay(t, log, cut); !bytes.Equal(got, again) {
					t.Fatalf("going on from a snapshot at entry %d gives\n%s\nnot\n%s", cut+1, again, got)
				}
			}
			want, err := os.ReadFile(strings.TrimSuffix(path, ".jsonl") + ".json")
			if err != nil {
				t.Fatal(err)
			}
			if indented := indent(t, got); indented != string(want) {
				t.Errorf("the log leads to\n%s\nand led to\n%s", indented, want)
			}
			if restored, err := Restore(bytes.NewReader(want)); err != nil || !bytes.Equal(snapshotOf(t, restored), got) {
				t.Errorf("the old snapshot is read as another state: %v", err)
			}
		})
	}
}

func addToCorpus(t *testing.T, name string, log []Entry) {
	path := filepath.Join(corpusDir, name)
	if _, err := os.Stat(path + ".jsonl"); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	var lines bytes.Buffer
	for _, e := range log {
		b, err := Encode(e)
		if err != nil {
			t.Fatal(err)
		}
		lines.Write(append(b, '\n'))
	}
	if err := os.MkdirAll(corpusDir, 0o755); err != nil {
		t.Fatal(err)
	}
	for suffix, b := range map[string][]byte{".jsonl": lines.Bytes(), ".json": []byte(indent(t, replay(t, log, -1)))} {
		if err := os.WriteFile(path+suffix, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func indent(t *testing.T, b []byte) string {
	t.Helper()
	var out bytes.Buffer
	if err := json.Indent(&out, bytes.TrimSpace(b), "", " "); err != nil {
		t.Fatal(err)
	}
	return out.String() + "\n"
}

func TestRestoreIsStrict(t *testing.T) {
	good := string(snapshotOf(t, story(t).State))
	for name, bad := range map[string]string{
		"another format":     strings.Replace(good, `"Format":1`, `"Format":2`, 1),
		"an unknown field":   strings.Replace(good, `"Mesh":`, `"Mash":`, 1),
		"no state":           `{"Format":1,"State":null}`,
		"half of it":         good[:len(good)/2],
		"something after it": good + "{}",
		"nothing":            "",
		"a map that is none": strings.Replace(good, `"Parts":{}`, `"Parts":null`, 1),
		"null sessions":      strings.Replace(good, `"Sessions":{}`, `"Sessions":null`, 1),
		"null claims":        strings.Replace(good, `"Former":{}`, `"Former":null`, 1),
	} {
		if s, err := Restore(strings.NewReader(bad)); !errors.Is(err, ErrUndecodable) {
			t.Errorf("%s is restored as %v, %v", name, s, err)
		}
	}
}
