package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"meshd/provision"
)

// provider administers one Server.
type provider struct {
	kind  *Kind
	mesh  string
	at    provision.Address // for consumers
	admin string            // host:port
}

// step does f as one step at the provider's Server.
func (p *provider) step(ctx context.Context, name string, write bool, f func(*Server) error) error {
	s := p.kind.world.at(p.admin)
	if s == nil {
		return nobody(p.admin)
	}
	return s.step(ctx, p.kind.node, name, write, func() error { return f(s) })
}

func (p *provider) mark(res provision.Resource) string { return provision.Mark(p.mesh, res.ID) }

func foreign(name string) error {
	return &provision.Error{Step: "look for " + name, Class: provision.Foreign, Err: fmt.Errorf("%q is there without our mark", name)}
}

// ours refuses a resource and logins that are there under another mark.
func (p *provider) ours(s *Server, res provision.Resource, logins ...provision.Login) error {
	if r := s.resources[res.Name]; r != nil && r.mark != p.mark(res) {
		return foreign(res.Name)
	}
	for _, l := range logins {
		if got := s.logins[l.Name]; got != nil && got.mark != p.mark(res) {
			return foreign(l.Name)
		}
	}
	return nil
}

// Watch returns once the Server cannot be reached from here.
func (p *provider) Watch(ctx context.Context) error {
	s := p.kind.world.at(p.admin)
	if s == nil {
		return nobody(p.admin)
	}
	return s.watch(ctx, p.kind.node)
}

func (p *provider) Preflight(ctx context.Context) error {
	return p.step(ctx, "check that the service takes writes", true, func(*Server) error { return nil })
}

func (p *provider) Ensure(ctx context.Context, res provision.Resource, l provision.Login) error {
	if err := checkNames(res, l); err != nil {
		return err
	}
	if l.Secret == "" {
		return &provision.Error{Step: "check names", Class: provision.Internal, Err: errors.New("the login has no secret")}
	}
	return p.all(ctx,
		step{"look for what is there", false, func(s *Server) error { return p.ours(s, res, l) }},
		step{"create resource", true, func(s *Server) error {
			if s.resources[res.Name] == nil {
				s.resources[res.Name] = &resource{mark: p.mark(res), values: map[string]string{}}
			}
			return nil
		}},
		step{"create login", true, func(s *Server) error {
			if s.logins[l.Name] == nil {
				s.logins[l.Name] = &login{mark: p.mark(res), closed: true}
			}
			return nil
		}},
		step{"open login", true, func(s *Server) error {
			got := s.logins[l.Name]
			if got == nil {
				return &provision.Error{Step: "open login", Class: provision.Internal, Err: errors.New("somebody has dropped the login")}
			}
			got.secret, got.resource, got.closed = l.Secret, res.Name, false
			return nil
		}},
	)
}

// step is one of a call.
type step struct {
	name  string
	write bool
	do    func(*Server) error
}

func (p *provider) all(ctx context.Context, steps ...step) error {
	for _, s := range steps {
		if err := p.step(ctx, s.name, s.write, s.do); err != nil {
			return err
		}
	}
	return nil
}

func (p *provider) Verify(ctx context.Context, res provision.Resource, l provision.Login) error {
	if err := checkNames(res, l); err != nil {
		return err
	}
	return p.kind.Check(ctx, p.kind.Fields(p.at, res, l))
}

func (p *provider) InUse(ctx context.Context, l provision.Login) (n int, err error) {
	err = p.step(ctx, "count sessions", false, func(s *Server) error {
		for session := range s.sessions {
			if session.login == l.Name && !session.checking {
				n++
			}
		}
		return nil
	})
	return n, err
}

func (p *provider) Withdraw(ctx context.Context, res provision.Resource, logins []provision.Login) (ended int, err error) {
	if err := checkNames(res, logins...); err != nil {
		return 0, err
	}
	named := func(name string) bool {
		return slices.ContainsFunc(logins, func(l provision.Login) bool { return l.Name == name })
	}
	err = p.all(ctx,
		step{"look for what is there", false, func(s *Server) error { return p.ours(s, res, logins...) }},
		step{"close logins", true, func(s *Server) error {
			for name, l := range s.logins {
				if named(name) {
					l.closed = true
				}
			}
			return nil
		}},
		step{"end sessions", true, func(s *Server) error {
			for session := range s.sessions {
				if named(session.login) {
					delete(s.sessions, session)
					if !session.checking {
						ended++
					}
				}
			}
			return nil
		}},
	)
	if err != nil {
		return ended, err
	}
	for _, l := range logins {
		switch err := p.kind.Check(ctx, p.kind.Fields(p.at, res, l)); {
		case err == nil:
			return ended, &provision.Error{Step: "prove that " + l.Name + " is refused", Class: provision.Blocked, Err: errors.New("it can still log in")}
		case provision.ClassOf(err) != provision.Refused:
			return ended, err
		}
	}
	return ended, p.step(ctx, "drop logins", true, func(s *Server) error {
		for _, l := range logins {
			delete(s.logins, l.Name)
		}
		return nil
	})
}

func (p *provider) Purge(ctx context.Context, res provision.Resource) error {
	if err := checkNames(res); err != nil {
		return err
	}
	return p.all(ctx,
		step{"look for what is there", false, func(s *Server) error { return p.ours(s, res) }},
		step{"drop resource", true, func(s *Server) error {
			for name, l := range s.logins {
				if l.mark == p.mark(res) {
					return &provision.Error{Step: "drop resource", Class: provision.Blocked, Err: fmt.Errorf("login %q is left, withdraw it first", name)}
				}
			}
			delete(s.resources, res.Name)
			return nil
		}},
	)
}

func (p *provider) Observe(ctx context.Context) (found []provision.Found, err error) {
	prefix := provision.Mark(p.mesh, "")
	err = p.step(ctx, "list what is ours", false, func(s *Server) error {
		for name, r := range s.resources {
			if strings.HasPrefix(r.mark, prefix) {
				found = append(found, provision.Found{Name: name, Mark: r.mark})
			}
		}
		for name, l := range s.logins {
			if strings.HasPrefix(l.mark, prefix) {
				found = append(found, provision.Found{Name: name, Mark: l.mark, Login: true})
			}
		}
		return nil
	})
	slices.SortFunc(found, func(a, b provision.Found) int { return cmp.Compare(a.Name, b.Name) })
	return found, err
}

func (p *provider) Close() error { return nil }
