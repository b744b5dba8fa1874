package cli

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// completeNames completes the first argument with names that the node knows.
// Without a node there are none: a shell is no place for an error.
func completeNames(names func(api.Overview) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return known(cmd, names, prefix), cobra.ShellCompDirectiveNoFileComp
	}
}

// known asks the node for the names that begin with prefix.
func known(cmd *cobra.Command, names func(api.Overview) []string, prefix string) []string {
	ctx, cancel := context.WithTimeout(cmd.Context(), glanceWithin)
	defer cancel()
	c := dial(cmd)
	defer c.Close()
	o, err := c.Overview(ctx)
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(names(o), func(n string) bool { return !strings.HasPrefix(n, prefix) })
}

func nodeNames(o api.Overview) []string {
	var out []string
	for _, n := range nodesByName(o) {
		out = append(out, n.Name)
	}
	return out
}

func seatNames(o api.Overview) []string       { return sorted(o.State.Seats) }
func assignmentNames(o api.Overview) []string { return sorted(o.State.Assignments) }

func providerNames(o api.Overview) []string {
	var out []string
	for _, r := range providerRows(o) {
		out = append(out, r.Provider)
	}
	return slices.Compact(out)
}

// bindingNames are the bindings, and their consumers.
func bindingNames(o api.Overview) []string {
	out := sorted(o.State.Bindings)
	for _, b := range o.State.Bindings {
		out = append(out, b.Consumer)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// moduleNames are the modules, and their assignments.
func moduleNames(o api.Overview) []string {
	return append(sorted(o.State.Modules), assignmentNames(o)...)
}

// anyName is everything that has a name.
func anyName(o api.Overview) []string {
	out := slices.Concat(nodeNames(o), seatNames(o), moduleNames(o), sorted(o.State.Bindings))
	slices.Sort(out)
	return slices.Compact(out)
}

func targetNames(o api.Overview) []string {
	var out []string
	for _, r := range toolRows(o) {
		out = append(out, r.Target)
	}
	return out
}

// removable are the names of that sort of thing.
func removable(what string) func(api.Overview) []string {
	switch what {
	case raftfsm.WhatModule:
		return func(o api.Overview) []string { return sorted(o.State.Modules) }
	case raftfsm.WhatAssignment:
		return assignmentNames
	}
	return seatNames
}
