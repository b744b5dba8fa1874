package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// why is what something waits for: on which machine, at what step, and in one
// sentence. A why without a text is no complaint.
type why struct {
	Node  string    `json:"node,omitempty"` // the machine that has to act
	Step  string    `json:"step,omitempty"`
	Class string    `json:"class,omitempty"`
	Text  string    `json:"text,omitempty"`
	Since time.Time `json:"since,omitzero"`
}

// explain says why the binding is not in use, or what is wrong although it is.
// It is a pure function of what one node knows. The first cause wins: a node
// that is away explains a service that does not answer, and not the reverse.
func explain(o api.Overview, b raftfsm.Binding) why {
	w := cause(o, b)
	if w.Text != "" && w.Since.IsZero() {
		w.Since = b.Since
	}
	return w
}

func cause(o api.Overview, b raftfsm.Binding) why {
	switch b.Phase() {
	case raftfsm.PhaseUnbound:
		return explainUnbound(o, b)
	case raftfsm.PhaseWaiting:
		return first(providerSide(o, b), why{Node: home(o, b.Provider), Text: fmt.Sprintf("%s is staging a login for it", b.Provider)})
	case raftfsm.PhaseStaged:
		return first(providerSide(o, b), why{Node: home(o, b.Provider), Text: fmt.Sprintf("%s is making its login", b.Provider)})
	case raftfsm.PhaseMinted:
		return first(consumerSide(o, b), why{Node: home(o, b.Consumer), Text: fmt.Sprintf("%s is trying its login", home(o, b.Consumer))})
	case raftfsm.PhaseDelivered:
		return explainDelivered(o, b)
	}
	return first(providerSide(o, b), consumerSide(o, b)) // in use, and perhaps in a bad condition
}

// first is the first that complains.
func first(all ...why) why {
	for _, w := range all {
		if w.Text != "" {
			return w
		}
	}
	return why{}
}

// explainUnbound names what a pending requirement waits for.
func explainUnbound(o api.Overview, b raftfsm.Binding) why {
	w := why{Node: home(o, b.Consumer), Text: b.Refusal}
	how, name, named := strings.Cut(b.Naming, " ")
	if !named {
		return w
	}
	if how == "node" {
		if _, known := o.State.NodeNamed(name); !known {
			w.Text = fmt.Sprintf("node %s is not there yet", name)
		} else if w.Text == "" {
			w.Text = fmt.Sprintf("node %s has no %s yet", name, b.Kind)
		}
		return w
	}
	if _, known := o.State.Assignments[name]; !known {
		w.Text = name + " is not there yet"
	}
	return w
}

// providerSide is what is wrong with the provider, or with what it does for b.
func providerSide(o api.Overview, b raftfsm.Binding) why {
	return first(providerTrouble(o, b.Provider, b.Kind, "its provider's node %s is away"), trouble(b.AtProvider, home(o, b.Provider)))
}

// providerTrouble is what is wrong with a provider as a whole; away is the
// sentence about its node.
func providerTrouble(o api.Overview, provider, kind, away string) why {
	node := home(o, provider)
	status, looked := o.State.Providers[raftfsm.ProviderID(provider, kind)]
	switch {
	case !up(o, node):
		return why{Node: node, Text: fmt.Sprintf(away, node)}
	case !looked:
		return why{Node: node, Text: fmt.Sprintf("%s has not looked at %s yet", node, provider)}
	case status.Ready:
		return why{}
	case status.Trouble == nil:
		return why{Node: node, Text: provider + " is not ready", Since: status.Since}
	}
	t := status.Trouble
	return why{Node: node, Step: t.Step, Class: t.Class, Since: t.Since, Text: fmt.Sprintf("%s is not ready: %s fails on %s (%s)", provider, t.Step, node, t.Class)}
}

// consumerSide is what is wrong on the consumer's node.
func consumerSide(o api.Overview, b raftfsm.Binding) why {
	node := home(o, b.Consumer)
	if !up(o, node) {
		return why{Node: node, Text: fmt.Sprintf("its own node %s is away", node)}
	}
	return trouble(b.AtConsumer, node)
}

func trouble(t *raftfsm.Trouble, node string) why {
	if t == nil {
		return why{}
	}
	return why{Node: node, Step: t.Step, Class: t.Class, Since: t.Since, Text: fmt.Sprintf("%s fails on %s (%s)", t.Step, node, t.Class)}
}

// explainDelivered says what proof is missing.
func explainDelivered(o api.Overview, b raftfsm.Binding) why {
	node := home(o, b.Consumer)
	waits := why{Node: node, Text: "no session of its login was seen yet"}
	switch {
	case b.Proof == raftfsm.ProofHealth:
		waits.Text = fmt.Sprintf("the health check of %s has not passed yet", b.Consumer)
	case late(o, b.Since, readyWithin(o, b.Consumer)):
		waits.Text += "; if its sessions are shorter than a second, say proof: health or proof: delivered in the requirement"
	}
	all := []why{consumerSide(o, b), sibling(o, b), processTrouble(o, b.Consumer)}
	if b.Proof == raftfsm.ProofLogin {
		all = append(all, providerSide(o, b))
	}
	return first(append(all, waits)...)
}

// sibling names another binding that the consumer's process waits for: it is
// started once all of them are delivered.
func sibling(o api.Overview, b raftfsm.Binding) why {
	a := o.State.Assignments[b.Consumer]
	m := o.State.Modules[a.Module]
	if m.Run.External() || a.Report.State != "" && a.Report.State != "stopped" {
		return why{}
	}
	for _, req := range slices.Sorted(maps.Keys(m.Requires)) {
		other, ok := o.State.Bindings[raftfsm.BindingID(b.Consumer, req)]
		if ok && other.Phase().Rank() < raftfsm.PhaseDelivered.Rank() {
			return why{Node: home(o, b.Consumer), Text: fmt.Sprintf("%s is not started before %s is delivered", b.Consumer, other.ID())}
		}
	}
	return why{}
}

// explainWithdrawal says why logins are not ended yet.
func explainWithdrawal(o api.Overview, w raftfsm.Withdrawal) why {
	node := home(o, w.Provider)
	out := first(
		providerTrouble(o, w.Provider, w.Kind, "%s is away, and its logins there end once it is back"),
		trouble(w.Trouble, node),
		why{Node: node, Text: w.Provider + " is ending its logins"},
	)
	if out.Since.IsZero() {
		out.Since = w.Since
	}
	return out
}

// home is the name of the assignment's node; "" for an assignment that is gone.
func home(o api.Overview, assignment string) string {
	a, ok := o.State.Assignments[assignment]
	if !ok {
		return ""
	}
	return o.State.NodeName(a.Node)
}

// up reports whether the node seems alive. The one that answers is.
func up(o api.Overview, node string) bool { return node == o.Self || o.Alive[node] }
