"""Key-value buckets of three replicas under clients of `nats-py`, while leaders are killed and paused: every history is
linearizable (see `tests.wgl`).

`create` of this client consists of requests of their own (an update that expects no revision, a `get`, an update), of
which each is recorded. What an error leaves open took effect at some time, or never.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Literal

import nats
import nats.errors
import pytest
from nats.js.api import KeyValueConfig
from nats.js.errors import Error as JetStreamError
from nats.js.errors import KeyDeletedError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from tests.cluster_harness import Cluster
from tests.harness import eventually
from tests.jetstream.three_brokers import (
    cut_off_leader,
    in_background,
    kill_leader,
    leader_of,
    pause_leader,
    three_brokers,
)
from tests.wgl import ABSENT, DELETED, Content, KeyOperation, check_bucket

KEYS = ("a", "b", "c.d")
CLIENTS = 5
PROGRESS = 60
"""Operations that succeed between faults."""
PACE_S = 0.02
TIMEOUTS_S = (1.0, 3.0, 8.0)
FAILURES = (nats.errors.Error, JetStreamError)


class History(list[KeyOperation]):
    """Operations of all clients, until it is over."""

    is_over = False

    @property
    def succeeded(self) -> int:
        return sum(one.outcome == "ok" for one in self)

    @property
    def unknown(self) -> int:
        return sum(one.outcome == "unknown" for one in self)


class RecordedBucket(KeyValue):
    """Each request of `bucket`, with when it began and ended and what it found."""

    def __init__(self, bucket: KeyValue, client: int, history: History) -> None:
        super().__init__(bucket._name, bucket._stream, bucket._pre, bucket._js, bucket._direct)
        self.client, self.history = client, history

    async def _get(self, key: str, revision: int | None = None) -> KeyValue.Entry:
        began = time.monotonic()
        try:
            entry = await super()._get(key, revision)
        except KeyDeletedError as error:
            self.note(key, "get", began, DELETED, error.entry.revision)
            raise
        except KeyNotFoundError:
            self.note(key, "get", began, ABSENT, 0)
            raise
        assert entry.value is not None
        self.note(key, "get", began, entry.value, entry.revision)
        return entry

    async def _update(self, key: str, value: bytes, last: int | None = None, **rest: Any) -> int:
        async def update() -> int:
            return int(await super(RecordedBucket, self)._update(key, value, last=last, **rest))

        return await self._write(key, "update", value, update, last=last or 0)

    async def put(self, key: str, value: bytes, **rest: Any) -> int:
        async def put() -> int:
            return int(await super(RecordedBucket, self).put(key, value, **rest))

        return await self._write(key, "put", value, put)

    async def delete(self, key: str, **rest: Any) -> bool:
        async def delete() -> None:
            await super(RecordedBucket, self).delete(key, **rest)

        await self._write(key, "delete", DELETED, delete)
        return True

    async def _write(
        self,
        key: str,
        kind: Literal["put", "update", "delete"],
        content: Content,
        write: Callable[[], Coroutine[Any, Any, Any]],
        last: int = 0,
    ) -> Any:
        began = time.monotonic()
        try:
            revision = await write()
        except KeyWrongLastSequenceError:
            self.note(key, kind, began, content, last=last, outcome="refused")
            raise
        except FAILURES:
            self.note(key, kind, began, content, last=last, outcome="unknown")
            raise
        self.note(key, kind, began, content, revision, last=last)
        return revision

    def note(
        self,
        key: str,
        kind: Literal["put", "update", "delete", "get"],
        began: float,
        content: Content,
        revision: int | None = None,
        *,
        last: int = 0,
        outcome: Literal["ok", "refused", "unknown"] = "ok",
    ) -> None:
        ended = None if outcome == "unknown" else time.monotonic()
        self.history.append(KeyOperation(self.client, key, kind, began, ended, outcome, content, last, revision))


async def use(bucket: RecordedBucket, chance: Random) -> None:
    """One operation after the other, and what fails is not repeated."""
    known = dict.fromkeys(KEYS, 0)
    number = 0
    while not bucket.history.is_over:
        number += 1
        key, value = chance.choice(KEYS), b"%d of %d" % (number, bucket.client)
        bucket._js._timeout = chance.choice(TIMEOUTS_S)
        with suppress(*FAILURES):
            match chance.choice(("create", "update", "update", "put", "get", "get", "delete")):
                case "create":
                    known[key] = await bucket.create(key, value)
                case "update":
                    known[key] = await bucket.update(key, value, last=known[key])
                case "put":
                    known[key] = await bucket.put(key, value)
                case "get":
                    known[key] = (await bucket.get(key)).revision or 0
                case "delete":
                    await bucket.delete(key)
        await asyncio.sleep(chance.random() * PACE_S)


async def use_by_all(url: str, name: str, history: History, *, direct: bool) -> None:
    """The clients of a new bucket, until the history is over."""
    connections = [await nats.connect(url) for _ in range(CLIENTS)]
    try:
        config = KeyValueConfig(bucket=name, direct=direct, replicas=3, history=5)
        buckets = [await connections[0].jetstream(timeout=20).create_key_value(config)]
        buckets += [await one.jetstream(timeout=20).key_value(name) for one in connections[1:]]
        assert {bucket._direct for bucket in buckets} == {direct}
        async with asyncio.TaskGroup() as clients:
            for number, (bucket, connection) in enumerate(zip(buckets, connections, strict=True)):
                bucket._js = connection.jetstream()
                clients.create_task(use(RecordedBucket(bucket, number, history), Random(number)))
    finally:
        for connection in connections:
            await connection.close()


def history_of(cluster: Cluster, name: str, *, direct: bool, faults: Callable[[History], None]) -> History:
    """What the clients of a new bucket have done until the faults are over."""
    history = History()
    with in_background(use_by_all(cluster.nats_url, name, history, direct=direct)):
        try:
            wait_for_progress(history)
            faults(history)
        finally:
            history.is_over = True
    return history


def wait_for_progress(history: History) -> None:
    target = history.succeeded + PROGRESS
    eventually(lambda: history.succeeded >= target, 60, "operations succeed")


def require_linearizable(history: History) -> None:
    verdicts = check_bucket(history)
    broken = {key: verdict for key, verdict in verdicts.items() if not verdict.holds}
    lines = [
        f"key {key}: {verdict.holds}, after all other operations one of these must be next: {verdict.stuck}"
        for key, verdict in broken.items()
    ]
    assert not broken, "\n".join(lines)
    assert set(verdicts) == set(KEYS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with three_brokers(tmp_path_factory.mktemp("linearizable") / "own") as cluster:
        yield cluster


def play(cluster: Cluster, name: str, rounds: int, *, direct: bool) -> History:
    """In each round, the leader is killed, paused until another one leads, and paused for less than that."""
    stream = f"KV_{name}"

    def faults(history: History) -> None:
        def progress() -> None:
            wait_for_progress(history)

        for _ in range(rounds):
            progress()
            kill_leader(cluster, stream, progress)
            progress()
            pause_leader(cluster, stream, progress)
            progress()
            leader = leader_of(cluster, stream)
            leader.pause()
            time.sleep(Random(rounds).uniform(0.2, 2.0))  # shorter than the session of a leader, or about as long
            leader.resume()
        progress()

    return history_of(cluster, name, direct=direct, faults=faults)


@pytest.mark.long
@pytest.mark.parametrize("direct", [False], ids=["MSG.GET"])
def test_bucket_is_linearizable_while_leaders_fail(cluster: Cluster, direct: bool) -> None:
    history = play(cluster, f"short{int(direct)}", 1, direct=direct)
    assert history.succeeded > 5 * PROGRESS
    require_linearizable(history)


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("direct", [True], ids=["direct get"])
def test_bucket_is_linearizable_while_many_leaders_fail(cluster: Cluster, direct: bool) -> None:
    history = play(cluster, f"long{int(direct)}", 3, direct=direct)
    assert history.succeeded > 15 * PROGRESS
    assert history.unknown > 3
    require_linearizable(history)


@pytest.mark.long
@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.parametrize("direct", [False], ids=["MSG.GET"])
def test_bucket_is_linearizable_while_leaders_are_cut_off(tmp_path: Path, direct: bool) -> None:
    """From the other brokers, so that both leaders receive what clients send; or from everything."""
    with three_brokers(tmp_path / "own", network=True) as cluster:

        def faults(history: History) -> None:
            for with_nats in (False, True, False):
                wait_for_progress(history)
                cut_off_leader(cluster, "KV_cut", lambda: wait_for_progress(history), with_nats=with_nats)
            wait_for_progress(history)

        history = history_of(cluster, "cut", direct=direct, faults=faults)
    require_linearizable(history)
