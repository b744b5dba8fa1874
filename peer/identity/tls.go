package identity

import (
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Credentials are what a node shows and whom it trusts on every port of the
// mesh. Renew changes both under running servers.
//
// Set the exported fields before the first handshake.
type Credentials struct {
	// Allow says whether a node is a member now: nil if so, else why not. It is
	// asked in each handshake, by both ends, and must not block. Without it
	// nobody is allowed.
	Allow func(nodeID string) error
	// Now is the clock that certificates are judged by. Nil means time.Now.
	Now func() time.Time

	mesh    string
	current atomic.Pointer[material]
}

// material is replaced as a whole, so that no handshake sees the certificate of
// one CA beside the trust in another.
type material struct {
	cert  tls.Certificate
	roots *x509.CertPool
}

// NewCredentials returns the credentials of a node of the mesh. cert is of
// Keys.TLSCertificate; caPEM holds the CA certificates to trust, two during a
// change of CA. An expired certificate is taken, for a node that was away too
// long must still start: it is its peers who refuse it.
func NewCredentials(meshID string, cert tls.Certificate, caPEM []byte) (*Credentials, error) {
	c := &Credentials{mesh: meshID}
	if err := c.Renew(cert, caPEM); err != nil {
		return nil, err
	}
	return c, nil
}

// Renew replaces the certificate and the trusted CAs, from the next handshake on.
// Running Server configurations follow by themselves, and so does the
// certificate, not the trust, of those made by Client and Route before.
func (c *Credentials) Renew(cert tls.Certificate, caPEM []byte) error {
	cas, err := parseCerts(caPEM)
	if err != nil {
		return fmt.Errorf("use mesh CA: %w", err)
	}
	roots := x509.NewCertPool()
	for _, ca := range cas {
		if err := checkCA(ca); err != nil {
			return fmt.Errorf("use mesh CA: %w", err)
		}
		if mesh := ca.Subject.Organization[0]; mesh != c.mesh {
			return fmt.Errorf("use mesh CA: it is the CA of mesh %s, and this is a node of mesh %s", mesh, c.mesh)
		}
		roots.AddCert(ca)
	}
	if cert.Leaf == nil || cert.PrivateKey == nil {
		return errors.New("use node certificate: it is not one of Keys.TLSCertificate")
	}
	if _, err := nodeOf(cert.Leaf, c.mesh); err != nil {
		return fmt.Errorf("use node certificate: %w", err)
	}
	_, err = cert.Leaf.Verify(x509.VerifyOptions{
		Roots:       roots,
		CurrentTime: cert.Leaf.NotBefore.Add(backdate), // its time is for its peers to judge
		KeyUsages:   []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	if err != nil {
		return fmt.Errorf("use node certificate: %w", err)
	}
	c.current.Store(&material{cert: cert, roots: roots})
	return nil
}

// Server returns the configuration of a listener that serves the given ALPN
// names. Each needs the certificate of a current member, but for Join, which is
// served where it is given and needs none; the one that a client shows there is
// verified, and may be that of a node that was removed. A hello that offers Join beside
// another name is treated as the other's. A hello without ALPN, or with none of
// the names, is refused.
//
// In TLS 1.3 a client has finished its handshake before the server judges its
// certificate, so it learns of a refusal from its first read.
func (c *Credentials) Server(protos ...string) *tls.Config {
	members := slices.DeleteFunc(slices.Clone(protos), func(p string) bool { return p == Join })
	joins := len(members) < len(protos)

	// The trust is read anew for each hello. What is returned here is as strict
	// as the strictest, should a listener ever not ask.
	config := c.member(members)
	config.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if len(hello.SupportedProtos) == 0 {
			return nil, errors.New("refuse hello: it has no ALPN name, and this port serves nothing without")
		}
		if joins && slices.Equal(hello.SupportedProtos, []string{Join}) {
			return c.joinServer(), nil
		}
		return c.member(members), nil
	}
	return config
}

// Client returns the configuration for dialling one node, expectNode, under one
// ALPN name; any current member will do where expectNode is empty. Ask for it
// anew for each connection: it holds the CAs that are trusted at that moment.
func (c *Credentials) Client(expectNode, proto string) *tls.Config {
	config := c.base()
	config.ServerName = NodeHost
	config.NextProtos = []string{proto}
	config.VerifyConnection = func(state tls.ConnectionState) error {
		id, err := c.admit(state)
		if err != nil {
			return err
		}
		if expectNode != "" && id != expectNode {
			return fmt.Errorf("refuse peer: node %s answered where node %s was dialled", id, expectNode)
		}
		return checkProto(state, []string{proto})
	}
	return config
}

// Route returns the one configuration of the bus's routes, which a NATS server
// uses for both roles. Which member it is the server checks by Pin. Routes have
// no ALPN: they have a port of their own.
func (c *Credentials) Route() *tls.Config {
	config := c.base()
	config.ServerName = RouteHost
	config.ClientAuth = tls.RequireAndVerifyClientCert
	config.VerifyConnection = func(state tls.ConnectionState) error {
		_, err := c.admit(state)
		return err
	}
	return config
}

// JoinClient returns the configuration of a machine that has a join token and
// nothing else. It takes the server whose chain holds the CA certificate with
// that fingerprint and a node's certificate signed by it, judged by the
// machine's clock.
func JoinClient(fingerprint string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{Join},
		ServerName: NodeHost,
		// There is no root to verify against before the chain is seen:
		// VerifyConnection verifies, and is called in every handshake.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			if err := verifyPinned(state, fingerprint); err != nil {
				return fmt.Errorf("refuse server: %w", err)
			}
			return checkProto(state, []string{Join})
		},
	}
}

// PeerNode returns the id of the node at the other end of a verified connection.
// It fails where the peer has no certificate, or one of another mesh or another
// role, or one whose id is not that of its key.
func PeerNode(state tls.ConnectionState, meshID string) (nodeID string, err error) {
	if len(state.PeerCertificates) == 0 {
		return "", errors.New("refuse peer: it showed no certificate")
	}
	if len(state.VerifiedChains) == 0 {
		return "", errors.New("refuse peer: its certificate was not verified")
	}
	id, err := nodeOf(state.PeerCertificates[0], meshID)
	if err != nil {
		return "", fmt.Errorf("refuse peer: %w", err)
	}
	return id, nil
}

// base is what all configurations of a member share.
//
// Session tickets are off, since a resumed session proves no key. A full
// handshake, both ends on one core, takes about 2 ms (BenchmarkHandshake).
func (c *Credentials) base() *tls.Config {
	roots := c.current.Load().roots
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		Time:                   c.Now, // nil is time.Now
		RootCAs:                roots,
		ClientCAs:              roots,
		SessionTicketsDisabled: true,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return &c.current.Load().cert, nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &c.current.Load().cert, nil
		},
	}
}

func (c *Credentials) member(protos []string) *tls.Config {
	config := c.base()
	config.ClientAuth = tls.RequireAndVerifyClientCert
	config.NextProtos = protos
	config.VerifyConnection = func(state tls.ConnectionState) error {
		if _, err := c.admit(state); err != nil {
			return err
		}
		return checkProto(state, protos)
	}
	return config
}

func (c *Credentials) joinServer() *tls.Config {
	config := c.base()
	config.ClientAuth = tls.VerifyClientCertIfGiven
	config.NextProtos = []string{Join}
	return config
}

// admit returns the id of the peer, which is a current member.
func (c *Credentials) admit(state tls.ConnectionState) (string, error) {
	id, err := PeerNode(state, c.mesh)
	if err != nil {
		return "", err
	}
	if c.Allow == nil {
		return "", fmt.Errorf("refuse peer: node %s: this node does not know the members yet", id)
	}
	if err := c.Allow(id); err != nil {
		return "", fmt.Errorf("refuse peer: node %s: %w", id, err)
	}
	return id, nil
}

// checkProto closes what crypto/tls leaves open: without names of its own, or
// for "http/1.1" offered to "h2", it goes on with no name at all; and a server
// may ignore ALPN.
func checkProto(state tls.ConnectionState, protos []string) error {
	if !slices.Contains(protos, state.NegotiatedProtocol) {
		return fmt.Errorf("refuse peer: no ALPN name in common with %q", protos)
	}
	return nil
}

// verifyPinned checks a server's chain against the fingerprint of its CA alone.
func verifyPinned(state tls.ConnectionState, want string) error {
	if len(state.PeerCertificates) == 0 {
		return errors.New("it showed no certificate")
	}
	leaf, rest := state.PeerCertificates[0], state.PeerCertificates[1:]
	i := slices.IndexFunc(rest, func(cert *x509.Certificate) bool { return fingerprint(cert) == want })
	if i < 0 {
		return errors.New("it is not of the mesh that made the token: no CA with the token's fingerprint")
	}
	ca := rest[i]
	if err := checkCA(ca); err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots:     roots,
		DNSName:   NodeHost,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	if err != nil {
		return err
	}
	_, err = nodeOf(leaf, ca.Subject.Organization[0])
	return err
}

// nodeOf returns the id in a certificate of the role "node" of the mesh: that of
// its one URI SAN, which must be that of its key.
func nodeOf(cert *x509.Certificate, meshID string) (string, error) {
	if len(cert.URIs) != 1 {
		return "", fmt.Errorf("its certificate has %d URI names, a node's has one", len(cert.URIs))
	}
	uri := cert.URIs[0]
	role, id, ok := strings.Cut(strings.TrimPrefix(uri.EscapedPath(), "/"), "/")
	// Compared as a whole, so that no part of a URI that is not looked at counts.
	if !ok || uri.String() != scheme+"://"+uri.Host+"/"+role+"/"+id {
		return "", fmt.Errorf("its name %.128q is not of the form %s://<mesh>/%s/<node>", uri, scheme, roleNode)
	}
	if uri.Host != meshID {
		return "", fmt.Errorf("it is of mesh %.64q, and this is mesh %s", uri.Host, meshID)
	}
	if role != roleNode {
		return "", fmt.Errorf("its role is %.64q, and only a %s is served", role, roleNode)
	}
	pub, ok := cert.PublicKey.(ed25519.PublicKey)
	if !ok {
		return "", fmt.Errorf("its key is a %T, a node's is Ed25519", cert.PublicKey)
	}
	if own := NodeID(pub); own != id {
		return "", fmt.Errorf("it calls itself node %.64q, and its key is that of node %s", id, own)
	}
	return id, nil
}

// Service is the server's side of a port that serves programs of the mesh's
// users, such as the embedded buckets: the node shows its certificate, so that
// the CA alone proves it, and whoever connects proves itself by a login.
func (c *Credentials) Service() *tls.Config {
	config := c.base()
	config.ClientCAs = nil
	return config
}
