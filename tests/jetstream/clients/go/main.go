// Scenarios of a JetStream client, in Go: what nats.go receives from a server, one line of JSON per step.
//
//	clients nats://127.0.0.1:4222 [SCENARIO ...]
//
// The lines state nothing that differs from run to run (times, generated names), so that two servers can be compared. A
// scenario that fails prints the error and the next one runs; the exit code is then 1. Scenarios use streams of their
// own. Those whose name begins with "legacy" use the API of package nats, the others that of package jetstream.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	scenarioWithin = 45 * time.Second
	within         = 10 * time.Second
	notWithin      = 300 * time.Millisecond // how long a message that must not arrive is waited for
)

type scenario struct {
	name string
	play func(*seen)
}

var scenarios = []scenario{
	{"key_value", keyValue},
	{"key_value_watch", keyValueWatch},
	{"objects", objects},
	{"consumers", consumers},
	{"ordered", ordered},
	{"pull", pull},
	{"consume", consume},
	{"push", push},
	{"acks", acks},
	{"redelivery", redelivery},
	{"in_progress", inProgress},
	{"work_queue", workQueue},
	{"purge", purge},
	{"legacy_key_value", legacyKeyValue},
	{"legacy_objects", legacyObjects},
	{"legacy_ordered", legacyOrdered},
	{"legacy_pull", legacyPull},
	{"legacy_push", legacyPush},
	{"legacy_queue_group", legacyQueueGroup},
}

func main() {
	url, chosen := os.Args[1], os.Args[2:]
	failed := false
	for _, one := range scenarios {
		if len(chosen) == 0 || slices.Contains(chosen, one.name) {
			failed = !played(url, one) || failed
		}
	}
	if failed {
		os.Exit(1)
	}
}

// played reports whether the scenario ran to its end.
func played(url string, one scenario) (done bool) {
	connection := must(nats.Connect(url))
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), scenarioWithin)
	defer cancel()
	s := &seen{scenario: one.name, nc: connection, js: must(jetstream.New(connection)), ctx: ctx}
	defer func() {
		if problem := recover(); problem != nil {
			s.saw("failed", fmt.Sprint(problem))
		}
	}()
	one.play(s)
	return true
}

// must panics with an error that the scenario does not expect.
func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// ---- what is printed ----

// seen is a scenario that runs: what it receives is printed as lines.
type seen struct {
	scenario string
	nc       *nats.Conn
	js       jetstream.JetStream
	ctx      context.Context
}

type fields map[string]any

type line struct {
	Scenario string `json:"scenario"`
	Step     string `json:"step"`
	Saw      any    `json:"saw"`
}

func (s *seen) saw(step string, value any) {
	fmt.Println(string(must(json.Marshal(line{s.scenario, step, value}))))
}

// sawOf prints the value, or the error.
func (s *seen) sawOf(step string, value any, err error) {
	if err != nil {
		s.saw(step, errorOf(err))
		return
	}
	s.saw(step, value)
}

// sawError prints the error, or "done".
func (s *seen) sawError(step string, err error) {
	s.sawOf(step, "done", err)
}

func errorOf(err error) fields {
	return fields{"error": err.Error()}
}

// comparable is the JSON of a value without times, and without what the names say.
func comparable(value any, without ...string) any {
	var found any
	check(json.Unmarshal(must(json.Marshal(value)), &found))
	return pruned(found, append(without, "created", "ts", "last_active", "cluster", "num_waiting", "nuid", "mtime"))
}

func pruned(value any, without []string) any {
	switch found := value.(type) {
	case []any:
		for at, one := range found {
			found[at] = pruned(one, without)
		}
	case map[string]any:
		for name, one := range found {
			inbox, _ := one.(string)
			switch {
			case slices.Contains(without, name):
				delete(found, name)
			case strings.HasPrefix(inbox, "_INBOX."):
				found[name] = "an inbox"
			default:
				found[name] = pruned(one, without)
			}
		}
	}
	return value
}

// settingsOf and stateOf are the halves of a stream; its consumers depend on time.
func settingsOf(info *jetstream.StreamInfo) any {
	return comparable(info.Config)
}

func stateOf(info *jetstream.StreamInfo) any {
	return comparable(info.State, "first_ts", "last_ts", "consumer_count")
}

// liveOf is a message that was published while it was waited for: what is pending then depends on time.
func liveOf(message jetstream.Msg) fields {
	meta := must(message.Metadata())
	plain := &nats.Msg{Subject: message.Subject(), Data: message.Data(), Header: message.Headers()}
	return messageOf(plain, meta.Sequence.Consumer, meta.Sequence.Stream, meta.NumDelivered)
}

func deliveryOf(message jetstream.Msg) fields {
	found := liveOf(message)
	found["pending"] = must(message.Metadata()).NumPending
	return found
}

func messageOf(message *nats.Msg, consumerSequence, streamSequence, delivered uint64) fields {
	found := fields{
		"subject":      message.Subject,
		"data":         string(message.Data),
		"stream_seq":   streamSequence,
		"consumer_seq": consumerSequence,
		"delivered":    delivered,
	}
	if len(message.Header) > 0 {
		found["headers"] = message.Header
	}
	return found
}

func deliveriesOf(messages []jetstream.Msg) []fields {
	found := []fields{}
	for _, message := range messages {
		found = append(found, deliveryOf(message))
	}
	return found
}

// ---- what scenarios do ----

// until returns when the condition is true.
func until(what string, condition func() bool) {
	for deadline := time.Now().Add(within); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			panic("not in time: " + what)
		}
	}
}

// next is the next value of a channel.
func next[T any](values <-chan T, what string) T {
	select {
	case value := <-values:
		return value
	case <-time.After(within):
		panic("not in time: " + what)
	}
}

// streamWith makes a stream on <name>.> with messages <name>.<0..4>.
func (s *seen) streamWith(name string, messages int) jetstream.Stream {
	return s.streamOf(jetstream.StreamConfig{Name: name}, messages)
}

func (s *seen) streamOf(config jetstream.StreamConfig, messages int) jetstream.Stream {
	config.Subjects = []string{config.Name + ".>"}
	stream := must(s.js.CreateStream(s.ctx, config))
	for at := range messages {
		s.publish(fmt.Sprintf("%s.%d", config.Name, at%5), fmt.Sprint(at))
	}
	return stream
}

func (s *seen) publish(subject, value string) {
	must(s.js.Publish(s.ctx, subject, []byte(value)))
}

type informed interface {
	Info(context.Context) (*jetstream.ConsumerInfo, error)
}

// sawInfo prints the state of a consumer.
func (s *seen) sawInfo(step string, consumer informed, without ...string) {
	s.saw(step, comparable(must(consumer.Info(s.ctx)), without...))
}

// sawAcked prints the state of a consumer when nothing is pending: acks are not acknowledged themselves.
func (s *seen) sawAcked(step string, consumer informed) {
	until(step, func() bool { return must(consumer.Info(s.ctx)).NumAckPending == 0 })
	s.sawInfo(step, consumer)
}

// fetched are the messages of a batch.
func fetched(batch jetstream.MessageBatch, err error) []jetstream.Msg {
	check(err)
	found := []jetstream.Msg{}
	for message := range batch.Messages() {
		found = append(found, message)
	}
	check(batch.Error())
	return found
}

// one is the next message.
func one(consumer jetstream.Consumer) jetstream.Msg {
	return must(consumer.Next(jetstream.FetchMaxWait(within)))
}
