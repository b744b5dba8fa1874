package peer

import (
	"io"
	"strings"
	"testing"
)

// TestLimitedKeepsNoMore: package exec copies with io.Copy, which lets a writer that can
// read fill itself.
func TestLimitedKeepsNoMore(t *testing.T) {
	for _, c := range []struct {
		text, kept string
		over       bool
	}{{"", "", false}, {"abcd", "abcd", false}, {"abcde", "abcd", true}, {strings.Repeat("x", 1<<20), "xxxx", true}} {
		l := limited{max: 4}
		n, err := io.Copy(&l, strings.NewReader(c.text))
		if n != int64(len(c.text)) || err != nil || string(l.kept) != c.kept || l.over != c.over {
			t.Errorf("of %d bytes %q is kept, over %t; copied %d, %v", len(c.text), l.kept, l.over, n, err)
		}
	}
}
