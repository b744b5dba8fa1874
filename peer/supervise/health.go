package supervise

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os/exec"
	"reflect"
	"syscall"
	"time"
)

// eager bounds the time between checks of a process that is starting, so that a
// push sees it healthy soon after it is.
const eager = 250 * time.Millisecond

// probe is the check of one running process. At most one check is under way.
type probe struct {
	spec    Spec
	started time.Time
	result  chan error // size one: a check never waits for its reader
	cancel  context.CancelFunc

	busy  bool
	due   time.Time
	fails int // consecutive ones
	state State
	text  string
}

func newProbe(spec Spec, started time.Time) *probe {
	return &probe{spec: spec, started: started, result: make(chan error, 1), state: Starting, due: time.Now()}
}

func (p *probe) is(h *Health) bool { return h != nil && reflect.DeepEqual(*p.spec.Health, *h) }

func (p *probe) stop() {
	if p.cancel != nil {
		p.cancel()
	}
}

// judge takes the result of a check. Failures in the grace after the start are
// shown, and not counted.
func (p *probe) judge(err error) {
	h := p.spec.Health
	p.cancel()
	p.busy = false
	pause := h.Every
	switch {
	case err == nil:
		p.fails, p.state, p.text = 0, Healthy, "ok"
	case p.state == Starting && time.Since(p.started) < h.Grace:
		p.text, pause = err.Error(), min(h.Every, eager)
	default:
		p.fails++
		p.text = err.Error()
		if p.fails >= h.Fails {
			p.state = Unhealthy
		}
	}
	p.due = time.Now().Add(pause)
}

// check begins one check of p.
func (s *Supervisor) check(ctx context.Context, p *probe) {
	ctx, p.cancel = context.WithTimeout(ctx, p.spec.Health.Timeout)
	p.busy = true
	s.wg.Go(func() { p.result <- s.probe(ctx, p.spec) })
}

func (s *Supervisor) probe(ctx context.Context, spec Spec) error {
	var err error
	switch h := spec.Health; {
	case h.HTTP != "":
		err = probeHTTP(ctx, h.HTTP)
	case h.TCP != "":
		var c net.Conn
		if c, err = new(net.Dialer).DialContext(ctx, "tcp", h.TCP); err == nil {
			err = c.Close()
		}
	default:
		err = s.probeExec(ctx, spec)
	}
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("no answer within %v", spec.Health.Timeout)
	}
	return err
}

func probeHTTP(ctx context.Context, target string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return errors.New("the URL is not valid")
	}
	req.Header.Set("User-Agent", "meshd-health")
	// The rest of a URL can hold a password or a token.
	shown := req.URL.Scheme + "://" + req.URL.Host + req.URL.Path
	client := http.Client{
		// One connection a check: a kept one says nothing about the next caller.
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := client.Do(req)
	if err != nil {
		var quoted *url.Error // it quotes the whole of it
		if errors.As(err, &quoted) {
			err = quoted.Err
		}
		return fmt.Errorf("get %s: %w", shown, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode >= 400 {
		return fmt.Errorf("get %s: status %d", shown, resp.StatusCode)
	}
	return nil
}

// probeExec runs the check as the process runs. It carries the token of its
// name, so that it does not outlive the process if we are killed.
func (s *Supervisor) probeExec(ctx context.Context, spec Spec) error {
	argv := spec.Health.Exec
	u, err := LookupUser(spec.User)
	if err != nil {
		return err
	}
	output, err := s.logs.open(spec.Name)
	if err != nil {
		return err
	}
	defer output.Close()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = spec.Dir, output, output
	cmd.Env = append([]string{tokenKey + "=" + s.instance + ":" + spec.Name + ":check"}, environment(u, spec.Env)...)
	// A session of its own tells what it leaves behind from our other children:
	// see reapOrphans.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: u.credential()}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run %s: %w", argv[0], err)
	}
	pid := cmd.Process.Pid
	s.mu.Lock()
	s.children[pid] = true
	s.mu.Unlock()
	defer s.forget(pid)
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("run %s: %w", argv[0], err)
	}
	return nil
}
