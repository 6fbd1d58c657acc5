// Acks of all kinds, redelivery, and streams whose messages depend on acks.

import { headers, nanos } from "@nats-io/transport-node";
import {
  EXPIRES_MS,
  all,
  comparable,
  deliveryOf,
  fetched,
  one,
  stateOf,
  until,
} from "./seen.mjs";

// A consumer of one message for each kind of ack: orders between messages depend on time.
export async function acks(seen) {
  await seen.streamWith("ACKS", 5);
  const consumer = (at) => seen.consumer("ACKS", { durable_name: `a${at}`, filter_subject: `ACKS.${at}` });
  const next = async (step, from) => {
    const message = await one(from);
    seen.saw(step, deliveryOf(message));
    return message;
  };
  const acked = await consumer(0);
  const message = await next("for an acknowledged ack", acked);
  seen.saw("ack is acknowledged", await message.ackAck());
  seen.saw("after it", comparable(await acked.info()));
  seen.saw("a second ack", await message.ackAck());
  const naked = await consumer(1);
  (await next("for nak", naked)).nak();
  await (await next("after nak", naked)).ackAck();
  seen.saw("after nak and ack", comparable(await naked.info()));
  const delayed = await consumer(2);
  const late = await next("for nak with delay", delayed);
  const started = Date.now();
  late.nak(1_000);
  await (await next("after the delay", delayed)).ackAck();
  seen.saw("not before the delay", Date.now() - started >= 950);
  const terminated = await consumer(3);
  (await next("for term", terminated)).term("of tests");
  seen.saw("after term", await seen.whenAcked("ACKS", "a3"));
  seen.saw("terminated is not redelivered", await terminated.next({ expires: EXPIRES_MS }));
}

export async function redelivery(seen) {
  await seen.streamWith("AGAIN", 2);
  const config = { durable_name: "r", filter_subject: "AGAIN.0", ack_wait: nanos(500), max_deliver: 3 };
  const consumer = await seen.consumer("AGAIN", config);
  for (let at = 1; at <= 3; at++) seen.saw(`delivery ${at}`, deliveryOf(await one(consumer)));
  seen.saw("no fourth delivery", await consumer.next({ expires: 1_500 }));
  seen.saw("given up", await seen.whenAcked("AGAIN", "r"));
  const backoff = [nanos(200), nanos(400)];
  const another = { durable_name: "b", filter_subject: "AGAIN.1", max_deliver: 3, backoff };
  const backed = await seen.consumer("AGAIN", another);
  for (let at = 1; at <= 3; at++) seen.saw(`with backoff, delivery ${at}`, deliveryOf(await one(backed)));
}

export async function inProgress(seen) {
  await seen.streamWith("WORK", 1);
  const consumer = await seen.consumer("WORK", { durable_name: "w", ack_wait: nanos(2_500) });
  const message = await one(consumer);
  let redelivered = 0;
  for (const end = Date.now() + 3_500; Date.now() < end; ) {
    message.working();
    if ((await consumer.next({ expires: EXPIRES_MS })) !== null) redelivered++;
  }
  seen.saw("redelivered while in progress", redelivered);
  const again = await one(consumer);
  seen.saw("redelivered afterwards", deliveryOf(again));
  await again.ackAck();
  seen.saw("its consumer", comparable(await consumer.info()));
}

// ---- streams with consumers ----

export async function workQueue(seen) {
  await seen.streamWith("JOBS", 100, { retention: "workqueue" });
  await seen.consumer("JOBS", { durable_name: "jobs" });
  const found = [];
  const workers = [];
  for (let worker = 0; worker < 2; worker++) {
    const consumer = await seen.js.consumers.get("JOBS", "jobs");
    const callback = (message) => {
      found.push(message.seq);
      message.ack();
    };
    workers.push(await consumer.consume({ callback, max_messages: 10 }));
  }
  await until("100 jobs", () => found.length >= 100);
  seen.saw("each exactly once", [new Set(found).size, found.length]);
  seen.saw("its consumer", await seen.whenAcked("JOBS", "jobs"));
  const emptied = async () => {
    const info = await seen.jsm.streams.info("JOBS");
    return info.state.messages === 0 && stateOf(info);
  };
  seen.saw("messages are deleted", await until("messages are deleted", emptied));
  await seen.sawOf("a second consumer", seen.jsm.consumers.add("JOBS", { durable_name: "o", ack_policy: "explicit" }));
  for (const worker of workers) await worker.close();
}

export async function purge(seen) {
  await seen.streamWith("PURGE", 20);
  const consumer = await seen.consumer("PURGE", { durable_name: "p" });
  const [first] = await fetched(consumer, { max_messages: 5 });
  await first.ackAck();
  seen.saw("purge", await seen.jsm.streams.purge("PURGE", { seq: 11 }));
  seen.saw("purged to 10", comparable(await consumer.info()));
  seen.saw("the next ones", (await fetched(consumer, { max_messages: 3 })).map(deliveryOf));
  seen.saw("purge a subject", await seen.jsm.streams.purge("PURGE", { filter: "PURGE.4" }));
  seen.saw("without a subject", (await fetched(consumer, { max_messages: 5 })).map(deliveryOf));
  seen.saw("purge all", await seen.jsm.streams.purge("PURGE"));
  seen.saw("purged", comparable(await consumer.info()));
  const own = headers();
  own.set("A", "1");
  await seen.js.publish("PURGE.0", "new", { headers: own });
  seen.saw("a new one", deliveryOf(await one(consumer)));
  await seen.jsm.streams.delete("PURGE");
  await seen.sawOf("stream is deleted", consumer.info());
}
