package cli

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
)

func newNodeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node",
		Short: "The machines of the mesh",
		Args:  noSuchVerb,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		withOutput(&cobra.Command{
			Use:   "ls",
			Short: "List the machines",
			Args:  takes(0, 0),
			RunE: func(cmd *cobra.Command, _ []string) error {
				o, err := look(cmd)
				if err != nil {
					return err
				}
				rows := nodeRows(o)
				return show(cmd, rows, func(w io.Writer, colour bool) { nodeTable(rows).write(w, "", colour) })
			},
		}),
		&cobra.Command{
			Use:   "rm NAME",
			Short: "Expel a machine, reachable or not",
			Long: `Expel a machine, reachable or not: its certificate is refused from then on, its assignments end,
and it never comes back under its identity. It is refused where the mesh would lose its quorum.`,
			Args:              takes(1, 1),
			ValidArgsFunction: completeNames(nodeNames),
			RunE: func(cmd *cobra.Command, args []string) error {
				c := dial(cmd)
				defer c.Close()
				if err := c.RemoveNode(cmd.Context(), args[0]); err != nil {
					return err
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "node %s is removed\n", args[0])
				return err
			},
		},
	)
	return cmd
}

// nodeRow is one machine.
type nodeRow struct {
	Name    string    `json:"name"`
	State   string    `json:"state"` // up, away or silent: see nodeState
	Role    string    `json:"role"`  // leader, voter or "member"
	Address string    `json:"address"`
	Runs    int       `json:"assignments"`
	Joined  time.Time `json:"joined"`
	ID      string    `json:"id"`
}

func nodeRows(o api.Overview) []nodeRow {
	rows := []nodeRow{}
	for _, n := range nodesByName(o) {
		r := nodeRow{Name: n.Name, State: nodeState(o, n.Name), Role: "member", Address: n.Address, Joined: n.Joined, ID: n.ID}
		switch {
		case n.Name == o.Leader:
			r.Role = "leader"
		case slices.Contains(o.Voters, n.Name):
			r.Role = "voter"
		}
		for _, a := range o.State.Assignments {
			if a.Node == n.ID {
				r.Runs++
			}
		}
		rows = append(rows, r)
	}
	return rows
}

// nodeState says how the node seems: away when gossip holds it for dead, and
// silent when it is a voter that does not answer the other voters.
func nodeState(o api.Overview, name string) string {
	switch {
	case !up(o, name):
		return "away"
	case slices.Contains(o.Missing, name):
		return "silent"
	}
	return "up"
}

func nodeTable(rows []nodeRow) table {
	t := table{heads: []string{"NODE", "STATE", "ROLE", "ADDRESS", "ASSIGNMENTS"}, state: 1}
	for _, r := range rows {
		t.rows = append(t.rows, []string{r.Name, r.State, r.Role, r.Address, fmt.Sprint(r.Runs)})
	}
	return t
}
