package peer

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"meshd/peer/identity"
	"meshd/raftfsm"
)

// A node that does not know yet what another has just committed seals what it
// proposes with the keys, or to the members, of a moment ago. It is told, and does
// it again: whoever is in has the newest keys, and whoever is out has not.
func TestKeysAndMembersThatChangeTogether(t *testing.T) {
	for name, order := range map[string][]string{"a join after a removal": {"remove", "join"}, "a removal after a join": {"join", "remove"}} {
		t.Run(name, func(t *testing.T) {
			inMesh(t, func(b *bed) {
				l := b.leader()
				others := slices.DeleteFunc(slices.Clone(b.nodes), func(n *node) bool { return n == l })
				late, goes := others[0], others[1]
				keys, err := identity.Create(filepath.Join(b.TempDir(), "identity"))
				b.must(err)
				delta := raftfsm.Node{ID: keys.NodeID(), Name: "delta", Address: "10.9.9.9:7946", Route: "10.9.9.9:6222", Pin: identity.Pin(keys.Public()), Recipient: keys.Recipient(), Level: raftfsm.Level}
				l.do(raftfsm.AddToken{Hash: "delta", Expires: time.Now().Add(time.Hour)})
				b.eventually(time.Second, "all know the token", func() bool { return late.state().Tokens["delta"].Hash != "" })
				did := map[string]func(*node) error{
					"remove": func(on *node) error { return on.peer.RemoveNode(b.Context(), "root", goes.name) },
					"join": func(on *node) error {
						_, err := on.peer.letIn(b.Context(), JoinRequest{Key: keys.Public(), Recipient: keys.Recipient()}, "delta", delta)
						return err
					},
				}
				b.fabric.Slow(l.keys.NodeID(), late.keys.NodeID(), 50*time.Millisecond)
				b.must(did[order[0]](l))
				if at := l.state().Index; late.state().Index >= at {
					b.Fatalf("%s is at %d already, and the test needs it to be late", late.name, at)
				}
				b.must(did[order[1]](late))
				b.fabric.Heal()
				want, err := l.peer.authority()
				b.must(err)
				if got, err := OpenSecrets(keys, l.state().SecretsOf(keys.NodeID())); err != nil || !slices.Equal(got.Gossip, want.secrets.Gossip) {
					b.Errorf("the one that came has other keys: %v", err)
				}
				if sealed := l.state().SecretsOf(goes.keys.NodeID()); sealed != "" {
					b.Error("the one that was removed has keys")
				}
				if got, err := OpenSecrets(goes.keys, l.state().Mesh.Secrets); err == nil {
					b.Errorf("the one that was removed can open %v", got)
				}
			})
		})
	}
}

// The keys of a mesh of hundreds fit the entry that removes one of them.
func TestARemovalFitsAnEntry(t *testing.T) {
	ca, err := identity.NewCA("m", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	secrets := Secrets{CAKey: ca.KeyPEM(), Gossip: make([]byte, 32)}
	c := raftfsm.RemoveNode{ID: strings.Repeat("x", 20)}
	var recipients []string
	for i := range 256 {
		_, recipient, err := identity.NewRecovery()
		if err != nil {
			t.Fatal(err)
		}
		recipients = append(recipients, recipient)
		c.SealedTo = append(c.SealedTo, fmt.Sprintf("%020d", i))
	}
	if c.Secrets, err = secrets.Seal(recipients...); err != nil {
		t.Fatal(err)
	}
	if b, err := raftfsm.Encode(raftfsm.Entry{Command: c}); err != nil || len(b) > raftfsm.MaxEntry {
		t.Errorf("an entry of %d bytes: %v", len(b), err)
	}
}
