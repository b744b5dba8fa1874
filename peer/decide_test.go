package peer

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"meshd/bus"
	"meshd/peer/consensus"
	"meshd/provision"
	"meshd/raftfsm"
)

// model is a state that is made as a real one is: by entries.
type model struct {
	*testing.T
	*raftfsm.State
}

// newModel is a mesh of these nodes, each with its name as its id.
func newModel(t *testing.T, nodes ...string) *model {
	m := &model{t, raftfsm.New()}
	m.do(nodes[0], raftfsm.Init{Mesh: raftfsm.Mesh{ID: "m", Generation: 1, Level: 1}, Node: raftfsm.Node{ID: nodes[0], Name: nodes[0]}})
	for _, n := range nodes[1:] {
		m.do(nodes[0], raftfsm.AddToken{Hash: n})
		m.do(nodes[0], raftfsm.Admit{Token: n, Node: raftfsm.Node{ID: n, Name: n}})
	}
	return m
}

// do applies a command as the log would bring it.
func (m *model) do(node string, c raftfsm.Command) {
	m.Helper()
	b, err := raftfsm.Encode(raftfsm.Entry{Header: raftfsm.Header{Level: 1, Actor: "test", Node: node, ID: fmt.Sprint(m.Index)}, Command: c})
	if err != nil {
		m.Fatal(err)
	}
	e, err := raftfsm.Decode(b)
	if err != nil {
		m.Fatal(err)
	}
	if r := m.Apply(m.Index+1, e); r.Rejection != nil {
		m.Fatal(r.Rejection)
	}
}

// ready says that the provider's preflight passed.
func (m *model) ready(node, provider string) {
	m.Helper()
	m.do(node, raftfsm.NodeReport{Providers: []raftfsm.ProviderReport{{Provider: provider + "/memory", Ready: true, Address: raftfsm.Address{Host: "db", Port: 1, TLS: "off"}}}})
}

// staged and mark make the steps of a binding's life.
func (m *model) staged(binding string) {
	m.Helper()
	b := m.Bindings[binding]
	m.do(m.Assignments[b.Provider].Node, raftfsm.NodeReport{Staged: []raftfsm.Staged{{
		Binding: binding, Resource: b.Resource, To: m.Assignments[b.Consumer].Node, Generation: m.Resources[b.Resource].Last + 1,
		Sealed: "sealed", Address: raftfsm.Address{Host: "db", Port: 1, TLS: "off"},
	}}})
}

func (m *model) mark(binding string, facts ...string) {
	m.Helper()
	b := m.Bindings[binding]
	for _, fact := range facts {
		at := b.Provider
		if fact == raftfsm.FactDelivered || fact == raftfsm.FactHealthy {
			at = b.Consumer
		}
		m.do(m.Assignments[at].Node, raftfsm.NodeReport{Marks: []raftfsm.Mark{{Binding: binding, Resource: b.Resource, Generation: b.Newest().Generation, Fact: fact}}})
	}
}

// newShops is a mesh with a database on beta, and a shop on alpha and another on
// gamma that share its data.
func newShops(t *testing.T) *model {
	m := newModel(t, "alpha", "beta", "gamma")
	docs := shop("shop", "alpha", "pg-main")
	docs.Assigns[0].Nodes = []string{"alpha", "gamma"}
	m.do("alpha", push(database("pg-main", "beta", "db"), docs))
	return m
}

// jobs is what decideService decides, one line each.
func (m *model) jobs(provider string) []string {
	var out []string
	d := m.Desired(m.Assignments[provider].Node)
	for _, spec := range d.Provides {
		if spec.Assignment != provider {
			continue
		}
		for _, j := range decideService(m.State, spec) {
			line := fmt.Sprintf("%s %s %d", j.Verb, j.Binding, j.Credential.Generation)
			switch j.Verb {
			case verbStage:
				line += " for " + j.Consumer
			case verbWithdraw:
				line = fmt.Sprintf("%s %s of %d logins", j.Verb, j.Binding, len(j.Old))
			case verbPreflight:
				line = "preflight"
			default:
				line += " " + j.Credential.Login
			}
			if j.Verb != verbPreflight && (j.Resource.Name == "" || j.ResourceID == "") {
				line += " without a resource"
			}
			out = append(out, line)
		}
	}
	return out
}

func TestDecideService(t *testing.T) {
	m := newShops(t)
	want := func(when string, lines ...string) {
		t.Helper()
		got := m.jobs("pg-main")
		for i, line := range got { // login names are the model's business
			if f := strings.Fields(line); f[0] == "mint" || f[0] == "watch" {
				got[i] = strings.Join(f[:3], " ")
			}
		}
		if diff := cmp.Diff(append([]string{"preflight"}, lines...), got); diff != "" {
			t.Errorf("%s:\n%s", when, diff)
		}
	}
	want("before the service was seen")
	m.ready("beta", "pg-main")
	want("two replicas, one resource: one staging at a time", "stage shop@alpha/db 1 for alpha")
	m.staged("shop@alpha/db")
	want("staged", "mint shop@alpha/db 1", "stage shop@gamma/db 2 for gamma")
	m.mark("shop@alpha/db", raftfsm.FactMinted)
	m.staged("shop@gamma/db")
	want("minted: the consumer's turn", "mint shop@gamma/db 2")
	m.mark("shop@alpha/db", raftfsm.FactDelivered)
	want("delivered", "watch shop@alpha/db 1", "mint shop@gamma/db 2")
	m.mark("shop@alpha/db", raftfsm.FactSeen)
	m.mark("shop@gamma/db", raftfsm.FactMinted, raftfsm.FactDelivered, raftfsm.FactSeen)
	want("both in use")

	m.do("beta", raftfsm.NodeReport{Providers: []raftfsm.ProviderReport{{Provider: "pg-main/memory", Class: "unreachable", Step: "connect"}}})
	m.do("alpha", raftfsm.Remove{What: raftfsm.WhatAssignment, Name: "shop@gamma"})
	want("withdrawn, ready or not", "withdraw shop@gamma/db of 1 logins")
	docs := shop("shop", "gamma", "pg-main")
	m.do("alpha", push(docs))
	want("nothing is staged at a service that is not ready", "withdraw shop@gamma/db of 1 logins")
	m.ready("beta", "pg-main")
	want("withdrawals first", "withdraw shop@gamma/db of 1 logins", "stage shop@gamma/db 3 for gamma")

	docs.Modules[0].Requires = map[string]raftfsm.Requirement{"db": {Kind: "memory", Provider: "pg-main", Proof: raftfsm.ProofDelivered}}
	m.do("alpha", push(docs))
	m.staged("shop@gamma/db")
	m.mark("shop@gamma/db", raftfsm.FactMinted, raftfsm.FactDelivered)
	want("a proof that asks for no session is not watched", "withdraw shop@gamma/db of 1 logins")
}

func TestDecideServiceKeepsProvidersApart(t *testing.T) {
	m := newShops(t)
	m.do("alpha", push(database("pg-two", "beta", "db2"), shop("other", "alpha", "pg-two")))
	m.ready("beta", "pg-two")
	if got := m.jobs("pg-main"); !slices.Equal(got, []string{"preflight"}) {
		t.Errorf("pg-main: %v", got)
	}
	if got := m.jobs("pg-two"); !slices.Equal(got, []string{"preflight", "stage other@alpha/db 1 for alpha"}) {
		t.Errorf("pg-two: %v", got)
	}
}

func (m *model) need(assignment string) need {
	m.Helper()
	for _, run := range m.Desired(m.Assignments[assignment].Node).Runs {
		if run.Assignment == assignment {
			return decideNeeds(m.State, run)[0]
		}
	}
	m.Fatalf("%s does not run", assignment)
	return need{}
}

func TestDecideNeeds(t *testing.T) {
	m := newShops(t)
	if n := m.need("shop@alpha"); n.Credential != nil || n.Kind != "memory" || n.Provider != "pg-main" || n.Binding != "shop@alpha/db" || n.Resource.Name == "" || ready([]need{n}) {
		t.Errorf("waiting: %+v", n)
	}
	m.ready("beta", "pg-main")
	m.staged("shop@alpha/db")
	if n := m.need("shop@alpha"); n.Credential != nil {
		t.Errorf("staged: %+v is to be delivered, which does not exist yet", n.Credential)
	}
	m.mark("shop@alpha/db", raftfsm.FactMinted)
	first := m.need("shop@alpha")
	if first.Credential == nil || first.Credential.Generation != 1 || first.Address.Host != "db" || !ready([]need{first}) {
		t.Errorf("minted: %+v", first)
	}
	m.do("beta", raftfsm.NodeReport{Providers: []raftfsm.ProviderReport{{Provider: "pg-main/memory", Ready: true, Address: raftfsm.Address{Host: "elsewhere", Port: 1, TLS: "off"}}}})
	if n := m.need("shop@alpha"); n.Address.Host != "elsewhere" || n.version() == first.version() {
		t.Errorf("the service has moved to another address, and the need is %+v", n)
	}
	m.do("beta", raftfsm.NodeReport{Providers: []raftfsm.ProviderReport{{Provider: "pg-main/memory", Class: "bad-config", Step: "render address"}}})
	if n := m.need("shop@alpha"); n.Address.Host != "db" {
		t.Errorf("with an address that cannot be told the need is at %+v", n.Address)
	}
	m.do("alpha", push(database("pg-two", "beta", "db"), shop("shop", "alpha", "pg-two")))
	m.ready("beta", "pg-two")
	m.staged("shop@alpha/db")
	m.mark("shop@alpha/db", raftfsm.FactMinted)
	if n := m.need("shop@alpha"); n.Credential.Generation != 1 || n.version() == first.version() {
		t.Errorf("generation 1 of another provider passes for the old one: %q", n.version())
	}
}

// saw is the sightings that f makes.
func saw(f func(*sightings)) sightings {
	o := newObserved(func() {})
	o.look(f)
	return o.sightings
}

func TestDecideReportTellsWhatTheStateDoesNotKnow(t *testing.T) {
	m := newShops(t)
	seen := saw(func(s *sightings) {
		s.providers["pg-main/memory"] = raftfsm.ProviderReport{Provider: "pg-main/memory", Ready: true, Address: raftfsm.Address{Host: "db", Port: 1}}
		s.staged["shop@alpha/db"] = raftfsm.Staged{Binding: "shop@alpha/db", Resource: m.Bindings["shop@alpha/db"].Resource, To: "alpha", Generation: 1, Sealed: "x"}
		s.troubles[raftfsm.TroubleReport{Binding: "shop@alpha/db", Side: raftfsm.SideProvider}] = outcome{"create login", "missing-right"}
		s.troubles[raftfsm.TroubleReport{Binding: "shop@gamma/db", Side: raftfsm.SideProvider}] = outcome{}
	})
	r := decideReport(m.State, "beta", seen)
	if len(r.Providers) != 1 || len(r.Staged) != 1 || len(r.Troubles) != 1 || r.Troubles[0].Class != "missing-right" || r.Troubles[0].Step != "create login" {
		t.Fatalf("told: %+v", r)
	}
	m.do("beta", r)
	if again := decideReport(m.State, "beta", seen); !empty(again) {
		t.Errorf("told again: %+v", again)
	}
	seen.troubles[raftfsm.TroubleReport{Binding: "shop@alpha/db", Side: raftfsm.SideProvider}] = outcome{"create resource", "missing-right"}
	if r := decideReport(m.State, "beta", seen); !empty(r) {
		t.Errorf("another step of the same class is told: %+v", r)
	}
	seen.marks[raftfsm.Mark{Binding: "shop@alpha/db", Resource: m.Bindings["shop@alpha/db"].Resource, Generation: 1, Fact: raftfsm.FactMinted}] = true
	if r = decideReport(m.State, "beta", seen); len(r.Marks) != 1 {
		t.Errorf("not told: %+v", r)
	}
	m.do("beta", r)
	if r = decideReport(m.State, "beta", seen); len(seen.marks) != 0 || len(r.Marks) != 0 {
		t.Errorf("kept: %+v", seen.marks)
	}
}

// TestDecideReportTellsNothingInVain: what the state would not take from this
// node is dropped. Told in vain it would be an entry a second for ever.
func TestDecideReportTellsNothingInVain(t *testing.T) {
	m := newShops(t)
	m.ready("beta", "pg-main")
	res := m.Bindings["shop@alpha/db"].Resource
	full := func(s *sightings) {
		for _, id := range []string{"pg-main/memory", "pg-main/redis", "gone/memory"} {
			s.providers[id] = raftfsm.ProviderReport{Provider: id, Class: "unreachable"}
		}
		for i, staged := range []raftfsm.Staged{
			{Binding: "shop@alpha/db", Resource: res, To: "beta", Generation: 1},
			{Binding: "shop@gamma/db", Resource: res, To: "gamma", Generation: 2},
			{Binding: "gone/db", Resource: res, To: "alpha", Generation: 1},
			{Binding: "shop@alpha/db", Resource: "other", To: "alpha", Generation: 1},
		} {
			s.staged[fmt.Sprintf("%s%.*s", staged.Binding, i, "")] = staged
		}
		for _, fact := range []string{raftfsm.FactMinted, raftfsm.FactSeen, raftfsm.FactDelivered, raftfsm.FactHealthy, "no-fact"} {
			s.marks[raftfsm.Mark{Binding: "shop@alpha/db", Resource: res, Generation: 1, Fact: fact}] = true
		}
		s.withdrawn["gone#1"] = 1
		for _, side := range []string{raftfsm.SideProvider, raftfsm.SideConsumer} {
			s.troubles[raftfsm.TroubleReport{Binding: "shop@alpha/db", Side: side}] = outcome{"x", "unreachable"}
			s.troubles[raftfsm.TroubleReport{Binding: "gone/db", Side: side}] = outcome{"x", "unreachable"}
		}
		s.troubles[raftfsm.TroubleReport{Withdrawal: "gone#1"}] = outcome{"x", "unreachable"}
		s.processes["shop@alpha"] = raftfsm.ProcessReport{Assignment: "shop@alpha", State: "running"}
		s.processes["gone"] = raftfsm.ProcessReport{Assignment: "gone", State: "running"}
	}
	for _, self := range []string{"alpha", "beta", "gamma"} {
		seen := saw(full)
		for i := 0; ; i++ {
			r := decideReport(m.State, self, seen)
			if empty(r) {
				break
			}
			if i > 2 {
				t.Fatalf("%s tells in vain: %+v", self, r)
			}
			m.do(self, r)
		}
		if len(seen.staged)+len(seen.marks)+len(seen.withdrawn) > 0 {
			t.Errorf("%s keeps what nobody takes: %+v", self, seen)
		}
	}
}

// TestDecideReportFitsAnEntry: with the largest parts that there are, each report
// can be committed, and enough of them tell everything.
func TestDecideReportFitsAnEntry(t *testing.T) {
	for _, ca := range []int{0, 4 << 10, maxCA} {
		m := newModel(t, "alpha", "beta")
		pem := strings.Repeat(strings.Repeat("M", 64)+"\n", ca/65+1)[:ca]
		address := raftfsm.Address{Host: strings.Repeat("h", 253), Port: 65535, TLS: provision.VerifyFull, CA: pem}
		var docs []raftfsm.Documents
		const many = 40
		for i := range many {
			name := fmt.Sprintf("%02d%s", i, strings.Repeat("n", raftfsm.MaxName-2))
			p := database("p"+name[:30], "beta", "db")
			docs = append(docs, p, shop("s"+name[:39], "alpha", p.Assigns[0].As))
		}
		for _, d := range docs {
			m.do("alpha", push(d))
		}
		seen := saw(func(s *sightings) {
			for id, b := range m.Bindings {
				p := raftfsm.ProviderID(b.Provider, b.Kind)
				s.providers[p] = raftfsm.ProviderReport{Provider: p, Ready: true, Address: address}
				s.staged[id] = raftfsm.Staged{Binding: id, Resource: b.Resource, To: "alpha", Generation: 1, Sealed: strings.Repeat("A", 1<<10), Address: address}
				s.troubles[raftfsm.TroubleReport{Binding: id, Side: raftfsm.SideProvider}] = outcome{strings.Repeat("<", 200), "missing-right"}
			}
		})
		reports := 0
		for {
			r := decideReport(m.State, "beta", seen)
			if empty(r) {
				break
			}
			if reports++; reports > 10*many {
				t.Fatalf("CA of %d bytes: no end of reports", ca)
			}
			m.do("beta", r) // fails where it does not fit
		}
		for id, b := range m.Bindings {
			if b.Phase() != raftfsm.PhaseStaged || b.AtProvider == nil || !m.Providers[raftfsm.ProviderID(b.Provider, b.Kind)].Ready {
				t.Errorf("CA of %d bytes: of %s was told %s, %v", ca, id, b.Phase(), b.AtProvider)
			}
		}
		if most := many*(2*(ca*5/4+2<<10))/reportRoom + many/4 + 4; reports > most {
			t.Errorf("CA of %d bytes: %d reports, want %d at most", ca, reports, most)
		}
	}
}

func TestDecideOver(t *testing.T) {
	m := newShops(t)
	m.ready("beta", "pg-main")
	m.do("beta", raftfsm.NodeReport{Troubles: []raftfsm.TroubleReport{{Binding: "shop@alpha/db", Side: raftfsm.SideProvider, Step: "s", Class: "full"}}})
	m.do("alpha", raftfsm.NodeReport{Troubles: []raftfsm.TroubleReport{{Binding: "shop@alpha/db", Side: raftfsm.SideConsumer, Step: "s", Class: "tls"}}})
	atProvider := raftfsm.TroubleReport{Binding: "shop@alpha/db", Side: raftfsm.SideProvider}
	if got := decideOver(m.State, "beta", map[raftfsm.TroubleReport]bool{atProvider: true}); len(got) != 0 {
		t.Errorf("over while it is worked on: %v", got)
	}
	if got := decideOver(m.State, "beta", nil); !slices.Equal(got, []raftfsm.TroubleReport{atProvider}) {
		t.Errorf("over at beta: %v", got)
	}
	if got := decideOver(m.State, "gamma", nil); len(got) != 0 {
		t.Errorf("over at a node that has no part in it: %v", got)
	}
	o := newObserved(func() {})
	o.troubles[raftfsm.TroubleReport{Binding: "shop@gamma/db", Side: raftfsm.SideProvider}] = outcome{"s", "full"}
	o.settle(decideOver(m.State, "beta", nil), nil)
	m.do("beta", o.report(m.State, "beta"))
	if b := m.Bindings["shop@alpha/db"]; b.AtProvider != nil || b.AtConsumer == nil {
		t.Errorf("left on record: %v, %v", b.AtProvider, b.AtConsumer)
	}
	if b := m.Bindings["shop@gamma/db"]; b.AtProvider != nil {
		t.Errorf("told of what is no work: %v", b.AtProvider)
	}
}

func TestDecideFindings(t *testing.T) {
	named := raftfsm.Holder{Node: "alpha", Assignment: "pg-main", Epoch: 7}
	right := bus.Bound{Seat: "store", Assignment: "pg-main", Epoch: 7, Interest: 1}
	with := func(edit func(*bus.Bound)) bus.Bound { b := right; edit(&b); return b }
	alpha := func(b ...bus.Bound) bus.Answer { return bus.Answer{Node: "alpha", Answered: true, Bound: b} }
	for _, test := range []struct {
		name    string
		holders map[string]raftfsm.Holder
		answers []bus.Answer
		want    []Finding
	}{
		{"as named", map[string]raftfsm.Holder{"store": named}, []bus.Answer{alpha(right)}, nil},
		{"nobody is named, nobody answers", map[string]raftfsm.Holder{"store": {}}, []bus.Answer{alpha()}, nil},
		{"nobody may answer, nobody does", map[string]raftfsm.Holder{"store": {Node: "alpha", Assignment: "pg-main", Epoch: 7, Dark: "why"}}, []bus.Answer{alpha()}, nil},
		{"nobody may answer, and another does", map[string]raftfsm.Holder{"store": {Node: "alpha", Assignment: "pg-main", Epoch: 7, Dark: "why"}}, []bus.Answer{alpha(), {Node: "beta", Answered: true, Bound: []bus.Bound{right}}}, []Finding{{"beta", "store", "answers, and alpha/pg-main, epoch 7 is named"}}},
		{"nobody is named, somebody answers", map[string]raftfsm.Holder{"store": {}}, []bus.Answer{alpha(right)}, []Finding{{"alpha", "store", "answers, and nobody is named"}}},
		{"another answers", map[string]raftfsm.Holder{"store": named}, []bus.Answer{alpha(right), {Node: "beta", Answered: true, Bound: []bus.Bound{right}}}, []Finding{{"beta", "store", "answers, and alpha/pg-main, epoch 7 is named"}}},
		{"it is leaving", map[string]raftfsm.Holder{"store": named}, []bus.Answer{alpha(right), {Node: "beta", Answered: true, Bound: []bus.Bound{with(func(b *bus.Bound) { b.Leaving = true })}}}, nil},
		{"an old epoch", map[string]raftfsm.Holder{"store": named}, []bus.Answer{alpha(with(func(b *bus.Bound) { b.Epoch = 6 }))}, []Finding{
			{"alpha", "store", "answers as pg-main, epoch 6, and alpha/pg-main, epoch 7 is named"}, {"alpha", "store", "does not answer, and alpha/pg-main, epoch 7 is named"}}},
		{"twice", map[string]raftfsm.Holder{"store": named}, []bus.Answer{alpha(with(func(b *bus.Bound) { b.Interest = 2 }))}, []Finding{
			{"alpha", "store", "is subscribed to 2 times"}, {"alpha", "store", "does not answer, and alpha/pg-main, epoch 7 is named"}}},
		{"a silent node is subscribed", map[string]raftfsm.Holder{"store": named}, []bus.Answer{{Node: "alpha", Bound: []bus.Bound{{Seat: "store", Interest: 1}}}}, nil},
		{"a silent node is not", map[string]raftfsm.Holder{"store": named}, []bus.Answer{{Node: "alpha"}}, nil},
		{"a silent node, and another answers", map[string]raftfsm.Holder{"store": named}, []bus.Answer{{Node: "alpha"}, {Node: "beta", Answered: true, Bound: []bus.Bound{right}}}, []Finding{{"beta", "store", "answers, and alpha/pg-main, epoch 7 is named"}}},
		{"the holder's node is no member", map[string]raftfsm.Holder{"store": named}, []bus.Answer{{Node: "beta", Answered: true}}, []Finding{{"alpha", "store", "does not answer, and alpha/pg-main, epoch 7 is named"}}},
	} {
		got, silent := decideFindings(test.holders, test.answers)
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s:\n%s", test.name, diff)
		}
		if strings.Contains(test.name, "silent") != slices.Equal(silent, []string{"alpha"}) {
			t.Errorf("%s: silent are %v", test.name, silent)
		}
	}
}

func TestDecideRemoval(t *testing.T) {
	now := time.Now()
	voter := func(id string, ago time.Duration) consensus.Server {
		return consensus.Server{ID: id, Voter: true, Acked: now.Add(-ago)}
	}
	learner := consensus.Server{ID: "d"}
	for _, test := range []struct {
		name    string
		servers []consensus.Server
		id      string
		want    string
	}{
		{"all are well", []consensus.Server{voter("a", 0), voter("b", 0), voter("c", 0)}, "b", ""},
		{"the dead one", []consensus.Server{voter("a", 0), voter("b", time.Hour), voter("c", 0)}, "b", ""},
		{"one of the living", []consensus.Server{voter("a", 0), voter("b", time.Hour), voter("c", 0)}, "c", "no-quorum"},
		{"the leader itself", []consensus.Server{voter("a", time.Hour), voter("b", 0), voter("c", 0)}, "a", ""},
		{"the leader of two", []consensus.Server{voter("a", 0), voter("b", time.Hour)}, "a", "no-quorum"},
		{"the only voter", []consensus.Server{voter("a", 0), learner}, "a", "last-voter"},
		{"a learner", []consensus.Server{voter("a", 0), learner}, "d", ""},
		{"no member of raft", []consensus.Server{voter("a", 0)}, "x", ""},
	} {
		code := ""
		if r := decideRemoval(test.servers, "a", test.id, now); r != nil {
			code = r.Code
		}
		if code != test.want {
			t.Errorf("%s: %q, want %q", test.name, code, test.want)
		}
	}
}

func TestBook(t *testing.T) {
	at := func(s float64) time.Time { return time.Unix(0, int64(s*1e9)) }
	down := &provision.Error{Step: "connect", Class: provision.Unreachable, Err: errors.New("refused")}
	full := &provision.Error{Step: "create", Class: provision.Full, Err: errors.New("no room")}
	once, often := task{key: "k"}, task{key: "k", every: time.Minute}
	for _, test := range []struct {
		name string
		task task
		old  Try
		err  error
		want Try
	}{
		{"success", once, Try{}, nil, Try{Since: at(100), Tries: 1, done: true}},
		{"success, again later", often, Try{}, nil, Try{Since: at(100), Tries: 1, done: true, Next: at(160)}},
		{"first failure", once, Try{}, down, Try{Step: "connect", Class: "unreachable", Text: "connect: refused", Since: at(100), Tries: 1, Next: at(100.5)}},
		{"second failure", once, Try{Class: "unreachable", Since: at(90), Tries: 1}, down, Try{Step: "connect", Class: "unreachable", Text: "connect: refused", Since: at(90), Tries: 2, Next: at(101)}},
		{"another class", once, Try{Class: "unreachable", Since: at(90), Tries: 3}, full, Try{Step: "create", Class: "full", Text: "create: no room", Since: at(100), Tries: 4, Next: at(104)}},
		{"a thousandth", once, Try{Class: "unreachable", Since: at(90), Tries: 999}, down, Try{Step: "connect", Class: "unreachable", Text: "connect: refused", Since: at(90), Tries: 1000, Next: at(130)}},
		{"failure after success", often, Try{Since: at(90), Tries: 1, done: true}, down, Try{Step: "connect", Class: "unreachable", Text: "connect: refused", Since: at(100), Tries: 1, Next: at(100.5)}},
		{"without a step", once, Try{}, errors.New("x"), Try{Step: "k", Class: "internal", Text: "x", Since: at(100), Tries: 1, Next: at(100.5)}},
		{"not yet", once, Try{}, pause(time.Second), Try{Since: at(100), Tries: 1, Next: at(101)}},
		{"still not yet", once, Try{Since: at(90), Tries: 5}, pause(time.Second), Try{Since: at(90), Tries: 6, Next: at(101)}},
		{"not yet, after a failure", once, Try{Class: "full", Since: at(90), Tries: 5}, pause(time.Second), Try{Since: at(100), Tries: 1, Next: at(101)}},
	} {
		test.want.Key = "k"
		if diff := cmp.Diff(test.want, book(test.task, test.old, test.err, at(100)), cmp.AllowUnexported(Try{})); diff != "" {
			t.Errorf("%s:\n%s", test.name, diff)
		}
	}
}
