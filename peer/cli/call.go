package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
)

func newCallCommand() *cobra.Command {
	var verbose bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "call TARGET [JSON]",
		Short: "Call a seat's verb or a module's tool",
		Long: `Call SEAT.VERB, NODE/SEAT.VERB or NODE/MODULE.TOOL through this machine's node and print the
reply. JSON is the request, {} if left out, - for standard input.`,
		Example: `  meshd call mesh-store.databases
  meshd call alpha/postgres.size '{"database": "shop"}'`,
		Args:              takes(1, 2),
		ValidArgsFunction: completeNames(targetNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			data, err := request(cmd, args)
			if err != nil {
				return err
			}
			c := dial(cmd)
			defer c.Close()
			reply, err := c.Call(cmd.Context(), args[0], data, timeout)
			if err != nil {
				return coded(err)
			}
			if verbose {
				from := "node " + reply.Node
				if reply.Seat != "" {
					from = fmt.Sprintf("seat %s, epoch %d, node %s", reply.Seat, reply.Epoch, reply.Node)
				}
				fmt.Fprintln(cmd.ErrOrStderr(), from)
			}
			_, err = cmd.OutOrStdout().Write(append(reply.Data, '\n'))
			return err
		},
	}
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "say on standard error who answered: seat, epoch, node")
	cmd.Flags().DurationVar(&timeout, "timeout", api.DefaultWithin, "how long to wait for the answer, at most 1m")
	return cmd
}

// maxRequest bounds what is sent, in bytes: what the bus carries.
const maxRequest = 1 << 20

// request is the JSON that is sent.
func request(cmd *cobra.Command, args []string) ([]byte, error) {
	data := []byte("{}")
	if len(args) == 2 {
		data = []byte(args[1])
	}
	if string(data) == "-" {
		var err error
		if data, err = io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxRequest+1)); err != nil {
			return nil, fmt.Errorf("read the request: %w", err)
		}
	}
	if len(data) > maxRequest {
		return nil, fmt.Errorf("too-large: the request has more than %d bytes; a seat is a control plane: send where the data is", maxRequest)
	}
	if data = bytes.TrimSpace(data); !json.Valid(data) {
		return nil, errors.New(`the request is not JSON; write it in single quotes: '{"key": "value"}'`)
	}
	return data, nil
}

// coded puts an error's code before its text, for scripts.
func coded(err error) error {
	var e *api.Error
	if !errors.As(err, &e) || e.Code == api.CodeNoNode {
		return err
	}
	with := *e
	with.Text = e.Code + ": " + e.Text
	return &with
}
