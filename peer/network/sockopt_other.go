//go:build !linux

package network

import (
	"syscall"
	"time"
)

// setUserTimeout does nothing where the kernel has no TCP_USER_TIMEOUT: keep-alive finds a dead
// peer there, some seconds later.
func setUserTimeout(syscall.RawConn, time.Duration) error { return nil }
