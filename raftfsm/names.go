package raftfsm

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// MaxName is the longest name of anything that a user names, in bytes.
const MaxName = 40

var nameRule = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}$`)

// CheckName says whether a name of that sort of thing follows the one rule for
// names.
func CheckName(sort, name string) *Rejection {
	if nameRule.MatchString(name) {
		return nil
	}
	return reject("bad-name", "", fmt.Sprintf("%q is no %s name: one is 1 to %d of a-z, 0-9 and -, and begins with a letter or a digit", clip(name), sort, MaxName), "write another name")
}

// badAssignmentName refuses what cannot be the name of any assignment.
func badAssignmentName(name string) *Rejection {
	return reject("bad-name", "", fmt.Sprintf("%q cannot be the name of an assignment: that is what its as: says, or MODULE@NODE", clip(name)), "meshd providers and meshd status list the names")
}

func clip(s string) string {
	if len(s) > 60 {
		return s[:57] + "..."
	}
	return s
}

// tail writes the hash that ends a physical name: ten characters are 50 bits, so
// that among 10,000 logins of one provider two meet once in 20 million meshes.
var tail = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567")

const tailLen = 10

// physical makes a name that every kind's server takes: [a-z0-9_], begun by a
// letter, at most max bytes, and not to be met by another input: the tail is a
// hash of all the parts, the mesh's id among them. The last two are legible.
func physical(max int, mesh string, parts ...string) string {
	word := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.Join(parts[len(parts)-2:], "_"))
	if room := max - len("m_") - tailLen; len(word) > room {
		word = word[:room]
	}
	sum := sha256.Sum256([]byte(strings.Join(append([]string{mesh}, parts...), "\x00")))
	return "m" + word + "_" + tail.EncodeToString(sum[:])[:tailLen]
}

// resourceName is at most 40 bytes: buckets, databases and roles all take it.
func resourceName(mesh, provider, kind, owner, requirement string) string {
	return physical(40, mesh, provider, kind, owner, requirement)
}

// loginName is at most 30 bytes for generations below 10 million: MySQL's
// limit is 32.
func loginName(mesh, provider, binding string, generation uint64) string {
	consumer, requirement, _ := strings.Cut(binding, "/")
	return fmt.Sprintf("%s_%d", physical(22, mesh, provider, consumer, requirement), generation)
}

// nearest orders the candidates by edit distance to name and keeps those that
// could be a slip of the hand, or all of a short list; at most five.
func nearest(name string, candidates []string) []string {
	if len(name) > 2*MaxName+1 {
		return nil // longer than any name: nothing is near it
	}
	type scored struct {
		name string
		cost int
	}
	var all []scored
	for _, c := range candidates {
		all = append(all, scored{c, Distance(name, c)})
	}
	slices.SortStableFunc(all, func(a, b scored) int { return a.cost - b.cost })
	var out []string
	for _, s := range all {
		if len(out) < 5 && (s.cost <= 3 || len(all) <= 5) {
			out = append(out, s.name)
		}
	}
	return out
}

// Distance counts the insertions, deletions, replacements and swaps of
// neighbours that lead from a to b (Damerau and Levenshtein, restricted).
func Distance(a, b string) int {
	var before []int
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next := make([]int, len(b)+1)
		next[0] = i + 1
		for j := range len(b) {
			cost := row[j]
			if a[i] != b[j] {
				cost++
			}
			cost = min(cost, row[j+1]+1, next[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				cost = min(cost, before[j-1]+1)
			}
			next[j+1] = cost
		}
		before, row = row, next
	}
	return row[len(b)]
}
