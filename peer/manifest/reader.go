package manifest

import (
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"meshd/raftfsm"
)

// reader turns values into documents. It never stops at a fault.
type reader struct {
	docs   raftfsm.Documents
	faults Faults
	places map[string]place // by path, for Position
	seen   map[string]place // what may be described once, such as "module shop"
	later  []func()         // checks that need all documents
	read   int              // documents so far
}

func (r *reader) report(at place, rule, suggestion string) {
	r.faults = append(r.faults, Fault{at.file, at.line, at.col, rule, suggestion})
}

// once refuses a second description of a thing.
func (r *reader) once(what string, at place) {
	if first, twice := r.seen[what]; twice {
		r.report(at, fmt.Sprintf("%s is described twice, first in %s:%d", what, first.file, first.line), "keep one of the two")
		return
	}
	r.seen[what] = at
}

// take reads one value; path is where it is, for Position and for its name in a
// fault. What it reads into was given when it was made.
type take func(v value, path string)

// label names the value in a fault by the key that it stands under.
func label(path string) string {
	i := strings.LastIndexByte(path, '/')
	last := path[i+1:]
	if _, err := strconv.Atoi(last); err == nil && i > 0 {
		return "an entry of " + label(path[:i])
	}
	return strconv.Quote(clip(last))
}

// is checks the sort of a value, and says what was wanted where it is another.
func (r *reader) is(v value, path string, want sort, example string) bool {
	if v.sort == want {
		return true
	}
	got := string(v.sort)
	if v.sort == null {
		got = "empty"
	}
	r.report(v.place(), fmt.Sprintf("%s must be %s, and is %s", label(path), want, got), example)
	return false
}

// mark records where the thing of that path is.
func (r *reader) mark(path string, key place, v value) {
	if v.sort == scalar {
		key = v.place()
	}
	r.places[path] = key
}

// keys reads a map whose keys are given, each by its own take.
func (r *reader) keys(v value, path, example string, known map[string]take) {
	if !r.is(v, path, mapping, example) {
		return
	}
	for _, e := range v.entries {
		one, ok := known[e.key]
		if !ok {
			r.report(e.at, fmt.Sprintf("unknown key %q", clip(e.key)), didYouMean(e.key, slices.Sorted(maps.Keys(known))))
			continue
		}
		r.mark(path+"/"+e.key, e.at, e.value)
		one(e.value, path+"/"+e.key)
	}
}

// each reads a map whose keys are names of the user's choice. check returns the
// rule that a key breaks, or "".
func (r *reader) each(v value, path, example string, check func(key string) (rule, suggestion string), one func(key string, v value, path string)) {
	if !r.is(v, path, mapping, example) {
		return
	}
	for _, e := range v.entries {
		if rule, suggestion := check(e.key); rule != "" {
			r.report(e.at, rule, suggestion)
			continue
		}
		r.mark(path+"/"+e.key, e.at, e.value)
		one(e.key, e.value, path+"/"+e.key)
	}
}

// listOf reads a list of texts, each with the take that one makes for it.
func (r *reader) listOf(into *[]string, example string, one func(into *string) take) take {
	return func(v value, path string) {
		if !r.is(v, path, list, example) {
			return
		}
		for i, item := range v.items {
			at := fmt.Sprintf("%s/%d", path, i)
			r.places[at] = item.place()
			var s string
			one(&s)(item, at)
			*into = append(*into, s)
		}
	}
}

// setOf is listOf with every text at most once.
func (r *reader) setOf(into *[]string, example string, one func(into *string) take) take {
	return func(v value, path string) {
		r.listOf(into, example, one)(v, path)
		for i, item := range v.items {
			if item.text != "" && slices.ContainsFunc(v.items[:i], func(o value) bool { return o.text == item.text }) {
				r.report(item.place(), fmt.Sprintf("%q is in the list twice", clip(item.text)), "keep one of the two")
			}
		}
	}
}

// text reads a text that is not empty.
func (r *reader) text(into *string) take {
	return func(v value, path string) {
		if !r.is(v, path, scalar, "") {
			return
		}
		if v.text == "" {
			r.report(v.place(), label(path)+" is empty", "leave the key out, or write a value")
		}
		*into = v.text
	}
}

// rule reads a text that follows a rule; check returns what is wrong, or "".
func (r *reader) rule(into *string, check func(text string) (rule, suggestion string)) take {
	return func(v value, path string) {
		before := len(r.faults)
		if r.text(into)(v, path); len(r.faults) > before {
			return
		}
		if rule, suggestion := check(v.text); rule != "" {
			r.report(v.place(), strings.ReplaceAll(rule, "KEY", label(path)), suggestion)
		}
	}
}

// named checks a name by the one rule for names; what says what it names.
func named(what string) func(string) (string, string) {
	return func(name string) (string, string) {
		if rejection := raftfsm.CheckName(what, name); rejection != nil {
			return rejection.Text, ""
		}
		return "", ""
	}
}

func (r *reader) name(into *string, what string) take { return r.rule(into, named(what)) }

func (r *reader) names(into *[]string, what string) take {
	return r.setOf(into, "write [NAME, ...]", func(into *string) take { return r.name(into, what) })
}

// assignment reads the name of an assignment: its `as:`, or MODULE@NODE.
func (r *reader) assignment(into *string) take {
	return r.rule(into, func(name string) (string, string) {
		module, on, at := strings.Cut(name, "@")
		if raftfsm.CheckName("", module) != nil || at && raftfsm.CheckName("", on) != nil {
			return fmt.Sprintf("KEY names an assignment, and %q cannot be one", clip(name)), "write its as: NAME, or MODULE@NODE"
		}
		return "", ""
	})
}

// oneOf reads one of a few words.
func (r *reader) oneOf(into *string, words ...string) take {
	return r.rule(into, func(text string) (string, string) {
		if slices.Contains(words, text) {
			return "", ""
		}
		suggestion := ""
		if near := nearest(text, words); near != "" {
			suggestion = fmt.Sprintf("did you mean %q?", near)
		}
		return fmt.Sprintf("KEY must be %s, and is %q", or(words), clip(text)), suggestion
	})
}

// flag reads true or false.
func (r *reader) flag(into *bool) take {
	return func(v value, path string) {
		var word string
		r.oneOf(&word, "true", "false")(v, path)
		*into = word == "true"
	}
}

// longest bounds durations: a longer one is a slip of the unit.
const longest = 24 * time.Hour

func (r *reader) duration(into *time.Duration) take {
	return func(v value, path string) {
		var text string
		r.rule(&text, func(text string) (string, string) {
			d, err := time.ParseDuration(text)
			if _, number := strconv.Atoi(text); number == nil {
				return fmt.Sprintf("KEY is a duration, and %s has no unit", clip(text)), fmt.Sprintf("write %ss for seconds", clip(text))
			} else if err != nil {
				return fmt.Sprintf("KEY must be a duration, and is %q", clip(text)), "write one such as 500ms, 5s or 2m"
			}
			if d <= 0 || d > longest {
				return fmt.Sprintf("KEY must be more than 0 and at most 24h, and is %s", clip(text)), ""
			}
			*into = d
			return "", ""
		})(v, path)
	}
}

// count reads a whole number.
func (r *reader) count(into *int64, least, most int64) take {
	return func(v value, path string) {
		var text string
		r.rule(&text, func(text string) (string, string) {
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil || n < least || n > most {
				return fmt.Sprintf("KEY must be a whole number from %d to %d, and is %q", least, most, clip(text)), ""
			}
			*into = n
			return "", ""
		})(v, path)
	}
}

// command reads a program and its arguments. They are not quoted in a fault.
func (r *reader) command(into *[]string) take {
	const example = "write [PROGRAM, ARGUMENT, ...]"
	return func(v value, path string) {
		r.listOf(into, example, func(into *string) take {
			return func(v value, path string) {
				if r.is(v, path, scalar, example) {
					*into = v.text
				}
			}
		})(v, path)
		if v.sort != list {
			return
		}
		if len(v.items) == 0 || v.items[0].sort == scalar && v.items[0].text == "" {
			r.report(v.place(), label(path)+" names no program", example)
		} else if program := v.items[0].text; strings.Contains(program, "/") && !filepath.IsAbs(program) {
			r.report(v.items[0].place(), "the program is a relative path", "write an absolute path, or a name without a slash to look up in PATH")
		}
	}
}

// fileReference reads file:/PATH.
func (r *reader) fileReference(into *string, why string) take {
	return r.rule(into, func(text string) (string, string) {
		path, ok := strings.CutPrefix(text, "file:")
		if !ok {
			return "KEY must name a file: " + why, "write file:/PATH, with the path of the file on the provider's node"
		}
		if !filepath.IsAbs(path) {
			return "KEY must name a file by an absolute path", "write file:/PATH"
		}
		return "", ""
	})
}

// variable is the rule for names of environment variables: POSIX's, XBD 8.1,
// and lower case too, which programs use.
var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

// env reads environment variables, whose values may be templates.
func (r *reader) env(into *map[string]string) take {
	check := func(key string) (string, string) {
		switch {
		case !variable.MatchString(key):
			return fmt.Sprintf("%q cannot name an environment variable: a name is 1 to 128 letters, digits and _, and begins with no digit", clip(key)), ""
		case key == "SERVICE_BINDING_ROOT" || strings.HasPrefix(key, "MESHD_"):
			return key + " is set by the mesh", "choose another name"
		}
		return "", ""
	}
	return func(v value, path string) {
		r.each(v, path, "write {NAME: VALUE, ...}", check, func(key string, v value, path string) {
			if r.is(v, path, scalar, `write "" for a variable that is empty`) {
				put(into, key, v.text)
			}
		})
	}
}

// put makes the map when it has its first entry: an empty one is no map, so that
// what a push says and what the log says compare equal.
func put[V any](into *map[string]V, key string, v V) {
	if *into == nil {
		*into = map[string]V{}
	}
	(*into)[key] = v
}

func badName(name string) bool { return raftfsm.CheckName("", name) != nil }
