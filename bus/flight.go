package bus

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// lastWord is how long an answer, or a word that the call has not run, may be on its way after the log
// has named another holder: a release, and a way through the mesh.
const lastWord = 250 * time.Millisecond

// flights are the requests to holders of mesh seats that are under way. Without them a caller whose
// holder has died would wait for an answer until its own deadline, when the mesh has known for long that
// none can come.
type flights struct {
	mu    sync.Mutex
	under map[*flight]struct{}
}

type flight struct {
	seat   string
	epoch  uint64 // of the holder that was asked
	landed bool
	cancel context.CancelCauseFunc
}

// begin is called before a holder is asked, and end when that is over.
func (f *flights) begin(ctx context.Context, seat string, epoch uint64) (_ context.Context, end func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	fl := &flight{seat: seat, epoch: epoch, cancel: cancel}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.under == nil {
		f.under = map[*flight]struct{}{}
	}
	f.under[fl] = struct{}{}
	return ctx, func() {
		f.mu.Lock()
		delete(f.under, fl)
		f.mu.Unlock()
		cancel(nil)
	}
}

// land ends, after lastWord, those whose holder cannot answer any more: the log has another, or none.
func (f *flights) land(d Directory) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for fl := range f.under {
		seat, ok := d.Seats[fl.seat]
		var why error
		switch {
		case fl.landed:
			continue
		case !ok:
			why = fmt.Errorf("the mesh has no seat %s any more", fl.seat)
		case seat.Holder.Epoch > fl.epoch:
			why = fmt.Errorf("the log names %v now", seat.Holder)
		case seat.Dark != "":
			why = fmt.Errorf("seat %s is dark now: %s", fl.seat, seat.Dark)
		default:
			continue
		}
		fl.landed = true
		time.AfterFunc(lastWord, func() { fl.cancel(why) })
	}
}
