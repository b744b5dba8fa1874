// Package lease decides who may answer mesh seats at an instant, and proves it
// without the log.
//
// A node has one lease for all the seats that the log names it for. It renews it
// with the leader every Renew; the leader answers only after a majority of voters
// has acknowledged, in its term, an append that it sent after the renewal arrived.
// Nothing of this is written to a disk.
//
//	node                           leader
//	 sent := its clock
//	 renew ───────────────────────> arrived := its clock
//	                                Table.Promise: no closing before arrived + Wait
//	                                consensus: acknowledged since arrived
//	                                Table.List: what the log names it for
//	 Gate.Grant(sent, ...)   <───── seats and their epochs
//	 open until sent + TTL
//
// The node counts from its own sending and the leader from its own receipt, which
// is later, and waits longer by what their clocks may differ. A leader that takes
// over waits out what its predecessors may have granted: it asks the voters when
// they last vouched for one.
//
// What is promised:
//
//   - Between Enter and a leave without an error this node was the only one that
//     might answer the seat. An epoch is one node's, and of two answers the one that
//     was made later has no smaller epoch.
//   - It holds under kill -9, pauses of any length at any point, partitions of any
//     shape, steps of the wall clock, the loss of leaders and disks that stall.
//
// It depends on this: the clocks of two live machines run at rates that differ by
// Drift at most; and no machine is frozen, clock and all, while the world goes on
// (a virtual machine that is paused or restored so): for that one, until the first
// reply after it has resumed.
//
// What is not promised, since no lease can: that a handler which was paused has no
// effect on something else after its lease has ended. It is given its epoch as a
// fencing token: what it changes must refuse smaller ones, or the verb must be
// idempotent. Nor that a call runs exactly once, nor that a seat is answered
// without a majority of voters.
//
// The protocol and its argument are in docs/decisions/0016-the-lease-protocol.md.
package lease

import "time"

const (
	// Drift is by how much the rates of two live machines' clocks may differ: 1 %,
	// where oscillators stay below 0.02 % and a slewing time service below 0.1 %.
	Drift = 0.01
	// guard is what else the leader allows for, as the steps of a clock's reading.
	guard = 20 * time.Millisecond
	// margin is how long before its end a lease admits no more calls: a call that
	// is admitted then has some hope to end in time.
	margin = 5 * time.Millisecond
)

// Wait is how long after the arrival of a renewal the leader must take the lease
// for valid: the node counts ttl from its sending, with a clock that may be slow by
// Drift beside a leader's that is fast by as much.
func Wait(ttl time.Duration) time.Duration {
	return ttl + time.Duration(float64(ttl)*2*Drift) + guard
}

// Clock reads the time since some instant, on a clock that counts while the machine
// is suspended and that nobody sets.
type Clock func() time.Duration

// Process is what proves things of one process.
type Process struct {
	Clock Clock
	// Lock names the exclusive lock of the data directory that this process holds to
	// its end. Whoever holds it later proves this process dead; no other directory's
	// lock, on this machine or another, may have its name.
	Lock string
}
