package raftfsm

import (
	"strings"
	"testing"
	"time"
)

func TestADifferenceIsToldWhenItComesAndWhenItGoes(t *testing.T) {
	b := story(t)
	answers := Difference{Seat: "store", Node: "beta", Text: "answers, and nobody is named"}
	silent := Difference{Seat: "store", Node: "alpha", Text: "does not answer"}
	told := func(c Compared, want ...string) {
		t.Helper()
		before := len(b.Events)
		b.ok("alpha", c)
		var got []string
		for _, e := range b.Events[before:] {
			got = append(got, e.Text)
		}
		if strings.Join(got, "; ") != strings.Join(want, "; ") {
			t.Errorf("told is %q, want %q", got, want)
		}
		if !b.Compares(c) {
			t.Errorf("on record is %+v after %+v", b.Mesh.Differences, c)
		}
	}
	told(Compared{})
	told(Compared{[]Difference{answers}}, "seat store differs: beta answers, and nobody is named")
	since := b.Mesh.Differences[0].Since
	told(Compared{[]Difference{answers}})
	told(Compared{[]Difference{answers, silent}}, "seat store differs: alpha does not answer")
	if first := b.Mesh.Differences[0].Since; !first.Equal(since) || !b.Mesh.Differences[1].Since.After(since) {
		t.Errorf("since is %v, and was %v", first, since)
	}
	told(Compared{[]Difference{silent}}, "seat store differs no longer: beta answers, and nobody is named, and that is over")
	told(Compared{}, "seat store differs no longer: alpha does not answer, and that is over")
	told(Compared{[]Difference{answers}}, "seat store differs: beta answers, and nobody is named")

	b.refused("alpha", Compared{make([]Difference, MaxDifferences+1)}, "too-many", "33 differences are too many to keep, the limit is 32; meshd verify lists them all")
	b.refused("alpha", Compared{[]Difference{{Text: strings.Repeat("x", 500)}}}, "too-long", "a difference of 500 bytes is too long to keep, the limit is 400; meshd verify shows it")
	// A refused one costs nothing, and what is given twice is one.
	told(Compared{[]Difference{answers}})
	b.ok("alpha", Compared{[]Difference{answers, answers}})
	if d := b.Mesh.Differences; len(d) != 1 || d[0].Since.IsZero() || d[0].Since.After(epochStart.Add(time.Hour)) {
		t.Errorf("on record is %+v", d)
	}
}
