"""How many tasks a read is divided into."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from natslog.model import Split
from pyspark_natslog.source.options import Cutting
from pyspark_natslog.source.splits import OffsetRange, _full_tasks, _ranges, pack

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("size_bytes", "cores", "tasks"),
    [
        (0, 2, 0),
        (1, 2, 1),
        (100 * MIB, 2, 2),
        (256 * MIB, 2, 4),
        (900 * MIB + 1, 2, 4),
        (2_000_000_001, 8, 16),
        (4096 * MIB, 8, 16),
        (8192 * MIB, 8, 32),
        (20_000 * MIB, 2, 79),
    ],
)
def test_tasks_become_larger_where_there_are_two_for_each_core(size_bytes: int, cores: int, tasks: int) -> None:
    cutting = Cutting(None, None, 64 * MIB, 256 * MIB, "nearest", None)
    assert _full_tasks(cutting, size_bytes, cores) == tasks


def test_tasks_are_equal_in_rows_where_sizes_are_unknown() -> None:
    edges = range(0, 12_000_001, 1_000_000)
    splits = [Split(start=low, end=high, rows=None, bytes=None) for low, high in pairwise(edges)]
    pieces = _ranges(OffsetRange("orders", "id", 0, 12_000_000), splits)
    assert [(piece.start, piece.end) for piece in pieces] == list(pairwise(edges))
    options = SimpleNamespace(cutting=Cutting(None, None, 512 * MIB, 512 * MIB, "nearest", None))
    tasks = pack(pieces, options, 4)
    assert [sum(one.rows for one in task.ranges) for task in tasks] == [3_000_000] * 4


def test_given_maximum_holds() -> None:
    assert _full_tasks(Cutting(None, None, 10 * MIB, 10 * MIB, "nearest", None), 1000 * MIB, 2) == 100
