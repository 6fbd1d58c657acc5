"""Bytes of NATS connections: frames, header blocks, envelopes, acks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA
from natslog.client.in_flight import InFlight
from natslog.ingest import envelopes
from natslog.ingest.batches import BatchBuilder
from natslog.ingest.conditions import conditions_of, marked
from natslog.ingest.envelopes import Envelope, Refused
from natslog.ingest.unwanted import split_by_text
from natslog.wire import native
from natslog.wire.envelope import COOKIE, MAX_ROWS, MESSAGE_OPENING, OPENING, enveloped
from natslog.wire.frames import FrameParser, Frames, MalformedFrame, Scan
from natslog.wire.layout import (
    END,
    HEADER_LEN,
    PAYLOAD,
    PAYLOAD_LEN,
    REPLY,
    REPLY_LEN,
    SID,
    START,
    SUBJECT,
    SUBJECT_LEN,
)
from natslog.wire.outgoing import BY_REPLY
from natslog.wire.own_ids import packed_id, unpacked
from tests.fuzz.target import target
from tests.unit.client.test_in_flight import INBOX, STREAMS, ack, rows_of
from tests.unit.wire import plain_scan

Found = list[tuple[Any, ...]]
_TAIL = b"MSG tail 7 2\r\nok\r\n"
_ONE_BY_ONE_BYTES = 400


# ---- frames ----


def parsed(scan: Scan, pieces: list[bytes]) -> tuple[Found, bool]:
    """What is found in the pieces, in order, and whether it ended with bytes that are not NATS protocol."""
    parser, found = FrameParser(scan), list[tuple[Any, ...]]()
    try:
        for piece in pieces:
            parser.receive_data(piece)
            for frames in parser.frames():
                found += _contents(frames)
    except MalformedFrame:
        return found, True
    return found, False


def _contents(frames: Frames) -> Iterator[tuple[Any, ...]]:
    buffer = frames.buffer
    for row in frames.rows.tolist():
        if row[SID] < 0:
            yield (buffer[row[START] : row[END]].tobytes(),)
            continue
        spans = (
            (row[SUBJECT], row[SUBJECT_LEN]),
            (row[REPLY], row[REPLY_LEN]),
            (row[PAYLOAD] - row[HEADER_LEN], row[HEADER_LEN]),
            (row[PAYLOAD], row[PAYLOAD_LEN]),
        )
        yield (row[SID], *(buffer[start : start + length].tobytes() for start, length in spans))


def _frames() -> Iterator[bytes]:
    block = b"NATS/1.0\r\nNats-Msg-Id: a\r\nTrace: b\r\n\r\n"
    yield b"PING\r\n"
    yield b"INFO {\"max_payload\": 1048576}\r\nMSG orders.new 1 _INBOX.a.~1 5\r\nhello\r\nPONG\r\n+OK\r\n-ERR 'x'\r\n"
    yield b"HMSG orders.new 1 r %d %d\r\n" % (len(block), len(block) + 5) + block + b"hello\r\n" + b"MSG a 2 0\r\n\r\n"
    yield b"MSG\ta  3\t4\r\nMSG \r\nMSG b 3 20\r\nincomplete"
    yield b"MSG a 1 99999999999999999999\r\n"


@target("frames", _frames, [b"MSG ", b"HMSG ", b"\r\n", b"PING\r\n", b"\t", b" 1 ", b"999999999999999999", b"68157440"])
def check_frames(data: bytes) -> None:
    """The compiled scanner and the plain one find the same frames, whole, in pieces, byte by byte, and with more
    frames behind.
    """
    whole, is_malformed = parsed(plain_scan.scan, [data])
    assert parsed(native.scan, [data]) == (whole, is_malformed), "the scanners differ"
    third = len(data) // 3
    splits = [[data[: data[0] % len(data)], data[data[0] % len(data) :]]] if data else []
    splits.append([data[:third], data[third : 2 * third], data[2 * third :]])
    if len(data) <= _ONE_BY_ONE_BYTES:
        splits.append([data[at : at + 1] for at in range(len(data))])
    for pieces in splits:
        assert parsed(native.scan, pieces) == (whole, is_malformed), f"in {len(pieces)} pieces it differs"
    longer, _ = parsed(native.scan, [data + _TAIL])
    assert longer[: len(whole)] == whole, "a tail changes what was found before"


# ---- headers ----


def message(block: bytes, payload: bytes, reply: bytes = b"") -> Frames:
    """One received message."""
    head = b"MSG" if not block else b"HMSG"
    sizes = b"%d" % len(payload) if not block else b"%d %d" % (len(block), len(block) + len(payload))
    parser = FrameParser()
    parser.receive_data(
        head + b" orders.new 1 " + (reply + b" " if reply else b"") + sizes + b"\r\n" + block + payload + b"\r\n"
    )
    (frames,) = parser.frames()
    return Frames(frames.buffer.copy(), frames.rows.copy())


def pairs_of(block: bytes) -> list[tuple[str, str]]:
    """The dumb model of a header block: lines after the first one that are not empty, name and value."""
    lines = block.decode().split("\r\n")[1:]
    split = [line.partition(":") for line in lines if line]
    return [(name, value.strip(" \t")) for name, _, value in split]


def is_own_id(text: str) -> bool:
    try:
        packed_id(text.encode())
    except ValueError:
        return False
    return True


def _header_blocks() -> Iterator[bytes]:
    def block(*lines: str) -> bytes:
        return "\r\n".join(["NATS/1.0", *lines, "", ""]).encode()

    yield block("Natslog-Key: k", "Nats-Msg-Id: ~abcdefghijklmnop", "Natslog-Correlation-Id: 17", "Trace: a", "Trace:b")
    yield block("Nats-Msg-Id:", "Nats-Msg-Id: x", "Natslog-Ack-To: acks.1", "grün: \t ü \t", "no colon", ": no name")
    yield block("Nats-Msg-Id: ~aaaaaaaaaaaaaaaa", 'Natslog-Correlation-Id: "quoted"', "Natslog-Correlation-Id: next")
    yield block("Nats-Expected-Last-Sequence: 7", "Natslog-Key:", "Natslog-Key: second")
    yield b"NATS/1.0\r\nA: \xff\r\n\r\n"
    yield b"NATS/1.0 503\r\nA: b\r\r\n\n"


_HEADER_WORDS = [
    b"NATS/1.0\r\n", b"Natslog-Key", b"Nats-Msg-Id", b"Natslog-Correlation-Id", b"Natslog-Ack-To", b"Nats-Expected-",
    b": ", b"\r\n", b"\r\n\r\n", b"~abcdefghijklmnop", b"Natslog-Envelope: arrow",
]  # fmt: skip


@target("headers", _header_blocks, _HEADER_WORDS)
def check_headers(block: bytes) -> None:
    """Keys, headers, message ids and correlation ids of a message are those that its lines have, and the columns are
    valid Arrow; a block that is not UTF-8 is set apart.
    """
    if not block:
        return
    frames = message(block, b"value")
    good, bad = split_by_text(frames)
    try:
        pairs = pairs_of(block)
    except UnicodeDecodeError:
        assert (len(good.rows), len(bad.rows)) == (0, 1), "a block that is not UTF-8 is stored"
        return
    assert (len(good.rows), len(bad.rows)) == (1, 0), "a block in UTF-8 is refused"
    makes_demand = any(b"\n" + name in block for name in (b"Nats-Expected-", b"Nats-TTL:"))
    is_marked = marked(good) is not None
    assert is_marked == makes_demand, "a condition is not recognised, or one is seen where there is none"
    assert len(conditions_of(good)) <= is_marked
    for packs_ids in (True, False):
        _check_one(good, pairs, packs_ids=packs_ids)


def _check_one(frames: Frames, pairs: list[tuple[str, str]], *, packs_ids: bool) -> None:
    builder = BatchBuilder()
    builder.add(frames, packs_ids=packs_ids)
    batch = builder.taken()
    columns = batch.rows.to_arrow()
    columns.validate(full=True)
    id_at = next((at for at, (name, value) in enumerate(pairs) if name == "Nats-Msg-Id" and value), None)
    packs = packs_ids and id_at is not None and is_own_id(pairs[id_at][1])
    left = [
        {"key": name, "value": value}
        for at, (name, value) in enumerate(pairs)
        if not (packs_ids and (name == "Natslog-Ack-To" or (packs and at == id_at)))
    ]
    keys = [value.encode() for name, value in pairs if name == "Natslog-Key"]
    given = [value for name, value in pairs if name == "Natslog-Correlation-Id"]
    correlations = [value for value in given if envelopes._PLAIN_JSON.fullmatch(value)]
    (row,) = columns.to_pylist()
    headers = None if len(left) < len(pairs) and not left else left
    assert row == {"subject": "orders.new", "key": keys[0] if keys else None, "headers": headers, "value": b"value"}
    assert (batch.ids is not None) == (id_at is not None), "an id is missing, or there is one too many"
    found = None if batch.correlations is None else batch.correlations.to_arrow(pa.string()).to_pylist()
    assert found == ([correlations[0]] if correlations else None)
    if packs:
        assert id_at is not None
        assert batch.rows.packed_ids is not None
        assert unpacked(batch.rows.packed_ids).tobytes().decode() == pairs[id_at][1]


# ---- envelopes ----


def envelope_rows(count: int = 3) -> pa.RecordBatch:
    columns = {
        "value": pa.array([b"a" * at for at in range(count)], pa.binary()),
        "key": pa.array([None if at % 2 else b"k" for at in range(count)], pa.binary()),
        "headers": pa.array([[{"key": "Trace", "value": "x"}] if at % 2 else None for at in range(count)],
                            PAYLOAD_SCHEMA.field("headers").type),
    }  # fmt: skip
    return pa.RecordBatch.from_pydict(columns)


def _payloads() -> Iterator[bytes]:
    block = b"NATS/1.0\r\nNatslog-Key: k-17\r\n\r\n"
    yield b"\0" + MESSAGE_OPENING + len(block).to_bytes(4, "little") + block + b"value"
    for flag in (b"\0", b"\1", b"\2"):
        yield flag + enveloped(envelope_rows())
    yield b"\0" + enveloped(envelope_rows().select(["value"]))
    yield b"\1" + enveloped(pa.RecordBatch.from_pydict({"value": pa.array(["é", "b"], pa.large_string())}))
    yield b"\1" + OPENING + b"\xff\xff\xff\xff\0\0\0\0"
    yield b"\0plain"


_ENVELOPE_HEADERS = (
    b"",
    b"NATS/1.0\r\nNatslog-Envelope: arrow\r\n\r\n",
    b"NATS/1.0\r\nNatslog-Envelope: arrow\r\nNats-Msg-Id: ~abcdefghijklmnop\r\nNatslog-Correlation-Id: 7\r\n\r\n",
)


@target("envelope", _payloads, [COOKIE, OPENING, MESSAGE_OPENING, b"NATS/1.0\r\n", b"\xff\xff\xff\xff", b"\0\0\1\0"])
def check_envelope(data: bytes) -> None:
    """A payload that begins as an envelope is stored as its rows, as the message that it holds, or byte for byte as it
    is; it is refused only if a header calls it an envelope. Rows are those that Arrow reads, at most 65,536, and the
    columns are valid Arrow.
    """
    block, payload = _ENVELOPE_HEADERS[(data[0] if data else 0) % len(_ENVELOPE_HEADERS)], data[1:]
    frames = message(block, payload, b"_INBOX.a.1")
    opened, _ = envelopes.open_messages(frames)
    is_open = opened is not None and bool(opened.any())
    if is_open:
        assert not block
        assert payload.startswith(MESSAGE_OPENING)
        payload = payload[16 + int.from_bytes(payload[12:16], "little") :]  # of the message that it holds
    builder, rows = BatchBuilder(), 0
    for received, begins in envelopes.split_envelopes(frames):
        assert not begins or payload.startswith(OPENING)
        if isinstance(received, Refused):
            assert block or is_open, "a payload is refused, although no header calls it an envelope"
            assert builder.rows == 0
            return
        if isinstance(received, Envelope):
            rows = received.rows.num_rows
            assert 0 < rows <= MAX_ROWS
            builder.add_envelope(
                received.subject, received.reply, received.rows, received.message_id, received.correlation_id
            )
        else:
            builder.add(received)
    stored = builder.taken().rows.to_arrow()
    stored.validate(full=True)
    if rows:
        read = pa.ipc.open_stream(payload[len(OPENING) :]).read_all()
        try:
            read.validate(full=True)
        except pa.ArrowInvalid:  # as its stream reader has them; a message of its own was valid, and is what is stored
            return
        values = [value.encode() if isinstance(value, str) else value for value in read.column("value").to_pylist()]
        assert stored.column("value").to_pylist() == values, "the rows are not those of the envelope"
    else:
        assert stored.column("value").to_pylist() == [payload], "a message was changed"


# ---- acks at a publisher ----

_SENT = 8


def _acks() -> Iterator[bytes]:
    def frame(number: int, payload: bytes) -> bytes:
        return b"MSG %s.~%d 1 %d\r\n%s\r\n" % (INBOX.encode(), number, len(payload), payload)

    yield frame(0, ack("orders")) + frame(0, ack("copies")) + frame(0, ack("orders")) + frame(1, ack("copies"))
    yield frame(7, b'{"stream":"orders","seq":7,"offset":6,"messages":8}') + frame(
        3, b'{"stream":"copies","messages":3}'
    )
    yield frame(2, b'{"error":{"code":503,"description":"full"},"stream":"orders"}') + frame(9, ack("orders"))
    yield frame(5, b'{"stream":"orders","seq":42,"offset":41,"messages":99999999999999999999}')
    yield frame(3, ack("orders", 1000)) + frame(4, ack("copies", 3)) + frame(5, b"+ACK")


_ACK_WORDS = [
    b"MSG _INBOX.a.~1 1 ", b'"messages":', b'"stream":"orders"', b'"count":3', b'{"error":', b"~", b"\r\n", b'"seq":1',
    b"999999999999999999",
]  # fmt: skip


@target("acks", _acks, _ACK_WORDS)
def check_acks(data: bytes) -> None:
    """No ack counts twice, or for a message that was not sent, or without an ack of each stream for it; what is acked
    and what still waits are together what was sent.
    """
    in_flight = InFlight(INBOX, STREAMS, _SENT)
    in_flight.add(rows_of(_SENT), BY_REPLY)
    parser, acked = FrameParser(), list[int]()
    parser.receive_data(data)
    try:
        for frames in parser.frames():
            messages = frames.select(frames.rows[:, SID] >= 0)
            if len(messages.rows):
                taken = in_flight.take_acks(messages)
                acked += taken.sequences.tolist()
    except MalformedFrame:
        pass
    assert len(set(acked)) == len(acked), "a message was acked twice"
    assert all(0 <= sequence < _SENT for sequence in acked), "an ack counts for a message that was not sent"
    assert in_flight.rows == _SENT - len(acked), "what waits is not what was not acked"
    assert not acked or all(name.encode() in data for name in STREAMS), "an ack of another stream counts"
