"""Messages are found again among the rows that the leader has stored of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as some

from natslog.ingest import acks
from natslog.ingest.ack_rules import AckRules
from natslog.ingest.batches import BatchBuilder
from natslog.ingest.envelopes import Envelope, open_messages, split_envelopes
from natslog.ingest.standby import (
    COMPARED,
    are_requests,
    replies_of,
    screened,
    unmatched,
    words_of_frames,
    words_of_rows,
)
from natslog.model import Acks
from natslog.wire.envelope import HEADER_NAME, HEADER_VALUE, enveloped
from natslog.wire.frames import FrameParser, Frames
from tests.conftest import open_log

KEYED = b"NATS/1.0\r\nNatslog-Key: k\r\nTrace: a\r\nTrace: b\r\n\r\n"
OTHER_KEY = KEYED.replace(b": k", b": l")
ID = b"NATS/1.0\r\nNats-Msg-Id: foreign\r\n\r\n"
ENVELOPE = enveloped(pa.record_batch({"value": pa.array([b"one", b"two"])}))
ENVELOPED = f"NATS/1.0\r\n{HEADER_NAME}: {HEADER_VALUE}\r\n\r\n".encode()


def frames_of(*messages: tuple[str, bytes, bytes, bytes]) -> Frames:
    """Of subject, reply, headers, and payload."""
    parser = FrameParser()
    for subject, reply, headers, payload in messages:
        sizes = b"%d %d" % (len(headers), len(headers) + len(payload)) if headers else b"%d" % len(payload)
        line = b" ".join(filter(None, (b"HMSG" if headers else b"MSG", subject.encode(), b"1", reply, sizes)))
        parser.receive_data(line + b"\r\n" + headers + payload + b"\r\n")
    (frames,) = parser.frames()
    return frames


def rules(kind: Acks = "reply") -> AckRules:
    return AckRules.of(kind, ("s.>",), ["_INBOX."])


def stored_words(folder: Path, frames: Frames) -> list[int]:
    """As the leader stores them, and another one reads them."""
    builder = BatchBuilder()
    open_messages(frames)
    for received, _ in split_envelopes(frames):
        match received:
            case Frames():
                builder.add(received)
            case Envelope():
                builder.add_envelope(received.subject, received.reply, received.rows, None)
    log = open_log(folder)
    log.append(builder.taken().rows, 1_000)
    words = [words_of_rows(rows) for _, rows in log.reader.stored_rows(0, log.log_end_offset, columns=COMPARED)]
    log.close()
    return list(np.concatenate(words))


def test_messages_have_the_hashes_of_their_rows(log_folder: Path) -> None:
    messages = [
        ("s.a", b"", b"", b"1"),
        ("s.b", b"", b"", b"1"),
        ("s.a", b"", b"", b""),
        ("s.a", b"", KEYED, b""),
        ("s.a", b"", OTHER_KEY, b""),
        ("s.a", b"_INBOX.x", ID, b"1"),
        ("s.ä", b"", b"", "ü".encode()),
        ("s.a", b"", ENVELOPED, ENVELOPE),
    ]
    received = list(words_of_frames(frames_of(*messages)))
    stored = stored_words(log_folder, frames_of(*messages))
    assert len(set(received)) == len(messages), "each is told from the others"
    assert received == stored[: len(messages)]
    assert len(stored) == len(messages) + 1, "an envelope has as many rows as it has, and counts once"


def test_requests_are_told_from_messages_without_acks() -> None:
    messages = [
        ("s.plain", b"", b"", b"1"),
        ("s.request", b"_INBOX.1", b"", b"2"),
        ("s.service", b"other.1", b"", b"3"),
        ("s.id", b"", ID, b"4"),
        ("s.envelope", b"_INBOX.2", ENVELOPED, ENVELOPE),
        ("s.envelope", b"", ENVELOPED, ENVELOPE),
    ]
    for kind, kept, requests in [
        ("reply", [0, 1, 2, 5], [1]),
        ("any", [0, 1, 2, 5], [1]),
        ("never", [0, 1, 2, 4, 5], []),
    ]:
        frames = frames_of(*messages)
        words = words_of_frames(frames)
        found = screened(frames, rules(kind))  # type: ignore[arg-type]
        assert list(words_of_frames(found)) == [words[at] for at in kept]
        asked = found.select(are_requests(found))
        assert list(words_of_frames(asked)) == [words[at] for at in requests]
        if requests:
            assert bytes(acks.no_responders(replies_of(asked))) == (b"HPUB _INBOX.1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n")


@given(some.lists(some.integers(0, 5)), some.lists(some.integers(0, 5)))
def test_of_equal_messages_the_last_ones_are_left(messages: list[int], rows: list[int]) -> None:
    def left(some_of: list[int], others: list[int]) -> list[bool]:
        counts, marks = Counter(others), []
        for one in some_of:
            marks.append(counts[one] == 0)
            counts[one] -= counts[one] > 0
        return marks

    found = unmatched(np.array(messages, np.uint64), np.array(rows, np.uint64))
    assert [marks.tolist() for marks in found] == [left(messages, rows), left(rows, messages)]
