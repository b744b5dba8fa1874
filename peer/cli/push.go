package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// pushOptions are the flags of push.
type pushOptions struct {
	detach  bool
	pending bool
	at      uint64
	timeout time.Duration
}

func newPushCommand() *cobra.Command {
	var opts pushOptions
	cmd := &cobra.Command{
		Use:   "push FILE...",
		Short: "Make these files what is desired, and follow until it is so",
		Long: `Print the plan, commit it, and follow hop by hop until every binding that it touches is in use and
every process runs. A push adds and changes; leaving something out removes nothing. It converges
whether or not this command waits. FILE is a manifest, - is standard input.
Exit code 0 ready, 2 accepted and still waiting, 1 refused.`,
		Args: takes(1, -1),
		RunE: func(cmd *cobra.Command, files []string) error { return push(cmd, files, opts) },
	}
	cmd.Flags().BoolVar(&opts.detach, "detach", false, "do not follow")
	cmd.Flags().BoolVar(&opts.pending, "pending", false, "accept a named provider or holder that is not there yet")
	cmd.Flags().Uint64Var(&opts.at, "at", 0, "refuse if the mesh has changed since the meshd plan that showed this number")
	cmd.Flags().DurationVar(&opts.timeout, "timeout", 0, "how long to follow (default the largest ready-within of what is pushed)")
	return cmd
}

func push(cmd *cobra.Command, files []string, opts pushOptions) error {
	m, err := load(cmd, files)
	if err != nil {
		return err
	}
	c := dial(cmd)
	defer c.Close()
	ctx, w := cmd.Context(), cmd.OutOrStdout()
	before, plan, committed, err := opts.commit(ctx, c, m.Documents, w)
	if err != nil {
		return locate(m, err)
	}
	if opts.detach {
		return nil
	}
	f := newFollower(c, w, before, plan.Plan, committed.Index, opts.timeout)
	f.goal.touches = touches(m.Documents)
	return f.run(ctx)
}

// replans is how often a push is planned again: a mesh that is pushed to more often
// than that while one plan is read has a quarrel to settle.
const replans = 5

// commit plans and commits, and says so. A plan that the mesh has moved on from is
// made again, unless the user gave an index: then somebody read a plan, and this
// would not be that one.
func (opts pushOptions) commit(ctx context.Context, c *api.Client, docs raftfsm.Documents, w io.Writer) (before api.Overview, plan api.Plan, done api.Committed, err error) {
	for try := 0; ; try++ {
		plan, err = c.Plan(ctx, api.Change{Push: &api.Push{Documents: docs, Pending: opts.pending, At: opts.at}})
		if err != nil {
			return before, plan, done, err
		}
		if before, err = c.Overview(ctx); err != nil {
			return before, plan, done, err
		}
		writePlan(w, before, plan)
		if len(plan.Changes) == 0 && current(before) { // else a leader says whether it is so
			return before, plan, api.Committed{Index: before.Index}, nil
		}
		done, err = c.Push(ctx, api.Push{Documents: docs, Pending: opts.pending, At: plan.At})
		var e *api.Error
		switch {
		case err == nil:
			fmt.Fprintf(w, "accepted at index %d\n", done.Index)
			return before, plan, done, nil
		case opts.at != 0 || try == replans || !errors.As(err, &e) || e.Code != "stale-plan":
			return before, plan, done, err
		}
		fmt.Fprintln(w, "the mesh was changed meanwhile; planned again:")
	}
}

// touches says which assignments the documents speak of, changed or not.
func touches(docs raftfsm.Documents) func(raftfsm.Assignment) bool {
	modules, named, nodes := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, m := range docs.Modules {
		modules[m.Name] = true
	}
	for _, a := range docs.Assigns {
		named[a.As] = a.As != ""
		for _, n := range a.Nodes {
			nodes[a.Module+"@"+n] = true
		}
		modules[a.Module] = modules[a.Module] || a.All
	}
	return func(a raftfsm.Assignment) bool { return modules[a.Module] || named[a.Name] || nodes[a.Name] }
}
