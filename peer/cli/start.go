package cli

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"

	"github.com/spf13/cobra"
)

func newStartCommand() *cobra.Command {
	var dir string
	var verbose bool
	cmd := &cobra.Command{
		Use:   "start",
		Short: "Run the node of this machine, in the foreground",
		Long:  "Run the node of this machine, in the foreground. It was made by meshd init or meshd join.\nWhat it supervises goes on running when it is stopped, and is taken over when it is started again.\nWhere it hears no leader it goes by its own record: what needs nobody else works, and nothing changes.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			abs, err := filepath.Abs(dir)
			if err != nil {
				return err
			}
			return foreground(cmd.Context(), place{abs}, cmd.OutOrStdout(), cmd.ErrOrStderr(), verbose)
		},
	}
	cmd.Flags().StringVar(&dir, "dir", defaultDir(), "data directory")
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "log what every part does")
	return cmd
}

// ownAddress is the address of this machine that others most likely reach: the
// first global one of an interface that is up.
func ownAddress() (string, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return "", fmt.Errorf("list the addresses of this machine: %w", err)
	}
	for _, a := range addrs {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() {
			return ip.IP.String(), nil
		}
	}
	return "", errors.New("this machine has no address that others could reach; give one with --advertise, or 127.0.0.1 for a mesh on this machine only")
}
