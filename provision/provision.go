// Package provision is the contract between the mesh and the backing services:
// it makes one credential true at one service, or gone.
//
// The rules that every kind keeps, and that provisiontest checks:
//
//   - Every method is idempotent and safe to repeat after a crash at any point
//     in it. "Already there" is success only when the thing carries our mark;
//     "already gone" is always success.
//   - The caller has made the secret durable (sealed, in the log) before it
//     calls Ensure, so a crash between the two leaves nothing unknown.
//   - Names are the caller's: computed once, stored, never recomputed here.
//   - Withdrawn or retired means that a login was tried and refused, and that
//     the login's live sessions are gone.
//   - Data is never dropped, except by Purge.
//   - No secret appears in an error, a log line or an argument list.
//
// One goroutine at a time calls a Provider; different Providers run at once.
// The package imports no database driver and starts no goroutine.
package provision

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Kind is one sort of backing service, such as postgres-database. A Kind has
// no state: it opens Providers on the provider's node and checks deliveries on
// the consumer's.
type Kind interface {
	// Name is the word that a manifest uses, such as "postgres-database".
	Name() string

	// Traits says what the kind can and cannot do.
	Traits() Traits

	// Open returns the Provider for the service that cfg describes. It does not
	// connect: a service that is down shows in the first call, not here. An
	// error is a fault in cfg itself.
	Open(cfg Config) (Provider, error)

	// Fields returns what is delivered to a consumer of res through login: one
	// entry per file of the binding directory ("type", "host", "port",
	// "username", "password", "database", "uri", ...). It is pure.
	Fields(at Address, res Resource, login Login) map[string]string

	// Check logs in with the very bytes that were delivered, from wherever it
	// runs, and proves that the login works on its resource. On the consumer's
	// node it is the proof of reachability and TLS.
	Check(ctx context.Context, fields map[string]string) error
}

// Provider is one backing service, administered from its own node. Every error
// it returns is an *Error.
type Provider interface {
	// Preflight proves that the service is up, writable and that our admin has
	// every right the other methods need; the error names each missing one.
	Preflight(ctx context.Context) error

	// Ensure makes the resource and the login exist and be right, whatever was
	// there before: it also mends what was changed by hand.
	Ensure(ctx context.Context, res Resource, login Login) error

	// Verify logs in as login, at the address that consumers are given, and
	// proves that it works on res and not as somebody else.
	Verify(ctx context.Context, res Resource, login Login) error

	// InUse counts the live sessions of login, without being one of them. For a
	// kind whose Traits say that it cannot see them the result is -1.
	InUse(ctx context.Context, login Login) (sessions int, err error)

	// Withdraw disables the logins, ends their sessions, proves that they no
	// longer work, and removes them; res and its data stay and remain ours. With
	// logins of which other generations are live it is the retirement of a
	// rotation. ended is how many sessions it closed.
	Withdraw(ctx context.Context, res Resource, logins []Login) (ended int, err error)

	// Purge destroys res and its data. All of its logins were withdrawn before.
	Purge(ctx context.Context, res Resource) error

	// Observe lists everything at the service that carries our mark.
	Observe(ctx context.Context) ([]Found, error)

	// Close frees what the Provider holds. It is not called during another call.
	Close() error
}

// Answerer is a Provider that also answers the verbs of a seat that delivers its
// kind, without a program of the user's. Answer may be called by any number of
// goroutines, and beside the one that calls the Provider's other methods, but
// not during or after Close.
type Answerer interface {
	// Answer returns the reply to verb as JSON. arg is the caller's JSON, empty
	// where there is none. The error for a verb that it does not know lists those
	// that it does; every error is an *Error.
	Answer(ctx context.Context, verb string, arg []byte) ([]byte, error)
}

// Watcher is a Provider that notices when its service goes away, without asking
// again and again. Watch may be called beside the other methods, once at a time,
// but not during or after Close.
type Watcher interface {
	// Watch blocks while the service is there, and returns when it has gone, when it
	// cannot tell, or with ctx. What it returns is no verdict: that is Preflight's.
	Watch(ctx context.Context) error
}

// Traits are the facts about a kind that plans and proofs depend on.
type Traits struct {
	Overlap   bool // two generations of a login can be valid at once
	SeesInUse bool // live sessions can be told per login
	TLS       bool // the kind can speak TLS, so `tls:` applies to it
}

// TLS modes of an address. VerifyFull is the default off loopback, Off on it.
const (
	VerifyFull = "verify-full" // encrypted; certificate and host name checked
	Require    = "require"     // encrypted; certificate not checked
	Off        = "off"         // plain text
)

// Address is where consumers reach the service. It may differ from where the
// admin connects (a pooler, another interface).
type Address struct {
	Host string // DNS name or IP literal, without brackets
	Port int
	TLS  string // VerifyFull, Require or Off; never empty here
	CA   string // PEM bundle that VerifyFull checks against; empty means the system's roots
}

// Config describes one service to Kind.Open.
type Config struct {
	Mesh    string            // mesh id; part of every mark, so two meshes never take each other's things
	Address Address           // what consumers are given
	Options map[string]string // the provider's own keys of the manifest, such as "admin"; file references are resolved to contents by the caller
}

// Resource is the database, bucket or vhost that logins work on.
type Resource struct {
	ID   string // stable identity in the mesh; part of the mark
	Name string // physical name, [a-z0-9_], at most 40 bytes
}

// Login is one generation of one consumer's credential.
type Login struct {
	Name   string // physical name, [a-z0-9_], at most 30 bytes, unique per binding and generation
	Secret string // 32 or more of A-Z a-z 0-9; empty where only the name matters
}

// Mark is the text that everything we make at a service carries. id is the
// Resource.ID, for a resource and for every login that works on it; an empty id
// gives the prefix that all marks of one mesh share.
func Mark(mesh, id string) string { return "meshd:" + mesh + ":" + id }

// Found is one marked thing that Observe saw.
type Found struct {
	Name  string // physical name
	Mark  string // Mark(mesh, Resource.ID); a login's is that of its resource
	Login bool   // a login, otherwise a resource
}

// Class sorts errors into what a person does about them. The class of a
// binding's error is in the log; its text is not.
type Class string

const (
	Unreachable  Class = "unreachable"   // no connection: down, a firewall, a wrong address
	TLSFault     Class = "tls"           // reached, but the TLS handshake or the certificate check failed
	Refused      Class = "login-refused" // reached, and the credential was refused
	ReadOnly     Class = "read-only"     // up, but does not take writes
	Recovery     Class = "in-recovery"   // up, but a standby or still starting
	Full         Class = "full"          // out of disk, connections or quota
	MissingRight Class = "missing-right" // our admin may not do what it must
	Foreign      Class = "not-ours"      // the name exists without our mark
	Blocked      Class = "blocked"       // something holds the thing we would remove; the text names it
	BadConfig    Class = "bad-config"    // the provider's own settings are wrong
	TimedOut     Class = "timed-out"     // no answer within the deadline
	Internal     Class = "internal"      // none of the above
)

// Error is what a Provider or a Check returns: the step that failed, the class
// and the cause. Its text is safe to show: it holds no secret.
type Error struct {
	Step  string // what was being done, such as "create role" or "log in"
	Class Class
	Err   error
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %v", e.Step, e.Err) }
func (e *Error) Unwrap() error { return e.Err }

// ClassOf returns the class of err: TimedOut for a deadline that passed,
// Internal where err carries none, "" for nil.
func ClassOf(err error) Class {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Class
	case errors.Is(err, context.DeadlineExceeded):
		return TimedOut
	}
	return Internal
}

// Kinds is the set of kinds that a node was built with.
type Kinds []Kind

// Find returns the kind of that name, or nil.
func (k Kinds) Find(name string) Kind {
	i := slices.IndexFunc(k, func(k Kind) bool { return k.Name() == name })
	if i < 0 {
		return nil
	}
	return k[i]
}
