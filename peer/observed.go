package peer

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strings"
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
	found []Finding // by the last comparison: see verifying
}

// sightings are the facts of observed, by what they are about.
type sightings struct {
	providers map[string]raftfsm.ProviderReport // by provider id
	staged    map[string]raftfsm.Staged         // by binding
	marks     map[raftfsm.Mark]bool
	withdrawn map[string]int                    // sessions ended, by withdrawal
	troubles  map[raftfsm.TroubleReport]outcome // by the report without step and class
	processes map[string]raftfsm.ProcessReport  // by assignment
}

// outcome is what the work on one thing last came to; class is empty for well.
type outcome struct{ step, class string }

func newObserved(poke func()) *observed {
	return &observed{poke: poke, sightings: sightings{
		providers: map[string]raftfsm.ProviderReport{}, staged: map[string]raftfsm.Staged{}, marks: map[raftfsm.Mark]bool{},
		withdrawn: map[string]int{}, troubles: map[raftfsm.TroubleReport]outcome{}, processes: map[string]raftfsm.ProcessReport{},
	}}
}

func (o *observed) setFound(found []Finding) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.found = found
}

func (o *observed) differences() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.found)
}

// look reads facts.
func (o *observed) look(f func(*sightings)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f(&o.sightings)
}

// note records facts and wakes the reporter.
func (o *observed) note(f func(*sightings)) {
	o.look(f)
	o.poke()
}

// trouble records the outcome of one side's work on a binding or withdrawal.
func (o *observed) trouble(about raftfsm.TroubleReport, step, class string) {
	now := outcome{step, class}
	var same bool
	o.look(func(s *sightings) {
		old, was := s.troubles[about]
		same = was && old == now
		s.troubles[about] = now
	})
	if !same {
		o.poke()
	}
}

// report decides what to tell the log, and forgets what has become pointless.
func (o *observed) report(state *raftfsm.State, self string) (r raftfsm.NodeReport) {
	o.look(func(saw *sightings) { r = decideReport(state, self, *saw) })
	return r
}

// reportRoom bounds the parts of one report, in bytes as they are encoded. The
// rest of an entry is for its header, which takes about 300.
const reportRoom = raftfsm.MaxEntry - 4<<10

// room is what is left of a report.
type room int

// has takes the room of a part, if it is there.
func (r *room) has(part any) bool {
	b, err := json.Marshal(part)
	if err != nil || len(b)+1 > int(*r) {
		return false // it cannot fail: parts are plain data
	}
	*r -= room(len(b) + 1)
	return true
}

// decideReport is what the state does not know of what this node saw, as much as
// fits one entry. It drops sightings of things that are gone, and of those that
// the state would not take from this node: what is told in vain would be told
// for ever.
func decideReport(s *raftfsm.State, self string, saw sightings) raftfsm.NodeReport {
	var r raftfsm.NodeReport
	left := room(reportRoom)
	here := func(assignment string) bool {
		a, ok := s.Assignments[assignment]
		return ok && a.Node == self
	}
	for _, id := range sortedKeys(saw.providers) {
		p := saw.providers[id]
		old, was := s.Providers[id]
		name, kind, _ := strings.Cut(id, "/")
		if _, provides := s.Modules[s.Assignments[name].Module].Provides[kind]; !provides || !here(name) {
			delete(saw.providers, id)
		} else if (!was || old.Ready != p.Ready || old.Address != p.Address || classOf(old.Trouble) != p.Class) && left.has(p) {
			r.Providers = append(r.Providers, p)
		}
	}
	for _, id := range sortedKeys(saw.staged) {
		b, staged := s.Bindings[id], saw.staged[id]
		if !here(b.Provider) || b.Resource != staged.Resource || s.Assignments[b.Consumer].Node != staged.To ||
			staged.Generation != s.Resources[b.Resource].Last+1 || len(b.Credentials) >= 2 {
			delete(saw.staged, id)
		} else if left.has(staged) {
			r.Staged = append(r.Staged, staged)
		}
	}
	for _, m := range slices.SortedFunc(maps.Keys(saw.marks), compareMarks) {
		if pending(s, m, here) {
			if left.has(m) {
				r.Marks = append(r.Marks, m)
			}
		} else {
			delete(saw.marks, m)
		}
	}
	for _, id := range sortedKeys(saw.withdrawn) {
		if w := (raftfsm.Withdrawn{ID: id, Ended: saw.withdrawn[id]}); !here(s.Withdrawals[id].Provider) {
			delete(saw.withdrawn, id)
		} else if left.has(w) {
			r.Withdrawn = append(r.Withdrawn, w)
		}
	}
	for _, about := range slices.SortedFunc(maps.Keys(saw.troubles), compareTroubles) {
		at, trouble := troubled(s, about)
		if now := saw.troubles[about]; !here(at) {
			delete(saw.troubles, about)
		} else if about.Step, about.Class = now.step, now.class; classOf(trouble) != now.class && left.has(about) {
			r.Troubles = append(r.Troubles, about)
		}
	}
	for _, name := range sortedKeys(saw.processes) {
		p, old := saw.processes[name], s.Assignments[name].Report
		if !here(name) {
			delete(saw.processes, name)
		} else if (old.State != p.State || old.Class != p.Class) && left.has(p) {
			r.Processes = append(r.Processes, p)
		}
	}
	return r
}

// decideOver lists the troubles on record that this node reports and that
// nothing works on any more: what they were about was done otherwise, or ended
// while meshd was down. Of work that is in progress the outcome will tell.
func decideOver(s *raftfsm.State, self string, work map[raftfsm.TroubleReport]bool) []raftfsm.TroubleReport {
	var over []raftfsm.TroubleReport
	for _, id := range sortedKeys(s.Bindings) {
		for _, about := range []raftfsm.TroubleReport{{Binding: id, Side: raftfsm.SideProvider}, {Binding: id, Side: raftfsm.SideConsumer}} {
			if at, trouble := troubled(s, about); trouble != nil && s.Assignments[at].Node == self && !work[about] {
				over = append(over, about)
			}
		}
	}
	return over
}

// settle forgets the outcomes of what is no work any more, and takes back what is
// on record of it.
func (o *observed) settle(over []raftfsm.TroubleReport, work map[raftfsm.TroubleReport]bool) {
	o.look(func(s *sightings) {
		maps.DeleteFunc(s.troubles, func(about raftfsm.TroubleReport, _ outcome) bool { return !work[about] })
	})
	for _, about := range over {
		o.trouble(about, "", "")
	}
}

// pending reports whether the state would take the fact, and does not know it.
func pending(s *raftfsm.State, m raftfsm.Mark, here func(string) bool) bool {
	b := s.Bindings[m.Binding]
	i := slices.IndexFunc(b.Credentials, func(c raftfsm.Credential) bool { return c.Generation == m.Generation })
	if i < 0 || b.Resource != m.Resource {
		return false
	}
	c := b.Credentials[i]
	switch m.Fact {
	case raftfsm.FactMinted:
		return !c.Minted && here(b.Provider)
	case raftfsm.FactSeen:
		return !c.Seen && c.Minted && here(b.Provider)
	case raftfsm.FactDelivered:
		return !c.Delivered && c.Minted && here(b.Consumer)
	case raftfsm.FactHealthy:
		return !c.Healthy && c.Delivered && here(b.Consumer)
	}
	return false
}

// troubled is the trouble that the state has on record, and the assignment whose
// node reports it: "" when there is no such thing.
func troubled(s *raftfsm.State, about raftfsm.TroubleReport) (at string, t *raftfsm.Trouble) {
	if about.Withdrawal != "" {
		w := s.Withdrawals[about.Withdrawal]
		return w.Provider, w.Trouble
	}
	b := s.Bindings[about.Binding]
	if about.Side == raftfsm.SideProvider {
		return b.Provider, b.AtProvider
	}
	return b.Consumer, b.AtConsumer
}

func classOf(t *raftfsm.Trouble) string {
	if t == nil {
		return ""
	}
	return t.Class
}

func empty(r raftfsm.NodeReport) bool {
	return len(r.Providers)+len(r.Staged)+len(r.Marks)+len(r.Withdrawn)+len(r.Troubles)+len(r.Processes) == 0
}

func compareMarks(a, b raftfsm.Mark) int {
	return cmp.Or(cmp.Compare(a.Binding, b.Binding), cmp.Compare(a.Generation, b.Generation), cmp.Compare(a.Fact, b.Fact), cmp.Compare(a.Resource, b.Resource))
}

func compareTroubles(a, b raftfsm.TroubleReport) int {
	return cmp.Or(cmp.Compare(a.Binding, b.Binding), cmp.Compare(a.Withdrawal, b.Withdrawal), cmp.Compare(a.Side, b.Side))
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
