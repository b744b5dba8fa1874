package cli

import (
	"fmt"

	"github.com/spf13/cobra"
)

func newLeaveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "leave",
		Short: "Take this machine out of its mesh",
		Long: `Take this machine out of its mesh: what runs here ends, its logins elsewhere are withdrawn, and its
identity never comes back. The data of services on this machine stays.`,
		Args: takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := dial(cmd)
			defer c.Close()
			if err := c.Leave(cmd.Context()); err != nil {
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "this machine has left the mesh")
			return err
		},
	}
}
