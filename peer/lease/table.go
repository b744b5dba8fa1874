package lease

import (
	"errors"
	"maps"
	"sync"
	"time"
)

// mostListed is how many claims are kept before those that have run out are dropped.
const mostListed = 4096

// ErrNotLeading says that this node grants nothing: it does not lead, or has not
// taken over yet.
var ErrNotLeading = errors.New("this node does not lead, or not yet")

// ErrClosing says that a session is being closed: its node gets a new one.
var ErrClosing = errors.New("the session is being closed")

// Claim is a seat under an epoch.
type Claim struct {
	Seat  string
	Epoch uint64
}

// Table is what a leader remembers of the leases that it and its predecessors
// granted. It belongs to a node for its life; Lead begins a leadership.
//
// Its instants are those of time.Now, which stands still while the machine is
// suspended: a wait is then too long, never too short.
type Table struct {
	mu      sync.Mutex
	term    uint64               // in which this node grants, 0 for none
	floor   time.Time            // until then a predecessor may have listed anything to anybody
	until   map[uint64]time.Time // by session: it may have a lease until then
	seen    map[uint64]time.Time // by session: newest renewal in this term
	closing map[uint64]bool      // by session, for the rest of the term
	listed  map[Claim]time.Time  // it may be held until then
	held    map[string]bool      // seats that are not listed any more: they are being moved
	vouched time.Time            // newest election of this node, or arrival of a renewal that it confirmed, in any term
}

// Lead begins to grant in a term. Until vouched another leader may have granted
// leases; open are the sessions that are open, with the time that theirs last. The
// election is evidence for the leaders after this one: the voters that elected it may
// not be voters any more when it is asked for.
func (t *Table) Lead(term uint64, elected, vouched time.Time, open map[uint64]time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.vouched = later(t.vouched, elected)
	t.term, t.floor = term, time.Time{}
	t.until, t.seen, t.closing = map[uint64]time.Time{}, map[uint64]time.Time{}, map[uint64]bool{}
	t.listed, t.held = map[Claim]time.Time{}, map[string]bool{}
	for session, ttl := range open {
		t.until[session] = vouched.Add(Wait(ttl))
		t.floor = later(t.floor, t.until[session])
	}
}

// Stop ends the granting.
func (t *Table) Stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.term = 0
}

// Term is the term in which this node grants, 0 for none.
func (t *Table) Term() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.term
}

// grants reports whether this node grants in the term; none is not one. mu is held.
func (t *Table) grants(term uint64) bool { return term != 0 && t.term == term }

// Vouched is the newest instant at which this node was a leader itself, as its
// election and the renewals that it confirmed show, whatever it led in. Zero for none.
func (t *Table) Vouched() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.vouched
}

// Promise notes, before anything is promised, that a session whose renewal arrived at
// an instant may have a lease. The leadership must then be proven since that instant.
func (t *Table) Promise(term, session uint64, arrived time.Time, ttl time.Duration) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !t.grants(term):
		return ErrNotLeading
	case t.closing[session]:
		return ErrClosing
	}
	t.seen[session] = later(t.seen[session], arrived)
	t.until[session] = later(t.until[session], arrived.Add(Wait(ttl)))
	return nil
}

// List says what a promised session is granted. leads must tell whether this node
// leads in the term still; named reads from the state what it names the session for,
// and must see every entry that any earlier reader has seen.
func (t *Table) List(term, session uint64, arrived time.Time, ttl time.Duration, leads func() bool, named func() map[string]uint64) (map[string]uint64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.vouched = later(t.vouched, arrived) // before the last look: the next leader may ask in between
	switch {
	case !t.grants(term) || !leads():
		return nil, ErrNotLeading
	case t.closing[session]:
		return nil, ErrClosing
	}
	if len(t.listed) > mostListed {
		maps.DeleteFunc(t.listed, func(_ Claim, until time.Time) bool { return until.Before(arrived) })
	}
	granted := map[string]uint64{}
	for seat, epoch := range named() {
		if t.held[seat] {
			continue
		}
		granted[seat] = epoch
		c := Claim{seat, epoch}
		t.listed[c] = later(t.listed[c], arrived.Add(Wait(ttl)))
	}
	return granted, nil
}

// Close decides that a session is to be closed if its lease cannot be valid any
// more. It is final for the term: no renewal of it is confirmed from then on. One
// that was opened in this term, and has not been renewed yet, gets the time of a
// lease to do so.
func (t *Table) Close(term, session uint64, ttl time.Duration, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.grants(term) {
		return false
	}
	until, known := t.until[session]
	if !known {
		until = now.Add(Wait(ttl))
		t.until[session] = until
	}
	if !now.After(until) {
		return false
	}
	t.closing[session] = true
	return true
}

// Surrender closes a session whose node has let go of everything and stops.
func (t *Table) Surrender(term, session uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.grants(term) {
		return false
	}
	t.closing[session] = true
	return true
}

// Renewed is when the session was renewed last in this term, zero for never.
func (t *Table) Renewed(session uint64) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.seen[session]
}

// Withhold lists a seat no more, so that its claim runs out: see Over. Offer ends it.
func (t *Table) Withhold(seat string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.term != 0 {
		t.held[seat] = true
	}
}

// Offer lists a seat again.
func (t *Table) Offer(seat string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.held, seat)
}

// Over reports whether nobody can hold a claim any more. One that the state names is
// not over while it is listed: see Withhold.
func (t *Table) Over(term uint64, c Claim, named bool, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.grants(term) && (!named || t.held[c.Seat]) && now.After(t.floor) && now.After(t.listed[c])
}

// Excuse gives every lease so much longer: this process was stopped for so long, and
// nobody could renew with it.
func (t *Table) Excuse(gap time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for session, until := range t.until {
		t.until[session] = until.Add(gap)
	}
	t.floor = t.floor.Add(gap)
}

// Next is the first instant at which one of the sessions may be closed, or zero.
func (t *Table) Next(sessions []uint64) (next time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range sessions {
		if at := t.until[s]; !t.closing[s] && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
