package api

import (
	"net"
	"os/user"
	"strconv"

	"golang.org/x/sys/unix"
)

// callerOf names the user at the other end of c, as the kernel knows it
// (SO_PEERCRED, unix(7)): "root", or "uid 1234" for one without a name.
func callerOf(c *net.UnixConn) (string, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return "", err
	}
	var cred *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) { cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err != nil {
		return "", err
	}
	if failed != nil {
		return "", failed
	}
	uid := strconv.FormatUint(uint64(cred.Uid), 10)
	if u, err := user.LookupId(uid); err == nil {
		return u.Username, nil
	}
	return "uid " + uid, nil
}
