"""Readers beside the writer, sealing and retention: no thread waits for the disk reads of another one, nothing is
lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from natslog.errors import OffsetOutOfRange
from natslog.log import LogOptions
from natslog.log import chain as chain_module
from natslog.log import sealed as sealed_module
from natslog.log.log_reader import LogReader
from tests.conftest import open_log, retain, rows

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)


def splits(reader: LogReader) -> object:
    return reader.splits(1, 60, max_bytes=None, max_rows=None, min_splits=4)


def extent(reader: LogReader) -> object:
    return reader.extent(1, 59, 20_000)


def lag(reader: LogReader) -> object:
    return reader.lag(1)


def offset_at(reader: LogReader) -> object:
    return reader.offset_at(1_000_007)


def read(reader: LogReader) -> object:
    with reader.plan_read(0, max_bytes=1 << 20) as plan:
        return plan.length


@pytest.mark.parametrize("call", [splits, extent, lag, offset_at, read])
def test_the_tail_is_read_while_another_reader_waits_for_a_footer(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[LogReader], object]
) -> None:
    """The event loop reads the tail for followers; a cold footer may take a slow disk's time."""
    log = open_log(log_folder, SMALL)
    for at in range(60):
        log.append(rows([b"x" * 500]), 1_000_000 + at)
    while log.upkeep.seal_next():
        pass
    log.close()
    log = open_log(log_folder, SMALL)
    for one in log.chain.segments[:-1]:
        one.forget()  # type: ignore[union-attr]
    is_waiting, may_go = threading.Event(), threading.Event()
    read_footer = sealed_module.read_footer_index

    def slow(path: Path) -> Any:
        is_waiting.set()
        assert may_go.wait(20)
        return read_footer(path)

    monkeypatch.setattr(sealed_module, "read_footer_index", slow)
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(call(log.reader)))
    reader.start()
    assert is_waiting.wait(5)
    tail_read = threading.Event()

    def read_tail() -> None:
        with log.reader.plan_read(log.log_end_offset - 1, max_bytes=1000, uncommitted=True):
            tail_read.set()

    tail = threading.Thread(target=read_tail)
    tail.start()
    was_read = tail_read.wait(2)
    may_go.set()
    reader.join(20)
    tail.join(20)
    assert was_read, "the tail was read only after the footer"
    assert len(found) == 1


@pytest.mark.long
def test_readers_find_everything_while_segments_are_made_sealed_and_dropped(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL, max_messages=120)
    stop, problems, calls = threading.Event(), [], [0]

    def check(start: int) -> None:
        with log.reader.plan_read(start, max_bytes=8000) as plan:
            for header in plan.headers():
                assert header.base_offset <= start < header.end_offset or header.base_offset > start
            assert plan.messages()
        log.reader.splits(start, log.high_watermark, max_bytes=None, max_rows=None, min_splits=3)
        log.reader.offset_at(1_000_000 + start)
        log.reader.extent(start, log.high_watermark, 10_000)
        log.reader.lag(start)

    def reading(back: int) -> None:
        while not stop.is_set():
            calls[0] += 1
            try:
                check(max(log.log_start_offset, log.high_watermark - back))
            except OffsetOutOfRange:
                pass  # retention was faster
            except BaseException as error:
                problems.append(error)
                raise

    log.append(rows([b"first"]), 1_000_000)
    readers = [threading.Thread(target=reading, args=(back,)) for back in (1, 60, 1000)]
    for reader in readers:
        reader.start()
    for at in range(1, 800):
        compression = "none" if at % 20 < 10 else "zstd"
        size_bytes = 300_000 if at % 20 < 3 else 500  # large commits are sealed in place
        log.settings = log.settings.__class__(subject="orders.>", max_messages=120, compression=compression)
        log.append(rows([os.urandom(size_bytes)]), 1_000_000 + at)
        if at % 10 == 0:
            while log.upkeep.seal_next():
                pass
        if at % 25 == 0:
            retain(log, 2_000_000)
        if problems:
            break
    stop.set()
    for reader in readers:
        reader.join(20)
    assert problems == []
    assert calls[0] > 20
    assert log.log_start_offset > 0


def first_offset(reader: LogReader) -> object:
    return reader.offset_at(1_000_001)


def first_batches(reader: LogReader) -> object:
    with reader.plan_read(0, max_bytes=3000) as plan:
        return len(plan.messages()) > 0


@pytest.mark.parametrize(("call", "expected"), [(first_offset, (1, 1_000_001)), (first_batches, True)])
def test_a_segment_sealed_between_the_look_up_and_the_opening_is_looked_up_again(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[LogReader], object], expected: object
) -> None:
    """The sealed file has other batches at other places."""
    log = open_log(log_folder, SMALL)
    for at in range(60):
        log.append(rows([b"x" * 500]), 1_000_000 + at)
    open_segment, sealed = chain_module.open_segment, []

    def late(segment: Any) -> int:
        if not sealed:
            sealed.append(log.upkeep.seal_next())
        return open_segment(segment)

    monkeypatch.setattr(chain_module, "open_segment", late)
    assert call(log.reader) == expected
    assert sealed == [True]
