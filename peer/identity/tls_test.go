package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
)

// node is a member of a mesh, ready to dial and to be dialled.
type node struct {
	keys *Keys
	cred *Credentials
}

func (n *node) id() string { return n.keys.NodeID() }

// node makes a member that allows everybody.
func (m *testMesh) node(t testing.TB, name string) *node {
	t.Helper()
	keys := newKeys(t)
	return &node{keys, m.credentials(t, keys, m.sign(t, keys, name))}
}

func (m *testMesh) credentials(t testing.TB, keys *Keys, certPEM []byte) *Credentials {
	t.Helper()
	cert, err := keys.TLSCertificate(certPEM, m.ca.CertPEM())
	if err != nil {
		t.Fatal(err)
	}
	cred, err := NewCredentials(m.id, cert, m.ca.CertPEM())
	if err != nil {
		t.Fatal(err)
	}
	cred.Allow = func(string) error { return nil }
	return cred
}

// forge signs a certificate that Sign would not, for tests of those who read it.
func (m *testMesh) forge(t testing.TB, key ed25519.PrivateKey, change func(*x509.Certificate)) tls.Certificate {
	t.Helper()
	pub := key.Public().(ed25519.PublicKey)
	template := &x509.Certificate{
		NotBefore:   time.Now().Add(-time.Minute),
		NotAfter:    time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{NodeHost, RouteHost},
		URIs:        []*url.URL{{Scheme: scheme, Host: m.id, Path: "/node/" + NodeID(pub)}},
	}
	change(template)
	der, err := x509.CreateCertificate(rand.Reader, template, m.ca.cert, pub, m.ca.key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der, m.ca.cert.Raw}, PrivateKey: key, Leaf: leaf}
}

// end is how a handshake went at one end.
type end struct {
	state tls.ConnectionState
	err   error
}

// handshake connects the two over loopback TCP. Each end writes a byte and reads
// the other's, as only then a client knows whether it was let in.
func handshake(t testing.TB, server, client *tls.Config) (s, c end) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	talk := func(conn *tls.Conn) end {
		defer conn.Close()
		err := conn.SetDeadline(time.Now().Add(10 * time.Second))
		if err == nil {
			err = conn.Handshake()
		}
		if err == nil {
			_, err = conn.Write([]byte{1})
		}
		if err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
		return end{conn.ConnectionState(), err}
	}
	served := make(chan end, 1)
	go func() {
		raw, err := l.Accept()
		if err != nil {
			served <- end{err: err}
			return
		}
		served <- talk(tls.Server(raw, server))
	}()
	raw, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c = talk(tls.Client(raw, client))
	return <-served, c
}

// wantRefused fails unless both ends of a handshake failed, the one that refuses
// with an error that contains want.
func wantRefused(t *testing.T, refuses, refused end, want string) {
	t.Helper()
	if refuses.err == nil || !strings.Contains(refuses.err.Error(), want) {
		t.Errorf("the end that refuses: %v, want an error with %q", refuses.err, want)
	}
	if refused.err == nil {
		t.Error("the end that is refused got through")
	}
}

func TestMembersMeet(t *testing.T) {
	mesh := newMesh(t)
	alpha, beta := mesh.node(t, "alpha"), mesh.node(t, "beta-")
	for name, c := range map[string]struct {
		server, client *tls.Config
		proto          string
	}{
		"by id":              {alpha.cred.Server("raft", "api", Join), beta.cred.Client(alpha.id(), "api"), "api"},
		"without an id":      {alpha.cred.Server("raft"), beta.cred.Client("", "raft"), "raft"},
		"as routes":          {alpha.cred.Route(), beta.cred.Route(), ""},
		"first of its names": {alpha.cred.Server("raft", Join), withProtos(beta.cred.Client("", "raft"), Join, "raft"), "raft"},
	} {
		t.Run(name, func(t *testing.T) {
			s, c2 := handshake(t, c.server, c.client)
			if s.err != nil || c2.err != nil {
				t.Fatalf("server: %v, client: %v", s.err, c2.err)
			}
			if id, err := PeerNode(s.state, mesh.id); err != nil || id != beta.id() {
				t.Errorf("the server sees %q, %v, want %s", id, err, beta.id())
			}
			if id, err := PeerNode(c2.state, mesh.id); err != nil || id != alpha.id() {
				t.Errorf("the client sees %q, %v, want %s", id, err, alpha.id())
			}
			if p := c2.state.NegotiatedProtocol; p != c.proto || s.state.Version != tls.VersionTLS13 {
				t.Errorf("protocol %q, TLS %x", p, s.state.Version)
			}
		})
	}
}

func withProtos(config *tls.Config, protos ...string) *tls.Config {
	config.NextProtos = protos
	return config
}

// badPeers are those who no member deals with, whichever end they are, on any
// port but the join port.
func badPeers(t *testing.T, mesh *testMesh) map[string]struct {
	cert tls.Certificate
	want string
} {
	foreign := newMeshAt(t, mesh.id, time.Now()) // of the same name, which must not help
	key := newKeys(t).node
	id := NodeID(key.Public().(ed25519.PublicKey))
	uris := func(texts ...string) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			c.URIs = nil
			for _, text := range texts {
				u, err := url.Parse(text)
				if err != nil {
					t.Fatal(err)
				}
				c.URIs = append(c.URIs, u)
			}
		}
	}
	same := func(*x509.Certificate) {}
	base := "meshd://" + mesh.id
	ours := base + "/node/" + id
	return map[string]struct {
		cert tls.Certificate
		want string
	}{
		"foreign CA":     {foreign.forge(t, key, same), "certificate"},
		"foreign mesh":   {mesh.forge(t, key, uris("meshd://mother/node/"+id)), "it is of mesh \"mother\""},
		"module":         {mesh.forge(t, key, uris(base+"/module/"+id)), "its role is \"module\""},
		"another's id":   {mesh.forge(t, key, uris(base+"/node/"+newKeys(t).NodeID())), "and its key is that of node " + id},
		"no name":        {mesh.forge(t, key, uris()), "0 URI names"},
		"two names":      {mesh.forge(t, key, uris(ours, "meshd://mother/node/x")), "2 URI names"},
		"another scheme": {mesh.forge(t, key, uris("spiffe://"+mesh.id+"/node/"+id)), "is not of the form"},
		"query":          {mesh.forge(t, key, uris(ours+"?x")), "is not of the form"},
		"fragment":       {mesh.forge(t, key, uris(ours+"#x")), "is not of the form"},
		"user":           {mesh.forge(t, key, uris("meshd://x@"+mesh.id+"/node/"+id)), "is not of the form"},
		"more path":      {mesh.forge(t, key, uris(ours+"/x")), "and its key is that of node " + id},
		"escaped path":   {mesh.forge(t, key, uris(base+"/%6eode/"+id)), "its role is \"%6eode\""},
		"no path":        {mesh.forge(t, key, uris(base)), "is not of the form"},
		"expired": {mesh.forge(t, key, func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
		}), "expired"},
		"not yet valid": {mesh.forge(t, key, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(30 * time.Minute) }), "not yet valid"},
		"for no end": {mesh.forge(t, key, func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning}
		}), "key usage"},
		"CA as a node": {tls.Certificate{Certificate: [][]byte{mesh.ca.cert.Raw}, PrivateKey: mesh.ca.key}, ""},
	}
}

func TestBadPeersAreRefused(t *testing.T) {
	mesh := newMesh(t)
	alpha := mesh.node(t, "alpha")
	for name, bad := range badPeers(t, mesh) {
		t.Run(name, func(t *testing.T) {
			client := func(proto ...string) *tls.Config {
				return &tls.Config{InsecureSkipVerify: true, NextProtos: proto, Certificates: []tls.Certificate{bad.cert}}
			}
			for _, proto := range []string{"raft", "api", Join} {
				if proto == Join && name != "foreign CA" && name != "expired" && name != "not yet valid" && name != "for no end" {
					continue // no member's either, and so nobody's: the port asks PeerNode
				}
				s, c := handshake(t, alpha.cred.Server("raft", "api", Join), client(proto))
				wantRefused(t, s, c, bad.want)
			}
			s, c := handshake(t, alpha.cred.Route(), client())
			wantRefused(t, s, c, bad.want)

			server := &tls.Config{NextProtos: []string{"raft", Join}, Certificates: []tls.Certificate{bad.cert}}
			s, c = handshake(t, server, alpha.cred.Client("", "raft"))
			wantRefused(t, c, s, bad.want)
			s, c = handshake(t, server, alpha.cred.Route())
			wantRefused(t, c, s, bad.want)
		})
	}
}

func TestNobodyWithoutACertificateButToJoin(t *testing.T) {
	mesh := newMesh(t)
	server := mesh.node(t, "alpha").cred.Server("raft", "api", Join)
	for _, protos := range [][]string{{"raft"}, {"api"}, {"raft", Join}, {Join, "raft"}, {Join, "unknown"}, {Join, Join}, {"unknown"}, nil} {
		s, c := handshake(t, server, &tls.Config{InsecureSkipVerify: true, NextProtos: protos})
		if s.err == nil || c.err == nil {
			t.Errorf("%q without a certificate: server %v, client %v, want both refused", protos, s.err, c.err)
		}
	}
	s, c := handshake(t, server, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{Join}})
	if s.err != nil || c.err != nil || s.state.NegotiatedProtocol != Join {
		t.Errorf("join: server %v, client %v, protocol %q", s.err, c.err, s.state.NegotiatedProtocol)
	}
	s, c = handshake(t, mesh.node(t, "beta").cred.Route(), &tls.Config{InsecureSkipVerify: true})
	wantRefused(t, s, c, "certificate")
}

// A name that is not served is refused to members too, however crypto/tls would
// settle it.
func TestUnknownALPNIsRefused(t *testing.T) {
	mesh := newMesh(t)
	alpha, beta := mesh.node(t, "alpha"), mesh.node(t, "beta")
	for name, c := range map[string]struct {
		served, offered []string
		want            string
	}{
		"none":                  {[]string{"raft"}, nil, "it has no ALPN name"},
		"unknown":               {[]string{"raft"}, []string{"bogus"}, "unsupported application protocols"},
		"join where not served": {[]string{"raft"}, []string{Join}, "unsupported application protocols"},
		"http/1.1 to h2":        {[]string{"h2"}, []string{"http/1.1"}, "no ALPN name in common"},
		"where only join is":    {[]string{Join}, []string{"raft"}, "no ALPN name in common"},
		"where nothing is":      {nil, []string{Join}, "no ALPN name in common"},
	} {
		t.Run(name, func(t *testing.T) {
			client := withProtos(beta.cred.Client("", ""), c.offered...)
			client.VerifyConnection = nil // ours would refuse first
			s, c2 := handshake(t, alpha.cred.Server(c.served...), client)
			wantRefused(t, s, c2, c.want)
		})
	}
	t.Run("server without ALPN", func(t *testing.T) {
		s, c := handshake(t, alpha.cred.Route(), beta.cred.Client("", "raft"))
		wantRefused(t, c, s, "no ALPN name in common")
	})
}

func TestRemovedNodeIsRefused(t *testing.T) {
	mesh := newMesh(t)
	alpha, beta := mesh.node(t, "alpha"), mesh.node(t, "beta")
	server := alpha.cred.Server("raft", Join)
	if s, c := handshake(t, server, beta.cred.Client("", "raft")); s.err != nil || c.err != nil {
		t.Fatalf("before: server %v, client %v", s.err, c.err)
	}
	removed := errors.New("removed from the mesh")
	alpha.cred.Allow = func(id string) error {
		if id == beta.id() {
			return removed
		}
		return nil
	}
	s, c := handshake(t, server, beta.cred.Client("", "raft"))
	wantRefused(t, s, c, "node "+beta.id()+": removed from the mesh")
	if !errors.Is(s.err, removed) {
		t.Errorf("the error of Allow is lost: %v", s.err)
	}
	s, c = handshake(t, alpha.cred.Route(), beta.cred.Route())
	wantRefused(t, s, c, "removed from the mesh")
	s, c = handshake(t, beta.cred.Server("raft"), alpha.cred.Client("", "raft"))
	wantRefused(t, c, s, "removed from the mesh")
	s, c = handshake(t, beta.cred.Route(), alpha.cred.Route())
	wantRefused(t, c, s, "removed from the mesh")
	// Beside the joins it may ask what became of it, and it is known who asks.
	s, c = handshake(t, server, beta.cred.Client(alpha.id(), Join))
	if id, err := PeerNode(s.state, mesh.id); errors.Join(s.err, c.err, err) != nil || id != beta.id() {
		t.Errorf("at the joins: server %v, client %v, node %q %v", s.err, c.err, id, err)
	}
	s, c = handshake(t, beta.cred.Server(Join), alpha.cred.Client("", Join))
	wantRefused(t, c, s, "removed from the mesh") // nor does it give answers

	alpha.cred.Allow = nil
	s, c = handshake(t, server, mesh.node(t, "gamma").cred.Client("", "raft"))
	wantRefused(t, s, c, "does not know the members")
}

func TestWrongNodeIsRefused(t *testing.T) {
	mesh := newMesh(t)
	alpha, beta, gamma := mesh.node(t, "alpha"), mesh.node(t, "beta"), mesh.node(t, "gamma")
	s, c := handshake(t, beta.cred.Server("raft"), alpha.cred.Client(gamma.id(), "raft"))
	wantRefused(t, c, s, "node "+beta.id()+" answered where node "+gamma.id()+" was dialled")
}

func TestTLS12IsRefused(t *testing.T) {
	mesh := newMesh(t)
	alpha, beta := mesh.node(t, "alpha"), mesh.node(t, "beta")
	old := func(config *tls.Config) *tls.Config {
		config.MinVersion, config.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
		config.GetConfigForClient = nil
		return config
	}
	const want = "protocol version"
	server := alpha.cred.Server("raft", Join)
	s, c := handshake(t, server, old(beta.cred.Client("", "raft")))
	wantRefused(t, s, c, "unsupported versions")
	s, c = handshake(t, server, old(&tls.Config{InsecureSkipVerify: true, NextProtos: []string{Join}}))
	wantRefused(t, s, c, "unsupported versions")
	s, c = handshake(t, alpha.cred.Route(), old(beta.cred.Route()))
	wantRefused(t, s, c, "unsupported versions")
	s, c = handshake(t, old(alpha.cred.Server("raft")), beta.cred.Client("", "raft"))
	wantRefused(t, c, s, want)
	s, c = handshake(t, old(alpha.cred.Server(Join)), JoinClient(fingerprint(mesh.ca.cert)))
	wantRefused(t, c, s, want)
}

// Time is what Now says, at the end that judges.
func TestCertificatesExpireByNow(t *testing.T) {
	mesh := newMesh(t)
	alpha, beta := mesh.node(t, "alpha"), mesh.node(t, "beta")
	var ahead time.Duration
	alpha.cred.Now = func() time.Time { return time.Now().Add(ahead) }
	for _, c := range []struct {
		ahead time.Duration
		want  string
	}{
		{0, ""},
		{certLife - time.Minute, ""},
		{certLife + time.Minute, "expired"},
		{-backdate - time.Minute, "not yet valid"},
		{-backdate + time.Minute, ""},
	} {
		ahead = c.ahead
		for _, proto := range []string{"raft", "api"} {
			asServer, refused := handshake(t, alpha.cred.Server("raft", "api"), beta.cred.Client("", proto))
			other, asClient := handshake(t, beta.cred.Server("raft", "api"), alpha.cred.Client("", proto))
			if c.want == "" {
				if err := errors.Join(asServer.err, refused.err, asClient.err, other.err); err != nil {
					t.Errorf("%v ahead, %s: %v", c.ahead, proto, err)
				}
				continue
			}
			wantRefused(t, asServer, refused, c.want)
			wantRefused(t, asClient, other, c.want)
		}
	}
}

func TestJoinKnowsTheMeshByItsFingerprint(t *testing.T) {
	mesh, other := newMesh(t), newMesh(t)
	alpha := mesh.node(t, "alpha")
	server := alpha.cred.Server("raft", Join)
	if s, c := handshake(t, server, JoinClient(fingerprint(mesh.ca.cert))); s.err != nil || c.err != nil {
		t.Fatalf("server %v, client %v", s.err, c.err)
	}
	for name, fp := range map[string]string{
		"another mesh's": fingerprint(other.ca.cert),
		"none":           "",
		"the node's":     fingerprint(alpha.cred.current.Load().cert.Leaf),
	} {
		t.Run(name, func(t *testing.T) {
			s, c := handshake(t, server, JoinClient(fp))
			wantRefused(t, c, s, "not of the mesh that made the token")
		})
	}
}

func TestJoinRefusesImpostors(t *testing.T) {
	mesh, evil := newMesh(t), newMesh(t)
	fp := fingerprint(mesh.ca.cert)
	key := newKeys(t).node
	real := mesh.forge(t, key, func(*x509.Certificate) {})
	forged := evil.forge(t, key, func(c *x509.Certificate) { c.URIs[0].Host = mesh.id })
	type impostor struct {
		chain [][]byte
		want  string
	}
	cases := map[string]impostor{
		"chain without CA":         {[][]byte{real.Certificate[0]}, "no CA with the token's fingerprint"},
		"real CA beside own leaf":  {[][]byte{forged.Certificate[0], mesh.ca.cert.Raw}, "certificate"},
		"real CA after own CA":     {[][]byte{forged.Certificate[0], evil.ca.cert.Raw, mesh.ca.cert.Raw}, "certificate"},
		"CA that is not the one":   {[][]byte{forged.Certificate[0], evil.ca.cert.Raw}, "no CA with the token's fingerprint"},
		"node that plays the CA":   {[][]byte{real.Certificate[0], real.Certificate[0]}, "no CA with the token's fingerprint"},
		"CA out of place":          {[][]byte{real.Certificate[0], evil.ca.cert.Raw, mesh.ca.cert.Raw}, ""},
		"nobody's own certificate": {[][]byte{evil.ca.cert.Raw}, "no CA with the token's fingerprint"},
	}
	for name, bad := range badPeers(t, mesh) {
		if name != "foreign CA" && name != "CA as a node" { // those are above
			cases[name] = impostor{bad.cert.Certificate, bad.want}
		}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			state := tls.ConnectionState{NegotiatedProtocol: Join}
			for _, der := range c.chain {
				cert, err := x509.ParseCertificate(der)
				if err != nil {
					t.Fatal(err)
				}
				state.PeerCertificates = append(state.PeerCertificates, cert)
			}
			err := JoinClient(fp).VerifyConnection(state)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want an error with %q", err, c.want)
			}
		})
	}
	// Over the wire, with the chain that a man in the middle can show.
	key2 := newKeys(t).node
	middle := evil.forge(t, key2, func(c *x509.Certificate) { c.URIs[0].Host = mesh.id })
	middle.Certificate = append(middle.Certificate, mesh.ca.cert.Raw)
	s, c := handshake(t, &tls.Config{NextProtos: []string{Join}, Certificates: []tls.Certificate{middle}}, JoinClient(fp))
	wantRefused(t, c, s, "certificate")
	// And a server of the mesh, but not of joins.
	s, c = handshake(t, &tls.Config{Certificates: []tls.Certificate{real}}, JoinClient(fp))
	wantRefused(t, c, s, "no ALPN name in common")
}

// Renewal and a change of CA need no new listener.
func TestRenewUnderARunningServer(t *testing.T) {
	mesh := newMesh(t)
	next := newMeshAt(t, mesh.id, time.Now())
	alpha, beta := mesh.node(t, "alpha"), mesh.node(t, "beta")
	server := alpha.cred.Server("raft", Join)

	meet := func(step string) (atServer, atClient tls.ConnectionState) {
		t.Helper()
		s, c := handshake(t, server, beta.cred.Client(alpha.id(), "raft"))
		if s.err != nil || c.err != nil {
			t.Fatalf("%s: server %v, client %v", step, s.err, c.err)
		}
		return s.state, c.state
	}
	use := func(n *node, signer *testMesh, cas []byte) {
		t.Helper()
		cert, err := n.keys.TLSCertificate(signer.sign(t, n.keys, "alpha"), cas)
		if err == nil {
			err = n.cred.Renew(cert, cas)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	_, before := meet("at first")
	use(alpha, mesh, mesh.ca.CertPEM())
	_, after := meet("renewed")
	if before.PeerCertificates[0].Equal(after.PeerCertificates[0]) {
		t.Error("the renewed certificate is not used")
	}
	both := slices.Concat(mesh.ca.CertPEM(), next.ca.CertPEM())
	use(alpha, mesh, both)
	use(beta, mesh, both)
	meet("both CAs trusted")
	use(beta, next, both)
	meet("client under the new CA")
	use(alpha, next, next.ca.CertPEM())
	_, last := meet("old CA gone")
	if !last.PeerCertificates[1].Equal(next.ca.cert) {
		t.Error("the chain does not end in the new CA")
	}
	s, c := handshake(t, server, mesh.node(t, "gamma").cred.Client("", "raft"))
	wantRefused(t, c, s, "certificate")
	if s, c := handshake(t, server, JoinClient(fingerprint(next.ca.cert))); s.err != nil || c.err != nil {
		t.Errorf("join under the new CA: server %v, client %v", s.err, c.err)
	}
}

// A stolen or replayed session must not stand in for a handshake, least of all
// one of the join port.
func TestNoSessionIsResumed(t *testing.T) {
	mesh := newMesh(t)
	alpha, beta := mesh.node(t, "alpha"), mesh.node(t, "beta")
	cache := tls.NewLRUClientSessionCache(8)
	server := alpha.cred.Server("raft", Join)
	for _, proto := range []string{Join, Join, "raft", "raft", Join} {
		client := beta.cred.Client(alpha.id(), proto)
		client.ClientSessionCache = cache
		s, c := handshake(t, server, client)
		if s.err != nil || c.err != nil || s.state.DidResume {
			t.Errorf("%s: server %v, client %v, resumed %v", proto, s.err, c.err, s.state.DidResume)
		}
	}
}

func TestPeerNodeRefusesUnverified(t *testing.T) {
	mesh := newMesh(t)
	alpha := mesh.node(t, "alpha")
	if _, err := PeerNode(tls.ConnectionState{}, mesh.id); err == nil {
		t.Error("no certificate: no error")
	}
	s, _ := handshake(t, &tls.Config{
		Certificates: []tls.Certificate{alpha.cred.current.Load().cert},
		ClientAuth:   tls.RequireAnyClientCert,
		NextProtos:   []string{"raft"},
	}, alpha.cred.Client("", "raft"))
	if s.err != nil {
		t.Fatal(s.err)
	}
	if _, err := PeerNode(s.state, mesh.id); err == nil || !strings.Contains(err.Error(), "not verified") {
		t.Errorf("a chain that nobody verified: %v", err)
	}
}

func TestCredentialsRefuse(t *testing.T) {
	mesh, other, keys := newMesh(t), newMesh(t), newKeys(t)
	cas := mesh.ca.CertPEM()
	leaf := mesh.sign(t, keys, "alpha")
	good, err := keys.TLSCertificate(leaf, cas)
	if err != nil {
		t.Fatal(err)
	}
	module := mesh.forge(t, keys.node, func(c *x509.Certificate) { c.URIs[0].Path = "/module/x" })
	foreign := newMeshAt(t, mesh.id, time.Now()).forge(t, keys.node, func(*x509.Certificate) {})
	for name, c := range map[string]struct {
		mesh string
		cert tls.Certificate
		cas  []byte
		want string
	}{
		"no CA":            {mesh.id, good, nil, "no certificate"},
		"node as CA":       {mesh.id, good, leaf, "no mesh CA"},
		"another mesh":     {other.id, good, cas, "this is a node of mesh " + other.id},
		"two meshes":       {mesh.id, good, slices.Concat(cas, other.ca.CertPEM()), "it is the CA of mesh " + other.id},
		"no certificate":   {mesh.id, tls.Certificate{}, cas, "not one of Keys.TLSCertificate"},
		"module":           {mesh.id, module, cas, "its role is"},
		"another CA's own": {mesh.id, foreign, cas, "certificate"},
	} {
		if _, err := NewCredentials(c.mesh, c.cert, c.cas); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
	// A node that was away for a year starts.
	old := newMeshAt(t, "mold", time.Now().Add(-2*365*24*time.Hour))
	old.credentials(t, keys, old.signAt(t, keys, "alpha", time.Now().Add(-365*24*time.Hour)))
}

func BenchmarkHandshake(b *testing.B) {
	mesh := newMesh(b)
	alpha, beta := mesh.node(b, "alpha"), mesh.node(b, "beta")
	server := alpha.cred.Server("raft", Join)
	for b.Loop() {
		if s, c := handshake(b, server, beta.cred.Client(alpha.id(), "raft")); s.err != nil || c.err != nil {
			b.Fatalf("server %v, client %v", s.err, c.err)
		}
	}
}
