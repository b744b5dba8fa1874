package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"
)

const (
	// caLife is long because changing a CA needs every node; it can be changed
	// any time, by trusting two for a while.
	caLife = 10 * 365 * 24 * time.Hour
	// certLife gives a node that was away for a month time to renew: RenewAt is
	// 60 days in, and a removed node is refused by Allow, not by expiry.
	certLife = 90 * 24 * time.Hour
	// backdate lets a machine whose clock is late use a new certificate at once.
	backdate = 5 * time.Minute
)

const (
	// domain is in no public zone: .internal is reserved for private use.
	domain = "mesh.internal"
	// RouteHost and NodeHost are in every node's certificate. Clients verify
	// these, since which node it is stands in the URI SAN: RouteHost on bus
	// routes, NodeHost elsewhere.
	RouteHost = "route." + domain
	NodeHost  = "node." + domain

	// A node's URI SAN is scheme://<mesh id>/roleNode/<node id>.
	scheme   = "meshd"
	roleNode = "node"

	maxExtraHosts = 32
	maxPEM        = 64 << 10
)

// CA is the mesh's certificate authority with its private key. It signs nodes
// and no further CA (path length 0).
type CA struct {
	cert *x509.Certificate
	key  ed25519.PrivateKey
}

// NewCA makes the CA of a mesh, valid for 10 years from now.
func NewCA(meshID string, now time.Time) (*CA, error) {
	if !names.MatchString(meshID) {
		return nil, fmt.Errorf("make mesh CA: mesh id %.64q is not of the form %s", meshID, names)
	}
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make mesh CA: %w", err)
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{meshID}, CommonName: "meshd CA " + meshID},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(caLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, pub, key)
	if err != nil {
		return nil, fmt.Errorf("make mesh CA: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make mesh CA: %w", err)
	}
	return &CA{cert: cert, key: key}, nil
}

// LoadCA reads what CertPEM and KeyPEM gave.
func LoadCA(certPEM, keyPEM []byte) (*CA, error) {
	cert, err := parseCert(certPEM)
	if err == nil {
		err = checkCA(cert)
	}
	if err != nil {
		return nil, fmt.Errorf("load mesh CA: %w", err)
	}
	key, err := parseKeyPEM(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("load mesh CA: key: %w", err)
	}
	if !key.Public().(ed25519.PublicKey).Equal(cert.PublicKey) {
		return nil, errors.New("load mesh CA: key and certificate are not of one CA")
	}
	return &CA{cert: cert, key: key}, nil
}

// MeshID returns the id of the mesh whose CA this is.
func (ca *CA) MeshID() string { return ca.cert.Subject.Organization[0] }

// CertPEM returns the certificate, which is public.
func (ca *CA) CertPEM() []byte { return certPEM(ca.cert.Raw) }

// KeyPEM returns the private key: whoever has it can be any node.
func (ca *CA) KeyPEM() []byte { return keyPEM(ca.key) }

// String names the mesh, so that printing a CA shows no key.
func (ca *CA) String() string { return "CA of mesh " + ca.MeshID() }

// GoString is String.
func (ca *CA) GoString() string { return ca.String() }

// CAFingerprint returns the lower-case hex SHA-256 of a CA certificate's DER:
// what a join token knows the mesh by.
func CAFingerprint(caPEM []byte) (string, error) {
	cert, err := parseCert(caPEM)
	if err == nil {
		err = checkCA(cert)
	}
	if err != nil {
		return "", fmt.Errorf("fingerprint mesh CA: %w", err)
	}
	return fingerprint(cert), nil
}

// Sign returns the certificate of the node nodeID, whose key is pub, as PEM. It
// is valid for 90 days from now, or as long as the CA, and 5 minutes backwards.
//
// It is for both ends of a connection and names, beside the node's URI, the hosts
// RouteHost, NodeHost, <nodeName>.mesh.internal, 127.0.0.1, ::1 and extraHosts:
// addresses and host names, at most 32, under which clients that know no meshd
// dial the services it embeds.
//
// That the caller holds the private key of pub is not asked here: without it the
// certificate is of no use.
func (ca *CA) Sign(pub ed25519.PublicKey, nodeID, nodeName string, extraHosts []string, now time.Time) ([]byte, error) {
	if len(pub) != ed25519.PublicKeySize {
		return nil, fmt.Errorf("sign node %.64q: a public key of %d bytes is not Ed25519", nodeID, len(pub))
	}
	if id := NodeID(pub); id != nodeID {
		return nil, fmt.Errorf("sign node %.64q: its key is that of node %s", nodeID, id)
	}
	if !names.MatchString(nodeName) {
		return nil, fmt.Errorf("sign node %s: name %.64q is not of the form %s", nodeID, nodeName, names)
	}
	if now.Before(ca.cert.NotBefore) || now.After(ca.cert.NotAfter) {
		return nil, fmt.Errorf("sign node %s: the mesh CA is valid from %s to %s, and it is %s",
			nodeID, stamp(ca.cert.NotBefore), stamp(ca.cert.NotAfter), stamp(now))
	}
	addrs, hostNames, err := certHosts(nodeName, extraHosts)
	if err != nil {
		return nil, fmt.Errorf("sign node %s: %w", nodeID, err)
	}
	notAfter := now.Add(certLife)
	if notAfter.After(ca.cert.NotAfter) {
		notAfter = ca.cert.NotAfter
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{ca.MeshID()}, CommonName: nodeName},
		NotBefore:             now.Add(-backdate),
		NotAfter:              notAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{{Scheme: scheme, Host: ca.MeshID(), Path: "/" + roleNode + "/" + nodeID}},
		DNSNames:              hostNames,
		IPAddresses:           addrs,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, pub, ca.key)
	if err != nil {
		return nil, fmt.Errorf("sign node %s: %w", nodeID, err)
	}
	return certPEM(der), nil
}

// Expiry returns when a certificate ends.
func Expiry(certPEM []byte) (time.Time, error) {
	cert, err := parseCert(certPEM)
	if err != nil {
		return time.Time{}, fmt.Errorf("read certificate: %w", err)
	}
	return cert.NotAfter, nil
}

// RenewAt returns when a certificate is due for renewal: after two thirds of its
// life, so that the last third is there for a mesh that cannot sign just then.
func RenewAt(certPEM []byte) (time.Time, error) {
	cert, err := parseCert(certPEM)
	if err != nil {
		return time.Time{}, fmt.Errorf("read certificate: %w", err)
	}
	return cert.NotBefore.Add(cert.NotAfter.Sub(cert.NotBefore) / 3 * 2), nil
}

// certHosts returns the addresses and host names of a node's certificate.
func certHosts(nodeName string, extra []string) ([]net.IP, []string, error) {
	if len(extra) > maxExtraHosts {
		return nil, nil, fmt.Errorf("%d extra hosts, at most %d are taken", len(extra), maxExtraHosts)
	}
	addrs := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	hostNames := []string{RouteHost, NodeHost, nodeName + "." + domain}
	for _, host := range extra {
		ip, name, err := parseHost(host)
		switch {
		case err != nil:
			return nil, nil, fmt.Errorf("extra host: %w", err)
		case ip.IsValid():
			addrs = append(addrs, ip)
		case name == domain || strings.HasSuffix(name, "."+domain):
			return nil, nil, fmt.Errorf("extra host %s: names under %s are the mesh's to give", name, domain)
		default:
			hostNames = append(hostNames, name)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	slices.Sort(hostNames)
	var ips []net.IP
	for _, a := range slices.Compact(addrs) {
		ips = append(ips, a.AsSlice())
	}
	return ips, slices.Compact(hostNames), nil
}

// checkCA says whether cert is one that NewCA could have made. Its time is not
// judged: each handshake does.
func checkCA(cert *x509.Certificate) error {
	if !cert.IsCA || !cert.MaxPathLenZero {
		return errors.New("it is no mesh CA: it may not sign nodes, or may sign other CAs")
	}
	if len(cert.Subject.Organization) != 1 || !names.MatchString(cert.Subject.Organization[0]) {
		return errors.New("it is no mesh CA: its organisation is not a mesh id")
	}
	if err := cert.CheckSignatureFrom(cert); err != nil {
		return fmt.Errorf("it is not self-signed: %w", err)
	}
	return nil
}

func fingerprint(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.Raw)
	return hex.EncodeToString(sum[:])
}

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// parseCert reads exactly one certificate.
func parseCert(text []byte) (*x509.Certificate, error) {
	certs, err := parseCerts(text)
	if err != nil {
		return nil, err
	}
	if len(certs) != 1 {
		return nil, fmt.Errorf("%d certificates where one is taken", len(certs))
	}
	return certs[0], nil
}

// parseCerts reads one certificate or more, and nothing else.
func parseCerts(text []byte) ([]*x509.Certificate, error) {
	if len(text) > maxPEM {
		return nil, fmt.Errorf("%d bytes of certificates, at most %d are taken", len(text), maxPEM)
	}
	var certs []*x509.Certificate
	for rest := bytes.TrimSpace(text); len(rest) > 0; rest = bytes.TrimSpace(rest) {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil || block.Type != "CERTIFICATE" {
			return nil, errors.New("there is something that is no certificate in PEM")
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(certs)+1, err)
		}
		certs = append(certs, cert)
	}
	if len(certs) == 0 {
		return nil, errors.New("there is no certificate in it")
	}
	return certs, nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
