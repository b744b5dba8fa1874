//go:build race

package lease_test

// raceEnabled says that the tests run under the race detector, which takes ten
// times as long.
const raceEnabled = true
