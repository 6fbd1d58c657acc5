// The API of package nats.
package main

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

func (s *seen) legacy() nats.JetStreamContext {
	return must(s.nc.JetStream(nats.MaxWait(within)))
}

func legacyDeliveryOf(message *nats.Msg) fields {
	found := legacyLiveOf(message)
	found["pending"] = must(message.Metadata()).NumPending
	return found
}

func legacyLiveOf(message *nats.Msg) fields {
	meta := must(message.Metadata())
	return messageOf(message, meta.Sequence.Consumer, meta.Sequence.Stream, meta.NumDelivered)
}

func legacyDeliveriesOf(messages []*nats.Msg) []fields {
	found := []fields{}
	for _, message := range messages {
		found = append(found, legacyDeliveryOf(message))
	}
	return found
}

func (s *seen) sawLegacyAcked(step string, js nats.JetStreamContext, stream, consumer string) {
	until(step, func() bool { return must(js.ConsumerInfo(stream, consumer)).NumAckPending == 0 })
	s.saw(step, comparable(must(js.ConsumerInfo(stream, consumer))))
}

func legacyKeyValue(s *seen) {
	js := s.legacy()
	bucket := must(js.CreateKeyValue(&nats.KeyValueConfig{Bucket: "LKV", History: 3}))
	watcher := must(bucket.WatchAll())
	marker := next(watcher.Updates(), "the marker of a watcher")
	s.saw("watch, empty", marker == nil)
	s.sawRevision("put")(bucket.PutString("a", "1"))
	s.sawRevision("create, exists")(bucket.Create("a", []byte("2")))
	s.sawRevision("update")(bucket.Update("a", []byte("3"), 1))
	s.sawRevision("update, wrong revision")(bucket.Update("a", []byte("4"), 1))
	s.sawRevision("put, 0 bytes")(bucket.Put("empty", nil))
	s.sawError("delete", bucket.Delete("a"))
	updates := []any{}
	receive := func(number int) {
		for range number {
			entry := next(watcher.Updates(), "an update of a watcher")
			updates = append(updates, []any{entry.Key(), string(entry.Value()), entry.Revision(), entry.Operation().String()})
		}
	}
	receive(4) // what follows removes what the watcher has not received yet
	_, err := bucket.Get("a")
	s.sawError("get, deleted", err)
	s.sawRevision("create, deleted")(bucket.Create("a", []byte("5")))
	history := []any{}
	for _, entry := range must(bucket.History("a")) {
		history = append(history, fields{"value": string(entry.Value()), "delta": entry.Delta(), "rev": entry.Revision()})
	}
	s.saw("history", history)
	s.saw("keys", must(bucket.Keys()))
	s.sawError("purge", bucket.Purge("empty"))
	receive(2)
	s.saw("watch, updates", updates)
	check(watcher.Stop())
	s.saw("values", must(bucket.Status()).Values())
	s.sawError("delete bucket", js.DeleteKeyValue("LKV"))
}

func legacyObjects(s *seen) {
	js := s.legacy()
	store := must(js.CreateObjectStore(&nats.ObjectStoreConfig{Bucket: "LOBJ"}))
	large := bytes.Repeat([]byte("0123456789abcdef"), 300*1024/16)
	info, err := store.PutBytes("large", large)
	s.sawOf("put, 300 KiB", comparable(info), err)
	info, err = store.PutBytes("empty", nil)
	s.sawOf("put, 0 bytes", comparable(info), err)
	s.saw("get, 300 KiB", bytes.Equal(must(store.GetBytes("large")), large))
	s.saw("get, 0 bytes", len(must(store.GetBytes("empty"))))
	s.saw("list", comparable(must(store.List())))
	s.sawError("delete", store.Delete("large"))
	_, err = store.GetInfo("large")
	s.sawError("info, deleted", err)
	watcher := must(store.Watch())
	updates := []any{}
	for range 3 {
		updates = append(updates, comparable(next(watcher.Updates(), "an update of a watcher")))
	}
	s.saw("watch", updates)
	check(watcher.Stop())
	s.sawError("delete bucket", js.DeleteObjectStore("LOBJ"))
}

func legacyOrdered(s *seen) {
	js := s.legacy()
	stream := s.streamWith("LORDERED", 500)
	for sequence := uint64(50); sequence < 500; sequence += 7 {
		check(js.DeleteMsg("LORDERED", sequence))
	}
	subscription := must(js.SubscribeSync("LORDERED.>", nats.OrderedConsumer(), nats.IdleHeartbeat(500*time.Millisecond)))
	messages := []*nats.Msg{}
	for range 435 {
		messages = append(messages, must(subscription.NextMsg(within)))
	}
	s.saw("first messages", legacyDeliveriesOf(messages[:60]))
	s.saw("last messages", legacyDeliveriesOf(messages[425:]))
	info := must(subscription.ConsumerInfo())
	s.saw("its consumer", comparable(info, "name"))
	check(stream.DeleteConsumer(s.ctx, info.Name))
	s.publish("LORDERED.x", "later")
	s.saw("after its consumer was deleted", legacyLiveOf(must(subscription.NextMsg(within))))
	check(subscription.Unsubscribe())
}

func legacyPull(s *seen) {
	js := s.legacy()
	s.streamWith("LPULL", 12)
	subscription := must(js.PullSubscribe("LPULL.>", "p"))
	messages := must(subscription.Fetch(5))
	s.saw("fetch", legacyDeliveriesOf(messages))
	s.sawError("ack", messages[0].AckSync())
	s.sawError("ack again", messages[0].Ack())
	s.saw("its consumer", comparable(must(subscription.ConsumerInfo())))
	messages = must(subscription.Fetch(20, nats.MaxWait(notWithin)))
	s.saw("fetch, more than there are", legacyDeliveriesOf(messages))
	_, err := subscription.Fetch(1, nats.MaxWait(notWithin))
	s.sawError("fetch, none in time", err)
	batch := must(subscription.FetchBatch(3, nats.MaxWait(within)))
	until("a request waits", func() bool { return must(subscription.ConsumerInfo()).NumWaiting == 1 })
	for at := range 3 {
		s.publish("LPULL.later", fmt.Sprint(at))
	}
	later := []fields{}
	for message := range batch.Messages() {
		later = append(later, legacyLiveOf(message))
	}
	s.saw("batch, published later", later)
	s.sawError("end of the batch", batch.Error())
	check(subscription.Unsubscribe())
	_, err = js.ConsumerInfo("LPULL", "p")
	s.sawError("its consumer is deleted with the subscription", err)
}

func legacyPush(s *seen) {
	js := s.legacy()
	s.streamWith("LPUSH", 5)
	subscription := must(js.SubscribeSync("LPUSH.>", nats.Durable("m"), nats.ManualAck(), nats.AckWait(within)))
	messages := []*nats.Msg{}
	for range 5 {
		messages = append(messages, must(subscription.NextMsg(within)))
	}
	s.saw("messages", legacyDeliveriesOf(messages))
	_, err := js.SubscribeSync("LPUSH.>", nats.Durable("m"))
	s.sawError("subscribe again", err)
	check(messages[3].AckSync())
	check(messages[0].Term())
	check(messages[1].AckSync())
	check(messages[2].Nak())
	again := must(subscription.NextMsg(within))
	s.saw("after nak", legacyDeliveryOf(again))
	check(again.AckSync())
	check(messages[4].InProgress())
	check(messages[4].AckSync())
	s.sawLegacyAcked("after all acks", js, "LPUSH", "m")
	check(subscription.Unsubscribe())

	found := make(chan *nats.Msg, 100)
	limits := []nats.SubOpt{nats.MaxAckPending(2), nats.RateLimit(8 << 20), nats.StartSequence(2)}
	automatic := must(js.Subscribe("LPUSH.>", func(message *nats.Msg) { found <- message }, limits...))
	received := []fields{}
	for range 4 {
		received = append(received, legacyDeliveryOf(next(found, "a message")))
	}
	s.saw("callback", received)
	info := must(automatic.ConsumerInfo())
	until("all acked", func() bool { return must(automatic.ConsumerInfo()).NumAckPending == 0 })
	s.saw("its consumer", comparable(must(automatic.ConsumerInfo()), "name"))
	check(automatic.Drain())
	until("deleted", func() bool { _, err := js.ConsumerInfo("LPUSH", info.Name); return err != nil })
}

func legacyQueueGroup(s *seen) {
	js := s.legacy()
	s.streamWith("LQUEUE", 0)
	counts, every := [3]int{}, []uint64{}
	var lock sync.Mutex
	done := make(chan struct{})
	for member := range 3 {
		must(js.QueueSubscribe("LQUEUE.>", "workers", func(message *nats.Msg) {
			lock.Lock()
			defer lock.Unlock()
			counts[member]++
			every = append(every, must(message.Metadata()).Sequence.Stream)
			if len(every) == 300 {
				close(done)
			}
		}))
	}
	for at := range 300 {
		s.publish("LQUEUE.a", fmt.Sprint(at))
	}
	next(done, "300 messages of a group")
	lock.Lock()
	slices.Sort(every)
	s.saw("each exactly once", len(slices.Compact(every)))
	s.saw("each member receives", counts[0] > 0 && counts[1] > 0 && counts[2] > 0)
	lock.Unlock()
	s.sawLegacyAcked("its consumer", js, "LQUEUE", "workers")
}
