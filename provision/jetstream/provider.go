package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/crypto/bcrypt"

	"meshd/provision"
)

var _ provision.Answerer = (*provider)(nil)

// provider is the embedded store as one kind sees it. All state is the
// server's.
type provider struct {
	bucketKind
	cfg      provision.Config
	maxBytes int64 // of every bucket
}

// Preflight makes, uses and deletes a small bucket of its own.
func (p *provider) Preflight(ctx context.Context) error {
	const bucket = "probe"
	p.server.probing.Lock()
	defer p.server.probing.Unlock()
	return p.asAdmin(ctx, probeAccount, "try a bucket", func(c *client) error {
		// Whatever an interrupted one left would count against the account.
		for _, prefix := range []string{kvFlavour().prefix, objectFlavour().prefix} {
			if err := c.js.DeleteStream(c.ctx, prefix+bucket); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
				return fault("delete trial bucket", err)
			}
		}
		mark := provision.Mark(p.cfg.Mesh, "preflight")
		if err := p.ensure(c.ctx, c.js, bucket, mark, leastMaxBytes); err != nil {
			return fault("create trial bucket", err)
		}
		if err := p.probe(c.ctx, c.js, bucket); err != nil {
			return err
		}
		return fault("delete trial bucket", c.js.DeleteStream(c.ctx, p.account(bucket)))
	})
}

func (p *provider) Ensure(ctx context.Context, res provision.Resource, l provision.Login) error {
	if err := p.valid(res, l); err != nil {
		return err
	}
	if !loginSecret.MatchString(l.Secret) {
		return &provision.Error{Step: "create login " + l.Name, Class: provision.BadConfig,
			Err: errors.New("the secret is not 32 to 72 characters of A-Z a-z 0-9")}
	}
	if _, err := p.own(res, l.Name); err != nil {
		return err
	}
	if err := p.server.up(ctx); err != nil {
		return err
	}
	account := p.account(res.Name)
	if err := p.server.open(account); err != nil {
		return fault("create account of bucket "+res.Name, err)
	}
	err := p.asAdmin(ctx, account, "create bucket "+res.Name, func(c *client) error {
		if _, err := p.stream(c, res); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
		return p.ensure(c.ctx, c.js, res.Name, p.mark(res), p.maxBytes)
	})
	if err != nil {
		return err
	}
	var replaced bool // the secret of a login that was there
	err = p.server.change(func(logins map[string]login) error {
		was, ok := logins[l.Name]
		want := login{Name: l.Name, Account: account, Mark: p.mark(res), Hash: was.Hash}
		if bcrypt.CompareHashAndPassword([]byte(was.Hash), []byte(l.Secret)) != nil {
			hash, err := hashSecret(l.Secret)
			if err != nil {
				return err
			}
			want.Hash, replaced = hash, ok
		}
		logins[l.Name] = want
		return nil
	})
	if err == nil && replaced {
		_, err = p.server.cut(ctx, account, l.Name)
	}
	return fault("create login "+l.Name, err)
}

// Verify checks the delivery that a consumer would get, and that the address
// leads to this server and no other.
func (p *provider) Verify(ctx context.Context, res provision.Resource, l provision.Login) error {
	answered, err := p.check(ctx, p.Fields(p.cfg.Address, res, l))
	if err != nil {
		return err
	}
	if answered != p.server.nats.ID() {
		return &provision.Error{Step: "log in", Class: provision.BadConfig,
			Err: fmt.Errorf("address %s port %d leads to another server than this node's store", p.cfg.Address.Host, p.cfg.Address.Port)}
	}
	return nil
}

func (p *provider) InUse(ctx context.Context, l provision.Login) (int, error) {
	if err := p.server.up(ctx); err != nil {
		return 0, err
	}
	known, ok := p.server.snapshot()[l.Name]
	if !ok {
		return 0, nil
	}
	live, err := p.server.sessions(known.Account, l.Name)
	return inUse(live), fault("count sessions of "+l.Name, err)
}

// Withdraw removes the logins, ends their sessions and tries each.
func (p *provider) Withdraw(ctx context.Context, res provision.Resource, logins []provision.Login) (ended int, err error) {
	for _, l := range logins {
		if err := p.valid(res, l); err != nil {
			return 0, err
		}
		if _, err := p.own(res, l.Name); err != nil {
			return 0, err
		}
	}
	if err := p.server.up(ctx); err != nil {
		return 0, err
	}
	err = p.server.change(func(known map[string]login) error {
		for _, l := range logins {
			delete(known, l.Name)
		}
		return nil
	})
	if err != nil {
		return 0, fault("remove logins", err)
	}
	for _, l := range logins {
		n, err := p.server.cut(ctx, p.account(res.Name), l.Name)
		ended += n
		if err == nil {
			err = p.refused(ctx, l)
		}
		if err != nil {
			return ended, err
		}
	}
	return ended, nil
}

// refused proves that a removed login does not work.
func (p *provider) refused(ctx context.Context, l provision.Login) error {
	step := "try withdrawn login " + l.Name
	// Without the secret any other shows the same: the name has gone from the
	// list, so no secret fits it.
	secret := l.Secret
	if secret == "" {
		secret = "withdrawn"
	}
	err := p.server.try(ctx, l.Name, secret)
	var e *provision.Error
	switch {
	case err == nil:
		return &provision.Error{Step: step, Class: provision.Internal, Err: errors.New("it still works")}
	case errors.As(err, &e) && e.Class != provision.Refused:
		return &provision.Error{Step: step, Class: e.Class, Err: err}
	}
	return nil
}

func (p *provider) Purge(ctx context.Context, res provision.Resource) error {
	step := "delete bucket " + res.Name
	if !resourceName.MatchString(res.Name) {
		return &provision.Error{Step: step, Class: provision.BadConfig, Err: badName("resource", res.Name, 40)}
	}
	if err := p.server.up(ctx); err != nil {
		return err
	}
	account := p.account(res.Name)
	if !p.server.has(account) {
		return nil
	}
	// The account stays until the next start, empty: the server has no way to
	// end an account's store while it runs.
	return p.asAdmin(ctx, account, step, func(c *client) error {
		mine, err := c.GetClientID()
		if err == nil {
			err = p.server.settle(c.ctx, account, mine)
		}
		if err == nil {
			_, err = p.stream(c, res)
		}
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil
		} else if err != nil {
			return err
		}
		for _, l := range p.server.snapshot() {
			if l.Account == account {
				return &provision.Error{Step: step, Class: provision.Blocked,
					Err: fmt.Errorf("login %s still works on it: withdraw it first", l.Name)}
			}
		}
		if err := c.js.DeleteStream(c.ctx, account); !errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
		return nil
	})
}

func (p *provider) Observe(ctx context.Context) ([]provision.Found, error) {
	var found []provision.Found
	ours := provision.Mark(p.cfg.Mesh, "")
	err := p.buckets(ctx, func(_ context.Context, bucket string, _ jetstream.Stream, about *jetstream.StreamInfo) error {
		if mark := about.Config.Description; strings.HasPrefix(mark, ours) {
			found = append(found, provision.Found{Name: bucket, Mark: mark})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	logins := p.server.snapshot()
	for _, name := range slices.Sorted(maps.Keys(logins)) {
		l := logins[name]
		if strings.HasPrefix(l.Account, p.prefix) && strings.HasPrefix(l.Mark, ours) {
			found = append(found, provision.Found{Name: l.Name, Mark: l.Mark, Login: true})
		}
	}
	return found, nil
}

// Close frees nothing: the server belongs to whoever started it.
func (p *provider) Close() error { return nil }

// bucketLine is one element of the answer to "buckets".
type bucketLine struct {
	Name     string `json:"name"`
	Bytes    uint64 `json:"bytes"`    // on disk
	Values   uint64 `json:"values"`   // keys or objects, deletion markers included
	Sessions int    `json:"sessions"` // live connections of all logins
	Ours     bool   `json:"ours"`     // carries the mark of this mesh
}

// Answer answers a verb of a seat that delivers this kind. The one verb is
// buckets, without argument: a JSON array of {name, bytes, values, sessions,
// ours}, by name.
func (p *provider) Answer(ctx context.Context, verb string, arg []byte) ([]byte, error) {
	step := "answer " + verb
	if verb != "buckets" {
		return nil, &provision.Error{Step: step, Class: provision.BadConfig,
			Err: fmt.Errorf("unknown verb: %s answers buckets", p.name)}
	}
	if arg = bytes.TrimSpace(arg); len(arg) > 0 && string(arg) != "null" && string(arg) != "{}" {
		return nil, &provision.Error{Step: step, Class: provision.BadConfig,
			Err: errors.New("buckets takes no argument")}
	}
	lines := []bucketLine{}
	ours := provision.Mark(p.cfg.Mesh, "")
	err := p.buckets(ctx, func(ctx context.Context, bucket string, stream jetstream.Stream, about *jetstream.StreamInfo) error {
		values, err := p.values(ctx, stream, bucket)
		if err != nil {
			return err
		}
		live, err := p.server.sessions(about.Config.Name, "")
		if err != nil {
			return err
		}
		lines = append(lines, bucketLine{
			Name: bucket, Bytes: about.State.Bytes, Values: values, Sessions: inUse(live),
			Ours: strings.HasPrefix(about.Config.Description, ours),
		})
		return nil
	})
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(lines)
	return text, fault(step, err)
}

// buckets calls each for every bucket of this kind, by name.
func (p *provider) buckets(ctx context.Context, each func(ctx context.Context, bucket string, stream jetstream.Stream, about *jetstream.StreamInfo) error) error {
	if err := p.server.up(ctx); err != nil {
		return err
	}
	for _, account := range p.server.list(p.prefix) {
		err := p.asAdmin(ctx, account, "list buckets", func(c *client) error {
			stream, err := c.js.Stream(c.ctx, account)
			if errors.Is(err, jetstream.ErrStreamNotFound) {
				return nil
			} else if err != nil {
				return err
			}
			return each(c.ctx, strings.TrimPrefix(account, p.prefix), stream, stream.CachedInfo())
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// adminLimit bounds what is done on one connection of ours, where the caller's
// context does not: some requests, of which the slowest waits for a disk.
const adminLimit = 30 * time.Second

// asAdmin runs do with every right in account; its errors are of step if they
// name none.
func (p *provider) asAdmin(ctx context.Context, account, step string, do func(c *client) error) error {
	ctx, cancel := context.WithTimeout(ctx, adminLimit)
	defer cancel()
	c, err := p.server.admin(ctx, account)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.explain(step, do(c))
}

// stream returns the stream of res; ErrStreamNotFound if there is none, and a
// Foreign error if it is not ours.
func (p *provider) stream(c *client, res provision.Resource) (jetstream.Stream, error) {
	s, err := c.js.Stream(c.ctx, p.account(res.Name))
	if err != nil {
		return nil, fault("look up bucket "+res.Name, err)
	}
	if mark := s.CachedInfo().Config.Description; mark != p.mark(res) {
		return nil, &provision.Error{Step: "look up bucket " + res.Name, Class: provision.Foreign,
			Err: fmt.Errorf("a bucket of this name exists and is described as %q, not %q", mark, p.mark(res))}
	}
	return s, nil
}

// own returns the login of that name, or nothing if there is none; an error if
// it is not ours, or not of res.
func (p *provider) own(res provision.Resource, name string) (login, error) {
	known, ok := p.server.snapshot()[name]
	if ok && (known.Mark != p.mark(res) || known.Account != p.account(res.Name)) {
		return login{}, &provision.Error{Step: "look up login " + name, Class: provision.Foreign,
			Err: fmt.Errorf("a login of this name exists for %s, marked %q", known.Account, known.Mark)}
	}
	return known, nil
}

func (p *provider) mark(res provision.Resource) string { return provision.Mark(p.cfg.Mesh, res.ID) }

// valid refuses names that would mean something else in a subject, a path or
// the configuration.
func (p *provider) valid(res provision.Resource, l provision.Login) error {
	var faults []error
	if !resourceName.MatchString(res.Name) {
		faults = append(faults, badName("resource", res.Name, 40))
	}
	if !loginName.MatchString(l.Name) {
		faults = append(faults, badName("login", l.Name, 30))
	}
	if res.ID == "" {
		faults = append(faults, errors.New("the resource's id is empty"))
	}
	if err := errors.Join(faults...); err != nil {
		return &provision.Error{Step: "read names", Class: provision.BadConfig, Err: err}
	}
	return nil
}

func badName(what, name string, limit int) error {
	return fmt.Errorf("%s name %q is not 1 to %d characters of a-z 0-9 _", what, name, limit)
}
