"""The frame parser against its plain oracle and a dumb model: any frames, any split of the bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.ingest.batches import BatchBuilder
from natslog.ingest.unwanted import split_by_text
from natslog.wire import native
from natslog.wire.frames import FrameParser, Frames, MalformedFrame, Scan
from natslog.wire.layout import (
    CONTROL_SID,
    END,
    FRAME_COLUMNS,
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
from tests.unit.wire import plain_scan

SCANS = [pytest.param(native.scan, id="kernel"), pytest.param(plain_scan.scan, id="plain")]

tokens = st.from_regex(r"[A-Za-z0-9_$-]{1,8}(\.[A-Za-z0-9_$-]{1,8}){0,3}", fullmatch=True)
payloads = st.binary(max_size=300) | st.sampled_from(
    [b"", b"\r\n", b"MSG a 1 5\r\nhello\r\n", b"PING\r\n", b"HMSG x 1 12 12\r\n", b"\r\nMSG ", b"\x00" * 70]
)
pairs = st.lists(
    st.tuples(
        st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,10}", fullmatch=True),
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20),
    ),
    max_size=4,
)
controls = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'x'\r\n", b'INFO {"a": 1}\r\n'])


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, tuple]:
    """A frame's bytes, and what must be found in it."""
    subject, reply = draw(tokens).encode(), draw(st.none() | tokens)
    sid, payload = draw(st.integers(0, 10**6)), draw(payloads)
    header_pairs = draw(st.none() | pairs)
    head = subject + b" %d " % sid + (reply.encode() + b" " if reply else b"")
    block = b""
    if header_pairs is not None:
        lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in header_pairs)
        block = b"NATS/1.0\r\n" + lines + b"\r\n"
        frame = b"HMSG " + head + b"%d %d\r\n" % (len(block), len(block) + len(payload)) + block + payload + b"\r\n"
    else:
        frame = b"MSG " + head + b"%d\r\n" % len(payload) + payload + b"\r\n"
    return frame, (sid, subject, (reply or "").encode(), block, payload)


streams = st.lists(messages() | controls.map(lambda line: (line, None)), max_size=12)


def parse(scan: Scan, chunks: list[bytes]) -> tuple[list[tuple], bytes]:
    """All messages found, and all control lines, in order."""
    parser, found, rest = FrameParser(scan), [], b""
    for chunk in chunks:
        parser.receive_data(chunk)
        for frames in parser.frames():
            data = frames.buffer.tobytes()
            for row in frames.rows.tolist():
                if row[SID] < 0:
                    rest += data[row[START] : row[END]]
                    continue
                start, length = row[PAYLOAD], row[PAYLOAD_LEN]
                found.append(
                    (
                        row[SID],
                        data[row[SUBJECT] : row[SUBJECT] + row[SUBJECT_LEN]],
                        data[row[REPLY] : row[REPLY] + row[REPLY_LEN]],
                        data[start - row[HEADER_LEN] : start],
                        data[start : start + length],
                    )
                )
    return found, rest


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[low:high] for low, high in zip(edges, edges[1:], strict=False)]


@pytest.mark.long
@settings(deadline=None, max_examples=120)
@given(streams, st.lists(st.integers(0, 10**6), max_size=12))
@pytest.mark.parametrize("scan", SCANS)
def test_frames_are_found_however_the_input_is_split(scan: Scan, stream: list, places: list[int]) -> None:
    data = b"".join(frame for frame, _ in stream)
    expected = [message for _, message in stream if message is not None]
    rest = b"".join(frame for frame, message in stream if message is None)
    assert parse(scan, cut(data, places)) == (expected, rest)


@settings(deadline=None, max_examples=30)
@given(streams)
def test_frames_are_found_byte_by_byte(stream: list) -> None:
    data = b"".join(frame for frame, _ in stream)
    expected = [message for _, message in stream if message is not None]
    assert parse(native.scan, [data[at : at + 1] for at in range(len(data))])[0] == expected


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            [b"MSG ", b"HMSG ", b"a", b" ", b"\t", b"1", b"99", b"\r\n", b"\r", b"\n", b"PING", b"-1", b"x.y"]
        )
    )
    .map(b"".join)
    .filter(bool)
)
def test_kernel_and_oracle_agree_on_any_bytes(data: bytes) -> None:
    buffer = np.frombuffer(data, np.uint8)
    one, two = np.zeros((64, FRAME_COLUMNS), np.int64), np.zeros((64, FRAME_COLUMNS), np.int64)
    first, second = native.scan(buffer, 0, len(buffer), one), plain_scan.scan(buffer, 0, len(buffer), two)
    assert tuple(first) == tuple(second)
    assert (one[: first[0]] == two[: second[0]]).all()


@pytest.mark.long
@pytest.mark.parametrize("scan", SCANS)
def test_largest_payload_in_small_pieces_is_scanned_a_few_times_only(scan: Scan) -> None:
    payload = bytes(range(256)) * (64 * 1024 * 1024 // 256)
    data = b"MSG big 7 reply %d\r\n" % len(payload) + payload + b"\r\nPING\r\n"
    scans = []

    def counted(*arguments):
        scans.append(1)
        return scan(*arguments)

    found, rest = parse(counted, [data[at : at + 65536] for at in range(0, len(data), 65536)])
    assert found == [(7, b"big", b"reply", b"", payload)]
    assert rest == b"PING\r\n"
    assert len(scans) < 10


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize(
    "line",
    [
        b"MSG a\r\n",
        b"MSG a x 5\r\nhello\r\n",
        b"MSG a 1 2 3 4 5\r\n",
        b"HMSG a 1 9 5\r\nhello\r\n",
        b"MSG a 1 5\r\nhelloXX",
        b"MSG a 1 99999999999\r\n",
        b"MSG a 1 99999999\r\n",
    ],
)
def test_malformed_frame_is_refused(scan: Scan, line: bytes) -> None:
    parser = FrameParser(scan)
    parser.receive_data(line)
    with pytest.raises(MalformedFrame):
        list(parser.frames())


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(st.lists(messages(), min_size=1, max_size=20), st.integers(1, 5))
def test_columns_hold_exactly_what_the_frames_said(stream: list, pieces: int) -> None:
    """A dumb model of the whole way from bytes to Arrow columns."""
    data = b"".join(frame for frame, _ in stream)
    parser, builder = FrameParser(), BatchBuilder()
    for chunk in cut(data, [len(data) * at // pieces for at in range(pieces)]):
        parser.receive_data(chunk)
        for frames in parser.frames():
            good, bad = split_by_text(frames)
            assert len(bad.rows) == 0
            builder.add(good)
    batch = builder.taken()
    columns = batch.rows.to_arrow()
    columns.validate(full=True)
    assert columns.to_pylist() == [modelled(message) for _, message in stream]
    replies = [message[2] for _, message in stream]
    assert (batch.replies.to_arrow(pa.binary()).to_pylist() if batch.replies else [b""] * len(stream)) == replies


def modelled(message: tuple) -> dict:
    _, subject, _, block, payload = message
    headers = None
    if block:
        lines = [line.partition(":") for line in block.decode().split("\r\n")[1:-2]]
        headers = [{"key": name, "value": value.strip(" \t")} for name, _, value in lines]
    keys = [pair["value"].encode() for pair in headers or [] if pair["key"] == "Natslog-Key"]
    return {"subject": subject.decode(), "key": keys[0] if keys else None, "headers": headers, "value": payload}


def test_subjects_and_headers_that_are_not_utf8_are_set_apart() -> None:
    block = b"NATS/1.0\r\nA: \xff\r\n\r\n"
    parser = FrameParser()
    parser.receive_data(
        b"MSG good 1 2\r\n\xff\xfe\r\n"
        + b"MSG b\xe4d 1 1\r\nx\r\n"
        + b"HMSG worse 1 %d %d\r\n" % (len(block), len(block) + 1)
        + block
        + b"x\r\n"
        + "MSG grün 1 1\r\nx\r\n".encode()
    )
    (frames,) = parser.frames()
    good, bad = split_by_text(frames)
    builder = BatchBuilder()
    builder.add(good)
    assert builder.taken().rows.to_arrow().column("subject").to_pylist() == ["good", "grün"]
    assert len(bad.rows) == 2


@pytest.mark.parametrize(
    ("sids", "groups", "expected"),
    [
        ([1, 1, 1], [], [(1, [0, 1, 2])]),
        ([2, 1, 2], [], [(1, [1]), (2, [0, 2])]),
        ([2, 3, 2], [0, 1, 3, 3], [(3, [0, 1, 2])]),
        ([2, 9, 5, 3], [0, 1, 3, 3], [(3, [0, 3]), (5, [2]), (9, [1])]),
        ([CONTROL_SID, 2, 1], [0, 1, 1], [(CONTROL_SID, [0]), (1, [1, 2])]),
    ],
    ids=str,
)
def test_frames_of_each_group_in_order(
    sids: list[int], groups: list[int], expected: list[tuple[int, list[int]]]
) -> None:
    rows = np.zeros((len(sids), FRAME_COLUMNS), np.int64)
    rows[:, SID], rows[:, START] = sids, range(len(sids))
    found = Frames(np.empty(0, np.uint8), rows).by_group(np.array(groups, np.int64))
    assert [(group, part.rows[:, START].tolist()) for group, part in found] == expected
