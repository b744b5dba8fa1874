package integration

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Budgets: what a reader can hold in the head at once.
const (
	maxFileLines     = 600
	maxFunctionLines = 100
	maxStructFields  = 15
)

// arrows are all the imports between packages of ours that are allowed, as
// prefixes: "provision/" stands for every kind.
var arrows = map[string][]string{
	".":                   {"peer/cli"},
	"peer/cli":            {"peer", "peer/", "raftfsm", "bus", "gossip", "provision", "provision/"},
	"peer":                {"raftfsm", "bus", "provision", "peer/identity", "peer/supervise", "peer/network", "peer/consensus", "peer/lease"},
	"peer/api":            {"raftfsm"},
	"peer/manifest":       {"raftfsm"},
	"peer/identity":       nil,
	"peer/supervise":      nil,
	"peer/network":        nil,
	"peer/consensus":      nil,
	"peer/lease":          nil,
	"raftfsm":             nil,
	"gossip":              nil,
	"bus":                 nil,
	"provision":           nil,
	"provision/postgres":  {"provision"},
	"provision/jetstream": {"provision"},
	"provision/memory":    {"provision"},
	// Test support: never linked into the binary.
	"provision/provisiontest":   {"provision"},
	"provision/postgres/pgtest": nil,
	"peer/network/networktest":  {"peer/network"},
	"integration":               {"provision/postgres/pgtest"},
	"integration/bench":         {"provision/postgres/pgtest", "integration"},
	"integration/compose":       nil,
}

// impure is what the model may not reach: the outside world.
var impure = []string{"os", "net", "syscall", "math/rand", "math/rand/v2", "crypto/rand", "log", "log/slog", "sync", "sync/atomic", "context", "runtime", "unsafe", "io/ioutil", "path/filepath"}

type source struct {
	pkg  string // directory below the module's root, "." for the root
	path string
	test bool
	file *ast.File
	fset *token.FileSet
}

func sources(t *testing.T) []source {
	t.Helper()
	var all []source
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != ".." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		rel, err := filepath.Rel("..", path)
		if err != nil {
			return err
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		all = append(all, source{filepath.ToSlash(filepath.Dir(rel)), rel, strings.HasSuffix(path, "_test.go"), file, fset})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 20 {
		t.Fatalf("found %d files: the walk does not see the module", len(all))
	}
	return all
}

func TestArrows(t *testing.T) {
	for _, s := range sources(t) {
		allowed, known := arrows[s.pkg]
		if !known {
			t.Errorf("%s: package %s is not in the list of packages; add it with the arrows that it needs, and say why in docs/decisions", s.path, s.pkg)
			continue
		}
		if s.test {
			continue
		}
		for _, spec := range s.file.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			to, ours := strings.CutPrefix(path, "meshd/")
			if ours && !slices.ContainsFunc(allowed, func(a string) bool { return a == to || strings.HasSuffix(a, "/") && strings.HasPrefix(to, a) }) {
				t.Errorf("%s imports %s: %s may import only %v; the leaves meet in peer, and only peer/cli names kinds", s.path, to, s.pkg, allowed)
			}
		}
	}
}

func TestTheModelIsPure(t *testing.T) {
	for _, s := range sources(t) {
		if s.pkg != "raftfsm" || s.test {
			continue
		}
		for _, spec := range s.file.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if slices.Contains(impure, path) {
				t.Errorf("%s imports %s: the model does no I/O and starts no goroutine, or two nodes diverge", s.path, path)
			}
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: a goroutine in the model", s.at(n))
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains([]string{"Now", "Since", "Until", "After", "NewTimer", "Sleep", "Local"}, n.Sel.Name) {
					t.Errorf("%s: time.%s in the model; time comes in with the entry", s.at(n), n.Sel.Name)
				}
			}
			return true
		})
	}
}

func (s source) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d", s.path, s.fset.Position(n.Pos()).Line)
}

func (s source) lines(n ast.Node) int {
	return s.fset.Position(n.End()).Line - s.fset.Position(n.Pos()).Line + 1
}

func TestBudgets(t *testing.T) {
	for _, s := range sources(t) {
		if n := s.lines(s.file); n > maxFileLines {
			t.Errorf("%s has %d lines, and a file has at most %d: is it one thing?", s.path, n, maxFileLines)
		}
		for _, d := range s.file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if n := s.lines(d); n > maxFunctionLines && !s.test {
					t.Errorf("%s: %s has %d lines, and a function has at most %d", s.at(d), d.Name.Name, n, maxFunctionLines)
				}
				if d.Recv == nil && d.Name.Name == "init" {
					t.Errorf("%s: an init; wire it by hand where it is used", s.at(d))
				}
			case *ast.GenDecl:
				s.checkDecl(t, d)
			}
		}
	}
}

func (s source) checkDecl(t *testing.T, d *ast.GenDecl) {
	for _, spec := range d.Specs {
		switch spec := spec.(type) {
		case *ast.TypeSpec:
			st, ok := spec.Type.(*ast.StructType)
			// The model's documents and the mesh's whole state are lists of what a
			// user can write, and no state of a running part.
			if ok && !s.test && s.pkg != "raftfsm" && st.Fields.NumFields() > maxStructFields {
				t.Errorf("%s: %s has %d fields, and a struct has at most %d", s.at(spec), spec.Name.Name, st.Fields.NumFields(), maxStructFields)
			}
		case *ast.ValueSpec:
			if d.Tok == token.VAR && !s.test && !immutable(spec) {
				t.Errorf("%s: %s is a mutable global; pass it in", s.at(spec), spec.Names[0].Name)
			}
		}
	}
}

// immutable accepts what is a variable only because Go has no constant of its
// type: sentinel errors, regular expressions, byte strings, interface checks.
func immutable(spec *ast.ValueSpec) bool {
	if spec.Names[0].Name == "_" {
		return true
	}
	for _, v := range spec.Values {
		switch v := v.(type) {
		case *ast.CallExpr:
			var name string
			switch f := v.Fun.(type) {
			case *ast.SelectorExpr:
				name = f.Sel.Name
			case *ast.ArrayType:
				name = "[]byte"
			case *ast.Ident:
				name = f.Name
			}
			if !slices.Contains([]string{"New", "MustCompile", "Errorf", "[]byte", "NewEncoding"}, name) {
				return false
			}
		case *ast.UnaryExpr, *ast.CompositeLit:
			if !strings.HasPrefix(spec.Names[0].Name, "Err") && !strings.HasPrefix(spec.Names[0].Name, "err") {
				return false
			}
		default:
			return false
		}
	}
	return len(spec.Values) > 0
}

// TestNoUnfinishedWork finds the words of it, and sleeps in tests.
func TestNoUnfinishedWork(t *testing.T) {
	virtual := map[string]bool{} // packages whose tests run in virtual time
	for _, s := range sources(t) {
		for _, spec := range s.file.Imports {
			virtual[s.pkg] = virtual[s.pkg] || s.test && spec.Path.Value == `"testing/synctest"`
		}
	}
	words := []string{"TO" + "DO", "FIX" + "ME", "XX" + "X", "for " + "now", "not " + "implemented"}
	for _, s := range sources(t) {
		text, err := os.ReadFile(filepath.Join("..", s.path))
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			for _, w := range words {
				if strings.Contains(line, w) {
					t.Errorf("%s:%d: %q is unfinished work; finish it", s.path, i+1, w)
				}
			}
			if s.test && strings.Contains(line, "time."+"Sleep(") && !virtual[s.pkg] {
				t.Errorf("%s:%d: a sleep in a test outside of virtual time: wait for a condition", s.path, i+1)
			}
		}
	}
}
