package jetstream

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"meshd/provision"
)

// up proves, within ctx, that the server answers. Much of what providers do
// with it is calls in memory, which have no deadline, and to one that has stopped
// they would say that nobody is connected.
func (s *Server) up(ctx context.Context) error {
	c, err := s.admin(ctx, probeAccount)
	if err == nil {
		c.Close()
	}
	return err
}

// admin connects to account with every right, without leaving the process.
// Close it.
func (s *Server) admin(ctx context.Context, account string) (*client, error) {
	if !s.way.Running() {
		return nil, &provision.Error{Step: "reach the embedded store", Class: provision.Unreachable,
			Err: errors.New("it is stopped")}
	}
	return dial(ctx, s.way, "", nats.UserInfo(adminName(account), s.secret))
}

// settleLimit bounds the wait for a moment without administration, which
// applications too can keep from coming.
const settleLimit = time.Second

// settle waits until requests of admin sessions older than mine are done. The
// server goes on with one whose caller gave up: to look before that is to miss
// the bucket that it is about to make. Past settleLimit it lets go, because such
// a bucket is no more than a stray, and Observe lists it.
func (s *Server) settle(ctx context.Context, account string, mine uint64) error {
	look := time.NewTicker(2 * time.Millisecond)
	defer look.Stop()
	patience := time.NewTimer(settleLimit)
	defer patience.Stop()
	for {
		admins, err := s.sessions(account, adminName(account))
		if err != nil {
			return err
		}
		store, err := s.nats.Jsz(nil)
		if err != nil {
			return err
		}
		if store.API.Inflight == 0 && !slices.ContainsFunc(admins, func(one session) bool { return one.id < mine }) {
			return nil
		}
		select {
		case <-look.C:
		case <-patience.C:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("wait for an earlier request: %w", ctx.Err())
		}
	}
}

// session is one live connection.
type session struct {
	id    uint64
	check bool // of a check, which is no use of its login
}

// sessions returns the live connections of a user, or of all logins of an
// account where user is empty.
func (s *Server) sessions(account, user string) ([]session, error) {
	conns, err := s.nats.Connz(&server.ConnzOptions{
		Account: account, User: user, Username: true, State: server.ConnOpen, Limit: math.MaxInt32,
	})
	if err != nil {
		return nil, err
	}
	var live []session
	for _, c := range conns.Conns {
		if user != "" || c.AuthorizedUser != adminName(account) {
			live = append(live, session{c.Cid, c.Name == checkClient})
		}
	}
	return live, nil
}

// inUse counts the sessions that are not checks.
func inUse(live []session) (n int) {
	for _, s := range live {
		if !s.check {
			n++
		}
	}
	return n
}

// goneLimit bounds the wait for cut sessions to disappear. It takes a
// millisecond, and a write deadline for a client that stopped reading.
const goneLimit = 2 * writeLimit

// cut ends the sessions of a user that can get no new ones, waits until they
// have gone, and returns how many were not checks.
func (s *Server) cut(ctx context.Context, account, user string) (ended int, err error) {
	step := "end sessions of " + user
	patience := time.NewTimer(goneLimit)
	defer patience.Stop()
	look := time.NewTicker(2 * time.Millisecond)
	defer look.Stop()
	known := map[session]bool{}
	for {
		live, err := s.sessions(account, user)
		if err != nil {
			return ended, fault(step, err)
		}
		if len(live) == 0 {
			return ended, nil
		}
		for _, one := range live {
			if !known[one] && !one.check {
				ended++
			}
			known[one] = true
			// An error means that it has gone by itself.
			_ = s.nats.DisconnectClientByID(one.id)
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return ended, fault(step, ctx.Err())
		case <-patience.C:
			return ended, &provision.Error{Step: step, Class: provision.Blocked,
				Err: fmt.Errorf("%d of them are still there after %v", len(live), goneLimit)}
		}
	}
}

// try logs in at our own listener, as a consumer would, and returns what came
// of it.
func (s *Server) try(ctx context.Context, user, secret string) error {
	options := []nats.Option{nats.UserInfo(user, secret)}
	if s.cfg.TLS != nil {
		options = append(options, nats.Secure(notVerified()))
	}
	c, err := dial(ctx, nil, s.self, options...)
	if err == nil {
		c.Close()
	}
	return err
}
