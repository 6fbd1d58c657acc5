// Key-value buckets and object stores.

import { createHash } from "node:crypto";
import { headers } from "@nats-io/transport-node";
import { Kvm } from "@nats-io/kv";
import { Objm } from "@nats-io/obj";
import {
  all,
  comparable,
  errorOf,
  stateOf,
  taken,
} from "./seen.mjs";

// ---- key-value ----

function entryOf(entry) {
  if (entry === null) return null;
  return { ...liveEntryOf(entry), delta: entry.delta ?? null };
}

// Without `delta` and `isUpdate`, which depend on time.
function liveEntryOf(entry) {
  const { bucket, key, revision, operation, length } = entry;
  return { bucket, key, value: entry.string(), revision, operation, length };
}

function statusOf(status) {
  const { bucket, values, size, history, streamInfo } = status;
  return { bucket, values, size, history, config: comparable(streamInfo.config), state: stateOf(streamInfo) };
}

export async function keyValue(seen) {
  const kvm = new Kvm(seen.nc);
  await seen.sawOf("no bucket", kvm.open("KV1").then((kv) => kv.status()), statusOf);
  const kv = await kvm.create("KV1", { history: 5, description: "of tests" });
  await seen.sawOf("create bucket, the same", kvm.create("KV1", { history: 5, description: "of tests" }), () => "done");
  await seen.sawOf("create bucket, another", kvm.create("KV1", { history: 6 }), () => "done");
  const history = async (step, key) => {
    await seen.sawOf(step, kv.history({ key }).then(all), (found) => found.map(entryOf));
  };
  await seen.sawOf("status, empty", kv.status(), statusOf);
  await seen.sawOf("keys, none", kv.keys().then(all));
  await seen.sawOf("get, missing", kv.get("a"), entryOf);
  await seen.sawOf("put", kv.put("a", "1"));
  await seen.sawOf("get", kv.get("a"), entryOf);
  await seen.sawOf("create, exists", kv.create("a", "2"));
  await seen.sawOf("create", kv.create("b.c", "3"));
  await seen.sawOf("update, right revision", kv.update("a", "4", 1));
  await seen.sawOf("update, wrong revision", kv.update("a", "5", 1));
  await seen.sawOf("get, old revision", kv.get("a", { revision: 1 }), entryOf);
  await seen.sawOf("get, revision of another key", kv.get("a", { revision: 2 }), entryOf);
  await seen.sawOf("put, 0 bytes", kv.put("empty", ""));
  await seen.sawOf("get, 0 bytes", kv.get("empty"), entryOf);
  await seen.sawOf("delete, wrong revision", kv.delete("a", { previousSeq: 1 }));
  await seen.sawOf("delete", kv.delete("a", { previousSeq: 3 }));
  await seen.sawOf("get, deleted", kv.get("a"), entryOf);
  await history("history, deleted", "a");
  await seen.sawOf("create, deleted", kv.create("a", "6"));
  for (let at = 0; at < 4; at++) await kv.put("a", `7.${at}`);
  await history("history, of five", "a");
  await seen.sawOf("purge", kv.purge("b.c"));
  await seen.sawOf("get, purged", kv.get("b.c"), entryOf);
  await history("history, purged", "b.c");
  await history("history, missing", "nothing");
  await history("history, all", ">");
  await seen.sawOf("keys", kv.keys().then(all));
  await seen.sawOf("keys, filtered", kv.keys(["e*", "empty", "b.>"]).then(all));
  await seen.sawOf("status", kv.status(), statusOf);
  await seen.sawOf("purge deletes", kv.purgeDeletes(0));
  await seen.sawOf("status, after purge of deletes", kv.status(), statusOf);
  await seen.sawOf("buckets", all(kvm.list()), (found) => found.map((status) => status.bucket));
  await seen.sawOf("delete bucket", kv.destroy());
  await seen.sawOf("delete bucket, missing", kv.destroy());
}

export async function keyValueWatch(seen) {
  const kv = await new Kvm(seen.nc).create("KV2", { history: 3 });
  const watched = async (options) => {
    const watcher = await kv.watch(options);
    return { iterator: watcher[Symbol.asyncIterator](), stop: () => watcher.stop() };
  };
  const present = async (step, options, number) => {
    const { iterator, stop } = await watched(options);
    seen.saw(step, (await taken(iterator, number, step)).map(entryOf));
    stop();
  };
  let watcher = await watched({});
  for (const key of ["a", "b", "c", "a"]) await kv.put(key, key);
  await kv.delete("b");
  const updated = await taken(watcher.iterator, 5, "updates"); // a purge removes what the watcher has not received yet
  await kv.purge("c");
  updated.push(...(await taken(watcher.iterator, 1, "updates")));
  seen.saw("watch all, updates", updated.map(liveEntryOf));
  watcher.stop();
  await present("watch all, present", {}, 3);
  await present("watch all, without deletes", { ignoreDeletes: true }, 1);
  await present("watch all, with history", { include: "history" }, 5);
  await present("watch all, headers only", { headers_only: true }, 3);
  await present("watch all, from a revision", { resumeFromRevision: 4 }, 3);
  await present("watch two keys", { key: ["a", "c"] }, 2);
  watcher = await watched({ key: "a", include: "history" });
  seen.saw("watch a key, with history", (await taken(watcher.iterator, 2, "history")).map(entryOf));
  const updates = await watched({ include: "updates" });
  await kv.put("b", "other");
  await kv.put("a", "own");
  seen.saw("watch a key, updates", (await taken(watcher.iterator, 1, "updates")).map(liveEntryOf));
  seen.saw("watch updates only", (await taken(updates.iterator, 2, "updates")).map(liveEntryOf));
  watcher.stop();
  updates.stop();
}

// ---- objects ----

export async function objects(seen) {
  const objm = new Objm(seen.nc);
  await seen.sawOf("no bucket", objm.open("OBJ1"), () => "done");
  const store = await objm.create("OBJ1", { description: "of tests" });
  await seen.sawOf("list, empty", store.list());
  const watcher = await store.watch();
  const large = new TextEncoder().encode("0123456789abcdef".repeat((300 * 1024) / 16));
  const own = headers();
  own.set("A", "1");
  const meta = { name: "large", description: "three chunks", headers: own };
  await seen.sawOf("put, 300 KiB", store.putBlob(meta, large), objectOf);
  await seen.sawOf("put, 0 bytes", store.putBlob({ name: "empty" }, new Uint8Array(0)), objectOf);
  const chunks = { name: "small", options: { max_chunk_size: 4 } };
  const digits = new TextEncoder().encode("0123456789");
  await seen.sawOf("put, 10 bytes, chunks of 4", store.putBlob(chunks, digits), objectOf);
  const content = async (step, name) => {
    await seen.sawOf(step, contentOf(store, name));
  };
  for (const name of ["large", "empty", "small"]) await content(`get, ${name}`, name);
  await seen.sawOf("put, 8 MiB", store.putBlob({ name: "many" }, new Uint8Array(8 << 20)), objectOf);
  await content("get, 8 MiB, with flow control", "many");
  await seen.sawOf("delete, 8 MiB", store.delete("many"), comparable);
  await seen.sawOf("info", store.info("large"), objectOf);
  await seen.sawOf("info, missing", store.info("nothing"), objectOf);
  await content("get, missing", "nothing");
  await seen.sawOf("link", store.link("to small", await store.info("small")), objectOf);
  await content("get, link", "to small");
  const other = await objm.create("OBJ2");
  await seen.sawOf("link to a bucket", store.linkStore("to other", other), objectOf);
  await seen.sawOf("overwrite", store.putBlob({ name: "large" }, new TextEncoder().encode("small now")), objectOf);
  await content("get, overwritten", "large");
  await seen.sawOf("list", store.list(), (found) => found.map(objectOf));
  await seen.sawOf("update meta", store.update("small", { name: "renamed" }), () => "done");
  await seen.sawOf("info, renamed", store.info("renamed"), objectOf);
  await seen.sawOf("delete", store.delete("large"), comparable);
  await seen.sawOf("delete, missing", store.delete("nothing"), comparable);
  await seen.sawOf("info, deleted", store.info("large"), objectOf);
  await content("get, deleted", "large");
  await seen.sawOf("list, with deleted", store.list(), (found) => found.map(objectOf));
  const updates = await taken(watcher[Symbol.asyncIterator](), 10, "updates");
  seen.saw("watch, updates", updates.map(objectOf));
  watcher.stop();
  await seen.sawOf("seal", store.seal(), (status) => comparable(status.streamInfo.config));
  await seen.sawOf("put, sealed", store.putBlob({ name: "more" }, new Uint8Array(1)), objectOf);
  await seen.sawOf("buckets", all(objm.list()), (found) => found.map((status) => status.bucket));
  await seen.sawOf("delete bucket", store.destroy());
  await seen.sawOf("delete bucket, missing", store.destroy());
}

function objectOf(info) {
  if (info === null) return null;
  const { name, bucket, size, chunks, digest, deleted, description, options } = info;
  const own = Symbol.iterator in (info.headers ?? {}) ? [...info.headers] : info.headers ?? null;
  return { name, bucket, size, chunks, digest, deleted, description, options, headers: own };
}

async function contentOf(store, name) {
  const result = await store.get(name);
  if (result === null) return null;
  const hash = createHash("sha256");
  let bytes = 0;
  for await (const chunk of result.data) {
    hash.update(chunk);
    bytes += chunk.length;
  }
  const error = await result.error;
  return { info: objectOf(result.info), bytes, sha256: hash.digest("hex"), error: error && errorOf(error) };
}
