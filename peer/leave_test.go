package peer

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"meshd/peer/consensus"
	"meshd/peer/identity"
	"meshd/raftfsm"
)

func TestLeave(t *testing.T) {
	for _, names := range [][]string{{"alpha", "beta"}, {"alpha", "beta", "gamma"}, {"alpha", "beta", "gamma", "delta"}} {
		for _, who := range []string{"leader", "other"} {
			t.Run(fmt.Sprintf("%s of %d", who, len(names)), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := newBed(t, names...)
					l := b.leader()
					goes := l
					if who == "other" {
						goes = b.nodes[(slices.Index(b.nodes, l)+1)%len(names)]
					}
					began := time.Now()
					if err := goes.peer.Leave(b.Context(), "root@"+goes.name, false); err != nil {
						b.Fatalf("leave of %s: %v", goes.name, err)
					}
					if took := time.Since(began); took > 2*time.Second {
						b.Errorf("it took %v", took)
					}
					goes.kill()
					b.nodes = slices.DeleteFunc(b.nodes, func(n *node) bool { return n == goes })
					b.eventually(30*time.Second, "the others are a mesh", func() bool {
						v := b.leader().peer.View()
						return len(v.State.Nodes) == len(names)-1 && len(v.Voters) == consensus.VotersFor(len(names)-1) && v.State.Removed[goes.keys.NodeID()].By == "root@"+goes.name
					})
					for _, n := range b.nodes {
						n.do(raftfsm.AddToken{Hash: n.name, Expires: time.Now()})
						if n.peer.Admitted(goes.keys.NodeID()) == nil {
							b.Errorf("%s lets the node in again that has left", n.name)
						}
					}
				})
			})
		}
	}
}

func TestTheLastNodeDoesNotLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "alpha")
		var refused *raftfsm.Rejection
		if err := b.nodes[0].peer.Leave(b.Context(), "root", false); !errors.As(err, &refused) || refused.Code != "last-node" {
			b.Errorf("leave of the last node: %v", err)
		}
	})
}

func TestANodeIsRemovedOnlyWhereAQuorumIsLeft(t *testing.T) {
	inMesh(t, func(b *bed) {
		l := b.leader()
		var others []*node
		for _, n := range b.nodes {
			if n != l {
				others = append(others, n)
			}
		}
		others[0].kill()
		time.Sleep(10 * time.Second)
		var refused *raftfsm.Rejection
		for _, on := range []*node{l, others[1]} {
			if err := on.peer.RemoveNode(b.Context(), "root", others[1].name); !errors.As(err, &refused) || refused.Code != "no-quorum" {
				b.Errorf("removal, asked on %s, of a voter that is needed: %v", on.name, err)
			}
		}
		b.must(others[1].peer.RemoveNode(b.Context(), "root", others[0].name))
		b.eventually(30*time.Second, "a mesh of two has one voter", func() bool {
			v := b.leader().peer.View()
			return len(v.State.Nodes) == 2 && len(v.Voters) == 1
		})
		for _, n := range b.nodes {
			if n.up() && n.rekeys() == 0 {
				b.Errorf("%s goes on with the gossip key that the removed node has", n.name)
			}
		}
	})
}

func TestARemovedNodeThatHearsOfItStops(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.standard()
		b.inUse()
		alpha := b.node("alpha")
		for _, n := range b.nodes {
			n.expelled(alpha.keys.NodeID()) // it is not cut off, and hears
		}
		b.must(b.node("gamma").peer.RemoveNode(b.Context(), "root", "alpha"))
		b.eventually(10*time.Second, "it runs nothing and has no files", func() bool {
			return len(alpha.procs.running()) == 0 && len(read(alpha.bindings())) == 0
		})
		if l := alpha.bus.now(); len(l.Peers)+len(l.Modules)+len(l.Services) != 0 {
			b.Errorf("its bus still has %+v", l)
		}
		b.eventually(time.Minute, "its logins are gone", func() bool { return len(b.logins("db")) == 0 })
	})
}

// A node that was removed while it could not hear of it is sent no log any more.
func TestARemovedNodeIsToldWhenItAsks(t *testing.T) {
	for name, away := range map[string]struct{ goes, comes func(*node) }{
		"it was down":    {(*node).kill, (*node).restart},
		"it was cut off": {func(n *node) { n.fabric.Isolate(n.keys.NodeID()) }, func(n *node) { n.fabric.Heal() }},
	} {
		t.Run(name, func(t *testing.T) {
			inMesh(t, func(b *bed) {
				b.standard()
				b.inUse()
				alpha, gamma := b.node("alpha"), b.node("gamma")
				away.goes(alpha)
				time.Sleep(10 * time.Second)
				b.must(gamma.peer.RemoveNode(b.Context(), "root@gamma", "alpha"))
				away.comes(alpha)
				select {
				case err := <-alpha.ran:
					var removed *RemovedError
					if !errors.As(err, &removed) || removed.By != "root@gamma" || removed.At.IsZero() || removed.Stopping {
						b.Errorf("it ended with: %v", err)
					}
					alpha.ran <- err // for down
				case <-time.After(20 * time.Second):
					b.Fatalf("it runs on and is not told\n%s", b.picture())
				}
				if len(alpha.procs.running()) != 0 || len(read(alpha.bindings())) != 0 {
					b.Errorf("it runs %v, with files %v", alpha.procs.running(), read(alpha.bindings()))
				}
				if l := alpha.bus.now(); len(l.Peers)+len(l.Modules)+len(l.Services) != 0 {
					b.Errorf("its bus still has %+v", l)
				}
			})
		})
	}
}

// Only a member's word counts, and a member says so of nobody else.
func TestNobodyIsToldOfTheRemovalOfAnother(t *testing.T) {
	inMesh(t, func(b *bed) {
		alpha, gamma := b.node("alpha"), b.node("gamma")
		s, err := alpha.peer.standingAt(b.Context(), gamma.keys.NodeID())
		if err != nil || s.Removed != nil {
			b.Errorf("a member is told %+v, %v", s, err)
		}
		w := httptest.NewRecorder()
		if gamma.peer.serveStanding(w, httptest.NewRequest(http.MethodGet, pathStanding, nil)); w.Code != http.StatusForbidden {
			b.Errorf("who shows no certificate is answered %d %s", w.Code, w.Body)
		}
	})
}

func TestAJoinIsRefusedWithItsReason(t *testing.T) {
	inMesh(t, func(b *bed) {
		alpha := b.node("alpha")
		now := time.Now()
		for token, t := range map[string]raftfsm.AddToken{"good": {Expires: now.Add(time.Hour)}, "old": {Expires: now.Add(-time.Second)}} {
			var secret identity.Token
			copy(secret.Secret[:], token)
			alpha.do(raftfsm.AddToken{Hash: secret.Hash(), Expires: t.Expires})
		}
		var used identity.Token
		copy(used.Secret[:], "used")
		alpha.do(raftfsm.AddToken{Hash: used.Hash(), Expires: now.Add(time.Hour)})
		alpha.do(raftfsm.Admit{Token: used.Hash(), Node: raftfsm.Node{ID: "other", Name: "other"}})
		keys, err := identity.Create(filepath.Join(b.TempDir(), "identity"))
		b.must(err)
		for token, want := range map[string]string{"": "bad-request", "unsigned": "bad-request", "nobody's": "token-foreign", "old": "token-expired", "used": "token-used"} {
			var secret identity.Token
			copy(secret.Secret[:], token)
			req := JoinRequest{Secret: secret.Secret[:], Name: "delta", Key: keys.Public(), Recipient: keys.Recipient()}
			if token == "" {
				req.Secret = nil
			}
			if token != "unsigned" {
				req.Proof = keys.Sign(req.Statement())
			}
			var refused *raftfsm.Rejection
			if _, err := alpha.peer.admit(b.Context(), req); !errors.As(err, &refused) || refused.Code != want || refused.Remedy == "" {
				b.Errorf("a join with the token %q: %v, want %s", token, err, want)
			}
		}
	})
}

// Whoever finds a token that was used must not get the mesh's keys with it: not
// after it has expired, not without the node's key, and not for another recipient.
func TestAUsedTokenGivesNothingAway(t *testing.T) {
	inMesh(t, func(b *bed) {
		alpha, gamma := b.node("alpha"), b.node("gamma")
		var token identity.Token
		copy(token.Secret[:], "gamma's")
		alpha.do(raftfsm.AddToken{Hash: token.Hash(), Expires: time.Now().Add(time.Minute)})
		thief, err := identity.Create(filepath.Join(b.TempDir(), "identity"))
		b.must(err)
		self := gamma.peer.cfg.Self
		req := JoinRequest{Secret: token.Secret[:], Name: self.Name, Key: gamma.keys.Public(), Recipient: thief.Recipient(), Address: self.Address, Route: self.Route}
		req.Proof = thief.Sign(req.Statement())
		var refused *raftfsm.Rejection
		if _, err := alpha.peer.admit(b.Context(), req); !errors.As(err, &refused) || refused.Code != "bad-request" {
			b.Errorf("a request signed by another key: %v", err)
		}
		time.Sleep(2 * time.Minute)
		req.Recipient = gamma.keys.Recipient()
		req.Proof = gamma.keys.Sign(req.Statement())
		if _, err := alpha.peer.admit(b.Context(), req); !errors.As(err, &refused) || refused.Code != "token-expired" {
			b.Errorf("an expired token: %v", err)
		}
	})
}

// TestARemovalIsActedUponAfterARestart: it was killed between reading of its removal
// and stopping what it ran, and nobody speaks to it any more.
func TestARemovalIsActedUponAfterARestart(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.standard()
		b.inUse()
		alpha := b.node("alpha")
		id := alpha.keys.NodeID()
		for _, n := range b.nodes {
			n.expelled(id)
		}
		alpha.procs.setFrozen(true)
		b.must(b.node("gamma").peer.RemoveNode(b.Context(), "root", "alpha"))
		b.eventually(10*time.Second, "it has read of it", func() bool { _, out := alpha.state().Removed[id]; return out })
		alpha.kill()
		alpha.procs.setFrozen(false)
		alpha.restart()
		b.endsRemoved(alpha)
	})
}

// TestANodeThatWasRemovedStartsNothing: it was away and lost power, and asks before
// it goes by its record. Later starts know the answer.
func TestANodeThatWasRemovedStartsNothing(t *testing.T) {
	inMesh(t, func(b *bed) {
		b.standard()
		b.inUse()
		alpha := b.node("alpha")
		alpha.kill()
		alpha.reboot()
		holds := alpha.holds()
		time.Sleep(10 * time.Second)
		b.must(b.node("gamma").peer.RemoveNode(b.Context(), "root@gamma", "alpha"))
		for range 2 {
			alpha.restart()
			b.endsRemoved(alpha)
			if alpha.holds() != holds {
				b.Error("it started what its record names")
			}
			alpha.kill()
		}
		alpha.restart()
	})
}

// endsRemoved waits until the node has ended because it was removed, and checks that
// it left nothing running.
func (b *bed) endsRemoved(n *node) {
	b.Helper()
	select {
	case err := <-n.ran:
		n.ran <- err // for down
		var gone *RemovedError
		if !errors.As(err, &gone) || gone.Stopping {
			b.Errorf("%s ended with %v", n.name, err)
		}
	case <-time.After(2 * time.Minute):
		b.Errorf("%s runs on", n.name)
	}
	if left := n.procs.running(); len(left) > 0 {
		b.Errorf("%s left %v running", n.name, left)
	}
}
