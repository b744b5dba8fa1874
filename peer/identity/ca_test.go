package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// testMesh is a CA and what tests make with it.
type testMesh struct {
	id string
	ca *CA
}

func newMesh(t testing.TB) *testMesh {
	t.Helper()
	return newMeshAt(t, NewMeshID(), time.Now())
}

func newMeshAt(t testing.TB, id string, now time.Time) *testMesh {
	t.Helper()
	ca, err := NewCA(id, now)
	if err != nil {
		t.Fatal(err)
	}
	return &testMesh{id: id, ca: ca}
}

func (m *testMesh) sign(t testing.TB, keys *Keys, name string) []byte {
	t.Helper()
	return m.signAt(t, keys, name, time.Now())
}

func (m *testMesh) signAt(t testing.TB, keys *Keys, name string, now time.Time) []byte {
	t.Helper()
	cert, err := m.ca.Sign(keys.Public(), keys.NodeID(), name, nil, now)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestSign(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	mesh, keys := newMeshAt(t, "mtest", now), newKeys(t)
	text, err := mesh.ca.Sign(keys.Public(), keys.NodeID(), "alpha",
		[]string{"10.1.2.3", "DB.example", "127.0.0.1", "db.example", "2001:db8::1"}, now)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := parseCert(text)
	if err != nil {
		t.Fatal(err)
	}
	var ips []string
	for _, ip := range cert.IPAddresses {
		ips = append(ips, ip.String())
	}
	got := fmt.Sprintln(cert.Subject, cert.URIs, cert.DNSNames, ips, cert.NotBefore, cert.NotAfter, cert.ExtKeyUsage, cert.KeyUsage, cert.IsCA)
	want := fmt.Sprintln("CN=alpha,O=mtest", "[meshd://mtest/node/"+keys.NodeID()+"]",
		"[alpha.mesh.internal db.example node.mesh.internal route.mesh.internal]", "[10.1.2.3 127.0.0.1 ::1 2001:db8::1]",
		now.Add(-5*time.Minute), now.Add(90*24*time.Hour),
		[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, x509.KeyUsageDigitalSignature, false)
	if got != want {
		t.Errorf("certificate:\n got %s\nwant %s", got, want)
	}
	if err := cert.CheckSignatureFrom(mesh.ca.cert); err != nil {
		t.Error(err)
	}
	if end, err := Expiry(text); err != nil || !end.Equal(cert.NotAfter) {
		t.Errorf("Expiry = %v, %v, want %v", end, err, cert.NotAfter)
	}
	if due, err := RenewAt(text); err != nil || due.Sub(now).Round(time.Hour) != 60*24*time.Hour {
		t.Errorf("RenewAt = %v, %v, want 60 days after %v", due, err, now)
	}
	for name, err := range map[string]error{
		"Expiry":  func() error { _, err := Expiry([]byte("x")); return err }(),
		"RenewAt": func() error { _, err := RenewAt([]byte("x")); return err }(),
	} {
		if err == nil {
			t.Errorf("%s of no certificate: no error", name)
		}
	}
}

func TestSignRefuses(t *testing.T) {
	now := time.Now()
	mesh, keys := newMesh(t), newKeys(t)
	for name, c := range map[string]struct {
		pub      ed25519.PublicKey
		id, name string
		extra    []string
		at       time.Time
		want     string
	}{
		"another's id":        {keys.Public(), newKeys(t).NodeID(), "alpha", nil, now, "its key is that of node " + keys.NodeID()},
		"no key":              {nil, keys.NodeID(), "alpha", nil, now, "not Ed25519"},
		"no name":             {keys.Public(), keys.NodeID(), "", nil, now, "not of the form"},
		"name of two labels":  {keys.Public(), keys.NodeID(), "a.b", nil, now, "not of the form"},
		"no host":             {keys.Public(), keys.NodeID(), "alpha", []string{"*.example"}, now, "neither an IP address nor a host name"},
		"another node's host": {keys.Public(), keys.NodeID(), "alpha", []string{"Beta.Mesh.Internal"}, now, "the mesh's to give"},
		"too many hosts":      {keys.Public(), keys.NodeID(), "alpha", make([]string, 33), now, "at most 32"},
		"after the CA's end":  {keys.Public(), keys.NodeID(), "alpha", nil, now.Add(11 * 365 * 24 * time.Hour), "the mesh CA is valid"},
		"before its start":    {keys.Public(), keys.NodeID(), "alpha", nil, now.Add(-time.Hour), "the mesh CA is valid"},
	} {
		if _, err := mesh.ca.Sign(c.pub, c.id, c.name, c.extra, c.at); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
}

// A node's certificate ends with its CA at the latest: what is served after that
// would be refused with a worse message.
func TestSignEndsWithTheCA(t *testing.T) {
	mesh, keys := newMesh(t), newKeys(t)
	end, err := Expiry(mesh.signAt(t, keys, "alpha", mesh.ca.cert.NotAfter.Add(-time.Hour)))
	if err != nil || !end.Equal(mesh.ca.cert.NotAfter) {
		t.Errorf("certificate ends %v, %v, the CA %v", end, err, mesh.ca.cert.NotAfter)
	}
}

func TestCARoundTrip(t *testing.T) {
	now := time.Now()
	made := newMeshAt(t, "mtest", now)
	ca, err := LoadCA(made.ca.CertPEM(), made.ca.KeyPEM())
	if err != nil {
		t.Fatal(err)
	}
	if ca.MeshID() != "mtest" || !ca.key.Equal(made.ca.key) || !bytes.Equal(ca.CertPEM(), made.ca.CertPEM()) {
		t.Error("the CA loaded is not the one made")
	}
	if life := ca.cert.NotAfter.Sub(now); life.Round(time.Hour) != caLife {
		t.Errorf("the CA lives %v, want %v", life, caLife)
	}
	if !ca.cert.IsCA || !ca.cert.MaxPathLenZero || !slices.Equal(ca.cert.Subject.Organization, []string{"mtest"}) {
		t.Errorf("the certificate is not a CA of path length 0 of its mesh: %v", ca.cert.Subject)
	}
	sum := sha256.Sum256(ca.cert.Raw)
	if got, err := CAFingerprint(ca.CertPEM()); err != nil || got != hex.EncodeToString(sum[:]) {
		t.Errorf("CAFingerprint = %s, %v", got, err)
	}
}

func TestCARefuses(t *testing.T) {
	for _, id := range []string{"", "Mesh", "a/b", strings.Repeat("a", 41)} {
		if _, err := NewCA(id, time.Now()); err == nil {
			t.Errorf("NewCA(%q): no error", id)
		}
	}
	mesh, other, keys := newMesh(t), newMesh(t), newKeys(t)
	leaf := mesh.sign(t, keys, "alpha")
	for name, c := range map[string]struct {
		cert, key []byte
		want      string
	}{
		"another's key":    {mesh.ca.CertPEM(), other.ca.KeyPEM(), "not of one CA"},
		"no key":           {mesh.ca.CertPEM(), nil, "not one private key"},
		"a node":           {leaf, keyPEM(keys.node), "no mesh CA"},
		"no certificate":   {mesh.ca.KeyPEM(), mesh.ca.KeyPEM(), "no certificate in PEM"},
		"two certificates": {append(mesh.ca.CertPEM(), leaf...), mesh.ca.KeyPEM(), "2 certificates"},
	} {
		if _, err := LoadCA(c.cert, c.key); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("LoadCA, %s: %v, want an error with %q", name, err, c.want)
		}
	}
	if _, err := CAFingerprint(leaf); err == nil {
		t.Error("CAFingerprint of a node's certificate: no error")
	}
}
