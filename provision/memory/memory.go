// Package memory is the kind "memory": a backing service without a process, for
// tests of everything that stands on package provision.
//
// A World holds Servers by their address. Each node of a test gets a Kind of its
// own from World.Kind; all of them reach the same Servers, so that a credential
// made by one node's Provider is checked by another's. A Server keeps resources,
// logins and live sessions as a real one does, and passes the conformance suite.
//
// Everything a call does is a series of steps at the Server: a Fault refuses,
// delays or hangs them, from the n-th on, for all nodes or for one. The package
// reads no clock but for Fault.Delay, starts no goroutine, and blocks only on
// channels: inside a testing/synctest bubble it is all in virtual time.
package memory

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"sync"

	"meshd/provision"
)

// World is a set of Servers. It is safe for concurrent use.
type World struct {
	mu      sync.Mutex
	servers map[string]*Server // by host:port
}

// NewWorld returns a World without Servers.
func NewWorld() *World { return &World{servers: map[string]*Server{}} }

// Serve puts a new, empty Server at an address, in the place of any other there.
func (w *World) Serve(host string, port int) *Server {
	s := &Server{resources: map[string]*resource{}, logins: map[string]*login{}, sessions: map[*Session]struct{}{}}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.servers[net.JoinHostPort(host, strconv.Itoa(port))] = s
	return s
}

// Kind returns the kind as it is linked into a node.
func (w *World) Kind(node string) *Kind { return &Kind{world: w, node: node} }

// at returns the Server at an address, nil where there is none.
func (w *World) at(address string) *Server {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.servers[address]
}

// Kind is "memory".
//
// The option "admin" of a provider is the host:port where its Server is; without
// it, that is where consumers are sent.
type Kind struct {
	world *World
	node  string
}

var _ provision.Kind = (*Kind)(nil)

// Name is "memory".
func (k *Kind) Name() string { return "memory" }

// Traits are those of a kind that can do everything but TLS.
func (k *Kind) Traits() provision.Traits { return provision.Traits{Overlap: true, SeesInUse: true} }

// Open checks cfg.
func (k *Kind) Open(cfg provision.Config) (provision.Provider, error) {
	p := &provider{kind: k, mesh: cfg.Mesh, at: cfg.Address, admin: address(cfg.Address)}
	var faults []error
	for key, value := range cfg.Options {
		if key != "admin" {
			faults = append(faults, fmt.Errorf("option %q: no such option; there is admin", key))
			continue
		}
		p.admin = value
	}
	if _, _, err := net.SplitHostPort(p.admin); err != nil {
		faults = append(faults, fmt.Errorf("admin: %w", err))
	}
	if cfg.Mesh == "" {
		faults = append(faults, errors.New("the mesh has no id"))
	}
	if len(faults) > 0 {
		return nil, &provision.Error{Step: "open memory", Class: provision.BadConfig, Err: errors.Join(faults...)}
	}
	return p, nil
}

func address(at provision.Address) string { return net.JoinHostPort(at.Host, strconv.Itoa(at.Port)) }

// Fields returns type, host, port, database, username and password.
func (k *Kind) Fields(at provision.Address, res provision.Resource, login provision.Login) map[string]string {
	return map[string]string{
		"type": "memory", "host": at.Host, "port": strconv.Itoa(at.Port),
		"database": res.Name, "username": login.Name, "password": login.Secret,
	}
}

// Check logs in from the Kind's node and writes nothing.
func (k *Kind) Check(ctx context.Context, fields map[string]string) error {
	s, err := k.Dial(ctx, fields)
	if err != nil {
		return err
	}
	s.check()
	return s.Close()
}

// Dial logs in from the Kind's node and keeps the session, as an app does.
func (k *Kind) Dial(ctx context.Context, fields map[string]string) (*Session, error) {
	at := net.JoinHostPort(fields["host"], fields["port"])
	server := k.world.at(at)
	if server == nil {
		return nil, nobody(at)
	}
	return server.logIn(ctx, k.node, fields["database"], fields["username"], fields["password"])
}

func nobody(at string) error {
	return &provision.Error{Step: "connect", Class: provision.Unreachable, Err: fmt.Errorf("nothing listens at %s", at)}
}

var nameForm = regexp.MustCompile(`^[a-z0-9_]{1,40}$`)

// checkNames refuses what the contract says that no caller sends.
func checkNames(res provision.Resource, logins ...provision.Login) error {
	names := []string{res.Name}
	for _, l := range logins {
		names = append(names, l.Name)
	}
	for _, name := range names {
		if !nameForm.MatchString(name) {
			return &provision.Error{Step: "check names", Class: provision.Internal,
				Err: fmt.Errorf("name %q is not 1 to 40 of a-z, 0-9 and _", name)}
		}
	}
	return nil
}
