package api

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"meshd/raftfsm"
)

const (
	// MaxBody bounds a request: 64 parts of a push, each an entry of the log.
	MaxBody = 4 << 20
	// bodyWithin is how long a request's body may take: it comes from the same
	// machine.
	bodyWithin = 10 * time.Second
	// MaxWait is the longest that one request for an Overview waits.
	MaxWait = time.Minute
	// maxTTL is the longest life of a join token: one that is forgotten must not
	// let somebody in next year.
	maxTTL = 30 * 24 * time.Hour
	// maxLines bounds what is asked of a log at once.
	maxLines = 10_000
	// stopWithin is how long requests may take to send their replies when the
	// server stops: all of them have been told to end.
	stopWithin = time.Second
)

// Server answers on the socket. All fields are needed.
type Server struct {
	Reader  Reader
	Writer  Writer
	Caller  Caller
	Members Members
	Bus     BusCredentials
	Logs    Logs
	Node    string // this node's name, for the actor on record: "root@alpha"
	Log     *slog.Logger
}

// Serve answers on l until ctx ends, and closes l.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	requests, end := context.WithCancel(context.Background())
	defer end()
	server := &http.Server{
		Handler:           s.routes(),
		ReadHeaderTimeout: bodyWithin,
		IdleTimeout:       MaxWait,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return requests },
		ConnContext:       s.identify,
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	end()
	stop, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	err := server.Shutdown(stop)
	if errors.Is(err, context.DeadlineExceeded) {
		err = server.Close() // of connections that were opened and never used, Shutdown waits 5 s
	}
	<-served
	return err
}

// actorKey is where a connection's context has who opened it.
type actorKey struct{}

// identify asks the kernel once per connection who opened it.
func (s *Server) identify(ctx context.Context, c net.Conn) context.Context {
	unix, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	user, err := callerOf(unix)
	if err != nil {
		s.Log.Warn("cannot tell who opened the socket", "error", err)
		return ctx
	}
	return context.WithValue(ctx, actorKey{}, user+"@"+s.Node)
}

// route is what answers one request: the actor, and a value to send.
type route func(r *http.Request, actor string) (any, error)

func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	for pattern, answer := range map[string]route{
		"GET /v1/overview":   s.overview,
		"GET /v1/detail":     s.detail,
		"GET /v1/verify":     s.verify,
		"POST /v1/plan":      taking(s.plan),
		"POST /v1/push":      taking(s.push),
		"POST /v1/rm":        taking(s.remove),
		"POST /v1/seat/move": taking(s.moveSeat),
		"POST /v1/token":     taking(s.token),
		"POST /v1/node/rm":   taking(s.removeNode),
		"POST /v1/leave":     taking(s.leave),
		"POST /v1/call":      taking(s.call),

		"GET /v1/bus-credential":     s.busCredentials,
		"POST /v1/bus-credential":    taking(s.addBusCredential),
		"POST /v1/bus-credential/rm": taking(s.removeBusCredential),
	} {
		mux.HandleFunc(pattern, s.answer(answer))
	}
	mux.HandleFunc("GET /v1/logs", s.logs)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.fail(w, &Error{Status: http.StatusNotFound, Code: CodeBadRequest, Text: fmt.Sprintf("this meshd has no %s %s", r.Method, r.URL.Path), Remedy: "use a meshd command of the same version as the node"})
	})
	return mux
}

// answer runs a route for a known actor and sends what it gives.
func (s *Server) answer(do route) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		actor, known := r.Context().Value(actorKey{}).(string)
		if !known {
			s.fail(w, &Error{Status: http.StatusForbidden, Code: "no-actor", Text: "the kernel does not say who asks", Remedy: "ask through the node's own socket"})
			return
		}
		if err := receive(w, r); err != nil {
			s.fail(w, err)
			return
		}
		value, err := do(r, actor)
		if err != nil {
			s.fail(w, err)
			return
		}
		s.send(w, http.StatusOK, value)
	}
}

// receive reads the body, in its time and its bounds, before anything is done.
// The deadline ends with it: a later one would end the request itself.
func receive(w http.ResponseWriter, r *http.Request) error {
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Now().Add(bodyWithin)); err != nil {
		return err
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxBody))
	var big *http.MaxBytesError
	if errors.As(err, &big) {
		return &Error{Status: http.StatusRequestEntityTooLarge, Code: CodeTooBig, Text: fmt.Sprintf("a request has at most %d MiB", MaxBody>>20), Remedy: "send less at a time"}
	}
	if err != nil {
		return badRequest("the request did not come whole: "+err.Error(), "send it again")
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return control.SetReadDeadline(time.Time{})
}

// taking makes a route of a function that takes a decoded body.
func taking[T any](do func(ctx context.Context, actor string, body T) (any, error)) route {
	return func(r *http.Request, actor string) (any, error) {
		var body T
		if err := decode(r.Body, &body); err != nil {
			return nil, err
		}
		return do(r.Context(), actor, body)
	}
}

// encode writes v with <, > and & as they are: no browser reads this, and people
// do. It ends with a newline.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return b.Bytes(), err
}

// decode reads one JSON value, strictly.
func decode(from io.Reader, into any) error {
	d := json.NewDecoder(from)
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			return badRequest("something follows the JSON of the request", "send one value")
		}
		return nil
	}
	return badRequest("the request cannot be read: "+err.Error(), "use a meshd command of the same version as the node")
}

func (s *Server) fail(w http.ResponseWriter, err error) {
	e := asError(err)
	s.send(w, e.Status, e)
}

func (s *Server) send(w http.ResponseWriter, status int, value any) {
	body, err := encode(value)
	if err != nil {
		s.Log.Error("cannot encode a reply", "error", err)
		http.Error(w, `{"code":"failed","text":"the reply cannot be encoded"}`, http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if _, err := w.Write(body); err != nil {
		s.Log.Debug("a caller went away", "error", err)
	}
}

func (s *Server) overview(r *http.Request, _ string) (any, error) {
	if after := r.FormValue("after"); after != "" {
		index, err := strconv.ParseUint(after, 10, 64)
		if err != nil {
			return nil, badRequest(fmt.Sprintf("after=%q is no index", after), "write a number")
		}
		wait, err := time.ParseDuration(r.FormValue("wait"))
		if err != nil || wait < 0 || wait > MaxWait {
			return nil, badRequest(fmt.Sprintf("wait=%q is no time from 0 to %v", r.FormValue("wait"), MaxWait), "write a duration such as 10s")
		}
		ctx, cancel := context.WithTimeout(r.Context(), wait)
		defer cancel()
		if err := s.Reader.Wait(ctx, index); err != nil && ctx.Err() == nil {
			return nil, err
		}
		if err := r.Context().Err(); err != nil {
			return nil, err
		}
	}
	o, err := s.Reader.Overview(r.Context())
	if err != nil {
		return nil, err
	}
	o.State = withoutSecrets(o.State)
	return o, nil
}

// withoutSecrets is a copy of the state without what is sealed. It is of use to
// nobody but the nodes, and a person's JSON is kept and pasted.
func withoutSecrets(s *raftfsm.State) *raftfsm.State {
	c := s.Clone()
	c.Mesh.Secrets = ""
	for id, n := range c.Nodes {
		n.Secrets = ""
		c.Nodes[id] = n
	}
	for id, b := range c.Bindings {
		b.Credentials = unsealed(b.Credentials)
		c.Bindings[id] = b
	}
	for id, w := range c.Withdrawals {
		w.Credentials = unsealed(w.Credentials)
		c.Withdrawals[id] = w
	}
	return c
}

func unsealed(in []raftfsm.Credential) []raftfsm.Credential {
	out := make([]raftfsm.Credential, len(in))
	for i, c := range in {
		c.Sealed = ""
		out[i] = c
	}
	return out
}

func (s *Server) detail(r *http.Request, _ string) (any, error) {
	name := r.FormValue("name")
	if name == "" {
		return nil, badRequest("a detail is of something", "give its name")
	}
	tries, err := s.Reader.Detail(r.Context(), name)
	return Detail{Tries: tries, Problem: text(err)}, nil
}

func (s *Server) verify(r *http.Request, _ string) (any, error) {
	findings, err := s.Caller.Verify(r.Context())
	return Verified{Findings: findings, Problem: text(err)}, nil
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func (s *Server) plan(ctx context.Context, actor string, c Change) (any, error) {
	var cmd raftfsm.Command
	switch {
	case c.Push != nil && c.Remove == nil:
		cmd = raftfsm.Push{Documents: c.Push.Documents, Pending: c.Push.Pending, At: c.Push.At}
	case c.Remove != nil && c.Push == nil:
		cmd = *c.Remove
	default:
		return nil, badRequest("a plan is of one push or of one removal", "send one of the two")
	}
	plan, r := s.Writer.Preview(ctx, actor, cmd)
	if r != nil {
		return nil, refused(r)
	}
	return plan, nil
}

func (s *Server) push(ctx context.Context, actor string, p Push) (any, error) {
	cmds, err := split(p)
	if err != nil {
		return nil, err
	}
	var done Committed
	for _, cmd := range cmds {
		if done, err = s.propose(ctx, actor, cmd); err != nil {
			return nil, err
		}
	}
	return done, nil
}

func (s *Server) propose(ctx context.Context, actor string, cmd raftfsm.Command) (Committed, error) {
	result, err := s.Writer.Propose(ctx, actor, cmd)
	if err != nil {
		return Committed{}, err
	}
	if result.Rejection != nil {
		return Committed{}, refused(result.Rejection)
	}
	return Committed{result.Index}, nil
}

func (s *Server) remove(ctx context.Context, actor string, cmd raftfsm.Remove) (any, error) {
	return s.propose(ctx, actor, cmd)
}

func (s *Server) moveSeat(ctx context.Context, actor string, cmd raftfsm.MoveSeat) (any, error) {
	return s.propose(ctx, actor, cmd)
}

func (s *Server) token(ctx context.Context, actor string, t TokenRequest) (any, error) {
	if t.TTL <= 0 || t.TTL > maxTTL {
		return nil, badRequest(fmt.Sprintf("a join token cannot be good for %v", t.TTL), fmt.Sprintf("choose a time up to %v", maxTTL))
	}
	token, err := s.Members.Token(ctx, actor, t.TTL)
	return Token{token}, err
}

func (s *Server) removeNode(ctx context.Context, actor string, n NodeRequest) (any, error) {
	return nothing{}, s.Members.RemoveNode(ctx, actor, n.Name)
}

func (s *Server) leave(ctx context.Context, actor string, l LeaveRequest) (any, error) {
	return nothing{}, s.Members.Leave(ctx, actor, l.Force)
}

func (s *Server) busCredentials(*http.Request, string) (any, error) {
	return s.Bus.BusCredentials(), nil
}

func (s *Server) addBusCredential(ctx context.Context, actor string, b BusCredentialRequest) (any, error) {
	return s.Bus.AddBusCredential(ctx, actor, b.PublicKey, b.TTL)
}

func (s *Server) removeBusCredential(ctx context.Context, _ string, n NodeRequest) (any, error) {
	return nothing{}, s.Bus.RemoveBusCredential(ctx, n.Name)
}

func (s *Server) call(ctx context.Context, _ string, c Call) (any, error) {
	if c.Within < 0 || c.Within > MaxWithin {
		return nil, &raftfsm.Rejection{Code: "bad-timeout", Text: fmt.Sprintf("a call cannot take %v", c.Within), Remedy: fmt.Sprintf("choose up to %v: what takes longer answers with where it will be seen", MaxWithin)}
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(c.Within, DefaultWithin))
	defer cancel()
	reply, err := s.Caller.Call(ctx, c.Target, c.Data)
	if err != nil {
		return nil, err
	}
	reply.Data = bytes.TrimSpace(reply.Data)
	if len(reply.Data) == 0 {
		reply.Data = json.RawMessage("null")
	}
	if !json.Valid(reply.Data) {
		return nil, &Error{Status: http.StatusBadGateway, Code: CodeBadReply, Text: fmt.Sprintf("%s answered on %s with something that is not JSON; it did run", c.Target, reply.Node), Remedy: "mend the handler: a reply is JSON"}
	}
	return reply, nil
}

// trailer carries the error of a stream that had begun.
const trailer = "Meshd-Error"

func (s *Server) logs(w http.ResponseWriter, r *http.Request) {
	follow := r.FormValue("follow") == "true"
	lines, err := strconv.Atoi(r.FormValue("lines"))
	if err != nil || lines < 0 || lines > maxLines {
		s.fail(w, badRequest(fmt.Sprintf("lines=%q is no number from 0 to %d", r.FormValue("lines"), maxLines), "ask for fewer"))
		return
	}
	out := &stream{w: w}
	err = s.Logs.Logs(r.Context(), r.FormValue("name"), lines, follow, out)
	switch {
	case err == nil || r.Context().Err() != nil:
	case !out.begun:
		s.fail(w, err)
	default:
		if body, err := json.Marshal(asError(err)); err == nil { // plain data: it cannot fail
			w.Header().Set(http.TrailerPrefix+trailer, string(body))
		}
	}
}

// stream sends each write on at once.
type stream struct {
	w     http.ResponseWriter
	begun bool
}

func (s *stream) Write(b []byte) (int, error) {
	if !s.begun {
		s.begun = true
		s.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	}
	n, err := s.w.Write(b)
	if err == nil {
		err = http.NewResponseController(s.w).Flush()
	}
	return n, err
}
