package identity

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

func newKeys(t testing.TB) *Keys {
	t.Helper()
	keys, err := Create(filepath.Join(t.TempDir(), "identity"))
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// newDir makes a directory of mode 0700 whatever the umask.
func newDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "identity")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestCreateThenLoad(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "var", "identity")
	created, err := Create(dir)
	if err != nil {
		t.Fatal(err)
	}
	loaded, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !created.node.Equal(loaded.node) || created.seal.String() != loaded.seal.String() {
		t.Fatal("the keys loaded are not those created")
	}
	if id := loaded.NodeID(); id != NodeID(created.Public()) || len(id) != 17 {
		t.Errorf("NodeID = %q", id)
	}
	if !strings.HasPrefix(loaded.Recipient(), "age1") {
		t.Errorf("Recipient = %q", loaded.Recipient())
	}
	wantModes(t, dir, map[string]fs.FileMode{".": fs.ModeDir | 0o700, nodeKeyFile: 0o600, sealKeyFile: 0o600})
}

// wantModes fails unless dir holds exactly the files of want, with their modes.
func wantModes(t *testing.T, dir string, want map[string]fs.FileMode) {
	t.Helper()
	st, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]fs.FileMode{".": st.Mode()}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		st, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		got[e.Name()] = st.Mode()
	}
	for name, mode := range got {
		if want[name] != mode {
			t.Errorf("%s has mode %v, want %v", name, mode, want[name])
		}
	}
	for name := range want {
		if _, ok := got[name]; !ok {
			t.Errorf("%s is not there", name)
		}
	}
}

func TestCreateNeverReplacesAnIdentity(t *testing.T) {
	dir := newDir(t)
	before, err := Create(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Create(dir); !errors.Is(err, fs.ErrExist) {
		t.Fatalf("second Create: %v, want fs.ErrExist", err)
	}
	after, err := Load(dir)
	if err != nil || !after.node.Equal(before.node) || after.Recipient() != before.Recipient() {
		t.Fatalf("the identity changed: %v", err)
	}
}

func TestCreateByManyAtOnceHasOneWinner(t *testing.T) {
	dir := newDir(t)
	var (
		wg  sync.WaitGroup
		won = make(chan *Keys, 16)
	)
	for range cap(won) {
		wg.Go(func() {
			keys, err := Create(dir)
			if err == nil {
				won <- keys
			} else if !errors.Is(err, fs.ErrExist) {
				t.Errorf("Create: %v, want fs.ErrExist", err)
			}
		})
	}
	wg.Wait()
	close(won)
	if len(won) != 1 {
		t.Fatalf("%d of %d made an identity, want 1", len(won), cap(won))
	}
	winner := <-won
	loaded, err := Load(dir)
	if err != nil || !loaded.node.Equal(winner.node) || loaded.Recipient() != winner.Recipient() {
		t.Fatalf("the winner's keys are not those on disk: %v", err)
	}
}

// What a crash leaves at each point of Create is no identity, and Create goes on
// from it.
func TestCreateAfterACrash(t *testing.T) {
	for name, left := range map[string][]string{
		"before anything":          nil,
		"writing the seal key":     {sealKeyFile + ".tmp"},
		"between the two":          {sealKeyFile},
		"writing the node key":     {sealKeyFile, nodeKeyFile + ".tmp"},
		"and a crash of the retry": {sealKeyFile, sealKeyFile + ".tmp", nodeKeyFile + ".tmp"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := newDir(t)
			for _, file := range left {
				if err := os.WriteFile(filepath.Join(dir, file), []byte("half of a k"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := Load(dir); !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("Load: %v, want fs.ErrNotExist", err)
			}
			created, err := Create(dir)
			if err != nil {
				t.Fatal(err)
			}
			loaded, err := Load(dir)
			if err != nil || !loaded.node.Equal(created.node) || loaded.Recipient() != created.Recipient() {
				t.Fatalf("Load after Create: %v", err)
			}
			wantModes(t, dir, map[string]fs.FileMode{".": fs.ModeDir | 0o700, nodeKeyFile: 0o600, sealKeyFile: 0o600})
		})
	}
}

// A write that fails leaves what was there, and nothing beside it.
func TestWriteFileIsWholeOrNothing(t *testing.T) {
	dir := newDir(t)
	d, err := openDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := writeFile(d, "a", []byte("old")); err != nil {
		t.Fatal(err)
	}
	if err := writeFile(d, "a", []byte("new")); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "a")); err != nil || string(got) != "new" {
		t.Fatalf("the file holds %q, %v", got, err)
	}
	// A directory cannot be replaced by a file, so the last step fails.
	if err := os.MkdirAll(filepath.Join(dir, "b", "c"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := writeFile(d, "b", []byte("new")); err == nil {
		t.Fatal("writeFile replaced a directory")
	}
	wantModes(t, dir, map[string]fs.FileMode{".": fs.ModeDir | 0o700, "a": 0o600, "b": fs.ModeDir | 0o700})
}

func TestLoadRefuses(t *testing.T) {
	other := newKeys(t)
	at := func(dir, file string) string { return filepath.Join(dir, file) }
	write := func(file, text string) func(string) error {
		return func(dir string) error { return os.WriteFile(at(dir, file), []byte(text), 0o600) }
	}
	for name, c := range map[string]struct {
		spoil func(dir string) error
		want  string
	}{
		"node key the group reads":    {func(d string) error { return os.Chmod(at(d, nodeKeyFile), 0o640) }, "chmod 600 DIR/node.key"},
		"node key others write":       {func(d string) error { return os.Chmod(at(d, nodeKeyFile), 0o602) }, "chmod 600 DIR/node.key"},
		"seal key others read":        {func(d string) error { return os.Chmod(at(d, sealKeyFile), 0o604) }, "chmod 600 DIR/seal.key"},
		"directory the group writes":  {func(d string) error { return os.Chmod(d, 0o770) }, "chmod 700 DIR"},
		"directory anybody writes":    {func(d string) error { return os.Chmod(d, 0o703) }, "chmod 700 DIR"},
		"no seal key":                 {func(d string) error { return os.Remove(at(d, sealKeyFile)) }, "seal.key is gone"},
		"node key empty":              {write(nodeKeyFile, ""), "not one private key in PEM"},
		"node key with more after it": {write(nodeKeyFile, string(keyPEM(other.node))+"x"), "not one private key in PEM"},
		"node key not a key":          {write(nodeKeyFile, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"), "damaged"},
		"seal key empty":              {write(sealKeyFile, ""), "not one age X25519 secret key"},
		"seal key twice":              {write(sealKeyFile, other.seal.String()+"\n"+other.seal.String()), "not one age X25519 secret key"},
		"seal key altered":            {write(sealKeyFile, other.seal.String()[:70]+"QQQQ"), "not one age X25519 secret key"},
		"key file too large":          {write(nodeKeyFile, strings.Repeat("#", maxKeyFile+1)), "larger than"},
		"pipe": {func(d string) error {
			return errors.Join(os.Remove(at(d, nodeKeyFile)), syscall.Mkfifo(at(d, nodeKeyFile), 0o600))
		}, "no regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "identity")
			if _, err := Create(dir); err != nil {
				t.Fatal(err)
			}
			if err := c.spoil(dir); err != nil {
				t.Fatal(err)
			}
			_, err := Load(dir)
			want := strings.ReplaceAll(c.want, "DIR", dir)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("Load: %v, want an error with %q", err, want)
			}
			if errors.Is(err, fs.ErrNotExist) {
				t.Errorf("Load: %v is fs.ErrNotExist, so a caller would make a new identity", err)
			}
			if strings.Contains(err.Error(), other.seal.String()[20:40]) {
				t.Errorf("Load: the error shows the key: %v", err)
			}
		})
	}
}

func TestLoadWithoutAnIdentity(t *testing.T) {
	for _, dir := range []string{newDir(t), filepath.Join(newDir(t), "missing")} {
		if _, err := Load(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Load: %v, want fs.ErrNotExist", err)
		}
	}
}

func TestTLSCertificate(t *testing.T) {
	mesh, next, keys := newMesh(t), newMesh(t), newKeys(t)
	cert := mesh.sign(t, keys, "alpha")
	both := append(next.ca.CertPEM(), mesh.ca.CertPEM()...)

	got, err := keys.TLSCertificate(cert, both)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Certificate) != 2 || !bytes.Equal(got.Certificate[1], mesh.ca.cert.Raw) {
		t.Error("the chain is not leaf and signing CA")
	}
	for name, c := range map[string]struct {
		keys      *Keys
		cert, cas []byte
		want      string
	}{
		"another's certificate": {newKeys(t), cert, both, "not for the key of this node"},
		"another's CA":          {keys, cert, next.ca.CertPEM(), "none of the 1 CA certificates"},
		"no certificate":        {keys, nil, both, "no certificate"},
		"no CA":                 {keys, cert, []byte(" \n"), "no certificate"},
		"a key as CA":           {keys, cert, mesh.ca.KeyPEM(), "no certificate in PEM"},
		"two certificates":      {keys, append(cert, cert...), both, "2 certificates"},
		"too much":              {keys, cert, bytes.Repeat([]byte("x"), maxPEM+1), "at most"},
	} {
		if _, err := c.keys.TLSCertificate(c.cert, c.cas); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
}
