package cli

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"
)

// newDemoWriterCommand is the program of the demo: it knows nothing of meshd but
// the directory of files that it was given.
func newDemoWriterCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "demo-writer",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir := filepath.Join(os.Getenv("SERVICE_BINDING_ROOT"), "pad")
			fields, err := readBinding(dir)
			if err != nil {
				return err
			}
			conn, err := nats.Connect("tls://"+net.JoinHostPort(fields["host"], fields["port"]),
				nats.UserInfo(fields["username"], fields["password"]), nats.CustomInboxPrefix(fields["inbox"]),
				nats.RootCAs(filepath.Join(dir, "ca.crt")), nats.MaxReconnects(-1))
			if err != nil {
				return err
			}
			defer conn.Close()
			stream, err := jetstream.New(conn)
			if err != nil {
				return err
			}
			bucket, err := stream.KeyValue(cmd.Context(), fields["bucket"])
			if err != nil {
				return err
			}
			for i := 0; ; i++ {
				if _, err := bucket.PutString(cmd.Context(), "note", fmt.Sprint(i)); err != nil {
					fmt.Fprintln(cmd.ErrOrStderr(), "write a note:", err) // the store is away; it comes back
				}
				if err := nap(cmd.Context(), time.Second); err != nil {
					return nil
				}
			}
		},
	}
}

func nap(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// readBinding reads the fields of one binding directory.
func readBinding(dir string) (map[string]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	fields := map[string]string{}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		fields[e.Name()] = strings.TrimRight(string(b), "\n")
	}
	return fields, nil
}
