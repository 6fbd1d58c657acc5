"""Groups of direct requests, against the same requests answered one by one."""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.jetstream import direct, direct_groups
from natslog.jetstream.direct_groups import FAILED, UNAVAILABLE, Group
from natslog.jetstream.requests import MessageGetRequest
from natslog.log import StreamLog
from natslog.log.kept_messages import MOST_BYTES
from natslog.log.rules import Rule
from natslog.model import Epoch
from natslog.wire.direct_frames import Requests
from natslog.wire.outgoing import texts_of
from tests.conftest import open_log
from tests.unit.log.test_subject_index import MESSAGES, SUBJECTS
from tests.unit.log.test_visibility import OPTIONS, Replica, rows_of

MOST = 1024 * 1024
Wanted = str | int
"""The last message on a subject, or that of a sequence."""

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), MESSAGES),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 60), max_size=6)),
        st.tuples(st.just("roll and seal"), st.none()),
        st.tuples(st.just("rewrite"), st.none()),
        st.tuples(st.just("ask"), st.lists(st.sampled_from([*SUBJECTS, "none"]) | st.integers(1, 70), min_size=1)),
        st.tuples(st.just("limit start"), st.integers(0, 40)),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=30,
)


def requests_of(wanted: list[Wanted]) -> Requests:
    subjects = pa.array([one if isinstance(one, str) else "" for one in wanted], pa.string())
    replies = pa.array([f"_INBOX.{at}" for at in range(len(wanted))], pa.string())
    sequences = np.array([one if isinstance(one, int) else 0 for one in wanted], np.int64)
    return Requests(texts_of(subjects), sequences, texts_of(replies))


def split(data: bytes) -> dict[int, bytes]:
    """The frames of `_INBOX.<number>`, by number."""
    found, at = {}, 0
    while at < len(data):
        line_end = data.index(b"\r\n", at)
        verb, reply, _, total = data[at:line_end].split(b" ")
        assert verb == b"HPUB"
        end = line_end + 2 + int(total) + 2
        number = int(reply.removeprefix(b"_INBOX."))
        assert number not in found, "one answer to each request"
        found[number], at = data[at:end], end
    return found


def plain(log: StreamLog, wanted: list[Wanted], most_bytes: int = MOST) -> dict[int, bytes]:
    found = {}
    for at, one in enumerate(wanted):
        last, seq = (one, 0) if isinstance(one, str) else ("", one)
        try:
            (answer,) = direct.answers_to(log, "A", MessageGetRequest(last_by_subj=last, seq=seq))
        except direct.Status as status:
            answer = direct.Answer(status.headers)
        if len(answer.headers) + len(answer.payload) > most_bytes:
            answer = direct.Answer(direct.Status(500, "Message Exceeds Maximum Payload").headers)
        found[at] = direct.frame(b"_INBOX.%d" % at, answer)
    return found


def check(log: StreamLog, wanted: list[Wanted], most_bytes: int = MOST) -> None:
    expected = plain(log, wanted, most_bytes)
    for _ in range(2):  # the second time from what is kept
        now, others = Group(log, "A", requests_of(wanted), most_bytes).answers_now()
        at_once = split(bytes(now))
        assert at_once.items() <= expected.items()
        left = requests_of(wanted) if others is None else others
        assert others is not None or at_once == expected
        assert split(b"".join(Group(log, "A", left, most_bytes).answers())).keys() >= expected.keys() - at_once.keys()
        assert split(b"".join(Group(log, "A", requests_of(wanted), most_bytes).answers())) == expected


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(operations=OPERATIONS, limit=st.sampled_from([None, 1, 1, 2]))
def test_groups_get_what_single_requests_get(operations: list[tuple[str, Any]], limit: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        replica = Replica(Path(folder))
        replica.set_rules((Rule(Epoch(0), limit),))
        for name, argument in operations:
            log = replica.log
            match name:
                case "append":
                    log.append(rows_of(argument, log.log_end_offset), 1_000_000 + log.log_end_offset)
                case "remove":
                    replica.record({offset for offset in argument if offset < log.log_end_offset})
                case "roll and seal":
                    log.roll()
                    log.upkeep.seal_next()
                case "rewrite":
                    log.upkeep.apply_rules()
                    replica.record(set(log.visibility.removed.derived(0, log.high_watermark)))
                    log.upkeep.rewrite_next(2**60)
                case "ask":
                    check(log, argument)
                case "limit start":
                    log.limits.move_to(argument)
                case "reopen":
                    replica.reopen(forgets=False)
        check(replica.log, [*SUBJECTS, "none", *range(1, 20)])
        replica.log.close()


def bucket(folder: Path, values: dict[str, bytes], headers: Any = None) -> StreamLog:
    replica = Replica(folder)
    replica.set_rules((Rule(Epoch(0), 1),))
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(list(values)),
            pa.nulls(len(values), pa.binary()),
            pa.array([headers] * len(values), HEADERS_TYPE),
            pa.array(list(values.values()), pa.binary()),
        ],
        schema=PAYLOAD_SCHEMA,
    )
    replica.log.append(RowBuffers.of(batch), 1_000_000)
    return replica.log


def test_messages_that_are_kept_are_answered_without_the_log(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {f"k{at}": b"%d" % at for at in range(100)}
    log = bucket(log_folder, values, [{"key": "a\r\nb", "value": "x\ny"}])
    wanted: list[Wanted] = [*values, "none", 7, 1000]
    assert Group(log, "A", requests_of(wanted), MOST).answers_now()[1] is not None
    check(log, wanted)
    expected = plain(log, wanted)
    monkeypatch.setattr(log.reader, "rows_at", None)
    frames, others = Group(log, "A", requests_of(wanted), MOST).answers_now()
    assert others is None
    assert split(bytes(frames)) == expected


def test_only_answers_that_are_too_large_get_the_error(log_folder: Path) -> None:
    sizes = {"small": 10, "edge": 5_000, "large": 20_000, "not kept": MOST_BYTES + 1}
    log = bucket(log_folder, {name: bytes(size) for name, size in sizes.items()})
    wanted: list[Wanted] = ["small", "large", "none", "edge", "not kept", "small"]
    for most_bytes in (100, 5_000, 5_120, 25_000, 50_000):
        check(log, wanted, most_bytes)


@pytest.mark.long
def test_answers_come_in_parts_of_bounded_size(log_folder: Path) -> None:
    log = bucket(log_folder, {"a": bytes(400_000), "b": bytes(30_000)})
    wanted: list[Wanted] = ["a", "b"] * 300
    expected = plain(log, wanted)
    for _ in range(2):
        assert Group(log, "A", requests_of(wanted), MOST).answers_now()[1] is not None, "too much for the event loop"
        parts = list(Group(log, "A", requests_of(wanted), MOST).answers())
        assert max(map(len, parts)) < 2 * direct_groups._PART_BYTES
        assert split(b"".join(parts)) == expected


def test_messages_of_many_batches_are_read_in_parts(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_groups, "_READ_BYTES", 2_000)
    log = bucket(log_folder, {"k": b"0"})
    for at in range(50):
        log.append(rows_of([(f"k{at}", None, None), (f"k{at}.x", None, None)], log.log_end_offset), 2_000_000)
    check(log, [*(f"k{at}" for at in range(60)), *range(1, 120)])


def test_a_damaged_batch_concerns_only_its_messages(log_folder: Path) -> None:
    log = bucket(log_folder, {"k": b"0"})
    entries = []
    for at in range(3):
        log.append(rows_of([(f"k{at}", None, None)], log.log_end_offset), 2_000_000)
        entries.append(log.chain.segments[-1].index[at + 1])
    log.visibility.catch_up(log.high_watermark)
    with open(log.chain.segments[-1].path, "r+b") as file:
        file.seek(entries[1].position + entries[1].length - 9)
        file.write(b"\xff")
    found = split(b"".join(Group(log, "A", requests_of(["k0", "k1", 3, "k2", "none"]), MOST).answers()))
    assert [b" 500 Internal Error" in found[at] for at in range(5)] == [False, True, True, False, False]
    assert found[3].endswith(b"\r\n\r\n3\r\n")
    assert b" 404 " in found[4]


@pytest.mark.parametrize("status", [UNAVAILABLE, FAILED])
def test_a_status_goes_to_all(log_folder: Path, status: Any) -> None:
    group = Group(bucket(log_folder, {"k": b"0"}), "A", requests_of(["k", "none", 1]), MOST)
    found = split(b"".join(group.all_with(status)))
    assert [found[at] for at in range(3)] == [
        direct.frame(b"_INBOX.%d" % at, direct.Answer(status.tobytes())) for at in range(3)
    ]
    assert not list(group.all_with(status)), "none waits any more"


def test_what_was_read_is_not_kept_after_it_was_rewritten(log_folder: Path) -> None:
    log = bucket(log_folder, {"k": b"0"})
    answers = Group(log, "A", requests_of(["k"]), MOST).answers()
    assert next(answers)
    assert log.kept.nbytes
    log.kept.clear()
    assert not log.kept.nbytes
    read = log.reader.rows_at

    def rewritten(offsets: Any) -> Any:
        for part in read(offsets):
            log.kept.clear()
            yield part

    log.reader.rows_at = rewritten  # type: ignore[method-assign]
    assert list(Group(log, "A", requests_of(["k"]), MOST).answers())
    assert not log.kept.nbytes


def test_what_is_removed_from_the_files_after_its_look_up_is_looked_up_again(log_folder: Path) -> None:
    log = bucket(log_folder, {"k": b"0", "l": b"1"})
    read, reads = log.reader.rows_at, []

    def superseded(offsets: Any) -> Any:
        reads.append(offsets.tolist())
        if len(reads) > 1:
            return read(offsets)
        log.append(rows_of([("k", None, None)], log.log_end_offset), 2_000_000)
        return iter(part for part in read(offsets[1:]))  # as if a file was rewritten without the first one

    log.reader.rows_at = superseded  # type: ignore[method-assign]
    found = split(b"".join(Group(log, "A", requests_of(["l", "k"]), MOST).answers()))
    assert reads == [[0, 1], [2]]
    assert [found[at].rpartition(b"\r\n\r\n")[2] for at in range(2)] == [b"1\r\n", b"2\r\n"]


def test_a_key_that_exists_is_found_while_it_is_written(log_folder: Path) -> None:
    """Newer messages hide what was looked up before it is read; then files are rewritten without it."""
    replica = Replica(log_folder)
    replica.set_rules((Rule(Epoch(0), 1),))
    log, keys = replica.log, [f"k{at}" for at in range(20)]
    log.append(rows_of([(key, None, None) for key in keys], 0), 1_000_000)
    done = threading.Event()

    def write() -> None:
        chance = random.Random(7)
        for at in range(150):
            some = [(chance.choice(keys), None, None) for _ in range(5)]
            log.append(rows_of(list(some), log.log_end_offset), 2_000_000)
            if at % 10 == 9:
                log.roll()
                while log.upkeep.seal_next():
                    pass
                log.upkeep.apply_rules()
                replica.record(set(log.visibility.removed.derived(0, log.high_watermark)))
                log.upkeep.rewrite_next(2**60)
        done.set()

    writing = threading.Thread(target=write)
    writing.start()
    newest: dict[int, int] = {}
    while not done.is_set():
        found = split(b"".join(Group(log, "A", requests_of(list(keys)), MOST).answers()))
        assert len(found) == len(keys)
        for at, frame in found.items():
            assert b" 404 " not in frame, f"{keys[at]} is missing"
            assert b"Nats-Subject: %b\r\n" % keys[at].encode() in frame
            offset = int(frame.rpartition(b"\r\n\r\n")[2])
            assert b"Nats-Sequence: %d\r\n" % (offset + 1) in frame
            assert offset >= newest.get(at, 0), "an answer is not older than one before it"
            newest[at] = offset
    writing.join()
    check(log, list(keys))


def test_an_empty_stream_has_no_messages(log_folder: Path) -> None:
    check(open_log(log_folder, OPTIONS), ["a", 1])
