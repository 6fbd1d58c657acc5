// Consumers: their settings, and messages by pull and push.
package main

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

func consumers(s *seen) {
	stream := s.streamWith("LIFE", 10)
	_, err := stream.Consumer(s.ctx, "a")
	s.sawError("info, missing", err)
	config := jetstream.ConsumerConfig{Durable: "a", AckWait: 3500 * time.Millisecond, Description: "of tests"}
	s.sawConsumer("create")(stream.CreateConsumer(s.ctx, config))
	s.sawConsumer("create, the same")(stream.CreateConsumer(s.ctx, config))
	config.MaxDeliver = 3
	s.sawConsumer("create, changed")(stream.CreateConsumer(s.ctx, config))
	s.sawConsumer("update")(stream.UpdateConsumer(s.ctx, config))
	s.sawConsumer("create or update")(stream.CreateOrUpdateConsumer(s.ctx, config))
	s.sawConsumer("update, missing")(stream.UpdateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "missing"}))
	config.DeliverPolicy = jetstream.DeliverNewPolicy
	s.sawConsumer("update, not changeable")(stream.UpdateConsumer(s.ctx, config))
	settings := []jetstream.ConsumerConfig{
		{Durable: "filtered", FilterSubject: "LIFE.2", Metadata: map[string]string{"a": "b"}},
		{Durable: "filters", FilterSubjects: []string{"LIFE.1", "LIFE.3"}, MaxAckPending: 2},
		{Durable: "backoff", BackOff: []time.Duration{time.Second, 2 * time.Second}, MaxDeliver: 4},
		{Durable: "none", AckPolicy: jetstream.AckNonePolicy, HeadersOnly: true},
		{Durable: "limits", MaxRequestBatch: 5, MaxRequestExpires: time.Minute, MaxRequestMaxBytes: 1000},
		{Name: "ephemeral", InactiveThreshold: time.Minute, MemoryStorage: true},
		{Durable: "wrong_filter", FilterSubject: "other"},
		{Durable: "wrong_filters", FilterSubject: "LIFE.1", FilterSubjects: []string{"LIFE.2"}},
	}
	for _, one := range settings {
		s.sawConsumer("create, " + one.Durable + one.Name)(stream.CreateConsumer(s.ctx, one))
	}
	_, err = s.js.Consumer(s.ctx, "MISSING", "a")
	s.sawError("no stream", err)
	names := []string{}
	for name := range stream.ConsumerNames(s.ctx).Name() {
		names = append(names, name)
	}
	slices.Sort(names)
	s.saw("names", names)
	infos := []string{}
	for info := range stream.ListConsumers(s.ctx).Info() {
		infos = append(infos, fmt.Sprint(info.Name, info.NumPending))
	}
	slices.Sort(infos)
	s.saw("list", infos)
	paused := must(stream.PauseConsumer(s.ctx, "a", time.Now().Add(time.Hour)))
	s.saw("pause", paused.Paused)
	s.sawInfo("paused", must(stream.Consumer(s.ctx, "a")), "pause_until", "pause_remaining")
	s.saw("resume", must(stream.ResumeConsumer(s.ctx, "a")).Paused)
	s.sawError("delete", stream.DeleteConsumer(s.ctx, "a"))
	s.sawError("delete, missing", stream.DeleteConsumer(s.ctx, "a"))
	s.sawError("stream is deleted", s.js.DeleteStream(s.ctx, "LIFE"))
}

func (s *seen) sawConsumer(step string) func(jetstream.Consumer, error) {
	return func(consumer jetstream.Consumer, err error) {
		if err != nil {
			s.sawError(step, err)
			return
		}
		s.saw(step, comparable(consumer.CachedInfo()))
	}
}

func ordered(s *seen) {
	stream := s.streamWith("ORDERED", 500)
	for sequence := uint64(50); sequence < 500; sequence += 7 {
		check(stream.DeleteMsg(s.ctx, sequence))
	}
	consumer := must(stream.OrderedConsumer(s.ctx, jetstream.OrderedConsumerConfig{}))
	messages := must(consumer.Messages(jetstream.PullMaxMessages(50)))
	first := taken(messages, 435)
	s.saw("first messages", deliveriesOf(first[:60]))
	s.saw("last messages", deliveriesOf(first[425:]))
	last, sum := uint64(0), uint64(0)
	for _, message := range first {
		sequence := must(message.Metadata()).Sequence.Stream
		if sequence <= last {
			s.saw("not in order", sequence)
		}
		last, sum = sequence, sum+sequence
	}
	s.saw("sum of sequences", sum)
	s.sawInfo("its consumer", consumer, "name")
	check(stream.DeleteConsumer(s.ctx, must(consumer.Info(s.ctx)).Name))
	for at := range 3 {
		s.publish("ORDERED.x", fmt.Sprint(at))
	}
	later := []fields{}
	for _, message := range taken(messages, 3) {
		later = append(later, liveOf(message))
	}
	s.saw("after its consumer was deleted", later)
	messages.Stop()

	check(stream.Purge(s.ctx, jetstream.WithPurgeKeep(4)))
	filters := jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{"ORDERED.x"}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy,
	}
	consumer = must(stream.OrderedConsumer(s.ctx, filters))
	s.saw("last of a subject, after a purge", deliveriesOf(fetched(consumer.Fetch(1, jetstream.FetchMaxWait(within)))))
	only := must(stream.OrderedConsumer(s.ctx, jetstream.OrderedConsumerConfig{}))
	s.saw("fetch of four", deliveriesOf(fetched(only.Fetch(4, jetstream.FetchMaxWait(within)))))
	s.publish("ORDERED.x", "last")
	s.saw("fetch of one more", deliveriesOf(fetched(only.Fetch(1, jetstream.FetchMaxWait(within)))))
}

// taken are the next messages.
func taken(messages jetstream.MessagesContext, number int) []jetstream.Msg {
	found := []jetstream.Msg{}
	for range number {
		found = append(found, must(messages.Next(jetstream.NextMaxWait(within))))
	}
	return found
}

func pull(s *seen) {
	stream := s.streamWith("PULL", 12)
	consumer := must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "p"}))
	s.saw("fetch", deliveriesOf(fetched(consumer.Fetch(5))))
	s.sawInfo("five are pending", consumer)
	s.saw("fetch, no wait", deliveriesOf(fetched(consumer.FetchNoWait(3))))
	s.saw("fetch, more than there are", deliveriesOf(fetched(consumer.Fetch(20, jetstream.FetchMaxWait(notWithin)))))
	s.saw("fetch, no wait, none", deliveriesOf(fetched(consumer.FetchNoWait(3))))
	_, err := consumer.Next(jetstream.FetchMaxWait(notWithin))
	s.sawError("next, none in time", err)

	other := must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "q"}))
	for _, message := range fetched(other.FetchNoWait(100)) {
		check(message.Ack())
	}
	s.sawAcked("all acked", other)
	later := make(chan jetstream.Msg, 1)
	go func() { later <- one(other) }()
	until("a request waits", func() bool { return must(other.Info(s.ctx)).NumWaiting == 1 })
	s.publish("PULL.later", "later")
	message := next(later, "a later message")
	s.saw("next, published later", liveOf(message))
	check(message.DoubleAck(s.ctx))
	bounded := must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "b"}))
	s.saw("fetch, by bytes", deliveriesOf(fetched(bounded.FetchBytes(200, jetstream.FetchMaxWait(notWithin)))))
	limited := must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "l", MaxRequestBatch: 2}))
	batch := must(limited.Fetch(3))
	for range batch.Messages() {
		s.saw("fetch, more than permitted", "a message")
	}
	s.sawError("fetch, more than permitted", batch.Error())
	deleted := must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "d", FilterSubject: "PULL.none"}))
	ended := make(chan error, 1)
	go func() {
		_, err := deleted.Next(jetstream.FetchMaxWait(within))
		ended <- err
	}()
	until("a request waits", func() bool { return must(deleted.Info(s.ctx)).NumWaiting == 1 })
	check(stream.DeleteConsumer(s.ctx, "d"))
	s.sawError("next, its consumer is deleted", next(ended, "the end of a request"))
}

func consume(s *seen) {
	stream := s.streamWith("CONSUME", 250)
	consumer := must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "c"}))
	found := make(chan jetstream.Msg, 1000)
	receive := func(message jetstream.Msg) {
		check(message.Ack())
		found <- message
	}
	consuming := must(consumer.Consume(receive, jetstream.PullMaxMessages(40)))
	received := []jetstream.Msg{}
	for range 250 {
		received = append(received, next(found, "a message"))
	}
	s.saw("messages", deliveriesOf(received))
	s.publish("CONSUME.later", "later")
	s.saw("a later message", liveOf(next(found, "a later message")))
	s.sawAcked("all acked", consumer)
	consuming.Stop()
	next(consuming.Closed(), "the end of consuming")
	s.publish("CONSUME.later", "after the end")

	ended := make(chan error, 10)
	messages := must(consumer.Messages(jetstream.PullMaxBytes(10_000), jetstream.PullExpiry(time.Second)))
	message := taken(messages, 1)[0]
	s.saw("iterated", liveOf(message))
	check(message.DoubleAck(s.ctx))
	_, err := messages.Next(jetstream.NextMaxWait(notWithin))
	s.sawError("iterated, none in time", err)
	go func() {
		_, err := messages.Next()
		ended <- err
	}()
	messages.Stop()
	s.sawError("iterated, stopped", next(ended, "the end of iterating"))

	failed := jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) { ended <- err })
	deleted := must(stream.CreateConsumer(s.ctx, jetstream.ConsumerConfig{Durable: "d", FilterSubject: "CONSUME.none"}))
	must(deleted.Consume(receive, failed))
	until("a request waits", func() bool { return must(deleted.Info(s.ctx)).NumWaiting == 1 })
	check(stream.DeleteConsumer(s.ctx, "d"))
	s.sawError("consuming, its consumer is deleted", next(ended, "the end of consuming"))
}

func push(s *seen) {
	stream := s.streamWith("PUSH", 5)
	config := jetstream.ConsumerConfig{
		Durable: "p", DeliverSubject: "to.push", IdleHeartbeat: notWithin, FlowControl: true,
	}
	consumer := must(stream.CreatePushConsumer(s.ctx, config))
	s.saw("created", comparable(consumer.CachedInfo()))
	found := make(chan jetstream.Msg, 1000)
	consuming := must(consumer.Consume(func(message jetstream.Msg) { found <- message }))
	messages := []jetstream.Msg{}
	for range 5 {
		messages = append(messages, next(found, "a message"))
	}
	s.saw("messages", deliveriesOf(messages))
	s.sawInfo("before acks", consumer)
	check(messages[0].DoubleAck(s.ctx))
	check(messages[3].DoubleAck(s.ctx))
	s.sawInfo("after two acks", consumer)
	for _, at := range []int{1, 2, 4} {
		check(messages[at].Ack())
	}
	s.sawAcked("after all acks", consumer)
	consuming.Stop()
	next(consuming.Closed(), "the end of consuming")
	s.pushToGroup(stream)
}

func (s *seen) pushToGroup(stream jetstream.Stream) {
	config := jetstream.ConsumerConfig{Durable: "g", DeliverSubject: "to.group", DeliverGroup: "workers"}
	must(stream.CreatePushConsumer(s.ctx, config))
	counts, every := [3]int{}, []uint64{}
	var lock sync.Mutex
	done := make(chan struct{})
	for member := range 3 {
		own := must(stream.PushConsumer(s.ctx, "g"))
		consuming := must(own.Consume(func(message jetstream.Msg) {
			lock.Lock()
			defer lock.Unlock()
			check(message.Ack())
			counts[member]++
			every = append(every, must(message.Metadata()).Sequence.Stream)
			if len(every) == 300 {
				close(done)
			}
		}))
		defer consuming.Stop()
	}
	for at := range 295 {
		s.publish("PUSH.group", fmt.Sprint(at))
	}
	next(done, "300 messages of a group")
	lock.Lock()
	defer lock.Unlock()
	slices.Sort(every)
	s.saw("each exactly once", len(slices.Compact(every)))
	s.sawAcked("its consumer", must(stream.PushConsumer(s.ctx, "g")))
}
