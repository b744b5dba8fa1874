package raftfsm

import "time"

// Init is the first entry of a mesh.
type Init struct {
	Mesh Mesh
	Node Node // the first member
}

// AddToken admits one future node.
type AddToken struct {
	Hash    string
	Expires time.Time // judged by whoever proposes Admit, never here
}

// Admit makes a node a member and uses its token up, in one entry. The same
// node with the same token again changes its addresses only.
type Admit struct {
	Token string // hash
	Node  Node
	Keys  uint64 `json:",omitempty"` // Mesh.Keys of what Node.Secrets hold: refused once there are newer ones
}

// UpdateNode is a member's own word on itself: its addresses, its build.
type UpdateNode struct {
	ID      string
	Address string
	Route   string
	Level   int
}

// RemoveNode expels a member. Secrets are the mesh's own keys, made anew and sealed
// to all that remain, once: 131 bytes each.
type RemoveNode struct {
	ID       string
	SealedTo []string // ids, sorted: refused where those that remain are others
	Secrets  string
}

// PushPart carries a piece of a push too big for one entry. It changes nothing
// until the Push of the same id.
type PushPart struct {
	Push string
	Seq  int // from 0, without gaps
	Part Documents
}

// Push makes the documents, and those of its parts, what is desired.
type Push struct {
	ID        string // of its parts; "" for none
	Parts     int
	Documents Documents
	Pending   bool   // accept a named provider or node that does not exist yet
	At        uint64 // refuse when the state is newer than this index; 0 is any
}

// What a Remove removes, and what a plan's Change is of.
const (
	WhatModule     = "module"
	WhatAssignment = "assignment"
	WhatSeat       = "seat"
	WhatBinding    = "binding" // in a Change only
	WhatNode       = "node"    // in a Change only: RemoveNode removes one
)

// Remove stops and withdraws. Data stays, retained.
type Remove struct {
	What string // WhatModule, WhatAssignment or WhatSeat
	Name string
}

// NodeReport is what a node saw since its last report: as the provider's node,
// the consumer's, and the one that runs a process. Every part is conditional;
// one that no longer fits the state is dropped.
type NodeReport struct {
	Staged    []Staged         `json:",omitempty"`
	Marks     []Mark           `json:",omitempty"`
	Withdrawn []Withdrawn      `json:",omitempty"`
	Troubles  []TroubleReport  `json:",omitempty"`
	Processes []ProcessReport  `json:",omitempty"`
	Providers []ProviderReport `json:",omitempty"`
}

// Staged is a new credential of a binding, not yet at the service.
type Staged struct {
	Binding    string
	Resource   string // the binding's, as its node saw it
	To         string // id of the consumer's node that Sealed is for, as its node saw it
	Generation uint64 // the resource's Last + 1
	Sealed     string
	Address    Address
}

// Facts about a credential that a Mark records.
const (
	FactMinted    = "minted"    // by the provider's node
	FactSeen      = "seen"      // by the provider's node
	FactDelivered = "delivered" // by the consumer's node
	FactHealthy   = "healthy"   // by the consumer's node
)

// Mark records one fact about one credential. It is never unsaid: what went bad
// afterwards is a Trouble.
type Mark struct {
	Binding    string
	Resource   string // the binding's, as its node saw it: with Generation, it is one credential for ever
	Generation uint64
	Fact       string
}

// Withdrawn says that the logins of a Withdrawal are proven dead.
type Withdrawn struct {
	ID    string
	Ended int // sessions that it closed
}

// Sides of a binding that report troubles.
const (
	SideProvider = "provider"
	SideConsumer = "consumer"
)

// TroubleReport sets or, with an empty Class, clears the trouble of a binding
// at one side, or of a withdrawal.
type TroubleReport struct {
	Binding    string `json:",omitempty"`
	Side       string `json:",omitempty"` // SideProvider or SideConsumer, with Binding
	Withdrawal string `json:",omitempty"`
	Step       string
	Class      string
}

// ProcessReport is the state of an assignment's process.
type ProcessReport struct {
	Assignment string
	State      string
	Class      string
}

// ProviderReport is the state of one provider.
type ProviderReport struct {
	Provider string // ProviderID
	Ready    bool
	Address  Address
	Step     string
	Class    string
}

// Hold names the holder of a mesh seat, or with an empty Assignment vacates it.
// It is refused while a node that is not the new holder's may still answer. With
// an empty Assignment it takes a seat that was removed as well, to settle the
// claim on it that is in Former.
type Hold struct {
	Seat       string
	Assignment string
	IfEpoch    uint64 // the epoch that it replaces
	Released   uint64 // the epoch that the present or former holder's node has said it let go of: its gate is shut
}

// OpenSession begins the session of a member that renews its lease under an
// incarnation that has none. It ends the node's older session, and what that
// held is held by the new one: the lock on the data directory, which the new
// process holds, proves the old one dead. The same incarnation again changes
// nothing.
type OpenSession struct {
	Node        string // id
	Incarnation string // Session.Incarnation
	TTL         time.Duration
}

// CloseSession ends a session whose lease can no longer be valid, of a member or
// of a node that was removed. Each seat under it moves or goes dark. Moves that
// an entry has no room for may be left out: a Hold names their holders after.
type CloseSession struct {
	Node    string            // id
	Session uint64            // refused when it is not the open one
	Moves   map[string]string `json:",omitempty"` // seat -> the assignment that takes over, if its node has a session by then
}

// MoveSeat names the claimant that should hold a mesh seat, as a push with holder:
// does; the leader hands over. It is refused where that one could not answer now.
type MoveSeat struct {
	Seat       string
	Node       string // name, of the node that has the claimant
	Assignment string `json:",omitempty"` // which of its claimants; "" is the only one
}

func (Init) name() string         { return "init" }
func (AddToken) name() string     { return "token" }
func (Admit) name() string        { return "admit" }
func (UpdateNode) name() string   { return "node" }
func (RemoveNode) name() string   { return "node-rm" }
func (PushPart) name() string     { return "push-part" }
func (Push) name() string         { return "push" }
func (Remove) name() string       { return "rm" }
func (NodeReport) name() string   { return "report" }
func (Hold) name() string         { return "hold" }
func (OpenSession) name() string  { return "session-open" }
func (CloseSession) name() string { return "session-close" }
func (MoveSeat) name() string     { return "seat-move" }
