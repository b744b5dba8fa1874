package identity

import (
	"bytes"
	"encoding/base64"
	"errors"
	"strings"
	"testing"
)

func TestSealedOpensForEachRecipientAndNobodyElse(t *testing.T) {
	consumer, provider, stranger := newKeys(t), newKeys(t), newKeys(t)
	recoveryKey, recovery, err := NewRecovery()
	if err != nil {
		t.Fatal(err)
	}
	secret := NewSecret()
	sealed, err := Seal([]byte(secret), consumer.Recipient(), provider.Recipient(), recovery)
	if err != nil {
		t.Fatal(err)
	}
	if len(sealed) >= 2<<10 || strings.ContainsAny(sealed, "\n ") {
		t.Errorf("sealed text has %d bytes, or is not one line", len(sealed))
	}
	for name, open := range map[string]func(string) ([]byte, error){
		"consumer": consumer.Open,
		"provider": provider.Open,
		"recovery": func(s string) ([]byte, error) { return OpenWith(recoveryKey, s) },
	} {
		if got, err := open(sealed); err != nil || string(got) != secret {
			t.Errorf("%s: opened %d bytes, %v", name, len(got), err)
		}
	}
	strangeKey, _, err := NewRecovery()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := stranger.Open(sealed); !errors.Is(err, ErrNotForUs) || got != nil {
		t.Errorf("stranger: %v, want ErrNotForUs", err)
	}
	if got, err := OpenWith(strangeKey, sealed); !errors.Is(err, ErrNotForUs) || got != nil {
		t.Errorf("stranger's recovery key: %v, want ErrNotForUs", err)
	}
}

// Consumer and provider on one node are one recipient.
func TestSealTakesARecipientOnce(t *testing.T) {
	keys := newKeys(t)
	once, err := Seal([]byte("x"), keys.Recipient())
	if err != nil {
		t.Fatal(err)
	}
	twice, err := Seal([]byte("x"), keys.Recipient(), keys.Recipient())
	if err != nil || len(twice) != len(once) {
		t.Errorf("%d bytes for a recipient named twice, %d for once, %v", len(twice), len(once), err)
	}
}

// The bounds fit together: the largest secret for the most recipients fits a log
// entry of 64 KiB, and opens.
func TestSealBounds(t *testing.T) {
	keys := newKeys(t)
	recipients := []string{keys.Recipient()}
	for len(recipients) < maxRecipients {
		_, r, err := NewRecovery()
		if err != nil {
			t.Fatal(err)
		}
		recipients = append(recipients, r)
	}
	largest := bytes.Repeat([]byte{0xff}, maxPlaintext)
	sealed, err := Seal(largest, recipients...)
	if err != nil {
		t.Fatal(err)
	}
	if len(sealed) > 60<<10 {
		t.Errorf("%d bytes, which leave no room for the rest of a log entry", len(sealed))
	}
	if got, err := keys.Open(sealed); err != nil || !bytes.Equal(got, largest) {
		t.Errorf("opened %d bytes, %v", len(got), err)
	}
	if got, err := keys.Open(mustSeal(t, nil, keys)); err != nil || len(got) != 0 {
		t.Errorf("nothing sealed opened as %d bytes, %v", len(got), err)
	}

	secretKey, _, err := NewRecovery()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		plaintext  []byte
		recipients []string
		want       string
	}{
		"too large":             {append(largest, 0), recipients, "at most 16384"},
		"nobody":                {nil, nil, "0 recipients"},
		"too many":              {nil, append(recipients, newKeys(t).Recipient()), "257 recipients"},
		"a secret key":          {nil, []string{secretKey}, "no age X25519 public key"},
		"not a key":             {nil, []string{"age1xyz"}, "no age X25519 public key"},
		"an empty name":         {nil, []string{""}, "no age X25519 public key"},
		"a good and a bad name": {nil, []string{"x", recipients[0]}, "recipient 2 of 2"},
	} {
		_, err := Seal(c.plaintext, c.recipients...)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		} else if strings.Contains(err.Error(), secretKey) {
			t.Errorf("%s: the error shows the key", name)
		}
	}
}

func mustSeal(t *testing.T, plaintext []byte, keys *Keys) string {
	t.Helper()
	sealed, err := Seal(plaintext, keys.Recipient())
	if err != nil {
		t.Fatal(err)
	}
	return sealed
}

// Altered text never opens as something else, whichever byte was altered.
func TestOpenFindsDamage(t *testing.T) {
	keys := newKeys(t)
	file, err := base64.StdEncoding.DecodeString(mustSeal(t, []byte("secret"), keys))
	if err != nil {
		t.Fatal(err)
	}
	for i := range file {
		bad := bytes.Clone(file)
		bad[i] ^= 1
		if got, err := keys.Open(base64.StdEncoding.EncodeToString(bad)); err == nil {
			t.Fatalf("byte %d altered: opened as %q", i, got)
		}
		if got, err := keys.Open(base64.StdEncoding.EncodeToString(file[:i])); err == nil {
			t.Fatalf("cut at %d: opened as %q", i, got)
		}
	}
	for _, text := range []string{"", "%", strings.Repeat("A", maxSealed+1)} {
		if _, err := keys.Open(text); err == nil || errors.Is(err, ErrNotForUs) {
			t.Errorf("Open of %d bytes: %v, want an error that is not ErrNotForUs", len(text), err)
		}
	}
	if _, err := OpenWith("AGE-SECRET-KEY-1XYZ", "x"); err == nil || strings.Contains(err.Error(), "XYZ") {
		t.Errorf("OpenWith a bad key: %v, want an error without it", err)
	}
}
