package integration

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
)

// pingPatience is how long stock waits for the next answer to a ping, which is
// what the client nats does.
const pingPatience = 500 * time.Millisecond

// stock does what the client nats does with what meshd bus-credential -o json
// printed, which is in its first argument:
//
//	stock LOGIN ls               nats micro ls: name, node and id of each service
//	stock LOGIN request SUFFIX   nats request, below the call prefix
//	stock LOGIN hold             stay connected until the connection is closed
func stock() {
	var login struct{ File, URL, InboxPrefix, CallPrefix string }
	if err := json.Unmarshal([]byte(os.Args[1]), &login); err != nil {
		log.Fatal(err)
	}
	key, err := nats.NkeyOptionFromSeed(login.File)
	if err != nil {
		log.Fatal(err)
	}
	closed := make(chan error, 1)
	nc, err := nats.Connect(login.URL, key, nats.CustomInboxPrefix(login.InboxPrefix), nats.MaxReconnects(0),
		nats.ClosedHandler(func(nc *nats.Conn) { closed <- nc.LastError() }))
	if err != nil {
		log.Fatal(err)
	}
	switch os.Args[2] {
	case "ls":
		services, err := ping(nc)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(strings.Join(services, "\n"))
	case "request":
		m, err := nc.Request(login.CallPrefix+"."+os.Args[3], []byte("{}"), quick)
		if err != nil {
			log.Fatal(err)
		}
		if text := m.Header.Get("Nats-Service-Error"); text != "" {
			log.Fatal(text)
		}
		fmt.Printf("%s: %s\n", m.Header.Get("Meshd-Node"), m.Data)
	case "hold":
		fmt.Println("connected")
		fmt.Println("closed:", <-closed)
	}
}

// ping asks who is there.
func ping(nc *nats.Conn) ([]string, error) {
	inbox := nc.NewInbox()
	sub, err := nc.SubscribeSync(inbox)
	if err == nil {
		err = nc.PublishRequest("$SRV.PING", inbox, nil)
	}
	if err != nil {
		return nil, err
	}
	var out []string
	for {
		m, err := sub.NextMsg(pingPatience)
		if err != nil {
			slices.Sort(out)
			return out, nil // nobody else
		}
		var p micro.Ping
		if err := json.Unmarshal(m.Data, &p); err != nil || p.Type != micro.PingResponseType {
			return nil, fmt.Errorf("%s is no answer to a ping: %w", m.Data, err)
		}
		out = append(out, p.Name+" "+p.Metadata["node"]+" "+p.ID)
	}
}
