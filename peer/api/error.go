package api

import (
	"context"
	"errors"
	"net/http"

	"meshd/raftfsm"
)

// Error is every error that crosses the socket: what was refused and by which
// rule, and the way out.
type Error struct {
	Status     int      `json:"-"`    // of HTTP
	Code       string   `json:"code"` // stable, such as "ambiguous"
	Text       string   `json:"text"`
	Remedy     string   `json:"remedy,omitempty"`
	Path       string   `json:"path,omitempty"` // the place in the pushed documents
	Candidates []string `json:"candidates,omitempty"`
}

func (e *Error) Error() string {
	if e.Remedy == "" {
		return e.Text
	}
	return e.Text + "; " + e.Remedy
}

// Codes of the errors that are the socket's own. All others are the model's or
// the bus's.
const (
	CodeBadRequest = "bad-request" // not JSON, or not what the route takes
	CodeTooBig     = "too-big"     // over MaxBody, or a document over an entry
	CodeTimeout    = "timeout"     // not done in time; the text says whether it may have happened
	CodeFailed     = "failed"      // anything without a code of its own
	CodeBadReply   = "bad-reply"   // what answered a call did not answer with JSON
)

// refused turns a refusal by the model into an Error: the request was well
// understood, and conflicts with what the mesh is.
func refused(r *raftfsm.Rejection) *Error {
	return &Error{
		Status: http.StatusConflict, Code: r.Code, Text: r.Text, Remedy: r.Remedy, Path: r.Path, Candidates: r.Candidates,
	}
}

func badRequest(text, remedy string) *Error {
	return &Error{Status: http.StatusBadRequest, Code: CodeBadRequest, Text: text, Remedy: remedy}
}

// asError makes any error one that can be sent. A backend that returns an Error
// without a status means a conflict.
func asError(err error) *Error {
	var e *Error
	var r *raftfsm.Rejection
	switch {
	case errors.As(err, &e):
		sent := *e
		if sent.Status == 0 {
			sent.Status = http.StatusConflict
		}
		return &sent
	case errors.As(err, &r):
		return refused(r)
	case errors.Is(err, context.DeadlineExceeded):
		return &Error{Status: http.StatusGatewayTimeout, Code: CodeTimeout, Text: err.Error()}
	}
	return &Error{Status: http.StatusServiceUnavailable, Code: CodeFailed, Text: err.Error()}
}
