package peer

import (
	"maps"
	"slices"
	"sync"

	"meshd/raftfsm"
)

// observed is what this node saw and the log may not hold yet. Workers write
// it; decideReport compares it with the state, so a report that got lost is
// made again and one that arrived is not.
type observed struct {
	mu   sync.Mutex
	poke func()
	sightings
}

// sightings are the facts of observed, by what they are about.
type sightings struct {
	providers map[string]raftfsm.ProviderReport // by provider id
	staged    map[string]raftfsm.Staged         // by binding
	marks     map[raftfsm.Mark]bool
	withdrawn map[string]int                   // sessions ended, by withdrawal
	troubles  map[raftfsm.TroubleReport]string // class, by the report without step and class
	steps     map[raftfsm.TroubleReport]string
	processes map[string]raftfsm.ProcessReport // by assignment
}

func newObserved(poke func()) *observed {
	return &observed{poke: poke, sightings: sightings{
		providers: map[string]raftfsm.ProviderReport{}, staged: map[string]raftfsm.Staged{}, marks: map[raftfsm.Mark]bool{},
		withdrawn: map[string]int{}, troubles: map[raftfsm.TroubleReport]string{}, steps: map[raftfsm.TroubleReport]string{},
		processes: map[string]raftfsm.ProcessReport{},
	}}
}

// note records facts and wakes the reporter.
func (o *observed) note(f func(*sightings)) {
	o.mu.Lock()
	f(&o.sightings)
	o.mu.Unlock()
	o.poke()
}

// trouble records the outcome of one side's work on a binding or withdrawal.
func (o *observed) trouble(about raftfsm.TroubleReport, step, class string) {
	o.note(func(s *sightings) { s.troubles[about], s.steps[about] = class, step })
}

// report decides what to tell the log, and forgets what has become pointless.
func (o *observed) report(state *raftfsm.State, self string) raftfsm.NodeReport {
	o.mu.Lock()
	defer o.mu.Unlock()
	return decideReport(state, self, o.sightings)
}

// maxReport bounds one report, so that it fits an entry: a staged credential
// with a CA takes about 4 KiB.
const maxReport = 12

// decideReport is what the state does not know of what this node saw. It drops
// sightings of things that are gone.
func decideReport(s *raftfsm.State, self string, saw sightings) raftfsm.NodeReport {
	var r raftfsm.NodeReport
	room := func() bool {
		return len(r.Providers)+len(r.Staged)+len(r.Withdrawn)+(len(r.Marks)+len(r.Troubles)+len(r.Processes))/8 < maxReport
	}
	for _, id := range sortedKeys(saw.providers) {
		p := saw.providers[id]
		old, was := s.Providers[id]
		class, step := "", ""
		if old.Trouble != nil {
			class, step = old.Trouble.Class, old.Trouble.Step
		}
		if room() && (!was || old.Ready != p.Ready || old.Address != p.Address || class != p.Class || step != p.Step && class != "") {
			r.Providers = append(r.Providers, p)
		}
	}
	for _, id := range sortedKeys(saw.staged) {
		b, staged := s.Bindings[id], saw.staged[id]
		if b.Resource != staged.Resource || s.Assignments[b.Consumer].Node != staged.To || s.Resources[b.Resource].Last >= staged.Generation {
			delete(saw.staged, id)
		} else if room() {
			r.Staged = append(r.Staged, staged)
		}
	}
	for _, m := range slices.SortedFunc(maps.Keys(saw.marks), compareMarks) {
		switch known, ok := marked(s, m); {
		case !ok || known:
			delete(saw.marks, m)
		case room():
			r.Marks = append(r.Marks, m)
		}
	}
	for _, id := range sortedKeys(saw.withdrawn) {
		if _, ok := s.Withdrawals[id]; !ok {
			delete(saw.withdrawn, id)
		} else if room() {
			r.Withdrawn = append(r.Withdrawn, raftfsm.Withdrawn{ID: id, Ended: saw.withdrawn[id]})
		}
	}
	for _, about := range slices.SortedFunc(maps.Keys(saw.troubles), compareTroubles) {
		now, ok := troubled(s, about)
		if class := saw.troubles[about]; !ok {
			delete(saw.troubles, about)
			delete(saw.steps, about)
		} else if now != class && room() {
			about.Step, about.Class = saw.steps[about], class
			r.Troubles = append(r.Troubles, about)
		}
	}
	for _, name := range sortedKeys(saw.processes) {
		p := saw.processes[name]
		a, ok := s.Assignments[name]
		if !ok || a.Node != self {
			delete(saw.processes, name)
		} else if (a.Report.State != p.State || a.Report.Class != p.Class) && room() {
			r.Processes = append(r.Processes, p)
		}
	}
	return r
}

// marked reports whether the state knows the fact, and whether its credential
// is still there.
func marked(s *raftfsm.State, m raftfsm.Mark) (known, ok bool) {
	b := s.Bindings[m.Binding]
	for _, c := range b.Credentials {
		if c.Generation == m.Generation && b.Resource == m.Resource {
			return map[string]bool{
				raftfsm.FactMinted: c.Minted, raftfsm.FactSeen: c.Seen, raftfsm.FactDelivered: c.Delivered, raftfsm.FactHealthy: c.Healthy,
			}[m.Fact], true
		}
	}
	return false, false
}

// troubled is the class of trouble that the state has on record.
func troubled(s *raftfsm.State, about raftfsm.TroubleReport) (class string, ok bool) {
	var t *raftfsm.Trouble
	if about.Withdrawal != "" {
		w, is := s.Withdrawals[about.Withdrawal]
		t, ok = w.Trouble, is
	} else {
		b, is := s.Bindings[about.Binding]
		t, ok = b.AtConsumer, is
		if about.Side == raftfsm.SideProvider {
			t = b.AtProvider
		}
	}
	if t != nil {
		class = t.Class
	}
	return class, ok
}

func empty(r raftfsm.NodeReport) bool {
	return len(r.Providers)+len(r.Staged)+len(r.Marks)+len(r.Withdrawn)+len(r.Troubles)+len(r.Processes) == 0
}

func compareMarks(a, b raftfsm.Mark) int {
	return cmpStrings(a.Binding, b.Binding, a.Fact, b.Fact)
}

func compareTroubles(a, b raftfsm.TroubleReport) int {
	return cmpStrings(a.Binding, b.Binding, a.Withdrawal, b.Withdrawal, a.Side, b.Side)
}

// cmpStrings compares pairs in turn.
func cmpStrings(pairs ...string) int {
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i] != pairs[i+1] {
			if pairs[i] < pairs[i+1] {
				return -1
			}
			return 1
		}
	}
	return 0
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
