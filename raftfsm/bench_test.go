package raftfsm

import (
	"bytes"
	"fmt"
	"io"
	"testing"
)

// bigMesh has 50 nodes and n bindings, two to a module, all of them staged.
func bigMesh(t testing.TB, n int) *State {
	s := New()
	index := uint64(0)
	apply := func(node string, c Command) {
		index++
		if r := s.Apply(index, Entry{Header{Format: Format, Level: Level, Actor: "root", Node: id(node), Time: epochStart}, c}).Rejection; r != nil {
			t.Fatal(r)
		}
	}
	apply("n0", Init{Mesh: Mesh{ID: "big"}, Node: member("n0")})
	for i := range 49 {
		apply("n0", AddToken{Hash: fmt.Sprint("t", i)})
		apply("n0", Admit{Token: fmt.Sprint("t", i), Node: member(fmt.Sprint("n", i+1))})
	}
	cache := Module{Name: "cache", Provides: map[string]Provide{"redis": {}}}
	apply("n0", push(pg(), on("pg", "n0", as("pg-main"), deflt(pgKind)), cache, on("cache", "n1", as("cache-main"), deflt("redis"))))
	for i := 0; i < n/2; i += 250 {
		var docs []any
		for j := i; j < i+250; j++ {
			m := app(fmt.Sprint("app", j), Requirement{})
			m.Requires["cache"] = Requirement{Kind: "redis"}
			docs = append(docs, m, on(m.Name, fmt.Sprint("n", j%50)))
		}
		apply("n0", push(docs...))
	}
	for _, binding := range sorted(s.Bindings) {
		b := s.Bindings[binding]
		report := NodeReport{Staged: []Staged{{Binding: binding, Resource: b.Resource, To: s.Assignments[b.Consumer].Node, Generation: 1, Sealed: string(bytes.Repeat([]byte("s"), 600))}}}
		apply(s.NodeName(s.Assignments[b.Provider].Node), report)
	}
	if len(s.Bindings) != n {
		t.Fatalf("%d bindings", len(s.Bindings))
	}
	return s
}

// BenchmarkPushOneOfTenThousand pushes one module document, changed each time,
// into a mesh of 10,000 bindings. The aim is 2 ms: an Apply holds up every other.
func BenchmarkPushOneOfTenThousand(b *testing.B) {
	s := bigMesh(b, 10_000)
	for i := 0; b.Loop(); i++ {
		m := app("app77", Requirement{})
		m.Requires["cache"] = Requirement{Kind: "redis"}
		m.Env = map[string]string{"N": fmt.Sprint(i)}
		if r := s.Apply(s.Index+1, Entry{Header{Time: epochStart}, push(m, on("app77", "n27"))}).Rejection; r != nil {
			b.Fatal(r)
		}
	}
}

// BenchmarkRebindOneOfTenThousand makes a binding anew each time, which asks
// every question that a push can.
func BenchmarkRebindOneOfTenThousand(b *testing.B) {
	s := bigMesh(b, 10_000)
	apply := func(c Command) {
		if r := s.Apply(s.Index+1, Entry{Header{Time: epochStart}, c}).Rejection; r != nil {
			b.Fatal(r)
		}
	}
	apply(push(on("pg", "n3", as("pg-other"))))
	for i := 0; b.Loop(); i++ {
		apply(push(on("app77", "n27", bound("db", []string{"pg-main", "pg-other"}[i%2]))))
	}
}

func BenchmarkReportInTenThousand(b *testing.B) {
	s := bigMesh(b, 10_000)
	binding := s.Bindings["app77@n27/db"]
	for i := 0; b.Loop(); i++ {
		s.Apply(s.Index+1, Entry{Header{Node: id("n27"), Time: epochStart}, NodeReport{Troubles: []TroubleReport{{Binding: binding.ID(), Side: SideConsumer, Step: "login", Class: fmt.Sprint("c", i)}}}})
	}
}

func BenchmarkDesiredOfOneNode(b *testing.B) {
	s := bigMesh(b, 10_000)
	for b.Loop() {
		s.Desired(id("n27"))
	}
}

func BenchmarkPreviewInTenThousand(b *testing.B) {
	s := bigMesh(b, 10_000)
	for b.Loop() {
		if _, r := s.Preview(Header{}, push(on("app77", "n28"))); r != nil {
			b.Fatal(r)
		}
	}
}

func BenchmarkSnapshotOfTenThousand(b *testing.B) {
	s := bigMesh(b, 10_000)
	for b.Loop() {
		n, err := s.WriteTo(io.Discard)
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(n)
	}
}

func BenchmarkRestoreOfTenThousand(b *testing.B) {
	raw := snapshotOf(b, bigMesh(b, 10_000))
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		if _, err := Restore(bytes.NewReader(raw)); err != nil {
			b.Fatal(err)
		}
	}
}
