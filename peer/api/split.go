package api

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"

	"meshd/raftfsm"
)

// maxPart is how much of an entry documents may fill: the rest is for the
// header, the names of the fields and the id of the push.
const maxPart = raftfsm.MaxEntry - 4<<10

// split makes of a push one command, or where the documents do not fit an entry
// parts and the command that commits them together. The order of the documents
// stays, so the places that a refusal names stay right.
func split(p Push) ([]raftfsm.Command, error) {
	whole, err := size(p.Documents)
	if err != nil {
		return nil, err
	}
	if whole <= maxPart {
		return []raftfsm.Command{raftfsm.Push{Documents: p.Documents, Pending: p.Pending, At: p.At}}, nil
	}
	parts, err := cut(p.Documents)
	if err != nil {
		return nil, err
	}
	id := rand.Text()
	var out []raftfsm.Command
	for i, part := range parts {
		out = append(out, raftfsm.PushPart{Push: id, Seq: i, Part: part})
	}
	return append(out, raftfsm.Push{ID: id, Parts: len(parts), Pending: p.Pending, At: p.At}), nil
}

// cut distributes the documents over as many parts as they need.
func cut(docs raftfsm.Documents) ([]raftfsm.Documents, error) {
	var parts []raftfsm.Documents
	var filled int
	// room returns the part that a document of n bytes goes to.
	room := func(what, path string, document any) (*raftfsm.Documents, error) {
		n, err := size(document)
		if err != nil {
			return nil, err
		}
		if n > maxPart {
			return nil, &Error{Status: http.StatusRequestEntityTooLarge, Code: CodeTooBig, Path: path,
				Text: fmt.Sprintf("%s takes %d bytes, and one document has at most %d", what, n, maxPart), Remedy: "move large texts into files"}
		}
		if len(parts) == 0 || filled+n > maxPart {
			parts, filled = append(parts, raftfsm.Documents{}), 0
		}
		filled += n + 1 // and the comma after it
		return &parts[len(parts)-1], nil
	}
	for _, m := range docs.Modules {
		part, err := room("module "+m.Name, "module/"+m.Name, m)
		if err != nil {
			return nil, err
		}
		part.Modules = append(part.Modules, m)
	}
	for _, seat := range docs.Seats {
		part, err := room("seat "+seat.Name, "seat/"+seat.Name, seat)
		if err != nil {
			return nil, err
		}
		part.Seats = append(part.Seats, seat)
	}
	for i, a := range docs.Assigns {
		part, err := room("the assignment of "+a.Module, fmt.Sprintf("assign/%d", i), a)
		if err != nil {
			return nil, err
		}
		part.Assigns = append(part.Assigns, a)
	}
	return parts, nil
}

// size is how many bytes v takes in an entry.
func size(v any) (int, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return 0, fmt.Errorf("encode documents: %w", err)
	}
	return len(b), nil
}
