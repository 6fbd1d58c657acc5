"""Key-value buckets and object stores."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from nats.js import api

from tests.jetstream.clients.seen import WITHIN_S, Seen, config_of, info_of, nothing, state_of

# ---- key-value ----


def entry_of(entry: Any) -> dict[str, Any] | None:
    if entry is None:
        return None
    names = ("bucket", "key", "value", "revision", "delta", "operation")
    return {name: getattr(entry, name) for name in names}


async def _updates_of(watcher: Any, number: int) -> list[Any]:
    """Without `delta`, which depends on time."""
    entries = [entry_of(await watcher.updates(timeout=WITHIN_S)) for _ in range(number)]
    return [entry and {name: value for name, value in entry.items() if name != "delta"} for entry in entries]


async def _until_marker(watcher: Any) -> list[Any]:
    found: list[Any] = []
    while not found or found[-1] is not None:
        found.append(entry_of(await watcher.updates(timeout=WITHIN_S)))
    return found


def status_of(status: Any) -> dict[str, Any]:
    info = status.stream_info
    return {"bucket": status.bucket, "config": config_of(info.config), "state": state_of(info)}


async def key_value(seen: Seen) -> None:
    js = seen.js
    await seen.saw_of("no bucket", js.key_value("KV1"))
    kv = await js.create_key_value(bucket="KV1", history=5, description="of tests", direct=True)
    await seen.saw_of("status, empty", kv.status(), status_of)
    await seen.saw_of("keys, none", kv.keys())
    await seen.saw_of("get, missing", kv.get("a"))
    await seen.saw_of("put", kv.put("a", b"1"))
    await seen.saw_of("get", kv.get("a"), entry_of)
    await seen.saw_of("create, exists", kv.create("a", b"2"))
    await seen.saw_of("create", kv.create("b.c", b"3"))
    await seen.saw_of("update, right revision", kv.update("a", b"4", last=1))
    await seen.saw_of("update, wrong revision", kv.update("a", b"5", last=1))
    await seen.saw_of("get, old revision", kv.get("a", revision=1), entry_of)
    await seen.saw_of("get, revision of another key", kv.get("a", revision=2), entry_of)
    await seen.saw_of("put, 0 bytes", kv.put("empty", b""))
    await seen.saw_of("get, 0 bytes", kv.get("empty"), entry_of)
    await seen.saw_of("delete, wrong revision", kv.delete("a", last=1))
    await seen.saw_of("delete", kv.delete("a", last=3))
    await seen.saw_of("get, deleted", kv.get("a"))
    await seen.saw_of("history, deleted", kv.history("a"), lambda found: [entry_of(one) for one in found])
    await seen.saw_of("create, deleted", kv.create("a", b"6"))
    for at in range(4):
        await kv.put("a", b"7.%d" % at)
    await seen.saw_of("history, of five", kv.history("a"), lambda found: [entry_of(one) for one in found])
    await seen.saw_of("purge", kv.purge("b.c"))
    await seen.saw_of("get, purged", kv.get("b.c"))
    await seen.saw_of("history, purged", kv.history("b.c"), lambda found: [entry_of(one) for one in found])
    await seen.saw_of("history, missing", kv.history("nothing"))
    await seen.saw_of("keys", kv.keys(), sorted)
    await seen.saw_of("status", kv.status(), status_of)
    await seen.saw_of("purge deletes", kv.purge_deletes(olderthan=0))
    await seen.saw_of("status, after purge of deletes", kv.status(), status_of)
    await seen.saw_of("delete bucket", js.delete_key_value("KV1"))
    await seen.saw_of("delete bucket, missing", js.delete_key_value("KV1"))


async def key_value_watch(seen: Seen) -> None:
    kv = await seen.js.create_key_value(bucket="KV2", history=3)
    watcher = await kv.watchall()
    seen.saw("watch all, empty", await _until_marker(watcher))
    for key in ("a", "b", "c", "a"):
        await kv.put(key, key.encode())
    await kv.delete("b")
    updated = await _updates_of(watcher, 5)  # a purge removes what the watcher has not received yet
    await kv.purge("c")
    seen.saw("watch all, updates", updated + await _updates_of(watcher, 1))
    await watcher.stop()
    watcher = await kv.watchall()
    seen.saw("watch all, present", await _until_marker(watcher))
    await watcher.stop()
    watcher = await kv.watchall(ignore_deletes=True)
    seen.saw("watch all, without deletes", await _until_marker(watcher))
    await watcher.stop()
    watcher = await kv.watch("a", include_history=True)
    seen.saw("watch a key, with history", await _until_marker(watcher))
    await kv.put("b", b"other")
    await kv.put("a", b"own")
    seen.saw("watch a key, updates", await _updates_of(watcher, 1))
    await watcher.stop()
    watcher = await kv.watch("*", meta_only=True)
    seen.saw("watch, headers only", await _until_marker(watcher))
    info = await watcher._sub.consumer_info()
    seen.saw("watch, its consumer", info_of(info, is_named=False))
    await watcher.stop()


# ---- objects ----


def object_of(info: api.ObjectInfo) -> dict[str, Any]:
    names = ("name", "bucket", "size", "chunks", "digest", "deleted", "description", "headers")
    options = None if info.options is None else info.options.as_dict()
    return {name: getattr(info, name) for name in names} | {"options": options}


def objects_of(found: list[api.ObjectInfo]) -> list[Any]:
    return [object_of(one) for one in sorted(found, key=lambda one: one.name)]


async def objects(seen: Seen) -> None:
    js = seen.js
    await seen.saw_of("no bucket", js.object_store("OBJ1"))
    store = await js.create_object_store("OBJ1", config=api.ObjectStoreConfig(description="of tests"))
    await seen.saw_of("list, empty", store.list())
    watcher = await store.watch()
    seen.saw("watch, empty", await watcher.updates(timeout=WITHIN_S))
    large = b"".join(b"%08d" % at for at in range(300 * 1024 // 8))
    meta = api.ObjectMeta(description="three chunks", headers={"A": ["1"]})
    await seen.saw_of("put, 300 KiB", store.put("large", large, meta), object_of)
    await seen.saw_of("put, 0 bytes", store.put("empty", b""), object_of)
    await seen.saw_of("put, 10 bytes, chunks of 4", store.put("small", b"0123456789", _chunks_of(4)), object_of)
    for name in ("large", "empty", "small"):
        await seen.saw_of(
            f"get, {name}",
            store.get(name),
            lambda got: object_of(got.info) | {"bytes": len(got.data), "sha256": sha256(got.data).hexdigest()},
        )
    many = bytes(8 << 20)  # the server waits for the client's flow control
    await seen.saw_of("put, 8 MiB", store.put("many", many), object_of)
    await seen.saw_of("get, 8 MiB", store.get("many"), lambda got: [len(got.data), got.data == many])
    await seen.saw_of("delete, 8 MiB", store.delete("many"), nothing)
    await seen.saw_of("info", store.get_info("large"), object_of)
    await seen.saw_of("info, missing", store.get_info("nothing"))
    await seen.saw_of("get, missing", store.get("nothing"))
    await seen.saw_of("overwrite", store.put("large", b"small now"), object_of)
    await seen.saw_of("get, overwritten", store.get("large"), lambda got: got.data)
    await seen.saw_of("list", store.list(), objects_of)
    await seen.saw_of("status", store.status(), lambda status: config_of(status.stream_info.config))
    await seen.saw_of(
        "update meta", store.update_meta("small", api.ObjectMeta(name="small", description="new")), nothing
    )
    await seen.saw_of("delete", store.delete("large"), nothing)
    await seen.saw_of("info, deleted", store.get_info("large"))
    await seen.saw_of("info, deleted is shown", store.get_info("large", show_deleted=True), object_of)
    await seen.saw_of("list, with deleted", store.list(), objects_of)
    await seen.saw_of("list, without deleted", store.list(ignore_deletes=True), objects_of)
    seen.saw("watch, updates", [object_of(await watcher.updates(timeout=WITHIN_S)) for _ in range(8)])
    await watcher.stop()
    await seen.saw_of("seal", store.seal(), nothing)
    await seen.saw_of("put, sealed", store.put("more", b"x"), object_of)
    await seen.saw_of("delete bucket", js.delete_object_store("OBJ1"))


def _chunks_of(size_bytes: int) -> api.ObjectMeta:
    return api.ObjectMeta(options=api.ObjectMetaOptions(max_chunk_size=size_bytes))
