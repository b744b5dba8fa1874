package identity

import (
	"crypto/ed25519"
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The forms are stored in logs and certificates, so they are fixed for ever: a
// known key (RFC 8032, 7.1, test 1) must go on having these names.
func TestNamesOfAKeyAreFixed(t *testing.T) {
	raw, err := hex.DecodeString("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
	if err != nil {
		t.Fatal(err)
	}
	pub := ed25519.PublicKey(raw)
	const (
		// openssl pkey -pubin -inform DER -outform DER | sha256sum
		pin = "06e3fd8fda29bb60ab59557de61edb0aecdb231134be30e75b455f8e1b792fa9"
		id  = "na3r73d62fg5wbk2z"
	)
	if got := Pin(pub); got != pin {
		t.Errorf("Pin = %s, want %s", got, pin)
	}
	if got := NodeID(pub); got != id {
		t.Errorf("NodeID = %s, want %s", got, id)
	}
}

func TestNewMeshID(t *testing.T) {
	form := regexp.MustCompile(`^m[a-z2-7]{16}$`)
	seen := map[string]bool{}
	for range 100 {
		id := NewMeshID()
		if !form.MatchString(id) || !names.MatchString(id) || seen[id] {
			t.Fatalf("NewMeshID = %q: of a wrong form, or twice the same", id)
		}
		seen[id] = true
	}
}

// Each of the 62 characters must come up equally often. 256 mod 62 is 8, so a
// plain remainder would give the first 8 a quarter more: 25 % off, where the bound
// is 8 %, ten standard deviations.
func TestNewSecretIsUniform(t *testing.T) {
	const secrets = 25_000
	form := regexp.MustCompile(`^[A-Za-z0-9]{40}$`)
	count := map[rune]int{}
	for range secrets {
		s := NewSecret()
		if !form.MatchString(s) {
			t.Fatalf("NewSecret = %q, of a wrong form", s)
		}
		for _, r := range s {
			count[r]++
		}
	}
	const want = secrets * 40.0 / 62
	for r, n := range count {
		if d := float64(n)/want - 1; d < -0.08 || d > 0.08 {
			t.Errorf("%c came up %d times, %.0f are expected", r, n, want)
		}
	}
	if len(count) != 62 {
		t.Errorf("%d different characters, want 62", len(count))
	}
}

func TestParseHost(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1":        "10.0.0.1",
		"::1":             "::1",
		"::ffff:10.0.0.1": "10.0.0.1",
		"Alpha.Example":   "alpha.example",
		"a--b":            "a--b",
	} {
		ip, name, err := parseHost(in)
		got := name
		if ip.IsValid() {
			got = ip.String()
		}
		if err != nil || got != want {
			t.Errorf("parseHost(%q) = %q, %v, want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "0.0.0.0", "::", "224.0.0.1", "fe80::1%eth0", "*.example", "a b", "a_b", "-a", "a-", "a..b", "a.", "a\n",
		strings.Repeat("a", 254)} {
		if ip, name, err := parseHost(in); err == nil {
			t.Errorf("parseHost(%q) = %v, %q, want an error", in, ip, name)
		}
	}
}

// No way of printing what holds a secret shows it.
func TestSecretsDoNotPrint(t *testing.T) {
	mesh := newMesh(t)
	keys := newKeys(t)
	secret := string(keyPEM(keys.node))
	private := fmt.Sprint([]byte(keys.node))[1:40]
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		for _, v := range []any{keys, mesh.ca} {
			got := fmt.Sprintf(format, v)
			if strings.Contains(got, private) || strings.Contains(got, secret) || strings.Contains(got, "AGE-SECRET") || len(got) > 64 {
				t.Errorf("Sprintf(%q, %T) = %q, which is more than a name", format, v, got)
			}
		}
	}
}
