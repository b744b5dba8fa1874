package cli

import (
	"fmt"

	"github.com/spf13/cobra"
)

func newLeaveCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "leave",
		Short: "Take this machine out of its mesh",
		Long: `Take this machine out of its mesh: what runs here ends, its logins elsewhere are withdrawn, and its
identity never comes back. The data of services on this machine stays.

The seats that it answers are handed over before that, and no call is refused. It is refused where
a seat would have nobody: no other node that claims it has a lease, or its failover is manual.`,
		Args: takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := dial(cmd)
			defer c.Close()
			if err := c.Leave(cmd.Context(), force); err != nil {
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "this machine has left the mesh")
			return err
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "leave although seats go dark with this machine")
	return cmd
}
