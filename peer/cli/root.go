// Package cli is what a person types: one file per verb. It talks to the node on
// this machine through its socket and keeps no state of its own; the verbs that
// run a node compose it here as well, from the packages that know nothing of
// each other.
//
// Exit codes, the same for every verb: 0 done, and ready where readiness was
// asked for; 1 refused or failed, said on standard error with the way out; 2
// there are changes (plan), something is un-ready (status), or it was accepted
// and still waits (push, rm); 3 a difference was found (verify).
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"meshd/peer/api"
)

// Exit codes.
const (
	exitFailed  = 1
	exitWaiting = 2
	exitDiffers = 3
)

// exit is an error that says nothing more: all was said on the output.
type exit int

func (e exit) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// located is an error that begins with a place, in the form that editors follow.
type located struct{ text string }

func (l located) Error() string { return l.text }

// Main runs one command line, without the program's name, and returns the exit
// code.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var code exit
	var at located
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	case errors.As(err, &at):
		fmt.Fprintln(stderr, at.text)
	default:
		fmt.Fprintln(stderr, "meshd:", sentence(err))
	}
	return exitFailed
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "meshd",
		Short:         "A mesh of machines without a controller: one push is enough, and one answers",
		Args:          noSuchVerb,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentFlags().String("socket", "", "socket of the node on this machine (default $MESHD_SOCKET, or the node's own place)")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
	root.AddCommand(
		newInitCommand(),
		newJoinCommand(),
		newStartCommand(),
		newTokenCommand(),
		newNodeCommand(),
		newLeaveCommand(),
		newPlanCommand(),
		newPushCommand(),
		newRmCommand(),
		newStatusCommand(),
		newProvidersCommand(),
		newBindingsCommand(),
		newSeatsCommand(),
		newSeatCommand(),
		newModulesCommand(),
		newRetainedCommand(),
		newCallCommand(),
		newToolsCommand(),
		newBusCredentialCommand(),
		newLogsCommand(),
		newEventsCommand(),
		newVerifyCommand(),
		newVersionCommand(),
		newDemoCommand(),
		newDemoWriterCommand(),
	)
	return root
}

// takes accepts from least to most arguments; most below 0 is any number.
func takes(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) >= least && (most < 0 || len(args) <= most) {
			return nil
		}
		return fmt.Errorf("%s will not do: write %s; see %s --help", count(len(args), "argument"), cmd.UseLine(), cmd.CommandPath())
	}
}

// noSuchVerb refuses what cobra could not find, with the near verbs.
func noSuchVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2
	return &api.Error{Text: fmt.Sprintf("there is no verb %q", args[0]), Remedy: cmd.CommandPath() + " --help lists them", Candidates: cmd.SuggestionsFor(args[0])}
}

// socketOf is the socket that the command is to talk to.
func socketOf(cmd *cobra.Command) string {
	if f := cmd.Flag("socket"); f != nil && f.Value.String() != "" {
		return f.Value.String()
	}
	return api.FindSocket()
}

// dial returns a client of the node on this machine. It does not connect.
func dial(cmd *cobra.Command) *api.Client { return api.NewClient(socketOf(cmd)) }

// overview asks the node for what it knows.
func overview(cmd *cobra.Command) (api.Overview, error) {
	c := dial(cmd)
	defer c.Close()
	return c.Overview(cmd.Context())
}

// look is overview for a listing: it says on standard error how good the answer is
// where no leader vouches for it.
func look(cmd *cobra.Command) (api.Overview, error) {
	o, err := overview(cmd)
	if err == nil {
		qualify(cmd, o)
	}
	return o, err
}

func qualify(cmd *cobra.Command, o api.Overview) {
	if !current(o) {
		fmt.Fprintln(cmd.ErrOrStderr(), strings.Join(wrap(standing(o), columns), "\n"))
	}
}

// current reports whether what the node knows is what a leader knew a moment ago.
func current(o api.Overview) bool { return o.Quorum && o.Age >= 0 }
