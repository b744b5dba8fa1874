package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

func newPlanCommand() *cobra.Command {
	var pending bool
	cmd := withOutput(&cobra.Command{
		Use:   "plan FILE...",
		Short: "What a push would change: credentials, restarts, machines, seats",
		Long: `What a push of these files (- is standard input) would change, on which machines. Nothing is
changed. Exit code 0 without changes, 2 with some, 1 where the push would be refused.`,
		Args: takes(1, -1),
		RunE: func(cmd *cobra.Command, files []string) error {
			m, err := load(cmd, files)
			if err != nil {
				return err
			}
			c := dial(cmd)
			defer c.Close()
			plan, err := c.Plan(cmd.Context(), api.Change{Push: &api.Push{Documents: m.Documents, Pending: pending}})
			if err != nil {
				return locate(m, err)
			}
			o, err := c.Overview(cmd.Context())
			if err != nil {
				return err
			}
			qualify(cmd, o)
			if err := show(cmd, plan, func(w io.Writer, _ bool) {
				writePlan(w, o, plan)
				if len(plan.Changes) > 0 {
					fmt.Fprintf(w, "meshd push --at %d does this, or is refused if the mesh has changed by then\n", plan.At)
				}
			}); err != nil {
				return err
			}
			if len(plan.Changes) > 0 {
				return exit(exitWaiting)
			}
			return nil
		},
	})
	cmd.Flags().BoolVar(&pending, "pending", false, "accept a named provider or holder that is not there yet")
	return cmd
}

// planSign stands before a change of a plan.
func planSign(effect string) string {
	switch effect {
	case raftfsm.EffectMint, raftfsm.EffectStart:
		return "+"
	case raftfsm.EffectWithdraw, raftfsm.EffectStop:
		return "-"
	case raftfsm.EffectRestart, raftfsm.EffectName:
		return "~"
	case raftfsm.EffectWait:
		return "?"
	}
	return " "
}

// writePlan prints a plan in groups, and the machines that it touches.
func writePlan(w io.Writer, o api.Overview, p api.Plan) {
	if p.Own != 0 {
		fmt.Fprintf(w, "no leader could be asked: planned by this node's own copy, which is of index %d\n", p.Own)
	}
	if len(p.Changes) == 0 {
		fmt.Fprintln(w, "nothing changes")
		return
	}
	fmt.Fprintf(w, "plan: %s\n", count(len(p.Changes), "change"))
	for _, group := range []struct{ title, what string }{
		{"credentials", raftfsm.WhatBinding}, {"processes", raftfsm.WhatAssignment}, {"seats", raftfsm.WhatSeat}, {"modules", raftfsm.WhatModule},
	} {
		titled := false
		for _, c := range p.Changes {
			if c.What != group.what {
				continue
			}
			if !titled {
				fmt.Fprintf(w, "  %s\n", group.title)
				titled = true
			}
			lines := wrap(c.Text, columns-len("    + "))
			fmt.Fprintf(w, "    %s %s\n", planSign(c.Effect), strings.Join(lines, "\n      "))
		}
	}
	var machines []string
	for _, name := range p.Nodes {
		if !up(o, name) {
			name += " (away: it follows once it is back)"
		}
		machines = append(machines, name)
	}
	if len(machines) > 0 {
		fmt.Fprintf(w, "  %s\n", strings.Join(wrap("machines touched: "+strings.Join(machines, ", "), columns-4), "\n    "))
	}
}
