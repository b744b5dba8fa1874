// Meshd makes a few machines a mesh without a controller.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"meshd/peer/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Main(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
