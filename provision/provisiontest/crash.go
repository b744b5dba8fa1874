package provisiontest

import (
	"context"
	"fmt"
	"time"

	"meshd/provision"
)

func serviceAway(b *bench) {
	res, login := b.minted()
	s := b.dial(res, login)
	b.ok(s.Put(b.ctx(), "k", "v"), "Put")
	b.Faults.Cut(0)
	defer b.Faults.Heal()
	_, inUse := b.InUse(b.ctx(), login)
	_, withdraw := b.Withdraw(b.ctx(), res, []provision.Login{login})
	_, observe := b.Observe(b.ctx())
	calls := map[string]error{
		"Preflight": b.Preflight(b.ctx()),
		"Ensure":    b.Ensure(b.ctx(), res, login),
		"Verify":    b.Verify(b.ctx(), res, login),
		"Check":     b.Kind.Check(b.ctx(), b.fields(res, login)),
		"Withdraw":  withdraw,
		"Purge":     b.Purge(b.ctx(), res),
		"Observe":   observe,
	}
	if b.Kind.Traits().SeesInUse {
		calls["InUse"] = inUse
	}
	for name, err := range calls {
		b.want(err, name+" of a service that is away", provision.Unreachable)
	}

	b.Faults.Heal()
	b.ok(b.Preflight(b.ctx()), "Preflight once it is back")
	b.ok(b.Verify(b.ctx(), res, login), "Verify once it is back")
	if got, err := b.dial(res, login).Get(b.ctx(), "k"); got != "v" || err != nil {
		b.Errorf("Get once it is back: got %q, %v", got, err)
	}
}

func serviceHangs(b *bench) {
	res, login := b.minted()
	b.Faults.Stall()
	defer b.Faults.Heal()
	for name, call := range map[string]func(context.Context) error{
		"Preflight": b.Preflight,
		"Ensure":    func(ctx context.Context) error { return b.Ensure(ctx, res, login) },
		"Verify":    func(ctx context.Context) error { return b.Verify(ctx, res, login) },
		"Check":     func(ctx context.Context) error { return b.Kind.Check(ctx, b.fields(res, login)) },
		"Withdraw": func(ctx context.Context) error {
			_, err := b.Withdraw(ctx, res, []provision.Login{login})
			return err
		},
		"Purge": func(ctx context.Context) error { return b.Purge(ctx, res) },
		"Observe": func(ctx context.Context) error {
			_, err := b.Observe(ctx)
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(b.ctx(), 200*time.Millisecond)
		began := time.Now()
		err := call(ctx)
		took := time.Since(began)
		cancel()
		b.want(err, name+" of a service that hangs", provision.TimedOut)
		if took > patience/2 {
			b.Errorf("%s of a service that hangs: returned %v after its deadline", name, took)
		}
	}
	b.Faults.Heal()
	b.ok(b.Verify(b.ctx(), res, login), "Verify once it answers")
}

// sweep cuts call after its first step, its second, and so on, until it gets
// through, and runs then after each as a new process would.
func (b *bench) sweep(prepare func() (call func() error, then func())) {
	const most = 500 // steps, an order of magnitude above what a call takes
	for steps := 1; steps < most; steps++ {
		call, then := prepare()
		b.Faults.Cut(steps)
		err := call()
		b.Faults.Heal()
		if err != nil {
			b.want(err, fmt.Sprintf("cut after step %d", steps), provision.Unreachable)
		}
		b.restart()
		then()
		if b.Failed() {
			b.Fatalf("this was after a cut after step %d", steps)
		}
		if err == nil {
			b.Logf("got through with %d steps", steps)
			return
		}
	}
	b.Fatalf("still not through after %d steps", most)
}

func crashInEnsure(b *bench) {
	b.sweep(func() (func() error, func()) {
		res := b.resource()
		login := b.login(res)
		call := func() error { return b.Ensure(b.ctx(), res, login) }
		return call, func() {
			b.ok(b.Ensure(b.ctx(), res, login), "Ensure after the crash")
			b.ok(b.Verify(b.ctx(), res, login), "Verify after the crash")
			b.leave(res, login)
		}
	})
}

// leave withdraws and purges, and sees that nothing is left.
func (b *bench) leave(res provision.Resource, login provision.Login) {
	b.Helper()
	_, err := b.Withdraw(b.ctx(), res, []provision.Login{login})
	b.ok(err, "Withdraw")
	b.want(b.Verify(b.ctx(), res, login), "Verify after Withdraw", provision.Refused)
	b.ok(b.Purge(b.ctx(), res), "Purge")
	b.wantObserved()
}

// crashInEnsureThenLeave is a consumer that goes before its login was made.
func crashInEnsureThenLeave(b *bench) {
	b.sweep(func() (func() error, func()) {
		res := b.resource()
		login := b.login(res)
		call := func() error { return b.Ensure(b.ctx(), res, login) }
		return call, func() { b.leave(res, login) }
	})
}

func crashInWithdraw(b *bench) {
	res, stays := b.minted()
	b.ok(b.dial(res, stays).Put(b.ctx(), "k", "kept"), "Put")
	b.sweep(func() (func() error, func()) {
		login := b.login(res)
		b.ok(b.Ensure(b.ctx(), res, login), "Ensure")
		b.dial(res, login)
		call := func() error {
			_, err := b.Withdraw(b.ctx(), res, []provision.Login{login})
			return err
		}
		return call, func() {
			_, err := b.Withdraw(b.ctx(), res, []provision.Login{login})
			b.ok(err, "Withdraw after the crash")
			b.want(b.Verify(b.ctx(), res, login), "Verify after Withdraw", provision.Refused)
			b.wantObserved(b.found(res, ""), b.found(res, stays.Name))
		}
	})
	if got, err := b.dial(res, stays).Get(b.ctx(), "k"); got != "kept" || err != nil {
		b.Errorf("Get after all crashes: got %q, %v", got, err)
	}
}

func crashInPurge(b *bench) {
	b.sweep(func() (func() error, func()) {
		res := b.resource()
		login := b.login(res)
		b.ok(b.Ensure(b.ctx(), res, login), "Ensure")
		_, err := b.Withdraw(b.ctx(), res, []provision.Login{login})
		b.ok(err, "Withdraw")
		call := func() error { return b.Purge(b.ctx(), res) }
		return call, func() {
			b.ok(b.Purge(b.ctx(), res), "Purge after the crash")
			b.wantObserved()
		}
	})
}
