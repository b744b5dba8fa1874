package manifest

import (
	"fmt"
	"maps"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"meshd/raftfsm"
)

func (r *reader) module(v value) {
	var m raftfsm.Module
	path := "module/" + v.entries[0].value.text
	r.keys(v, path, "", map[string]take{
		"module": func(v value, _ string) {
			r.name(&m.Name, "module")(v, "module")
			r.places[path] = v.place()
			r.once("module "+clip(m.Name), v.place())
		},
		"run":          r.run(&m.Run),
		"claims":       r.names(&m.Claims, "seat"),
		"provides":     r.provides(&m.Provides),
		"requires":     r.requires(&m.Requires),
		"calls":        r.calls(&m.Calls),
		"tools":        r.handlers(&m.Tools, "tool"),
		"serves":       r.serves(&m.Serves),
		"env":          r.env(&m.Env),
		"health":       r.health(&m.Health),
		"limits":       r.limits(&m.Limits),
		"on-rotate":    r.onRotate(&m.OnRotate),
		"ready-within": r.duration(&m.ReadyWithin),
		"stop-timeout": r.duration(&m.StopGrace),
	})
	r.docs.Modules = append(r.docs.Modules, m)
	r.environment(v, m, true)
	r.external(v, m)
	r.builtins(v, m)
}

// environment checks the templates of a document's env against the module.
// With known false its requirements are not known, and any name is good.
func (r *reader) environment(doc value, m raftfsm.Module, known bool) {
	missing := ""
	if known {
		missing = "the module has no requirement %q"
	}
	env, _ := doc.entry("env")
	for _, e := range env.value.entries {
		if r.template(e.value, slices.Sorted(maps.Keys(m.Requires)), missing) && m.OnRotate != "" && m.OnRotate != "restart" {
			r.report(e.value.place(), fmt.Sprintf("a credential in the environment reaches a running program by a restart only, and module %s has on-rotate: %s", m.Name, m.OnRotate),
				"write on-rotate: restart, or read the credential from its file below SERVICE_BINDING_ROOT")
		}
	}
}

// external refuses, on a module of which the mesh starts no process, what would
// have no effect.
func (r *reader) external(doc value, m raftfsm.Module) {
	if run, ok := doc.entry("run"); !m.Run.External() || ok && !isExternal(run.value) {
		return // a faulty run: says so itself
	}
	for _, key := range []string{"env", "health", "limits", "on-rotate", "stop-timeout"} {
		if e, ok := doc.entry(key); ok && !(key == "on-rotate" && m.OnRotate == "none") {
			r.report(e.at, fmt.Sprintf("%q has no effect on a module that the mesh does not start", key), "leave it out, or say how it is started: run: {exec: [PROGRAM]}")
		}
	}
}

func isExternal(run value) bool {
	e, ok := run.entry("external")
	return ok && e.value.text == "true"
}

// builtins refuses a handler by the provisioner of a kind that the module does
// not provide.
func (r *reader) builtins(doc value, m raftfsm.Module) {
	check := func(handlers value) {
		for _, h := range handlers.entries {
			e, ok := h.value.entry("builtin")
			if _, provided := m.Provides[e.value.text]; ok && e.value.text != "" && !provided {
				r.report(e.value.place(), fmt.Sprintf("builtin: %s answers only in a module that provides %[1]s", clip(e.value.text)), didYouMean(e.value.text, slices.Sorted(maps.Keys(m.Provides))))
			}
		}
	}
	tools, _ := doc.entry("tools")
	check(tools.value)
	serves, _ := doc.entry("serves")
	for _, seat := range serves.value.entries {
		check(seat.value)
	}
}

// userName is what useradd takes, and a numeric id.
var userName = regexp.MustCompile(`^([a-z_][a-z0-9_-]{0,31}|[0-9]{1,10})$`)

func (r *reader) run(into *raftfsm.Run) take {
	const ways = "write run: {exec: [PROGRAM, ARGUMENT, ...]}, or run: {external: true}"
	return func(v value, path string) {
		var external bool
		r.keys(v, path, ways, map[string]take{
			"exec":     r.command(&into.Exec),
			"external": r.flag(&external),
			"user": r.rule(&into.User, func(text string) (string, string) {
				if !userName.MatchString(text) {
					return fmt.Sprintf("%q cannot name a user", clip(text)), ""
				}
				return "", ""
			}),
			"dir": r.rule(&into.Dir, func(text string) (string, string) {
				if !strings.HasPrefix(text, "/") {
					return "KEY must be an absolute path", ""
				}
				return "", ""
			}),
			"container": func(v value, _ string) {
				r.report(v.place(), "this version does not start containers", "start it with your engine and write run: {external: true}")
			},
		})
		_, exec := v.entry("exec")
		_, container := v.entry("container")
		switch {
		case v.sort != mapping || container:
		case exec && external:
			r.report(v.place(), "run has exec and external: true", "keep one of the two")
		case !exec && !external:
			r.report(v.place(), "run says no way to start the module", ways)
		case external && into.Dir != "":
			e, _ := v.entry("dir")
			r.report(e.at, `"dir" has no effect on a module that the mesh does not start`, "leave it out")
		}
	}
}

// modes are the words of tls:, as package provision has them.
func modes() []string { return []string{"verify-full", "require", "off"} }

func (r *reader) provides(into *map[string]raftfsm.Provide) take {
	return func(v value, path string) {
		r.each(v, path, `write {KIND: {admin: file:/PATH, address: "HOST:PORT"}}`, named("kind"), func(kind string, v value, path string) {
			var p raftfsm.Provide
			if v.sort != null { // an embedded kind needs nothing said
				r.provide(&p)(v, path)
			}
			put(into, kind, p)
		})
	}
}

// provide reads one provision. Keys other than its own are the kind's, which
// only the provider's node knows, so they are checked there.
func (r *reader) provide(into *raftfsm.Provide) take {
	return func(v value, path string) {
		var admin string
		known := map[string]take{
			"address": r.address(&into.Address),
			"tls":     r.oneOf(&into.TLS, modes()...),
			"ca":      r.fileReference(&into.CA, "the certificates of the authority, as PEM"),
			"admin":   r.fileReference(&admin, "a credential in the manifest would be in the log of every node"),
		}
		for _, e := range v.entries {
			// An option one slip away from a key of ours would pass for the
			// kind's. tls and ca are too short to tell a slip from a word.
			if _, ours := known[e.key]; ours || nearest(e.key, []string{"address", "admin"}) != "" || badName(e.key) {
				continue
			}
			known[e.key] = func(v value, path string) {
				if r.is(v, path, scalar, "") {
					put(&into.Options, e.key, v.text)
				}
			}
		}
		r.keys(v, path, "write {address: \"HOST:PORT\", ...}", known)
		if admin != "" {
			put(&into.Options, "admin", admin)
		}
	}
}

// address reads host:port, a template over the node.
func (r *reader) address(into *string) take {
	return func(v value, path string) {
		before := len(r.faults)
		r.text(into)(v, path)
		if r.template(v, nil, "an address knows the node only, not %q"); len(r.faults) > before {
			return
		}
		text, err := Render(v.text, map[string]map[string]string{node: {"address": "node.example", "name": "node"}})
		if err != nil || !hostPort(text) {
			r.report(v.place(), label(path)+" must be HOST:PORT", `write one such as "{{ .node.address }}:5432"`)
		}
	}
}

func hostPort(text string) bool {
	host, port, err := net.SplitHostPort(text)
	return err == nil && host != "" && portNumber(port)
}

func (r *reader) requires(into *map[string]raftfsm.Requirement) take {
	check := func(name string) (string, string) {
		if name == node {
			return `a requirement cannot be named "node": in templates that is the machine`, "choose another name"
		}
		return named("requirement")(name)
	}
	return func(v value, path string) {
		r.each(v, path, "write {NAME: {kind: KIND}}", check, func(name string, v value, path string) {
			var q raftfsm.Requirement
			r.keys(v, path, "write {kind: KIND}", map[string]take{
				"kind":     r.name(&q.Kind, "kind"),
				"provider": r.assignment(&q.Provider),
				"node":     r.name(&q.Node, "node"),
				"proof":    r.oneOf(&q.Proof, raftfsm.ProofLogin, raftfsm.ProofHealth, raftfsm.ProofDelivered),
			})
			if _, ok := v.entry("kind"); !ok && v.sort == mapping {
				r.report(v.place(), fmt.Sprintf("requirement %s says no kind", name), "write {kind: KIND}")
			}
			_, provider := v.entry("provider")
			if e, ok := v.entry("node"); ok && provider {
				r.report(e.at, fmt.Sprintf("requirement %s names both a provider and a node", name), "keep one of the two")
			}
			put(into, name, q)
		})
	}
}

func (r *reader) calls(into *[]string) take {
	return r.setOf(into, "write [SEAT.VERB, ...]", func(into *string) take {
		return r.rule(into, func(text string) (string, string) {
			if _, ok := raftfsm.ParseTarget(text); !ok {
				return fmt.Sprintf("%q is nothing to call", clip(text)), "write SEAT.VERB, NODE/SEAT.VERB or NODE/MODULE.TOOL"
			}
			return "", ""
		})
	})
}

func (r *reader) serves(into *map[string]map[string]raftfsm.Handler) take {
	return func(v value, path string) {
		r.each(v, path, "write {SEAT: {VERB: {exec: [PROGRAM]}}}", named("seat"), func(seat string, v value, path string) {
			var verbs map[string]raftfsm.Handler
			r.handlers(&verbs, "verb")(v, path)
			put(into, seat, verbs)
		})
	}
}

func (r *reader) handlers(into *map[string]raftfsm.Handler, what string) take {
	return func(v value, path string) {
		r.each(v, path, "write {NAME: {exec: [PROGRAM]}}", named(what), func(name string, v value, path string) {
			var h raftfsm.Handler
			r.handler(&h)(v, path)
			put(into, name, h)
		})
	}
}

func (r *reader) handler(into *raftfsm.Handler) take {
	return func(v value, path string) {
		r.keys(v, path, "write {exec: [PROGRAM]}", map[string]take{
			"exec": r.command(&into.Exec),
			"http": r.rule(&into.HTTP, func(text string) (string, string) { return webAddress(text, true) }),
			"bus": func(v value, path string) {
				if r.flag(&into.Bus)(v, path); v.text == "false" {
					r.report(v.place(), "bus: false says nothing", "leave it out")
				}
			},
			"builtin": r.name(&into.Builtin, "kind"),
		})
		r.exactlyOne(v, path, "exec", "http", "bus", "builtin")
	}
}

// exactlyOne refuses a map that has none or several of the keys.
func (r *reader) exactlyOne(v value, path string, keys ...string) {
	var has []string
	for _, e := range v.entries {
		if slices.Contains(keys, e.key) {
			has = append(has, e.key)
		}
	}
	switch {
	case v.sort != mapping || len(has) == 1:
	case len(has) == 0:
		r.report(v.place(), fmt.Sprintf("%s has none of %s", label(path), and(keys)), "write exactly one")
	default:
		r.report(v.place(), fmt.Sprintf("%s has %s", label(path), and(has)), "keep exactly one of them")
	}
}

// webAddress checks an http or https URL, and with loopback that it leads to
// this machine. The URL is not quoted: its query may hold a secret.
func webAddress(text string, loopback bool) (rule, suggestion string) {
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Port() != "" && !portNumber(u.Port()):
		return "KEY must be a URL", "write one such as http://127.0.0.1:8080/path"
	case u.User != nil:
		return "KEY has a user in its URL: it would be in the log of every node", "leave it out"
	case u.Fragment != "":
		return "KEY has a fragment in its URL, which is never sent", "leave it out"
	case loopback && u.Hostname() != "localhost" && !net.ParseIP(u.Hostname()).IsLoopback():
		return "KEY must be on loopback: a handler is on the machine that it answers for", "write http://127.0.0.1:PORT/PATH"
	}
	return "", ""
}

// signals are those that programs take as "read your configuration again";
// others would end it.
func signals() []string { return []string{"HUP", "USR1", "USR2", "WINCH"} }

func (r *reader) onRotate(into *string) take {
	return r.rule(into, func(text string) (string, string) {
		name, signal := strings.CutPrefix(text, "signal ")
		if text == "restart" || text == "none" || signal && slices.Contains(signals(), name) {
			return "", ""
		}
		suggestion := "a signal is " + or(signals())
		if short := strings.TrimPrefix(strings.ToUpper(strings.TrimSpace(name)), "SIG"); slices.Contains(signals(), short) {
			suggestion = "write signal " + short
		}
		return fmt.Sprintf("KEY must be restart, none or signal NAME, and is %q", clip(text)), suggestion
	})
}
