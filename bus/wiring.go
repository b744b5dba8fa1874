package bus

import (
	"cmp"
	"fmt"
	"net"
	"regexp"
	"slices"
)

// wiring is the part of a layout that the server itself enforces: routes, pins, users and what these
// may say. It is a pure function of the layout, sorted, so that two of them can be compared.
type wiring struct {
	routes []string // host:port to dial
	pins   []string // keys that may form a route, in either direction
	users  []user
}

// user is one nkey and its allow lists. Neither list is ever empty: NATS takes an empty list of
// subscriptions for permission to subscribe to everything.
type user struct {
	key       string
	name      string
	publish   []string
	subscribe []string
}

// wire derives the wiring of the node (id, name) from the layout.
func wire(id, name string, l Layout) wiring {
	var w wiring
	for _, p := range l.Peers {
		w.pins = append(w.pins, p.Pin)
		if p.ID < id && p.Addr != "" {
			// One side dials. When both do, NATS closes the duplicate and waits a second.
			w.routes = append(w.routes, p.Addr)
		}
	}
	for _, m := range l.Modules {
		w.users = append(w.users, m.user(name))
	}
	for _, o := range l.Operators {
		w.users = append(w.users, o.user(name))
	}
	slices.Sort(w.routes)
	slices.Sort(w.pins)
	slices.SortFunc(w.users, func(a, b user) int { return cmp.Compare(a.key, b.key) })
	return w
}

func (m Module) user(node string) user {
	caller := Caller{Node: node, Assignment: m.Assignment}
	publish := []string{replies(node, m.Assignment) + ".>"}
	for _, t := range m.Calls {
		publish = append(publish, t.CallSubject(caller))
	}
	slices.Sort(publish)
	return user{
		key: m.PublicKey, name: m.Assignment,
		publish:   slices.Compact(publish),
		subscribe: []string{Inbox(node, m.Assignment) + ".>", Private(node, m.Assignment) + ".>"},
	}
}

func (o Operator) user(node string) user {
	publish := []string{OperatorCalls(node, o.Name) + ".>"}
	for _, verb := range []string{"INFO", "PING", "STATS"} {
		publish = append(publish, "$SRV."+verb, "$SRV."+verb+".>")
	}
	return user{
		key: o.PublicKey, name: operatorLabel(o.Name),
		publish:   publish,
		subscribe: []string{OperatorInbox(node, o.Name) + ".>"},
	}
}

// meshdUsers are the two identities of meshd. Their keys live in this process, are new at each start,
// and are accepted only from inside it. In MESH it may say anything; in MOD only what it has to, so
// that no reply subject made up by a module can lead it elsewhere.
func meshdUsers(node, meshKey, modKey string) (mesh, mod user) {
	mesh = user{key: meshKey, name: "meshd", publish: []string{">"}, subscribe: []string{">"}}
	mod = user{
		key: modKey, name: "meshd",
		publish:   []string{"_I." + node + ".>", "_O.>", "m." + node + ".>"},
		subscribe: []string{"call." + node + ".>", "r." + node + ".>", "$SRV.>"},
	}
	return mesh, mod
}

var pinPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

func checkPin(pin string) error {
	if pinPattern.MatchString(pin) {
		return nil
	}
	return fmt.Errorf("pin %q is not 64 lower-case hex digits (SHA-256 of the public key)", pin)
}

func checkAddr(addr string) error {
	if addr == "" {
		return nil
	}
	if _, port, err := net.SplitHostPort(addr); err != nil || port == "" {
		return fmt.Errorf("address %q is not host:port", addr)
	}
	return nil
}
