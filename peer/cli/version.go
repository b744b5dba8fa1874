package cli

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"
)

// glanceWithin is how long a courtesy, such as a completion, may take.
const glanceWithin = time.Second

// build is what this binary is.
type build struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
	Node     string `json:"node,omitempty"` // the version that runs on this machine
}

// thisBuild reads what the compiler wrote into the binary.
func thisBuild() build {
	b := build{Version: "unknown", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	facts, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	b.Version = facts.Main.Version
	for _, s := range facts.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

func newVersionCommand() *cobra.Command {
	return withOutput(&cobra.Command{
		Use:   "version",
		Short: "What this binary is, and what runs on this machine",
		Args:  takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := thisBuild()
			ctx, cancel := context.WithTimeout(cmd.Context(), glanceWithin)
			defer cancel()
			c := dial(cmd)
			defer c.Close()
			if o, err := c.Overview(ctx); err == nil { // no node is no fault here
				b.Node = o.Version
			}
			return show(cmd, b, func(w io.Writer, _ bool) {
				var s story
				if b.Revision != "" {
					changed := ""
					if b.Modified {
						changed = ", with changes"
					}
					s.add("revision", "%s%s", b.Revision, changed)
				}
				s.add("built by", "%s for %s", b.Go, b.Platform)
				node := "none answers"
				if b.Node != "" {
					node = b.Node
				}
				s.add("node here", "%s", node)
				s.write(w, "meshd "+b.Version)
			})
		},
	})
}

// version is what this node tells of its build: the version, and what it was
// made of where the version does not say.
func version() string {
	b := thisBuild()
	if b.Revision == "" {
		return b.Version
	}
	return fmt.Sprintf("%s (%.12s)", b.Version, b.Revision)
}
