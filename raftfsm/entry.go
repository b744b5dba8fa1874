package raftfsm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// MaxEntry bounds one encoded entry: a follower on a slow link must take it
// within one heartbeat. A bigger push is several entries and a commit marker.
const MaxEntry = 64 << 10

// Format is the version of the entry's encoding.
const Format = 1

// Level is the newest feature level that this build understands. An entry of a
// newer level stops the node rather than let it diverge.
const Level = 1

// Header begins every entry. Everything that Apply may know of the outside
// world is in it.
type Header struct {
	Format int       // Format
	Level  int       // feature level that the command needs
	Actor  string    // who asked, such as "root@alpha"; "meshd" for a node's own
	Node   string    // id of the node that proposed it
	Time   time.Time // UTC, by the proposer's clock; recorded, never judged
	ID     string    // unique; a retry of an entry carries the same
}

// Command is one of the types in commands.go, and nothing else.
type Command interface{ name() string }

// Entry is one entry of the log.
type Entry struct {
	Header
	Command Command
}

// wire is an Entry as bytes: JSON, the header's fields beside the command's
// name and body.
type wire struct {
	Header
	Name string
	Body json.RawMessage
}

// ErrUndecodable is wrapped by every error of Decode. A node that meets it must
// stop: what it cannot read it cannot apply, and skipping it would diverge.
var ErrUndecodable = errors.New("entry cannot be applied by this build")

// command decodes the body of the command of that name.
func command(name string, raw []byte) (Command, error) {
	switch name {
	case Init{}.name():
		return body[Init](raw)
	case AddToken{}.name():
		return body[AddToken](raw)
	case Admit{}.name():
		return body[Admit](raw)
	case UpdateNode{}.name():
		return body[UpdateNode](raw)
	case RemoveNode{}.name():
		return body[RemoveNode](raw)
	case PushPart{}.name():
		return body[PushPart](raw)
	case Push{}.name():
		return body[Push](raw)
	case Remove{}.name():
		return body[Remove](raw)
	case NodeReport{}.name():
		return body[NodeReport](raw)
	case Hold{}.name():
		return body[Hold](raw)
	case OpenSession{}.name():
		return body[OpenSession](raw)
	case CloseSession{}.name():
		return body[CloseSession](raw)
	case MoveSeat{}.name():
		return body[MoveSeat](raw)
	case Compared{}.name():
		return body[Compared](raw)
	}
	return nil, errors.New("unknown command")
}

func body[C Command](raw []byte) (Command, error) {
	var c C
	err := strict(raw, &c)
	return c, err
}

// Encode returns the bytes of e, with the format and the level filled in and the
// time in UTC. Decode gives back an equal entry.
func Encode(e Entry) ([]byte, error) {
	if e.Command == nil {
		return nil, errors.New("encode entry: it has no command")
	}
	body, err := json.Marshal(e.Command)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", e.Command.name(), err)
	}
	e.Format = Format
	e.Level = max(e.Level, 1)
	e.Time = e.Time.UTC()
	b, err := json.Marshal(wire{e.Header, e.Command.name(), body})
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", e.Command.name(), err)
	}
	if len(b) > MaxEntry {
		return nil, fmt.Errorf("encode %s: %d bytes, an entry has at most %d", e.Command.name(), len(b), MaxEntry)
	}
	return b, nil
}

// Decode reads what Encode wrote. It is strict: an unknown command or field, a
// newer format or level, or anything after the entry is ErrUndecodable.
func Decode(b []byte) (Entry, error) {
	var w wire
	if len(b) > MaxEntry {
		return Entry{}, fmt.Errorf("%w: %d bytes, an entry has at most %d", ErrUndecodable, len(b), MaxEntry)
	}
	if err := strict(b, &w); err != nil {
		return Entry{}, fmt.Errorf("%w: %v", ErrUndecodable, err)
	}
	if w.Format != Format || w.Level > Level || w.Level < 1 {
		return Entry{}, fmt.Errorf("%w: format %d, level %d; it reads format %d up to level %d: run a newer meshd", ErrUndecodable, w.Format, w.Level, Format, Level)
	}
	if w.Time.Location() != time.UTC {
		return Entry{}, fmt.Errorf("%w: its time %s is not in UTC", ErrUndecodable, w.Time)
	}
	cmd, err := command(w.Name, w.Body)
	if err != nil {
		return Entry{}, fmt.Errorf("%w: command %q: %v", ErrUndecodable, w.Name, err)
	}
	// What cannot be written again, such as a time in an impossible zone, would be
	// in the state and keep every snapshot from being made.
	if _, err := json.Marshal(cmd); err != nil {
		return Entry{}, fmt.Errorf("%w: command %q: %v", ErrUndecodable, w.Name, err)
	}
	return Entry{w.Header, cmd}, nil
}

func strict(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows it")
	}
	return nil
}

// canonical is c as every node sees it, after its way through the log.
func canonical(c Command) (Command, error) {
	body, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	return command(c.name(), body)
}

// Rejection is the answer to a command that was refused: what, by which rule,
// and the way out. It is a value, so that it travels from the leader to
// whoever asked.
type Rejection struct {
	Code       string   // stable, such as "ambiguous"
	Path       string   // the place in the pushed documents: "module/shop/requires/db"
	Text       string   // one sentence: what was refused and the rule
	Remedy     string   // the line to write or the command to type
	Candidates []string `json:",omitempty"`
}

func (r *Rejection) Error() string {
	if r.Remedy == "" {
		return r.Text
	}
	return r.Text + "; " + r.Remedy
}

// Result is what applying an entry gave.
type Result struct {
	Index     uint64
	Rejection *Rejection `json:",omitempty"`
}
