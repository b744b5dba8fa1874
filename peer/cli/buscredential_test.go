package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nkeys"
)

// The seed is in the file and nowhere else, and the file is only for who asked.
func TestBusCredential(t *testing.T) {
	m := newMesh(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "eye.nk")
	got := m.command(t, "bus-credential", file, "--ttl", "1h")
	text, err := os.ReadFile(file)
	if got.code != 0 || err != nil {
		t.Fatalf("exit code %d, %s%s; %v", got.code, got.out, got.err, err)
	}
	seed := strings.TrimSpace(string(text))
	pair, err := nkeys.FromSeed([]byte(seed))
	if err != nil {
		t.Fatal(err)
	}
	if public, err := pair.PublicKey(); err != nil || len(m.keys) != 1 || m.keys[0].PublicKey != public {
		t.Errorf("let in is %+v, in the file is %s, %v", m.keys, public, err)
	}
	if st, err := os.Stat(file); err != nil || st.Mode() != 0o600 {
		t.Errorf("its mode is %v, %v", st.Mode(), err)
	}
	if strings.Contains(got.out+got.err, seed) {
		t.Errorf("the seed is printed:\n%s%s", got.out, got.err)
	}
	for _, want := range []string{"k3j9x2ab is good for 1h", "nats --server nats://127.0.0.1:4222 --nkey " + file + " --inbox-prefix _O.alpha.k3j9x2ab micro ls",
		"request call.alpha._k3j9x2ab.seat.SEAT.VERB '{}'", "meshd bus-credential rm k3j9x2ab"} {
		if !strings.Contains(got.out, want) {
			t.Errorf("it does not say %q:\n%s", want, got.out)
		}
	}

	// A file that is there is left alone, and one of a key that was refused is not left.
	if got := m.command(t, "bus-credential", file); got.code != 1 || !strings.Contains(got.err, "is there already") || len(m.keys) != 1 {
		t.Errorf("again: exit code %d, %s, %+v", got.code, got.err, m.keys)
	}
	other := filepath.Join(dir, "other.nk")
	if got := m.command(t, "bus-credential", other, "--ttl", "2h"); got.code != 1 || !strings.Contains(got.err, "choose less") {
		t.Errorf("refused: exit code %d, %s", got.code, got.err)
	}
	if _, err := os.Stat(other); !os.IsNotExist(err) {
		t.Errorf("the file of a refused key: %v", err)
	}

	var rows []busCredentialRow
	if got := m.command(t, "bus-credential", "ls", "-o", "json"); json.Unmarshal([]byte(got.out), &rows) != nil || len(rows) != 1 || rows[0].Name != "k3j9x2ab" {
		t.Errorf("listed are %s%s", got.out, got.err)
	}
	if got := m.command(t, "bus-credential", "ls"); !strings.Contains(got.out, "k3j9x2ab") || !strings.Contains(got.out, "59m") {
		t.Errorf("listed are\n%s%s", got.out, got.err)
	}
	if got := m.command(t, "bus-credential", "rm", "k3j9x2ab"); got.code != 0 || got.out != "bus credential k3j9x2ab is ended\n" || len(m.keys) != 0 {
		t.Errorf("removed: exit code %d, %s%s", got.code, got.out, got.err)
	}
}
