package peer

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nkeys"
	"go.etcd.io/bbolt"

	"meshd/bus"
	"meshd/raftfsm"
)

// BusCredential is a key with which an operator's own NATS client may connect to
// the bus of this node. It is this node's own: only the public half is kept, and
// nothing of it is in the log.
type BusCredential struct {
	Name      string `json:"-"`
	PublicKey string
	Actor     string // who asked for it
	Expires   time.Time
}

// BusLogin is what a client with a credential needs to know.
type BusLogin struct {
	BusCredential
	URL   string
	Inbox string // prefix of the client's inboxes
	Calls string // prefix of the subjects on which it calls
}

const (
	// MaxBusTTL bounds the life of a credential: one that is forgotten must not let
	// somebody in next year.
	MaxBusTTL = 30 * 24 * time.Hour
	// maxBusCredentials bounds those of a node: each is a user of its server, and
	// makes every change of grants a little slower.
	maxBusCredentials = 32
	// admitWithin bounds the wait for the bus to act: some milliseconds.
	admitWithin = 5 * time.Second
	// admitEvery is how often it is looked at meanwhile.
	admitEvery = 5 * time.Millisecond
	// nameLength is that of a credential's name: 40 random bits tell 32 apart.
	nameLength = 8
)

var bucketOperators = []byte("bus-credentials") // name -> BusCredential

// AddBusCredential lets a key in for ttl, and returns once it may connect.
func (n *Peer) AddBusCredential(ctx context.Context, actor, publicKey string, ttl time.Duration) (BusLogin, error) {
	now := time.Now()
	c := BusCredential{Name: strings.ToLower(rand.Text()[:nameLength]), PublicKey: publicKey, Actor: actor, Expires: now.Add(ttl).UTC().Truncate(time.Second)}
	switch {
	case !nkeys.IsValidPublicUserKey(publicKey):
		return BusLogin{}, refusal("bad-key", "that is no public key of a NATS user (U...)", "let meshd bus-credential make it")
	case ttl < time.Second || ttl > MaxBusTTL:
		return BusLogin{}, refusal("bad-ttl", fmt.Sprintf("a bus credential cannot be good for %v", ttl), fmt.Sprintf("choose a time from 1s to %v", MaxBusTTL))
	case n.cfg.Surveyor.Admits(publicKey):
		return BusLogin{}, errKeyTaken
	}
	if err := n.local.addOperator(c); err != nil {
		return BusLogin{}, err
	}
	if err := n.admits(ctx, publicKey, true); err != nil {
		return BusLogin{}, errors.Join(err, n.local.delete(bucketOperators, c.Name))
	}
	return BusLogin{
		BusCredential: c, URL: n.cfg.Bus.ClientURL(),
		Inbox: bus.OperatorInbox(n.cfg.Self.Name, c.Name), Calls: bus.OperatorCalls(n.cfg.Self.Name, c.Name),
	}, nil
}

// BusCredentials lists those of this node that are good now, by name.
func (n *Peer) BusCredentials() []BusCredential { return live(n.local.operators(), time.Now()) }

// RemoveBusCredential ends one, and returns once whoever was connected with it is
// cut off.
func (n *Peer) RemoveBusCredential(ctx context.Context, name string) error {
	for _, c := range n.BusCredentials() {
		if c.Name != name {
			continue
		}
		if err := n.local.delete(bucketOperators, name); err != nil {
			return err
		}
		return n.admits(ctx, c.PublicKey, false)
	}
	return refusal("no-credential", fmt.Sprintf("node %s has no bus credential %q that is good now", n.cfg.Self.Name, name), "meshd bus-credential ls, on the machine where it was made, lists them")
}

// admits has the bus be laid anew, and waits until it admits the key or does not.
func (n *Peer) admits(ctx context.Context, publicKey string, want bool) error {
	ctx, cancel := context.WithTimeout(ctx, admitWithin)
	defer cancel()
	n.Poke()
	for n.cfg.Surveyor.Admits(publicKey) != want {
		if await(ctx, admitEvery, nil, nil) != nil {
			return refusal("not-laid", fmt.Sprintf("the bus of node %s has not taken it over within %v", n.cfg.Self.Name, admitWithin), "give the command again once meshd status shows that the node is up")
		}
	}
	return nil
}

func refusal(code, text, remedy string) *raftfsm.Rejection {
	return &raftfsm.Rejection{Code: code, Text: text, Remedy: remedy}
}

// live are the credentials that have not expired.
func live(all []BusCredential, now time.Time) []BusCredential {
	out := []BusCredential{}
	for _, c := range all {
		if now.Before(c.Expires) {
			out = append(out, c)
		}
	}
	return out
}

// operatorKeys are the keys that the bus admits now. Those that have expired are
// forgotten.
func (n *Peer) operatorKeys() (out []bus.Operator) {
	now := time.Now()
	for _, c := range n.local.operators() {
		if now.Before(c.Expires) {
			out = append(out, bus.Operator{Name: c.Name, PublicKey: c.PublicKey})
		} else if err := n.local.delete(bucketOperators, c.Name); err != nil {
			n.cfg.Log.Error("forget a bus credential that has expired", "err", err)
		}
	}
	return out
}

// untilNextPass is when the next pass is due although nothing has changed: a
// credential expires, or it is time to look at everything.
func (n *Peer) untilNextPass() time.Duration {
	next := everythingEvery
	for _, c := range n.local.operators() {
		next = min(next, time.Until(c.Expires))
	}
	return max(next, settle)
}

// operators are the credentials on record, by name; one that cannot be read is none.
func (l *Local) operators() (out []BusCredential) {
	_ = l.db.View(func(tx *bbolt.Tx) error { // a view of an open file does not fail
		return tx.Bucket(bucketOperators).ForEach(func(k, v []byte) error {
			c := BusCredential{Name: string(k)}
			if json.Unmarshal(v, &c) == nil {
				out = append(out, c)
			}
			return nil
		})
	})
	return out
}

var (
	errKeyTaken = &raftfsm.Rejection{Code: "bad-key", Text: "that key has a place on the bus already, and each client has its own", Remedy: "let meshd bus-credential make another"}
	errTooMany  = &raftfsm.Rejection{Code: "too-many", Text: fmt.Sprintf("this node has %d bus credentials, its limit", maxBusCredentials), Remedy: "end one that is not needed: meshd bus-credential ls, meshd bus-credential rm NAME"}
)

// addOperator keeps a credential, in one step with looking whether it may: a key
// that had two names would keep the whole bus from being laid.
func (l *Local) addOperator(c BusCredential) error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return l.db.Update(func(tx *bbolt.Tx) error {
		b, many := tx.Bucket(bucketOperators), 0
		err := b.ForEach(func(_, v []byte) error {
			var old BusCredential
			if json.Unmarshal(v, &old) == nil && old.PublicKey == c.PublicKey {
				return errKeyTaken
			}
			many++
			return nil
		})
		switch {
		case err != nil:
			return err
		case many >= maxBusCredentials:
			return errTooMany
		}
		return b.Put([]byte(c.Name), text)
	})
}
