"""Those who use streams whose messages are removed: they publish, delete and purge, and read at the leader."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import nats

from natslog.client import Fetched, NatslogClient
from natslog.errors import MessageNotFound, NatslogError, OffsetOutOfRange
from natslog.log.expiry import TOMBSTONE_HEADER, TTL_HEADER
from tests.chaos.recorders import Recorder
from tests.chaos.removal_checkers import must_be_hidden
from tests.chaos.removal_history import KeyedMessage, Outcome, Removal, RemovalHistory, message
from tests.cluster_harness import Cluster

_KEY_HEADER = "Natslog-Key"
_ROUND = 6
_ROUND_EVERY_S = 0.2
_AGAIN_AFTER_S = 6.0
_MOST_UNACKED = 300
_LAST_ACKS_WITHIN_S = 30.0
_REMOVE_EVERY_S = 0.8
_CHECK_EVERY_S = 0.3
_CHOSEN_AMONG = 200
_NEWEST = 1500
_EXPIRED_AFTER_S = 60.0  # there may have been no leader meanwhile


class KeyedPublisher(Recorder):
    """Single messages with ids, each sent again until it is acked: its ack names its offset."""

    def __init__(self, history: RemovalHistory, url: str, run: str, seed: int) -> None:
        super().__init__(history, f"{history.stream} publisher")
        self.kept, self.url, self.run_name = history, url, run
        self._chance = random.Random(seed)

    def work(self) -> None:
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        connection = await nats.connect(
            self.url, connect_timeout=2, reconnect_time_wait=0.1, max_reconnect_attempts=-1, error_cb=self._on_error
        )
        try:
            inbox = connection.new_inbox()
            await connection.subscribe(f"{inbox}.*", cb=self._on_ack)
            while not self.stopping.is_set():
                if connection.is_connected:
                    await self._round(connection, inbox)
                await asyncio.sleep(_ROUND_EVERY_S)
            await self._await_last_acks(connection, inbox)
        finally:
            await connection.close()

    async def _round(self, connection: Any, inbox: str) -> None:
        unacked = self.kept.unacked
        for one in unacked:
            if time.time() - one.tried_s > _AGAIN_AFTER_S:
                await self._send(connection, inbox, one)
        if len(unacked) < _MOST_UNACKED:
            for _ in range(_ROUND):
                await self._send(connection, inbox, self._new())

    def _new(self) -> KeyedMessage:
        kept = self.kept
        one = message(kept.stream, kept.rules, len(kept.messages), self._chance.randrange(10_000), time.time())
        kept.messages.append(one)
        return one

    async def _send(self, connection: Any, inbox: str, one: KeyedMessage) -> None:
        one.tries, one.tried_s = one.tries + 1, time.time()
        headers = {"Nats-Msg-Id": f"{self.run_name}-{one.number}"}
        headers |= {} if one.key is None else {_KEY_HEADER: one.key}
        headers |= {} if one.ttl is None else {TTL_HEADER: one.ttl}
        headers |= {TOMBSTONE_HEADER: "true"} if one.is_tombstone else {}
        await connection.publish(one.subject, one.value, reply=f"{inbox}.{one.number}", headers=headers)

    async def _await_last_acks(self, connection: Any, inbox: str) -> None:
        deadline = time.monotonic() + _LAST_ACKS_WITHIN_S
        while (unacked := self.kept.unacked) and time.monotonic() < deadline:
            for one in unacked:
                if connection.is_connected and time.time() - one.tried_s > _AGAIN_AFTER_S:
                    await self._send(connection, inbox, one)
            await asyncio.sleep(_ROUND_EVERY_S)
        if unacked:
            self.kept.violate("6 back in time", f"{len(unacked)} messages are not acked in the end")

    async def _on_error(self, error: Exception) -> None:
        self.history.note_error(self.name, repr(error))

    async def _on_ack(self, answered: Any) -> None:
        answer = json.loads(answered.data) if answered.data else {"error": {"description": "no responders"}}
        if "error" in answer:
            self.history.note_error(self.name, answer["error"]["description"])
            return
        self.kept.ack(int(answered.subject.rpartition(".")[2]), answer["seq"] - 1, time.time())


class Remover(Recorder):
    """Deletes single messages, and purges subjects, one request after another, at random brokers."""

    def __init__(self, history: RemovalHistory, cluster: Cluster, seed: int) -> None:
        super().__init__(history, f"{history.stream} remover")
        self.kept, self.cluster = history, cluster
        self._chance = random.Random(seed)

    def work(self) -> None:
        broker = self._chance.choice(self.cluster.brokers)
        if self.kept.acked_end > 0 and not broker.is_paused:
            with broker.client(retries=0, timeout_s=8) as client:
                self._request(client)
        self.stopping.wait(self._chance.uniform(0, 2 * _REMOVE_EVERY_S))

    def _request(self, client: NatslogClient) -> None:
        kept, chance, began_s = self.kept, self._chance, time.time()
        end, name = kept.acked_end, kept.stream
        offset, below, keep = None, None, 0
        subject = f"{name}.s{chance.randrange(kept.rules.subjects)}"
        kind = chance.random()
        outcome: Outcome = "unknown"
        try:
            if kind < 0.7:
                offset = max(0, end - 1 - chance.randrange(_CHOSEN_AMONG))
                client.delete_message(name, offset)
            elif kind < 0.85:
                below = max(1, end - chance.randrange(_CHOSEN_AMONG))
                client.purge(name, below, subject=subject)
            else:
                keep = chance.randint(1, 3)
                client.purge(name, subject=subject, keep=keep)
            outcome = "done"
        except MessageNotFound:
            outcome = "missing"
        finally:
            where = {"subject": subject} if offset is None else {"offset": offset}
            kept.removals.append(Removal(outcome, began_s, time.time(), end, below=below, keep=keep, **where))


class LeaderReader(Recorder):
    """Reads the stream from its beginning to its end and beyond, and at times looks back, through random brokers.

    Such a request is answered by the leader, which hides all that was to be hidden when it was sent.
    """

    def __init__(self, history: RemovalHistory, cluster: Cluster, seed: int) -> None:
        super().__init__(history, f"{history.stream} reader")
        self.kept, self.cluster = history, cluster
        self._chance = random.Random(seed)
        self.next_offset = 0

    def work(self) -> None:
        broker = self._chance.choice(self.cluster.brokers)
        if broker.is_paused:
            return
        looks_back = self.next_offset > 0 and self._chance.random() < 0.5
        start = self._earlier() if looks_back else self.next_offset
        hidden = must_be_hidden(self.kept, time.time(), start, _EXPIRED_AFTER_S)
        with broker.client(retries=0, timeout_s=4) as client:
            fetched = self._fetch(client, start)
        self.note(start, fetched, hidden)
        if not looks_back:
            self.next_offset = fetched.next_offset
        self.kept.looks += 1
        self.stopping.wait(_CHECK_EVERY_S)

    def _earlier(self) -> int:
        """Mostly of the newest messages."""
        most = self.next_offset if self._chance.random() < 0.1 else min(self.next_offset, _NEWEST)
        return self.next_offset - 1 - self._chance.randrange(most)

    def _fetch(self, client: NatslogClient, start: int) -> Fetched:
        try:
            return client.fetch(self.kept.stream, start, max_bytes=256 * 1024)
        except OffsetOutOfRange as error:
            self.kept.violate("1 no acked loss", f"from offset {start} on: {error}")
            raise
        except NatslogError as error:
            if not error.retriable:
                self.kept.violate("4 once and in order", f"from offset {start} on: {error.code}: {error}")
            raise

    def note(self, start: int, fetched: Fetched, hidden: dict[int, str]) -> None:
        """What was got, and what had to be hidden, and why."""
        kept, found = self.kept, set[int]()
        for batch in fetched.batches:
            rows = zip(batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True)
            for offset, value in rows:
                if kept.seen.setdefault(offset, value) != value:
                    kept.violate("2 one history", f"offset {offset} reads otherwise than before")
                found.add(offset)
        for offset in sorted(found & hidden.keys())[:3]:
            kept.violate("9 removed", f"the leader shows offset {offset}: {hidden[offset]}")
        for offset in sorted(found & kept.passed)[:3]:
            kept.violate("9 removed", f"offset {offset} is visible again")
        kept.passed |= set(range(start, fetched.next_offset)) - found
