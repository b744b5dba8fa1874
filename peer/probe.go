package peer

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"golang.org/x/sync/errgroup"
)

// probeAnswer is what the machine that holds the token's secret answers to a
// nonce.
func probeAnswer(nonce, key []byte) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write(nonce)
	return mac.Sum(nil)
}

func probeMatches(nonce, key, answer []byte) bool {
	return hmac.Equal(probeAnswer(nonce, key), answer)
}

// nonceSize is the length of a probe: fixed, so that an answer is never longer
// than twice the question.
const nonceSize = 16

// AnswerProbes answers, on the ports that a node is about to use, the question
// of a member whether it reaches them, until ctx ends. Only who knows key gets
// an answer that means something.
func AnswerProbes(ctx context.Context, mesh, route string, key []byte) (wait func() error, err error) {
	group, ctx := errgroup.WithContext(ctx)
	var opened []io.Closer
	for _, addr := range []string{mesh, route} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("listen on tcp %s: %w", addr, err), closeAll(opened))
		}
		opened = append(opened, l)
		group.Go(func() error { return answerStreams(ctx, l, key) })
	}
	packets, err := net.ListenPacket("udp", mesh)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen on udp %s: %w", mesh, err), closeAll(opened))
	}
	opened = append(opened, packets)
	group.Go(func() error { return answerPackets(ctx, packets, key) })
	group.Go(func() error {
		<-ctx.Done()
		return closeAll(opened)
	})
	return group.Wait, nil
}

func closeAll(list []io.Closer) error {
	var errs []error
	for _, c := range list {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

func answerStreams(ctx context.Context, l net.Listener, key []byte) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return unlessDone(ctx, err)
		}
		answerStream(c, key)
	}
}

// answerStream serves one probe, and the next after it: one slow peer delays the
// others by a second.
func answerStream(c net.Conn, key []byte) {
	defer c.Close()
	if c.SetDeadline(time.Now().Add(time.Second)) != nil {
		return
	}
	nonce := make([]byte, nonceSize)
	if _, err := io.ReadFull(c, nonce); err == nil {
		_, _ = c.Write(probeAnswer(nonce, key)) // the prober sees whether it arrived
	}
}

func answerPackets(ctx context.Context, p net.PacketConn, key []byte) error {
	buf := make([]byte, nonceSize+1)
	for {
		k, from, err := p.ReadFrom(buf)
		if err != nil {
			return unlessDone(ctx, err)
		}
		if k == nonceSize {
			_, _ = p.WriteTo(probeAnswer(buf[:k], key), from) // lost is lost: the prober asks again
		}
	}
}

func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
