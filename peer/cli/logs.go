package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"meshd/peer/api"
)

func newLogsCommand() *cobra.Command {
	var follow bool
	var lines int
	cmd := &cobra.Command{
		Use:   "logs ASSIGNMENT",
		Short: "What an assignment's process printed, wherever it runs",
		Long: `What an assignment's process printed, wherever it runs. A module's name will do where the module
has one assignment.`,
		Args:              takes(1, 1),
		ValidArgsFunction: completeNames(moduleNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := overview(cmd)
			if err != nil {
				return err
			}
			name, err := oneAssignment(o, args[0])
			if err != nil {
				return err
			}
			if o.State.Modules[o.State.Assignments[name].Module].Run.External() {
				return &api.Error{Code: "external", Text: fmt.Sprintf("%s is external: the mesh starts no process for it, and has no log of one", name), Remedy: "look where it is run"}
			}
			c := dial(cmd)
			defer c.Close()
			out := &counter{w: cmd.OutOrStdout()}
			err = c.Logs(cmd.Context(), name, lines, follow, out)
			switch {
			case errors.Is(err, context.Canceled):
				return nil // the way to end -f
			case err == nil && out.n == 0 && lines > 0:
				fmt.Fprintln(cmd.ErrOrStderr(), name+" has not printed anything yet")
			}
			return err
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what it prints from now on")
	cmd.Flags().IntVarP(&lines, "lines", "n", 100, "how many of the newest lines")
	return cmd
}

// counter counts the bytes that it passes on.
type counter struct {
	w io.Writer
	n int
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += n
	return n, err
}

// oneAssignment finds the one assignment that is meant.
func oneAssignment(o api.Overview, name string) (string, error) {
	if _, ok := o.State.Assignments[name]; ok {
		return name, nil
	}
	switch all := runs(o, name); len(all) {
	case 0:
		return "", unknown("assignment or module", name, moduleNames(o))
	case 1:
		return all[0], nil
	default:
		return "", &api.Error{
			Code: "ambiguous", Text: fmt.Sprintf("module %s has %d assignments, and a log is of one", name, len(all)), Remedy: "write one of " + list(all), Candidates: all,
		}
	}
}
