package manifest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// sort is what a value is. The YAML types of scalars do not matter: a key's
// reader says what its text must be.
type sort string

const (
	null    sort = "nothing"
	scalar  sort = "one value"
	list    sort = "a list"
	mapping sort = "a map"
)

// value is one node of a document. Every scalar is its text as written, without
// quotes, so that `010`, `yes` and `1.10` mean what they look like.
type value struct {
	doc       *document
	sort      sort
	line, col int
	text      string  // of a scalar
	items     []value // of a list
	entries   []entry // of a mapping, no key twice
}

type entry struct {
	key   string
	at    place
	value value
}

func (v value) place() place { return place{v.doc.file, v.line, v.col} }

// entry returns the entry of that key.
func (v value) entry(key string) (entry, bool) {
	for _, e := range v.entries {
		if e.key == key {
			return e, true
		}
	}
	return entry{}, false
}

// locate returns where text stands inside the value: its own place where the
// text is spelled with escapes and so cannot be found.
func (v value) locate(text string) place {
	for i := v.line - v.doc.first; i < len(v.doc.lines); i++ {
		line, col := v.doc.lines[i], 1
		if i == v.line-v.doc.first {
			col = v.col
			line = skip(line, col-1)
		}
		if before, _, ok := strings.Cut(line, text); ok {
			return place{v.doc.file, v.doc.first + i, col + utf8.RuneCountInString(before)}
		}
	}
	return v.place()
}

// skip drops the first n characters.
func skip(s string, n int) string {
	for i := range s {
		if n == 0 {
			return s[i:]
		}
		n--
	}
	return ""
}

// document is one document of a file, as text.
type document struct {
	file   string
	first  int // line number of lines[0]
	lines  []string
	runes  [][]rune // lines, by character
	report func(at place, rule, suggestion string)
}

func (d *document) fault(line, col int, rule, suggestion string) {
	d.report(place{d.file, max(line, 1), max(col, 1)}, rule, suggestion)
}

// roots parses the document and returns its content: nothing for one of
// comments only, more than one value where a `...` line ends one early.
func (d *document) roots() []value {
	tokens := lexer.Tokenize(strings.Join(d.lines, "\n") + "\n")
	if !d.screen(tokens) {
		return nil
	}
	// Duplicate keys are found here, with the place of the first.
	file, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		d.syntax(err)
		return nil
	}
	for _, line := range d.lines {
		d.runes = append(d.runes, []rune(line))
	}
	var out []value
	for _, doc := range file.Docs {
		if doc.Body != nil {
			out = append(out, d.tree(doc.Body))
		}
	}
	return out
}

// maxDepth is how deep maps and lists may nest: three times what the deepest
// key needs, and little enough for the parser's recursion.
const maxDepth = 20

// screen refuses, before the parser sees them, the parts of YAML that a
// manifest does without: anchors, aliases and merge keys, which put a mistake
// far from the line to change and let a short file stand for a huge one; tags,
// directives and complex keys; and nesting without end.
func (d *document) screen(tokens token.Tokens) bool {
	var indents []int // columns of the enclosing block maps and lists
	flow := 0         // open brackets
	for _, t := range tokens {
		refuse := func(rule, suggestion string) bool {
			d.fault(d.first+t.Position.Line-1, t.Position.Column, rule, suggestion)
			return false
		}
		switch t.Type {
		case token.AnchorType, token.AliasType:
			return refuse("anchors and aliases are not supported", "write the value out where it is used")
		case token.MergeKeyType:
			return refuse("merge keys are not supported", "write the keys out")
		case token.TagType:
			return refuse("tags are not supported", "leave the tag out: a key knows the type of its value")
		case token.DirectiveType:
			return refuse("directives are not supported", "leave the line out")
		case token.MappingKeyType:
			return refuse("keys written with ? are not supported", "write KEY: VALUE")
		case token.MappingStartType, token.SequenceStartType:
			flow++
		case token.MappingEndType, token.SequenceEndType:
			flow = max(flow-1, 0)
		case token.DocumentHeaderType, token.DocumentEndType:
			indents, flow = nil, 0
		case token.SequenceEntryType, token.MappingValueType:
			col := t.Position.Column
			if t.Type == token.MappingValueType && t.Prev != nil {
				if col = t.Prev.Position.Column; t.Prev.Position.Line != t.Position.Line {
					return refuse("this colon is not on the line of its key", "write KEY: VALUE; is the line indented too far?")
				}
			}
			if flow > 0 {
				break
			}
			for len(indents) > 0 && indents[len(indents)-1] >= col {
				indents = indents[:len(indents)-1]
			}
			indents = append(indents, col)
			if t.Type == token.SequenceEntryType && emptyEntry(t) {
				return refuse("this entry of the list is empty", "write a value behind the dash, or leave it out")
			}
		}
		if len(indents)+flow > maxDepth {
			return refuse(fmt.Sprintf("maps and lists nest deeper than %d", maxDepth), "")
		}
	}
	return true
}

// emptyEntry says whether nothing belongs to the dash t. The parser would take
// the next key, which belongs to the map around the list, for its value.
func emptyEntry(t *token.Token) bool {
	next := t.Next
	for next != nil && next.Type == token.CommentType {
		next = next.Next
	}
	return next == nil || next.Position.Line > t.Position.Line && next.Position.Column <= t.Position.Column
}

// syntax reports what the parser says, in one line and with the usual cause.
func (d *document) syntax(err error) {
	line, col, text := 1, 1, err.Error()
	var yes yaml.Error
	if errors.As(err, &yes) {
		text = yes.GetMessage()
		if t := yes.GetToken(); t != nil && t.Position != nil {
			line, col = t.Position.Line, t.Position.Column
		}
	}
	text, _, _ = strings.Cut(text, "\n")
	rule, suggestion := "this is not YAML: "+clip(text), ""
	switch {
	case d.braces(line, col):
		rule, suggestion = "a value that begins with {{ reads as a map", `put it in quotes: "{{ ... }}"`
	case strings.Contains(text, "mapping value is not allowed"):
		suggestion = `is the next line indented too far, or a ": " inside the value? then put it in quotes`
	case strings.Contains(text, "non-map value"):
		suggestion = `is a ":" or the space after it missing?`
	case strings.Contains(text, "reserved character"):
		suggestion = "put the value in quotes"
	}
	d.fault(d.first+line-1, col, rule, suggestion)
}

// braces says whether the place is in an unquoted {{.
func (d *document) braces(line, col int) bool {
	if line < 1 || line > len(d.lines) {
		return false
	}
	from := skip(d.lines[line-1], max(col-2, 0))
	return strings.HasPrefix(from, "{{") || strings.HasPrefix(skip(from, 1), "{{")
}

// tree turns the parser's nodes into a value. The depth is bounded by screen.
func (d *document) tree(n ast.Node) value {
	at := n.GetToken().Position
	v := value{doc: d, sort: scalar, line: d.first + max(at.Line, 1) - 1, col: max(at.Column, 1)}
	switch n := n.(type) {
	case *ast.NullNode:
		v.sort = null
	case *ast.LiteralNode:
		v.text = n.Value.Value
	case *ast.StringNode:
		v.text = n.Value
		if n.Token.Type == token.StringType {
			d.plain(&v)
		}
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		v.text = n.GetToken().Value
		d.plain(&v)
	case *ast.SequenceNode:
		v.sort = list
		for _, item := range n.Values {
			v.items = append(v.items, d.tree(item))
		}
	case *ast.MappingNode:
		v.sort = mapping
		d.entries(&v, n.Values)
		if !n.IsFlowStyle && len(v.entries) > 0 {
			v.line, v.col = v.entries[0].at.line, v.entries[0].at.col
		}
	case *ast.MappingValueNode:
		v.sort = mapping
		d.entries(&v, []*ast.MappingValueNode{n})
	default:
		d.fault(v.line, v.col, "a manifest has no use for this", "write a value, a list or a map")
	}
	if strings.ContainsRune(v.text, 0) {
		d.fault(v.line, v.col, "a text with a zero byte cannot be given to a program", "leave the byte out")
	}
	return v
}

// plain finds the column where a plain text begins, for the lexer counts the
// spaces after it into the column. It also proves that the text is what stands
// in the line: the lexer folds a plain text of several lines wrongly, so that
// one is refused.
func (d *document) plain(v *value) {
	line, want := d.runes[min(v.line-d.first, len(d.runes)-1)], []rune(v.text)
	for at := min(v.col-1, len(line)-len(want)); at >= 0; at-- {
		if slices.Equal(line[at:at+len(want)], want) {
			v.col = at + 1
			return
		}
	}
	d.fault(v.line, v.col, "a text without quotes ends with its line", "put a longer one in quotes, or write it below a >- or |")
}

func (d *document) entries(v *value, nodes []*ast.MappingValueNode) {
	seen := make(map[string]place, len(nodes))
	for _, n := range nodes {
		key := d.tree(n.Key)
		if key.sort == null {
			key.sort, key.text = scalar, n.Key.GetToken().Value
		}
		if key.sort != scalar {
			d.fault(key.line, key.col, "a key is a text, not "+string(key.sort), "")
			continue
		}
		if first, twice := seen[key.text]; twice {
			d.fault(key.line, key.col, fmt.Sprintf("key %q is here twice, first on line %d", clip(key.text), first.line), "keep one of the two")
			continue
		}
		seen[key.text] = key.place()
		v.entries = append(v.entries, entry{key.text, key.place(), d.tree(n.Value)})
	}
}
