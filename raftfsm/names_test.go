package raftfsm

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

func TestPhysicalNamesAreShortSafeAndDistinct(t *testing.T) {
	safe := regexp.MustCompile(`^[a-z][a-z0-9_]*$`)
	long := strings.Repeat("long-and-similar-", 3)[:39]
	seen := map[string]string{}
	check := func(name, of string, max int) {
		t.Helper()
		if len(name) > max || !safe.MatchString(name) {
			t.Errorf("%s of %s is too long or unsafe", name, of)
		}
		if other, taken := seen[name]; taken {
			t.Errorf("%s names both %s and %s", name, of, other)
		}
		seen[name] = of
	}
	for _, mesh := range []string{"m1", "m2"} {
		for _, provider := range []string{long + "1", long + "2", "pg", "pg-main"} {
			for _, owner := range []string{long + "1", long + "2", "a", "a-b", "0", "a@all", "a-b@all"} {
				for _, req := range []string{"db", "b-db", "0", long} {
					of := strings.Join([]string{mesh, provider, owner, req}, " ")
					check(resourceName(mesh, provider, pgKind, owner, req), "resource "+of, 40)
					check(resourceName(mesh, provider, "redis", owner, req), "redis "+of, 40)
					for _, g := range []uint64{1, 2, 10, 9_999_999} {
						check(loginName(mesh, provider, BindingID(owner, req), g), fmt.Sprint("login ", of, g), 30)
					}
				}
			}
		}
	}
}

// What a server knows something as does not change with a new build.
func TestPhysicalNamesAreWhatTheyWere(t *testing.T) {
	for got, want := range map[string]string{
		resourceName("mesh-1", "pg-main", pgKind, "shop@all", "db"): "mshop_all_db_pbvnkhuaqj",
		loginName("mesh-1", "pg-main", "shop@gamma/db", 12):         "mshop_gamma_oj4cvsqgxy_12",
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"a": true, "0": true, "a-": true, "pg-main": true, strings.Repeat("a", MaxName): true,
		"": false, "-a": false, "A": false, "a_b": false, "a.b": false, "a/b": false, "a@b": false, "ä": false, "a\n": false, strings.Repeat("a", MaxName+1): false,
	} {
		if got := CheckName("thing", name) == nil; got != ok {
			t.Errorf("%q is a name: %v", name, got)
		}
	}
}

func TestNearest(t *testing.T) {
	many := []string{"pg-main", "pg-apps", "redis", "minio", "mysql", "rabbit", "idp"}
	for name, want := range map[string]string{
		"pg-mian": "[pg-main]", "pg-aps": "[pg-apps pg-main]", "quite-other": "[]", strings.Repeat("pg", 1000): "[]",
	} {
		if got := fmt.Sprint(nearest(name, many)); got != want {
			t.Errorf("near %q are %s, want %s", clip(name), got, want)
		}
	}
	if got := fmt.Sprint(nearest("x", []string{"redis", "pg"})); got != "[pg redis]" {
		t.Errorf("of a short list: %s", got)
	}
}
