package peer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"time"

	"golang.org/x/sync/errgroup"

	"meshd/peer/consensus"
	"meshd/peer/network"
	"meshd/raftfsm"
)

// The calls that one node makes to another, HTTP over the mesh port. The network
// has proven who the other is before a byte of them is read.
const (
	pathApply  = "/apply"  // an entry for the leader
	pathIndex  = "/index"  // of all that is committed, by the leader
	pathDetail = "/detail" // what this node is trying, and why it fails
	pathLogs   = "/logs"   // an assignment's log
)

// maxBody bounds a request between nodes: an entry and its frame.
const maxBody = 2 * raftfsm.MaxEntry

type peerKey struct{}

// serve answers the other nodes, and machines that want to join.
func (n *Peer) serve(ctx context.Context) error {
	peers := http.NewServeMux()
	peers.HandleFunc("POST "+pathApply, n.serveApply)
	peers.HandleFunc("GET "+pathIndex, n.serveIndex)
	peers.HandleFunc("GET "+pathDetail, n.serveDetail)
	peers.HandleFunc("GET "+pathLogs, n.serveLogs)
	peers.HandleFunc("POST "+pathRenew, answerTo(n.grant))
	peers.HandleFunc("POST "+pathRelease, answerTo(n.letGo))
	peers.HandleFunc("POST "+pathEvidence, answerTo(n.testify))
	peers.HandleFunc("POST "+pathEnd, answerTo(n.ended))
	joins := http.NewServeMux()
	joins.HandleFunc("POST "+pathJoin, n.serveJoin)
	joins.HandleFunc("GET "+pathStanding, n.serveStanding)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return n.serveProto(ctx, network.Peer, n.membersOnly(peers)) })
	group.Go(func() error { return n.serveProto(ctx, network.Join, joins) })
	return group.Wait()
}

// bodyWithin is how long a request may take to arrive: a stream of a machine
// without a certificate must not keep its place for ever.
const bodyWithin = 10 * time.Second

// membersOnly refuses who is no member by this node's state. The network has
// proven the node's key, and that the CA signed it once.
func (n *Peer) membersOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var member, empty bool
		n.store.view(func(s *raftfsm.State) {
			id, _ := r.Context().Value(peerKey{}).(string)
			_, member = s.Nodes[id]
			empty = s.Mesh.ID == ""
		})
		if !member && !empty {
			http.Error(w, "you are no member of this mesh that this node knows of", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// serveProto answers one protocol until ctx ends or the network does.
func (n *Peer) serveProto(ctx context.Context, proto string, handler http.Handler) error {
	l, err := n.cfg.Network.Listen(proto)
	if err != nil {
		return fmt.Errorf("listen for %s: %w", proto, err)
	}
	srv := &http.Server{
		Handler: http.MaxBytesHandler(handler, maxBody), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: bodyWithin, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, peerKey{}, network.PeerOf(c))
		},
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(n.cfg.Log.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() }) // it closes what Serve waits for
	defer stop()
	if err := srv.Serve(l); ctx.Err() == nil {
		return fmt.Errorf("serve %s: %w", proto, err)
	}
	return nil
}

// newClient makes the HTTP client of this node: the host of a URL is a node id.
func newClient(net network.Network) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext:         dialPeer(net, network.Peer),
		MaxIdleConnsPerHost: 2, IdleConnTimeout: 30 * time.Second, ResponseHeaderTimeout: proposeWithin,
	}}
}

func dialPeer(nw network.Network, proto string) func(ctx context.Context, _, addr string) (net.Conn, error) {
	return func(ctx context.Context, _, addr string) (net.Conn, error) {
		node, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		c, err := nw.Dial(ctx, node, proto)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errNotSent, err)
		}
		return c, nil
	}
}

// fault is how an error travels between nodes.
type fault struct {
	Code string // one of the fault constants
	Text string
}

const (
	faultNotLeader = "not-leader"
	faultNoQuorum  = "no-quorum"
	faultUnknown   = "unknown"
	faultOther     = "other"
)

func (n *Peer) serveApply(w http.ResponseWriter, r *http.Request) {
	entry, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	e, err := raftfsm.Decode(entry)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if from := r.Context().Value(peerKey{}); e.Node != from {
		http.Error(w, fmt.Sprintf("node %v sent an entry in the name of %s", from, e.Node), http.StatusForbidden)
		return
	}
	if _, ok := e.Command.(raftfsm.RemoveNode); ok {
		n.exit.farewells.Add(1)
		defer n.farewell(w)
	}
	result, err := n.commitHere(r.Context(), e.Command, entry)
	respondOr(w, result, err)
}

func (n *Peer) serveIndex(w http.ResponseWriter, r *http.Request) {
	index, err := n.indexHere(r.Context())
	respondOr(w, index, err)
}

// respondOr sends what was asked of a leader, or why there is nothing.
func respondOr(w http.ResponseWriter, result any, err error) {
	if err == nil {
		respond(w, http.StatusOK, result)
		return
	}
	f := fault{faultOther, err.Error()}
	switch {
	case errors.Is(err, consensus.ErrUnknown):
		f.Code = faultUnknown
	case errors.Is(err, consensus.ErrNotLeader):
		f.Code = faultNotLeader
	case errors.Is(err, consensus.ErrNoQuorum):
		f.Code = faultNoQuorum
	}
	respond(w, http.StatusServiceUnavailable, f)
}

// farewell sends the answer to a removal out before its stream may be cut: the
// one that asked may be the one that was removed.
func (n *Peer) farewell(w http.ResponseWriter) {
	_ = http.NewResponseController(w).Flush() // the other end is gone if this fails
	n.exit.farewells.Add(-1)
	n.Poke()
}

func respond(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // the other end is gone if this fails
}

// askLeader sends a request to the node that leads, and decodes its answer.
func (n *Peer) askLeader(ctx context.Context, method, leader, path string, body []byte, into any) error {
	resp, err := n.request(ctx, method, leader, path, body)
	if err != nil {
		if errors.Is(err, errNotSent) {
			return fmt.Errorf("reach the leader %s: %w: %w", leader, consensus.ErrNotLeader, err)
		}
		return fmt.Errorf("ask the leader %s: %w: %w", leader, consensus.ErrUnknown, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		if err := decodeBody(resp.Body, into); err != nil {
			return fmt.Errorf("ask the leader %s: %w: %w", leader, consensus.ErrUnknown, err)
		}
		return nil
	}
	var f fault
	if err := decodeBody(resp.Body, &f); err != nil {
		return fmt.Errorf("the leader %s answered %s: %w", leader, resp.Status, err)
	}
	switch f.Code {
	case faultUnknown:
		return fmt.Errorf("%w: %s", consensus.ErrUnknown, f.Text)
	case faultNotLeader:
		return fmt.Errorf("%w: %s", consensus.ErrNotLeader, f.Text)
	case faultNoQuorum:
		return fmt.Errorf("%w: %s", consensus.ErrNoQuorum, f.Text)
	}
	return errors.New(f.Text)
}

// errNotSent says that the other node was not reached, so nothing was done.
var errNotSent = errors.New("not reached")

// request sends one request to another node. The caller closes the answer's body.
func (n *Peer) request(ctx context.Context, method, node, path string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+node+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	resp, err := n.client.Do(req)
	if fault, ok := errors.AsType[*url.Error](err); ok {
		err = fault.Err // the URL is ours, and says nothing to a person
	}
	return resp, err
}

// maxReply bounds an answer of another node.
const maxReply = 4 << 20

func decodeBody(r io.Reader, into any) error {
	d := json.NewDecoder(io.LimitReader(r, maxReply))
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	return nil
}
