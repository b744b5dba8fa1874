package lease

import (
	"time"

	"golang.org/x/sys/unix"
)

// Boottime is CLOCK_BOOTTIME: time.Now counts no suspend (golang/go#24595). The
// kernel has it since 2.6.39, so that reading it cannot fail.
func Boottime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic("read CLOCK_BOOTTIME: " + err.Error())
	}
	return time.Duration(t.Nano())
}
