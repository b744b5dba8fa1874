package jetstream

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
)

// natsLog hands the server's log to slog and keeps its fatal error, which is
// how the server says that it could not start.
type natsLog struct {
	to    *slog.Logger
	mu    sync.Mutex
	fatal error
}

func (l *natsLog) fault() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatal
}

func (l *natsLog) Fatalf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fatal = errors.Join(l.fatal, fmt.Errorf(format, args...))
}

func (l *natsLog) Errorf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if strings.Contains(text, "authentication error") {
		// One line for each attempt of a withdrawn login, for as long as its
		// application goes on trying.
		l.to.Debug("store refused a login", "text", text)
		return
	}
	l.to.Warn("store error", "text", text)
}

func (l *natsLog) Warnf(format string, args ...any) {
	l.to.Warn("store warning", "text", fmt.Sprintf(format, args...))
}

func (l *natsLog) Noticef(format string, args ...any) {
	l.to.Debug("store notice", "text", fmt.Sprintf(format, args...))
}

func (l *natsLog) Debugf(string, ...any) {}
func (l *natsLog) Tracef(string, ...any) {}
