"""`python -m tests.unit.wire.whole_way`: takes messages from bytes to columns, acks and back, and prints how many
kernels of the library were used, and what came of it.
"""

from __future__ import annotations

import json
import warnings
from typing import Any


def _frame(subject: bytes, reply: bytes, payload: bytes, head: bytes = b"") -> bytes:
    words = [
        b"HMSG" if head else b"MSG",
        subject,
        b"1",
        *([reply] if reply else []),
        *([b"%d" % len(head)] * bool(head)),
    ]
    return b" ".join([*words, b"%d" % len(head + payload)]) + b"\r\n" + head + payload + b"\r\n"


def _received() -> bytes:
    data = b"PING\r\n" + _frame(b"a.b", b"_INBOX.r", b"hello") + _frame(b"a..b", b"x.y", b"x") + _frame(b"$a", b"", b"")
    data += _frame("é".encode(), b"", b"\xff") + _frame(b"\xff", b"", b"") + _frame(b"a.b", b"x.y", b"hello")
    for at in range(50):
        head = b"NATS/1.0\r\nNats-Msg-Id: id-%d\r\nNatslog-Key: k\r\nNatslog-Ack-To: _INBOX.~%d\r\n\r\n" % (at % 20, at)
        data += _frame(b"a.c", b"", b"abc", head)
    return data + _frame(b"a.d", b"", b"", b"NATS/1.0\r\nNats-Expected-Stream: x\r\n\r\n")


def _stored(shown: list[Any]) -> Any:
    """Shows what is stored and acked by each of the ack rules; returns the hashes of message ids."""
    import numpy as np

    from natslog.ingest import acks
    from natslog.ingest.ack_rules import AckRules
    from natslog.ingest.batches import BatchBuilder
    from natslog.ingest.conditions import marked
    from natslog.ingest.unwanted import split_by_subject, split_by_text
    from natslog.wire.frames import FrameParser, Frames

    ids: Any = None
    for setting in ("reply", "header", "never"):
        parser, builder = FrameParser(), BatchBuilder()
        rules = AckRules.of(setting, [">"], ["_INBOX.", "other."])  # type: ignore[arg-type]
        parser.receive_data(_received())
        for frames in parser.frames():
            ours = frames.select(frames.rows[:, 0] == 1)
            good, not_text = split_by_text(rules.applied(Frames(ours.buffer, ours.rows.copy())))
            good, not_plain = split_by_subject(good)
            marks = marked(good)
            marks = np.zeros(len(good.rows), np.bool_) if marks is None else marks
            good, expecting = good.select(~marks), good.select(marks)
            shown.append([len(part.rows) for part in (good, not_text, not_plain, expecting)])
            builder.add(good)
        batch = builder.taken()
        shown.append([[str(value) for value in row.values()] for row in batch.rows.to_arrow().to_pylist()])
        if batch.replies is not None:
            offsets = np.arange(7, 7 + batch.rows.rows, dtype=np.int64)
            answers = acks.stored(batch.replies, offsets, stream="s", epoch=4, duplicate=offsets % 3 == 0)
            shown.append(bytes(answers).decode())
        ids = batch.ids
    return ids


def _published(shown: list[Any]) -> None:
    import numpy as np
    import pyarrow as pa

    from natslog.arrow.schema import HEADERS_TYPE
    from natslog.wire import native
    from natslog.wire.frames import FrameParser
    from natslog.wire.outgoing import BY_HEADER, BY_REPLY, publish_frames
    from natslog.wire.outgoing_rows import Rows, unsendable_rows
    from natslog.wire.row_hashes import as_ids, position_starts, row_hashes

    texts = pa.array(["a", "b\n", " c", "d"])
    bad = unsendable_rows(Rows(texts, texts.cast(pa.binary()), texts), 99)
    shown.append(list(bad.items()))
    subjects, bodies, ids = pa.array(["a", "bc"]), pa.array([b"1", b""]), pa.array(["i", None])
    for ack_to in (BY_REPLY, BY_HEADER, BY_REPLY | BY_HEADER):
        sent = publish_frames(subjects, bodies, ids=ids, inbox="_INBOX.z", sequences=np.arange(9, 11), ack_to=ack_to)
        shown.append(bytes(sent).decode())
    pairs = pa.array([[{"key": "a", "value": "more than eight bytes"}], None], HEADERS_TYPE)
    hashes = row_hashes(subjects, bodies, None, pairs, position_starts("q", 3, 2))
    shown += [hashes.tolist(), as_ids(hashes).to_pylist()]
    parser = FrameParser()
    parser.receive_data(_frame(b"_INBOX.z.~10", b"", b'{"seq":1}') + _frame(b"_INBOX.z.~11", b"", b'{"error":1}'))
    parser.receive_data(_frame(b"_INBOX.z.~12", b"", b'{"stream": "orders", "seq": 1, "messages":2,"count":1}'))
    for frames in parser.frames():
        names, edges = np.frombuffer(b"otherorders", np.uint8), np.array([0, 5, 11])
        missing, left = np.ones((2, 16), np.bool_), np.full(16, 2)
        acked, carried = np.zeros(len(frames.rows), np.int64), np.full(16, 1)
        buffer, rows = frames.buffer, frames.rows
        done = native.mark_acks(buffer, rows, len("_INBOX.z.~"), names, edges, 10, 13, missing, left, carried, acked)
        shown += [list(done), missing.tolist(), left.tolist(), acked.tolist()]


def _superseded(shown: list[Any]) -> None:
    """Shows which rows newer ones supersede, with a limit of one, of several, and where it changes."""
    import numpy as np
    import pyarrow as pa

    from natslog.log.newest import NewestRows, Texts

    texts = Texts.of(pa.array(["a", "bc", None, "a", "", "a", "bc", "a"]))
    for limits in ((1, 3, 2), (3, 1, 1)):
        newest = NewestRows(limits[0])
        newest.add(Texts.of(pa.array([f"one of many {at}" for at in range(1_000)])), np.arange(-1_000, 0))
        shown.append(newest.add(texts, np.arange(8)).tolist())
        for begin, limit in ((8, limits[1]), (16, limits[2])):
            shown.append(newest.change_limit(limit).tolist())
            shown.append(newest.add(texts, np.arange(begin, begin + 8)).tolist())
        shown += [newest.kept()[-8:].tolist(), newest.newest_of(Texts.of(pa.array(["a", "b", ""]))).tolist()]
        shown.append(newest.queue_of("a"))


def _requested(shown: list[Any]) -> None:
    """Shows which direct requests a kernel takes, and what is answered."""
    import numpy as np
    import pyarrow as pa

    from natslog.arrow.schema import MESSAGE_SCHEMA
    from natslog.jetstream.consumers.pending import Pending
    from natslog.log.kept_messages import KeptMessages
    from natslog.wire import native
    from natslog.wire.deliveries import Messages, acks_of
    from natslog.wire.direct_frames import Limits, frames_of, rendered, taken_requests
    from natslog.wire.frames import FrameParser
    from natslog.wire.outgoing import texts_of

    parser, to = FrameParser(), b"$JS.API.DIRECT.GET.A"
    for payload in (b'{"seq":7}', b'{"seq": 0}', b'{"last_by_subj": "a.b"}', b'{"last_by_subj":"a.*"}', b"{}"):
        parser.receive_data(_frame(to, b"r", payload))
    for key, reply in ((b".bc", b"$r"), (b".bc", b"r.s"), (b".a.>", b"r"), (b"", b"r")):
        parser.receive_data(_frame(to + key, reply, b""))
    (frames,) = parser.frames()
    requests, others = taken_requests(frames, len(to), len(to))
    assert others is not None
    shown += [bytes(requests.subjects[1]).decode(), requests.sequences.tolist(), len(others.rows)]
    found = np.empty(len(requests), np.int64)
    counts, ends, placed = np.zeros(2, np.int64), np.array([0, 1]), np.empty(3, np.int64)
    codes, ranks = np.array([1, 0, 0], np.int32), np.array([1, 0], np.int32)
    native.count_subjects(codes, ranks, counts)
    native.place_rows(codes, ranks, np.array([5, 7, 9]), 5, ends, placed)
    shown += [counts.tolist(), ends.tolist(), placed.tolist()]
    native.find_sorted(*requests.subjects, *texts_of(pa.array(["", "a", "a.b", "bc"])), found)
    shown.append(found.tolist())
    columns = [[7, 2**40], [0, 1_700_000_000_120_000], ["a", "é"], [None] * 2, [[("k", "v")], None], [b"x", b""]]
    rows = pa.RecordBatch.from_arrays(
        [pa.array(*one) for one in zip(columns, MESSAGE_SCHEMA.types, strict=True)], schema=MESSAGE_SCHEMA
    )
    kept, offsets = KeptMessages(), np.array([7, 2**40])
    answers = rendered(rows, offsets, "A")
    kept.add(offsets, answers.places, answers.data, kept.version)
    places, data, missing, _ = kept.find(np.array([2**40, -1, 8, 7]))
    shown += [places.tolist(), missing, data[: places[:, 2].sum()].tobytes().decode()]
    limits = Limits(130, np.frombuffer(b"large", np.uint8), np.frombuffer(b"none", np.uint8))
    for part in frames_of(requests.replies, np.array([0, 2]), answers, limits, 100):
        shown.append(bytes(part).decode())
    numbers, to_first = np.ones((5, 2), np.int64), np.zeros(2, np.int64)
    sent = Messages(rows).frames(0, 2, prefix=b"$JS.ACK.A.c.", numbers=numbers, replies=["r"], reply_of=to_first)
    shown.append(bytes(sent).decode())
    parser.receive_data(
        _frame(b"$JS.ACK.A.c.1.2.3.4.5", b"", b"+ACK") + _frame(b"$JS.ACK.A.c.1.2.3.4.5", b"r", b"-NAK")
    )
    for frames in parser.frames():
        (group, part), *others = frames.by_group(np.array([0, 7], np.int64))
        acks, runs = acks_of(part, b"$JS.ACK.A.c.")
        shown += [group, len(others), acks.tolist(), runs]
    pending = Pending()
    pending.append(np.array([3, 5, 9]), np.array([1, 2, 3]), 0)
    found = pending.found(np.array([9, 4, 3, 9]))
    shown += [found.tolist(), [one.tolist() for one in pending.take(found, 3)[:1]], pending.first()]


def main() -> None:
    import numpy as np

    from natslog.ingest.dedupe import DedupeWindow
    from natslog.wire import native

    shown: list[Any] = []
    ids, window = _stored(shown), DedupeWindow(60)
    window.remember(ids[:10], np.arange(10), 0)
    shown += [ids.tolist(), window.find(ids, 0).tolist()]
    _published(shown)
    _superseded(shown)
    _requested(shown)
    print(json.dumps([sum(kernel.is_native for kernel in native.KERNELS), shown]))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
