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

func newProvidersCommand() *cobra.Command {
	return withOutput(&cobra.Command{
		Use:               "providers [NAME]",
		Short:             "What provides a kind, where, and for whom; with a name, its whole story",
		Args:              takes(0, 1),
		ValidArgsFunction: completeNames(providerNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := look(cmd)
			if err != nil {
				return err
			}
			rows := providerRows(o)
			if len(args) == 0 {
				return show(cmd, rows, func(w io.Writer, colour bool) { providerTable(rows).write(w, "", colour) })
			}
			rows = slices.DeleteFunc(rows, func(r providerRow) bool { return r.Provider != args[0] && r.Provider+"/"+r.Kind != args[0] })
			if len(rows) == 0 {
				return unknown("provider", args[0], providerNames(o))
			}
			stories := make([]providerStory, len(rows))
			detail := detailOf(cmd, rows[0].Provider)
			for i, r := range rows {
				stories[i] = tellProvider(o, r, detail)
			}
			return show(cmd, stories, func(w io.Writer, _ bool) {
				for _, s := range stories {
					s.write(w, o)
				}
			})
		},
	})
}

// providerRow is one provider of one kind.
type providerRow struct {
	Provider  string    `json:"provider"`
	Kind      string    `json:"kind"`
	Node      string    `json:"node"`
	State     string    `json:"state"` // ready, not ready, away or unknown
	Default   bool      `json:"default"`
	Consumers []string  `json:"consumers"` // bindings
	Since     time.Time `json:"since,omitzero"`
	Trouble   *why      `json:"trouble,omitempty"`
}

func providerRows(o api.Overview) []providerRow {
	rows := []providerRow{}
	for _, name := range sorted(o.State.Assignments) {
		a := o.State.Assignments[name]
		for _, kind := range sorted(o.State.Modules[a.Module].Provides) {
			id := raftfsm.ProviderID(name, kind)
			status, looked := o.State.Providers[id]
			r := providerRow{Provider: name, Kind: kind, Node: home(o, name), State: "not ready", Default: slices.Contains(a.Default, kind), Since: status.Since}
			switch {
			case !up(o, r.Node):
				r.State = "away"
			case !looked:
				r.State = "unknown"
			case status.Ready:
				r.State = "ready"
			}
			if p := providerProblem(o, id); p.Text != "" {
				r.Trouble = &p.why
			}
			r.Consumers = slices.DeleteFunc(some(o.State.ConsumersOf(name)), func(b string) bool { return o.State.Bindings[b].Kind != kind })
			rows = append(rows, r)
		}
	}
	return rows
}

func providerTable(rows []providerRow) table {
	t := table{heads: []string{"PROVIDER", "KIND", "NODE", "STATE", "DEFAULT", "CONSUMERS"}, state: 3}
	for _, r := range rows {
		isDefault := ""
		if r.Default {
			isDefault = "default"
		}
		t.rows = append(t.rows, []string{r.Provider, r.Kind, r.Node, r.State, isDefault, fmt.Sprint(len(r.Consumers))})
	}
	return t
}

// providerStory is all that is known of one provider.
type providerStory struct {
	providerRow
	Address     raftfsm.Address `json:"address"`
	Retained    []string        `json:"retained"`
	Withdrawals []problem       `json:"withdrawals"`
	Tries       []api.Try       `json:"tries"`
	Unasked     string          `json:"unasked,omitempty"` // why some nodes could not be asked
}

func tellProvider(o api.Overview, r providerRow, d api.Detail) providerStory {
	id := raftfsm.ProviderID(r.Provider, r.Kind)
	s := providerStory{providerRow: r, Address: o.State.Providers[id].Address, Retained: []string{}, Withdrawals: []problem{}, Unasked: d.Problem}
	for _, res := range o.State.Retained() {
		if x := o.State.Resources[res]; x.Provider == r.Provider && x.Kind == r.Kind {
			s.Retained = append(s.Retained, res)
		}
	}
	for _, key := range sorted(o.State.Withdrawals) {
		if w := o.State.Withdrawals[key]; w.Provider == r.Provider && w.Kind == r.Kind {
			s.Withdrawals = append(s.Withdrawals, withdrawalProblem(o, key))
		}
	}
	s.Tries = concerning(d.Tries, id)
	return s
}

func (s providerStory) write(w io.Writer, o api.Overview) {
	var out story
	out.add("provides", "%s", s.Kind)
	out.add("on", "%s", s.Node)
	state := s.State
	if !s.Since.IsZero() {
		state += ", for " + ago(o.Now, s.Since)
	}
	out.add("state", "%s", state)
	if s.Trouble != nil {
		out.add("because", "%s", s.Trouble.Text)
	}
	if s.Address.Host != "" {
		out.add("address", "%s:%d, tls %s", s.Address.Host, s.Address.Port, s.Address.TLS)
	}
	if s.Default {
		out.add("default", "of %s in this mesh", s.Kind)
	}
	for _, id := range s.Consumers {
		out.add("consumer", "%s, %s", id, o.State.Bindings[id].Phase())
	}
	for _, p := range s.Withdrawals {
		out.add("withdrawing", "%s, for %s: %s", p.Name, ago(o.Now, p.Since), p.Text)
	}
	if len(s.Retained) > 0 {
		out.add("retained", "%s", strings.Join(s.Retained, ", "))
	}
	out.addTries(o.Now, s.Tries)
	if s.Unasked != "" {
		out.add("not asked", "%s", s.Unasked)
	}
	out.write(w, s.Provider)
}
