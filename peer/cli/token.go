package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

func newTokenCommand() *cobra.Command {
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "token",
		Short: "Make a join token: it lets one machine in, once",
		Args:  takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := dial(cmd)
			defer c.Close()
			token, err := c.Token(cmd.Context(), ttl)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "It is a secret, lets one machine in, and is good for %s. On that machine: meshd join TOKEN\n", span(ttl))
			_, err = fmt.Fprintln(cmd.OutOrStdout(), token)
			return err
		},
	}
	cmd.Flags().DurationVar(&ttl, "ttl", time.Hour, "how long it is good for")
	return cmd
}
