"""Reading a log of which messages are hidden: whatever its batches are, and wherever a plan begins and ends, readers
get what a list in memory has, in contiguous batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from natslog.arrow import ipc
from natslog.arrow.batch_line import FIRST_FORMAT, LATEST_FORMAT
from natslog.arrow.projection import schema_of, split_projected
from natslog.arrow.run_marks import RunMark
from natslog.arrow.schema import HEADERS_TYPE, MESSAGE_SCHEMA
from natslog.log import LogOptions, ReadPlan, ReplicaLog, hidden_rows, merging
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.removed import AllBut, Hidden, offset_set
from natslog.log.segment import read_at, read_batch
from tests.conftest import open_log

_END = 200  # no log of these tests is longer


@dataclass(frozen=True, slots=True)
class Commit:
    """One batch. `missing`: of its rows, those that were removed before, as numbers. `epochs`: how many it begins."""

    rows: int
    missing: frozenset[int] = frozenset()
    epochs: int = 0
    batch_format: int = LATEST_FORMAT
    has_ids: bool = False
    is_run: bool = False
    value_bytes: int = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what is merged and made: small, so that few messages reach them."""

    merged_rows: int
    merged_bytes: int
    made_bytes: int
    read_bytes: int
    copied_bytes: int


def value_at(offset: int, value_bytes: int) -> bytes:
    return b"%d." % offset + b"." * value_bytes


def time_at(offset: int) -> int:
    return 1_000_000 + offset // 3


def id_at(offset: int) -> bytes:
    return offset.to_bytes(ipc.ID_BYTES - 1, "big") + b"\1"


def message_of(commit: Commit, base: int, epoch: int) -> memoryview:
    """The batch of a commit, with a gap for each row that is missing."""
    offsets = [base + at for at in range(commit.rows) if at not in commit.missing]
    arrays = [
        pa.array(offsets, MESSAGE_SCHEMA.field("offset").type),
        pa.array([time_at(at) for at in offsets], pa.int64()).cast(MESSAGE_SCHEMA.field("timestamp").type),
        pa.array([f"orders.{at % 3}" for at in offsets], pa.string()),
        pa.array([None if at % 2 else b"k%d" % at for at in offsets], pa.binary()),
        pa.array([None if at % 4 else [("h", str(at))] for at in offsets], HEADERS_TYPE),
        pa.array([value_at(at, commit.value_bytes) for at in offsets], pa.binary()),
    ]
    ids = np.frombuffer(b"".join(map(id_at, offsets)), np.uint8).reshape(len(offsets), ipc.ID_BYTES)
    end = base + commit.rows
    return ipc.encode_batch(
        pa.RecordBatch.from_arrays(arrays, schema=MESSAGE_SCHEMA),
        base_offset=base,
        end_offset=end,
        epoch=epoch,
        max_timestamp_us=time_at(end - 1),
        run=RunMark("p", base, base, end) if commit.is_run else None,
        packed_ids=ids if commit.has_ids and commit.batch_format != FIRST_FORMAT and len(offsets) else None,
        batch_format=commit.batch_format,
    )


class Log:
    """A log, and what it consists of."""

    def __init__(self, folder: Path, compression: str) -> None:
        self.log: ReplicaLog = open_log(folder, LogOptions(min_free_bytes=0), compression=compression)
        self.values: dict[int, bytes] = {}
        self.ids: dict[int, bytes] = {}
        self._epoch = 1

    def append(self, commit: Commit) -> None:
        base = self.log.log_end_offset
        if base + commit.rows > _END:
            return
        self._epoch += commit.epochs
        message = message_of(commit, base, self._epoch)
        header = ipc.proven_header(message)
        assert header is not None
        self.log.append_copies([EncodedBatch(header, [message])])
        stored = [base + at for at in range(commit.rows) if at not in commit.missing]
        self.values |= {at: value_at(at, commit.value_bytes) for at in stored}
        if header.ids_bytes:
            self.ids |= {at: id_at(at) for at in stored}

    def hide(self, offsets: set[int]) -> None:
        self.log.visibility.removed.record(_set_of({at for at in offsets if at < self.log.log_end_offset}))

    def rewrite(self) -> None:
        while self.log.upkeep.rewrite_next(2**60):
            pass

    def seal(self, compression: str) -> None:
        self.log.settings = msgspec.structs.replace(self.log.settings, compression=compression)
        self.log.roll()
        while self.log.upkeep.seal_next():
            pass

    def expected(self, hidden: Hidden, start: int, end: int) -> list[int]:
        return [at for at in self.values if start <= at < end and not hidden.count(at, at + 1)]

    # ---- one plan ----

    def check(self, start: int, end: int | None, max_bytes: int, view: Hidden | None) -> int:
        """Reads once, and again as exact rows and with some columns. Returns the next offset."""
        hidden = self.log.visibility.removed if view is None else view
        limit = self.log.high_watermark if end is None else end
        with self.plan(start, end, max_bytes, view) as plan:
            next_offset = plan.next_offset
            assert start < next_offset <= limit
            expected = self.expected(hidden, start, next_offset)
            self._check_whole(plan, expected)
            self._check_removed_rows(plan, expected)
        with self.plan(start, end, max_bytes, view) as plan:
            self._check_columns(plan, expected, ("offset", "value"))
        with self.plan(start, end, max_bytes, view) as plan:
            self._check_exact(plan, hidden)
        return next_offset

    def plan(self, start: int, end: int | None, max_bytes: int, view: Hidden | None) -> ReadPlan:
        return self.log.reader.plan_read(start, end, max_bytes=max_bytes, hidden=view)

    def _check_whole(self, plan: ReadPlan, expected: list[int]) -> None:
        found, at, newest_us = list[int](), None, 0
        for header, message in plan.walked_messages():
            assert header.base_offset <= plan.start if at is None else header.base_offset == at
            assert header.base_offset < header.end_offset
            assert at is None or header.end_offset > plan.start, "a batch before the range"
            assert header.base_offset < plan.next_offset, "a batch behind the range"
            assert header.max_timestamp_us >= newest_us, "times ascend"
            at, newest_us = header.end_offset, header.max_timestamp_us
            batch = ipc.decode_batch(message)
            batch.validate(full=True)
            assert batch.num_rows == header.rows
            offsets = batch.column("offset").to_pylist()
            assert all(header.base_offset <= one < header.end_offset for one in offsets)
            within = ipc.rows_within(header, batch, plan.start, plan.next_offset)
            times_us = batch.column("timestamp").cast(pa.int64()).to_pylist()
            assert times_us == [time_at(one) for one in offsets]
            assert not times_us or times_us[-1] <= header.max_timestamp_us
            assert batch.column("value").to_pylist() == [self.values[one] for one in offsets]
            ids = ipc.packed_ids_of(header, message)
            none = bytes(ipc.ID_BYTES)
            found_ids = [none] * len(offsets) if ids is None else [one.tobytes() for one in ids]
            assert found_ids == [self.ids.get(one, none) for one in offsets]
            found += offsets[within]
        assert at is not None
        assert at >= plan.next_offset
        assert found == expected
        self._check_together(plan)

    def _check_together(self, plan: ReadPlan) -> None:
        """Many small batches are read as one."""
        one_by_one = [(header, ipc.decode_batch(message)) for header, message in plan.walked_messages()]
        together = list(plan.rows())
        assert pa.Table.from_batches([rows for _, rows in together]).equals(
            pa.Table.from_batches([rows for _, rows in one_by_one])
        )
        for found in (together, [(header, None) for header in plan.headers()]):
            epochs = [(at, one.epoch) for one, _ in found for at in range(one.base_offset, one.end_offset)]
            assert epochs == [(at, one.epoch) for one, _ in one_by_one for at in range(one.base_offset, one.end_offset)]
            assert found[-1][0].max_timestamp_us == one_by_one[-1][0].max_timestamp_us
        for _, batch, ids in plan.headed_rows():
            for offset, one in zip(batch.column("offset").to_pylist(), ids if ids is not None else [], strict=False):
                assert one.tobytes() == self.ids.get(offset, bytes(ipc.ID_BYTES))

    def _check_removed_rows(self, plan: ReadPlan, expected: list[int]) -> None:
        if plan.ranges[0].start >= plan.start and plan.ranges[-1].end <= plan.next_offset:
            assert plan.removed_rows == plan.next_offset - plan.start - len(expected)

    def _check_columns(self, plan: ReadPlan, expected: list[int], columns: tuple[str, ...]) -> None:
        pieces = plan.projected(columns)
        if pieces is None:
            assert any(header.batch_format == FIRST_FORMAT for header, _ in plan.walked_messages())
            return
        body = [one if isinstance(one, bytes) else read_at(one.fd, one.position, one.length) for one in pieces]
        schema = schema_of(columns)
        stream = b"".join([ipc.schema_message(schema), *body, ipc.END_OF_STREAM])
        found = list[int]()
        for header, message in split_projected(stream, columns, source="test"):
            batch = ipc.decode_batch(message, schema)
            assert batch.num_rows == header.rows
            assert batch.column("value").to_pylist() == [self.values[at] for at in batch.column("offset").to_pylist()]
            within = ipc.rows_within(header, batch, plan.start, plan.next_offset)
            found += batch.column("offset").to_pylist()[within]
        assert found == [at for at in expected if at < plan.next_offset]

    def _check_exact(self, plan: ReadPlan, hidden: Hidden) -> None:
        before, after = plan.take_uneven()
        found = list[int]()
        for message in (bytes(before), *plan.messages(), bytes(after)):
            if message:
                found += ipc.decode_batch(message).column("offset").to_pylist()
        expected = self.expected(hidden, plan.start, plan.next_offset)
        assert found == expected
        assert plan.removed_rows == plan.next_offset - plan.start - len(expected)


def _set_of(offsets: set[int]) -> Any:
    return offset_set(np.array(sorted(offsets), np.int64))


@contextmanager
def bounded(bounds: Bounds) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "MERGED_ROWS", bounds.merged_rows)
        patch.setattr(merging, "MERGED_BYTES", bounds.merged_bytes)
        patch.setattr(hidden_rows, "_MOST_MADE_BYTES", bounds.made_bytes)
        patch.setattr(hidden_rows, "_MOST_READ_BYTES", bounds.read_bytes)
        patch.setattr(hidden_rows, "_COPIED_BYTES", bounds.copied_bytes)
        yield


BOUNDS = st.builds(
    Bounds,
    st.sampled_from([3, 8, 1 << 16]),
    st.sampled_from([3_000, 1 << 23]),
    st.sampled_from([4_000, 1 << 23]),
    st.sampled_from([2_500, 1 << 26]),
    st.sampled_from([0, 2_000, 1 << 18]),
)
COMMITS = st.integers(1, 12).flatmap(
    lambda rows: st.builds(
        Commit,
        st.just(rows),
        st.one_of(
            st.just(frozenset[int]()),
            st.frozensets(st.integers(0, rows - 1), max_size=rows),
            st.just(frozenset(range(rows))),
        ),
        st.sampled_from([0, 0, 0, 1, 2]),
        st.just(LATEST_FORMAT),
        st.booleans(),
        st.sampled_from([False, False, True]),
        st.sampled_from([4, 4, 400]),
    )
)
OLD_COMMITS = st.builds(Commit, st.integers(1, 12), st.just(frozenset[int]()), batch_format=st.just(FIRST_FORMAT))
RANGES = st.tuples(st.integers(0, _END), st.integers(0, 40)).map(lambda one: set(range(one[0], one[0] + one[1])))
OFFSETS = st.one_of(st.sets(st.integers(0, _END), max_size=20), RANGES, RANGES)
READ = st.tuples(
    st.just("read"),
    st.integers(0, _END),
    st.one_of(st.none(), st.integers(1, _END)),
    st.sampled_from([1, 1_500, 5_000, 1 << 20]),
    st.sampled_from(["removed", "view"]),
)
COMPRESSIONS = st.sampled_from(["none", "none", "zstd"])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), COMMITS),
        st.tuples(st.just("append"), COMMITS),
        st.tuples(st.just("append"), COMMITS),
        st.tuples(st.just("append"), OLD_COMMITS),
        st.tuples(st.just("publish singly"), st.integers(2, 60), st.booleans()),
        st.tuples(st.just("publish singly"), st.integers(2, 60), st.booleans()),
        st.tuples(st.just("hide"), OFFSETS),
        st.tuples(st.just("keep"), OFFSETS),
        st.tuples(st.just("seal"), COMPRESSIONS),
        st.tuples(st.just("rewrite")),
        READ,
        READ,
    ),
    min_size=3,
    max_size=40,
)


def run(operations: list[tuple[Any, ...]], bounds: Bounds) -> None:
    with tempfile.TemporaryDirectory() as folder, bounded(bounds):
        tested, kept = Log(Path(folder), "none"), set[int]()
        for name, *arguments in operations:
            match name:
                case "append":
                    tested.append(arguments[0])
                case "publish singly":
                    for _ in range(arguments[0]):
                        tested.append(Commit(1, has_ids=arguments[1]))
                case "hide":
                    tested.hide(arguments[0])
                case "keep":
                    kept = arguments[0]
                case "seal":
                    tested.seal(arguments[0])
                case "rewrite":
                    forget_dropped(tested)
                case "read":
                    read(tested, kept, *arguments)
        for max_bytes in (1, 4_000, 1 << 20):
            at = 0
            while at < tested.log.high_watermark:
                at = tested.check(at, None, max_bytes, None)
        tested.log.close()


def forget_dropped(tested: Log) -> None:
    """Rewriting drops hidden rows, so that no view has them from then on."""
    tested.rewrite()
    for at in tested.log.reader.gaps():
        tested.values.pop(at, None)


def read(tested: Log, kept: set[int], start: int, length: int | None, max_bytes: int, of: str) -> None:
    end_offset = tested.log.high_watermark
    start = min(start, end_offset)
    end = None if length is None else min(start + length, end_offset)
    view: Hidden | None = None
    if of == "view":  # every message of a view has a row
        end = end_offset if end is None else end
        view = AllBut(_set_of({at for at in tested.values if at in kept}), end_offset)
    if start < (end_offset if end is None else end):
        tested.check(start, end, max_bytes, view)


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.long)])
def test_a_plan_has_what_a_model_has(examples: int) -> None:
    @settings(derandomize=True, deadline=None, max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(OPERATIONS, BOUNDS)
    def check(operations: list[tuple[Any, ...]], bounds: Bounds) -> None:
        note(f"run({operations!r}, {bounds!r})")
        run(operations, bounds)

    check()


ALL_HIDDEN = [("append", replace(Commit(6), epochs=at % 2)) for at in range(4)] + [("hide", set(range(_END)))]


@pytest.mark.parametrize("seals", [[], [("seal", "none")], [("seal", "zstd")], [("seal", "zstd"), ("rewrite",)]])
def test_a_log_of_which_all_is_hidden(seals: list[tuple[Any, ...]]) -> None:
    bounds = Bounds(1 << 16, 1 << 23, 1 << 23, 1 << 26, 1 << 18)
    run([*ALL_HIDDEN, *seals, ("append", Commit(3)), ("read", 5, 14, 1, "removed")], bounds)


def test_hidden_rows_of_many_small_batches_are_left_out_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested, read = Log(tmp_path, "none"), list[Path]()
    for number in range(190):
        tested.append(Commit(1, epochs=number == 150, has_ids=number % 7 == 0))
    tested.hide(set(range(0, 190, 3)) | set(range(60, 100)))

    def counted(fd: int, entry: Any, path: Path) -> bytes:
        read.append(path)
        return read_batch(fd, entry, path)

    monkeypatch.setattr(hidden_rows, "read_batch", counted)
    with tested.plan(0, None, 1 << 20, None) as plan:
        assert plan.batches <= 4
    assert len(read) < 20, "each batch is not read by itself"
    assert tested.check(0, None, 1 << 20, None) == 190
    tested.log.close()
