package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"meshd/peer/cli"
)

// TestMain makes this binary the programs that the scripts run as well: each is
// started from a directory in PATH, under its own name.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"meshd": func() {
			ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
			code := cli.Main(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
			stop()
			os.Exit(code)
		},
		"app":    app,
		"busapp": busapp,
		"kvapp":  kvapp,
		"stock":  stock,
	})
}

// TestScripts passes testdata/*.txt, each with a mesh of its own. As many run at
// a time as there are processors, and a quarter of that under the race detector: a
// raft whose heartbeats are late does nothing but elect.
func TestScripts(t *testing.T) {
	meshd, err := exec.LookPath("meshd")
	if err != nil {
		t.Fatal(err)
	}
	// Not in $WORK, which is too long for the path of a socket.
	root, err := os.MkdirTemp("", "mesh")
	if err != nil {
		t.Fatal(err)
	}
	work := filepath.Join(root, "work")
	if err := os.Mkdir(work, 0o700); err != nil {
		t.Fatal(err)
	}
	alive, err := holdAlive(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		left, err := find(func(env string) bool { return strings.Contains(env, root+"/") })
		if err != nil || len(left) > 0 {
			t.Errorf("processes %v of the scripts are there still (%v)", left, err)
		}
		alive.Close()
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	slots := make(chan struct{}, max(runtime.GOMAXPROCS(0)/slowness, 1))
	testscript.Run(t, testscript.Params{
		Dir: "testdata", WorkdirRoot: work,
		Setup: func(env *testscript.Env) error {
			slots <- struct{}{}
			env.Defer(func() { <-slots })
			dir, err := os.MkdirTemp(root, "")
			if err != nil {
				return err
			}
			s := newStage(env.T(), New(meshd, filepath.Clean(dir)))
			env.Values[stageKey{}] = s
			env.Defer(s.close)
			return nil
		},
		Cmds: commands(),
		// A machine that cannot have what a script needs skips it, and fails it where all is required.
		Condition: func(name string) (bool, error) {
			if name != "wires" {
				return false, fmt.Errorf("there is no condition %q", name)
			}
			err := wirable()
			if err != nil && os.Getenv("MESHD_REQUIRE_SERVERS") == "1" {
				return false, err
			}
			return err == nil, nil
		},
	})
}
