package consensus

import (
	"strings"
	"testing"
	"time"
)

func TestTimingsAreJudgedTogether(t *testing.T) {
	for name, ok := range map[string]Timing{"lan": LAN(), "slow": Slow(), "wan": WAN()} {
		if err := ok.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, tc := range map[string]struct {
		edit func(*Timing)
		want []string
	}{
		"renew too rarely":   {func(x *Timing) { x.Renew = 400 * time.Millisecond }, []string{"at most a quarter of the lease"}},
		"lease too short":    {func(x *Timing) { x.Lease, x.Renew = 400*time.Millisecond, 100*time.Millisecond }, []string{"at least 500ms", "2.5 heartbeats"}},
		"lease and leader":   {func(x *Timing) { x.Lease, x.Renew = time.Second, 100*time.Millisecond }, []string{"losing a leader ends every lease"}},
		"leader lease long":  {func(x *Timing) { x.LeaderLease = 500 * time.Millisecond }, []string{"must not exceed the heartbeat"}},
		"leader lease short": {func(x *Timing) { x.LeaderLease = 100 * time.Millisecond }, []string{"at least half the heartbeat"}},
		"beat too rarely":    {func(x *Timing) { x.Beat = 110 * time.Millisecond }, []string{"beat 110ms", "at most a quarter of the leader lease"}},
		"election":           {func(x *Timing) { x.Election = 100 * time.Millisecond }, []string{"must not be below the heartbeat"}},
		"rpc":                {func(x *Timing) { x.RPC = 100 * time.Millisecond }, []string{"must not be below the leader lease"}},
		"nothing":            {func(x *Timing) { *x = Timing{} }, []string{"heartbeat 0s", "beat 0s", "commit 0s", "lease 0s", "renew 0s"}},
	} {
		t.Run(name, func(t *testing.T) {
			x := LAN()
			tc.edit(&x)
			err := x.Validate()
			if err == nil {
				t.Fatal("accepted")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
		})
	}
}

func TestDecideVoters(t *testing.T) {
	now := time.Unix(1000, 0)
	const last = 10000
	// One word a server: its id, "*" for a voter, then how long it is silent, then how far behind.
	server := func(w string) Server {
		f := strings.Split(w, ",")
		s := Server{ID: strings.TrimSuffix(f[0], "*"), Voter: strings.HasSuffix(f[0], "*"), Matched: last, Acked: now}
		for _, x := range f[1:] {
			if d, err := time.ParseDuration(x); err == nil {
				s.Acked = now.Add(-d)
			} else if x == "behind" {
				s.Matched = last - caughtUp - 1
			} else if x == "unheard" {
				s.Matched = 0
			} else {
				t.Fatalf("server %q", w)
			}
		}
		return s
	}
	for _, tc := range []struct{ name, members, servers, want string }{
		{"one node", "a", "a*", ""},
		{"a second node joins", "a b", "a*", "add learner b"},
		{"two nodes have one voter", "a b", "a* b", ""},
		{"a third node joins", "a b c", "a* b", "add learner c"},
		{"three nodes have three voters", "a b c", "a* b c", "promote b"},
		{"one after the other", "a b c", "a* b* c", "promote c"},
		{"three voters are enough", "a b c d e", "a* b* c* d e", ""},
		{"everybody is added first", "a b c d", "a* b", "add learner c"},
		{"a learner that is behind gets no vote", "a b c", "a* b,behind c", "promote c"},
		{"nor one that has not been heard of yet", "a b c", "a* b,unheard c,unheard", ""},
		{"nor one that is silent", "a b c", "a* b,3s c,behind", ""},
		{"nor any while a voter is silent", "a b c", "a* b*,3s c", ""},
		{"a dead voter keeps its vote where nobody can take it", "a b c", "a* b* c*,2h", ""},
		{"and where the others are learners behind", "a b c d", "a* b* c*,2h d,behind", ""},
		{"a voter that reboots keeps its vote", "a b c d", "a* b* c*,59s d", ""},
		{"a lost voter is replaced by adding", "a b c d", "a* b* c*,61s d", "promote d"},
		{"and then demoting", "a b c d", "a* b* c*,61s d*", "demote c"},
		{"it comes back as a learner", "a b c d", "a* b* c d*", ""},
		{"no replacing while another is silent", "a b c d", "a* b*,3s c*,61s d", ""},
		{"two lost are not replaced: nothing could be committed", "a b c d", "a* b*,61s c*,61s d", ""},
		{"a learner that is no member goes", "a b", "a* b x", "remove x"},
		{"a dead learner that is no member goes", "a b", "a* b x,2h", "remove x"},
		{"a voter that is no member is replaced first", "a b c d", "a* b* d c x*", "promote c"},
		{"and then goes", "a b c d", "a* b* c* d x*", "remove x"},
		{"also when it is dead", "a b c d", "a* b* c* d x*,2h", "remove x"},
		{"at once where nobody can take its place", "a b c", "a* b* c,behind x*", "remove x"},
		{"not while another voter is silent", "a b c", "a* b*,3s c x*", ""},
		{"from three to two: out with the third", "a b", "a* b* c*", "remove c"},
		{"then down to one voter", "a b", "a* b*", "demote b"},
		{"a leaving voter is replaced first", "a b- c d", "a* b* c* d", "promote d"},
		{"and then demoted", "a b- c d", "a* b* c* d*", "demote b"},
		{"a leaving voter of four without an heir waits", "a b- c d", "a* b* c* d,behind", ""},
		{"a leaving leader is replaced first", "a- b c d", "a* b* c* d", "promote d"},
		{"and then demotes itself", "a- b c d", "a* b* c* d*", "demote a"},
		{"a sole voter that leaves promotes the other", "a- b", "a* b", "promote b"},
		{"and then demotes itself", "a- b", "a* b*", "demote a"},
		{"but not before the other has caught up", "a- b", "a* b,behind", ""},
		{"the last node stays", "a-", "a*", ""},
		{"a leader that is no member leaves last", "b c", "a* b* c", "remove a"},
		{"a leaving learner gets no vote", "a b c- d e", "a* b c d,behind e", "promote b"},
		{"of too many the lost one goes", "a b c d", "a* b*,61s c* d*", "demote b"},
		{"then the greatest id", "a b c d", "a* b* c* d*", "demote d"},
		{"never the leader", "y z", "y* z*", "demote z"},
		{"order does not matter", "c b a", "c b a*", "promote b"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := Facts{Self: "a", Last: last, Now: now}
			if strings.Contains(tc.servers, "unheard") {
				f.Last = caughtUp // a young mesh
			}
			if !strings.Contains(tc.servers, "a*") {
				f.Self = "y"
			}
			for _, w := range strings.Fields(tc.members) {
				f.Members = append(f.Members, Member{ID: strings.TrimSuffix(w, "-"), Leaving: strings.HasSuffix(w, "-")})
			}
			for _, w := range strings.Fields(tc.servers) {
				f.Servers = append(f.Servers, server(w))
			}
			got := ""
			if c, ok := DecideVoters(f); ok {
				got = string(c.Op) + " " + c.Node
				if c.Why == "" {
					t.Error("no reason given")
				}
			}
			if got != tc.want {
				t.Errorf("members %q, servers %q: decided %q, want %q", tc.members, tc.servers, got, tc.want)
			}
		})
	}
}

func TestVotersSettle(t *testing.T) {
	// From any start, with everybody live, the changes end in the configuration that is wanted, and
	// no step leaves less than a majority of fit voters beside those being replaced.
	names := []string{"a", "b", "c", "d", "e", "f"}
	now := time.Unix(1000, 0)
	for voters := 1; voters < 1<<len(names); voters += 2 { // "a" always votes: it leads
		for members := 1; members < 1<<len(names); members++ {
			f := Facts{Self: "a", Now: now}
			staying := 0
			for i, id := range names {
				if members>>i&1 == 1 {
					f.Members = append(f.Members, Member{ID: id})
					staying++
				}
				f.Servers = append(f.Servers, Server{ID: id, Voter: voters>>i&1 == 1, Matched: 1, Acked: now})
			}
			for step := 0; ; step++ {
				c, ok := DecideVoters(f)
				if !ok {
					break
				}
				if step > 20 {
					t.Fatalf("voters %b, members %b: no end, now %+v", voters, members, c)
				}
				var next []Server
				for _, s := range f.Servers {
					switch {
					case s.ID == c.Node && c.Op == Remove:
						continue
					case s.ID == c.Node:
						s.Voter = c.Op == Promote
					}
					next = append(next, s)
				}
				if c.Op == AddLearner {
					next = append(next, Server{ID: c.Node, Matched: 1, Acked: now})
				}
				f.Servers = next
			}
			n := 0
			for _, s := range f.Servers {
				if s.Voter {
					n++
				}
			}
			if n != VotersFor(staying) || len(f.Servers) != staying {
				t.Fatalf("voters %b, members %b: ended with %+v", voters, members, f.Servers)
			}
		}
	}
}
