package raftfsm

import (
	"fmt"
	"slices"
	"time"
)

// Difference is one difference between who answers a mesh seat and who is named
// for it, as two looks of the leader a moment apart both found it.
type Difference struct {
	Seat  string
	Node  string // name, of the node that the text is about
	Text  string // what that node does, and who is named
	Since time.Time
}

// Compared is what the leader finds when it compares who answers the mesh seats
// with who is named: all of it, and nothing of what it found before. Since is
// filled in by Apply.
type Compared struct{ Differences []Difference }

func (Compared) name() string { return "compared" }

// Bounds of what is on record: whoever wants it all asks with meshd verify.
const (
	// MaxDifferences is how many a Compared may have.
	MaxDifferences = 32
	maxDifference  = 400 // bytes of the texts of one
)

// same reports whether both say the same, whenever they began.
func (d Difference) same(e Difference) bool {
	d.Since, e.Since = time.Time{}, time.Time{}
	return d == e
}

// Compares reports whether c says what is on record already.
func (s *State) Compares(c Compared) bool {
	return slices.EqualFunc(s.Mesh.Differences, c.Differences, Difference.same)
}

// compared records what differs. A difference is told when it comes and when it
// goes, and not in between.
func (t *tx) compared(c Compared) *Rejection {
	if len(c.Differences) > MaxDifferences {
		return reject("too-many", "", fmt.Sprintf("%d differences are too many to keep, the limit is %d", len(c.Differences), MaxDifferences), "meshd verify lists them all")
	}
	find := func(in []Difference, d Difference) int {
		return slices.IndexFunc(in, func(e Difference) bool { return e.same(d) })
	}
	old := t.Mesh.Differences
	var next []Difference // a new slice: readers keep the old one
	for _, d := range c.Differences {
		if len(d.Seat)+len(d.Node)+len(d.Text) > maxDifference {
			return reject("too-long", "", fmt.Sprintf("a difference of %d bytes is too long to keep, the limit is %d", len(d.Seat)+len(d.Node)+len(d.Text), maxDifference), "meshd verify shows it")
		}
		if find(next, d) >= 0 {
			continue
		}
		d.Since = t.h.Time
		if i := find(old, d); i >= 0 {
			d.Since = old[i].Since
		} else {
			t.event("seat %s differs: %s %s", d.Seat, d.Node, d.Text)
		}
		next = append(next, d)
	}
	for _, d := range old {
		if find(next, d) < 0 {
			t.event("seat %s differs no longer: %s %s, and that is over", d.Seat, d.Node, d.Text)
		}
	}
	t.Mesh.Differences = next
	return nil
}
