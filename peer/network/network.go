// Package network is the one seam between a node and the other nodes of its mesh.
//
// A Network carries streams, opened to a node by its id and told apart by a protocol name, and
// packets, sent to an address. Port is the real one: TCP and UDP on one port number, mutual TLS 1.3,
// the protocol name as ALPN. Fabric is the in-memory one: channels and timers only, so whole meshes
// run in virtual time inside a testing/synctest bubble, with cuts, delays and deaths on demand.
//
// What a caller may rely on, with either of them:
//
//   - A stream that Dial returned ends at the node that was asked for, and a stream that a listener
//     returned names the node at its other end (PeerOf). Only streams of the protocol Join may come
//     from a peer without an identity; PeerOf is then empty.
//   - A stream of a protocol that nobody listens to is refused.
//   - Deadlines are honoured. A peer behind a cut link is silence, not an error.
//   - Packets may be lost, doubled and reordered, and prove nothing about their sender.
package network

import (
	"context"
	"errors"
	"net"
	"net/netip"
)

// The protocols of the mesh, by the names that ALPN carries.
const (
	Raft   = "raft"   // raft's RPCs between the nodes that keep the log
	Gossip = "gossip" // memberlist's push/pull and fallback probes
	Peer   = "peer"   // the API between nodes: forwarded commands, watch streams
	Join   = "join"   // a token for a certificate; the only one without a client certificate
)

// ErrClosed says that the network was closed, or the node of a Fabric killed.
var ErrClosed = errors.New("network is closed")

// Network is how one node reaches the others.
type Network interface {
	// Listen takes the streams that peers open with a protocol. One listener a protocol at a time.
	Listen(proto string) (net.Listener, error)
	// Dial opens a stream to a node. It fails when the peer does not prove to be that node.
	Dial(ctx context.Context, node, proto string) (net.Conn, error)
	// Packets takes the packet side. One taker at a time.
	Packets() (Packets, error)
	// Close ends every stream and listener, and returns when nothing of the network runs any more.
	Close() error
}

// Packets is the unreliable side of a Network, as gossip needs it.
type Packets interface {
	// Send sends one packet of at most MaxPacket bytes. A nil error does not mean that it arrived.
	Send(b []byte, to netip.AddrPort) error
	// Receive blocks for the next packet and copies it to b, which should hold MaxPacket bytes.
	Receive(b []byte) (n int, from netip.AddrPort, err error)
	// Addr is the address that peers reach this node at: what it should advertise.
	Addr() netip.AddrPort
	Close() error
}

// MaxPacket is the largest payload of a UDP packet over IPv4, in bytes.
const MaxPacket = 65507

// PeerOf names the node at the other end of a stream that came from a Network. It is empty for a
// peer without an identity (protocol Join), and for a connection of any other origin.
func PeerOf(c net.Conn) string {
	if p, ok := c.(interface{ PeerNode() string }); ok {
		return p.PeerNode()
	}
	return ""
}
