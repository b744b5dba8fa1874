package peer

import (
	"strings"
	"testing"
	"time"
)

// TestDetailNamesWhoCouldNotBeAsked: a node that is gone is named, with the cause
// in words and no trace of how it was asked; what the others say is there.
func TestDetailNamesWhoCouldNotBeAsked(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.standard()
		b.inUse()
		b.node("beta").kill()
		for _, about := range []string{"pg-main", shopDB} {
			b.eventually(10*time.Second, "beta is not reached", func() bool {
				_, err := b.node("gamma").peer.Detail(b.Context(), about)
				return err != nil
			})
			_, err := b.node("gamma").peer.Detail(b.Context(), about)
			if err == nil || !strings.HasPrefix(err.Error(), "beta could not be asked: ") || strings.Contains(err.Error(), "http") {
				t.Errorf("the detail of %s: %v", about, err)
			}
		}
	})
}
