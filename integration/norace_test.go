//go:build !race

package integration

const slowness = 1
