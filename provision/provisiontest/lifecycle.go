package provisiontest

import (
	"context"
	"slices"
	"strings"
	"sync"

	"meshd/provision"
)

func ensureIsIdempotent(b *bench) {
	res, login := b.minted()
	b.ok(b.Ensure(b.ctx(), res, login), "second Ensure")
	b.ok(b.Verify(b.ctx(), res, login), "Verify")
	b.wantObserved(b.found(res, ""), b.found(res, login.Name))

	fields := b.fields(res, login)
	b.ok(b.Kind.Check(b.ctx(), fields), "Check")
	for name, value := range fields {
		if name == "" || value == "" {
			b.Errorf("Fields has an empty name or value: %q", name)
		}
		if strings.Contains(value, login.Secret) && name != "password" && !strings.Contains(name, "ur") {
			b.Errorf("Fields shows the secret in %q; it belongs in password, and in a uri or url", name)
		}
	}
	if fields["type"] == "" {
		b.Error("Fields has no type")
	}

	s := b.dial(res, login)
	b.ok(s.Put(b.ctx(), "k", "v"), "Put")
	if got, err := s.Get(b.ctx(), "k"); got != "v" || err != nil {
		b.Errorf("Get: got %q, %v", got, err)
	}
}

func ensureMendsTheSecret(b *bench) {
	res, old := b.minted()
	changed := old
	changed.Secret = secret()
	b.secrets = append(b.secrets, changed.Secret)
	b.want(b.Verify(b.ctx(), res, changed), "Verify with a wrong secret", provision.Refused)
	b.want(b.Kind.Check(b.ctx(), b.fields(res, changed)), "Check with a wrong secret", provision.Refused)

	b.ok(b.Ensure(b.ctx(), res, changed), "Ensure with another secret")
	b.ok(b.Verify(b.ctx(), res, changed), "Verify with the new secret")
	b.want(b.Verify(b.ctx(), res, old), "Verify with the old secret", provision.Refused)
}

func sessionsAreCounted(b *bench) {
	res, login := b.minted()
	b.sessions(login, 0)
	one := b.dial(res, login)
	b.sessions(login, 1)
	two := b.dial(res, login)
	b.ok(b.Verify(b.ctx(), res, login), "Verify") // is no session of the consumer's
	b.sessions(login, 2)
	b.ok(one.Close(), "Close")
	b.ok(two.Close(), "Close")
	b.sessions(login, 0)
}

// rotationUnderLoad replaces a credential while a writer opens one session after
// the other: none may fail.
func rotationUnderLoad(b *bench) {
	if !b.Kind.Traits().Overlap {
		b.Log("this kind has no two valid generations: nothing to rotate without a gap")
		return
	}
	res, old := b.minted()
	w := &writer{fields: b.fields(res, old)}
	ctx, stop := context.WithCancel(b.ctx())
	var running sync.WaitGroup
	running.Go(func() { w.loop(ctx, b.Dial) })
	defer running.Wait()
	defer stop()
	more := func() {
		before, _ := w.status()
		b.until("ten more writes", func() bool {
			n, err := w.status()
			b.ok(err, "write under load")
			return n >= before+10
		})
	}

	more()
	next := b.login(res)
	b.ok(b.Ensure(b.ctx(), res, next), "Ensure the next generation")
	b.ok(b.Verify(b.ctx(), res, next), "Verify the next generation")
	more()
	w.deliver(b.fields(res, next))
	more()
	b.sessions(old, 0)
	_, err := b.Withdraw(b.ctx(), res, []provision.Login{old})
	b.ok(err, "Withdraw the old generation")
	more()

	b.want(b.Verify(b.ctx(), res, old), "Verify the old generation", provision.Refused)
	b.wantObserved(b.found(res, ""), b.found(res, next.Name))
}

func withdrawEndsSessions(b *bench) {
	res, one := b.minted()
	two := b.login(res)
	b.ok(b.Ensure(b.ctx(), res, two), "Ensure")
	stays := b.login(res)
	b.ok(b.Ensure(b.ctx(), res, stays), "Ensure")
	live := []Session{b.dial(res, one), b.dial(res, two), b.dial(res, two)}
	other := b.dial(res, stays)
	b.ok(live[0].Put(b.ctx(), "k", "kept"), "Put")
	b.sessions(two, 2)

	ended, err := b.Withdraw(b.ctx(), res, []provision.Login{one, two})
	b.ok(err, "Withdraw")
	if ended != len(live) {
		b.Errorf("Withdraw ended %d sessions, want %d", ended, len(live))
	}
	for _, s := range live {
		if err := s.Put(b.ctx(), "k", "late"); err == nil {
			b.Error("a session of a withdrawn login still writes")
		}
	}
	for _, l := range []provision.Login{one, two} {
		b.want(b.Verify(b.ctx(), res, l), "Verify a withdrawn login", provision.Refused)
		b.sessions(l, 0)
	}
	if got, err := other.Get(b.ctx(), "k"); got != "kept" || err != nil {
		b.Errorf("the session of another login: got %q, %v", got, err)
	}
	b.wantObserved(b.found(res, ""), b.found(res, stays.Name))

	ended, err = b.Withdraw(b.ctx(), res, []provision.Login{one, two})
	b.ok(err, "second Withdraw")
	if ended != 0 {
		b.Errorf("the second Withdraw ended %d sessions", ended)
	}
}

func withdrawOfWhatIsGone(b *bench) {
	res, login := b.minted()
	b.ok(b.Drop(b.ctx(), login), "drop by hand")
	never := provision.Login{Name: login.Name + "_never"} // and without a secret
	ended, err := b.Withdraw(b.ctx(), res, []provision.Login{login, never})
	b.ok(err, "Withdraw after a drop by hand")
	if ended != 0 {
		b.Errorf("Withdraw ended %d sessions of logins that are not there", ended)
	}
	b.wantObserved(b.found(res, ""))

	// A name only is enough for a login that exists, too.
	again := b.login(res)
	b.ok(b.Ensure(b.ctx(), res, again), "Ensure")
	_, err = b.Withdraw(b.ctx(), res, []provision.Login{{Name: again.Name}})
	b.ok(err, "Withdraw without the secret")
	b.want(b.Verify(b.ctx(), res, again), "Verify", provision.Refused)
}

func returnFindsItsData(b *bench) {
	res, first := b.minted()
	s := b.dial(res, first)
	b.ok(s.Put(b.ctx(), "k", "first"), "Put")
	_, err := b.Withdraw(b.ctx(), res, []provision.Login{first})
	b.ok(err, "Withdraw")

	b.restart()
	back := b.login(res)
	b.ok(b.Ensure(b.ctx(), res, back), "Ensure")
	b.ok(b.Verify(b.ctx(), res, back), "Verify")
	s = b.dial(res, back)
	if got, err := s.Get(b.ctx(), "k"); got != "first" || err != nil {
		b.Fatalf("Get after the return: got %q, %v", got, err)
	}
	b.ok(s.Put(b.ctx(), "k", "second"), "Put over what the first login wrote")
}

func purge(b *bench) {
	res, login := b.minted()
	s := b.dial(res, login)
	b.ok(s.Put(b.ctx(), "k", "v"), "Put")
	_, err := b.Withdraw(b.ctx(), res, []provision.Login{login})
	b.ok(err, "Withdraw")
	b.wantObserved(b.found(res, ""))

	b.ok(b.Purge(b.ctx(), res), "Purge")
	b.wantObserved()
	b.ok(b.Purge(b.ctx(), res), "second Purge")

	again := b.login(res)
	b.ok(b.Ensure(b.ctx(), res, again), "Ensure after Purge")
	s = b.dial(res, again)
	if got, err := s.Get(b.ctx(), "k"); got != "" || err != nil {
		b.Errorf("Get after Purge: got %q, %v", got, err)
	}
}

func foreignIsRefused(b *bench) {
	res := provision.Resource{ID: "id-" + b.run, Name: "pt_" + b.run + "_foreign"}
	login := provision.Login{Name: "pt_" + b.run + "_theirs", Secret: secret()}
	free := provision.Login{Name: "pt_" + b.run + "_free", Secret: secret()}
	b.Plant(b.T, res, login)

	b.want(b.Ensure(b.ctx(), res, free), "Ensure on a foreign resource", provision.Foreign)
	b.want(b.Purge(b.ctx(), res), "Purge of a foreign resource", provision.Foreign)

	ours := b.resource()
	b.want(b.Ensure(b.ctx(), ours, login), "Ensure of a foreign login", provision.Foreign)
	_, err := b.Withdraw(b.ctx(), ours, []provision.Login{login})
	b.want(err, "Withdraw of a foreign login", provision.Foreign)
	for name := range b.observed() {
		if name == res.Name || name == login.Name || name == free.Name {
			b.Errorf("Observe names %q, which is foreign or was refused", name)
		}
	}

	// A login of another resource of ours is foreign as well.
	first, taken := b.minted()
	second := b.resource()
	b.want(b.Ensure(b.ctx(), second, taken), "Ensure of another resource's login", provision.Foreign)
	b.ok(b.Verify(b.ctx(), first, taken), "Verify it where it belongs")
}

func meshesAreApart(b *bench) {
	res, login := b.minted()
	other := b.open(b.Config.Mesh + "-other")
	defer func() { b.ok(other.Close(), "Close") }()
	found, err := other.Observe(b.ctx())
	b.ok(err, "Observe of another mesh")
	if slices.ContainsFunc(found, func(f provision.Found) bool { return f.Name == res.Name || f.Name == login.Name }) {
		b.Errorf("another mesh observes what is ours: %v", found)
	}
	b.want(other.Ensure(b.ctx(), res, login), "Ensure by another mesh", provision.Foreign)
	_, err = other.Withdraw(b.ctx(), res, []provision.Login{login})
	b.want(err, "Withdraw by another mesh", provision.Foreign)
	b.want(other.Purge(b.ctx(), res), "Purge by another mesh", provision.Foreign)
	b.ok(b.Verify(b.ctx(), res, login), "Verify after that")
}

func consumersAreApart(b *bench) {
	res1, login1 := b.minted()
	res2, login2 := b.minted()
	s1, s2 := b.dial(res1, login1), b.dial(res2, login2)
	b.ok(s1.Put(b.ctx(), "k", "one"), "Put")
	b.ok(s2.Put(b.ctx(), "k", "two"), "Put")
	for want, s := range map[string]Session{"one": s1, "two": s2} {
		if got, err := s.Get(b.ctx(), "k"); got != want || err != nil {
			b.Errorf("Get: got %q, %v, want %q", got, err, want)
		}
	}
	if b.Trespass(b.ctx(), b.fields(res1, login1), res2) == nil {
		b.Error("the first consumer can use the second's resource")
	}
	if b.Trespass(b.ctx(), b.fields(res2, login2), res1) == nil {
		b.Error("the second consumer can use the first's resource")
	}
}

// hostileNames sends what the contract says that no caller sends: it is refused
// and changes nothing, or it works under exactly that name.
func hostileNames(b *bench) {
	hostile := []string{
		"", " ", "a b", "Upper", "with-dash", "a.b", "a/b", "../a", `a"b`, `a'b`, "a`b", `a\`, "a;b", "a*", "a?", "a%", "a:b",
		"a@b", "a\nb", "a\x00b", "é", "pg_meshd", "public", `x"; DROP ROLE postgres; --`, `x'; DROP ROLE postgres; --`,
		"pt_" + strings.Repeat("x", 61), "pt_" + strings.Repeat("x", 300),
	}
	res, login := b.minted()
	before, err := b.Observe(b.ctx())
	b.ok(err, "Observe")
	try := func(res provision.Resource, login provision.Login) {
		err := b.Ensure(b.ctx(), res, login)
		if err == nil {
			b.ok(b.Verify(b.ctx(), res, login), "Verify of a strange name")
			found, err := b.Observe(b.ctx())
			b.ok(err, "Observe")
			for _, want := range []provision.Found{b.found(res, ""), b.found(res, login.Name)} {
				if !slices.Contains(found, want) {
					b.Errorf("Ensure took %q and %q; Observe has no %v", res.Name, login.Name, want)
				}
			}
		} else {
			b.want(err, "Ensure of a strange name", provision.Internal, provision.BadConfig, provision.Foreign)
		}
	}
	for i, name := range hostile {
		fresh := provision.Login{Name: "pt_" + b.run + "_h", Secret: secret()}
		strange := provision.Resource{ID: "id-" + b.run + "-h", Name: name}
		try(strange, fresh)
		_, err := b.Withdraw(b.ctx(), strange, []provision.Login{fresh})
		b.tidy(err)
		b.tidy(b.Purge(b.ctx(), strange))

		odd := provision.Login{Name: name, Secret: secret()}
		try(res, odd)
		_, err = b.Withdraw(b.ctx(), res, []provision.Login{odd})
		b.tidy(err)
		if after, err := b.Observe(b.ctx()); err != nil || !slices.Equal(after, before) {
			b.Fatalf("after hostile name %d, %q: Observe: got %v, %v, want %v", i, name, after, err, before)
		}
	}
	b.ok(b.Verify(b.ctx(), res, login), "Verify after all of them")
}

// tidy accepts success and the refusal of a strange name.
func (b *bench) tidy(err error) {
	b.Helper()
	if err != nil {
		b.want(err, "cleaning up a strange name", provision.Internal, provision.BadConfig, provision.Foreign)
	}
}
