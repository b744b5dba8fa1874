package cli

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"meshd/peer/api"
	"meshd/peer/manifest"
)

// load reads and parses manifest files; "-" is standard input.
func load(cmd *cobra.Command, files []string) (manifest.Manifest, error) {
	var sources []manifest.Source
	seen := map[string]bool{}
	for _, name := range files {
		if seen[name] {
			return manifest.Manifest{}, fmt.Errorf("%s is given twice; give each file once", name)
		}
		seen[name] = true
		data, err := readManifest(cmd.InOrStdin(), name)
		if err != nil {
			return manifest.Manifest{}, err
		}
		if name == "-" {
			name = "standard input"
		}
		sources = append(sources, manifest.Source{Name: name, Data: data})
	}
	m, err := manifest.Parse(sources...)
	var faults manifest.Faults
	if errors.As(err, &faults) {
		return m, located{faults.Error()}
	}
	return m, err
}

func readManifest(stdin io.Reader, name string) ([]byte, error) {
	from := stdin
	if name != "-" {
		st, err := os.Stat(name)
		if err != nil {
			return nil, fmt.Errorf("read manifest: %w", err)
		}
		if st.IsDir() {
			return nil, fmt.Errorf("%s is a directory, and what is pushed is named file by file; write %s/*.yaml", name, name)
		}
		f, err := os.Open(name)
		if err != nil {
			return nil, fmt.Errorf("read manifest: %w", err)
		}
		defer f.Close()
		from = f
	}
	data, err := io.ReadAll(io.LimitReader(from, api.MaxBody+1))
	if err != nil {
		return nil, fmt.Errorf("read manifest %s: %w", name, err)
	}
	if len(data) > api.MaxBody {
		return nil, fmt.Errorf("%s has more than %d MiB, which is more than a push may have; push less at a time", name, api.MaxBody>>20)
	}
	return data, nil
}

// locate puts the line before a refusal that is about something written.
func locate(m manifest.Manifest, err error) error {
	var e *api.Error
	if !errors.As(err, &e) {
		return err
	}
	file, line, col, ok := m.Position(e.Path)
	if !ok {
		return err
	}
	return located{fmt.Sprintf("%s:%d:%d: %s", file, line, col, sentence(e))}
}
