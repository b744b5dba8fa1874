package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

func newSeatsCommand() *cobra.Command {
	return withOutput(&cobra.Command{
		Use:               "seats [NAME]",
		Short:             "Who answers each seat; with a name, its whole story",
		Args:              takes(0, 1),
		ValidArgsFunction: completeNames(seatNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := look(cmd)
			if err != nil {
				return err
			}
			rows := seatRows(o)
			if len(args) == 0 {
				return show(cmd, rows, func(w io.Writer, colour bool) { seatTable(rows).write(w, "", colour) })
			}
			i := slices.IndexFunc(rows, func(r seatRow) bool { return r.Seat == args[0] })
			if i < 0 {
				return unknown("seat", args[0], seatNames(o))
			}
			return show(cmd, rows[i], func(w io.Writer, _ bool) { rows[i].write(w, o) })
		},
	})
}

// seatRow is one seat. A node seat has no holder: every claimant answers it on
// its own node.
type seatRow struct {
	Seat      string    `json:"seat"`
	Scope     string    `json:"scope"`
	State     string    `json:"state"` // held, away, dark, or "per node"
	Holder    string    `json:"holder,omitempty"`
	Node      string    `json:"node,omitempty"`
	Epoch     uint64    `json:"epoch,omitempty"`
	Since     time.Time `json:"since,omitzero"`
	Want      string    `json:"want,omitempty"`
	Delivers  string    `json:"delivers,omitempty"`
	FailsOver bool      `json:"failsOver"`
	Claimants []string  `json:"claimants"`
	Verbs     []string  `json:"verbs"`
	Text      string    `json:"text,omitempty"` // why it is dark
}

func seatRows(o api.Overview) []seatRow {
	rows := []seatRow{}
	for _, name := range sorted(o.State.Seats) {
		s := o.State.Seats[name]
		r := seatRow{Seat: name, Scope: s.Scope, State: "per node", Verbs: some(s.Verbs), Claimants: some(o.State.Claimants(name)), Since: s.Since}
		if s.Scope == raftfsm.ScopeMesh {
			r.Holder, r.Epoch, r.Want, r.Delivers, r.FailsOver = s.Holder, s.Epoch, s.Want, s.Delivers, s.FailsOver()
			r.Node = home(o, s.Holder)
			switch {
			case s.Holder == "":
				r.State, r.Text = "dark", dark(o, s)
			case !up(o, r.Node):
				r.State, r.Text = "away", fmt.Sprintf("the node of its holder %s is away", s.Holder)
				if !s.FailsOver() {
					r.Text += ", and it does not fail over by itself"
				}
			default:
				r.State = "held"
			}
		}
		rows = append(rows, r)
	}
	return rows
}

func seatTable(rows []seatRow) table {
	t := table{heads: []string{"SEAT", "STATE", "HOLDER", "NODE", "EPOCH", "CLAIMANTS", "VERBS"}, state: 1}
	for _, r := range rows {
		holder, node, epoch := r.Holder, r.Node, "-"
		if holder == "" {
			holder, node = "-", "-"
		}
		if r.Epoch > 0 {
			epoch = fmt.Sprint(r.Epoch)
		}
		t.rows = append(t.rows, []string{r.Seat, r.State, holder, node, epoch, fmt.Sprint(len(r.Claimants)), strings.Join(r.Verbs, ", ")})
	}
	return t
}

func (r seatRow) write(w io.Writer, o api.Overview) {
	var out story
	out.add("scope", "%s", r.Scope)
	if r.Scope == raftfsm.ScopeMesh {
		holder := "nobody"
		if r.Holder != "" {
			holder = r.Holder + " on " + r.Node
		}
		out.add("answered by", "%s, epoch %d, for %s", holder, r.Epoch, ago(o.Now, r.Since))
		if r.Text != "" {
			out.add("state", "%s: %s", r.State, r.Text)
		}
		if r.Want != "" {
			out.add("wanted", "%s", r.Want)
		}
		failover := "nobody by itself in this version: it goes dark when its holder's node is lost"
		if !r.FailsOver {
			failover = "nobody by itself: it goes dark when its holder's node is lost"
		}
		out.add("succeeded by", "%s", failover)
	}
	if r.Delivers != "" {
		out.add("delivers", "%s: its holder is the default provider", r.Delivers)
	}
	for _, c := range r.Claimants {
		out.add("claimant", "%s on %s", c, home(o, c))
	}
	out.add("verbs", "%s", list(r.Verbs))
	out.write(w, r.Seat)
}
