// Orphan starts a child, prints its process id and ends. The child ends after it,
// and has nobody to wait for it but process 1.
//
// "orphan state PID" prints the third field of /proc/PID/stat, which is Z for a
// process that has ended and that nobody has waited for, or gone.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"syscall"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "state":
		stat, err := os.ReadFile("/proc/" + args[1] + "/stat")
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH):
			fmt.Println("gone")
			return nil
		case err != nil:
			return err
		}
		fmt.Printf("%c\n", stat[bytes.LastIndexByte(stat, ')')+2])
		return nil
	case len(args) == 1 && args[0] == "child":
		_, err := io.Copy(io.Discard, os.Stdin) // until the parent has ended, and its end of the pipe with it
		return err
	}
	child := exec.Command("/proc/self/exe", "child")
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if _, err := child.StdinPipe(); err != nil {
		return err
	}
	if err := child.Start(); err != nil {
		return err
	}
	fmt.Println(child.Process.Pid)
	return nil
}
