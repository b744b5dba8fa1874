package peer

import (
	"strings"
	"testing"
)

// TestTheWitnessSeesFaults shows that what judges the proof finds each kind of fault, and
// none where there is none.
func TestTheWitnessSeesFaults(t *testing.T) {
	run := func(node string, epoch uint64, entered, left int64) *turn {
		return &turn{node: node, life: 1, epoch: epoch, entered: entered, left: left, let: true}
	}
	kept := func(a *turn) *turn { a.let = false; return a }
	again := func(a *turn) *turn { a.life++; return a }
	took := func(who string, asked, taken int64, a *turn) reply { return reply{who, asked, taken, a} }
	for _, c := range []struct {
		name    string
		answers []*turn
		replies []reply
		want    string // part of the only fault, or nothing
	}{
		{"one after another", []*turn{run("alpha", 1, 1, 4), run("alpha", 1, 2, 3), run("beta", 2, 5, 6)}, nil, ""},
		{"one's last is begun before and ends after", []*turn{run("alpha", 1, 1, 6), run("beta", 2, 5, 7)}, nil, "beta entered under epoch 2 at 5, and alpha left under epoch 1 at 6"},
		{"one's last is kept back", []*turn{kept(run("alpha", 1, 1, 6)), run("beta", 2, 5, 7)}, nil, ""},
		{"one begins when another has", []*turn{run("beta", 2, 1, 2), kept(run("alpha", 1, 3, 4))}, nil, "alpha began under epoch 1 at 3, after beta had begun under epoch 2 at 1"},
		{"two answer under one epoch", []*turn{run("alpha", 1, 1, 2), run("beta", 1, 3, 4)}, nil, "epoch 1 was answered by alpha (life 1) and by beta (life 1)"},
		{"an epoch lives on after kill -9", []*turn{run("alpha", 1, 1, 2), again(run("alpha", 1, 3, 4))}, nil, "epoch 1 was answered by alpha (life 1) and by alpha (life 2)"},
		{"epochs are skipped", []*turn{run("alpha", 1, 1, 9), run("beta", 2, 10, 11), run("alpha", 7, 12, 13)}, nil, ""},
		{"an epoch overlaps the one after the next", []*turn{run("alpha", 1, 1, 9), run("beta", 2, 10, 30), run("beta", 2, 12, 13), run("gamma", 3, 20, 31)}, nil, "gamma entered under epoch 3 at 20, and beta left under epoch 2 at 30"},
		{"replies cross", nil, []reply{took("a", 1, 9, run("alpha", 1, 2, 3)), took("b", 4, 8, run("beta", 2, 5, 6))}, ""},
		{"a caller goes back", nil, []reply{took("a", 1, 4, run("beta", 2, 2, 3)), took("a", 5, 8, run("alpha", 1, 6, 7))}, "a asked at 5 and took epoch 1, after a had taken epoch 2 at 4"},
		{"a caller goes back behind another", nil, []reply{took("a", 1, 4, run("beta", 2, 2, 3)), took("b", 5, 8, run("alpha", 1, 6, 7))}, "b asked at 5 and took epoch 1, after a had taken epoch 2 at 4"},
	} {
		w := newWitness()
		w.answers, w.replies = c.answers, c.replies
		got := w.verdict()
		if (c.want == "") != (len(got) == 0) || len(got) > 1 || c.want != "" && !strings.Contains(got[0], c.want) {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
}

// TestPorcupineSeesFaults: of what the other checks do not look at, the order in which
// one holder answered.
func TestPorcupineSeesFaults(t *testing.T) {
	calls := func(serials ...int) *witness {
		w := newWitness()
		for i, s := range serials {
			at := int64(10 * i)
			w.replies = append(w.replies, reply{"a", at + 1, at + 4, &turn{node: "alpha", epoch: 1, entered: at + 2, left: at + 3, serial: s}})
		}
		return w
	}
	if !calls(1, 2, 3).ordered() {
		t.Error("1, 2, 3 is refused")
	}
	if calls(1, 3, 2).ordered() || calls(1, 1).ordered() {
		t.Error("an answer that goes back is taken")
	}
}
