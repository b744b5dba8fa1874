package raftfsm

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// bed is a mesh under test. Every entry goes through Encode and Decode, and
// after every one the invariants hold.
type bed struct {
	testing.TB
	*State
	log []Entry
}

// epochStart is the time of the first entry; each is a second after the last.
var epochStart = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func id(node string) string { return "id-" + node }

func member(name string) Node {
	return Node{ID: id(name), Name: name, Address: name + ".example:7946", Route: name + ".example:6222", Pin: "aa", Recipient: "age1" + name, Level: 1, Joined: epochStart}
}

// newBed is a mesh of these nodes.
func newBed(t testing.TB, nodes ...string) *bed {
	b := &bed{TB: t, State: New()}
	b.ok(nodes[0], Init{Mesh: Mesh{ID: "mesh-1", Level: 1}, Node: member(nodes[0])})
	for _, n := range nodes[1:] {
		b.join(n)
	}
	return b
}

func (b *bed) join(node string) {
	b.Helper()
	b.ok("alpha", AddToken{Hash: "token-" + node, Expires: epochStart.Add(time.Hour)})
	b.ok("alpha", Admit{Token: "token-" + node, Node: member(node), Keys: b.Mesh.Keys})
}

// removal is the removal of a node as its members ask for it.
func removal(s *State, node string) RemoveNode {
	return RemoveNode{ID: id(node), SealedTo: s.Without(id(node)), Secrets: "new keys"}
}

// apply applies c as an entry that the node proposed.
func (b *bed) apply(node string, c Command) *Rejection {
	b.Helper()
	n := len(b.log) + 1
	raw, err := Encode(Entry{Header{Actor: "root@" + node, Node: id(node), Time: epochStart.Add(time.Duration(n) * time.Second), ID: fmt.Sprint("e", n)}, c})
	if err != nil {
		b.Fatal(err)
	}
	e, err := Decode(raw)
	if err != nil {
		b.Fatal(err)
	}
	b.log = append(b.log, e)
	before := b.Clone()
	r := b.Apply(uint64(n), e)
	if r.Index != uint64(n) || b.Index != uint64(n) {
		b.Fatalf("index is %d and %d, want %d", r.Index, b.Index, n)
	}
	if r.Rejection != nil {
		before.Index = b.Index
		if x, y := snapshotOf(b, before), snapshotOf(b, b.State); !bytes.Equal(x, y) {
			b.Fatalf("rejected %T changed the state\nbefore %s\nafter  %s", c, x, y)
		}
	}
	if err := invariants(b.State); err != nil {
		b.Fatalf("after %T %+v: %v", c, c, err)
	}
	return r.Rejection
}

func (b *bed) ok(node string, c Command) {
	b.Helper()
	if r := b.apply(node, c); r != nil {
		b.Fatalf("%T was refused: %s: %v", c, r.Code, r)
	}
}

// refused checks the whole sentence that a user reads.
func (b *bed) refused(node string, c Command, code, sentence string) *Rejection {
	b.Helper()
	r := b.apply(node, c)
	if r == nil {
		b.Fatalf("%T was accepted, want %s", c, code)
	}
	if r.Code != code || r.Error() != sentence {
		b.Fatalf("%T was refused with\n  %s: %s\nwant\n  %s: %s", c, r.Code, r.Error(), code, sentence)
	}
	return r
}

// push pushes documents of any sort.
func push(docs ...any) Push {
	var p Push
	for _, d := range docs {
		switch d := d.(type) {
		case Module:
			p.Documents.Modules = append(p.Documents.Modules, d)
		case Assign:
			p.Documents.Assigns = append(p.Documents.Assigns, d)
		case Seat:
			p.Documents.Seats = append(p.Documents.Seats, d)
		default:
			panic(fmt.Sprintf("%T is no document", d))
		}
	}
	return p
}

func pending(p Push) Push { p.Pending = true; return p }

func snapshotOf(t testing.TB, s *State) []byte {
	t.Helper()
	var buf bytes.Buffer
	if _, err := s.WriteTo(&buf); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

const pgKind = "postgres-database"

// pg is a provider module, which claims the seat store.
func pg() Module {
	return Module{Name: "pg", Run: Run{Exec: []string{"/bin/pg"}}, Claims: []string{"store"}, Provides: map[string]Provide{pgKind: {Address: "{{ .node.address }}:5432"}}}
}

// app is a module that requires one database as db.
func app(name string, q Requirement) Module {
	if q.Kind == "" {
		q.Kind = pgKind
	}
	return Module{Name: name, Run: Run{Exec: []string{"/bin/" + name}}, Requires: map[string]Requirement{"db": q}}
}

// assign puts a module on nodes; edit changes the rest.
func on(module, nodes string, edit ...func(*Assign)) Assign {
	a := Assign{Module: module}
	if nodes == "all" {
		a.All = true
	} else {
		a.Nodes = strings.Split(nodes, ",")
	}
	for _, e := range edit {
		e(&a)
	}
	return a
}

func as(name string) func(*Assign)    { return func(a *Assign) { a.As = name } }
func deflt(kind string) func(*Assign) { return func(a *Assign) { a.Default = append(a.Default, kind) } }
func bound(req, provider string) func(*Assign) {
	return func(a *Assign) { a.Bind = map[string]string{req: provider} }
}
func exclusive(a *Assign) { a.Exclusive = true }

// provider is what the binding is bound to, and by which rule.
func (b *bed) provider(binding string) string {
	b.Helper()
	x, ok := b.Bindings[binding]
	if !ok {
		b.Fatalf("there is no binding %s; there are %v", binding, sorted(b.Bindings))
	}
	if x.Provider == "" {
		return "unbound"
	}
	return x.Provider + " (" + x.Chosen + ")"
}

func (b *bed) want(binding, provider string) {
	b.Helper()
	if got := b.provider(binding); got != provider {
		b.Fatalf("%s is bound to %s, want %s; refusal %q", binding, got, provider, b.Bindings[binding].Refusal)
	}
}

func (b *bed) phase(binding string, want Phase) {
	b.Helper()
	if got := b.Bindings[binding].Phase(); got != want {
		b.Fatalf("%s is %s, want %s", binding, got, want)
	}
}

// stage is the next credential of the binding, as the provider's node would
// report it.
func (b *bed) stage(binding string) NodeReport {
	x := b.Bindings[binding]
	return NodeReport{Staged: []Staged{{
		Binding: binding, Resource: x.Resource, To: b.Assignments[x.Consumer].Node,
		Generation: b.Resources[x.Resource].Last + 1, Sealed: "sealed", Address: Address{Host: "10.0.0.1", Port: 5432, TLS: "off"},
	}}}
}

// mark is a fact about the binding's newest credential.
func (b *bed) mark(binding, fact string) NodeReport {
	x := b.Bindings[binding]
	return NodeReport{Marks: []Mark{{Binding: binding, Resource: x.Resource, Generation: b.Resources[x.Resource].Last, Fact: fact}}}
}

// homeOf is the name of the node that the assignment is on.
func (b *bed) homeOf(assignment string) string { return b.NodeName(b.Assignments[assignment].Node) }

// use takes the binding through its whole life.
func (b *bed) use(binding string) {
	b.Helper()
	x := b.Bindings[binding]
	provider, consumer := b.homeOf(x.Provider), b.homeOf(x.Consumer)
	b.ok(provider, b.stage(binding))
	b.ok(provider, b.mark(binding, FactMinted))
	b.ok(consumer, b.mark(binding, FactDelivered))
	b.ok(provider, b.mark(binding, FactSeen))
	b.phase(binding, PhaseInUse)
}

func (b *bed) happened(text string) bool {
	return slices.ContainsFunc(b.Events, func(e Event) bool { return strings.Contains(e.Text, text) })
}
