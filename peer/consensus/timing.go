package consensus

import (
	"errors"
	"fmt"
	"time"
)

// Timing is how fast a mesh notices and decides. Every node of a mesh must use the same. Nothing is
// unsafe with a wrong one, only slow or restless.
//
// With two survivors an election takes about 2.05 heartbeats (median) to 3 (worst), since votes are
// refused while a follower still believes in its leader.
type Timing struct {
	Heartbeat   time.Duration // a follower that hears nothing for so long campaigns
	Election    time.Duration // a campaign that decides nothing starts again
	LeaderLease time.Duration // a leader that no majority answered for so long steps down
	Beat        time.Duration // a leader lets so long pass between heartbeats, or up to twice that
	Commit      time.Duration // an idle leader repeats its newest entry so often; see Node.spread
	RPC         time.Duration // for one dial or one RPC; a healed link stays stuck for up to this

	// The leases that a leader grants beside the log. They are here because they must fit the
	// heartbeat: a lease must outlive the loss of a leader.
	Lease time.Duration // life of a lease
	Renew time.Duration // how often it is renewed
}

// LAN is the default: machines on one network.
func LAN() Timing {
	return Timing{
		Heartbeat:   400 * time.Millisecond, // elections of 0.8 s; 250 ms saves 0.3 s and trips over busy machines
		Election:    400 * time.Millisecond, // as Heartbeat: a split vote costs one more round
		LeaderLease: 400 * time.Millisecond, // as long as its followers are patient
		Beat:        100 * time.Millisecond, // one may be late; 40 ms cost a leader half a per cent of a core more
		Commit:      500 * time.Millisecond, // a twentieth of the RPCs that 25 ms make; a node that starts hears of the newest entry within twice this
		RPC:         500 * time.Millisecond, // raft's own 10 s keep a healed partition apart for 10 s
		Lease:       1500 * time.Millisecond,
		Renew:       250 * time.Millisecond, // a sixth of the lease: five may be lost
	}
}

// Slow suits machines with SD cards or few, busy cores.
func Slow() Timing {
	return Timing{
		Heartbeat:   time.Second,
		Election:    time.Second,
		LeaderLease: time.Second, // a stalled card must not cost the leadership
		Beat:        200 * time.Millisecond,
		Commit:      500 * time.Millisecond,
		RPC:         2 * time.Second,
		Lease:       3 * time.Second,
		Renew:       500 * time.Millisecond,
	}
}

// WAN suits round trips of up to 150 ms.
func WAN() Timing {
	return Timing{
		Heartbeat:   2 * time.Second,
		Election:    2 * time.Second,
		LeaderLease: time.Second,
		Beat:        200 * time.Millisecond,
		Commit:      500 * time.Millisecond,
		RPC:         2 * time.Second,
		Lease:       6 * time.Second,
		Renew:       time.Second,
	}
}

// Validate reports every rule that the timing breaks.
func (t Timing) Validate() error {
	var faults []error
	fault := func(broken bool, format string, args ...any) {
		if broken {
			faults = append(faults, fmt.Errorf(format, args...))
		}
	}
	fault(t.Heartbeat < 5*time.Millisecond, "heartbeat %v: must be at least 5ms", t.Heartbeat)
	fault(t.Election < t.Heartbeat, "election %v: must not be below the heartbeat %v", t.Election, t.Heartbeat)
	fault(t.LeaderLease > t.Heartbeat, "leader lease %v: must not exceed the heartbeat %v", t.LeaderLease, t.Heartbeat)
	fault(t.LeaderLease < t.Heartbeat/2, "leader lease %v: must be at least half the heartbeat %v", t.LeaderLease, t.Heartbeat)
	fault(t.Beat < time.Millisecond, "beat %v: must be at least 1ms", t.Beat)
	fault(2*t.Beat > t.LeaderLease/2, "beat %v: must be at most a quarter of the leader lease %v, or one that is late ends the leadership",
		t.Beat, t.LeaderLease)
	fault(t.Commit < time.Millisecond, "commit %v: must be at least 1ms", t.Commit)
	fault(t.RPC < t.LeaderLease, "rpc %v: must not be below the leader lease %v", t.RPC, t.LeaderLease)
	fault(t.Lease < 500*time.Millisecond, "lease %v: must be at least 500ms", t.Lease)
	fault(t.Renew <= 0 || t.Renew > t.Lease/4, "renew %v: must be positive and at most a quarter of the lease %v", t.Renew, t.Lease)
	fault(t.Lease-t.Renew < 5*t.Heartbeat/2,
		"lease %v: less renew %v it must be at least 2.5 heartbeats of %v, or losing a leader ends every lease",
		t.Lease, t.Renew, t.Heartbeat)
	return errors.Join(faults...)
}
