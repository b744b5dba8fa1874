package identity

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"
)

func newToken(t testing.TB) Token {
	t.Helper()
	token, err := NewToken("mtest", strings.Repeat("0a", 32), []string{"10.0.0.1:7946", "[2001:db8::1]:7946", "alpha.example:7946"},
		time.Date(2030, 1, 2, 3, 4, 5, 6, time.Local))
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func TestTokenRoundTrip(t *testing.T) {
	token := newToken(t)
	text := token.String()
	if strings.ContainsAny(text, " \n") || len(text) > 350 || !strings.HasPrefix(text, "meshd1-") {
		t.Errorf("token text of %d characters: %s", len(text), text)
	}
	for _, in := range []string{text, "  " + text + "\r\n"} {
		if got, err := ParseToken(in); err != nil || !reflect.DeepEqual(got, token) {
			t.Errorf("ParseToken = %+v, %v, want %+v", got, err, token)
		}
	}
	if h := token.Hash(); len(h) != 64 || token.ID() != h[:12] || strings.Contains(text, h) {
		t.Errorf("Hash = %s, ID = %s", h, token.ID())
	}
	if newToken(t).Secret == token.Secret {
		t.Error("two tokens have one secret")
	}
	var logged bytes.Buffer
	slog.New(slog.NewTextHandler(&logged, nil)).Info("made", "token", token)
	if !strings.Contains(logged.String(), token.ID()) || strings.Contains(logged.String(), text) || strings.Contains(logged.String(), "Secret") {
		t.Errorf("logged: %s", &logged)
	}
}

func TestNewTokenRefuses(t *testing.T) {
	fp, at := strings.Repeat("0a", 32), time.Now()
	long := strings.Repeat(strings.Repeat("a", 49)+".", 5)
	var many []string
	for i := range maxAddresses {
		many = append(many, long+string(rune('a'+i))+":7946")
	}
	for name, c := range map[string]struct {
		mesh, fp  string
		addresses []string
		want      string
	}{
		"mesh":         {"M", fp, []string{"a:1"}, "mesh id"},
		"fingerprint":  {"m", fp[2:], []string{"a:1"}, "fingerprint"},
		"upper case":   {"m", strings.ToUpper(fp), []string{"a:1"}, "fingerprint"},
		"no address":   {"m", fp, nil, "0 addresses"},
		"many":         {"m", fp, append(many, "a:1"), "17 addresses"},
		"no port":      {"m", fp, []string{"10.0.0.1"}, "not host:port"},
		"port 0":       {"m", fp, []string{"10.0.0.1:0"}, "no port"},
		"port name":    {"m", fp, []string{"10.0.0.1:http"}, "no port"},
		"wildcard":     {"m", fp, []string{"0.0.0.0:7946"}, "no address that another machine can dial"},
		"no host":      {"m", fp, []string{":7946"}, "neither an IP address nor a host name"},
		"all too long": {"m", fp, many, "at most 4096"},
	} {
		if _, err := NewToken(c.mesh, c.fp, c.addresses, at); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
}

func TestParseTokenSaysWhatIsWrong(t *testing.T) {
	text := newToken(t).String()
	pack := func(body string) string {
		raw := append(binary.BigEndian.AppendUint16(nil, uint16(len(body))), body...)
		sum := sha256.Sum256(raw)
		return tokenPrefix + base64.RawURLEncoding.EncodeToString(append(raw, sum[:tokenSum]...))
	}
	raw, err := base64.RawURLEncoding.DecodeString(text[len(tokenPrefix):])
	if err != nil {
		t.Fatal(err)
	}
	body := string(raw[tokenHead : len(raw)-tokenSum])
	if pack(body) != text {
		t.Fatal("the test's packing is not that of Token.String")
	}
	flipped := []byte(text)
	if flipped[100]++; flipped[100] == '{' || flipped[100] == '[' || flipped[100] == ':' || flipped[100] == '.' || flipped[100] == '`' {
		flipped[100] -= 2
	}
	for name, c := range map[string]struct{ text, want string }{
		"empty":           {" \n", "it is empty"},
		"other prefix":    {"meshd2-" + text[7:], "wrong prefix"},
		"no token at all": {"ssh-ed25519 AAAA", "wrong prefix"},
		"part of prefix":  {"mesh", "truncated"},
		"prefix alone":    {"meshd1-", "truncated"},
		"altered":         {string(flipped), "bad checksum"},
		"more after it":   {text + "AA", "2 characters after its end"},
		"wrapped":         {text[:40] + "\n" + text[40:], "character 41 is none that a token has"},
		"padded":          {text + "=", "none that a token has"},
		"not ASCII":       {text[:40] + "é" + text[40:], "character 41"},
		"too long":        {text + strings.Repeat("A", maxToken), "at most 4096"},
		"no JSON":         {pack("x"), "not those of a token of this version"},
		"a field more":    {pack(strings.TrimSuffix(body, "}") + `,"z":1}`), "not those of a token of this version"},
		"other spelling":  {pack(strings.Replace(body, `"m"`, `"M"`, 1)), "not those of a token of this version"},
		"space in it":     {pack(" " + body), "not those of a token of this version"},
		"bad address":     {pack(strings.Replace(body, "10.0.0.1:7946", "10.0.0.1:7946x", 1)), "no port"},
		"short secret":    {pack(strings.Replace(body, `"s":"`, `"s":"","x":"`, 1)), "not those of a token of this version"},
	} {
		_, err := ParseToken(c.text)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		} else if strings.Contains(err.Error(), text[20:40]) {
			t.Errorf("%s: the error shows the token: %v", name, err)
		}
	}
	for n := len(tokenPrefix); n < len(text); n++ {
		if _, err := ParseToken(text[:n]); err == nil || !strings.Contains(err.Error(), "truncated") {
			t.Errorf("cut at %d: %v, want truncated", n, err)
		}
	}
}

// Whatever is taken is exactly what String writes.
func FuzzParseToken(f *testing.F) {
	text := newToken(f).String()
	f.Add(text)
	f.Add(text[:50])
	f.Add("meshd1-AAAA")
	f.Add("meshd1-AAJ7feOwxEI")
	f.Fuzz(func(t *testing.T, text string) {
		token, err := ParseToken(text)
		if err != nil {
			if !reflect.DeepEqual(token, Token{}) || len(err.Error()) > 400 {
				t.Errorf("ParseToken(%q) = %+v, %v", text, token, err)
			}
			return
		}
		if token.String() != strings.TrimSpace(text) {
			t.Errorf("ParseToken(%q).String() = %q", text, token.String())
		}
	})
}
