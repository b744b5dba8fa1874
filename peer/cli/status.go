package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// glance is the whole mesh, or all that concerns one name, as -o json gives it.
type glance struct {
	Mesh      string          `json:"mesh"`
	Self      string          `json:"self"`
	Index     uint64          `json:"index"`
	Leader    string          `json:"leader"`
	Age       float64         `json:"age"` // seconds since the last word from a leader; -1: none was heard out since the node started
	Quorum    bool            `json:"quorum"`
	Missing   []string        `json:"missing"`
	Nodes     []nodeRow       `json:"nodes"`
	Seats     []seatRow       `json:"seats"`
	Providers []providerRow   `json:"providers"`
	Bindings  []bindingRow    `json:"bindings"`
	Modules   []assignmentRow `json:"modules"`
	Refused   []api.Refusal   `json:"refused"`
	outlook
}

// outlook is what is not as it should be.
type outlook struct {
	Withdrawals []problem `json:"withdrawals"`
	Unready     []problem `json:"unready"`
	Coming      []problem `json:"coming"` // not ready yet, and not overdue
}

func newStatusCommand() *cobra.Command {
	return withOutput(&cobra.Command{
		Use:   "status [NAME]",
		Short: "The mesh at a glance, and what is un-ready; with a name, what concerns that",
		Long: `The mesh at a glance: nodes, seats, providers, bindings, modules, what is on the way, and what is
un-ready, why, where and since when. Un-ready is what is lost, and what takes longer than its
ready-within. It reads this node's own copy and works without a quorum.
Exit code 2 if anything shown is un-ready.`,
		Args:              takes(0, 1),
		ValidArgsFunction: completeNames(anyName),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := overview(cmd)
			if err != nil {
				return err
			}
			g := glanceAt(o)
			if len(args) == 1 && !g.narrow(o, args[0]) {
				return unknown("node, module, assignment, seat, provider or binding", args[0], anyName(o))
			}
			elaborate(cmd, o, g.Unready, g.Coming)
			if err := show(cmd, g, func(w io.Writer, colour bool) { g.write(w, o, colour) }); err != nil {
				return err
			}
			if len(g.Unready) > 0 {
				return exit(exitWaiting)
			}
			return nil
		},
	})
}

func glanceAt(o api.Overview) *glance {
	g := &glance{
		Mesh: o.State.Mesh.ID, Self: o.Self, Index: o.Index, Leader: o.Leader, Age: -1, Quorum: o.Quorum, Missing: some(o.Missing),
		Nodes: nodeRows(o), Seats: seatRows(o), Providers: providerRows(o), Bindings: bindingRows(o), Modules: assignmentRows(o),
		Refused: some(o.Refused), outlook: outlook{Withdrawals: []problem{}},
	}
	g.Unready, g.Coming = problems(o)
	if o.Age >= 0 {
		g.Age = o.Age.Seconds()
	}
	for _, id := range sorted(o.State.Withdrawals) {
		g.Withdrawals = append(g.Withdrawals, withdrawalProblem(o, id))
	}
	return g
}

// narrow keeps what concerns name, and reports whether anything does.
func (g *glance) narrow(o api.Overview, name string) bool {
	keep := func(names ...string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return n == name || strings.HasPrefix(n, name+"/") })
	}
	g.Nodes = slices.DeleteFunc(g.Nodes, func(r nodeRow) bool { return !keep(r.Name) })
	g.Seats = slices.DeleteFunc(g.Seats, func(r seatRow) bool { return !keep(r.Seat, r.Holder, r.Node) })
	g.Providers = slices.DeleteFunc(g.Providers, func(r providerRow) bool { return !keep(r.Provider, r.Node, r.Kind) })
	g.Modules = slices.DeleteFunc(g.Modules, func(r assignmentRow) bool { return !keep(r.Assignment, r.Module, r.Node) })
	known := map[string]bool{}
	for _, r := range g.Modules {
		known[r.Assignment] = true
	}
	g.Bindings = slices.DeleteFunc(g.Bindings, func(r bindingRow) bool { return !keep(r.Binding, r.Provider, r.Kind) && !known[r.Consumer] })
	ending := map[string]bool{} // bindings that a provider of that name ends
	for _, w := range o.State.Withdrawals {
		ending[w.Binding] = ending[w.Binding] || keep(w.Provider)
	}
	g.Withdrawals = slices.DeleteFunc(g.Withdrawals, func(p problem) bool { return !keep(p.Name, p.Node) && !ending[p.Name] })
	g.Refused = slices.DeleteFunc(g.Refused, func(r api.Refusal) bool { return !known[r.Assignment] })
	for _, r := range g.Bindings {
		known[r.Binding] = true
	}
	hosts := map[string]bool{} // a node that is lost is the trouble of what is there
	for _, r := range g.Seats {
		hosts[r.Node] = true
	}
	for _, r := range g.Providers {
		hosts[r.Node] = true
	}
	for _, r := range g.Modules {
		hosts[r.Node] = true
	}
	other := func(p problem) bool {
		return !keep(p.Name, p.Node) && !known[p.Name] && !(p.What == "withdrawal" && ending[p.Name]) && (p.What != "node" || !hosts[p.Name])
	}
	g.Unready, g.Coming = slices.DeleteFunc(g.Unready, other), slices.DeleteFunc(g.Coming, other)
	return len(g.Nodes)+len(g.Seats)+len(g.Providers)+len(g.Modules)+len(g.Bindings)+len(g.Withdrawals) > 0
}

func (g *glance) write(w io.Writer, o api.Overview, colour bool) {
	fmt.Fprintln(w, strings.Join(wrap(standing(o), columns), "\n"))
	section := func(name string, t table) {
		if len(t.rows) > 0 {
			fmt.Fprintf(w, "\n%s\n", name)
			t.write(w, "  ", colour)
		}
	}
	section("nodes", nodeTable(g.Nodes))
	section("seats", seatTable(o, g.Seats))
	section("providers", providerTable(g.Providers))
	section("bindings", bindingTable(g.Bindings))
	section("modules", assignmentTable(g.Modules))
	section("withdrawals", problemTable(o, g.Withdrawals))
	section("refused on the bus of "+g.Self, refusedTable(o, g.Refused))
	section("on the way", problemTable(o, g.Coming))
	section("un-ready", problemTable(o, g.Unready))
	switch {
	case len(g.Unready) > 0:
	case len(g.Coming) > 0:
		fmt.Fprintf(w, "\nnothing is overdue; %s\n", plural(len(g.Coming), "thing is on its way", "things are on their way"))
	default:
		fmt.Fprintln(w, "\nall ready")
	}
}

// standing is the line that says how good the answer is.
func standing(o api.Overview) string {
	from := fmt.Sprintf("mesh %s seen from %s", o.State.Mesh.ID, o.Self)
	switch {
	case o.Quorum && o.Age < 0:
		return fmt.Sprintf("%s: index %d, its own record; it is reading what %s, the leader, has since then", from, o.Index, o.Leader)
	case o.Quorum:
		return fmt.Sprintf("%s: index %d, leader %s, %s old", from, o.Index, o.Leader, span(o.Age))
	}
	age := span(o.Age) + " old"
	if o.Age < 0 {
		age = "its own record: it has heard no leader since it started"
	}
	return fmt.Sprintf("%s has no quorum: %s. Nothing can be changed, and what runs goes on. This is index %d, %s.", from, noQuorum(o), o.Index, age)
}

func problemTable(o api.Overview, all []problem) table {
	t := table{state: 1}
	for _, p := range all {
		since := ""
		if !p.Since.IsZero() {
			since = "for " + ago(o.Now, p.Since)
		}
		t.rows = append(t.rows, []string{p.What + " " + p.Name, p.State, since, p.Text})
	}
	return t
}

func refusedTable(o api.Overview, all []api.Refusal) table {
	t := table{heads: []string{"ASSIGNMENT", "MAY NOT", "TIMES", "SINCE", "LAST"}, state: -1}
	for _, r := range all {
		t.rows = append(t.rows, []string{r.Assignment, r.Action + " " + r.Subject, fmt.Sprint(r.Count), ago(o.Now, r.First), ago(o.Now, r.Last)})
	}
	return t
}

// unknown refuses a name that there is not, with the near ones.
func unknown(what, name string, known []string) error {
	e := &api.Error{Code: "unknown", Text: fmt.Sprintf("there is no %s %q", what, name), Remedy: "meshd status lists what there is"}
	for _, k := range known {
		if len(e.Candidates) < 5 && near(name, k) {
			e.Candidates = append(e.Candidates, k)
		}
	}
	return e
}

// near reports whether name could be meant for known: a part of it, or with a
// slip or three, in no more than half of its letters.
func near(name, known string) bool {
	if strings.Contains(known, name) {
		return true
	}
	most := min(3, len(name)/2)
	longer := len(name) - len(known)
	return max(longer, -longer) <= most && raftfsm.Distance(name, known) <= most
}

// story is what is known of one thing, line by line, as text and for -o json.
type story struct {
	lines [][]string
}

func (s *story) add(label, format string, args ...any) {
	s.lines = append(s.lines, []string{label, fmt.Sprintf(format, args...)})
}

func (s *story) write(w io.Writer, title string) {
	fmt.Fprintln(w, title)
	table{rows: s.lines, state: -1}.write(w, "  ", false)
}

// addTries adds what is tried in vain.
func (s *story) addTries(now time.Time, tries []api.Try) {
	for _, t := range tries {
		s.add("tried", "%s", tried(now, t))
	}
}
