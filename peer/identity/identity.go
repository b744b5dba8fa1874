// Package identity holds who a node is, and everything cryptographic: the
// node's keys, the mesh's certificate authority, the TLS rules of every port,
// join tokens, and the sealing of secrets that go into the log.
//
// What holds, whatever the caller does:
//
//   - A node is its Ed25519 key. NodeID is derived from it, and a certificate
//     whose name does not agree with its own key is nobody's. Addresses and
//     host names identify nothing.
//   - All TLS is 1.3. A peer is served only with a certificate that this mesh's
//     CA signed, of the role "node", for a current member: Credentials.Allow
//     says who that is, and without it nobody is. The one exception is the ALPN
//     name Join, where the server alone shows a certificate and the joiner knows
//     the CA by the fingerprint in its token.
//   - There is no session resumption: every handshake proves the key and asks
//     Allow, so a removed node is out at its next connection. Connections that
//     stand are the caller's to close.
//   - Private keys live in files of mode 0600, appear whole or not at all, and
//     are not loaded from a file that others may read.
//   - Nothing here logs, and no error, String or LogValue carries a secret. The
//     secret forms are Token.String, CA.KeyPEM, NewRecovery and NewSecret.
//
// The package reads no clock but through Credentials.Now and JoinClient, keeps
// no state of its own and starts no goroutine. Everything in it may be used from
// several goroutines at once.
package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base32"
	"encoding/hex"
	"fmt"
	"net/netip"
	"regexp"
	"strings"
)

// Join is the ALPN name under which a machine without a certificate asks for
// one.
const Join = "join"

// idBytes is the length of a node or mesh id before base32: 80 bits. Two nodes
// of one mesh meet by chance once in 2^40 keys; forging the id of a given node
// takes 2^80 keys and a CA that signs the result.
const idBytes = 10

var (
	// names is the rule for mesh ids and node names, that of every name in meshd.
	names = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}$`)
	// hosts is RFC 1123's host name, in lower case.
	hosts = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)
)

// NodeID returns the id of the node whose TLS key is pub: "n" and the first 80
// bits of the SHA-256 of its DER SubjectPublicKeyInfo in lower-case base32, 17
// characters in all. It is one token of a NATS subject and one label of a host
// name.
func NodeID(pub ed25519.PublicKey) string {
	sum := sha256.Sum256(spki(pub))
	return "n" + base32Lower(sum[:idBytes])
}

// Pin returns the lower-case hex SHA-256 of pub's DER SubjectPublicKeyInfo: the
// form of TLSPinnedCerts of a NATS server. It follows the key, not the
// certificate, so it outlives every renewal.
func Pin(pub ed25519.PublicKey) string {
	sum := sha256.Sum256(spki(pub))
	return hex.EncodeToString(sum[:])
}

// NewMeshID returns a random mesh id: "m" and 16 characters of base32.
func NewMeshID() string {
	var id [idBytes]byte
	rand.Read(id[:]) // never fails: crypto/rand ends the process instead
	return "m" + base32Lower(id[:])
}

// NewSecret returns a password of 40 characters out of A-Z, a-z and 0-9, each
// equally likely: 238 bits, and nothing that any service or shell would need
// quoted.
func NewSecret() string {
	const (
		alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
		length   = 40
		fair     = 256 / len(alphabet) * len(alphabet) // bytes from here up would favour the first letters
	)
	secret := make([]byte, 0, length)
	for {
		var random [2 * length]byte
		rand.Read(random[:])
		for _, b := range random {
			if int(b) >= fair {
				continue
			}
			if secret = append(secret, alphabet[int(b)%len(alphabet)]); len(secret) == length {
				return string(secret)
			}
		}
	}
}

// spki returns the DER SubjectPublicKeyInfo of pub. Encoding an Ed25519 key
// cannot fail.
func spki(pub ed25519.PublicKey) []byte {
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		panic("identity: encode Ed25519 public key: " + err.Error())
	}
	return der
}

func base32Lower(b []byte) string {
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b))
}

// parseHost reads an address or a host name, and returns whichever it is in its
// normal form.
func parseHost(host string) (ip netip.Addr, name string, err error) {
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip.Zone() != "" || ip.IsUnspecified() || ip.IsMulticast() {
			return netip.Addr{}, "", fmt.Errorf("%s is no address that another machine can dial", ip)
		}
		return ip.Unmap(), "", nil
	}
	name = strings.ToLower(host)
	if len(name) > 253 || !hosts.MatchString(name) {
		return netip.Addr{}, "", fmt.Errorf("%.64q is neither an IP address nor a host name", host)
	}
	return netip.Addr{}, name, nil
}
