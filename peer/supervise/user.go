package supervise

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// User is who a process runs as and whom its bindings belong to.
type User struct {
	Name   string
	Home   string
	UID    int
	GID    int
	Groups []int // supplementary ones
}

// LookupUser finds a user of this machine; "" is the one that we run as. When we
// are not root, any other user is refused.
func LookupUser(name string) (User, error) {
	u, err := lookup(name)
	if err != nil {
		return User{}, &fault{UserUnknown, err}
	}
	if os.Geteuid() != 0 && u.UID != os.Geteuid() {
		return User{}, faultf(UserRefused,
			"run as user %q: refused: this meshd runs as user id %d, and only root can run a process as another user; run meshd as root, or leave the user out",
			name, os.Geteuid())
	}
	return u, nil
}

func lookup(name string) (User, error) {
	if name == "" {
		u := User{UID: os.Geteuid(), GID: os.Getegid(), Home: "/"}
		// An id without a name is fine for a container's user.
		if found, err := user.LookupId(strconv.Itoa(u.UID)); err == nil {
			u.Name, u.Home = found.Username, found.HomeDir
		}
		return u, nil
	}
	found, err := user.Lookup(name)
	if err != nil {
		return User{}, fmt.Errorf("look up user %q: %w; make it, or name another one", name, err)
	}
	u := User{Name: found.Username, Home: found.HomeDir}
	if u.UID, err = strconv.Atoi(found.Uid); err != nil {
		return User{}, fmt.Errorf("look up user %q: %w", name, err)
	}
	if u.GID, err = strconv.Atoi(found.Gid); err != nil {
		return User{}, fmt.Errorf("look up user %q: %w", name, err)
	}
	groups, err := found.GroupIds()
	if err != nil {
		return User{}, fmt.Errorf("look up the groups of user %q: %w", name, err)
	}
	for _, g := range groups {
		gid, err := strconv.Atoi(g)
		if err != nil {
			return User{}, fmt.Errorf("look up the groups of user %q: %w", name, err)
		}
		u.Groups = append(u.Groups, gid)
	}
	return u, nil
}

// credential is nil when no change of user is needed, which also is the only
// case in which we may not be root.
func (u User) credential() *syscall.Credential {
	if u.UID == os.Geteuid() {
		return nil
	}
	c := &syscall.Credential{Uid: uint32(u.UID), Gid: uint32(u.GID)}
	for _, g := range u.Groups {
		c.Groups = append(c.Groups, uint32(g))
	}
	return c
}
