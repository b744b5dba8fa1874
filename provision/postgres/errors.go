package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"

	"meshd/provision"
)

// Codes of https://www.postgresql.org/docs/current/errcodes-appendix.html that
// steps look at; classify has the rest.
const (
	invalidSchema   = "3F000"
	dependentsExist = "2BP01"
	objectInUse     = "55006"
)

var errStandby = errors.New("the server is in recovery: it is a standby, or still starting")

// dialError is a connection that was not made. It does not unwrap, because the
// driver replaces whatever unwraps to a timeout.
type dialError struct{ err error }

func (e *dialError) Error() string { return e.err.Error() }

// handshakeError is a TLS handshake that failed after the server had agreed to it.
type handshakeError struct{ err error }

func (e *handshakeError) Error() string { return "TLS handshake: " + e.err.Error() }
func (e *handshakeError) Unwrap() error { return e.err }

// environmentError is a variable of our own process that the driver's parser
// cannot be kept from reading.
type environmentError struct{ err error }

func (e *environmentError) Error() string {
	return "the environment of meshd has PGSERVICE, which names a service that cannot be read: unset it"
}

// code returns the SQLSTATE of err, or "".
func code(err error) string {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pg.Code
	}
	return ""
}

// classify makes err an *provision.Error, unless it is one.
func classify(ctx context.Context, step string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*provision.Error](err); ok {
		return e
	}
	class := classOf(ctx, err)
	// The driver's connect error carries its whole configuration, password and
	// all, to whoever takes it apart.
	if c, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		err = c.Unwrap()
	}
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Detail != "" {
		err = fmt.Errorf("%w: %s", err, strings.ReplaceAll(pg.Detail, "\n", "; "))
	}
	return &provision.Error{Step: step, Class: class, Err: err}
}

// consumerError is classify for what we do as a consumer: a right that is
// missing there is not our admin's.
func consumerError(ctx context.Context, step string, err error) error {
	err = classify(ctx, step, err)
	if e, ok := errors.AsType[*provision.Error](err); ok && e.Class == provision.MissingRight {
		e.Class = provision.Refused
	}
	return err
}

func classOf(ctx context.Context, err error) provision.Class {
	if c := code(err); c != "" {
		return classOfCode(c)
	}
	switch {
	case is[*environmentError](err):
		return provision.BadConfig
	case errors.Is(ctx.Err(), context.Canceled):
		return provision.Internal // the caller gave up: no fault of the service
	case is[*dialError](err), is[*net.DNSError](err):
		return provision.Unreachable
	case ctx.Err() != nil, errors.Is(err, context.DeadlineExceeded):
		return provision.TimedOut
	case cutOff(err):
		return provision.Unreachable
	case is[*handshakeError](err), strings.Contains(err.Error(), "server refused TLS connection"):
		return provision.TLSFault // the second has no type; a test keeps the text
	case pgconn.Timeout(err):
		return provision.TimedOut
	}
	return provision.Internal
}

// is says whether a T is in err's tree.
func is[T error](err error) bool {
	_, ok := errors.AsType[T](err)
	return ok
}

// cutOff says whether a connection that was made ended under us.
func cutOff(err error) bool {
	for _, end := range []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, pgconn.ErrConnClosed, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

// classOfCode sorts SQLSTATEs.
func classOfCode(code string) provision.Class {
	switch code {
	case "25006": // read_only_sql_transaction
		return provision.ReadOnly
	case "57P03": // cannot_connect_now: starting, stopping or recovering
		return provision.Recovery
	case "42501": // insufficient_privilege
		return provision.MissingRight
	case "57014": // query_canceled, by statement_timeout
		return provision.TimedOut
	case "57P01", "57P02", "57P05": // ended by an administrator, a crash, an idle limit
		return provision.Unreachable
	case "3D000": // invalid_catalog_name: the database is not there
		return provision.Refused
	case dependentsExist, objectInUse, "55P03", "55000": // in use, lock not available, not in the right state
		return provision.Blocked
	}
	switch code[:2] {
	case "28": // invalid authorization
		return provision.Refused
	case "53": // insufficient resources: disk, memory, connections
		return provision.Full
	case "08": // connection exception
		return provision.Unreachable
	}
	return provision.Internal
}

// passing says whether the same statement may work at once: somebody else had
// changed the same catalog row, or stood in the way for a moment.
func passing(err error) bool {
	switch code(err) {
	case "XX000": // "tuple concurrently updated"
		pg, _ := errors.AsType[*pgconn.PgError](err)
		return strings.Contains(pg.Message, "tuple concurrently")
	case "40P01", objectInUse: // deadlock_detected
		return true
	}
	return false
}
