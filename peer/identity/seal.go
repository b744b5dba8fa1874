package identity

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"slices"

	"filippo.io/age"
)

// Bounds of sealed text. One recipient costs 98 bytes before base64, so the
// largest sealed text, 16 KiB to 256 recipients, is 55 KiB and still fits the
// 64 KiB of a log entry.
const (
	maxPlaintext  = 16 << 10
	maxRecipients = 256
	maxSealed     = 64 << 10
)

// ErrNotForUs is the error of opening sealed text that was not sealed to this
// key: after a restore, say, onto a machine with new keys. What it held must be
// made anew.
var ErrNotForUs = errors.New("not sealed to this key")

// Seal encrypts plaintext, at most 16 KiB, so that each of the recipients
// (Keys.Recipient, or NewRecovery's) can open it alone. Naming one twice is the
// same as once. The result is base64, on one line, of a file that the age tool
// opens as well; a password to three recipients takes 600 bytes.
func Seal(plaintext []byte, recipients ...string) (string, error) {
	if len(plaintext) > maxPlaintext {
		return "", fmt.Errorf("seal secret: %d bytes, at most %d are taken", len(plaintext), maxPlaintext)
	}
	names := slices.Clone(recipients)
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) == 0 || len(names) > maxRecipients {
		return "", fmt.Errorf("seal secret: %d recipients, between 1 and %d are taken", len(names), maxRecipients)
	}
	to := make([]age.Recipient, len(names))
	for i, name := range names {
		r, err := age.ParseX25519Recipient(name)
		if err != nil {
			// Not quoted: a secret key given by mistake must not end in a log.
			return "", fmt.Errorf("seal secret: recipient %d of %d is no age X25519 public key (age1...)", i+1, len(names))
		}
		to[i] = r
	}
	var out bytes.Buffer
	w, err := age.Encrypt(&out, to...)
	if err == nil {
		_, err = w.Write(plaintext)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return "", fmt.Errorf("seal secret: %w", err)
	}
	return base64.StdEncoding.EncodeToString(out.Bytes()), nil
}

// Open decrypts what Seal sealed to this node. The error of sealed text for
// others is ErrNotForUs.
func (k *Keys) Open(sealed string) ([]byte, error) { return open(k.seal, sealed) }

// OpenWith is Keys.Open with a secret key of NewRecovery.
func OpenWith(secretKey, sealed string) ([]byte, error) {
	id, err := parseSealKey([]byte(secretKey))
	if err != nil {
		return nil, fmt.Errorf("read recovery key: %w", err)
	}
	return open(id, sealed)
}

// NewRecovery makes the operator's recovery key, which opens every sealed
// secret of the mesh when the nodes are gone. The mesh keeps only recipient;
// secretKey is shown to the operator once.
func NewRecovery() (secretKey, recipient string, err error) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return "", "", fmt.Errorf("make recovery key: %w", err)
	}
	return id.String(), id.Recipient().String(), nil
}

func open(id *age.X25519Identity, sealed string) ([]byte, error) {
	if len(sealed) > maxSealed {
		return nil, fmt.Errorf("open sealed secret: %d bytes, at most %d are taken", len(sealed), maxSealed)
	}
	file, err := base64.StdEncoding.DecodeString(sealed)
	if err != nil {
		return nil, fmt.Errorf("open sealed secret: damaged: %w", err)
	}
	var noMatch *age.NoIdentityMatchError
	r, err := age.Decrypt(bytes.NewReader(file), id)
	if errors.As(err, &noMatch) {
		return nil, fmt.Errorf("open sealed secret: %w", ErrNotForUs)
	}
	if err != nil {
		return nil, fmt.Errorf("open sealed secret: damaged: %w", err)
	}
	plaintext, err := io.ReadAll(io.LimitReader(r, maxPlaintext+1))
	if err != nil {
		return nil, fmt.Errorf("open sealed secret: damaged: %w", err)
	}
	if len(plaintext) > maxPlaintext {
		return nil, fmt.Errorf("open sealed secret: it holds more than %d bytes, so Seal did not make it", maxPlaintext)
	}
	return plaintext, nil
}
