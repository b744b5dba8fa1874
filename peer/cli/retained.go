package cli

import (
	"io"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
)

func newRetainedCommand() *cobra.Command {
	return withOutput(&cobra.Command{
		Use:   "retained",
		Short: "Data whose consumer is gone: it is kept, and the same consumer coming back has it again",
		Args:  takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o, err := look(cmd)
			if err != nil {
				return err
			}
			rows := retainedRows(o)
			return show(cmd, rows, func(w io.Writer, colour bool) { retainedTable(o, rows).write(w, "", colour) })
		},
	})
}

// retainedRow is one resource that no binding refers to.
type retainedRow struct {
	Resource    string    `json:"resource"` // its key
	Name        string    `json:"name"`     // physical
	Kind        string    `json:"kind"`
	Provider    string    `json:"provider"`
	Node        string    `json:"node"`
	Owner       string    `json:"owner"`
	Requirement string    `json:"requirement"`
	Since       time.Time `json:"since,omitzero"` // it was first made
}

func retainedRows(o api.Overview) []retainedRow {
	rows := []retainedRow{}
	for _, id := range o.State.Retained() {
		r := o.State.Resources[id]
		rows = append(rows, retainedRow{id, r.Name, r.Kind, r.Provider, home(o, r.Provider), r.Owner, r.Requirement, r.Since})
	}
	return rows
}

func retainedTable(o api.Overview, rows []retainedRow) table {
	t := table{heads: []string{"NAME", "KIND", "PROVIDER", "NODE", "OWNER", "REQUIREMENT", "MADE"}, state: -1}
	for _, r := range rows {
		provider, node := r.Provider, r.Node
		if node == "" {
			provider, node = provider+" (gone)", "-"
		}
		t.rows = append(t.rows, []string{r.Name, r.Kind, provider, node, r.Owner, r.Requirement, ago(o.Now, r.Since) + " ago"})
	}
	return t
}
