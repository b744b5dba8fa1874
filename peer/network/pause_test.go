package network_test

import (
	"context"
	"errors"
	"io"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"meshd/peer/network"
)

func TestAPausedNodeFindsWhatHasComeWhenItGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		defer a.Close()
		defer b.Close()
		here, there := pair(t, a, b, "b")
		defer here.Close()
		defer there.Close()
		start := time.Now()
		f.Pause("b")
		time.AfterFunc(3*time.Second, func() { f.Resume("b") })
		there.SetReadDeadline(start.Add(time.Second))
		if _, err := here.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		// It is woken by its deadline and finds that there is something to read.
		got := make([]byte, 1)
		if _, err := io.ReadFull(there, got); err != nil || string(got) != "x" || time.Since(start) != 3*time.Second {
			t.Errorf("read %q, %v, after %v", got, err, time.Since(start))
		}
		if _, err := there.Read(got); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("with nothing there: %v", err)
		}
	})
}

func TestAPausedNodeSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		defer a.Close()
		defer b.Close()
		here, there := pair(t, a, b, "b")
		defer here.Close()
		defer there.Close()
		l := listen(t, b, network.Peer)
		defer l.Close()
		to, _ := f.Addr("b")
		from, err := a.Packets()
		if err != nil {
			t.Fatal(err)
		}
		start, sent := time.Now(), make(chan time.Duration, 4)
		f.Pause("a")
		f.Pause("a") // is one pause
		for _, send := range []func() error{
			func() error { _, err := here.Write([]byte("x")); return err },
			func() error { c, err := a.Dial(context.Background(), "b", network.Peer); c.Close(); return err },
			func() error { return from.Send([]byte("x"), to) },
			func() error {
				if !f.Carry("a", "b") {
					return errors.New("it did not arrive")
				}
				return nil
			},
		} {
			go func() {
				if err := send(); err != nil {
					t.Error(err)
				}
				sent <- time.Since(start)
			}()
		}
		time.Sleep(2 * time.Second)
		f.Resume("a")
		f.Resume("a")
		for range cap(sent) {
			if d := <-sent; d != 2*time.Second {
				t.Errorf("something was sent after %v", d)
			}
		}
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	})
}

func TestCarryMeetsTheFaultsOfTheLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := network.NewFabric()
		a, b := f.Join("a"), f.Join("b")
		defer a.Close()
		defer b.Close()
		start := time.Now()
		f.Slow("a", "b", time.Second)
		if !f.Carry("b", "a") || time.Since(start) != time.Second {
			t.Errorf("over a slow link it took %v", time.Since(start))
		}
		f.CutOneWay("a", "b")
		if f.Carry("a", "b") {
			t.Error("something arrived over a cut link")
		}
		f.Mend("a", "b")
		if !f.Carry("a", "b") || time.Since(start) != time.Second {
			t.Errorf("the mended link is slow still: %v", time.Since(start))
		}
		f.Pause("b")
		time.AfterFunc(time.Second, func() { f.Resume("b") })
		if !f.Carry("a", "b") || time.Since(start) != 2*time.Second {
			t.Errorf("at a paused node it arrived after %v", time.Since(start))
		}
	})
}
