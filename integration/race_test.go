//go:build race

package integration

// slowness is how much longer everything takes under the race detector.
const slowness = 4
