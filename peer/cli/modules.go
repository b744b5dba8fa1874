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

func newModulesCommand() *cobra.Command {
	return withOutput(&cobra.Command{
		Use:   "modules [NAME]",
		Short: "What runs where, and how it is; with a name, its whole story",
		Long: `What runs where, and how it is. NAME is a module or an assignment; its whole story has what it
requires, provides, claims, serves and may call.`,
		Args:              takes(0, 1),
		ValidArgsFunction: completeNames(moduleNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := look(cmd)
			if err != nil {
				return err
			}
			rows := assignmentRows(o)
			if len(args) == 0 {
				return show(cmd, rows, func(w io.Writer, colour bool) { assignmentTable(rows).write(w, "", colour) })
			}
			name := args[0]
			if a, ok := o.State.Assignments[name]; ok {
				name = a.Module
			}
			m, ok := o.State.Modules[name]
			if !ok {
				return unknown("module or assignment", args[0], moduleNames(o))
			}
			rows = slices.DeleteFunc(rows, func(r assignmentRow) bool { return r.Module != name || name != args[0] && r.Assignment != args[0] })
			var held []problem
			for _, r := range rows {
				if r.Trouble != nil {
					held = append(held, problem{"process", r.Assignment, r.State, *r.Trouble})
				}
			}
			elaborate(cmd, o, held)
			for i, r := range rows {
				if r.Trouble != nil {
					rows[i].Trouble, held = &held[0].why, held[1:]
				}
			}
			s := moduleStory{Module: m, Assignments: rows}
			_, s.Everywhere = o.State.Everywhere[name]
			return show(cmd, s, func(w io.Writer, colour bool) { s.write(w, colour) })
		},
	})
}

// assignmentRow is one module on one node; one without an assignment has no
// node.
type assignmentRow struct {
	Assignment string    `json:"assignment,omitempty"`
	Module     string    `json:"module"`
	Node       string    `json:"node,omitempty"`
	State      string    `json:"state"` // of its process, external, away, or unassigned
	Class      string    `json:"class,omitempty"`
	Since      time.Time `json:"since,omitzero"`
	Bindings   int       `json:"bindings"`
	InUse      int       `json:"inUse"`
	Rule       bool      `json:"rule"` // it comes from a nodes: all
	Trouble    *why      `json:"trouble,omitempty"`
}

func assignmentRows(o api.Overview) []assignmentRow {
	rows := []assignmentRow{}
	for _, module := range sorted(o.State.Modules) {
		names := runs(o, module)
		if len(names) == 0 {
			rows = append(rows, assignmentRow{Module: module, State: "unassigned"})
		}
		for _, name := range names {
			rows = append(rows, assignmentAt(o, name))
		}
	}
	return rows
}

func assignmentAt(o api.Overview, name string) assignmentRow {
	a := o.State.Assignments[name]
	m := o.State.Modules[a.Module]
	r := assignmentRow{
		Assignment: name, Module: a.Module, Node: home(o, name), State: a.Report.State, Class: present(a.Report), Since: a.Report.Since, Rule: a.Rule,
	}
	for req := range m.Requires {
		b, ok := o.State.Bindings[raftfsm.BindingID(name, req)]
		if ok {
			r.Bindings++
		}
		if ok && b.Phase() == raftfsm.PhaseInUse {
			r.InUse++
		}
	}
	switch {
	case m.Run.External():
		r.State = "external"
	case !up(o, r.Node):
		r.State = "away"
	case r.State == "":
		r.State = "not started"
	}
	if w := first(processProblem(o, name).why, idle(o, name)); w.Text != "" {
		r.Trouble = &w
	}
	return r
}

func assignmentTable(rows []assignmentRow) table {
	t := table{heads: []string{"MODULE", "ASSIGNMENT", "NODE", "STATE", "BINDINGS IN USE"}, state: 3}
	for _, r := range rows {
		state, name, node, bound := r.State, r.Assignment, r.Node, "-"
		if r.Class != "" && r.State != "external" && r.State != "away" {
			state += " (" + r.Class + ")"
		}
		if name == "" {
			name, node = "-", "-"
		}
		if r.Bindings > 0 {
			bound = fmt.Sprintf("%d of %d", r.InUse, r.Bindings)
		}
		t.rows = append(t.rows, []string{r.Module, name, node, state, bound})
	}
	return t
}

// moduleStory is all that is known of one module.
type moduleStory struct {
	Module      raftfsm.Module  `json:"module"`
	Everywhere  bool            `json:"everywhere"` // assigned to all nodes
	Assignments []assignmentRow `json:"assignments"`
}

func (s moduleStory) write(w io.Writer, colour bool) {
	m := s.Module
	var out story
	run := "nothing: it is external"
	if !m.Run.External() {
		run = strings.Join(m.Run.Exec, " ")
		if m.Run.User != "" {
			run += " as " + m.Run.User
		}
	}
	out.add("runs", "%s", run)
	for _, kind := range sorted(m.Provides) {
		out.add("provides", "%s", kind)
	}
	for _, req := range sorted(m.Requires) {
		q := m.Requires[req]
		whose := ""
		switch {
		case q.Provider != "":
			whose = " of " + q.Provider
		case q.Node != "":
			whose = " on " + q.Node
		}
		out.add("requires", "%s: %s%s", req, q.Kind, whose)
	}
	add := func(label string, names []string) {
		if len(names) > 0 {
			out.add(label, "%s", strings.Join(names, ", "))
		}
	}
	add("claims", m.Claims)
	add("tools", sorted(m.Tools))
	add("calls", m.Calls)
	if s.Everywhere {
		out.add("assigned to", "all nodes, and those that join later")
	}
	out.write(w, m.Name)
	fmt.Fprintln(w)
	assignmentTable(s.Assignments).write(w, "  ", colour)
	for _, r := range s.Assignments {
		if r.Trouble != nil {
			fmt.Fprintf(w, "  %s\n", strings.Join(wrap(r.Trouble.Text, columns-4), "\n    "))
		}
	}
}
