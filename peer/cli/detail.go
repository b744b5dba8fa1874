package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/raftfsm"
)

// detailWithin is how long a listing waits for the nodes that work on a thing.
// They have 2 s each to answer the node that is asked.
const detailWithin = 5 * time.Second

// detailOf asks what is tried in vain. Not to know is a part of the answer.
func detailOf(cmd *cobra.Command, name string) api.Detail {
	c := dial(cmd)
	defer c.Close()
	return hear(cmd.Context(), c, name)
}

func hear(ctx context.Context, c *api.Client, name string) api.Detail {
	ctx, cancel := context.WithTimeout(ctx, detailWithin)
	defer cancel()
	d, err := c.Detail(ctx, name)
	if err != nil {
		d.Problem = "no node could be asked: " + sentence(err)
	}
	d.Problem = strings.ReplaceAll(d.Problem, "\n", "; ") // a line for each node
	return d
}

// maxAsked bounds how many stuck things the nodes are asked about.
const maxAsked = 10

// elaborate adds to each complaint what its node says of it: the log has the
// step and the class, and the node that tries in vain has the words.
func elaborate(cmd *cobra.Command, o api.Overview, all ...[]problem) {
	ctx, cancel := context.WithTimeout(cmd.Context(), detailWithin)
	defer cancel()
	c := dial(cmd)
	defer c.Close()
	asked := 0
	for _, problems := range all {
		for i := range problems {
			p := &problems[i]
			if p.Class == "" || !up(o, p.Node) || asked == maxAsked {
				continue
			}
			asked++
			if d, err := c.Detail(ctx, p.subject()); err == nil { // without the words it is still true
				p.Text += saying(o, *p, d.Tries)
			}
		}
	}
}

// saying is ": " and the words of the try that the problem is about, or "".
func saying(o api.Overview, p problem, all []api.Try) string {
	about := slices.DeleteFunc(tell(o, p, all), func(t api.Try) bool { return t.Class != p.Class })
	if len(about) == 0 {
		return ""
	}
	i := slices.IndexFunc(about, func(t api.Try) bool { return t.Step == p.Step })
	return ": " + words(about[max(i, 0)])
}

// subject is the name that the nodes are asked about: a provider is known by its
// assignment.
func (p problem) subject() string {
	if p.What == "provider" {
		name, _ := cutProvider(p.Name)
		return name
	}
	return p.Name
}

// tell keeps the tries that a problem is about.
func tell(o api.Overview, p problem, all []api.Try) []api.Try {
	out := concerning(all, p.Name)
	add := func(mine func(api.Try) bool) {
		for _, t := range all {
			if mine(t) && !slices.Contains(out, t) {
				out = append(out, t)
			}
		}
	}
	switch p.What {
	case "binding":
		if b, ok := o.State.Bindings[p.Name]; ok {
			add(about(b))
		}
	case "process":
		for _, req := range sorted(o.State.Modules[o.State.Assignments[p.Name].Module].Requires) {
			if b, ok := o.State.Bindings[raftfsm.BindingID(p.Name, req)]; ok {
				add(about(b))
			}
		}
	case "withdrawal":
		for _, w := range o.State.Withdrawals {
			if w.Binding == p.Name {
				add(func(t api.Try) bool { return t.Key == preflight(w.Provider, w.Kind) })
			}
		}
	}
	return out
}

// tried is one failing work as a line: what, how it fails, and what comes next.
func tried(now time.Time, t api.Try) string {
	next := "now"
	if d := t.Next.Sub(now); d > 0 {
		next = "in " + span(d)
	}
	return fmt.Sprintf("%s (%s): %s; for %s, %s, next %s", t.Step, t.Class, words(t), ago(now, t.Since), tries(t.Tries), next)
}

// words is the text of a try without the step, which most begin with.
func words(t api.Try) string { return strings.TrimPrefix(t.Text, t.Step+": ") }

func tries(n int) string {
	if n == 1 {
		return "1 try"
	}
	return fmt.Sprintf("%d tries", n)
}

// concerning keeps the tries about the names: bindings, assignments, providers.
func concerning(all []api.Try, names ...string) []api.Try {
	out := []api.Try{}
	for _, t := range all {
		words := strings.FieldsFunc(t.Key, func(r rune) bool { return r == ' ' || r == ':' || r == '#' })
		if slices.ContainsFunc(words, func(w string) bool { return slices.Contains(names, w) }) {
			out = append(out, t)
		}
	}
	return out
}

// about are the names of all that works on the binding.
func about(b raftfsm.Binding) func(api.Try) bool {
	return func(t api.Try) bool {
		return t.Key == preflight(b.Provider, b.Kind) || len(concerning([]api.Try{t}, b.ID(), b.Consumer)) > 0
	}
}

// preflight is the key of what proves that a provider can be worked at.
func preflight(provider, kind string) string {
	return raftfsm.ProviderID(provider, kind) + ": preflight"
}
