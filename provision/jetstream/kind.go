package jetstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"meshd/provision"
)

// KV is the kind kv-bucket: one key-value bucket for each resource. Its
// Providers work on server; with nil, on a node that runs no store, Open fails
// and the rest works.
func KV(server *Server) provision.Kind { return bucketKind{kvFlavour(), server} }

// Object is the kind object-bucket: one object store for each resource. Its
// Providers work on server; with nil, on a node that runs no store, Open fails
// and the rest works.
func Object(server *Server) provision.Kind { return bucketKind{objectFlavour(), server} }

// flavour is what tells the two kinds apart.
type flavour struct {
	name   string // of the kind
	typ    string // the "type" of a delivery
	prefix string // of the stream of a bucket

	// ensure makes the bucket, or brings its limits and description back. It
	// never drops a value.
	ensure func(ctx context.Context, js jetstream.JetStream, bucket, mark string, maxBytes int64) error
	// probe writes, reads and deletes one value and leaves nothing behind.
	probe func(ctx context.Context, js jetstream.JetStream, bucket string) error
	// values counts the keys or objects in the bucket, deletion markers included.
	values func(ctx context.Context, stream jetstream.Stream, bucket string) (uint64, error)
}

func (f flavour) account(bucket string) string { return f.prefix + bucket }

type bucketKind struct {
	flavour
	server *Server
}

func (k bucketKind) Name() string { return k.name }

func (k bucketKind) Traits() provision.Traits {
	return provision.Traits{Overlap: true, SeesInUse: true, TLS: true}
}

// The default keeps an application that never deletes from filling the node,
// and is far above what settings and small state take. The least is room for
// some values of the largest size.
const (
	defaultMaxBytes = 64 << 20
	leastMaxBytes   = 2 << 20
)

// Open takes one option: "max-bytes", the size of every bucket, as a number of
// bytes or with KiB, MiB or GiB; 64 MiB if absent. A bucket that is full
// refuses writes and keeps what it has.
func (k bucketKind) Open(cfg provision.Config) (provision.Provider, error) {
	const step = "open provider"
	if k.server == nil {
		return nil, &provision.Error{Step: step, Class: provision.BadConfig,
			Err: errors.New("this node runs no embedded store: start it, or place the provider on a node that does")}
	}
	p := &provider{bucketKind: k, cfg: cfg, maxBytes: defaultMaxBytes}
	var faults []error
	if cfg.Mesh == "" {
		faults = append(faults, errors.New("the mesh id is empty"))
	}
	if cfg.Address.Host == "" || cfg.Address.Port < 1 || cfg.Address.Port > 65535 {
		faults = append(faults, fmt.Errorf("address %q port %d: a host and a port from 1 to 65535 are needed", cfg.Address.Host, cfg.Address.Port))
	}
	if !slices.Contains([]string{provision.VerifyFull, provision.Require, provision.Off}, cfg.Address.TLS) {
		faults = append(faults, fmt.Errorf("tls %q: write verify-full, require or off", cfg.Address.TLS))
	}
	for _, key := range slices.Sorted(maps.Keys(cfg.Options)) {
		if key != "max-bytes" {
			faults = append(faults, fmt.Errorf("option %q: %s knows only max-bytes", key, k.name))
			continue
		}
		n, err := parseBytes(cfg.Options[key])
		if err == nil && (n < leastMaxBytes || n > k.server.cfg.MaxStore) {
			err = fmt.Errorf("max-bytes %d: must be from %d to %d, the store's size", n, leastMaxBytes, k.server.cfg.MaxStore)
		}
		if err != nil {
			faults = append(faults, err)
		}
		p.maxBytes = n
	}
	if err := errors.Join(faults...); err != nil {
		return nil, &provision.Error{Step: step, Class: provision.BadConfig, Err: err}
	}
	return p, nil
}

func parseBytes(text string) (int64, error) {
	digits, factor := text, int64(1)
	for suffix, f := range map[string]int64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30} {
		if rest, ok := strings.CutSuffix(text, suffix); ok {
			digits, factor = strings.TrimSpace(rest), f
		}
	}
	// 33 bits times the largest factor stay within 63.
	n, err := strconv.ParseUint(digits, 10, 33)
	if err != nil {
		return 0, fmt.Errorf("max-bytes %q: write a number of bytes, or one with KiB, MiB or GiB", text)
	}
	return int64(n) * factor, nil
}

// Fields returns type, host, port, bucket, username, password, uri, tls, inbox
// (the prefix that the client must set for its inboxes, because the login hears
// no other) and, where the mode verifies against a CA of its own, ca.crt.
func (k bucketKind) Fields(at provision.Address, res provision.Resource, login provision.Login) map[string]string {
	fields := map[string]string{
		"type":     k.typ,
		"host":     at.Host,
		"port":     strconv.Itoa(at.Port),
		"tls":      at.TLS,
		"bucket":   res.Name,
		"username": login.Name,
		"password": login.Secret,
		"inbox":    inbox(login.Name),
	}
	fields["uri"] = uri(fields)
	if at.TLS == provision.VerifyFull && at.CA != "" {
		fields["ca.crt"] = at.CA
	}
	return fields
}

func uri(fields map[string]string) string {
	scheme := "tls"
	if fields["tls"] == provision.Off {
		scheme = "nats"
	}
	u := url.URL{
		Scheme: scheme,
		User:   url.UserPassword(fields["username"], fields["password"]),
		Host:   net.JoinHostPort(fields["host"], fields["port"]),
	}
	return u.String()
}

// Check logs in with fields and writes, reads and deletes a value whose name
// begins with meshd-probe. Nothing of it stays, but a watcher of the bucket sees
// it come and go.
func (k bucketKind) Check(ctx context.Context, fields map[string]string) error {
	_, err := k.check(ctx, fields)
	return err
}

// check is Check; it also returns the id of the server that answered.
func (k bucketKind) check(ctx context.Context, fields map[string]string) (server string, err error) {
	if err := k.complete(fields); err != nil {
		return "", &provision.Error{Step: "read binding", Class: provision.BadConfig, Err: err}
	}
	options, err := loginOptions(fields)
	if err != nil {
		return "", &provision.Error{Step: "read binding", Class: provision.BadConfig, Err: err}
	}
	ctx, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	c, err := dial(ctx, nil, net.JoinHostPort(fields["host"], fields["port"]), options...)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return c.ConnectedServerId(), c.explain("use bucket", k.probe(c.ctx, c.js, fields["bucket"]))
}

// complete proves that fields are what Fields makes, with nothing missing, and
// that the uri says the same as the parts.
func (k bucketKind) complete(fields map[string]string) error {
	var faults []error
	for _, name := range []string{"host", "port", "bucket", "username", "password", "inbox", "uri", "tls"} {
		if fields[name] == "" {
			faults = append(faults, fmt.Errorf("%s is missing", name))
		}
	}
	if fields["type"] != k.typ {
		faults = append(faults, fmt.Errorf("type is %q, not %q", fields["type"], k.typ))
	}
	if len(faults) == 0 && fields["uri"] != uri(fields) {
		faults = append(faults, errors.New("uri does not say the same as host, port, username, password and tls"))
	}
	return errors.Join(faults...)
}
