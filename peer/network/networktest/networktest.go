// Package networktest opens real mesh ports on loopback for tests: a throw-away CA, a certificate
// for each node, and an address book that every port of the mesh shares.
package networktest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"log/slog"
	"math/big"
	"sync"
	"testing"
	"time"

	"meshd/peer/network"
)

// Mesh is one CA and the addresses of the ports that it certified.
type Mesh struct {
	t   testing.TB
	key *ecdsa.PrivateKey
	ca  *x509.Certificate

	mu    sync.Mutex
	addrs map[string]string
}

// NewMesh makes a CA.
func NewMesh(t testing.TB) *Mesh {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	m := &Mesh{t: t, key: key, addrs: map[string]string{}}
	m.ca = m.sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: "test mesh"},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}, nil, key)
	return m
}

func (m *Mesh) sign(tmpl, parent *x509.Certificate, key *ecdsa.PrivateKey) *x509.Certificate {
	m.t.Helper()
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100))
	if err != nil {
		m.t.Fatal(err)
	}
	tmpl.SerialNumber = serial
	tmpl.NotBefore, tmpl.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	if parent == nil {
		parent = tmpl
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, &key.PublicKey, m.key)
	if err != nil {
		m.t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		m.t.Fatal(err)
	}
	return c
}

// Certificate makes a key and a certificate for a node.
func (m *Mesh) Certificate(node string) tls.Certificate {
	m.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		m.t.Fatal(err)
	}
	c := m.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: node},
		DNSNames:    []string{node},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, m.ca, key)
	return tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: key, Leaf: c}
}

// Pool holds the mesh's CA.
func (m *Mesh) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(m.ca)
	return p
}

// Set records the address of a node in the book that all ports share.
func (m *Mesh) Set(node, addr string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.addrs[node] = addr
}

// Addr looks a node up in the book.
func (m *Mesh) Addr(node string) (string, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.addrs[node]
	return a, ok
}

// Config is how a port of a node of this mesh is opened: on a free loopback port.
func (m *Mesh) Config(node string) network.Config {
	m.t.Helper()
	cert, pool := m.Certificate(node), m.Pool()
	return network.Config{
		Bind: "127.0.0.1:0",
		Server: &tls.Config{
			Certificates: []tls.Certificate{cert},
			ClientCAs:    pool,
			ClientAuth:   tls.VerifyClientCertIfGiven,
		},
		Client: func(peer, _ string) *tls.Config {
			return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: pool, ServerName: peer}
		},
		PeerNode: func(s tls.ConnectionState) (string, error) {
			if len(s.PeerCertificates) == 0 {
				return "", nil
			}
			return s.PeerCertificates[0].Subject.CommonName, nil
		},
		Resolver: m.Addr,
		Limits:   limits(),
		Log:      slog.New(slog.DiscardHandler),
	}
}

// limits leaves room for a whole mesh on one source address.
func limits() network.Limits {
	l := network.DefaultLimits()
	l.PerSource = l.Pending
	return l
}

// Port opens the port of a node and puts it in the book. The test closes it at its end.
func (m *Mesh) Port(node string) *network.Port {
	m.t.Helper()
	p, err := network.OpenPort(m.Config(node))
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { p.Close() })
	m.Set(node, p.Addr().String())
	return p
}
