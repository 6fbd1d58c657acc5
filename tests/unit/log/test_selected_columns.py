"""Some columns of stored batches, read without the others: the same rows, each column proven."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from natslog.arrow.batch_line import FIRST_FORMAT, LATEST_FORMAT
from natslog.errors import CorruptLog
from natslog.log import ReplicaLog
from natslog.log import read_plan as module
from natslog.log.read_plan import ReadPlan
from natslog.log.sealed import read_footer_index
from tests.conftest import open_log, rows

COLUMNS = ("offset", "subject")


def filled(folder: Path, compression: str = "none", batch_format: int = LATEST_FORMAT) -> ReplicaLog:
    """Small batches, one of half a MiB, and some of medium size; sealed ones behind."""
    log = open_log(folder, compression=compression)
    for part in range(2):
        for at in range(20):
            log.append(rows([b"v" * 100] * 2, subject=f"orders.{at}"), 1_000_000 + at, batch_format=batch_format)
        log.append(
            rows([b"%d" % at * 100 for at in range(3000)], subject="orders.large"), 2_000_000, batch_format=batch_format
        )
        for at in range(3):
            log.append(
                rows([b"w" * 500] * 40, subject=f"orders.medium.{at}"), 3_000_000 + at, batch_format=batch_format
            )
        if part == 0:
            log.roll()
            assert log.upkeep.seal_next()
    return log


def found(log: ReplicaLog, columns: tuple[str, ...] | None, start: int, end: int) -> pa.Table:
    batches = [batch.select(COLUMNS) for _, batch in log.reader.stored_rows(start, end, columns=columns)]
    return pa.Table.from_batches(batches).combine_chunks()


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
@pytest.mark.parametrize("batch_format", [FIRST_FORMAT, LATEST_FORMAT])
def test_the_same_rows_are_found(log_folder: Path, compression: str, batch_format: int) -> None:
    log = filled(log_folder, compression, batch_format)
    end = log.log_end_offset
    for start, upto in ((0, end), (1, end - 1), (39, 41), (100, 101), (3050, 3300), (end - 1, end)):
        assert found(log, COLUMNS, start, upto) == found(log, None, start, upto)
    log.close()


def test_each_batch_comes_with_what_it_states(log_folder: Path) -> None:
    log = filled(log_folder)
    with log.reader.plan_read(0, max_bytes=1 << 30) as plan:
        selected, whole = list(plan.selected(COLUMNS)), list(plan.rows())
    assert [(one.base_offset, one.end_offset, one.rows, one.epoch) for one, _ in selected] == [
        (one.base_offset, one.end_offset, one.rows, one.epoch) for one, _ in whole
    ]
    log.close()


def test_of_large_batches_only_these_columns_are_read(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = filled(log_folder)
    read: list[int] = []
    real = module.read_at
    monkeypatch.setattr(module, "read_at", lambda fd, at, size: read.append(size) or real(fd, at, size))
    monkeypatch.setattr(module, "_LARGE_BYTES", 100 * 1024)
    with ReadPlan(0) as plan, log.reader.plan_read(0, max_bytes=1 << 30) as found:
        plan.ranges, found.ranges = found.ranges[:1], found.ranges[1:]
        length = plan.length
        assert sum(batch.num_rows for _, batch in plan.selected(COLUMNS)) > 3000
    assert sum(read) < length / 4
    log.close()


@pytest.mark.parametrize("column", ["subject", "value"])
def test_damage_of_a_column_that_is_read_is_found(log_folder: Path, column: str) -> None:
    log = filled(log_folder)
    path = log.chain.segments[0].path
    entry = read_footer_index(path)[0]
    data = bytearray(path.read_bytes())
    text = b"orders.large" if column == "subject" else b"17" * 100
    at = data.index(text, entry.position)
    data[at] ^= 1
    path.write_bytes(data)
    log.close()
    log = open_log(log_folder)
    if column == "value":
        assert found(log, COLUMNS, 0, 3000)["subject"].to_pylist()[100] == "orders.large"
    else:
        with pytest.raises(CorruptLog, match="CRC32C") as error:
            found(log, COLUMNS, 0, 3000)
        assert error.value.facts["start"] == entry.base_offset
    log.close()
