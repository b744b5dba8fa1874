package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// GossipTransport is the view of a Network that memberlist wants: its packets, and streams of the
// protocol Gossip. Streams go to a node by its id, so every address must carry a name; the address
// beside it is used for packets only. Shutdown ends the view, not the Network.
type GossipTransport struct {
	net     Network
	lis     net.Listener
	packets Packets
	packet  chan *memberlist.Packet
	stream  chan net.Conn
	ctx     context.Context // ends with the view
	cancel  context.CancelFunc
	wg      sync.WaitGroup
}

var _ memberlist.NodeAwareTransport = (*GossipTransport)(nil)

// Gossiping takes the packets and the gossip streams of a network.
func Gossiping(n Network) (*GossipTransport, error) {
	packets, err := n.Packets()
	if err != nil {
		return nil, err
	}
	lis, err := n.Listen(Gossip)
	if err != nil {
		packets.Close()
		return nil, err
	}
	t := &GossipTransport{
		net:     n,
		lis:     lis,
		packets: packets,
		packet:  make(chan *memberlist.Packet),
		stream:  make(chan net.Conn),
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.wg.Go(t.receive)
	t.wg.Go(t.accept)
	return t, nil
}

func (t *GossipTransport) receive() {
	buf := make([]byte, MaxPacket)
	for {
		n, from, err := t.packets.Receive(buf)
		if err != nil {
			if t.ended(err) {
				return
			}
			continue
		}
		if n == 0 {
			continue
		}
		p := &memberlist.Packet{
			Buf:       append([]byte(nil), buf[:n]...),
			From:      net.UDPAddrFromAddrPort(from),
			Timestamp: time.Now(),
		}
		select {
		case t.packet <- p:
		case <-t.ctx.Done():
			return
		}
	}
}

func (t *GossipTransport) accept() {
	for {
		c, err := t.lis.Accept()
		if err != nil {
			return // a listener of a Network fails only when it is closed
		}
		select {
		case t.stream <- c:
		case <-t.ctx.Done():
			c.Close()
			return
		}
	}
}

// ended tells an end from an ICMP error, which a socket reports on a later receive.
func (t *GossipTransport) ended(err error) bool {
	return t.ctx.Err() != nil || errors.Is(err, net.ErrClosed) || errors.Is(err, ErrClosed)
}

// FinalAdvertiseAddr is the address of the network, whatever memberlist was told.
func (t *GossipTransport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	a := t.packets.Addr()
	return a.Addr().AsSlice(), int(a.Port()), nil
}

// WriteTo sends a packet to an ip:port.
func (t *GossipTransport) WriteTo(b []byte, addr string) (time.Time, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return time.Time{}, fmt.Errorf("send gossip to %q: %w", addr, err)
	}
	return time.Now(), t.packets.Send(b, to)
}

// WriteToAddress sends a packet to the address; the name is not needed.
func (t *GossipTransport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	return t.WriteTo(b, a.Addr)
}

// PacketCh is where received packets come out.
func (t *GossipTransport) PacketCh() <-chan *memberlist.Packet { return t.packet }

// StreamCh is where the streams that peers opened come out.
func (t *GossipTransport) StreamCh() <-chan net.Conn { return t.stream }

// DialTimeout refuses: a bare address names no node, so nothing could be proved.
func (t *GossipTransport) DialTimeout(addr string, _ time.Duration) (net.Conn, error) {
	return nil, fmt.Errorf("dial gossip at %s: only nodes can be dialled, and this address names none", addr)
}

// DialAddressTimeout opens a stream to the node that the address names.
func (t *GossipTransport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if a.Name == "" {
		return t.DialTimeout(a.Addr, timeout)
	}
	ctx, cancel := context.WithTimeout(t.ctx, timeout)
	defer cancel()
	return t.net.Dial(ctx, a.Name, Gossip)
}

// Shutdown stops receiving and returns when nothing of the view runs any more.
func (t *GossipTransport) Shutdown() error {
	t.cancel()
	err := errors.Join(t.lis.Close(), t.packets.Close())
	t.wg.Wait()
	return err
}
