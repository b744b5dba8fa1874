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
				return show(cmd, rows, func(w io.Writer, colour bool) {
					seatTable(o, rows).write(w, "", colour)
					for _, r := range rows {
						if r.Text != "" {
							fmt.Fprintln(w, strings.Join(wrap(fmt.Sprintf("%s is %s: %s", r.Seat, r.State, r.Text), columns-2), "\n  "))
						}
					}
				})
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
	State     string    `json:"state"` // answered, away, dark, unknown, or "per node": see seatState
	Holder    string    `json:"holder,omitempty"`
	Node      string    `json:"node,omitempty"`
	Epoch     uint64    `json:"epoch,omitempty"`
	Session   uint64    `json:"session,omitempty"` // of the lease under which Holder may answer; 0: nobody may
	Since     time.Time `json:"since,omitzero"`    // of Holder, Epoch or Session
	Want      string    `json:"want,omitempty"`
	Delivers  string    `json:"delivers,omitempty"`
	FailsOver bool      `json:"failsOver"`
	Claimants []string  `json:"claimants"`
	Verbs     []string  `json:"verbs"`
	Text      string    `json:"text,omitempty"` // why it is not answered, or may not be
}

func seatRows(o api.Overview) []seatRow {
	rows := []seatRow{}
	for _, name := range sorted(o.State.Seats) {
		s := o.State.Seats[name]
		r := seatRow{Seat: name, Scope: s.Scope, Verbs: some(s.Verbs), Claimants: some(o.State.Claimants(name)), Since: s.Since}
		if s.Scope == raftfsm.ScopeMesh {
			r.Holder, r.Epoch, r.Session, r.Want, r.Delivers, r.FailsOver = s.Holder, s.Epoch, s.Session, s.Want, s.Delivers, s.FailsOver()
			r.Node = home(o, s.Holder)
		}
		r.State, r.Text = seatState(o, s)
		rows = append(rows, r)
	}
	return rows
}

// seatState says whether the seat is answered, as far as this node can tell: the log
// says who may, and only a leader whether the lease of that node lasts.
func seatState(o api.Overview, s raftfsm.Seat) (state, why string) {
	node := home(o, s.Holder)
	switch dark := o.State.Dark(s); {
	case s.Scope != raftfsm.ScopeMesh:
		return "per node", ""
	case dark != "":
		return "dark", dark
	case !current(o):
		return "unknown", fmt.Sprintf("%s on %s was the last that this node heard of, and no leader vouches for it here", s.Holder, node)
	case !up(o, node):
		return "away", fmt.Sprintf("%s does not answer the others; unless it renews its lease, that ends within moments", node)
	}
	return "answered", ""
}

func seatTable(o api.Overview, rows []seatRow) table {
	t := table{heads: []string{"SEAT", "STATE", "FOR", "HOLDER", "NODE", "EPOCH", "CLAIMANTS", "VERBS"}, state: 1}
	for _, r := range rows {
		holder, node, epoch, since := r.Holder, r.Node, "-", "-"
		if holder == "" {
			holder, node = "-", "-"
		}
		if r.Epoch > 0 {
			epoch = fmt.Sprint(r.Epoch)
		}
		if r.State == "answered" || r.State == "dark" {
			since = ago(o.Now, r.Since)
		}
		t.rows = append(t.rows, []string{r.Seat, r.State, since, holder, node, epoch, fmt.Sprint(len(r.Claimants)), strings.Join(r.Verbs, ", ")})
	}
	return t
}

func (r seatRow) write(w io.Writer, o api.Overview) {
	var out story
	out.add("scope", "%s", r.Scope)
	if r.Scope == raftfsm.ScopeMesh {
		holder := "nobody"
		if r.Holder != "" {
			holder = fmt.Sprintf("%s on %s, epoch %d", r.Holder, r.Node, r.Epoch)
		}
		if r.State == "answered" {
			out.add("answered by", "%s, for %s", holder, ago(o.Now, r.Since))
		} else {
			out.add("holder", "%s, for %s", holder, ago(o.Now, r.Since))
			out.add("state", "%s: %s", r.State, r.Text)
		}
		if r.Want != "" {
			out.add("wanted", "%s: it gets the seat whenever its node has a lease", r.Want)
		}
		successor := "another claimant, once the lease of its holder's node has ended"
		if !r.FailsOver {
			successor = fmt.Sprintf("nobody by itself: without its holder's node it is dark until meshd seat move %s NODE", r.Seat)
		}
		out.add("succeeded by", "%s", successor)
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
