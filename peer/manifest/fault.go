package manifest

import (
	"fmt"
	"slices"
	"strings"

	"meshd/raftfsm"
)

// Fault is one broken rule, where it is broken, and the way out.
type Fault struct {
	File       string
	Line       int    // from 1
	Column     int    // from 1, in characters
	Rule       string // what was refused, and why
	Suggestion string // what to write instead; "" where the rule says it
}

// String is "file:line:column: rule (suggestion)", the form that editors follow.
func (f Fault) String() string {
	s := fmt.Sprintf("%s:%d:%d: %s", f.File, f.Line, f.Column, f.Rule)
	if f.Suggestion != "" {
		s += " (" + f.Suggestion + ")"
	}
	return s
}

// Faults is everything that is wrong with a manifest, in the order of the files
// and the lines. It is never empty where it is returned as an error.
type Faults []Fault

// maxShown is how many faults Error prints: a screen. The rest is mostly the
// same mistake again.
const maxShown = 20

// Error prints a line for each fault, and after maxShown how many more there are.
func (f Faults) Error() string {
	var b strings.Builder
	for i, fault := range f {
		if i == maxShown {
			fmt.Fprintf(&b, "\n... and %d more", len(f)-i)
			break
		}
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(fault.String())
	}
	return b.String()
}

// place is a position in a file.
type place struct {
	file      string
	line, col int
}

// didYouMean suggests the candidate nearest to what was written, or lists them
// all where none is near.
func didYouMean(written string, candidates []string) string {
	if c := nearest(written, candidates); c != "" {
		return fmt.Sprintf("did you mean %q?", c)
	}
	switch len(candidates) {
	case 0:
		return ""
	case 1:
		return "there is only " + candidates[0]
	}
	return "there are " + and(candidates)
}

// nearest returns the candidate that written could be a slip of the hand of: at
// most two edits away, and not by more than half of it.
func nearest(written string, candidates []string) string {
	best, least := "", 3
	written = strings.ToLower(written)
	for _, c := range candidates {
		if far := len(c) - len(written); far < least && -far < least {
			if d := raftfsm.Distance(written, c); d < least && 2*d <= len(c) {
				best, least = c, d
			}
		}
	}
	return best
}

// and joins words as a sentence does: "a, b and c".
func and(words []string) string { return join(words, "and") }

// or joins words as a choice: "a, b or c".
func or(words []string) string { return join(words, "or") }

func join(words []string, last string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	n := len(words) - 1
	return strings.Join(words[:n], ", ") + " " + last + " " + words[n]
}

// clip shortens what is quoted in a fault, so that a fault stays a line.
func clip(s string) string {
	const most = 60
	if runes := []rune(s); len(runes) > most {
		return string(runes[:most-3]) + "..."
	}
	return s
}

// inOrder sorts faults by the order of the files, then by line and column.
func inOrder(faults Faults, files []string) {
	rank := make(map[string]int, len(files))
	for i, name := range files {
		if _, known := rank[name]; !known {
			rank[name] = i
		}
	}
	slices.SortStableFunc(faults, func(a, b Fault) int {
		if a.File != b.File {
			return rank[a.File] - rank[b.File]
		}
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return a.Column - b.Column
	})
}
