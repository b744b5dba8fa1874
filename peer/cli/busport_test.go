package cli

import (
	"bytes"
	"net"
	"strings"
	"testing"
)

func TestTheBusPortIsKeptAndElseNotOneOfTheKernels(t *testing.T) {
	var said bytes.Buffer
	log := newLog(&said, false)
	first, err := clientPort(0, nil, log)
	if err != nil || first < lowestPort {
		t.Fatalf("a port: %d, %v", first, err)
	}
	if again, err := clientPort(first, nil, log); again != first || err != nil || said.Len() > 0 {
		t.Errorf("of a port that is free: %d, %v, and it says %q; want %d", again, err, &said, first)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken := l.Addr().(*net.TCPAddr).Port
	if other, err := clientPort(taken, nil, log); other == taken || err != nil || !strings.Contains(said.String(), "is taken; another is chosen") {
		t.Errorf("of a port that is taken: %d, %v, and it says %q", other, err, &said)
	}
}

func TestChoosePort(t *testing.T) {
	for file, want := range map[string]int{"32768\t60999\n": 32768, "15000 61000": 15000, "": ephemeralFirst, "none": ephemeralFirst, "-1 2": ephemeralFirst} {
		if got := ephemeral(file); got != want {
			t.Errorf("ephemeral(%q) is %d, want %d", file, got, want)
		}
	}
	if port, err := choosePort(1024, nil); port == 0 || err != nil {
		t.Errorf("where nearly every port is the kernel's: %d, %v", port, err)
	}
	var others []int
	free := lowestPort + 50
	for p := lowestPort; p < lowestPort+2*portTries; p++ {
		if p != free {
			others = append(others, p)
		}
	}
	if port, err := choosePort(lowestPort+2*portTries, others); err == nil && port != free {
		t.Errorf("with one left, %d: %d", free, port)
	}
	if port, err := choosePort(lowestPort+2*portTries, append(others, free)); err == nil {
		t.Errorf("with none left: %d", port)
	}
}
