package jetstream

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/nats-io/nats-server/v2/server"
)

var (
	accountName  = regexp.MustCompile(`^(KV|OBJ)_[a-z0-9_]{1,40}$`)
	resourceName = regexp.MustCompile(`^[a-z0-9_]{1,40}$`)
	loginName    = regexp.MustCompile(`^[a-z0-9_]{1,30}$`)
	// bcrypt takes 72 bytes and no more.
	loginSecret = regexp.MustCompile(`^[A-Za-z0-9]{32,72}$`)
)

// login is one user of the server.
type login struct {
	Name    string `json:"name"`
	Hash    string `json:"hash"`    // bcrypt of the secret
	Account string `json:"account"` // the bucket's account, which is also its stream
	Mark    string `json:"mark"`    // who made it
}

// inbox is the prefix that a client must give its inboxes. The name makes it
// the login's own: with the shared default, logins of one bucket would read
// each other's answers.
func inbox(name string) string { return "_INBOX_" + name }

// rights are what a login may publish and hear. Everything not listed is
// refused. The list is what nats.go 1.55 needs for each operation of a bucket;
// a test takes each entry away and sees an operation fail.
func rights(l login) *server.Permissions {
	stream := l.Account
	flavour, bucket, _ := strings.Cut(stream, "_")
	publish := []string{
		"$JS.API.INFO",
		"$JS.API.STREAM.INFO." + stream,
		"$JS.API.STREAM.MSG.GET." + stream,
		"$JS.API.STREAM.PURGE." + stream, // drops deletion markers, and the pieces of a deleted object
		"$JS.API.DIRECT.GET." + stream + ".>",
		"$JS.API.CONSUMER.CREATE." + stream + ".>",
		"$JS.API.CONSUMER.DELETE." + stream + ".>",
		"$JS.ACK." + stream + ".>",
		"$JS.FC." + stream + ".>",
	}
	if flavour == "KV" {
		publish = append(publish, "$KV."+bucket+".>",
			"$JS.API.DIRECT.GET."+stream) // a value by its revision
	} else {
		publish = append(publish, "$O."+bucket+".C.>", "$O."+bucket+".M.>")
	}
	return &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: publish},
		Subscribe: &server.SubjectPermission{Allow: []string{inbox(l.Name) + ".>"}},
	}
}

// loginsFormat is the version of logins.json.
const loginsFormat = 1

type loginList struct {
	Format int     `json:"format"`
	Logins []login `json:"logins"`
}

// readLogins reads logins.json. A file that is not exactly what encodeLogins
// writes is refused: to go on without it would lock every consumer out.
func readLogins(path string) (map[string]login, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return map[string]login{}, nil
	} else if err != nil {
		return nil, err
	}
	var file loginList
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&file); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("read %s: more follows the list", path)
	}
	if file.Format != loginsFormat {
		return nil, fmt.Errorf("read %s: format %d: this version reads format %d", path, file.Format, loginsFormat)
	}
	logins := make(map[string]login, len(file.Logins))
	for _, l := range file.Logins {
		if !loginName.MatchString(l.Name) || !accountName.MatchString(l.Account) || logins[l.Name].Name != "" {
			return nil, fmt.Errorf("read %s: bad or repeated login %q", path, l.Name)
		}
		logins[l.Name] = l
	}
	return logins, nil
}

// encodeLogins writes what readLogins reads.
func encodeLogins(logins map[string]login) ([]byte, error) {
	file := loginList{Format: loginsFormat, Logins: []login{}}
	for _, name := range slices.Sorted(maps.Keys(logins)) {
		file.Logins = append(file.Logins, logins[name])
	}
	text, err := json.MarshalIndent(file, "", "  ")
	return append(text, '\n'), err
}
