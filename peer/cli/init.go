package cli

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer"
	"meshd/peer/identity"
	"meshd/raftfsm"
)

func newInitCommand() *cobra.Command {
	var f nodeFlags
	var verbose bool
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Make a mesh: this machine becomes its first node, and runs in the foreground",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, lives, err := f.prepare(cmd, verbose)
			if lives || err != nil {
				return err
			}
			if f.Advertise == "" {
				addr, err := ownAddress()
				if err != nil {
					return err
				}
				f.Advertise = addr
			}
			out := cmd.OutOrStdout()
			err = makeMesh(p, f.settings, func(recovery string) error {
				_, err := fmt.Fprintf(out, "Recovery key (write it down now, it is shown once and kept nowhere):\n\n    %s\n\n", recovery)
				return err
			})
			if err != nil {
				return err
			}
			return foreground(cmd.Context(), p, out, cmd.ErrOrStderr(), verbose)
		},
	}
	f.add(cmd)
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "log what every part does")
	return cmd
}

// prepare fills in the flags and finds a directory in which a node can be made; one
// that lives there already it runs.
func (f *nodeFlags) prepare(cmd *cobra.Command, verbose bool) (p place, lives bool, err error) {
	if err := f.complete(); err != nil {
		return p, false, err
	}
	p = place{f.dir}
	if lives, err := f.resume(cmd, p, verbose); lives {
		return p, true, err
	}
	return p, false, f.usable(p)
}

// resume runs the node that lives in the directory already, if one does: in a
// container the same command line starts it the first time and every other.
func (f *nodeFlags) resume(cmd *cobra.Command, p place, verbose bool) (lives bool, err error) {
	s, err := p.load()
	if err != nil {
		return false, nil // what is wrong with it, whoever makes a node there says
	}
	if err := f.same(cmd, s); err != nil {
		return true, err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s is node %s of mesh %s already; starting it.\n", p.dir, s.Name, s.Mesh)
	return true, foreground(cmd.Context(), p, cmd.OutOrStdout(), cmd.ErrOrStderr(), verbose)
}

// makeMesh makes everything that the first start needs, the directory's settings
// last: a crash before them leaves nothing that is taken for a node, and no mesh
// whose recovery key was not shown.
func makeMesh(p place, s settings, show func(recovery string) error) error {
	keys, err := makeKeys(p)
	if err != nil {
		return err
	}
	s.Mesh = identity.NewMeshID()
	now := time.Now()
	ca, err := identity.NewCA(s.Mesh, now)
	if err != nil {
		return err
	}
	cert, err := ca.Sign(keys.Public(), keys.NodeID(), s.Name, []string{s.Advertise}, now)
	if err != nil {
		return err
	}
	recovery, recipient, err := identity.NewRecovery()
	if err != nil {
		return err
	}
	secrets := peer.Secrets{CAKey: ca.KeyPEM(), Gossip: make([]byte, 32)}
	rand.Read(secrets.Gossip)
	sealed, err := secrets.Seal(keys.Recipient())
	if err != nil {
		return err
	}
	first := raftfsm.Init{
		Mesh: raftfsm.Mesh{ID: s.Mesh, Generation: 1, Level: raftfsm.Level, CACert: string(ca.CertPEM()), Recovery: recipient},
		Node: raftfsm.Node{
			ID: keys.NodeID(), Name: s.Name, Address: s.reach(s.MeshPort), Route: s.reach(s.RoutePort), Pin: identity.Pin(keys.Public()),
			Recipient: keys.Recipient(), Secrets: sealed, Level: raftfsm.Level, Joined: now.UTC(),
		},
	}
	text, err := json.Marshal(first)
	if err != nil {
		return err
	}
	if err := show(recovery); err != nil {
		return fmt.Errorf("show the recovery key: %w", err)
	}
	return p.settle(s, cert, ca.CertPEM(), map[string]string{peer.InitSetting: string(text), peer.SecretsSetting: sealed}, nil)
}

// settle stores what a node needs to start, its settings last.
func (p place) settle(s settings, cert, ca []byte, local map[string]string, addresses map[string]string) error {
	db, err := peer.OpenLocal(p.dir)
	if err != nil {
		return err
	}
	errs := []error{identity.WriteFile(p.cert(), cert), identity.WriteFile(p.ca(), ca)}
	for name, value := range local {
		errs = append(errs, db.Set(name, value))
	}
	for node, addr := range addresses {
		errs = append(errs, db.SetAddress(node, addr))
	}
	if err := errors.Join(append(errs, db.Close())...); err != nil {
		return err
	}
	return p.save(s)
}

// makeKeys makes the node's keys, or takes those of an attempt that did not get
// further.
func makeKeys(p place) (*identity.Keys, error) {
	keys, err := identity.Create(p.identity())
	if errors.Is(err, fs.ErrExist) {
		return identity.Load(p.identity())
	}
	return keys, err
}

// foreground runs the node until a signal, and says when it serves.
func foreground(ctx context.Context, p place, out, logs io.Writer, verbose bool) error {
	up := false
	return run(ctx, p, newLog(logs, verbose), func(n *node, heard bool) {
		switch {
		case up:
			fmt.Fprintln(out, "A leader is heard: things can change again.")
			return
		case !heard && !n.peer.HasRecord():
			fmt.Fprintf(out, "Node %s of mesh %s runs, and has found no leader yet: it goes on once most of the voters are up.\n", n.Name, n.Mesh)
			return
		}
		up = true
		fmt.Fprintf(out, "Node %s of mesh %s is up: mesh port %s, bus %s, socket %s\n", n.Name, n.Mesh, n.reach(n.MeshPort), n.reach(n.RoutePort), p.socket())
		if !heard {
			fmt.Fprintf(out, "It has heard no leader yet and goes by its own record, index %d: nothing can change until it hears one, which takes most of the voters.\n", n.peer.View().State.Index)
		}
		if p.dir != rootDir {
			fmt.Fprintf(out, "For the other commands: export MESHD_SOCKET=%s\n", p.socket())
		}
	})
}
