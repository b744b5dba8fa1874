package cli

import (
	"io"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

func newToolsCommand() *cobra.Command {
	return withOutput(&cobra.Command{
		Use:   "tools",
		Short: "Everything that meshd call can call, and who answers it",
		Args:  takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o, err := look(cmd)
			if err != nil {
				return err
			}
			rows := toolRows(o)
			return show(cmd, rows, func(w io.Writer, colour bool) { toolTable(rows).write(w, "", colour) })
		},
	})
}

// toolRow is one thing to call.
type toolRow struct {
	Target string `json:"target"`
	What   string `json:"what"`             // seat, node seat or tool
	By     string `json:"by,omitempty"`     // assignment; "" for a seat that nobody holds
	Node   string `json:"node,omitempty"`   // name
	Answer string `json:"answer,omitempty"` // exec, http, bus or builtin
}

func toolRows(o api.Overview) []toolRow {
	rows := []toolRow{}
	for _, name := range sorted(o.State.Seats) {
		s := o.State.Seats[name]
		for _, verb := range s.Verbs {
			if s.Scope == raftfsm.ScopeMesh && s.Holder == "" {
				rows = append(rows, toolRow{Target: name + "." + verb, What: "seat"})
			}
		}
	}
	for _, n := range nodesByName(o) {
		d := o.State.Desired(n.ID)
		for _, s := range d.Seats {
			prefix, what := s.Seat, "seat"
			if s.Scope == raftfsm.ScopeNode {
				prefix, what = n.Name+"/"+s.Seat, "node seat"
			}
			for _, verb := range sorted(s.Verbs) {
				rows = append(rows, toolRow{prefix + "." + verb, what, s.Assignment, n.Name, answeredBy(s.Verbs[verb])})
			}
		}
		for _, t := range d.Tools {
			for _, tool := range sorted(t.Tools) {
				rows = append(rows, toolRow{n.Name + "/" + t.Module + "." + tool, "tool", t.Assignment, n.Name, answeredBy(t.Tools[tool])})
			}
		}
	}
	return rows
}

func answeredBy(h raftfsm.Handler) string {
	switch {
	case len(h.Exec) > 0:
		return "exec"
	case h.HTTP != "":
		return "http"
	case h.Builtin != "":
		return "builtin"
	}
	return "bus"
}

func toolTable(rows []toolRow) table {
	t := table{heads: []string{"TARGET", "WHAT", "ANSWERED BY", "NODE", "HOW"}, state: -1}
	for _, r := range rows {
		by, node := r.By, r.Node
		if by == "" {
			by, node = "nobody", "-"
		}
		t.rows = append(t.rows, []string{r.Target, r.What, by, node, r.Answer})
	}
	return t
}
