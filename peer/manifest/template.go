package manifest

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// A template is text with references: {{ .NAME.FIELD }}, where NAME is one of
// the module's requirements, or node. {{ "{{" }} stands for two literal braces.
// There is nothing else, so that what a template needs can be read off it when
// it is pushed. (text/template cannot be the language: in it a name with a dash
// is a syntax error, and requirements have such names.)
var (
	reference = regexp.MustCompile(`^\{\{ *\.([a-z0-9][a-z0-9-]{0,39})\.([a-z0-9][a-z0-9_-]*) *\}\}`)
	escape    = regexp.MustCompile(`^\{\{ *"\{\{" *\}\}`)
)

// node is the name of the consumer's own node in a template, and so not one
// that a requirement may have.
const node = "node"

// nodeFields are what a template may say of the node.
func nodeFields() []string { return []string{"address", "name"} }

// maxRendered is the longest string of an environment that Linux takes:
// MAX_ARG_STRLEN, execve(2).
const maxRendered = 128 << 10

// piece is a stretch of a template: a text, a reference, or an action that is
// neither.
type piece struct {
	source      string // as it stands in the template
	text        string // what it renders to where it is no reference
	name, field string // of a reference
	bad         bool
}

// pieces takes a template apart.
func pieces(template string) []piece {
	var out []piece
	for template != "" {
		open := strings.Index(template, "{{")
		if open < 0 {
			open = len(template)
		}
		if open > 0 {
			out = append(out, piece{source: template[:open], text: template[:open]})
			template = template[open:]
			continue
		}
		var p piece
		if m := reference.FindStringSubmatch(template); m != nil {
			p = piece{source: m[0], name: m[1], field: m[2]}
		} else if m := escape.FindString(template); m != "" {
			p = piece{source: m, text: "{{"}
		} else {
			p = piece{source: action(template), bad: true}
		}
		out = append(out, p)
		template = template[len(p.source):]
	}
	return out
}

// action is the action that begins the template: to its }}, or where it has
// none in this line to the line's end.
func action(template string) string {
	line, _, _ := strings.Cut(template, "\n")
	if inside, _, closed := strings.Cut(line, "}}"); closed {
		return inside + "}}"
	}
	return line
}

const form = `write {{ .REQUIREMENT.FIELD }}, {{ .node.address }} or {{ .node.name }}; {{ "{{" }} for two literal braces`

// Render fills in a template: data has the fields of each binding by the
// requirement's name, and those of the node under "node". A reference to what
// is not there is an error that names it. No error holds a value of data.
func Render(template string, data map[string]map[string]string) (string, error) {
	var b strings.Builder
	for _, p := range pieces(template) {
		text := p.text
		switch fields, ok := data[p.name]; {
		case p.bad:
			return "", fmt.Errorf("render %s: it is no reference; %s", clip(p.source), form)
		case p.name == "":
		case !ok:
			return "", fmt.Errorf("render %s: there is no %s; there are %s", p.source, p.name, and(slices.Sorted(maps.Keys(data))))
		default:
			if text, ok = fields[p.field]; !ok {
				return "", fmt.Errorf("render %s: %s has no field %s; it has %s", p.source, p.name, p.field, and(slices.Sorted(maps.Keys(fields))))
			}
		}
		if b.Len()+len(text) > maxRendered {
			return "", fmt.Errorf("render a template: the result is longer than %d KiB, the most that a variable may have", maxRendered>>10)
		}
		b.WriteString(text)
	}
	return b.String(), nil
}

// template checks the references in a value against the names that there are
// beside node, and says whether one of them is to a binding. missing is the rule
// that an unknown name breaks, with a %q for it; with "" any name is good.
func (r *reader) template(v value, names []string, missing string) (bound bool) {
	told := map[string]bool{}
	for _, p := range pieces(v.text) {
		if told[p.source] || p.name == "" && !p.bad {
			continue
		}
		told[p.source] = true
		switch {
		case p.bad:
			r.report(v.locate(p.source), clip(p.source)+" is no reference", form)
		case p.name == node && !slices.Contains(nodeFields(), p.field):
			r.report(v.locate(p.source), fmt.Sprintf("%s: the node has no %s", p.source, p.field), didYouMean(p.field, nodeFields()))
		case p.name == node:
		case missing != "" && !slices.Contains(names, p.name):
			r.report(v.locate(p.source), fmt.Sprintf("%s: "+missing, p.source, p.name), didYouMean(p.name, append(slices.Clone(names), node)))
		default:
			bound = true
		}
	}
	return bound
}
