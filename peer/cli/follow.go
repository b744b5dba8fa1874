package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"meshd/peer/api"
	"meshd/raftfsm"
)

const (
	// glimpse is how long a wait for the next change lasts: what is no entry of
	// the log, such as a node that goes away, is seen within it.
	glimpse = time.Second
	// settle is how long a process that is to be restarted is not believed when
	// it says nothing new: a restart that is quicker than a report shows in no
	// entry. A node acts on an entry, and reports, within a fraction of this.
	settle = 2 * time.Second
	// regain is how soon a node that does not answer is asked again.
	regain = 200 * time.Millisecond
)

// goal is what a change is to come to.
type goal struct {
	touches   func(raftfsm.Assignment) bool // assignments to be ready; nil for none beside the changed
	changed   map[string]bool               // assignments that the plan changes, or a binding of
	restarts  map[string]raftfsm.Report     // those to be restarted, with what was last said of them
	withdrawn map[string]bool               // bindings whose logins are to be ended
	seats     map[string]bool               // seats that are to be held by whom the push names
	settled   bool                          // restarts that say nothing new are believed
}

func goalOf(before api.Overview, plan raftfsm.Plan) goal {
	g := goal{changed: map[string]bool{}, restarts: map[string]raftfsm.Report{}, withdrawn: map[string]bool{}, seats: map[string]bool{}}
	for _, c := range plan.Changes {
		switch c.What {
		case raftfsm.WhatAssignment:
			g.changed[c.Name] = true
			if c.Effect == raftfsm.EffectRestart {
				g.restarts[c.Name] = before.State.Assignments[c.Name].Report
			}
		case raftfsm.WhatSeat:
			g.seats[c.Name] = c.Effect == raftfsm.EffectName
		case raftfsm.WhatBinding:
			consumer, _, _ := strings.Cut(c.Name, "/")
			g.changed[consumer] = true
			if c.Effect == raftfsm.EffectWithdraw {
				g.withdrawn[c.Name] = true
			}
		}
	}
	return g
}

// wants reports whether the assignment is to be ready.
func (g goal) wants(a raftfsm.Assignment) bool {
	return g.changed[a.Name] || g.touches != nil && g.touches(a)
}

// pending lists what is not as it is to be. It is a pure function: an empty list
// is the end of a push.
func (g goal) pending(o api.Overview) []problem {
	var out []problem
	for _, name := range sorted(o.State.Assignments) {
		a := o.State.Assignments[name]
		if !g.wants(a) {
			continue
		}
		m := o.State.Modules[a.Module]
		for _, kind := range sorted(m.Provides) {
			id := raftfsm.ProviderID(name, kind)
			if p := providerProblem(o, id); !o.State.Providers[id].Ready {
				out = append(out, p)
			}
		}
		for _, req := range sorted(m.Requires) {
			b, ok := o.State.Bindings[raftfsm.BindingID(name, req)]
			if ok && b.Phase() != raftfsm.PhaseInUse {
				out = append(out, bindingProblem(o, b))
			}
		}
		p := processProblem(o, name)
		if old, restarts := g.restarts[name]; p.Text == "" && restarts && !g.settled && a.Report == old && !m.Run.External() {
			p.why = why{Node: home(o, name), Text: name + " is being restarted"}
		}
		if p.Text != "" {
			out = append(out, p)
		}
	}
	for _, name := range sorted(g.seats) {
		s := o.State.Seats[name]
		if !g.seats[name] || s.Want == "" || s.Holder == s.Want && s.Session != 0 {
			continue
		}
		p := seatProblem(o, s)
		if p.Text == "" {
			p.State, p.why = "answered", why{Text: fmt.Sprintf("it is yet to be handed over to %s by %s", s.Want, s.Holder)}
		}
		p.Node = home(o, s.Want)
		out = append(out, p)
	}
	for _, id := range sorted(o.State.Withdrawals) {
		if g.withdrawn[o.State.Withdrawals[id].Binding] {
			out = append(out, withdrawalProblem(o, id))
		}
	}
	return out
}

// stays reports whether nothing in the list can move before somebody pushes or
// joins something else.
func stays(left []problem) bool {
	return !slices.ContainsFunc(left, func(p problem) bool { return p.State != string(raftfsm.PhaseUnbound) })
}

// follower prints what a change comes to, a line for each step of each thing,
// until the goal is reached or time is up.
type follower struct {
	client  *api.Client
	w       io.Writer
	goal    goal
	index   uint64 // of the change
	timeout time.Duration
	began   time.Time
	last    api.Overview // the one before, whose lines are printed
}

func newFollower(c *api.Client, w io.Writer, before api.Overview, plan raftfsm.Plan, index uint64, timeout time.Duration) *follower {
	return &follower{client: c, w: w, goal: goalOf(before, plan), index: index, timeout: timeout, began: time.Now(), last: before}
}

func (f *follower) run(ctx context.Context) error {
	o, err := f.client.Newer(ctx, max(f.index, 1)-1, glimpse)
	for {
		if err != nil && ctx.Err() != nil {
			fmt.Fprintln(f.w, "not followed any longer; it goes on by itself, and meshd status shows how far it is")
			return exit(exitWaiting)
		}
		var left []problem
		if err == nil {
			if f.timeout == 0 {
				f.timeout = f.patience(o)
			}
			f.goal.settled = time.Since(f.began) >= settle
			f.print(ctx, o)
			if left = f.goal.pending(o); len(left) == 0 {
				fmt.Fprintf(f.w, "%s, after %s\n", f.summary(o), span(time.Since(f.began)))
				return nil
			}
		}
		rest := f.timeout - time.Since(f.began)
		if err != nil && f.timeout == 0 {
			rest = raftfsm.DefaultReady - time.Since(f.began)
		}
		switch {
		case rest <= 0 && err != nil:
			fmt.Fprintf(f.w, "accepted, and this node does not answer any longer: %s\n", sentence(err))
			return exit(exitWaiting)
		case err == nil && (rest <= 0 || stays(left)):
			f.stuck(ctx, o, left)
			return exit(exitWaiting)
		case err != nil:
			pause(ctx, regain)
		}
		o, err = f.client.Newer(ctx, f.last.Index, min(glimpse, max(rest, time.Millisecond)))
	}
}

// pause waits for d, or for the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// patience is the largest ready-within of what is to be ready.
func (f *follower) patience(o api.Overview) time.Duration {
	var longest time.Duration
	for name, a := range o.State.Assignments {
		if f.goal.wants(a) {
			longest = max(longest, readyWithin(o, name))
		}
	}
	if longest == 0 {
		return raftfsm.DefaultReady
	}
	return longest
}

// summary says what is as it is to be.
func (f *follower) summary(o api.Overview) string {
	var bindings, processes int
	for name, a := range o.State.Assignments {
		if !f.goal.wants(a) {
			continue
		}
		m := o.State.Modules[a.Module]
		for req := range m.Requires {
			if _, ok := o.State.Bindings[raftfsm.BindingID(name, req)]; ok {
				bindings++
			}
		}
		if !m.Run.External() {
			processes++
		}
	}
	if bindings+processes == 0 {
		return f.goal.answered(o)
	}
	text := "ready"
	if bindings > 0 {
		text += ", " + count(bindings, "binding") + " in use"
	}
	if processes > 0 {
		text += ", " + plural(processes, "process", "processes") + " running"
	}
	return text
}

// answered says who answers the seat that the change is about, if it is about one.
func (g goal) answered(o api.Overview) string {
	text := "done"
	for _, name := range sorted(g.seats) {
		s := o.State.Seats[name]
		if len(g.seats) == 1 && g.seats[name] && s.Session != 0 {
			text = fmt.Sprintf("%s is answered by %s on %s", name, s.Holder, home(o, s.Holder))
		}
	}
	return text
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// step is one line of progress.
type step struct {
	name, state, text string
	held              problem // what the step tells of, where that is a complaint
}

// print writes what changed since the last overview.
func (f *follower) print(ctx context.Context, o api.Overview) {
	steps := f.steps(o)
	f.last = o
	wide := 0
	for _, name := range f.names(o) {
		wide = max(wide, utf8.RuneCountInString(name))
	}
	for _, s := range steps {
		if s.held.Class != "" {
			s.text += saying(o, s.held, hear(ctx, f.client, s.held.subject()).Tries)
		}
		head := fmt.Sprintf("  %-*s  %-11s  ", min(wide, 50), s.name, s.state)
		at := fmt.Sprintf("  +%.2fs", time.Since(f.began).Seconds())
		indent := utf8.RuneCountInString(head)
		lines := wrap(s.text, max(columns-indent-len(at), narrowest))
		lines[len(lines)-1] += at
		fmt.Fprintln(f.w, head+strings.Join(lines, "\n"+strings.Repeat(" ", indent)))
	}
}

// names are all that steps may be about, so that the columns stay where they
// are from the first line to the last.
func (f *follower) names(o api.Overview) []string {
	out := append(sorted(f.goal.withdrawn), sorted(f.goal.seats)...)
	for name, a := range o.State.Assignments {
		if !f.goal.wants(a) {
			continue
		}
		out = append(out, name)
		m := o.State.Modules[a.Module]
		for kind := range m.Provides {
			out = append(out, raftfsm.ProviderID(name, kind))
		}
		for req := range m.Requires {
			out = append(out, raftfsm.BindingID(name, req))
		}
	}
	return out
}

// steps is the difference between the last overview and o, as far as the goal
// is concerned.
func (f *follower) steps(o api.Overview) []step {
	var out []step
	for _, name := range sorted(o.State.Assignments) {
		a := o.State.Assignments[name]
		if !f.goal.wants(a) {
			continue
		}
		m := o.State.Modules[a.Module]
		for _, kind := range sorted(m.Provides) {
			out = append(out, f.providerSteps(o, raftfsm.ProviderID(name, kind))...)
		}
		for _, req := range sorted(m.Requires) {
			out = append(out, f.bindingSteps(o, raftfsm.BindingID(name, req))...)
		}
		if old := f.last.State.Assignments[name].Report; a.Report != old && a.Report.State != "" && !m.Run.External() {
			text := "on " + home(o, name)
			if class := present(a.Report); class != "" {
				text += ": " + cmp.Or(classWords(o, name), class)
			}
			out = append(out, step{name: name, state: a.Report.State, text: text})
		}
	}
	for _, name := range sorted(f.goal.seats) {
		old, now := f.last.State.Seats[name], o.State.Seats[name]
		if now.Session != 0 && now.Epoch != old.Epoch {
			out = append(out, step{name: name, state: "answered", text: fmt.Sprintf("by %s on %s, epoch %d", now.Holder, home(o, now.Holder), now.Epoch)})
		}
	}
	return append(out, f.withdrawalSteps(o)...)
}

func (f *follower) providerSteps(o api.Overview, id string) []step {
	old, now := f.last.State.Providers[id], o.State.Providers[id]
	name, _ := cutProvider(id)
	switch {
	case now.Ready && !old.Ready:
		return []step{{name: id, state: "ready", text: "on " + home(o, name)}}
	case !now.Ready && now.Trouble != nil && (old.Trouble == nil || old.Trouble.Class != now.Trouble.Class):
		p := providerProblem(o, id)
		return []step{{id, p.State, p.Text, p}}
	}
	return nil
}

// bindingSteps are the hops that the binding made, and what newly holds it up.
func (f *follower) bindingSteps(o api.Overview, id string) []step {
	old, was := f.last.State.Bindings[id]
	b, is := o.State.Bindings[id]
	if !is {
		return nil
	}
	var out []step
	from := old.Phase().Rank()
	if !was || old.Resource != b.Resource || old.Provider != b.Provider || from > b.Phase().Rank() {
		from = raftfsm.PhaseUnbound.Rank()
		if b.Provider == "" && !was {
			out = append(out, step{name: id, state: string(raftfsm.PhaseUnbound), text: explain(o, b).Text})
		}
	}
	for _, h := range hops(o, b) {
		if rank := raftfsm.Phase(h.Phase).Rank(); rank > from && rank <= b.Phase().Rank() {
			out = append(out, step{name: id, state: h.Phase, text: hopText(o, b, h)})
		}
	}
	for _, side := range []struct {
		old, now *raftfsm.Trouble
		node     string
	}{{old.AtProvider, b.AtProvider, home(o, b.Provider)}, {old.AtConsumer, b.AtConsumer, home(o, b.Consumer)}} {
		if side.now != nil && (side.old == nil || side.old.Class != side.now.Class) {
			w := trouble(side.now, side.node)
			out = append(out, step{id, "held up", w.Text, problem{"binding", id, "held up", w}})
		}
	}
	return out
}

// hopText says who made a hop, or is to make the first.
func hopText(o api.Overview, b raftfsm.Binding, h hop) string {
	provider := b.Provider + " on " + home(o, b.Provider)
	switch phase := raftfsm.Phase(h.Phase); {
	case phase == raftfsm.PhaseWaiting:
		return "for " + provider
	case phase == raftfsm.PhaseDelivered:
		return "to " + h.Node
	case phase != raftfsm.PhaseInUse:
		return "by " + provider
	case b.Proof == raftfsm.ProofLogin:
		return "seen by " + provider
	case b.Proof == raftfsm.ProofHealth:
		return "healthy on " + h.Node
	}
	return "on " + h.Node
}

func (f *follower) withdrawalSteps(o api.Overview) []step {
	var out []step
	for _, id := range sorted(o.State.Withdrawals) {
		w := o.State.Withdrawals[id]
		if _, was := f.last.State.Withdrawals[id]; f.goal.withdrawn[w.Binding] && !was {
			out = append(out, step{name: w.Binding, state: "withdrawing", text: "at " + w.Provider + " on " + home(o, w.Provider)})
		}
	}
	for _, id := range sorted(f.last.State.Withdrawals) {
		w := f.last.State.Withdrawals[id]
		if _, is := o.State.Withdrawals[id]; f.goal.withdrawn[w.Binding] && !is {
			out = append(out, step{name: w.Binding, state: "withdrawn", text: "its logins at " + w.Provider + " no longer work, its data is kept"})
		}
	}
	return out
}

// stuck prints what the change still waits for: the hop, on which machine, since
// when, and what is tried next.
func (f *follower) stuck(ctx context.Context, o api.Overview, left []problem) {
	fmt.Fprintf(f.w, "accepted, and still waiting after %s for %s:\n", span(time.Since(f.began)), plural(len(left), "thing", "things"))
	unasked, told := map[string]bool{}, map[string]bool{}
	for i, p := range left {
		state := "is " + p.State
		if !p.Since.IsZero() {
			state = fmt.Sprintf("has been %s for %s", p.State, ago(o.Now, p.Since))
		}
		where := ""
		if p.Node != "" {
			where = "; on " + p.Node
		}
		f.line("  ", fmt.Sprintf("%s %s %s%s: %s", p.What, p.Name, state, where, p.Text))
		if i >= maxAsked {
			continue
		}
		d := hear(ctx, f.client, p.subject())
		unasked[d.Problem] = d.Problem != ""
		for _, t := range tell(o, p, d.Tries) {
			if !told[t.Key] { // one that holds up two things is told of the first
				f.line("    ", tried(o.Now, t))
			}
			told[t.Key] = true
		}
	}
	for _, problem := range sorted(unasked) {
		if unasked[problem] {
			f.line("  ", problem)
		}
	}
	fmt.Fprintln(f.w, "it goes on by itself; meshd status shows how far it is")
}

func (f *follower) line(indent, text string) {
	fmt.Fprintf(f.w, "%s%s\n", indent, strings.Join(wrap(text, columns-len(indent)-2), "\n"+indent+"  "))
}
