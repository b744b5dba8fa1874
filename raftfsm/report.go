package raftfsm

import (
	"slices"
	"strings"
)

// report takes what a node saw. Every part is conditional on the state that it
// was made from: a part that no longer fits is dropped, and its node sees that
// in its next pass.
func (t *tx) report(c NodeReport) *Rejection {
	for _, p := range c.Providers {
		t.providerReport(p)
	}
	for _, s := range c.Staged {
		t.staged(s)
	}
	for _, m := range c.Marks {
		t.mark(m)
	}
	for _, w := range c.Withdrawn {
		t.withdrawn(w)
	}
	for _, r := range c.Troubles {
		t.trouble(r)
	}
	for _, p := range c.Processes {
		t.process(p)
	}
	return nil
}

// mine reports whether the assignment runs on the reporting node.
func (t *tx) mine(assignment string) bool {
	a, ok := t.Assignments[assignment]
	return ok && a.Node == t.h.Node
}

func (t *tx) providerReport(p ProviderReport) {
	name, kind, _ := strings.Cut(p.Provider, "/")
	if !t.provides(name, kind) || !t.mine(name) {
		return
	}
	old, was := t.Providers[p.Provider]
	put(t, t.Providers, p.Provider, ProviderStatus{
		Ready: p.Ready, Address: p.Address, Trouble: t.troubled(old.Trouble, p.Step, p.Class),
		Since: since(old.Since, t.h.Time, was && old.Ready == p.Ready),
	})
	switch {
	case p.Ready && !old.Ready:
		t.event("provider %s of %s is ready", name, kind)
	case !p.Ready && p.Class != "" && (old.Trouble == nil || old.Trouble.Class != p.Class):
		t.event("provider %s of %s is not ready: %s (%s)", name, kind, p.Step, p.Class)
	}
}

// troubled is the trouble after a report: its Since is kept while the class is.
func (t *tx) troubled(old *Trouble, step, class string) *Trouble {
	if class == "" {
		return nil
	}
	next := &Trouble{Step: step, Class: class, Since: t.h.Time}
	if old != nil && old.Class == class {
		next.Since = old.Since
	}
	return next
}

func (t *tx) staged(s Staged) {
	b, ok := t.Bindings[s.Binding]
	res := t.Resources[b.Resource]
	switch {
	case !ok, b.Resource != s.Resource, t.Assignments[b.Consumer].Node != s.To:
		return // it was re-bound or moved meanwhile, and could not be opened there
	case !t.mine(b.Provider), s.Generation != res.Last+1, len(b.Credentials) >= 2:
		return
	}
	res.Last = s.Generation
	put(t, t.Resources, b.Resource, res)
	b.Credentials = append(slices.Clone(b.Credentials), Credential{
		Generation: s.Generation, Login: loginName(t.Mesh.ID, b.Provider, s.Binding, s.Generation), Sealed: s.Sealed, Address: s.Address,
	})
	t.update(b)
}

func (t *tx) mark(m Mark) {
	b, ok := t.Bindings[m.Binding]
	if !ok || b.Resource != m.Resource {
		return
	}
	creds := slices.Clone(b.Credentials)
	for i := range creds {
		c := &creds[i]
		if c.Generation != m.Generation {
			continue
		}
		before := b.Phase()
		switch {
		case m.Fact == FactMinted && t.mine(b.Provider):
			c.Minted = true
			res := t.Resources[b.Resource]
			res.Made = true
			put(t, t.Resources, b.Resource, res)
			b.AtProvider = nil
		case m.Fact == FactSeen && t.mine(b.Provider) && c.Minted:
			c.Seen = true
		case m.Fact == FactDelivered && t.mine(b.Consumer) && c.Minted:
			c.Delivered = true
			b.AtConsumer = nil
		case m.Fact == FactHealthy && t.mine(b.Consumer) && c.Delivered:
			c.Healthy = true
		default:
			return
		}
		b.Credentials = creds
		t.update(b)
		if after := b.Phase(); after != before {
			t.event("%s is %s", m.Binding, after)
		}
		return
	}
}

func (t *tx) withdrawn(w Withdrawn) {
	old, ok := t.Withdrawals[w.ID]
	if !ok || !t.mine(old.Provider) {
		return
	}
	drop(t, t.Withdrawals, w.ID)
	t.event("logins of %s at %s no longer work, %d sessions ended, the data is kept", old.Binding, old.Provider, w.Ended)
}

func (t *tx) trouble(r TroubleReport) {
	if w, ok := t.Withdrawals[r.Withdrawal]; ok && t.mine(w.Provider) {
		w.Trouble = t.troubled(w.Trouble, r.Step, r.Class)
		put(t, t.Withdrawals, r.Withdrawal, w)
		return
	}
	b, ok := t.Bindings[r.Binding]
	if !ok {
		return
	}
	side, at := &b.AtConsumer, b.Consumer
	if r.Side == SideProvider {
		side, at = &b.AtProvider, b.Provider
	}
	if !t.mine(at) {
		return
	}
	old := *side
	*side = t.troubled(old, r.Step, r.Class)
	t.update(b)
	if r.Class != "" && (old == nil || old.Class != r.Class) {
		t.event("%s is held up at %s: %s (%s)", r.Binding, t.NodeName(t.Assignments[at].Node), r.Step, r.Class)
	}
}

func (t *tx) process(p ProcessReport) {
	a, ok := t.Assignments[p.Assignment]
	if !ok || !t.mine(p.Assignment) || a.Report.State == p.State && a.Report.Class == p.Class {
		return
	}
	a.Report = Report{State: p.State, Class: p.Class, Since: t.h.Time}
	put(t, t.Assignments, p.Assignment, a)
	t.event("%s is %s", p.Assignment, p.State)
}
