package cli

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"meshd/peer"
	"meshd/peer/identity"
	"meshd/raftfsm"
)

const (
	// joinWithin bounds a join: by then the fault has a name.
	joinWithin = 10 * time.Second
	// memberDial bounds one member that does not answer, so that the next is tried.
	memberDial = 3 * time.Second
	// maxJoinReply bounds what a member answers: the nodes of a large mesh.
	maxJoinReply = 4 << 20
)

func newJoinCommand() *cobra.Command {
	var f nodeFlags
	var tokenFile string
	var verbose bool
	cmd := &cobra.Command{
		Use:   "join [TOKEN | HOST:PORT --token-file FILE]",
		Short: "Make this machine a node of a mesh, with a token from one of its nodes; runs in the foreground",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, lives, err := f.prepare(cmd, verbose)
			if lives || err != nil {
				return err
			}
			token, err := readToken(args, tokenFile)
			if err != nil {
				return err
			}
			if err := join(cmd.Context(), p, f.settings, token); err != nil {
				return fmt.Errorf("join mesh %s: %w", token.Mesh, err)
			}
			return foreground(cmd.Context(), p, cmd.OutOrStdout(), cmd.ErrOrStderr(), verbose)
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&tokenFile, "token-file", "", "read the token from a file, so that it is in no list of processes")
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "log what every part does")
	return cmd
}

// readToken takes the token from the argument or the file. With both a file and
// an argument the argument is a member's address, which is tried first.
func readToken(args []string, file string) (identity.Token, error) {
	var text string
	switch {
	case file != "":
		b, err := os.ReadFile(file)
		if err != nil {
			return identity.Token{}, fmt.Errorf("read the token: %w", err)
		}
		text = string(b)
	case len(args) == 1:
		text = args[0]
	default:
		return identity.Token{}, errors.New("a token is needed: run meshd token on a node of the mesh, then meshd join TOKEN here")
	}
	token, err := identity.ParseToken(text)
	if err != nil {
		return token, err
	}
	if file != "" && len(args) == 1 {
		token.Addresses = append([]string{args[0]}, token.Addresses...)
	}
	return token, nil
}

// join asks the members that the token names, in turn, and stores what the first
// that takes us answers.
func join(ctx context.Context, p place, s settings, token identity.Token) error {
	ctx, cancel := context.WithTimeout(ctx, joinWithin)
	defer cancel()
	keys, err := makeKeys(p)
	if err != nil {
		return err
	}
	probes, stop := context.WithCancel(ctx)
	defer stop()
	wait, err := peer.AnswerProbes(probes, s.listen(s.MeshPort), s.listen(s.RoutePort), token.Secret[:])
	if err != nil {
		return err
	}
	var silent []string
	for _, addr := range token.Addresses {
		reply, advertise, err := ask(ctx, addr, s, token, keys)
		var refused *raftfsm.Rejection
		switch {
		case err == nil:
			stop()
			if err := wait(); err != nil {
				return err
			}
			s.Mesh, s.Advertise = reply.Mesh, advertise
			return keep(p, s, reply)
		case errors.As(err, &refused) && refused.Code != "unavailable":
			return refused
		}
		silent = append(silent, fmt.Sprintf("%s: %v", addr, err))
	}
	return fmt.Errorf("no member took the request; %s; check that a node runs there and that its mesh port is open to this machine", strings.Join(silent, "; "))
}

// keep stores the membership.
func keep(p place, s settings, reply peer.JoinReply) error {
	addresses := map[string]string{}
	for id, n := range reply.Nodes {
		addresses[id] = n.Address
	}
	return p.settle(s, []byte(reply.Cert), []byte(reply.CA), map[string]string{peer.SecretsSetting: reply.Secrets}, addresses)
}

// ask sends one member our request, over a stream that proves the member by the
// token's fingerprint. advertise is the address that we are reached at.
func ask(ctx context.Context, addr string, s settings, token identity.Token, keys *identity.Keys) (reply peer.JoinReply, advertise string, err error) {
	dialer := &tls.Dialer{NetDialer: &net.Dialer{Timeout: memberDial}, Config: identity.JoinClient(token.CAFingerprint)}
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return reply, "", err
	}
	defer conn.Close()
	if s.Advertise == "" {
		host, _, err := net.SplitHostPort(conn.LocalAddr().String())
		if err != nil {
			return reply, "", err
		}
		s.Advertise = host
	}
	request := peer.JoinRequest{
		Secret: token.Secret[:], Name: s.Name, Key: keys.Public(), Recipient: keys.Recipient(),
		Address: s.reach(s.MeshPort), Route: s.reach(s.RoutePort), Hosts: []string{s.Advertise}, Level: raftfsm.Level,
	}
	request.Proof = keys.Sign(request.Statement())
	body, err := json.Marshal(request)
	if err != nil {
		return reply, "", err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil }}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://member/join", bytes.NewReader(body))
	if err != nil {
		return reply, "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return reply, "", err
	}
	defer resp.Body.Close()
	answer := json.NewDecoder(io.LimitReader(resp.Body, maxJoinReply))
	if resp.StatusCode != http.StatusOK {
		refused := &raftfsm.Rejection{}
		if err := answer.Decode(refused); err != nil {
			return reply, "", fmt.Errorf("the member answered %s", resp.Status)
		}
		return reply, "", refused
	}
	if err := answer.Decode(&reply); err != nil {
		return reply, "", fmt.Errorf("read the member's answer: %w", err)
	}
	return reply, s.Advertise, checkRoutes(ctx, reply, keys.NodeID())
}

// checkRoutes checks the other direction of the bus port: from here to a member.
func checkRoutes(ctx context.Context, reply peer.JoinReply, self string) error {
	var faults []string
	for id, n := range reply.Nodes {
		if id == self {
			continue
		}
		conn, err := (&net.Dialer{Timeout: memberDial / 2}).DialContext(ctx, "tcp", n.Route)
		if err == nil {
			return conn.Close()
		}
		faults = append(faults, fmt.Sprintf("%s at %s: %v", n.Name, n.Route, err))
	}
	if len(faults) == 0 {
		return nil
	}
	return &raftfsm.Rejection{Code: "unreachable", Text: "this machine cannot reach the bus port of any member: " + strings.Join(faults, "; "), Remedy: "open the port there"}
}
