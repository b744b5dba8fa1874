package raftfsm

import "time"

// Documents is what a user pushes: a manifest after parsing. A push upserts
// what it names and deletes nothing.
type Documents struct {
	Modules []Module `json:",omitempty"`
	Assigns []Assign `json:",omitempty"`
	Seats   []Seat   `json:",omitempty"` // the user's fields only
}

// Module is what a user describes: how it runs, what it provides, requires,
// claims and serves.
type Module struct {
	Name        string
	Run         Run
	Claims      []string                      `json:",omitempty"` // seats it may hold
	Provides    map[string]Provide            `json:",omitempty"` // by kind
	Requires    map[string]Requirement        `json:",omitempty"` // by the requirement's name
	Calls       []string                      `json:",omitempty"` // SEAT.VERB, NODE/SEAT.VERB or NODE/MODULE.TOOL
	Tools       map[string]Handler            `json:",omitempty"` // its own, served on every node that runs it
	Serves      map[string]map[string]Handler `json:",omitempty"` // seat -> verb
	Env         map[string]string             `json:",omitempty"` // values may be templates over the bindings
	Health      *Health                       `json:",omitempty"`
	Limits      *Limits                       `json:",omitempty"`
	OnRotate    string                        `json:",omitempty"` // restart, signal HUP or none
	ReadyWithin time.Duration                 `json:",omitempty"` // `ready-within`; 0 is DefaultReady
	StopGrace   time.Duration                 `json:",omitempty"` // grace between SIGTERM and SIGKILL; 0 is the supervisor's
}

// DefaultReady is how long a consumer may take to be in use before it is
// un-ready: a minute covers a cold container and a slow service.
const DefaultReady = 60 * time.Second

// Run says how a module's process is started. A module with no Exec is
// external: delivered to, not started.
type Run struct {
	Exec []string `json:",omitempty"`
	User string   `json:",omitempty"` // "" is the user that meshd runs as
	Dir  string   `json:",omitempty"`
}

// External reports that the mesh starts no process for it.
func (r Run) External() bool { return len(r.Exec) == 0 }

// Provide is one kind that a module provides.
type Provide struct {
	Address string            `json:",omitempty"` // host:port, a template over .node; where consumers connect
	TLS     string            `json:",omitempty"` // verify-full, require, off; "" is the kind's default
	CA      string            `json:",omitempty"` // file reference of a PEM bundle
	Options map[string]string `json:",omitempty"` // the kind's own keys; `file:` values are read on the provider's node
}

// Requirement is one named need.
type Requirement struct {
	Kind     string
	Provider string `json:",omitempty"` // names a provider by identity
	Node     string `json:",omitempty"` // names the one on that node
	Proof    string `json:",omitempty"` // "" is ProofLogin
}

// Handler says what answers a verb or a tool. Exactly one field is set.
type Handler struct {
	Exec    []string `json:",omitempty"` // JSON on stdin, JSON on stdout
	HTTP    string   `json:",omitempty"` // URL on loopback; POST
	Bus     bool     `json:",omitempty"` // the module's own connection
	Builtin string   `json:",omitempty"` // kind whose provisioner answers
}

// Health is how a process is checked. Exactly one of HTTP, TCP and Exec is set.
type Health struct {
	HTTP    string        `json:",omitempty"`
	TCP     string        `json:",omitempty"`
	Exec    []string      `json:",omitempty"`
	Every   time.Duration `json:",omitempty"`
	Timeout time.Duration `json:",omitempty"`
	Grace   time.Duration `json:",omitempty"` // after the start, in which a failure does not count
	Fails   int           `json:",omitempty"` // in a row, to be unhealthy
}

// Limits bound a process by cgroup. Zero is no limit.
type Limits struct {
	Memory int64 `json:",omitempty"` // bytes
	CPU    int64 `json:",omitempty"` // thousandths of a core
	PIDs   int64 `json:",omitempty"`
}

// Assign puts a module on nodes.
type Assign struct {
	Module    string
	Nodes     []string          `json:",omitempty"` // names
	All       bool              `json:",omitempty"` // every node, those that join later too
	As        string            `json:",omitempty"` // name of the one assignment
	Bind      map[string]string `json:",omitempty"`
	Default   []string          `json:",omitempty"`
	Exclusive bool              `json:",omitempty"`
	Address   string            `json:",omitempty"`
	Env       map[string]string `json:",omitempty"`
	Health    *Health           `json:",omitempty"`
	Limits    *Limits           `json:",omitempty"`
}
