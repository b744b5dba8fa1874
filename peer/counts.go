package peer

import "time"

// Counts is what a node measures of its seats, for whoever watches it.
type Counts struct {
	Held        map[string]uint64 // epoch by seat that it may answer now
	LeaseLeft   time.Duration     // of those; 0 where it holds none
	Differences int               // between who answers and who is named, by its last comparison
}

// Counts reads them. It asks nobody.
func (n *Peer) Counts() Counts {
	c := Counts{Differences: n.observed.differences()}
	c.Held, c.LeaseLeft = n.leases.gate.Holding()
	return c
}
