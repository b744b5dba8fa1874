package postgres_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"meshd/provision/postgres/pgtest"
)

// A watch ends with its server and with its context, and with nothing else.
func TestWatch(t *testing.T) {
	need(t)
	pg, err := pgtest.Start(pgtest.Options{}) // one that can be stopped
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ok(t, "Close", pg.Close()) })
	watches := func() (n int) {
		conn, err := pgx.Connect(t.Context(), pg.AdminURL())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.WithoutCancel(t.Context()))
		err = conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'meshd' AND state = 'idle'`).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	p := open(t, pg, plain(pg), nil)
	watch := func(ctx context.Context) <-chan error {
		ended := make(chan error, 1)
		go func() { ended <- p.Watch(ctx) }()
		until(t, "the watch to be there", func() bool { return watches() == 1 })
		return ended
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := watch(ctx)
	ok(t, "Preflight", p.Preflight(t.Context()))
	select {
	case err := <-ended:
		t.Fatalf("it ended by itself: %v", err)
	default:
	}
	cancel()
	<-ended
	until(t, "its session to be gone", func() bool { return watches() == 0 })
	ended = watch(t.Context())
	ok(t, "Stop", pg.Stop())
	if err := <-ended; err == nil {
		t.Error("the server was stopped, and the watch ended well")
	}
	ok(t, "Start", pg.Start())
}
