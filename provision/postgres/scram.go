package postgres

import (
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
)

// iterations is PostgreSQL's default, scram_iterations: what a server does for
// the passwords that it hashes itself.
const iterations = 4096

// verifier returns what the server stores for password (RFC 5803, as
// PostgreSQL writes it). The password is ASCII, which SASLprep leaves alone.
func verifier(password string) (string, error) {
	salt := make([]byte, 16)
	rand.Read(salt) // never fails
	return verifierOf(password, salt, iterations)
}

func verifierOf(password string, salt []byte, iterations int) (string, error) {
	salted, err := pbkdf2.Key(sha256.New, password, salt, iterations, sha256.Size)
	if err != nil {
		return "", err
	}
	stored := sha256.Sum256(mac(salted, "Client Key"))
	encode := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("SCRAM-SHA-256$%d:%s$%s:%s", iterations, encode(salt),
		encode(stored[:]), encode(mac(salted, "Server Key"))), nil
}

func mac(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(text))
	return h.Sum(nil)
}
