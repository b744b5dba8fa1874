package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"meshd/raftfsm"
)

// maxReply bounds what a client reads: an Overview of a mesh with 10,000
// bindings takes about 20 MiB.
const maxReply = 256 << 20

// Client asks the node whose socket it was made for. Its errors are of type
// *Error wherever the node, or its absence, can be told.
type Client struct {
	path string
	http *http.Client
}

// NewClient returns a Client for the socket at path. It does not connect.
func NewClient(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err != nil && ctx.Err() == nil {
			return nil, unreachable(path, err)
		}
		return c, err
	}
	return &Client{path: path, http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableCompression: true}}}
}

// Close ends the connections that are kept open.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Overview asks for the state as it is now.
func (c *Client) Overview(ctx context.Context) (Overview, error) {
	var o Overview
	return o, c.get(ctx, "/v1/overview", nil, &o)
}

// Newer asks for the state once it is newer than after, or once wait, at most
// MaxWait, is over.
func (c *Client) Newer(ctx context.Context, after uint64, wait time.Duration) (Overview, error) {
	var o Overview
	q := url.Values{"after": {strconv.FormatUint(after, 10)}, "wait": {wait.String()}}
	return o, c.get(ctx, "/v1/overview", q, &o)
}

// Detail asks what is tried in vain for a binding, a provider or an assignment.
func (c *Client) Detail(ctx context.Context, name string) (Detail, error) {
	var d Detail
	return d, c.get(ctx, "/v1/detail", url.Values{"name": {name}}, &d)
}

// Plan asks what a change would change.
func (c *Client) Plan(ctx context.Context, change Change) (Plan, error) {
	var p Plan
	return p, c.post(ctx, "/v1/plan", change, &p)
}

// Push makes the documents what is desired.
func (c *Client) Push(ctx context.Context, p Push) (Committed, error) {
	var done Committed
	return done, c.post(ctx, "/v1/push", p, &done)
}

// Remove stops and withdraws.
func (c *Client) Remove(ctx context.Context, r raftfsm.Remove) (Committed, error) {
	var done Committed
	return done, c.post(ctx, "/v1/rm", r, &done)
}

// MoveSeat names the claimant that should hold a seat; the mesh hands it over.
func (c *Client) MoveSeat(ctx context.Context, m raftfsm.MoveSeat) (Committed, error) {
	var done Committed
	return done, c.post(ctx, "/v1/seat/move", m, &done)
}

// Token asks for a join token that is good for ttl.
func (c *Client) Token(ctx context.Context, ttl time.Duration) (string, error) {
	var t Token
	err := c.post(ctx, "/v1/token", TokenRequest{ttl}, &t)
	return t.Token, err
}

// RemoveNode expels the node of that name.
func (c *Client) RemoveNode(ctx context.Context, name string) error {
	return c.post(ctx, "/v1/node/rm", NodeRequest{name}, &nothing{})
}

// Leave takes this node out of its mesh: see LeaveRequest.
func (c *Client) Leave(ctx context.Context, force bool) error {
	return c.post(ctx, "/v1/leave", LeaveRequest{force}, &nothing{})
}

// Call calls a seat's verb or a module's tool with data, which is JSON.
// Within bounds the wait for the answer: see Call.
func (c *Client) Call(ctx context.Context, target string, data []byte, within time.Duration) (CallReply, error) {
	var r CallReply
	return r, c.post(ctx, "/v1/call", Call{target, data, within}, &r)
}

// Verify compares who answers with who is named.
func (c *Client) Verify(ctx context.Context) (Verified, error) {
	var v Verified
	return v, c.get(ctx, "/v1/verify", nil, &v)
}

// AddBusCredential has the node let the owner of a key onto its bus for ttl.
func (c *Client) AddBusCredential(ctx context.Context, publicKey string, ttl time.Duration) (BusLogin, error) {
	var login BusLogin
	return login, c.post(ctx, "/v1/bus-credential", BusCredentialRequest{publicKey, ttl}, &login)
}

// BusCredentials lists those of the node that are good now.
func (c *Client) BusCredentials(ctx context.Context) ([]BusCredential, error) {
	var all []BusCredential
	return all, c.get(ctx, "/v1/bus-credential", nil, &all)
}

// RemoveBusCredential ends one, and cuts off whoever is connected with it.
func (c *Client) RemoveBusCredential(ctx context.Context, name string) error {
	return c.post(ctx, "/v1/bus-credential/rm", NodeRequest{name}, &nothing{})
}

// Logs writes the newest lines of an assignment's output to w, and with follow
// what comes after them until ctx ends.
func (c *Client) Logs(ctx context.Context, assignment string, lines int, follow bool, w io.Writer) error {
	q := url.Values{"name": {assignment}, "lines": {strconv.Itoa(lines)}, "follow": {strconv.FormatBool(follow)}}
	resp, err := c.do(ctx, http.MethodGet, "/v1/logs", q, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(w, resp.Body); err != nil {
		return fmt.Errorf("read the logs of %s: %w", assignment, err)
	}
	if text := resp.Trailer.Get(trailer); text != "" {
		return decodeError(http.StatusBadGateway, []byte(text))
	}
	return nil
}

func (c *Client) get(ctx context.Context, path string, q url.Values, into any) error {
	resp, err := c.do(ctx, http.MethodGet, path, q, nil)
	if err != nil {
		return err
	}
	return read(resp, into)
}

func (c *Client) post(ctx context.Context, path string, body, into any) error {
	b, err := encode(body)
	if err != nil {
		return fmt.Errorf("encode request: %w", err)
	}
	if len(b) > MaxBody {
		return &Error{Code: CodeTooBig, Text: fmt.Sprintf("a request has at most %d MiB, and this one has %d bytes", MaxBody>>20, len(b)), Remedy: "send less at a time"}
	}
	resp, err := c.do(ctx, http.MethodPost, path, nil, b)
	if err != nil {
		return err
	}
	return read(resp, into)
}

// do sends a request and returns a reply of success, whose body the caller
// closes.
func (c *Client) do(ctx context.Context, method, path string, q url.Values, body []byte) (*http.Response, error) {
	target := url.URL{Scheme: "http", Host: "meshd", Path: path, RawQuery: q.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, target.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var e *Error
		if errors.As(err, &e) {
			return nil, e
		}
		var wrapped *url.Error
		if errors.As(err, &wrapped) {
			err = wrapped.Err
		}
		return nil, fmt.Errorf("ask meshd at %s: %w", c.path, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, MaxBody))
	if err != nil {
		return nil, fmt.Errorf("ask meshd at %s: %w", c.path, err)
	}
	return nil, decodeError(resp.StatusCode, text)
}

// decodeError reads an Error, or makes one of whatever came in its place.
func decodeError(status int, body []byte) *Error {
	e := &Error{}
	if err := json.Unmarshal(body, e); err != nil || e.Text == "" {
		e = &Error{Code: CodeFailed, Text: fmt.Sprintf("meshd answered %d: %s", status, bytes.TrimSpace(body))}
	}
	e.Status = status
	return e
}

func read(resp *http.Response, into any) error {
	defer resp.Body.Close()
	d := json.NewDecoder(io.LimitReader(resp.Body, maxReply))
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("read the reply of meshd: %w", err)
	}
	return nil
}
