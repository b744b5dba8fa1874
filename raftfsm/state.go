// Package raftfsm is the model of a mesh: its state, the commands that change
// it, and what follows from it for each node.
//
// It is pure. It does no I/O, reads no clock and no randomness, and starts no
// goroutine: time, ids and actors come in with the entry. Two nodes that apply
// the same entries hold the same bytes, and a plan is the difference between a
// state and a copy of it to which the command was applied, so a plan cannot
// disagree with the push that follows it.
//
// Invariants, after every Apply:
//
//   - A rejected command changes nothing but Index.
//   - Each field has one writer: a push writes what is desired, the provider's
//     node what it staged, minted and saw, the consumer's node what it delivered
//     and found healthy, the leader the holders.
//   - A bound binding names one provider, which is there and of its kind, and
//     never the consumer itself. It was recorded when it was bound; nothing but
//     a push that names another changes it.
//   - A binding has at most two credentials, and no generation of a resource is
//     used twice.
//   - A seat's holder claims it, and each change of a holder has a new epoch.
//   - A seat's Session is the open session of its holder's node, or 0. While a
//     claim on it is in Former it has no holder: so whoever may answer a seat by
//     a lease that is not known to have ended is on one node.
//   - A session is a node's only one. It ends by its lease (CloseSession) or with
//     the process that had it (OpenSession of another run), by nothing else.
//   - A kind has at most one default.
//   - Secrets are here only sealed.
//
// A binding's life, computed by Phase and never stored as text, with the one
// that makes each step:
//
//	unbound    the provider that it names is not there, or a node of
//	   |       `nodes: all` has none to take
//	   |  a push, a join or a seat's new holder brings one
//	waiting <----------------------------- its consumer moved to another node
//	   |  Staged, by the provider's node: the secret is in the log
//	staged
//	   |  FactMinted, by the provider's node: it exists, a login worked
//	minted
//	   |  FactDelivered, by the consumer's node: a login from there worked
//	delivered
//	   |  what its Proof asks: FactSeen by the provider's node, FactHealthy by
//	   |  the consumer's, or nothing more
//	in-use
//
// From each of them it can end: its consumer is removed, its requirement goes
// or names another provider. Logins that it had become a Withdrawal, which ends
// when the provider's node has proven them dead; the Resource stays, retained.
//
// Values in the maps are replaced, never changed in place: a reader that holds
// one under the lock may keep it after.
package raftfsm

import (
	"maps"
	"slices"
	"time"
)

// State is the whole of what a mesh has agreed on. The zero State is a mesh
// that was not initialised; use New.
type State struct {
	Index       uint64 // of the last entry applied
	Mesh        Mesh
	Nodes       map[string]Node           // by node id
	Removed     map[string]Removal        // by node id: nodes that were removed; refused for ever
	Tokens      map[string]Token          // by the hash of the secret
	Seats       map[string]Seat           // by name
	Modules     map[string]Module         // by name
	Everywhere  map[string]Assign         // `nodes: all` rules, by module
	Assignments map[string]Assignment     // by name
	Bindings    map[string]Binding        // by BindingID
	Resources   map[string]Resource       // by ResourceID
	Withdrawals map[string]Withdrawal     // by id
	Providers   map[string]ProviderStatus // by ProviderID: what its node last said of it
	Parts       map[string][]Documents    // pushes in several entries, by push id, until committed
	Events      []Event                   // the newest, oldest first, at most maxEvents
	Leases
}

// Mesh is what is true of the mesh as a whole.
type Mesh struct {
	ID         string
	Generation uint64 // raised by a recovery that may lower Index
	Changed    uint64 // index of the last entry that changed what is desired: what a plan was made at
	Level      int    // feature level that every member supports
	CACert     string // PEM
	Recovery   string // recipient of the operator's recovery key

	// Secrets are the mesh's own keys, sealed to every node that was a member when
	// they were made; Keys is the index of the entry that made them, 0 for the first
	// ones. SecretsOf reads both.
	Secrets string `json:",omitempty"`
	Keys    uint64 `json:",omitempty"`

	Differences []Difference `json:",omitempty"` // between who answers and who is named, as the leader last found; replaced as a whole
}

// Node is a member. Its identity is its key: ID is derived from it.
type Node struct {
	ID        string
	Name      string // unique; [a-z0-9][a-z0-9-]{0,39}
	Address   string // host:port of the mesh port, as it was when it joined
	Route     string // host:port of the bus routes
	Pin       string // lower-case hex SHA-256 of the key's SubjectPublicKeyInfo
	Recipient string // what secrets for this node are sealed to
	Secrets   string // the mesh's own keys, sealed to this node; empty where Mesh.Secrets are for it
	Level     int    // newest feature level its build supports
	Joined    time.Time
}

// Removal is when a node was removed, and by whom.
type Removal struct {
	At time.Time
	By string // actor
}

// Token admits one node, once. The log holds the hash of its secret only.
type Token struct {
	Hash    string // hex SHA-256 of the secret
	Expires time.Time
	Used    string // id of the node that it admitted
}

// Scopes of a seat.
const (
	ScopeMesh = "mesh" // at most one holder, the one that the log names
	ScopeNode = "node" // every node that runs a claiming module
)

// What happens to a mesh seat whose holder's node is lost.
const (
	FailoverAuto   = "auto"   // another claimant is named
	FailoverManual = "manual" // it goes dark
)

// Seat is a role with verbs on the bus.
type Seat struct {
	Name       string
	Scope      string
	Delivers   string   `json:",omitempty"` // kind whose default provider the holder is
	Verbs      []string `json:",omitempty"`
	Idempotent []string `json:",omitempty"` // those of Verbs that are idempotent: a call that may have run is made again
	Want       string   `json:",omitempty"` // assignment that the user named as holder
	Failover   string   `json:",omitempty"` // FailoverAuto, FailoverManual, or "": see FailsOver

	Holder  string    `json:",omitempty"` // assignment; written by the leader
	Epoch   uint64    `json:",omitempty"` // Generation<<48 | index of the entry that named or vacated it, or gave it its Session
	Session uint64    `json:",omitempty"` // under which Holder may answer; 0: nobody may, the seat is dark
	Since   time.Time // of the last change of Holder, Epoch or Session
}

// FailsOver reports whether another claimant is named when the holder's node is
// lost. A seat that delivers a provision does so only when it says so: to answer
// from another machine's data is worse than not to answer.
func (s Seat) FailsOver() bool {
	return s.Failover == FailoverAuto || s.Failover == "" && s.Delivers == ""
}

// Assignment is one module on one node.
type Assignment struct {
	Name      string
	Module    string
	Node      string            // node id
	Named     bool              `json:",omitempty"` // it has an `as:`
	Rule      bool              `json:",omitempty"` // it comes from a `nodes: all`
	Bind      map[string]string `json:",omitempty"` // requirement -> provider
	Default   []string          `json:",omitempty"` // kinds it is the mesh's default provider of
	Exclusive bool              `json:",omitempty"`
	Address   string            `json:",omitempty"` // overrides every provision's address
	Env       map[string]string `json:",omitempty"`
	Health    *Health           `json:",omitempty"`
	Limits    *Limits           `json:",omitempty"`

	Revision uint64 // index of the last entry that changed what its process is started with, or where
	Report   Report // of its node
}

// owner is whose data it works on: its own with an `as:`, and otherwise that of
// all the replicas of its module. No `as:` has an @, so the two cannot meet.
func (a Assignment) owner() string {
	if a.Named {
		return a.Name
	}
	return a.Module + "@all"
}

// Report is what an assignment's node last said of its process.
type Report struct {
	State string `json:",omitempty"` // as package supervise names it; "" before the first report
	Class string `json:",omitempty"` // class of the fault, "" for none
	Since time.Time
}

// Credential is one generation of a binding's login.
type Credential struct {
	Generation uint64
	Login      string // physical name
	Sealed     string // the secret, for both nodes and the recovery key
	Address    Address
	Minted     bool `json:",omitempty"` // it exists, and a login with it worked
	Delivered  bool `json:",omitempty"` // a login from the consumer's node worked, files are written
	Healthy    bool `json:",omitempty"` // the consumer's health check passed after delivery
	Seen       bool `json:",omitempty"` // the service saw a session of it
}

// Address is where a consumer reaches a service, as its node rendered it.
type Address struct {
	Host string
	Port int
	TLS  string // verify-full, require or off
	CA   string `json:",omitempty"` // PEM
}

// Trouble is the fault that holds a binding or a provider up, as its node sees it.
type Trouble struct {
	Step  string
	Class string
	Since time.Time // when this class began
}

// Binding is one consumer's one requirement bound to one provider.
type Binding struct {
	Consumer    string // assignment
	Requirement string
	Kind        string
	Provider    string `json:",omitempty"` // assignment; "" is unbound
	Naming      string `json:",omitempty"` // what the user wrote to choose it: "bind pg-main", "provider pg-main", "node alpha", "" for nothing
	Chosen      string `json:",omitempty"` // the rule that chose it: one of the Chosen constants
	Refusal     string `json:",omitempty"` // why it is unbound, and the way out
	Resource    string `json:",omitempty"`
	Proof       string // ProofLogin, ProofHealth or ProofDelivered

	Credentials []Credential `json:",omitempty"` // ascending generations, at most two
	AtProvider  *Trouble     `json:",omitempty"`
	AtConsumer  *Trouble     `json:",omitempty"`
	Since       time.Time    // of the present Phase
}

// What counts as a consumer using its login.
const (
	ProofLogin     = "login"     // the service saw a session of it
	ProofHealth    = "health"    // the consumer's health check passed after delivery
	ProofDelivered = "delivered" // delivery is enough
)

// How a binding's provider was chosen.
const (
	ChosenOverride = "assignment" // the assignment's `bind:`
	ChosenProvider = "provider"   // the requirement's `provider:`
	ChosenNode     = "node"       // the requirement's `node:`
	ChosenLocal    = "own node"   // the only provider of the kind on the consumer's node
	ChosenDefault  = "default"    // the declared default of the kind
	ChosenSeat     = "seat"       // the holder of the seat that delivers the kind
)

// Resource is the database, bucket or vhost that a binding's logins work on.
// It outlives its bindings: retained is a resource that no binding refers to.
type Resource struct {
	Provider    string // assignment
	Kind        string
	Owner       string // the consumer's `as:`, or MODULE@all for the replicas without one
	Requirement string
	Name        string // physical, at most 40 bytes of [a-z0-9_]
	Last        uint64 // newest generation handed out on it
	Made        bool   `json:",omitempty"` // a login on it was minted at least once, so data may exist
	Since       time.Time
}

// Withdrawal is logins to be proven dead at a provider. It needs nothing of the
// consumer, which is gone already.
type Withdrawal struct {
	Binding     string // the id of the binding that it was
	Provider    string // assignment
	Kind        string
	Resource    string
	Credentials []Credential
	Trouble     *Trouble `json:",omitempty"`
	Since       time.Time
}

// ProviderStatus is what a provider's node last said of it.
type ProviderStatus struct {
	Ready   bool // its preflight passed
	Address Address
	Trouble *Trouble `json:",omitempty"`
	Since   time.Time
}

// Event is one thing that happened, in the words of the command line.
type Event struct {
	Index uint64
	Time  time.Time
	Actor string
	Node  string // name or id of the node that proposed it
	Text  string
}

// maxEvents bounds State.Events: about 100 KiB of a snapshot.
const maxEvents = 512

// New returns the empty state.
func New() *State {
	return &State{
		Nodes: map[string]Node{}, Removed: map[string]Removal{}, Tokens: map[string]Token{},
		Seats: map[string]Seat{}, Modules: map[string]Module{}, Everywhere: map[string]Assign{},
		Assignments: map[string]Assignment{}, Bindings: map[string]Binding{}, Resources: map[string]Resource{},
		Withdrawals: map[string]Withdrawal{}, Providers: map[string]ProviderStatus{}, Parts: map[string][]Documents{},
		Leases: Leases{Sessions: map[string]Session{}, Former: map[string]Claim{}},
	}
}

// Clone returns a copy that shares no map with s. The values are shared: they
// are never changed in place.
func (s *State) Clone() *State {
	c := *s
	c.Nodes, c.Removed, c.Tokens = maps.Clone(s.Nodes), maps.Clone(s.Removed), maps.Clone(s.Tokens)
	c.Seats, c.Modules, c.Everywhere = maps.Clone(s.Seats), maps.Clone(s.Modules), maps.Clone(s.Everywhere)
	c.Assignments, c.Bindings, c.Resources = maps.Clone(s.Assignments), maps.Clone(s.Bindings), maps.Clone(s.Resources)
	c.Withdrawals, c.Providers, c.Parts = maps.Clone(s.Withdrawals), maps.Clone(s.Providers), maps.Clone(s.Parts)
	c.Sessions, c.Former = maps.Clone(s.Sessions), maps.Clone(s.Former)
	c.Events = slices.Clone(s.Events)
	return &c
}

// BindingID is the key of a binding: "shop@gamma/db".
func BindingID(consumer, requirement string) string { return consumer + "/" + requirement }

// ID is the binding's key.
func (b Binding) ID() string { return BindingID(b.Consumer, b.Requirement) }

// ProviderID is the key of a provider: its assignment and the kind.
func ProviderID(assignment, kind string) string { return assignment + "/" + kind }

// ResourceID is the key of a resource: replicas of one module share it, and a
// consumer that moves keeps it.
func ResourceID(provider, kind, owner, requirement string) string {
	return provider + "/" + kind + "/" + owner + "/" + requirement
}

// Newest is the credential of the highest generation, or nil.
func (b Binding) Newest() *Credential {
	if len(b.Credentials) == 0 {
		return nil
	}
	return &b.Credentials[len(b.Credentials)-1]
}

// NodeNamed finds a member by name.
func (s *State) NodeNamed(name string) (Node, bool) {
	for _, n := range s.Nodes {
		if n.Name == name {
			return n, true
		}
	}
	return Node{}, false
}

// Without are the ids of the members other than id, sorted.
func (s *State) Without(id string) []string {
	return slices.DeleteFunc(sorted(s.Nodes), func(m string) bool { return m == id })
}

// SecretsOf are the mesh's own keys as they are sealed to that member, or "".
func (s *State) SecretsOf(node string) string {
	n, member := s.Nodes[node]
	if member && n.Secrets == "" {
		return s.Mesh.Secrets
	}
	return n.Secrets
}

// NodeName is the name of the node with that id, or the id of one that is gone.
func (s *State) NodeName(id string) string {
	if n, ok := s.Nodes[id]; ok {
		return n.Name
	}
	return id
}

// sorted returns the keys in order: nothing here depends on map order.
func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func has[V any](m map[string]V, k string) bool {
	_, ok := m[k]
	return ok
}
