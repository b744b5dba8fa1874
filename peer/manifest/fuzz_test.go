package manifest

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// FuzzParse: no input makes Parse panic or take long, every fault has a place
// inside the file, and what is accepted has at least one document, each with a
// position.
func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(story))
	f.Fuzz(func(t *testing.T, text []byte) {
		start := time.Now()
		m, err := Parse(Source{"f", text})
		if d := time.Since(start); d > 20*time.Second {
			t.Errorf("took %v", d)
		}
		var faults Faults
		switch {
		case errors.As(err, &faults):
			lines := strings.Count(string(text), "\n") + 1
			for _, fault := range faults {
				if fault.File != "f" || fault.Line < 1 || fault.Line > lines+1 || fault.Column < 1 || fault.Rule == "" || strings.Contains(fault.String(), "\n") {
					t.Errorf("%#v of %d lines", fault, lines)
				}
			}
		case err != nil:
			t.Errorf("%T: %v", err, err)
		default:
			d := m.Documents
			if len(d.Modules)+len(d.Assigns)+len(d.Seats) == 0 {
				t.Error("accepted, and no document")
			}
			for _, module := range d.Modules {
				if _, line, col, ok := m.Position("module/" + module.Name + "/x"); !ok || line < 1 || col < 1 {
					t.Errorf("module %q has no place", module.Name)
				}
			}
		}
	})
}

// FuzzRender: rendering never panics, and a template without braces is itself.
func FuzzRender(f *testing.F) {
	for _, s := range []string{"", "{{ .db.uri }}", "{{", "{{ \"{{\" }}", "a {{ b\n}} c", "{{{{ .node.name }}}}"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, template string) {
		got, err := Render(template, map[string]map[string]string{"node": {"name": "n"}})
		if err == nil && !strings.Contains(template, "{{") && got != template {
			t.Errorf("%q became %q", template, got)
		}
		var whole strings.Builder
		for _, p := range pieces(template) {
			whole.WriteString(p.source)
		}
		if whole.String() != template {
			t.Errorf("%q was taken apart as %q", template, whole.String())
		}
	})
}
