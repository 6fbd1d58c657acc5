// Consumers: their settings, and messages by pull and push.

import { nanos } from "@nats-io/transport-node";
import {
  EXPIRES_MS,
  WITHIN_MS,
  all,
  closed,
  comparable,
  deliveryOf,
  fetched,
  inTime,
  liveOf,
  one,
  taken,
  until,
} from "./seen.mjs";

export async function consumers(seen) {
  const api = seen.jsm.consumers;
  await seen.streamWith("LIFE", 10);
  await seen.sawOf("info, missing", api.info("LIFE", "a"));
  await seen.sawOf("get, missing", seen.js.consumers.get("LIFE", "a"));
  const config = { durable_name: "a", ack_policy: "explicit", ack_wait: nanos(3_500), description: "of tests" };
  await seen.sawOf("create", api.add("LIFE", config), comparable);
  await seen.sawOf("create, the same", api.add("LIFE", config), comparable);
  await seen.sawOf("create, changed", api.add("LIFE", { ...config, max_deliver: 3 }), comparable);
  await seen.sawOf("update", api.update("LIFE", "a", { max_deliver: 3 }), comparable);
  await seen.sawOf("update, missing", api.update("LIFE", "missing", { max_deliver: 3 }));
  const settings = [
    { durable_name: "last", deliver_policy: "last" },
    { durable_name: "last_per_subject", deliver_policy: "last_per_subject", filter_subject: "LIFE.>" },
    { durable_name: "from", deliver_policy: "by_start_sequence", opt_start_seq: 4 },
    { durable_name: "filtered", filter_subject: "LIFE.2", metadata: { a: "b" } },
    { durable_name: "filters", filter_subjects: ["LIFE.1", "LIFE.3"], max_ack_pending: 2 },
    { durable_name: "none", ack_policy: "none", headers_only: true },
    { name: "ephemeral", inactive_threshold: nanos(60_000) },
    { durable_name: "wrong_from", deliver_policy: "by_start_sequence" },
    { durable_name: "wrong_replicas", num_replicas: 5 },
  ];
  for (const one of settings) {
    const step = `create, ${one.durable_name ?? one.name}`;
    await seen.sawOf(step, api.add("LIFE", { ack_policy: "explicit", ...one }), comparable);
  }
  await seen.sawOf("create, no stream", api.add("MISSING", config));
  await seen.sawOf("list", all(api.list("LIFE")), (found) => found.map((info) => [info.name, info.num_pending]).sort());
  await seen.sawOf("pause", api.pause("LIFE", "a", new Date(Date.now() + 3_600_000)), (found) => found.paused);
  await seen.sawOf("resume", api.resume("LIFE", "a"), (found) => found.paused);
  await seen.sawOf("delete", api.delete("LIFE", "a"));
  await seen.sawOf("delete, missing", api.delete("LIFE", "a"));
}

export async function ordered(seen) {
  await seen.streamWith("ORDERED", 500);
  for (let sequence = 50; sequence < 500; sequence += 7) {
    await seen.jsm.streams.deleteMessage("ORDERED", sequence);
  }
  const consumer = await seen.js.consumers.get("ORDERED");
  const messages = await consumer.consume({ max_messages: 50, expires: EXPIRES_MS });
  const iterator = messages[Symbol.asyncIterator]();
  const first = await taken(iterator, 435, "a message");
  seen.saw("first messages", first.slice(0, 60).map(deliveryOf));
  seen.saw("last messages", first.slice(-10).map(deliveryOf));
  const sequences = first.map((message) => message.info.streamSequence);
  seen.saw("in order", sequences.every((sequence, at) => at === 0 || sequence > sequences[at - 1]));
  seen.saw("sum of sequences", sequences.reduce((sum, sequence) => sum + sequence));
  const info = await consumer.info();
  seen.saw("its consumer", comparable(info, "name"));
  await seen.jsm.consumers.delete("ORDERED", info.name);
  for (let at = 0; at < 3; at++) await seen.js.publish("ORDERED.x", `${at}`);
  seen.saw("after its consumer was deleted", (await taken(iterator, 3, "a later message")).map(liveOf));
  await closed(messages, iterator);

  await seen.jsm.streams.purge("ORDERED", { keep: 4 });
  const filters = { filter_subjects: ["ORDERED.x"], deliver_policy: "last_per_subject" };
  const last = await seen.js.consumers.get("ORDERED", filters);
  seen.saw("last of a subject, after a purge", (await fetched(last, { max_messages: 1 })).map(deliveryOf));
  const only = await seen.js.consumers.get("ORDERED");
  seen.saw("fetch of four", (await fetched(only, { max_messages: 4 })).map(deliveryOf));

  const pushed = await seen.js.consumers.getPushConsumer("ORDERED");
  const pushes = await pushed.consume();
  const pushIterator = pushes[Symbol.asyncIterator]();
  seen.saw("by push", (await taken(pushIterator, 4, "a message")).map(deliveryOf));
  seen.saw("its push consumer", comparable(await pushed.info(), "name", "deliver_subject"));
  await closed(pushes, pushIterator);
}

export async function pull(seen) {
  await seen.streamWith("PULL", 12);
  const consumer = await seen.consumer("PULL", { durable_name: "p" });
  seen.saw("fetch", (await fetched(consumer, { max_messages: 5 })).map(deliveryOf));
  seen.saw("five are pending", comparable(await consumer.info()));
  const rest = await fetched(consumer, { max_messages: 20, expires: EXPIRES_MS });
  seen.saw("fetch, more than there are", rest.map(deliveryOf));
  seen.saw("next, none in time", await consumer.next({ expires: EXPIRES_MS }));

  const other = await seen.consumer("PULL", { durable_name: "q" });
  for (const message of await fetched(other, { max_messages: 12 })) message.ack();
  seen.saw("all acked", await seen.whenAcked("PULL", "q"));
  const waiting = one(other);
  await until("a request waits", async () => (await other.info()).num_waiting === 1);
  await seen.js.publish("PULL.later", "later");
  const later = await waiting;
  seen.saw("next, published later", liveOf(later));
  seen.saw("ack is acknowledged", await later.ackAck());
  const bounded = await seen.consumer("PULL", { durable_name: "b" });
  const few = [];
  const receive = async () => {
    const messages = await bounded.fetch({ max_bytes: 200, expires: EXPIRES_MS });
    for await (const message of messages) few.push(deliveryOf(message));
  };
  await seen.sawOf("fetch, by bytes, its end", receive(), () => "done");
  seen.saw("fetch, by bytes", few);
  const deleted = await seen.consumer("PULL", { durable_name: "d", filter_subject: "PULL.none" });
  const ended = seen.sawOf("fetch, its consumer is deleted", fetched(deleted, { max_messages: 1, expires: WITHIN_MS }));
  await until("a request waits", async () => (await deleted.info()).num_waiting === 1);
  await deleted.delete();
  await ended;
  await seen.sawOf("info, its consumer is deleted", deleted.info());
}

export async function consume(seen) {
  await seen.streamWith("CONSUME", 250);
  const consumer = await seen.consumer("CONSUME", { durable_name: "c" });
  const messages = await consumer.consume({ max_messages: 40 });
  const iterator = messages[Symbol.asyncIterator]();
  const found = await taken(iterator, 250, "a message");
  seen.saw("messages", found.map(deliveryOf));
  for (const message of found) message.ack();
  await seen.js.publish("CONSUME.later", "later");
  const [later] = await taken(iterator, 1, "a later message");
  seen.saw("a later message", liveOf(later));
  await later.ackAck();
  seen.saw("all acked", await seen.whenAcked("CONSUME", "c"));
  await seen.sawOf("stopped", closed(messages, iterator), () => "done");
  await seen.js.publish("CONSUME.later", "after the end");

  const received = [];
  const callback = (message) => {
    received.push(liveOf(message));
    message.ack();
  };
  const called = await consumer.consume({ callback, max_messages: 10, expires: EXPIRES_MS });
  await until("a message", () => received.length > 0);
  seen.saw("by callback", received);
  await called.close();

  const deleted = await seen.consumer("CONSUME", { durable_name: "d", filter_subject: "CONSUME.none" });
  const ends = await deleted.consume({ abort_on_missing_resource: true, expires: EXPIRES_MS });
  const ended = seen.sawOf("its consumer is deleted", inTime(all(ends), "the end of consuming"));
  await until("a request waits", async () => (await deleted.info()).num_waiting > 0);
  await deleted.delete();
  await ended;
}

export async function push(seen) {
  await seen.streamWith("PUSH", 5);
  const config = { ack_policy: "explicit", idle_heartbeat: nanos(500), flow_control: true };
  await seen.jsm.consumers.add("PUSH", { ...config, durable_name: "p", deliver_subject: "to.push" });
  const consumer = await seen.js.consumers.getPushConsumer("PUSH", "p");
  const pushes = await consumer.consume();
  const notified = pushes.status()[Symbol.asyncIterator]();
  const iterator = pushes[Symbol.asyncIterator]();
  const messages = await taken(iterator, 5, "a message");
  seen.saw("messages", messages.map(deliveryOf));
  seen.saw("before acks", comparable(await consumer.info()));
  seen.saw("acks", [await messages[0].ackAck(), await messages[3].ackAck()]);
  seen.saw("after two acks", comparable(await consumer.info()));
  for (const at of [1, 2, 4]) messages[at].ack();
  seen.saw("after all acks", await seen.whenAcked("PUSH", "p"));
  let status;
  do [status] = await taken(notified, 1, "a heartbeat"); while (status.type !== "heartbeat");
  seen.saw("heartbeat", status);
  await closed(pushes, iterator);
}

export async function queueGroup(seen) {
  await seen.streamWith("QUEUE", 0);
  const config = { durable_name: "g", deliver_subject: "to.group", deliver_group: "workers", ack_policy: "explicit" };
  await seen.jsm.consumers.add("QUEUE", config);
  const received = [[], [], []];
  const members = [];
  for (const own of received) {
    const consumer = await seen.js.consumers.getPushConsumer("QUEUE", "g");
    const callback = (message) => {
      own.push(message.seq);
      message.ack();
    };
    members.push(await consumer.consume({ callback }));
  }
  for (let at = 0; at < 300; at++) await seen.js.publish("QUEUE.a", `${at}`);
  await until("300 messages of a group", () => received.flat().length >= 300);
  seen.saw("each exactly once", [new Set(received.flat()).size, received.flat().length]);
  seen.saw("each member receives", received.map((own) => own.length > 0));
  seen.saw("its consumer", await seen.whenAcked("QUEUE", "g"));
  for (const member of members) await member.close();
}
