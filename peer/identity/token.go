package identity

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"
)

// The text of a token is
//
//	"meshd1-" base64url(length, body, sum)
//
// length being the body's in two bytes, big-endian, which tells a token that was
// cut from one that was altered; body the JSON of tokenBody; sum the first four
// bytes of the SHA-256 of all before it. The sum finds slips of the hand. It
// guards against nobody: who can alter a token can make one.
const (
	tokenPrefix    = "meshd1-"
	tokenHead      = 2
	tokenSum       = 4
	maxToken       = 4 << 10
	maxAddresses   = 16
	tokenSecretLen = 32
)

// Token invites one machine into the mesh: it says where the mesh is, by what
// the joiner knows it, and holds the secret that the mesh knows the joiner by.
// Make one with NewToken or ParseToken, which vouch for its fields.
type Token struct {
	Mesh          string
	CAFingerprint string    // of CAFingerprint
	Addresses     []string  // host:port of mesh ports, best first
	Secret        [32]byte  // the log stores only its Hash
	Expires       time.Time // UTC, whole seconds; the mesh judges it, not the joiner
}

// tokenBody is Token as it travels: short keys and bytes, for a line that
// people copy.
type tokenBody struct {
	Mesh        string   `json:"m"`
	Fingerprint []byte   `json:"f"`
	Addresses   []string `json:"a"`
	Secret      []byte   `json:"s"`
	Expires     int64    `json:"e"` // seconds since 1970
}

// NewToken makes a token with a fresh secret. addresses are 1 to 16 host:port
// pairs; expires is cut to whole seconds.
func NewToken(meshID, caFingerprint string, addresses []string, expires time.Time) (Token, error) {
	t := Token{
		Mesh:          meshID,
		CAFingerprint: caFingerprint,
		Addresses:     append([]string(nil), addresses...),
		Expires:       time.Unix(expires.Unix(), 0).UTC(),
	}
	rand.Read(t.Secret[:])
	if err := t.check(); err != nil {
		return Token{}, fmt.Errorf("make join token: %w", err)
	}
	if n := len(t.String()); n > maxToken {
		return Token{}, fmt.Errorf("make join token: %d characters, at most %d are taken: name fewer addresses", n, maxToken)
	}
	return t, nil
}

// ParseToken reads what Token.String wrote; white space around it is dropped.
// Its errors say what happened to the text and carry none of it.
func ParseToken(text string) (Token, error) {
	t, err := parseToken(strings.TrimSpace(text))
	if err != nil {
		return Token{}, fmt.Errorf("read join token: %w; make a new one with: meshd token", err)
	}
	return t, nil
}

// String returns the token as one line without white space, under 4 KiB, usually
// about 300 characters. It is the secret itself.
func (t Token) String() string {
	fingerprint, _ := hex.DecodeString(t.CAFingerprint) // check has read it
	body, err := json.Marshal(tokenBody{
		Mesh:        t.Mesh,
		Fingerprint: fingerprint,
		Addresses:   t.Addresses,
		Secret:      t.Secret[:],
		Expires:     t.Expires.Unix(),
	})
	if err != nil {
		panic(fmt.Sprintf("identity: encode join token: %v", err)) // strings, bytes and a number
	}
	raw := binary.BigEndian.AppendUint16(nil, uint16(len(body)))
	raw = append(raw, body...)
	sum := sha256.Sum256(raw)
	raw = append(raw, sum[:tokenSum]...)
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(raw)
}

// Hash returns the hex SHA-256 of the secret: what the log stores, and enough to
// recognise the token by. The secret is 256 random bits, so a plain hash does.
func (t Token) Hash() string {
	sum := sha256.Sum256(t.Secret[:])
	return hex.EncodeToString(sum[:])
}

// ID returns the first 12 characters of Hash: the token's name in listings.
func (t Token) ID() string { return t.Hash()[:12] }

// LogValue is the token's ID, so that logging a Token does not give it away.
func (t Token) LogValue() slog.Value { return slog.StringValue("token " + t.ID()) }

func (t Token) check() error {
	if !names.MatchString(t.Mesh) {
		return fmt.Errorf("mesh id %.64q is not of the form %s", t.Mesh, names)
	}
	if b, err := hex.DecodeString(t.CAFingerprint); err != nil || len(b) != sha256.Size || strings.ToLower(t.CAFingerprint) != t.CAFingerprint {
		return errors.New("the CA fingerprint is not a SHA-256 in lower-case hex")
	}
	if len(t.Addresses) == 0 || len(t.Addresses) > maxAddresses {
		return fmt.Errorf("%d addresses, between 1 and %d are taken", len(t.Addresses), maxAddresses)
	}
	for _, a := range t.Addresses {
		host, port, err := net.SplitHostPort(a)
		if err != nil {
			return fmt.Errorf("address %.64q is not host:port", a)
		}
		if _, _, err := parseHost(host); err != nil {
			return fmt.Errorf("address: %w", err)
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return fmt.Errorf("address %.64q has no port between 1 and 65535", a)
		}
	}
	return nil
}

func parseToken(text string) (Token, error) {
	if len(text) > maxToken {
		return Token{}, fmt.Errorf("%d characters, at most %d are taken", len(text), maxToken)
	}
	if text == "" {
		return Token{}, errors.New("it is empty")
	}
	encoded, ok := strings.CutPrefix(text, tokenPrefix)
	if !ok {
		if strings.HasPrefix(tokenPrefix, text) {
			return Token{}, fmt.Errorf("truncated: only %d characters", len(text))
		}
		return Token{}, fmt.Errorf("wrong prefix: it does not begin with %s", tokenPrefix)
	}
	if i := strings.IndexFunc(encoded, notBase64URL); i >= 0 {
		return Token{}, fmt.Errorf("character %d is none that a token has; it is one line without spaces", len(tokenPrefix)+i+1)
	}
	whole := encoded
	if len(whole)%4 == 1 { // no base64 has this length: cut within a byte
		whole = whole[:len(whole)-1]
	}
	raw, err := base64.RawURLEncoding.DecodeString(whole)
	if err != nil {
		return Token{}, errors.New("it is not base64url")
	}
	if len(raw) < tokenHead {
		return Token{}, fmt.Errorf("truncated: only %d characters", len(text))
	}
	size := tokenHead + int(binary.BigEndian.Uint16(raw)) + tokenSum
	switch want := base64.RawURLEncoding.EncodedLen(size); {
	case len(encoded) < want:
		return Token{}, fmt.Errorf("truncated: %d of %d characters", len(text), len(tokenPrefix)+want)
	case len(encoded) > want:
		return Token{}, fmt.Errorf("%d characters after its end", len(encoded)-want)
	}
	head, sum := raw[:size-tokenSum], raw[size-tokenSum:]
	if want := sha256.Sum256(head); !bytes.Equal(sum, want[:tokenSum]) {
		return Token{}, errors.New("bad checksum: a character was changed")
	}
	return decodeBody(head[tokenHead:], text)
}

// decodeBody reads the JSON of a token whose text is given. Only the very form
// that String writes is taken, so that a token has one text and nothing in it is
// ignored.
func decodeBody(body []byte, text string) (Token, error) {
	foreign := errors.New("its fields are not those of a token of this version of meshd")
	var b tokenBody
	if err := json.Unmarshal(body, &b); err != nil || len(b.Secret) != tokenSecretLen {
		return Token{}, foreign
	}
	t := Token{
		Mesh:          b.Mesh,
		CAFingerprint: hex.EncodeToString(b.Fingerprint),
		Addresses:     b.Addresses,
		Secret:        [tokenSecretLen]byte(b.Secret),
		Expires:       time.Unix(b.Expires, 0).UTC(),
	}
	if err := t.check(); err != nil {
		return Token{}, err
	}
	if t.String() != text {
		return Token{}, foreign
	}
	return t, nil
}

func notBase64URL(r rune) bool {
	return !(r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' || r == '_')
}
