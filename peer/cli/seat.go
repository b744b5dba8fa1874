package cli

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// moveWithin is how long a move is followed: ten handovers, or the end of a lease
// and what an election takes, several times.
const moveWithin = 10 * time.Second

func newSeatCommand() *cobra.Command {
	var detach bool
	var timeout time.Duration
	move := &cobra.Command{
		Use:   "move SEAT NODE[/ASSIGNMENT]",
		Short: "Hand a seat over to its claimant on another machine",
		Long: `Make the claimant on NODE the one that should hold the seat of the mesh, and follow until it answers.
A holder that is there lets go first, and calls wait for some milliseconds. A seat that does not fail
over, and whose holder's machine is lost, is brought up elsewhere so: answers then come from that
machine's data. The claimant has the seat from then on whenever its machine can answer; a manifest that
says holder: for the seat brings it back with the next push of it.
Exit code 0 answered there, 2 accepted and not yet, 1 refused.`,
		Args: takes(2, 2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			switch len(args) {
			case 0:
				return known(cmd, meshSeatNames, prefix), cobra.ShellCompDirectiveNoFileComp
			case 1:
				return known(cmd, claimantNodes(args[0]), prefix), cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			node, assignment, _ := strings.Cut(args[1], "/")
			return moveSeat(cmd, raftfsm.MoveSeat{Seat: args[0], Node: node, Assignment: assignment}, detach, timeout)
		},
	}
	move.Flags().BoolVar(&detach, "detach", false, "do not follow")
	move.Flags().DurationVar(&timeout, "timeout", moveWithin, "how long to follow")
	cmd := &cobra.Command{
		Use:   "seat",
		Short: "Move a seat of the mesh to another machine",
		Args:  noSuchVerb,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(move)
	return cmd
}

func moveSeat(cmd *cobra.Command, m raftfsm.MoveSeat, detach bool, timeout time.Duration) error {
	c := dial(cmd)
	defer c.Close()
	ctx, w := cmd.Context(), cmd.OutOrStdout()
	before, err := c.Overview(ctx)
	if err != nil {
		return err
	}
	done, err := c.MoveSeat(ctx, m)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "accepted at index %d\n", done.Index)
	if detach {
		return nil
	}
	plan := raftfsm.Plan{Changes: []raftfsm.Change{{Effect: raftfsm.EffectName, What: raftfsm.WhatSeat, Name: m.Seat}}}
	f := newFollower(c, w, before, plan, done.Index, timeout)
	if err := f.run(ctx); err != nil {
		return err
	}
	writeMove(w, before.State.Seats[m.Seat], f.last)
	return nil
}

// writeMove says what the new holder means for those who call.
func writeMove(w io.Writer, before raftfsm.Seat, o api.Overview) {
	now := o.State.Seats[before.Name]
	if now.Holder == before.Holder {
		return
	}
	say := func(text string) { fmt.Fprintln(w, strings.Join(wrap(text, columns), "\n")) }
	if !now.FailsOver() {
		say(fmt.Sprintf("%s does not fail over by itself: from now on its answers come from the data of %s", now.Name, home(o, now.Holder)))
	}
	if before.Want != "" && before.Want != now.Want {
		say(fmt.Sprintf("a push of a manifest that says holder: %s brings it back there", before.Want))
	}
}

// meshSeatNames are the seats that can be moved.
func meshSeatNames(o api.Overview) []string {
	var out []string
	for _, name := range seatNames(o) {
		if o.State.Seats[name].Scope == raftfsm.ScopeMesh {
			out = append(out, name)
		}
	}
	return out
}

// claimantNodes are where the seat could be moved to.
func claimantNodes(seat string) func(api.Overview) []string {
	return func(o api.Overview) []string {
		here := map[string]bool{}
		for _, claimant := range o.State.Claimants(seat) {
			here[home(o, claimant)] = true
		}
		return sorted(here)
	}
}
