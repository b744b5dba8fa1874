package jetstream

import (
	"crypto/subtle"
	"maps"
	"slices"
	"strings"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/crypto/bcrypt"
)

// change makes the logins what edit makes of a copy of them: on disk first, then
// at the gate. A login that edit removed is refused from now on; its sessions
// are not ended.
func (s *Server) change(edit func(logins map[string]login) error) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	logins := s.snapshot()
	if err := edit(logins); err != nil {
		return err
	}
	if maps.Equal(logins, s.snapshot()) && !s.stale {
		return nil
	}
	s.stale = true
	text, err := encodeLogins(logins)
	if err == nil {
		err = s.cfg.Write(s.loginsFile(), text)
	}
	if err != nil {
		return err
	}
	s.stale = false
	s.mu.Lock()
	defer s.mu.Unlock()
	s.logins = logins
	return nil
}

// gate is what the server asks who may come in, and as what.
type gate struct{ *Server }

// Check implements server.Authentication.
func (g gate) Check(c server.ClientAuthentication) bool {
	asked := c.GetOpts()
	if account, ok := strings.CutPrefix(asked.Username, adminName("")); ok {
		from := c.RemoteAddress()
		if from == nil || from.Network() != "pipe" || // of a connection inside this process
			subtle.ConstantTimeCompare([]byte(asked.Password), []byte(g.secret)) != 1 {
			return false
		}
		return g.admit(c, &server.User{Username: asked.Username}, account)
	}
	// Held to the end, so that a login that was removed is either refused here or
	// among the sessions that its removal ends.
	g.mu.RLock()
	defer g.mu.RUnlock()
	l, ok := g.logins[asked.Username]
	if !ok || bcrypt.CompareHashAndPassword([]byte(l.Hash), []byte(asked.Password)) != nil {
		return false
	}
	return g.admit(c, &server.User{Username: l.Name, Permissions: rights(l)}, l.Account)
}

func (g gate) admit(c server.ClientAuthentication, user *server.User, account string) bool {
	var err error
	if user.Account, err = g.nats.LookupAccount(account); err != nil {
		return false
	}
	c.RegisterUser(user)
	return true
}

// has reports whether the account exists.
func (s *Server) has(account string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.accounts[account]
}

// list returns the accounts whose name begins with prefix, in order.
func (s *Server) list(prefix string) []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.DeleteFunc(slices.Sorted(maps.Keys(s.accounts)), func(name string) bool {
		return !strings.HasPrefix(name, prefix)
	})
}

// snapshot returns a copy of the logins.
func (s *Server) snapshot() map[string]login {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.logins)
}

// adminName is the admin user of an account. The dash keeps it apart from every
// login, which has none.
func adminName(account string) string { return "meshd-" + account }

// hashSecret returns the bcrypt of a secret. The lowest cost is right: the
// secrets are random, at least 32 characters of 62, beyond any search; and each
// connection pays it, one millisecond at this cost and sixty at the default, in
// the process that also runs the mesh.
func hashSecret(secret string) (string, error) {
	hash, err := bcrypt.GenerateFromPassword([]byte(secret), bcrypt.MinCost)
	return string(hash), err
}
