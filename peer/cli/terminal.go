package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"meshd/peer/api"
)

// columns is how wide output gets: what fits half a wide screen, a mail and a
// bug report.
const columns = 100

// narrowest is how far a column is narrowed before a table grows beyond the
// limit.
const narrowest = 12

// table is rows under heads. What does not fit is wrapped, never cut.
type table struct {
	heads []string
	rows  [][]string
	state int // the column that is coloured by what it says; -1 is none
}

// write prints the table, each line indented.
func (t table) write(w io.Writer, indent string, colour bool) {
	widths := t.widths(columns - len(indent))
	all := t.rows
	if t.heads != nil {
		all = slices.Concat([][]string{t.heads}, t.rows)
	}
	for i, row := range all {
		head := i == 0 && t.heads != nil
		cells := make([][]string, len(row))
		tall := 1
		for c, text := range row {
			cells[c] = wrap(text, widths[c])
			tall = max(tall, len(cells[c]))
		}
		for line := range tall {
			var out strings.Builder
			for c := range row {
				text := ""
				if line < len(cells[c]) {
					text = cells[c][line]
				}
				padded := text + strings.Repeat(" ", widths[c]-utf8.RuneCountInString(text))
				if colour && c == t.state && !head && text != "" {
					padded = strings.Replace(padded, text, paint(text), 1)
				}
				if c > 0 {
					out.WriteString("  ")
				}
				out.WriteString(padded)
			}
			fmt.Fprintln(w, strings.TrimRight(indent+out.String(), " "))
		}
	}
}

// widths narrows the widest columns until all fit the limit.
func (t table) widths(limit int) []int {
	var widths []int
	for _, row := range append(slices.Clone(t.rows), t.heads) {
		for c, text := range row {
			if c == len(widths) {
				widths = append(widths, 0)
			}
			widths[c] = max(widths[c], utf8.RuneCountInString(text))
		}
	}
	total := 2 * (len(widths) - 1)
	for _, w := range widths {
		total += w
	}
	for ; total > limit; total-- {
		widest := slices.Index(widths, slices.Max(widths))
		if widths[widest] <= narrowest {
			break
		}
		widths[widest]--
	}
	return widths
}

// wrap breaks text into lines of at most width characters: between words, and
// inside those that are longer than a line. A text that fits stays as it is.
func wrap(text string, width int) []string {
	if utf8.RuneCountInString(text) <= width && !strings.Contains(text, "\n") {
		return []string{text}
	}
	var lines []string
	var line []rune
	for _, word := range strings.Fields(text) {
		r := []rune(word)
		if len(line) > 0 && len(line)+1+len(r) > width {
			lines, line = append(lines, string(line)), nil
		}
		if len(line) > 0 {
			line = append(line, ' ')
		}
		line = append(line, r...)
		for len(line) > width {
			lines, line = append(lines, string(line[:width])), line[width:]
		}
	}
	if len(line) > 0 || len(lines) == 0 {
		lines = append(lines, string(line))
	}
	return lines
}

// paint colours a state by what it says.
func paint(state string) string {
	const red, green, yellow = "31", "32", "33"
	code := yellow
	switch state {
	case "up", "in-use", "ready", "running", "healthy", "answered", "withdrawn":
		code = green
	case "away", "silent", "not ready", "dark", "failed", "unhealthy", "backing-off", "un-ready", "unbound", "gone", "held up", "stuck":
		code = red
	}
	return "\x1b[" + code + "m" + state + "\x1b[0m"
}

// coloured reports whether w is a terminal that wants colour: see no-color.org.
func coloured(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && term.IsTerminal(int(f.Fd()))
}

// withOutput adds -o to a listing.
func withOutput(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringP("output", "o", "text", "text or json")
	if err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag was added a line above
	}
	return cmd
}

// asJSON reports whether -o asks for JSON.
func asJSON(cmd *cobra.Command) (bool, error) {
	switch o := cmd.Flag("output").Value.String(); o {
	case "text":
		return false, nil
	case "json":
		return true, nil
	default:
		return false, fmt.Errorf("-o %s is no form of output: write -o text or -o json", o)
	}
}

// show prints value as JSON where -o asks for it, and otherwise what text
// writes.
func show(cmd *cobra.Command, value any, text func(w io.Writer, colour bool)) error {
	machine, err := asJSON(cmd)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if machine {
		if err := writeJSON(&b, value, "  "); err != nil {
			return err
		}
	} else {
		text(&b, coloured(cmd.OutOrStdout()))
	}
	_, err = cmd.OutOrStdout().Write(b.Bytes())
	return err
}

func writeJSON(w io.Writer, value any, indent string) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	return e.Encode(value)
}

// quoted is the name that a refusal is about, as its text has it.
var quoted = regexp.MustCompile(`"([^"]+)"`)

// sentence is an error for a person: with the near names, or all of a short list
// where none is near, unless the remedy mentions one.
func sentence(err error) string {
	var e *api.Error
	if !errors.As(err, &e) {
		return err.Error()
	}
	said := func(c string) bool { return strings.Contains(e.Remedy, c) }
	if len(e.Candidates) == 0 || slices.ContainsFunc(e.Candidates, said) {
		return e.Error()
	}
	for _, name := range quoted.FindAllStringSubmatch(e.Text, -1) {
		far := func(c string) bool { return !near(name[1], c) }
		if meant := slices.DeleteFunc(slices.Clone(e.Candidates), far); len(meant) > 0 {
			return e.Error() + "; did you mean " + strings.Join(meant, " or ") + "?"
		}
	}
	return e.Error() + "; there are: " + strings.Join(e.Candidates, ", ")
}

// span writes a duration as people say it: its two largest units.
func span(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

// ago is how long before now t was; "-" when it never was.
func ago(now, t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return span(now.Sub(t))
}

// list joins names as a sentence does; "-" for none.
func list(names []string) string {
	switch n := len(names); n {
	case 0:
		return "-"
	case 1:
		return names[0]
	default:
		return strings.Join(names[:n-1], ", ") + " and " + names[n-1]
	}
}

// count writes a number of things.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
