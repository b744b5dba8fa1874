package peer

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"meshd/peer/consensus"
	"meshd/peer/identity"
	"meshd/raftfsm"
)

const pathJoin = "/join"

// SecretsSetting is the local setting that holds the mesh's own keys, sealed to
// this node.
const SecretsSetting = "secrets"

// Secrets are the mesh's own keys. Every member has them, sealed to it in the
// log: no node is special, and any of them admits the next.
type Secrets struct {
	CAKey  []byte // PEM
	Gossip []byte // 32 bytes: gossip packets are AES-256
}

// Seal seals the keys to the nodes with these recipients.
func (s Secrets) Seal(recipients ...string) (string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return "", err
	}
	return identity.Seal(b, recipients...)
}

// OpenSecrets opens what Seal made.
func OpenSecrets(keys *identity.Keys, sealed string) (Secrets, error) {
	var s Secrets
	b, err := keys.Open(sealed)
	if err != nil {
		return s, fmt.Errorf("open the mesh's keys: %w", err)
	}
	return s, json.Unmarshal(b, &s)
}

// JoinRequest is what a machine with a token says of itself. The stream is
// authenticated by the token's CA fingerprint, and carries the token's secret.
type JoinRequest struct {
	Secret    []byte // of the token
	Name      string
	Key       ed25519.PublicKey
	Recipient string
	Address   string // host:port of its mesh port, as others reach it
	Route     string // host:port of its bus routes
	Hosts     []string
	Level     int
	Proof     []byte // Statement, signed with the node's key
}

// Statement is what Proof signs: that this key asks for all of this, with this
// token.
func (r JoinRequest) Statement() []byte {
	secret := sha256.Sum256(r.Secret)
	parts := append([]string{"meshd join", hex.EncodeToString(secret[:]), r.Name, r.Recipient, r.Address, r.Route}, r.Hosts...)
	return []byte(strings.Join(parts, "\x00"))
}

// JoinReply makes a machine a member.
type JoinReply struct {
	Mesh    string
	Cert    string // PEM, for the request's key
	CA      string // PEM
	Secrets string // sealed to the request's recipient
	Nodes   map[string]raftfsm.Node
}

// joinWithin is how long a join may take: a blocked port must be named by then.
const joinWithin = 9 * time.Second

func (n *Peer) serveJoin(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), joinWithin)
	defer cancel()
	var req JoinRequest
	if err := decodeBody(r.Body, &req); err != nil {
		respond(w, http.StatusBadRequest, raftfsm.Rejection{Code: "bad-request", Text: err.Error()})
		return
	}
	reply, err := n.admit(ctx, req)
	var refused *raftfsm.Rejection
	switch {
	case err == nil:
		respond(w, http.StatusOK, reply)
	case errors.As(err, &refused):
		respond(w, http.StatusForbidden, refused)
	default:
		respond(w, http.StatusServiceUnavailable, raftfsm.Rejection{Code: "unavailable", Text: err.Error(), Remedy: "try again, or use the address of another member"})
	}
}

func (n *Peer) admit(ctx context.Context, req JoinRequest) (JoinReply, error) {
	var token identity.Token
	if len(req.Key) != ed25519.PublicKeySize || len(req.Secret) != len(token.Secret) {
		return JoinReply{}, &raftfsm.Rejection{Code: "bad-request", Text: "the request names no key or no token", Remedy: "join with the same version of meshd"}
	}
	if !ed25519.Verify(req.Key, req.Statement(), req.Proof) {
		return JoinReply{}, &raftfsm.Rejection{Code: "bad-request", Text: "the request is not signed with the key that it names", Remedy: "join with the same version of meshd"}
	}
	copy(token.Secret[:], req.Secret)
	hash := token.Hash()
	node := raftfsm.Node{
		ID: identity.NodeID(req.Key), Name: req.Name, Address: req.Address, Route: req.Route,
		Pin: identity.Pin(req.Key), Recipient: req.Recipient, Level: req.Level, Joined: time.Now().UTC(),
	}
	if r := n.tokenIsGood(hash, node.ID); r != nil {
		return JoinReply{}, r
	}
	if err := reachable(ctx, req); err != nil {
		return JoinReply{}, &raftfsm.Rejection{Code: "unreachable", Text: err.Error(), Remedy: "open the port, or give the address that others reach with --advertise"}
	}
	return n.letIn(ctx, req, hash, node)
}

// letIn makes a machine a member whose request is in order.
func (n *Peer) letIn(ctx context.Context, req JoinRequest, token string, node raftfsm.Node) (JoinReply, error) {
	for range catchUps {
		reply, err := n.admitWith(ctx, req, token, node)
		if !movedOn(err) {
			return reply, err
		}
	}
	return JoinReply{}, &raftfsm.Rejection{Code: "unavailable", Text: "the mesh's keys are changed again and again", Remedy: "join again once nobody removes nodes"}
}

// catchUps is how often a command is made again whose seals the log has moved on
// from: each time by a state that holds what it was refused for.
const catchUps = 5

// movedOn reports whether a command was refused for what it was sealed to or with.
func movedOn(err error) bool {
	var refused *raftfsm.Rejection
	return errors.As(err, &refused) && (refused.Code == "keys-changed" || refused.Code == "members-changed")
}

// admitWith signs and seals with the keys that the mesh has now, and commits it.
func (n *Peer) admitWith(ctx context.Context, req JoinRequest, token string, node raftfsm.Node) (JoinReply, error) {
	own, err := n.authority()
	if err != nil {
		return JoinReply{}, err
	}
	cert, err := own.ca.Sign(req.Key, node.ID, node.Name, req.Hosts, time.Now())
	if err != nil {
		return JoinReply{}, &raftfsm.Rejection{Code: "bad-request", Text: err.Error()}
	}
	if node.Secrets, err = own.secrets.Seal(req.Recipient); err != nil {
		return JoinReply{}, &raftfsm.Rejection{Code: "bad-request", Text: err.Error()}
	}
	result, err := n.Propose(ctx, Meshd, raftfsm.Admit{Token: token, Node: node, Keys: own.keys})
	if err = settled(result, err); err != nil {
		return JoinReply{}, err
	}
	reply := JoinReply{Mesh: own.ca.MeshID(), Cert: string(cert), CA: string(own.ca.CertPEM()), Secrets: node.Secrets, Nodes: map[string]raftfsm.Node{}}
	n.store.view(func(s *raftfsm.State) {
		if onRecord := s.SecretsOf(node.ID); onRecord != "" {
			reply.Secrets = onRecord // sealed to the recipient that it joined with, whoever asks
		}
		for id, m := range s.Nodes {
			m.Secrets = ""
			reply.Nodes[id] = m
		}
	})
	return reply, nil
}

// tokenIsGood says early what Apply would say, and judges with this node's clock
// what Apply cannot.
func (n *Peer) tokenIsGood(hash, node string) (refused *raftfsm.Rejection) {
	n.store.view(func(s *raftfsm.State) {
		refused = s.CheckToken(hash, node)
		if expires := s.Tokens[hash].Expires; refused == nil && time.Now().After(expires) {
			refused = &raftfsm.Rejection{Code: "token-expired", Text: "the join token expired at " + expires.UTC().Format(time.RFC3339), Remedy: "make another with meshd token on a member"}
		}
	})
	return refused
}

// authority is what every member may do in the mesh's name.
type authority struct {
	secrets Secrets
	ca      *identity.CA
	keys    uint64 // raftfsm.Mesh.Keys of the secrets
}

// authority opens the mesh's own keys.
func (n *Peer) authority() (a authority, err error) {
	var sealed, cert string
	n.store.view(func(s *raftfsm.State) { sealed, cert, a.keys = s.SecretsOf(n.id()), s.Mesh.CACert, s.Mesh.Keys })
	if cert == "" {
		return a, n.unread()
	}
	if a.secrets, err = OpenSecrets(n.cfg.Keys, sealed); err != nil {
		return a, err
	}
	a.ca, err = identity.LoadCA([]byte(cert), a.secrets.CAKey)
	return a, err
}

// Token makes a join token that is good for so long.
func (n *Peer) Token(ctx context.Context, actor string, ttl time.Duration) (string, error) {
	var mesh, cert string
	var addresses []string
	n.store.view(func(s *raftfsm.State) {
		mesh, cert = s.Mesh.ID, s.Mesh.CACert
		addresses = append(addresses, n.cfg.Self.Address)
		for _, id := range sortedKeys(s.Nodes) {
			if id != n.id() && len(addresses) < 5 { // five that answer are enough; a token should fit a line
				addresses = append(addresses, s.Nodes[id].Address)
			}
		}
	})
	if mesh == "" {
		return "", n.unread()
	}
	fingerprint, err := identity.CAFingerprint([]byte(cert))
	if err != nil {
		return "", fmt.Errorf("make join token: %w", err)
	}
	token, err := identity.NewToken(mesh, fingerprint, addresses, time.Now().Add(ttl))
	if err != nil {
		return "", err
	}
	result, err := n.Propose(ctx, actor, raftfsm.AddToken{Hash: token.Hash(), Expires: token.Expires})
	if err != nil {
		return "", err
	}
	if result.Rejection != nil {
		return "", result.Rejection
	}
	return token.String(), nil
}

// RemoveNode expels a member, reachable or not, and gives the others new keys
// for gossip.
func (n *Peer) RemoveNode(ctx context.Context, actor, name string) error {
	ctx, cancel := context.WithTimeout(ctx, proposeWithin)
	defer cancel()
	for try := 1; ; try++ {
		c, err := n.removal(name)
		if err != nil {
			return err
		}
		result, err := n.propose(ctx, actor, c)
		err = settled(result, err)
		if again := movedOn(err) && try < catchUps; err != nil && !again {
			return err
		}
		if c.ID != n.id() || err != nil { // the others do not talk to this node any more: it may never read the entry
			_ = n.caughtUp(ctx, result.Index) // it is done, read here or not
		}
		if err == nil {
			return nil
		}
	}
}

// removal is the command that expels the member of that name, or of that id.
func (n *Peer) removal(name string) (raftfsm.RemoveNode, error) {
	own, err := n.authority()
	if err != nil {
		return raftfsm.RemoveNode{}, err
	}
	own.secrets.Gossip = make([]byte, 32)
	rand.Read(own.secrets.Gossip)
	c := raftfsm.RemoveNode{ID: name}
	var recipients []string
	n.store.view(func(s *raftfsm.State) {
		if m, ok := s.NodeNamed(name); ok {
			c.ID = m.ID
		}
		c.SealedTo = s.Without(c.ID)
		for _, id := range c.SealedTo {
			recipients = append(recipients, s.Nodes[id].Recipient)
		}
	})
	if len(recipients) > 0 { // else it is the last node, which is refused for that
		c.Secrets, err = own.secrets.Seal(recipients...)
	}
	return c, err
}

// quorumWithout refuses to remove a voter when the others that answer are no
// majority of those that would be left: the removal is a decision too, and the
// ones after it must be possible. Only the leader can tell.
func (n *Peer) quorumWithout(id string) *raftfsm.Rejection {
	servers, _ := n.raft.Servers()
	return decideRemoval(servers, n.id(), id, time.Now())
}

func decideRemoval(servers []consensus.Server, self, id string, now time.Time) *raftfsm.Rejection {
	voters, live, isVoter := 0, 0, false
	for _, s := range servers {
		switch {
		case !s.Voter:
		case s.ID == id:
			isVoter = true
		default:
			voters++
			if s.ID == self || now.Sub(s.Acked) < silentAfter {
				live++
			}
		}
	}
	switch {
	case !isVoter || voters > 0 && live > voters/2:
		return nil
	case voters == 0:
		return &raftfsm.Rejection{Code: "last-voter", Text: "it is the only voter of the mesh", Remedy: "a mesh of one is ended by deleting its data directory; with more nodes run meshd leave on it, which gives the vote to another first"}
	}
	return &raftfsm.Rejection{
		Code: "no-quorum", Text: fmt.Sprintf("without it %d voters would be left, of which %d answer, and a decision needs %d", voters, live, voters/2+1),
		Remedy: "start one of the others first",
	}
}

// dialTimeout bounds one reachability check.
const dialTimeout = 2 * time.Second

// reachable checks, from the member's side, both ports of the machine that wants
// to join. It answers there with what only the holder of the token can know.
func reachable(ctx context.Context, req JoinRequest) error {
	for _, port := range []struct{ network, addr, what string }{
		{"tcp", req.Address, "its mesh port"}, {"udp", req.Address, "its mesh port"}, {"tcp", req.Route, "its bus port"},
	} {
		if err := probe(ctx, port.network, port.addr, req.Secret); err != nil {
			return fmt.Errorf("this member cannot reach %s %s at %s: %w", port.what, port.network, port.addr, err)
		}
	}
	return nil
}

func probe(ctx context.Context, network, addr string, key []byte) error {
	var nonce [16]byte
	rand.Read(nonce[:])
	var last error
	for range 3 { // a packet may be lost
		if last = probeOnce(ctx, network, addr, nonce[:], key); last == nil || network == "tcp" {
			return last
		}
	}
	return last
}

func probeOnce(ctx context.Context, network, addr string, nonce, key []byte) error {
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	wait := dialTimeout
	if network == "udp" {
		wait = 500 * time.Millisecond
	}
	if err := conn.SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	if _, err := conn.Write(nonce); err != nil {
		return err
	}
	answer := make([]byte, 64)
	k, err := conn.Read(answer)
	if err != nil {
		return fmt.Errorf("no answer: %w", err)
	}
	if !probeMatches(nonce, key, answer[:k]) {
		return errors.New("something else answers there")
	}
	return nil
}
