// Package manifest turns what a person writes, YAML, into what the mesh agrees
// on, raftfsm.Documents.
//
// The contract:
//
//   - Nothing is ignored. A key that is unknown, a value of the wrong sort, a
//     setting without effect: each is a Fault with file, line and column, the
//     rule that it breaks and what to write instead. All faults of all files are
//     reported at once.
//   - It checks what can be known from the text alone. What depends on the state
//     of the mesh is checked by raftfsm, whose rejections name a path; Position
//     leads from the path back to the line.
//   - A value is its text as written. There is no `yes` that is a bool and no
//     `1.10` that is 1.1.
//   - Everything is bounded: the size of a file, of a document and of all files,
//     the number of documents, the depth. No value that could be a secret is
//     quoted in a fault.
//   - It does no I/O and keeps no state.
//
// The language of templates is here too, because it is checked when a manifest
// is parsed and rendered when a credential is delivered: see Render.
package manifest

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"meshd/raftfsm"
)

// Bounds of the input. The parser's work grows with the square of a document,
// so that each document is parsed alone and has a bound of its own.
const (
	maxFile     = 1 << 20          // bytes; what somebody can be asked to review
	maxAll      = 4 << 20          // bytes; a push is 64 entries of the log at most
	maxDocument = raftfsm.MaxEntry // bytes; one document travels in one entry
)

// Source is one manifest file.
type Source struct {
	Name string // as faults and Position show it
	Data []byte
}

// Manifest is what all the files of one push say.
type Manifest struct {
	Documents raftfsm.Documents // each list in the order of the files
	places    map[string]place  // by path
}

// Parse reads the files. The error is Faults, but for a call without any file.
func Parse(sources ...Source) (Manifest, error) {
	if len(sources) == 0 {
		return Manifest{}, errors.New("parse manifest: no file was given")
	}
	r := &reader{places: map[string]place{}, seen: map[string]place{}}
	var names []string
	left := maxAll
	for _, s := range sources {
		names = append(names, s.Name)
		if left -= len(s.Data); left < 0 {
			r.report(place{s.Name, 1, 1}, fmt.Sprintf("all files of a push together have at most %d MiB", maxAll>>20), "push fewer files at a time")
			break
		}
		r.file(s)
	}
	for _, check := range r.later {
		check()
	}
	if len(r.faults) > 0 {
		inOrder(r.faults, names)
		return Manifest{}, r.faults
	}
	return Manifest{r.docs, r.places}, nil
}

// Position returns where the thing of a rejection's path is written: the value
// of a text, the key of a map or a list, the name of a document. The path is
// like "module/shop/requires/db/provider", "assign/0/bind/db" (the index is that
// of Documents.Assigns) or "seat/store/holder". Where the path itself is not
// written anywhere it is the nearest parent's position; ok is false when there
// is none.
func (m Manifest) Position(path string) (file string, line, col int, ok bool) {
	for path != "" {
		if p, ok := m.places[path]; ok {
			return p.file, p.line, p.col, true
		}
		path = path[:max(strings.LastIndexByte(path, '/'), 0)]
	}
	return "", 0, 0, false
}

// file splits a file into its documents and reads each.
func (r *reader) file(s Source) {
	start := place{s.Name, 1, 1}
	if len(s.Data) > maxFile {
		r.report(start, fmt.Sprintf("the file has %d bytes; a manifest has at most %d (1 MiB)", len(s.Data), maxFile), "split it into several files")
		return
	}
	text := strings.TrimPrefix(string(s.Data), "\ufeff")
	if at, rule := unprintable(text); rule != "" {
		before := text[:at]
		line := strings.LastIndexByte(before, '\n') + 1
		suggestion := "a manifest is UTF-8 text"
		if text[at] == '\t' {
			suggestion = `write spaces; in a text in double quotes, \t`
		}
		r.report(place{s.Name, 1 + strings.Count(before, "\n"), 1 + utf8.RuneCountInString(before[line:])}, rule, suggestion)
		return
	}
	before := r.read
	faults := len(r.faults)
	// The lexer loses count of the lines at CR LF after a comment.
	lines := strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n")
	first := 0
	for i := range lines {
		if end := i + 1; end == len(lines) || separator(lines[end]) {
			r.document(&document{file: s.Name, first: first + 1, lines: lines[first:end], report: r.report})
			first = end
		}
	}
	if r.read == before && len(r.faults) == faults {
		r.report(start, "the file has no document", "begin one with seat:, module: or assign:")
	}
}

// separator says whether a line begins a document. In YAML such a line does so
// even inside a quoted or a block text.
func separator(line string) bool {
	rest, ok := strings.CutPrefix(line, "---")
	return ok && (rest == "" || rest[0] == ' ')
}

// unprintable finds the first byte that no text has, and says which it is.
func unprintable(s string) (at int, rule string) {
	for i, c := range s {
		switch {
		case c == utf8.RuneError:
			if _, size := utf8.DecodeRuneInString(s[i:]); size == 1 {
				return i, "the file is not UTF-8"
			}
		case c == '\r' && !strings.HasPrefix(s[i:], "\r\n"):
			return i, "a carriage return ends no line by itself"
		case c == '\t': // it cannot indent, and the lexer drops those in a plain text
			return i, "the file has a tab"
		case c < ' ' && c != '\n' && c != '\r', c == 0x7f:
			return i, fmt.Sprintf("the file has a control character (%U)", c)
		}
	}
	return 0, ""
}

// document reads one document of a file.
func (r *reader) document(d *document) {
	size := len(d.lines)
	for _, line := range d.lines {
		size += len(line)
	}
	if size > maxDocument {
		r.report(place{d.file, d.first, 1}, fmt.Sprintf("the document has %d bytes; one has at most %d (64 KiB)", size, maxDocument), "split it")
		return
	}
	for _, root := range d.roots() {
		r.read++
		if r.read > raftfsm.MaxDocuments {
			if r.read == raftfsm.MaxDocuments+1 {
				r.report(root.place(), fmt.Sprintf("a push has at most %d documents", raftfsm.MaxDocuments), "push fewer at a time")
			}
			return
		}
		r.root(root)
	}
}

// root reads the document as what its first key says it is.
func (r *reader) root(v value) {
	const rule = "a document is named by its first key: seat, module or assign"
	if v.sort != mapping || len(v.entries) == 0 {
		what := string(v.sort)
		if v.sort == mapping {
			what = "an empty map"
		}
		r.report(v.place(), "this document is "+what+"; "+rule, "")
		return
	}
	first := v.entries[0]
	switch first.key {
	case "seat":
		r.seat(v)
	case "module":
		r.module(v)
	case "assign":
		r.assign(v)
	default:
		suggestion := ""
		for _, name := range []string{"seat", "module", "assign"} {
			if e, ok := v.entry(name); ok {
				suggestion = fmt.Sprintf("move the line %q up to be the first", name+": "+clip(e.value.text))
			}
		}
		if near := nearest(first.key, []string{"seat", "module", "assign"}); suggestion == "" && near != "" {
			suggestion = fmt.Sprintf("did you mean %q?", near)
		}
		r.report(first.at, fmt.Sprintf("this document begins with %q; %s", clip(first.key), rule), suggestion)
	}
}
