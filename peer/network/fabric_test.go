package network_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"meshd/peer/network"
)

// pair opens a stream from a to b.
func pair(t *testing.T, a, b network.Network, to string) (here, there net.Conn) {
	t.Helper()
	l := listen(t, b, network.Peer)
	here, err := a.Dial(t.Context(), to, network.Peer)
	if err != nil {
		t.Fatal(err)
	}
	there, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	return here, there
}

func TestFabricStreamCarriesBytesInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		defer a.Close()
		defer b.Close()
		here, there := pair(t, a, b, "b")
		if x, y := network.PeerOf(here), network.PeerOf(there); x != "b" || y != "a" {
			t.Fatalf("ends are named %q and %q", x, y)
		}
		sent := make([]byte, 3<<20) // more than the window: the writer must wait
		for i := range sent {
			sent[i] = byte(rand.Uint32())
		}
		go func() {
			here.Write(sent)
			here.Close()
		}()
		got, err := io.ReadAll(there)
		if err != nil || !bytes.Equal(got, sent) {
			t.Fatalf("got %d bytes of %d, %v", len(got), len(sent), err)
		}
		if _, err := there.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
			t.Fatalf("write to a closed end: %v", err)
		}
		there.Close()
	})
}

func TestFabricSlowDelaysAndKeepsOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		defer a.Close()
		defer b.Close()
		here, there := pair(t, a, b, "b")
		f.Slow("a", "b", 100*time.Millisecond)
		start := time.Now()
		here.Write([]byte("1"))
		f.Heal() // the second byte is faster, and still second
		here.Write([]byte("2"))
		got := make([]byte, 2)
		if _, err := io.ReadFull(there, got); err != nil || string(got) != "12" {
			t.Fatalf("got %q, %v", got, err)
		}
		if d := time.Since(start); d != 100*time.Millisecond {
			t.Fatalf("arrived after %v", d)
		}
	})
}

func TestFabricCutIsSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		defer a.Close()
		defer b.Close()
		here, there := pair(t, a, b, "b")
		idleHere, idleThere := pair(t, a, b, "b")
		f.Cut("a", "b")

		if n, err := here.Write([]byte("lost")); n != 4 || err != nil {
			t.Fatalf("write into a cut link: %d, %v", n, err)
		}
		there.SetReadDeadline(time.Now().Add(time.Second))
		start := time.Now()
		if _, err := there.Read(make([]byte, 4)); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != time.Second {
			t.Fatalf("read from a cut link: %v after %v", err, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := a.Dial(ctx, "b", network.Peer); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("dial over a cut link: %v", err)
		}
		f.Heal()
		// What was lost is not sent again, so nothing that came later may arrive.
		here.Write([]byte("late"))
		there.SetReadDeadline(time.Time{})
		if n, err := there.Read(make([]byte, 4)); n != 0 || !errors.Is(err, syscall.ETIMEDOUT) {
			t.Fatalf("read from a stream with a hole: %d, %v", n, err)
		}
		// A stream on which nothing was sent meanwhile never noticed.
		idleHere.Write([]byte("fine"))
		got := make([]byte, 4)
		if _, err := io.ReadFull(idleThere, got); err != nil || string(got) != "fine" {
			t.Fatalf("got %q, %v", got, err)
		}
	})
}

func TestFabricCutOneWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		defer a.Close()
		defer b.Close()
		here, there := pair(t, a, b, "b")
		f.CutOneWay("a", "b")
		there.Write([]byte("heard"))
		got := make([]byte, 5)
		if _, err := io.ReadFull(here, got); err != nil || string(got) != "heard" {
			t.Fatalf("got %q, %v", got, err)
		}
		pa, err := a.Packets()
		if err != nil {
			t.Fatal(err)
		}
		pb, err := b.Packets()
		if err != nil {
			t.Fatal(err)
		}
		pa.Send([]byte("lost"), pb.Addr())
		pb.Send([]byte("heard"), pa.Addr())
		buf := make([]byte, network.MaxPacket)
		if n, from, err := pa.Receive(buf); err != nil || string(buf[:n]) != "heard" || from != pb.Addr() {
			t.Fatalf("got %q from %v, %v", buf[:n], from, err)
		}
		f.Heal()
		pa.Send([]byte("second"), pb.Addr())
		if n, _, err := pb.Receive(buf); err != nil || string(buf[:n]) != "second" {
			t.Fatalf("got %q, %v: the first packet was sent over a cut link", buf[:n], err)
		}
	})
}

func TestFabricDialWaitsForAHeal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		defer a.Close()
		defer b.Close()
		listen(t, b, network.Peer)
		f.Cut("a", "b")
		time.AfterFunc(2*time.Second, f.Heal)
		start := time.Now()
		if _, err := a.Dial(t.Context(), "b", network.Peer); err != nil || time.Since(start) != 2*time.Second {
			t.Fatalf("dial: %v after %v", err, time.Since(start))
		}
	})
}

func TestFabricKillResetsAndRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		defer a.Close()
		here, _ := pair(t, a, b, "b")
		quiet, _ := pair(t, a, b, "b")
		before, _ := f.Addr("b")
		f.Kill("b")
		if _, err := here.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("read from a killed node: %v", err)
		}
		if _, err := b.Listen(network.Peer); !errors.Is(err, network.ErrClosed) {
			t.Fatalf("a killed node listens: %v", err)
		}
		if _, err := a.Dial(t.Context(), "b", network.Peer); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("dial to a killed node: %v", err)
		}
		if _, err := quiet.Write([]byte("x")); err == nil {
			t.Fatal("wrote to a killed node")
		}
		again := f.Join("b")
		if after, _ := f.Addr("b"); after != before {
			t.Fatalf("restarted at %v, was at %v", after, before)
		}
		fresh, _ := pair(t, a, again, "b")

		// Power off: cut first, so that nobody is told.
		f.Isolate("b")
		f.Kill("b")
		fresh.SetReadDeadline(time.Now().Add(time.Second))
		if _, err := fresh.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("read from a node without power: %v", err)
		}
	})
}

func TestFabricUnderRandomFaults(t *testing.T) {
	// Whatever happens, a stream delivers a prefix of what was written to it.
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		rng := rand.New(rand.NewPCG(1, 2))
		l := listen(t, b, network.Peer)
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() {
					defer c.Close()
					buf, next := make([]byte, 1000), byte(0)
					for {
						c.SetReadDeadline(time.Now().Add(10 * time.Second))
						n, err := c.Read(buf)
						for _, x := range buf[:n] {
							if x != next {
								t.Errorf("byte %d where %d was next", x, next)
								return
							}
							next++
						}
						if err != nil {
							return
						}
					}
				})
			}
		})
		for range 20 {
			wg.Go(func() {
				c, err := a.Dial(t.Context(), "b", network.Peer)
				if err != nil {
					return
				}
				defer c.Close()
				next := byte(0)
				for range 200 {
					buf := make([]byte, 700)
					for i := range buf {
						buf[i] = next
						next++
					}
					c.SetWriteDeadline(time.Now().Add(time.Second))
					if _, err := c.Write(buf); err != nil {
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
		}
		for range 50 {
			time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
			switch rng.IntN(4) {
			case 0:
				f.Cut("a", "b")
			case 1:
				f.CutOneWay("b", "a")
			case 2:
				f.Slow("a", "b", time.Duration(rng.IntN(50))*time.Millisecond)
			case 3:
				f.Heal()
			}
		}
		f.Heal()
		a.Close()
		l.Close()
		wg.Wait()
		b.Close()
	})
}
