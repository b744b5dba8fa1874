package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

func newEventsCommand() *cobra.Command {
	var follow bool
	var lines int
	cmd := withOutput(&cobra.Command{
		Use:   "events",
		Short: "What happened in the mesh, and by whom",
		Args:  takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			machine, err := asJSON(cmd)
			if err != nil {
				return err
			}
			o, err := look(cmd)
			if err != nil {
				return err
			}
			events := some(o.State.Events)
			events = events[max(0, len(events)-max(lines, 0)):]
			if !follow {
				return show(cmd, events, func(w io.Writer, _ bool) {
					for _, e := range events {
						writeEvent(w, e)
					}
				})
			}
			err = followEvents(cmd, o, events, machine)
			if errors.Is(err, context.Canceled) {
				return nil // the way to end -f
			}
			return err
		},
	})
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what happens from now on; with -o json one object a line")
	cmd.Flags().IntVarP(&lines, "lines", "n", 50, "how many of the newest")
	return cmd
}

// followEvents prints events, and those that come after until the command ends.
func followEvents(cmd *cobra.Command, o api.Overview, events []raftfsm.Event, machine bool) error {
	c := dial(cmd)
	defer c.Close()
	w := cmd.OutOrStdout()
	for {
		for _, e := range events {
			if !machine {
				writeEvent(w, e)
			} else if err := writeJSON(w, e, ""); err != nil {
				return err
			}
		}
		index := o.Index
		var err error
		if o, err = c.Newer(cmd.Context(), index, api.MaxWait); err != nil {
			return err
		}
		events = nil
		for _, e := range o.State.Events {
			if e.Index > index {
				events = append(events, e)
			}
		}
		if len(events) > 0 && len(events) == len(o.State.Events) {
			fmt.Fprintln(cmd.ErrOrStderr(), "meshd: more happened than is kept; some events were not seen")
		}
	}
}

func writeEvent(w io.Writer, e raftfsm.Event) {
	t := table{state: -1, rows: [][]string{{e.Time.Local().Format("2006-01-02 15:04:05"), e.Actor, strings.TrimSpace(e.Text)}}}
	t.write(w, "", false)
}
