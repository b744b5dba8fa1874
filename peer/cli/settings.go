package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"meshd/peer/identity"
)

// The ports of a node. Both leave the machine, so both are mutual TLS.
const (
	defaultMeshPort  = 7946 // gossip, raft and the nodes' API: TCP and UDP
	defaultRoutePort = 6222 // bus routes: TCP
	defaultStorePort = 7947 // the embedded buckets, for consumers on any machine: TCP, TLS and a login
)

// rootDir is where a node that runs as root keeps its state.
const rootDir = "/var/lib/meshd"

// settings is what a node was started with the first time, kept in its data
// directory: a restart needs no flag but the directory.
type settings struct {
	Name      string
	Mesh      string
	Bind      string // IP that every port listens on
	Advertise string // host that the others are told
	MeshPort  int
	RoutePort int
	StorePort int
}

func (s settings) listen(port int) string { return net.JoinHostPort(s.Bind, strconv.Itoa(port)) }
func (s settings) reach(port int) string  { return net.JoinHostPort(s.Advertise, strconv.Itoa(port)) }

// place is a data directory and what is where in it.
type place struct{ dir string }

func (p place) identity() string { return filepath.Join(p.dir, "identity") }
func (p place) settings() string { return filepath.Join(p.dir, "node.json") }
func (p place) cert() string     { return filepath.Join(p.dir, "node.crt") }
func (p place) ca() string       { return filepath.Join(p.dir, "ca.crt") }
func (p place) raft() string     { return filepath.Join(p.dir, "raft") }
func (p place) logs() string     { return filepath.Join(p.dir, "logs") }
func (p place) store() string    { return filepath.Join(p.dir, "store") }

// bindings is where binding directories go: on a tmpfs for the node of a
// machine, beside the rest for one that was given a directory of its own.
func (p place) bindings() string {
	if p.dir == rootDir {
		return "/run/meshd/bindings"
	}
	return filepath.Join(p.dir, "run", "bindings")
}

func (p place) socket() string {
	if p.dir == rootDir {
		return "/run/meshd/meshd.sock"
	}
	return filepath.Join(p.dir, "meshd.sock")
}

func defaultDir() string {
	if os.Geteuid() == 0 {
		return rootDir
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ".meshd"
	}
	return filepath.Join(home, ".meshd")
}

func (p place) load() (settings, error) {
	var s settings
	b, err := os.ReadFile(p.settings())
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("read %s: %w; restore it, or delete the directory and join again as a new node", p.settings(), err)
	}
	return s, nil
}

func (p place) save(s settings) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return identity.WriteFile(p.settings(), append(b, '\n'))
}

// fresh refuses a directory that a node lives in already.
func (p place) fresh() error {
	_, err := os.Stat(p.settings())
	switch {
	case err == nil:
		return fmt.Errorf("%s holds a node already: start it with meshd start --dir %s", p.dir, p.dir)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return err
	}
	return nil
}

// nodeFlags are the flags of init and join.
type nodeFlags struct {
	dir string
	settings
}

func (f *nodeFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.dir, "dir", defaultDir(), "data directory")
	flags.StringVar(&f.Name, "name", "", "name of this node in the mesh (default: the host name)")
	flags.StringVar(&f.Bind, "bind", "0.0.0.0", "IP address to listen on")
	flags.StringVar(&f.Advertise, "advertise", "", "IP address or host name that other nodes reach this one at (default: found out)")
	flags.IntVar(&f.MeshPort, "port", defaultMeshPort, "mesh port, TCP and UDP")
	flags.IntVar(&f.RoutePort, "bus-port", defaultRoutePort, "port of the bus routes")
	flags.IntVar(&f.StorePort, "store-port", defaultStorePort, "port of the embedded buckets")
}

// usable checks, before anything is asked of the mesh, what would keep the node
// from starting on this machine.
func (f *nodeFlags) usable(p place) error {
	if err := p.fresh(); err != nil {
		return err
	}
	if err := identity.CheckDir(p.dir); err != nil {
		return err
	}
	l, err := net.Listen("tcp", f.listen(f.StorePort))
	if err != nil {
		return fmt.Errorf("the port of the embedded buckets cannot be used: %w; choose another with --store-port", err)
	}
	return l.Close()
}

// same refuses flags that say something else than what the node was made with:
// they would be ignored.
func (f *nodeFlags) same(cmd *cobra.Command, made settings) error {
	for name, values := range map[string][2]any{
		"name": {f.Name, made.Name}, "bind": {f.Bind, made.Bind}, "advertise": {f.Advertise, made.Advertise},
		"port": {f.MeshPort, made.MeshPort}, "bus-port": {f.RoutePort, made.RoutePort}, "store-port": {f.StorePort, made.StorePort},
	} {
		if cmd.Flags().Changed(name) && values[0] != values[1] {
			return fmt.Errorf("--%s %v is not what this node was made with, %v: leave the flag out, or change it in %s", name, values[0], values[1], place{f.dir}.settings())
		}
	}
	return nil
}

var notInName = regexp.MustCompile(`[^a-z0-9-]+`)

// complete fills in what was not given.
func (f *nodeFlags) complete() error {
	dir, err := filepath.Abs(f.dir)
	if err != nil {
		return err
	}
	f.dir = dir
	if f.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("find the host name: %w; give one with --name", err)
		}
		host, _, _ = strings.Cut(strings.ToLower(host), ".")
		f.Name = strings.Trim(notInName.ReplaceAllString(host, "-"), "-")
	}
	if !validName.MatchString(f.Name) {
		return fmt.Errorf("%q cannot name a node: a name is 1 to 40 of a-z, 0-9 and -, and begins with a letter or a digit; give one with --name", f.Name)
	}
	ip := net.ParseIP(f.Bind)
	if ip == nil {
		return fmt.Errorf("--bind %q is not an IP address", f.Bind)
	}
	if f.Advertise == "" && !ip.IsUnspecified() {
		f.Advertise = f.Bind
	}
	for _, port := range []int{f.MeshPort, f.RoutePort, f.StorePort} {
		if port < 1 || port > 65535 {
			return fmt.Errorf("port %d: a port is 1 to 65535, and stays the same over restarts", port)
		}
	}
	if f.MeshPort == f.RoutePort || f.MeshPort == f.StorePort || f.RoutePort == f.StorePort {
		return errors.New("--port, --bus-port and --store-port must differ")
	}
	return nil
}

var validName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}$`)
