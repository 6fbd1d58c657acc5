"""Look-ups in a stream with a million subjects, by the index of subjects."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.log import LogOptions, ReplicaLog
from natslog.model import StreamSettings
from tests.bench.pairs import Comparison
from tests.bench.sides import scratch

_SUBJECTS = 1_000_000
_ROWS = 4_000_000
_COMMIT = 50_000
_LOOKUPS = 2_000
_STREAM_ID = "0" * 32


def subjects() -> list[Comparison]:
    """The log is written and used in this process: a request over HTTP costs some 100 times as much as a look-up."""
    with scratch() as folder:
        log = _open(folder)
        _write(log)
        lines = _measured(log)
        lines += [_start_s(log, folder)]
    return lines


def _open(folder: Path) -> ReplicaLog:
    return ReplicaLog(folder / "log", _STREAM_ID, StreamSettings(subject="t.>"), LogOptions(min_free_bytes=0))


def _write(log: ReplicaLog) -> None:
    """The first quarter has every subject once."""
    random = np.random.default_rng(1)
    numbers = np.concatenate([random.permutation(_SUBJECTS), random.integers(0, _SUBJECTS, _ROWS - _SUBJECTS)])
    for at in range(0, _ROWS, _COMMIT):
        columns: list[Any] = [
            pa.array([f"t.device-{number:07d}" for number in numbers[at : at + _COMMIT]]),
            pa.nulls(_COMMIT, pa.binary()),
            pa.nulls(_COMMIT, HEADERS_TYPE),
            pa.array([b"x" * 100] * _COMMIT, pa.binary()),
        ]
        log.append(RowBuffers.of(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA)), 1_000_000 + at)
    while log.upkeep.seal_next():
        pass


def _measured(log: ReplicaLog) -> list[Comparison]:
    started = time.perf_counter()
    log.subjects.last("t.device-0000000")
    made_s = time.perf_counter() - started
    started = time.perf_counter()
    _, counts = log.subjects.counts()
    counted_s = time.perf_counter() - started
    assert len(counts.table) == _SUBJECTS
    files = sum(path.stat().st_size for path in log.folder.glob("*.subjects"))
    memory = sum(part.nbytes for parts in log.subjects._recent.values() for part in parts)
    lines = [
        _looked_up("the last message on a subject", lambda subject: log.subjects.last(subject)),
        _looked_up("the next message on a subject", lambda subject: log.subjects.next(subject, _ROWS // 2)),
        _looked_up("count, first and last message of a subject", lambda subject: log.subjects.on_subject(subject)),
    ]
    lines[0].notes = {
        "segments": len(log.chain.segments),
        "s to make the index": made_s,
        "ns to index a message": made_s / _ROWS * 1e9,
        "s to count all subjects": counted_s,
    }
    size = Comparison("index of subjects in memory and in files", "bytes/subject", 150.0, is_bound=True)
    size.ours = [(files + memory) / _SUBJECTS]
    size.notes = {"files, bytes": files, "memory, bytes": memory}
    return [*lines, size]


def _looked_up(title: str, look_up: Callable[[str], Any]) -> Comparison:
    random = np.random.default_rng(2)
    times = []
    for number in random.integers(0, _SUBJECTS, _LOOKUPS):
        subject = f"t.device-{number:07d}"
        started = time.perf_counter()
        look_up(subject)
        times.append(time.perf_counter() - started)
    line = Comparison(f"{title}, of {_SUBJECTS:,}", "µs", 1_000.0, ours=[median(times) * 1e6], is_bound=True)
    line.notes = {"µs, 99 of 100": sorted(times)[_LOOKUPS * 99 // 100] * 1e6}
    return line


def _start_s(log: ReplicaLog, folder: Path) -> Comparison:
    log.roll()
    log.upkeep.seal_next()
    log.subjects.keep_up()
    log.close()
    started = time.perf_counter()
    log = _open(folder)
    assert log.subjects.last("t.device-0000000") >= 0
    taken_s = time.perf_counter() - started
    log.close()
    return Comparison("start and first look-up, all segments sealed", "s", 1.0, ours=[taken_s], is_bound=True)
