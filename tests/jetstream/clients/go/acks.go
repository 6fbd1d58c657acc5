// Acks of all kinds, redelivery, and streams whose messages depend on acks.
package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// acks uses a consumer of one message for each kind of ack: orders between messages depend on time.
func acks(s *seen) {
	stream := s.streamWith("ACKS", 5)
	consumer := func(at int) jetstream.Consumer {
		subject := fmt.Sprint("ACKS.", at)
		return must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{
			Durable: fmt.Sprint("a", at), FilterSubject: subject,
		}))
	}
	taken := func(step string, consumer jetstream.Consumer) jetstream.Msg {
		message := one(consumer)
		s.saw(step, deliveryOf(message))
		return message
	}
	acked := consumer(0)
	message := taken("for a double ack", acked)
	check(message.DoubleAck(s.ctx))
	s.sawInfo("after a double ack", acked)
	s.sawError("a second ack", message.Ack())
	answer := must(s.nc.Request(message.Reply(), nil, within))
	s.saw("answer to a second ack", []any{string(answer.Data), answer.Header})
	naked := consumer(1)
	check(taken("for nak", naked).Nak())
	check(taken("after nak", naked).DoubleAck(s.ctx))
	s.sawInfo("after nak and ack", naked)
	delayed := consumer(2)
	started := time.Now()
	check(taken("for nak with delay", delayed).NakWithDelay(time.Second))
	check(taken("after the delay", delayed).DoubleAck(s.ctx))
	s.saw("not before the delay", time.Since(started) >= 950*time.Millisecond)
	terminated := consumer(3)
	check(taken("for term", terminated).TermWithReason("of tests"))
	s.sawAcked("after term", terminated)
	_, err := terminated.Next(jetstream.FetchMaxWait(notWithin))
	s.sawError("terminated is not redelivered", err)
}

func redelivery(s *seen) {
	stream := s.streamWith("AGAIN", 2)
	config := jetstream.ConsumerConfig{
		Durable: "r", FilterSubject: "AGAIN.0", AckWait: 500 * time.Millisecond, MaxDeliver: 3,
	}
	consumer := must(stream.CreateConsumer(s.ctx, config))
	for at := range 3 {
		s.saw(fmt.Sprint("delivery ", at+1), deliveryOf(one(consumer)))
	}
	_, err := consumer.Next(jetstream.FetchMaxWait(1500 * time.Millisecond))
	s.sawError("no fourth delivery", err)
	s.sawAcked("given up", consumer)
	config = jetstream.ConsumerConfig{
		Durable: "b", FilterSubject: "AGAIN.1", MaxDeliver: 3,
		BackOff: []time.Duration{200 * time.Millisecond, 400 * time.Millisecond},
	}
	backed := must(stream.CreateConsumer(s.ctx, config))
	for at := range 3 {
		s.saw(fmt.Sprint("with backoff, delivery ", at+1), deliveryOf(one(backed)))
	}
}

func inProgress(s *seen) {
	stream := s.streamWith("WORK", 1)
	consumer := must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "w", AckWait: 2 * time.Second}))
	message := one(consumer)
	redelivered := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		check(message.InProgress())
		if _, err := consumer.Next(jetstream.FetchMaxWait(notWithin)); err == nil {
			redelivered++
		}
	}
	s.saw("redelivered while in progress", redelivered)
	again := one(consumer)
	s.saw("redelivered afterwards", deliveryOf(again))
	check(again.DoubleAck(s.ctx))
	s.sawInfo("its consumer", consumer)
}

// ---- streams with consumers ----

func workQueue(s *seen) {
	stream := s.streamOf(jetstream.StreamConfig{Name: "JOBS", Retention: jetstream.WorkQueuePolicy}, 100)
	must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "jobs"}))
	found := make(chan uint64, 1000)
	for range 2 {
		worker := must(stream.Consumer(s.ctx, "jobs"))
		consuming := must(worker.Consume(func(message jetstream.Msg) {
			check(message.Ack())
			found <- must(message.Metadata()).Sequence.Stream
		}, jetstream.PullMaxMessages(10)))
		defer consuming.Stop()
	}
	every := []uint64{}
	for range 100 {
		every = append(every, next(found, "a job"))
	}
	slices.Sort(every)
	s.saw("each exactly once", len(slices.Compact(every)))
	s.sawAcked("its consumer", must(stream.Consumer(s.ctx, "jobs")))
	until("messages are deleted", func() bool { return must(stream.Info(s.ctx)).State.Msgs == 0 })
	s.saw("messages are deleted", stateOf(must(stream.Info(s.ctx))))
	s.sawConsumer("a second consumer")(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "other"}))
}

func purge(s *seen) {
	stream := s.streamWith("PURGE", 20)
	consumer := must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "p"}))
	messages := fetched(consumer.Fetch(5))
	check(messages[0].DoubleAck(s.ctx))
	check(stream.Purge(s.ctx, jetstream.WithPurgeSequence(11)))
	s.sawInfo("purged to 10", consumer)
	s.saw("the next ones", deliveriesOf(fetched(consumer.Fetch(3))))
	check(stream.Purge(s.ctx, jetstream.WithPurgeSubject("PURGE.4")))
	s.saw("without a subject", deliveriesOf(fetched(consumer.Fetch(5))))
	check(stream.Purge(s.ctx))
	s.sawInfo("purged", consumer)
	must(s.js.PublishMsg(s.ctx, &nats.Msg{Subject: "PURGE.0", Data: []byte("new"), Header: nats.Header{"A": {"1"}}}))
	s.saw("a new one", deliveriesOf(fetched(consumer.Fetch(1))))
	check(s.js.DeleteStream(s.ctx, "PURGE"))
	_, err := consumer.Info(s.ctx)
	s.sawError("stream is deleted", err)
}
