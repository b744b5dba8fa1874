package raftfsm

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// snapshotFormat heads every snapshot. A build refuses a newer one with a
// sentence rather than load a part of it.
const snapshotFormat = 1

type snapshot struct {
	Format int
	State  *State
}

// maxSnapshot bounds what Restore reads: 10,000 bindings take about 20 MiB.
const maxSnapshot = 512 << 20

// WriteTo writes s so that Restore gives an equal state. Equal states give
// equal bytes. Integrity is the snapshot store's business, which keeps a
// checksum beside each.
func (s *State) WriteTo(w io.Writer) (int64, error) {
	c := counter{w: bufio.NewWriter(w)}
	if err := json.NewEncoder(&c).Encode(snapshot{snapshotFormat, s}); err != nil {
		return c.n, fmt.Errorf("write snapshot: %w", err)
	}
	if err := c.w.Flush(); err != nil {
		return c.n, fmt.Errorf("write snapshot: %w", err)
	}
	return c.n, nil
}

type counter struct {
	w *bufio.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// Restore reads what WriteTo wrote. It is as strict as Decode.
func Restore(r io.Reader) (*State, error) {
	d := json.NewDecoder(io.LimitReader(r, maxSnapshot))
	d.DisallowUnknownFields()
	snap := snapshot{State: New()}
	if err := d.Decode(&snap); err != nil {
		return nil, fmt.Errorf("read snapshot: %w: %v", ErrUndecodable, err)
	}
	if snap.Format != snapshotFormat || snap.State == nil {
		return nil, fmt.Errorf("read snapshot: %w: format %d, it reads format %d: run a newer meshd", ErrUndecodable, snap.Format, snapshotFormat)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read snapshot: %w: something follows it", ErrUndecodable)
	}
	s := snap.State
	if slices.Contains([]bool{
		s.Nodes == nil, s.Removed == nil, s.Tokens == nil, s.Seats == nil, s.Modules == nil, s.Everywhere == nil, s.Assignments == nil,
		s.Bindings == nil, s.Resources == nil, s.Withdrawals == nil, s.Providers == nil, s.Parts == nil,
		s.Sessions == nil, s.Former == nil,
	}, true) {
		return nil, fmt.Errorf("read snapshot: %w: a part of it is null", ErrUndecodable)
	}
	return s, nil
}
