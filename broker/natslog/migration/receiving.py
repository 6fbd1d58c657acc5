"""Messages of a JetStream stream, from its server to batches of a log.

Theory of operation. The server sends the messages to an ephemeral consumer of its own, as it does for a mirror
(`direct`): such a consumer needs no acks, removes nothing from work queues, and is in no list. Sequence and time of a
message are in its reply subject. Frames are handled as columns: payloads, subjects and headers are copied once into the
buffers of a batch, and the numbers of all reply subjects of a chunk are parsed in a few calls of Arrow.

The server sends at most a window of messages beyond the last flow control request that was answered. A request is
answered when the batches that wait are few, so memory is bounded.

Invariant. Messages of one consumer are numbered without a gap. Where a number is missing (a lost connection), all that
follows is refused, and the next consumer begins behind the last message that was received in order. So sequences that
are missing in the batches are missing in the stream.

Source: nats-server, `server/consumer.go` (`deliverMsg`, `sendFlowControl`); ADR-8 and ADR-15 of NATS.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow import ipc
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.errors import MigrationFailed
from natslog.ingest.batches import BatchBuilder
from natslog.ingest.columns import Column, Growing
from natslog.ingest.unwanted import split_by_subject, split_by_text
from natslog.log.batch_encoder import encode_rows_at
from natslog.migration.source import INBOX, JetStreamSource
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD, PAYLOAD_LEN, REPLY, REPLY_LEN, SUBJECT, SUBJECT_LEN

WAITING_BYTES = 32 * 1024 * 1024
"""Of batches that wait; beyond it, flow control requests are not answered."""
_HEARTBEAT_NS = 1_000_000_000
_INACTIVE_NS = 60_000_000_000
_SILENT_S = 10.0
_FLUSH_WITHIN_S = 0.05
_EPOCH = 1  # each batch gets the epoch of the leader that appends it
_V1_TOKENS = 9  # of a reply subject: $JS.ACK.stream.consumer.times.seq.consumer seq.time.pending
_V1_FIRST, _V2_FIRST = 4, 6  # "times"; with domain and account, two tokens are before it

Longs = npt.NDArray[np.int64]


class Numbers(NamedTuple):
    """Of some messages: their sequences, their numbers in the consumer, their times, and how many follow."""

    seqs: Longs
    consumer_seqs: Longs
    times_us: Longs
    pending: Longs


class Piece(NamedTuple):
    """One batch, encoded. `others`: subjects that the stream does not record any more."""

    message: bytes
    base_offset: int
    end_offset: int
    rows: int
    subjects: pa.Array[Any]


class Receiving:
    """The messages of one ephemeral consumer, from an offset on. `begin` it, then `take` until it has `failed`.

    Args:
        newest_us: of the message before, as it is stored: times ascend.
        skips_unstorable: messages that natslog cannot store are left out. Otherwise the first one is `problem`.

    Attributes:
        left: messages that were left in the stream when it began. received_seqs: how many have come, in order.
        next_offset: behind what was encoded; newest_us: the time of its last message. failed: why the consumer cannot
        be used any more. skipped: messages that were left out.
    """

    def __init__(
        self, source: JetStreamSource, next_offset: int, newest_us: int, *, skips_unstorable: bool = False
    ) -> None:
        self._source, self._link = source, source.link
        self.next_offset, self.newest_us = next_offset, newest_us
        self._skips_unstorable = skips_unstorable
        self._name = f"natslog-{secrets.token_hex(6)}"
        self._inbox = f"{INBOX}{secrets.token_hex(8)}"
        self._builder = BatchBuilder()
        self._seqs, self._times = Growing(np.int64), Growing(np.int64)
        self._pieces: deque[Piece] = deque()
        self._arrived = asyncio.Event()
        self._flush: asyncio.TimerHandle | None = None
        self._flow_reply = ""
        self._attachment: object | None = None
        self._last_s = time.monotonic()
        self._connections = 0
        self.left = 0
        self.received_seqs = 0
        self.skipped = 0
        self.failed = ""
        self.problem: MigrationFailed | None = None

    # ---- life ----

    async def begin(self) -> None:
        """Raises as `JetStreamSource.request`."""
        self._connections = self._link.connections
        self._attachment = await self._link.attach((self._inbox,), self._receive)
        config = {
            "name": self._name,
            "deliver_subject": self._inbox,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.next_offset + 1,
            "ack_policy": "none",
            "flow_control": True,
            "idle_heartbeat": _HEARTBEAT_NS,
            "inactive_threshold": _INACTIVE_NS,
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "direct": True,
        }
        stream = self._source.stream
        answer = await self._source.request(
            f"CONSUMER.CREATE.{stream}.{self._name}", {"stream_name": stream, "config": config}
        )
        self.left = int(msgspec.json.decode(answer).get("num_pending", 0))
        self._last_s = time.monotonic()

    async def end(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
        self.failed = self.failed or "it was ended"
        if self._attachment is not None:
            attachment, self._attachment = self._attachment, None
            await self._link.detach(attachment)
            self._link.send_now(
                f"PUB {self._source.prefix}.CONSUMER.DELETE.{self._source.stream}.{self._name} 0\r\n\r\n".encode()
            )

    async def take(self, most_bytes: int, within_s: float) -> list[Piece]:
        """Batches that follow one another, at least one unless none comes in time."""
        if not self._pieces and not self.failed:
            self._arrived.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._arrived.wait()
            except TimeoutError:
                self._check_life()
        taken: list[Piece] = []
        size_bytes = 0
        while self._pieces and (not taken or size_bytes + len(self._pieces[0].message) <= most_bytes):
            piece = self._pieces.popleft()
            taken.append(piece)
            size_bytes += len(piece.message)
        self._answer_flow_control()
        return taken

    async def has_all(self) -> bool:
        """Whether everything that the stream has was received and taken. Raises as `JetStreamSource.request`."""
        if self._pieces or self._builder.rows:
            return False
        answer = await self._source.request(f"CONSUMER.INFO.{self._source.stream}.{self._name}")
        info = msgspec.json.decode(answer)
        is_all = info["num_pending"] == 0 and info["delivered"]["consumer_seq"] == self.received_seqs
        return bool(is_all and not self._pieces and not self._builder.rows)

    def _check_life(self) -> None:
        if self._link.connections != self._connections or not self._link.is_up:
            self._fail("the connection was lost")
        elif time.monotonic() - self._last_s > _SILENT_S:
            self._fail(f"nothing was received for {_SILENT_S:.0f} s")

    def _fail(self, why: str) -> None:
        self.failed = self.failed or why
        self._arrived.set()

    def _refuse(self, problem: MigrationFailed) -> None:
        self.problem = self.problem or problem
        self._fail(problem.message)

    # ---- receiving ----

    def _receive(self, frames: Frames) -> None:
        if self.failed:
            return
        self._last_s = time.monotonic()
        statuses = _statuses(frames, self._inbox.encode())
        if not statuses.any():
            self._receive_messages(frames)
            return
        edges = np.flatnonzero(statuses)
        at = 0
        for edge in edges.tolist():  # flow control is answered in its place
            if edge > at:
                self._receive_messages(Frames(frames.buffer, frames.rows[at:edge]))
            self._receive_status(frames, frames.rows[edge])
            at = edge + 1
        if at < len(frames.rows):
            self._receive_messages(Frames(frames.buffer, frames.rows[at:]))

    def _receive_messages(self, frames: Frames) -> None:
        try:
            numbers = numbers_of(frames)
        except MigrationFailed as error:
            self._refuse(error)
            return
        count = len(frames.rows)
        expected = np.arange(self.received_seqs + 1, self.received_seqs + count + 1)
        if not np.array_equal(numbers.consumer_seqs, expected):
            self._fail("messages were lost on the way")
            return
        self.received_seqs += count
        rows = frames.rows.copy()
        rows[:, REPLY_LEN] = 0
        frames = self._storable(Frames(frames.buffer, rows), numbers)
        if len(frames.rows):
            self._builder.add(frames, packs_ids=False)
        kept = np.isin(rows[:, SUBJECT], frames.rows[:, SUBJECT]) if len(frames.rows) < count else slice(None)
        self._seqs.extend(numbers.seqs[kept])
        self._times.extend(numbers.times_us[kept])
        if self._builder.is_full:
            self._encode()
        elif numbers.pending[-1] == 0 and self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(_FLUSH_WITHIN_S, self._encode)

    def _storable(self, frames: Frames, numbers: Numbers) -> Frames:
        """Without messages that are not UTF-8 where they have to be, or whose subject cannot be one of NATS."""
        plain, without_subject = split_by_subject(frames)
        storable, not_text = split_by_text(plain) if len(plain.rows) else (plain, plain)
        refused = len(without_subject.rows) + len(not_text.rows)
        if refused:
            self.skipped += refused
            if not self._skips_unstorable:
                first = min(int(one.rows[0, SUBJECT]) for one in (without_subject, not_text) if len(one.rows))
                seq = int(numbers.seqs[np.flatnonzero(frames.rows[:, SUBJECT] == first)[0]])
                text = (
                    f"natslog cannot store the message with sequence {seq}: its subject is too long, or its subject or "
                    "headers are not UTF-8. Delete it in JetStream, or leave such messages out with --skip-unstorable"
                )
                self._refuse(MigrationFailed(text, sequence=seq))
        return storable

    def _receive_status(self, frames: Frames, row: npt.NDArray[np.int64]) -> None:
        headers = frames.buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]].tobytes()
        reply = frames.buffer[row[REPLY] : row[REPLY] + row[REPLY_LEN]].tobytes().decode(errors="replace")
        if not headers.startswith(b"NATS/1.0 100"):
            self._fail(headers.partition(b"\r\n")[0].decode(errors="replace"))
        elif reply:
            self._flow_reply = reply
            self._answer_flow_control()
        else:
            last = _header(headers, b"Nats-Last-Consumer")
            if last.isdigit() and int(last) > self.received_seqs:
                self._fail("messages were lost on the way")
            stalled = _header(headers, b"Nats-Consumer-Stalled").decode(errors="replace")
            if stalled:
                self._flow_reply = stalled
                self._answer_flow_control()

    def _answer_flow_control(self) -> None:
        waiting_bytes = sum(len(piece.message) for piece in self._pieces)
        if self._flow_reply and waiting_bytes < WAITING_BYTES and not self.failed:
            reply, self._flow_reply = self._flow_reply, ""
            self._link.send_now(f"PUB {reply} 0\r\n\r\n".encode())

    # ---- encoding ----

    def _encode(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if not self._builder.rows:
            return
        rows, seqs = self._builder.taken().rows, self._seqs.values
        times_us = np.maximum(np.maximum.accumulate(self._times.values), self.newest_us)
        self.newest_us = int(times_us[-1])
        base, end = self.next_offset, int(seqs[-1])
        encoded = encode_rows_at(
            rows,
            seqs - 1,
            times_us,
            base_offset=base,
            end_offset=end,
            max_timestamp_us=self.newest_us,
            epoch=_EPOCH,
        )
        subjects = pc.unique(rows.to_arrow().column("subject"))  # copies of the builder's bytes
        self._pieces.append(Piece(b"".join(encoded.pieces), base, end, rows.rows, subjects))
        self.next_offset = end
        self._builder.clear()
        self._seqs.count = self._times.count = 0
        self._arrived.set()


def gap(start: int, end: int, newest_us: int) -> bytes:
    """A batch without rows: the offsets `[start, end)` have no message."""
    rows = pa.RecordBatch.from_pylist([], schema=MESSAGE_SCHEMA)
    return bytes(
        ipc.encode_batch(rows, base_offset=start, end_offset=end, epoch=_EPOCH, max_timestamp_us=max(0, newest_us))
    )


def numbers_of(frames: Frames) -> Numbers:
    """What the reply subjects of messages state, at least one.

    Raises:
        MigrationFailed: they are not those of a consumer.
    """
    replies = Column()
    starts, lengths = np.ascontiguousarray(frames.rows[:, [REPLY, REPLY_LEN]].T)
    replies.extend(frames.buffer, starts, lengths)
    tokens = pc.split_pattern(replies.texts.to_arrow(pa.string()), ".")
    counts = np.unique(pc.list_value_length(tokens).to_numpy())
    if len(counts) != 1 or counts[0] < _V1_TOKENS:
        raise MigrationFailed("JetStream has sent a message with a reply subject that is not the one of a consumer")
    first = _V1_FIRST if counts[0] == _V1_TOKENS else _V2_FIRST
    flat, count = tokens.flatten(), int(counts[0])
    places = np.arange(len(frames.rows)) * count
    _, seqs, consumer_seqs, times_ns, pending = (
        flat.take(pa.array(places + first + at)).cast(pa.int64()).to_numpy() for at in range(5)
    )
    return Numbers(seqs, consumer_seqs, times_ns // 1000, pending)


def _statuses(frames: Frames, inbox: bytes) -> npt.NDArray[np.bool_]:
    """Which frames are heartbeats, flow control requests or other statuses: they are sent to the inbox itself."""
    rows = frames.rows
    found: npt.NDArray[np.bool_] = (
        (rows[:, HEADER_LEN] > 0) & (rows[:, PAYLOAD_LEN] == 0) & (rows[:, SUBJECT_LEN] == len(inbox))
    )
    for at in np.flatnonzero(found).tolist():
        start = rows[at, SUBJECT]
        found[at] = frames.buffer[start : start + len(inbox)].tobytes() == inbox
    return found


def _header(headers: bytes, name: bytes) -> bytes:
    """The value of a header; empty if there is none."""
    _, found, rest = headers.partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else b""
