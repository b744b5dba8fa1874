package cli

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
)

func newVerifyCommand() *cobra.Command {
	return withOutput(&cobra.Command{
		Use:   "verify",
		Short: "Compare who answers each seat with who is named",
		Long: `Ask every node which seats it announces, ask this node's server who is subscribed, and compare with
whom the log names. A difference is what two looks, a second apart, both find: one look may fall into
a handover. The nodes do the same each 30 s; see meshd events and meshd status.
Exit code 3 on a difference; else 1 where some node could not be asked, so that nobody knows; else 0.`,
		Args: takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := dial(cmd)
			defer c.Close()
			v, err := c.Verify(cmd.Context())
			if err != nil {
				return err
			}
			err = show(cmd, v, func(w io.Writer, colour bool) {
				t := table{heads: []string{"NODE", "SEAT", "DIFFERENCE"}, state: -1}
				for _, f := range v.Findings {
					t.rows = append(t.rows, []string{f.Node, f.Seat, f.Text})
				}
				switch {
				case len(t.rows) > 0:
					t.write(w, "", colour)
				case v.Problem == "":
					io.WriteString(w, "every seat is answered by who is named, and by nobody else\n") // w is memory
				}
			})
			switch {
			case err != nil:
				return err
			case len(v.Findings) > 0:
				if v.Problem != "" {
					fmt.Fprintln(cmd.ErrOrStderr(), "meshd:", v.Problem)
				}
				return exit(exitDiffers)
			case v.Problem != "":
				return errors.New(v.Problem)
			}
			return nil
		},
	})
}
