package cli

import (
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

func newRmCommand() *cobra.Command {
	var detach bool
	var timeout time.Duration
	sorts := []string{raftfsm.WhatModule, raftfsm.WhatAssignment, raftfsm.WhatSeat}
	cmd := &cobra.Command{
		Use:   "rm module|assignment|seat NAME",
		Short: "Stop and withdraw: processes end, logins are ended, data is kept",
		Long: `Stop and withdraw: processes end, logins are ended at their providers, data is kept (meshd retained
lists it). It goes on whether or not this command waits.
Exit code 0 done, 2 accepted and still waiting, 1 refused.`,
		Args: takes(2, 2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			switch len(args) {
			case 0:
				return sorts, cobra.ShellCompDirectiveNoFileComp
			case 1:
				return known(cmd, removable(args[0]), prefix), cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains(sorts, args[0]) {
				return fmt.Errorf("%s is nothing that can be removed; write %s", args[0], cmd.UseLine())
			}
			remove := raftfsm.Remove{What: args[0], Name: args[1]}
			c := dial(cmd)
			defer c.Close()
			ctx, w := cmd.Context(), cmd.OutOrStdout()
			plan, err := c.Plan(ctx, api.Change{Remove: &remove})
			if err != nil {
				return err
			}
			before, err := c.Overview(ctx)
			if err != nil {
				return err
			}
			writePlan(w, before, plan)
			done, err := c.Remove(ctx, remove)
			if err != nil {
				return err
			}
			fmt.Fprintf(w, "accepted at index %d\n", done.Index)
			if detach {
				return nil
			}
			return newFollower(c, w, before, plan.Plan, done.Index, timeout).run(ctx)
		},
	}
	cmd.Flags().BoolVar(&detach, "detach", false, "do not follow")
	cmd.Flags().DurationVar(&timeout, "timeout", raftfsm.DefaultReady, "how long to follow")
	return cmd
}
