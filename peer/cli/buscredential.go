package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nkeys"
	"github.com/spf13/cobra"

	"meshd/peer/api"
)

func newBusCredentialCommand() *cobra.Command {
	var ttl time.Duration
	cmd := withOutput(&cobra.Command{
		Use:   "bus-credential FILE",
		Short: "Let a NATS client of yours on this machine see and call what the mesh answers",
		Long: `Make a key for a NATS client of yours on this machine, write it to FILE (which must not be there, mode
0600), and print the command lines of the client nats for it. The client sees what is announced
($SRV.PING, INFO, STATS), and calls what an operator may call, which is everything: the file is worth as
much as the node's socket, until it expires or meshd bus-credential rm ends it. The key itself leaves
this command for that file only.`,
		Args: takes(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := dial(cmd)
			defer c.Close()
			login, err := makeBusCredential(cmd, c, args[0], ttl)
			if err != nil {
				return err
			}
			return show(cmd, login, func(w io.Writer, _ bool) { login.write(w, ttl) })
		},
	})
	cmd.Flags().DurationVar(&ttl, "ttl", 24*time.Hour, "how long it is good for")
	cmd.AddCommand(
		withOutput(&cobra.Command{
			Use:   "ls",
			Short: "List those of this node that are good now",
			Args:  takes(0, 0),
			RunE: func(cmd *cobra.Command, _ []string) error {
				c := dial(cmd)
				defer c.Close()
				all, err := c.BusCredentials(cmd.Context())
				if err != nil {
					return err
				}
				rows := []busCredentialRow{}
				for _, b := range all {
					rows = append(rows, busCredentialRow(b))
				}
				return show(cmd, rows, func(w io.Writer, colour bool) { busCredentialTable(rows, time.Now()).write(w, "", colour) })
			},
		}),
		&cobra.Command{
			Use:   "rm NAME",
			Short: "End one, and cut off whoever is connected with it",
			Args:  takes(1, 1),
			RunE: func(cmd *cobra.Command, args []string) error {
				c := dial(cmd)
				defer c.Close()
				if err := c.RemoveBusCredential(cmd.Context(), args[0]); err != nil {
					return err
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "bus credential %s is ended\n", args[0])
				return err
			},
		},
	)
	return cmd
}

// busCredentialRow is one credential of this node.
type busCredentialRow struct {
	Name      string    `json:"name"`
	PublicKey string    `json:"publicKey"`
	Actor     string    `json:"actor"` // who asked for it
	Expires   time.Time `json:"expires"`
}

func busCredentialTable(rows []busCredentialRow, now time.Time) table {
	t := table{heads: []string{"NAME", "MADE BY", "GOOD FOR"}, state: -1}
	for _, r := range rows {
		t.rows = append(t.rows, []string{r.Name, r.Actor, span(r.Expires.Sub(now))})
	}
	return t
}

// busLogin is what a client needs to connect. It has no secret: that is in File.
type busLogin struct {
	Name    string    `json:"name"`
	File    string    `json:"file"`
	URL     string    `json:"url"`
	Inbox   string    `json:"inboxPrefix"`
	Calls   string    `json:"callPrefix"`
	Expires time.Time `json:"expires"`
}

// makeBusCredential writes the file first, so that no key is let in that nobody has.
func makeBusCredential(cmd *cobra.Command, c *api.Client, file string, ttl time.Duration) (l busLogin, err error) {
	if file, err = filepath.Abs(file); err != nil {
		return l, err
	}
	pair, err := nkeys.CreateUser()
	if err != nil {
		return l, err
	}
	defer pair.Wipe()
	public, err := pair.PublicKey()
	if err != nil {
		return l, err
	}
	seed, err := pair.Seed()
	if err != nil {
		return l, err
	}
	defer clear(seed)
	if err := writeSeed(file, seed); err != nil {
		return l, err
	}
	login, err := c.AddBusCredential(cmd.Context(), public, ttl)
	if err != nil {
		return l, errors.Join(err, os.Remove(file))
	}
	return busLogin{login.Name, file, login.URL, login.Inbox, login.Calls, login.Expires}, nil
}

// writeSeed writes a file that was not there, for nobody else to read.
func writeSeed(file string, seed []byte) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s is there already, and is not overwritten; choose another file", file)
	}
	if err != nil {
		return err
	}
	_, err = f.Write(seed)
	if err == nil {
		_, err = f.WriteString("\n")
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(file))
	}
	return nil
}

func (l busLogin) write(w io.Writer, ttl time.Duration) {
	client := fmt.Sprintf("nats --server %s --nkey %s --inbox-prefix %s", l.URL, l.File, l.Inbox)
	fmt.Fprintf(w, `%s is good for %s, on this machine; to end it: meshd bus-credential rm %s
what answers:    %s micro ls
call a seat:     %s request %s.seat.SEAT.VERB '{}'
call a tool:     %s request %s.tool.NODE.ASSIGNMENT.TOOL '{}'
`, l.Name, span(ttl), l.Name, client, client, l.Calls, client, l.Calls)
}
