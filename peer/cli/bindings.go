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

func newBindingsCommand() *cobra.Command {
	return withOutput(&cobra.Command{
		Use:   "bindings [NAME]",
		Short: "Which consumer is bound to which provider, and how far it is; with a name, its whole story",
		Long: `Which consumer is bound to which provider, and how far it is. NAME is a binding (shop@gamma/db),
a consumer or a module; its whole story has every hop with the machine that makes it, and what
holds it up.`,
		Args:              takes(0, 1),
		ValidArgsFunction: completeNames(bindingNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := look(cmd)
			if err != nil {
				return err
			}
			rows := bindingRows(o)
			if len(args) == 0 {
				return show(cmd, rows, func(w io.Writer, colour bool) { bindingTable(rows).write(w, "", colour) })
			}
			rows = slices.DeleteFunc(rows, func(r bindingRow) bool { return !slices.Contains([]string{r.Binding, r.Consumer, r.Module}, args[0]) })
			if len(rows) == 0 && !leaving(o, args[0]) {
				return unknown("binding or consumer", args[0], bindingNames(o))
			}
			stories := []bindingStory{}
			for _, r := range rows {
				stories = append(stories, tellBinding(o, o.State.Bindings[r.Binding], detailOf(cmd, r.Binding)))
			}
			ended := withdrawalsOf(o, args[0])
			return show(cmd, stories, func(w io.Writer, _ bool) {
				for _, s := range stories {
					s.write(w, o)
				}
				problemTable(o, ended).write(w, "", false)
			})
		},
	})
}

// leaving reports whether logins of the name are still to be ended.
func leaving(o api.Overview, name string) bool { return len(withdrawalsOf(o, name)) > 0 }

// withdrawalsOf lists the withdrawals of a binding or of a consumer's bindings.
func withdrawalsOf(o api.Overview, name string) []problem {
	var out []problem
	for _, id := range sorted(o.State.Withdrawals) {
		if b := o.State.Withdrawals[id].Binding; b == name || strings.HasPrefix(b, name+"/") {
			out = append(out, withdrawalProblem(o, id))
		}
	}
	return out
}

// bindingRow is one binding.
type bindingRow struct {
	Binding     string    `json:"binding"`
	Consumer    string    `json:"consumer"`
	Requirement string    `json:"requirement"`
	Module      string    `json:"module"`
	Kind        string    `json:"kind"`
	Provider    string    `json:"provider"`
	Node        string    `json:"node"` // of the provider
	Phase       string    `json:"phase"`
	Since       time.Time `json:"since"`
	Ready       bool      `json:"ready"` // it is in use, or may still take its time
	Trouble     *why      `json:"trouble,omitempty"`
}

func bindingRows(o api.Overview) []bindingRow {
	rows := []bindingRow{}
	for _, id := range sorted(o.State.Bindings) {
		b := o.State.Bindings[id]
		r := bindingRow{
			Binding: id, Consumer: b.Consumer, Requirement: b.Requirement, Module: o.State.Assignments[b.Consumer].Module, Kind: b.Kind,
			Provider: b.Provider, Phase: string(b.Phase()), Since: b.Since,
			Ready: b.Phase() == raftfsm.PhaseInUse || !late(o, b.Since, readyWithin(o, b.Consumer)),
		}
		if b.Provider != "" {
			r.Node = home(o, b.Provider)
		}
		if w := explain(o, b); w.Text != "" {
			r.Trouble = &w
		}
		rows = append(rows, r)
	}
	return rows
}

func bindingTable(rows []bindingRow) table {
	t := table{heads: []string{"BINDING", "PHASE", "PROVIDER", "KIND", "WAITS FOR"}, state: 1}
	for _, r := range rows {
		provider, waits := "-", ""
		if r.Provider != "" {
			provider = r.Provider + " on " + r.Node
		}
		if r.Trouble != nil {
			waits = r.Trouble.Text
		}
		t.rows = append(t.rows, []string{r.Binding, r.Phase, provider, r.Kind, waits})
	}
	return t
}

// hop is one step of a binding's life, and the machine that makes it.
type hop struct {
	Phase string `json:"phase"`
	Node  string `json:"node"`
	State string `json:"state"` // done, now for the one that is to be made, or later
}

// bindingStory is all that is known of one binding.
type bindingStory struct {
	bindingRow
	Naming   string          `json:"naming,omitempty"`
	Chosen   string          `json:"chosen,omitempty"`
	Proof    string          `json:"proof"`
	Resource string          `json:"resource,omitempty"` // physical name
	Owner    string          `json:"owner,omitempty"`
	Logins   []login         `json:"logins"`
	Hops     []hop           `json:"hops"`
	Within   float64         `json:"readyWithin"` // seconds
	Tries    []api.Try       `json:"tries"`
	Unasked  string          `json:"unasked,omitempty"` // why some nodes could not be asked
	binding  raftfsm.Binding // what it is the story of
}

// login is one generation of a credential, without its secret.
type login struct {
	Generation uint64 `json:"generation"`
	Login      string `json:"login"`
	Address    string `json:"address"`
	TLS        string `json:"tls"`
	Minted     bool   `json:"minted"`
	Delivered  bool   `json:"delivered"`
	Healthy    bool   `json:"healthy"`
	Seen       bool   `json:"seen"`
}

func tellBinding(o api.Overview, b raftfsm.Binding, d api.Detail) bindingStory {
	s := bindingStory{Naming: b.Naming, Chosen: b.Chosen, Proof: b.Proof, Logins: []login{}, Hops: hops(o, b), Unasked: d.Problem, binding: b}
	for _, r := range bindingRows(o) {
		if r.Binding == b.ID() {
			s.bindingRow = r
		}
	}
	s.Within = readyWithin(o, b.Consumer).Seconds()
	if res, ok := o.State.Resources[b.Resource]; ok {
		s.Resource, s.Owner = res.Name, res.Owner
	}
	for _, c := range b.Credentials {
		s.Logins = append(s.Logins, login{
			Generation: c.Generation, Login: c.Login, Address: fmt.Sprintf("%s:%d", c.Address.Host, c.Address.Port), TLS: c.Address.TLS,
			Minted: c.Minted, Delivered: c.Delivered, Healthy: c.Healthy, Seen: c.Seen,
		})
	}
	mine := about(b)
	s.Tries = slices.DeleteFunc(some(d.Tries), func(t api.Try) bool { return !mine(t) })
	return s
}

// hops are the steps from waiting to in-use, each with its machine.
func hops(o api.Overview, b raftfsm.Binding) []hop {
	provider, consumer := home(o, b.Provider), home(o, b.Consumer)
	proof := provider
	if b.Proof != raftfsm.ProofLogin {
		proof = consumer
	}
	all := []hop{
		{Phase: string(raftfsm.PhaseWaiting), Node: provider}, {Phase: string(raftfsm.PhaseStaged), Node: provider},
		{Phase: string(raftfsm.PhaseMinted), Node: provider}, {Phase: string(raftfsm.PhaseDelivered), Node: consumer},
		{Phase: string(raftfsm.PhaseInUse), Node: proof},
	}
	now := b.Phase().Rank()
	for i := range all {
		switch rank := raftfsm.Phase(all[i].Phase).Rank(); {
		case rank <= now:
			all[i].State = "done"
		case rank == now+1 && b.Provider != "":
			all[i].State = "now"
		default:
			all[i].State = "later"
		}
	}
	return all
}

func (s bindingStory) write(w io.Writer, o api.Overview) {
	b := s.binding
	var out story
	switch {
	case b.Provider == "":
		out.add("needs", "%s", s.Kind)
	default:
		out.add("needs", "%s, bound to %s on %s (%s)", s.Kind, s.Provider, s.Node, chosen(b))
	}
	if s.Resource != "" {
		out.add("works on", "%s, the data of %s", s.Resource, s.Owner)
	}
	for _, l := range s.Logins {
		out.add("login", "%s, generation %d, at %s, tls %s", l.Login, l.Generation, l.Address, l.TLS)
	}
	for i, h := range s.Hops {
		label := ""
		if i == 0 {
			label = "hops"
		}
		node := h.Node
		if node == "" {
			node = "-"
		}
		line := fmt.Sprintf("%-9s  %-5s  on %s", h.Phase, h.State, node)
		if h.State == "now" {
			line += ", for " + ago(o.Now, s.Since)
		}
		out.lines = append(out.lines, []string{label, line})
	}
	if s.Trouble != nil {
		out.add("waits for", "%s; for %s", s.Trouble.Text, ago(o.Now, s.Trouble.Since))
	}
	out.addTries(o.Now, s.Tries)
	if s.Unasked != "" {
		out.add("not asked", "%s", s.Unasked)
	}
	out.add("ready", "%s", readiness(s))
	out.write(w, s.Binding)
}

func readiness(s bindingStory) string {
	switch {
	case s.binding.Phase() == raftfsm.PhaseInUse:
		return "yes, proven by " + s.Proof
	case s.Ready:
		return fmt.Sprintf("not yet; it may take %s", span(time.Duration(s.Within*float64(time.Second))))
	}
	return fmt.Sprintf("no: it takes longer than the %s that it may", span(time.Duration(s.Within*float64(time.Second))))
}

// chosen says by which rule the provider was taken.
func chosen(b raftfsm.Binding) string {
	switch b.Chosen {
	case raftfsm.ChosenOverride:
		return "by bind: in its assignment"
	case raftfsm.ChosenProvider:
		return "by provider: in its module"
	case raftfsm.ChosenNode:
		return "by node: in its module"
	case raftfsm.ChosenLocal:
		return "the only one on its own node"
	case raftfsm.ChosenDefault:
		return "the declared default"
	case raftfsm.ChosenSeat:
		return "the holder of the seat that delivers it"
	}
	return b.Chosen
}
