// Package api is how a person's commands reach the node on this machine: JSON
// over HTTP/1.1 on a unix socket, the server of it and its client.
//
// Who may open the socket may change the whole mesh: the socket is root's and
// the group meshd's, mode 0660, and that is the only lock. The kernel says who
// the caller is (SO_PEERCRED), and that is the actor on record, never what the
// caller says of itself.
//
// Every request is bounded by MaxBody and refused when it has a field that the
// server does not know. Every error is an Error, with a status that fits it.
// Reading needs no quorum; an Overview says how old it is. No sealed secret
// leaves through here.
//
//	GET  /v1/overview?after=INDEX&wait=DURATION   Overview, once the state is newer than INDEX or the wait is over
//	GET  /v1/detail?name=NAME                     Detail of a binding, provider or assignment
//	POST /v1/plan     Change      -> Plan
//	POST /v1/push     Push        -> Committed
//	POST /v1/rm       raftfsm.Remove -> Committed
//	POST /v1/seat/move raftfsm.MoveSeat -> Committed
//	POST /v1/token    TokenRequest -> Token
//	POST /v1/node/rm  NodeRequest -> {}
//	POST /v1/leave    LeaveRequest -> {}
//	POST /v1/call     Call        -> CallReply
//	GET  /v1/verify                               Verified
//	POST /v1/bus-credential     BusCredentialRequest -> BusLogin
//	GET  /v1/bus-credential                       []BusCredential
//	POST /v1/bus-credential/rm  NodeRequest -> {}, with the name of a credential
//	GET  /v1/logs?name=&lines=&follow=            the output as text, streamed
package api

import (
	"context"
	"encoding/json"
	"io"
	"time"

	"meshd/raftfsm"
)

// Reader is what a node knows of the mesh, from its own copy.
type Reader interface {
	// Overview needs no quorum and asks no other node.
	Overview(ctx context.Context) (Overview, error)
	// Wait returns once the state's index is above after, or with ctx.
	Wait(ctx context.Context, after uint64) error
	// Detail is what is tried in vain for a binding, a provider or an
	// assignment, asked of the nodes that work on it. With an error it has what
	// the others said.
	Detail(ctx context.Context, name string) ([]Try, error)
}

// Writer changes the mesh.
type Writer interface {
	// Propose commits one command. A refusal is in the Result.
	Propose(ctx context.Context, actor string, cmd raftfsm.Command) (raftfsm.Result, error)
	// Preview says what a command would change, without changing it.
	Preview(ctx context.Context, actor string, cmd raftfsm.Command) (Plan, *raftfsm.Rejection)
}

// Caller asks seats and tools.
type Caller interface {
	// Call calls SEAT.VERB, NODE/SEAT.VERB or NODE/MODULE.TOOL.
	Call(ctx context.Context, target string, data []byte) (CallReply, error)
	// Verify compares who announces a seat with who is named. With an error it
	// has what the others said.
	Verify(ctx context.Context) ([]Finding, error)
}

// Members lets nodes in and out.
type Members interface {
	Token(ctx context.Context, actor string, ttl time.Duration) (string, error)
	RemoveNode(ctx context.Context, actor, name string) error
	// Leave takes this node out; forced, also where seats go dark with it.
	Leave(ctx context.Context, actor string, force bool) error
}

// BusCredentials lets an operator's own NATS client onto the bus of this node.
type BusCredentials interface {
	// AddBusCredential lets the owner of a key in for ttl.
	AddBusCredential(ctx context.Context, actor, publicKey string, ttl time.Duration) (BusLogin, error)
	BusCredentials() []BusCredential
	RemoveBusCredential(ctx context.Context, name string) error
}

// Logs reads what processes printed, wherever they run.
type Logs interface {
	// Logs writes the newest lines to w, and with follow what comes after them
	// until ctx ends.
	Logs(ctx context.Context, assignment string, lines int, follow bool, w io.Writer) error
}

// Overview is what one node can say of the mesh at once.
type Overview struct {
	Self    string          // the node's name
	Version string          // of its meshd
	State   *raftfsm.State  // without sealed secrets
	Leader  string          // name, "" for none
	Index   uint64          // of State
	Age     time.Duration   // since the last word from a leader; -1: none was heard out since the node started
	Quorum  bool            // a leader is known, so something can change
	Missing []string        // names of voters that do not answer
	Alive   map[string]bool // by node name; a hint
	Voters  []string        // names
	Refused []Refusal       // on this node
	Now     time.Time       // by this node's clock
}

// Refusal is a subject of the bus that an assignment asks for and is not granted.
type Refusal struct {
	Assignment string
	Action     string // publish, subscribe, or reply: as package bus has it
	Subject    string
	Count      int
	First      time.Time
	Last       time.Time
}

// Try is one thing that a node tries in vain.
type Try struct {
	Key   string // what it works on, such as "pg-main/postgres-database: mint shop@gamma/db 1"
	Step  string
	Class string
	Text  string
	Since time.Time // of the class
	Tries int
	Next  time.Time
}

// Detail is the tries, and why some nodes could not be asked.
type Detail struct {
	Tries   []Try
	Problem string `json:",omitempty"`
}

// Change is a command to preview: exactly one of the two.
type Change struct {
	Push   *Push           `json:",omitempty"`
	Remove *raftfsm.Remove `json:",omitempty"`
}

// Push is a manifest after parsing, of any size up to MaxBody.
type Push struct {
	Documents raftfsm.Documents
	Pending   bool   // accept a named provider or holder that is not there yet
	At        uint64 // the plan's At; 0 is any
}

// Plan is what a change would change, and by which state.
type Plan struct {
	raftfsm.Plan
	// Own is 0 where the state is as new as the leader's was when the plan was asked
	// for; else no leader said how new that is, and Own is the index of the node's
	// own copy.
	Own uint64 `json:",omitempty"`
}

// Committed is the index of the log at which a change was made.
type Committed struct{ Index uint64 }

// TokenRequest asks for a join token that is good for TTL.
type TokenRequest struct{ TTL time.Duration }

// Token is a join token. It is a secret.
type Token struct{ Token string }

// NodeRequest names a node.
type NodeRequest struct{ Name string }

// LeaveRequest takes a node out; forced, also where seats go dark with it.
type LeaveRequest struct{ Force bool }

// BusCredentialRequest asks for a key to be let in. The seed stays with whoever
// asks.
type BusCredentialRequest struct {
	PublicKey string // of an nkey of a user
	TTL       time.Duration
}

// BusCredential is a key that is let in.
type BusCredential struct {
	Name      string
	PublicKey string
	Actor     string // who asked for it
	Expires   time.Time
}

// BusLogin is a credential, and what its client needs to know.
type BusLogin struct {
	BusCredential
	URL   string
	Inbox string // prefix of the client's inboxes
	Calls string // prefix of the subjects on which it calls
}

// Call is a request to a seat or tool.
type Call struct {
	Target string
	Data   json.RawMessage
	Within time.Duration // for the answer; 0: DefaultWithin; at most MaxWithin
}

// How long a call may take.
const (
	DefaultWithin = 5 * time.Second
	MaxWithin     = time.Minute
)

// CallReply is what answered, and as whom.
type CallReply struct {
	Data  json.RawMessage
	Seat  string // "" for a tool
	Epoch uint64 // of a mesh seat; 0 otherwise
	Node  string // name
}

// Finding is one difference between who answers a seat and who is named.
type Finding struct {
	Node string
	Seat string
	Text string
}

// Verified is the findings, and why some nodes could not be asked.
type Verified struct {
	Findings []Finding
	Problem  string `json:",omitempty"`
}

// nothing is an empty request or reply.
type nothing struct{}
