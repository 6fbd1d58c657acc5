// What a scenario receives, and how it is printed: without what differs from run to run.

import { connect } from "@nats-io/transport-node";
import { jetstream, jetstreamManager } from "@nats-io/jetstream";

export const WITHIN_MS = 10_000;
export const EXPIRES_MS = 1_000; // the shortest that this client permits
const DIFFERS = ["created", "ts", "last_active", "cluster", "num_waiting", "nuid", "mtime", "revision"];

// ---- what is printed ----

export class Seen {
  static async of(url, scenario) {
    const seen = new Seen();
    seen.scenario = scenario;
    seen.nc = await connect({ servers: url });
    seen.js = jetstream(seen.nc);
    seen.jsm = await jetstreamManager(seen.nc);
    return seen;
  }

  saw(step, value) {
    console.log(JSON.stringify({ scenario: this.scenario, step, saw: value ?? null }));
  }

  // Prints the result as `show` states it, or the error.
  async sawOf(step, promise, show = (value) => value) {
    let result;
    try {
      result = await promise;
    } catch (error) {
      this.saw(step, errorOf(error));
      return null;
    }
    this.saw(step, show(result));
    return result;
  }

  // A stream on `<name>.>`, and messages `<name>.<0..4>`.
  async streamWith(name, messages, config = {}) {
    await this.jsm.streams.add({ name, subjects: [`${name}.>`], ...config });
    for (let at = 0; at < messages; at++) {
      await this.js.publish(`${name}.${at % 5}`, `${at}`);
    }
  }

  async consumer(stream, config) {
    const info = await this.jsm.consumers.add(stream, { ack_policy: "explicit", ...config });
    return this.js.consumers.get(stream, info.name);
  }

  // The consumer's state when nothing is pending: acks are not acknowledged themselves.
  async whenAcked(stream, consumer) {
    const acked = async () => {
      const info = await this.jsm.consumers.info(stream, consumer);
      return info.num_ack_pending === 0 && comparable(info);
    };
    return until("all acked", acked);
  }
}

export function errorOf(error) {
  return { error: error.name, message: error.message, code: error.code ?? null };
}

// Without what differs from run to run, and without what the names say.
export function comparable(value, ...without) {
  const prune = (name, one) => {
    if (without.includes(name) || DIFFERS.includes(name)) return undefined;
    return typeof one === "string" && one.startsWith("_INBOX.") ? "an inbox" : one;
  };
  return JSON.parse(JSON.stringify(value, prune));
}

export function stateOf(info) {
  return comparable(info.state, "first_ts", "last_ts", "consumer_count");
}

// A message that was published while it was waited for: what is pending then depends on time.
export function liveOf(message) {
  const { streamSequence, deliverySequence, deliveryCount } = message.info;
  const found = {
    subject: message.subject,
    data: message.string(),
    stream_seq: streamSequence,
    consumer_seq: deliverySequence,
    delivered: deliveryCount,
    redelivered: message.redelivered,
  };
  return message.headers ? { ...found, headers: [...message.headers] } : found;
}

export function deliveryOf(message) {
  return { ...liveOf(message), pending: message.info.pending };
}

// ---- what scenarios do ----

export async function until(what, condition) {
  const deadline = Date.now() + WITHIN_MS;
  let found;
  while (!(found = await condition())) {
    if (Date.now() > deadline) throw new Error(`not in time: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  return found;
}

export function inTime(promise, what, withinMs = WITHIN_MS) {
  let timer;
  const late = new Promise((_resolve, reject) => {
    timer = setTimeout(() => reject(new Error(`not in time: ${what}`)), withinMs);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

// The next values of an iterable that goes on: its iterator stays open.
export async function taken(iterator, number, what) {
  const found = [];
  while (found.length < number) {
    const { value, done } = await inTime(iterator.next(), what);
    if (done) throw new Error(`ended: ${what}`);
    found.push(value);
  }
  return found;
}

export async function all(iterable) {
  const found = [];
  for await (const one of iterable) found.push(one);
  return found;
}

// Ends it: this client waits until the iterator was told.
export async function closed(messages, iterator) {
  const closing = messages.close();
  while (!(await inTime(iterator.next(), "the end of messages")).done);
  await inTime(closing, "the end of consuming");
}

export async function fetched(consumer, options) {
  return all(await consumer.fetch(options));
}

export async function one(consumer) {
  const message = await consumer.next({ expires: WITHIN_MS });
  if (message === null) throw new Error("not in time: a message");
  return message;
}
