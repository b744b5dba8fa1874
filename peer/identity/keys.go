package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"filippo.io/age"
)

// The two files of an identity. nodeKeyFile is written last: a directory
// without it holds no identity, and what else a crash left there was never used.
const (
	nodeKeyFile = "node.key" // PKCS#8 in PEM
	sealKeyFile = "seal.key" // the age tool's identity file
)

// maxKeyFile bounds what is read of a key file; a real one is under 200 bytes.
const maxKeyFile = 4 << 10

// Keys are a node's two private keys: the TLS key, which is its identity, and
// the key that opens what was sealed to it.
type Keys struct {
	node ed25519.PrivateKey
	seal *age.X25519Identity
}

// Create makes the keys of a new node and writes them into dir, which it makes
// if need be (mode 0700). It never replaces an identity: where there is one it
// fails with an error that is fs.ErrExist. After a crash half way it can be
// repeated.
func Create(dir string) (*Keys, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create node keys: %w", err)
	}
	d, err := openDir(dir)
	if err != nil {
		return nil, fmt.Errorf("create node keys: %w", err)
	}
	defer d.Close()
	// Two at once would leave the node key of one beside the seal key of the other.
	if err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX); err != nil {
		return nil, fmt.Errorf("create node keys: lock %s: %w", dir, err)
	}
	switch _, err := os.Lstat(filepath.Join(dir, nodeKeyFile)); {
	case err == nil:
		return nil, fmt.Errorf("create node keys: %s holds an identity, which is never replaced: %w", dir, fs.ErrExist)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("create node keys: %w", err)
	}

	_, node, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("create node keys: %w", err)
	}
	seal, err := age.GenerateX25519Identity()
	if err != nil {
		return nil, fmt.Errorf("create node keys: %w", err)
	}
	sealText := fmt.Sprintf("# public key: %s\n%s\n", seal.Recipient(), seal)
	if err := writeFile(d, sealKeyFile, []byte(sealText)); err != nil {
		return nil, fmt.Errorf("create node keys: %w", err)
	}
	if err := writeFile(d, nodeKeyFile, keyPEM(node)); err != nil {
		return nil, fmt.Errorf("create node keys: %w", err)
	}
	if err := syncDir(filepath.Dir(filepath.Clean(dir))); err != nil { // dir itself may be new
		return nil, fmt.Errorf("create node keys: %w", err)
	}
	return &Keys{node: node, seal: seal}, nil
}

// Load reads the keys that Create wrote. Where there is no identity the error is
// fs.ErrNotExist. A key that others than its owner may read, or replace, is
// refused.
func Load(dir string) (*Keys, error) {
	d, err := openDir(dir)
	if err != nil {
		return nil, fmt.Errorf("load node keys: %w", err)
	}
	defer d.Close()

	nodePEM, err := readKey(filepath.Join(dir, nodeKeyFile))
	if err != nil {
		return nil, fmt.Errorf("load node keys: %w", err)
	}
	node, err := parseKeyPEM(nodePEM)
	if err != nil {
		return nil, fmt.Errorf("load node keys: %s: %w; restore it from a backup", filepath.Join(dir, nodeKeyFile), err)
	}
	sealText, err := readKey(filepath.Join(dir, sealKeyFile))
	if errors.Is(err, fs.ErrNotExist) {
		// Not wrapped: there is an identity here, and a caller must not make another.
		return nil, fmt.Errorf("load node keys: %s is there but %s is gone; restore it from a backup, or join as a new node with an empty directory",
			nodeKeyFile, sealKeyFile)
	}
	if err != nil {
		return nil, fmt.Errorf("load node keys: %w", err)
	}
	seal, err := parseSealKey(sealText)
	if err != nil {
		return nil, fmt.Errorf("load node keys: %s: %w; restore it from a backup", filepath.Join(dir, sealKeyFile), err)
	}
	return &Keys{node: node, seal: seal}, nil
}

// Public returns the public half of the TLS key.
func (k *Keys) Public() ed25519.PublicKey { return k.node.Public().(ed25519.PublicKey) }

// NodeID returns the node's id.
func (k *Keys) NodeID() string { return NodeID(k.Public()) }

// Recipient returns the public name, "age1...", under which Seal seals to this
// node.
func (k *Keys) Recipient() string { return k.seal.Recipient().String() }

// Sign signs a statement with the node's key: proof of who makes it.
func (k *Keys) Sign(statement []byte) []byte { return ed25519.Sign(k.node, statement) }

// String returns the node's id, so that printing Keys shows no key.
func (k *Keys) String() string { return k.NodeID() }

// GoString is String.
func (k *Keys) GoString() string { return k.String() }

// TLSCertificate joins the key with the certificate that the CA signed for it.
// caPEM is one CA certificate, or several during a change of CA; the one that
// signed becomes part of the chain, where a joiner looks for it.
func (k *Keys) TLSCertificate(certPEM, caPEM []byte) (tls.Certificate, error) {
	leaf, err := parseCert(certPEM)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("read node certificate: %w", err)
	}
	if !k.Public().Equal(leaf.PublicKey) {
		return tls.Certificate{}, fmt.Errorf("read node certificate: it is not for the key of this node, %s", k.NodeID())
	}
	cas, err := parseCerts(caPEM)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("read mesh CA: %w", err)
	}
	for _, ca := range cas {
		if leaf.CheckSignatureFrom(ca) == nil {
			return tls.Certificate{
				Certificate: [][]byte{leaf.Raw, ca.Raw},
				PrivateKey:  k.node,
				Leaf:        leaf,
			}, nil
		}
	}
	return tls.Certificate{}, fmt.Errorf("read node certificate: none of the %d CA certificates given signed it", len(cas))
}

// openDir opens a directory of keys. Reading is guarded by each key's own mode;
// here it counts that nobody else can put another key in its place.
func openDir(dir string) (*os.File, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	st, err := d.Stat()
	switch {
	case err != nil:
	case !st.IsDir():
		err = fmt.Errorf("%s is no directory", dir)
	case st.Mode().Perm()&0o022 != 0:
		err = fmt.Errorf("%s has mode %04o, so others could replace the keys in it; run: chmod 700 %[1]s", dir, st.Mode().Perm())
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// readKey reads a file that only its owner may read or write. Mode and content
// are of the same open file.
func readKey(path string) ([]byte, error) {
	// O_NONBLOCK: a named pipe in its place is refused below, not waited for.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file", path)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s has mode %04o, and a private key is its owner's alone; run: chmod 600 %[1]s (and think about who may have read it)",
			path, st.Mode().Perm())
	}
	b, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxKeyFile {
		return nil, fmt.Errorf("%s is larger than %d bytes: no key of ours", path, maxKeyFile)
	}
	return b, nil
}

// writeFile puts data, whole or not at all, into dir under name, mode 0600. The
// caller holds the directory's lock, so the temporary name is fixed and what a
// crash left under it is overwritten.
func writeFile(dir *os.File, name string, data []byte) (err error) {
	path := filepath.Join(dir.Name(), name)
	temp := path + ".tmp"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(temp))
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		return err
	}
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", dir.Name(), err)
	}
	return nil
}

// CheckDir refuses a directory in which others could replace a key.
func CheckDir(dir string) error {
	d, err := openDir(dir)
	if err != nil {
		return err
	}
	return d.Close()
}

// WriteFile puts data, whole or not at all, into the file at path, mode 0600, and
// returns when it is on disk. One caller at a time writes one path: what an
// interrupted one left beside it, under its name and .tmp, is overwritten.
func WriteFile(path string, data []byte) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return writeFile(dir, filepath.Base(path), data)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return nil
}

// keyPEM encodes a private key as PKCS#8, which cannot fail for Ed25519.
func keyPEM(key ed25519.PrivateKey) []byte {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		panic("identity: encode Ed25519 private key: " + err.Error())
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// parseKeyPEM reads one Ed25519 private key. Its errors carry nothing of the
// input.
func parseKeyPEM(text []byte) (ed25519.PrivateKey, error) {
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "PRIVATE KEY" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("it is not one private key in PEM (PKCS#8)")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("its private key is damaged")
	}
	private, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("its key is a %T, not Ed25519", key)
	}
	return private, nil
}

// parseSealKey reads one age X25519 identity. age's own errors name characters
// of the key, so they stay here.
func parseSealKey(text []byte) (*age.X25519Identity, error) {
	ids, err := age.ParseIdentities(bytes.NewReader(text))
	if err == nil && len(ids) == 1 {
		if id, ok := ids[0].(*age.X25519Identity); ok {
			return id, nil
		}
	}
	return nil, errors.New("it is not one age X25519 secret key (AGE-SECRET-KEY-1...)")
}
