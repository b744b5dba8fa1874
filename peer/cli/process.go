package cli

import (
	"cmp"
	"fmt"
	"strings"

	"meshd/peer/api"
	"meshd/peer/supervise"
	"meshd/raftfsm"
)

// processProblem has a text unless the process runs as it should, or is not to
// run here at all. One that waits for its bindings is theirs to explain.
func processProblem(o api.Overview, name string) problem {
	a := o.State.Assignments[name]
	m := o.State.Modules[a.Module]
	node := home(o, name)
	p := problem{What: "process", Name: name, State: a.Report.State}
	switch {
	case m.Run.External() || a.Report.State == "running" || a.Report.State == "healthy":
		return p
	case !up(o, node):
		p.State, p.why = "away", why{Node: node, Text: fmt.Sprintf("its node %s is away", node)}
		return p
	}
	for _, req := range sorted(m.Requires) {
		if b, ok := o.State.Bindings[raftfsm.BindingID(name, req)]; ok && b.Phase().Rank() < raftfsm.PhaseDelivered.Rank() {
			return p
		}
	}
	p.why = processTrouble(o, name)
	switch {
	case p.Text != "":
	case p.State == "":
		p.State, p.why = "stopped", why{Node: node, Text: fmt.Sprintf("%s has not started it yet", node)}
		for _, req := range sorted(m.Requires) {
			if w := trouble(o.State.Bindings[raftfsm.BindingID(name, req)].AtConsumer, node); w.Text != "" {
				w.Text = p.Text + ": " + w.Text
				p.why = w
				break
			}
		}
	default:
		p.why = why{Node: node, Since: a.Report.Since, Text: fmt.Sprintf("%s is %s", name, p.State)}
	}
	return p
}

// idle says which binding an assignment waits for before its process is started.
func idle(o api.Overview, name string) why {
	a := o.State.Assignments[name]
	if a.Report.State != "" && a.Report.State != string(supervise.Stopped) {
		return why{}
	}
	for _, req := range sorted(o.State.Modules[a.Module].Requires) {
		b, ok := o.State.Bindings[raftfsm.BindingID(name, req)]
		if ok && b.Phase().Rank() < raftfsm.PhaseDelivered.Rank() {
			w := explain(o, b)
			w.Text = fmt.Sprintf("%s is started once %s is delivered: %s", name, b.ID(), w.Text)
			return w
		}
	}
	return why{}
}

// processTrouble is what is wrong with an assignment's process.
func processTrouble(o api.Overview, assignment string) why {
	r := o.State.Assignments[assignment].Report
	switch r.State {
	case "backing-off", "failed", "unhealthy":
	default:
		return why{}
	}
	w := why{Node: home(o, assignment), Step: "run", Class: present(r), Since: r.Since, Text: fmt.Sprintf("%s is %s", assignment, r.State)}
	if class := present(r); class != "" {
		w.Text += " (" + class + ")"
	}
	if words := classWords(o, assignment); words != "" {
		w.Text += ": " + words
	}
	return w
}

// present is the class of what is wrong now. A process that lives again still has
// the class of how it ended before: that is over.
func present(r raftfsm.Report) string {
	switch supervise.State(r.State) {
	case supervise.BackingOff, supervise.Failed, supervise.Stopping:
		return r.Class
	}
	if r.Class == supervise.SpecRefused {
		return r.Class // it runs as it did before
	}
	return ""
}

// classWords says what the present class of an assignment's process means, with
// what it is about; "" for one that is no class of a process.
func classWords(o api.Overview, assignment string) string {
	a := o.State.Assignments[assignment]
	run, node := o.State.Modules[a.Module].Run, home(o, assignment)
	program, user := strings.Join(run.Exec[:min(1, len(run.Exec))], ""), cmp.Or(run.User, "its user")
	switch present(a.Report) {
	case supervise.SpecRefused:
		return "what its module's run: says breaks a rule on " + node + ", whose meshd has logged which"
	case supervise.UserRefused:
		return fmt.Sprintf("it is to run as %s, and meshd on %s does not run as root", user, node)
	case supervise.UserUnknown:
		return fmt.Sprintf("%s has no user %s", node, user)
	case supervise.ExecNotFound:
		return fmt.Sprintf("%s, or the interpreter that it needs, does not exist on %s", program, node)
	case supervise.ExecDenied:
		return fmt.Sprintf("%s may not be executed by %s on %s", program, user, node)
	case supervise.ExecFormat:
		return fmt.Sprintf("%s is neither a program for %s nor a script that begins with #!", program, node)
	case supervise.DirNotFound:
		return fmt.Sprintf("its directory %s does not exist on %s", run.Dir, node)
	case supervise.LimitRefused:
		return "a limit of its limits: cannot be set on " + node
	case supervise.LogUnwritable:
		return "its log cannot be written on " + node
	case supervise.RecordFailed:
		return node + " cannot write to its data directory that it starts it"
	case supervise.StartFailed:
		return "the kernel of " + node + " does not start it"
	case supervise.Exited:
		return "it ended by itself; meshd logs " + assignment + " shows its last words"
	case supervise.Signalled:
		return "it was ended by a signal that is not of meshd; meshd logs " + assignment + " shows its last words"
	case supervise.OutOfMemory:
		return "it was killed at its memory limit"
	case supervise.EndedUnseen:
		return "it ended while meshd was not its parent, so how is not known"
	case supervise.LeftoversStuck:
		return "processes of an earlier start do not die"
	}
	return ""
}
