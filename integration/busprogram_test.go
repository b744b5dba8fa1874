package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// quick is how long busapp waits for an answer, or for the word that it gets
// none.
const quick = 3 * time.Second

// wish is what busapp is asked to do, one of the two.
type wish struct {
	Call string // publish a request below the call prefix
	Hear string // subscribe to a subject
}

// busapp is a program with a plain NATS client. It serves the tools that its
// arguments name, by saying who it is, and the tool ask, which does a wish and
// says what came of it.
func busapp() {
	endWithTheTest()
	b, err := connect(os.Getenv("MESHD_BUS"))
	if err != nil {
		log.Fatal(err)
	}
	for _, tool := range os.Args[1:] {
		b.serve(tool, func([]byte) string { return fmt.Sprintf("%s of %s", tool, os.Getenv("MESHD_ASSIGNMENT")) })
	}
	b.serve("ask", b.ask)
	fmt.Println("serving")
	select {}
}

// busClient is a connection to the bus of this node.
type busClient struct {
	*nats.Conn
	field   func(name string) string
	refused chan string
}

// connect needs nothing but the delivered files.
func connect(dir string) (*busClient, error) {
	b := &busClient{refused: make(chan string, 16)}
	b.field = func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			log.Fatal(err)
		}
		return string(text)
	}
	pair, err := nkeys.FromSeed([]byte(b.field("nkey-seed")))
	if err != nil {
		return nil, err
	}
	public, err := pair.PublicKey()
	if err != nil {
		return nil, err
	}
	b.Conn, err = nats.Connect(b.field("url"), nats.Nkey(public, pair.Sign), nats.CustomInboxPrefix(b.field("inbox-prefix")),
		nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond), nats.IgnoreAuthErrorAbort(), nats.RetryOnFailedConnect(true),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			fmt.Println("the bus says:", err)
			select {
			case b.refused <- err.Error():
			default: // nobody waits for that many
			}
		}))
	return b, err
}

// serve answers a tool.
func (b *busClient) serve(tool string, answer func([]byte) string) {
	_, err := b.Subscribe(b.field("serve-prefix")+".tool."+tool, func(m *nats.Msg) {
		text, err := json.Marshal(answer(m.Data))
		if err == nil {
			err = m.Respond(text)
		}
		if err != nil {
			log.Fatal(err)
		}
	})
	if err != nil {
		log.Fatal(err)
	}
}

// ask does the wish.
func (b *busClient) ask(data []byte) string {
	var w wish
	if err := json.Unmarshal(data, &w); err != nil {
		return "not a wish: " + err.Error()
	}
	for len(b.refused) > 0 {
		<-b.refused
	}
	if w.Hear != "" {
		return b.hear(w.Hear)
	}
	ctx, cancel := context.WithTimeout(context.Background(), quick)
	defer cancel()
	got := make(chan string, 1)
	go func() {
		m, err := b.RequestWithContext(ctx, b.field("call-prefix")+"."+w.Call, []byte("{}"))
		switch {
		case err != nil:
			got <- "no answer: " + err.Error()
		case m.Header.Get("Nats-Service-Error") != "":
			got <- "error: " + m.Header.Get("Meshd-Error") + ": " + m.Header.Get("Nats-Service-Error")
		default:
			got <- "answer from " + m.Header.Get("Meshd-Node") + ": " + strings.TrimSpace(string(m.Data))
		}
	}()
	select {
	case text := <-got:
		return text
	case text := <-b.refused:
		return "refused: " + text
	}
}

// hear subscribes, and says what the server thinks of it. The server answers a
// ping after all that came before it, so a refusal is here by then, but for the
// way through the client's own queue.
func (b *busClient) hear(subject string) string {
	sub, err := b.SubscribeSync(subject)
	if err != nil {
		return "not subscribed: " + err.Error()
	}
	if err := b.FlushTimeout(quick); err != nil {
		return "not subscribed: " + err.Error()
	}
	select {
	case text := <-b.refused:
		return "refused: " + text
	case <-time.After(quick / 10):
		return fmt.Sprintf("subscribed to %s: %t", subject, sub.IsValid())
	}
}
