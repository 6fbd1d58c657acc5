"""Offsets and admission arithmetic of the connector, without Spark."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.errors import ConfigError
from pyspark_natslog.source.admission import Admitter, share_limit
from pyspark_natslog.source.offsets import StreamOffset, from_json, to_json
from pyspark_natslog.source.options import Admission
from pyspark_natslog.source.splits import OffsetRange, Task, numbers_of


def test_json_is_the_same_text_for_the_same_positions() -> None:
    one = {"b": StreamOffset("y", 2), "a": StreamOffset("x", 1)}
    two = dict(reversed(list(one.items())))
    assert json.dumps(to_json(one)) == json.dumps(to_json(two))
    assert json.dumps(to_json(one)) == '{"a": {"id": "x", "offset": 1}, "b": {"id": "y", "offset": 2}}'
    assert from_json(json.loads(json.dumps(to_json(one)))) == one


def test_tasks_are_part_of_a_position_where_there_are_several() -> None:
    body = {
        "a": {"id": "x", "offset": 9, "epoch": 3, "start": 1, "tasks": [[1, 4], [0, 9]]},
        "b": {"id": "y", "offset": 2},
    }
    assert json.dumps(to_json(from_json(body))) == json.dumps(body)


def test_tasks_are_numbered_by_where_their_shares_end() -> None:
    def piece(stream: str, start: int, end: int) -> OffsetRange:
        return OffsetRange(stream, stream, start, end)

    first = Task([piece("a", 0, 10), piece("a", 10, 20), piece("b", 0, 5)])
    second = Task([piece("a", 20, 30), piece("b", 5, 9)])
    assert numbers_of([first, second]) == {"a": ((0, 20), (1, 30)), "b": ((0, 5), (1, 9))}
    assert numbers_of([first]) == {}


_POSITION = {"id": "x", "offset": 1}


@pytest.mark.parametrize(
    "body",
    [
        {"a": 5},
        {"a": {"offset": 1}},
        {"a": {"id": "x", "offset": "z"}},
        *({"a": _POSITION | {"offset": wrong}} for wrong in (1.5, float("inf"), "1", True, None, -1)),
        *({"a": _POSITION | wrong} for wrong in ({"id": 5}, {"start": 0.5}, {"epoch": "2"}, {"tasks": [[0, 1.5]]})),
    ],
    ids=repr,
)
def test_another_sources_checkpoint_is_refused(body: dict) -> None:
    with pytest.raises(ConfigError, match="another checkpointLocation"):
        from_json(body)


@given(
    st.dictionaries(st.text("abcdef", min_size=1), st.integers(0, 50), min_size=1, max_size=30),
    st.integers(1, 20),
    st.none() | st.integers(100, 3000),
    st.randoms(use_true_random=False),
)
def test_every_stream_with_waiting_rows_has_its_turn(
    waiting: dict[str, int], limit: int, max_bytes: int | None, chance: random.Random
) -> None:
    """However many streams there are, and while rows come to others."""
    admitter = Admitter(Admission(max_rows=limit, max_bytes=max_bytes, min_rows=None, max_delay_s=0))

    def reach(name: str, given: int | None) -> tuple[int, int]:
        rows = waiting[name] if given is None else min(waiting[name], max(1, given // 100))
        return rows, rows * 100

    waited = {name for name, rows in waiting.items() if rows}
    for _ in range(-(-len(waiting) // limit)):
        admitted = admitter.admit(waiting, reach, drains=False)
        assert sum(admitted.values()) <= limit
        waited -= {name for name, rows in admitted.items() if rows}
        waiting = {name: rows - admitted[name] + chance.choice((0, 0, 1, 40)) for name, rows in waiting.items()}
    assert not waited, "rows of these were never taken"


@given(
    st.dictionaries(st.text("abcdef", min_size=1), st.integers(0, 1000), min_size=1),
    st.integers(1, 100_000),
    st.integers(1, 500),
    st.data(),
)
def test_limit_of_bytes_holds_where_sizes_are_unknown(
    waiting: dict[str, int], max_bytes: int, row_bytes: int, data: st.DataObject
) -> None:
    """The broker applies each stream's share, whether it states sizes or not."""
    unknown = data.draw(st.sets(st.sampled_from(sorted(waiting)), min_size=1))
    admitter = Admitter(Admission(max_rows=None, max_bytes=max_bytes, min_rows=None, max_delay_s=0))

    def reach(name: str, given: int | None) -> tuple[int, int | None]:
        rows = waiting[name] if given is None else min(waiting[name], max(1, given // row_bytes))
        return rows, None if name in unknown else rows * row_bytes

    admitted = admitter.admit(waiting, reach, drains=False)
    behind = [name for name, rows in waiting.items() if rows]
    assert all(0 < admitted[name] <= waiting[name] for name in behind)
    assert sum(admitted.values()) * row_bytes <= max_bytes + len(behind) * row_bytes or not unknown & set(behind)


@given(st.dictionaries(st.text("abcdef", min_size=1), st.integers(0, 1000), min_size=1), st.integers(1, 2000))
def test_limit_is_shared_in_proportion_and_used_up(waiting: dict[str, int], limit: int) -> None:
    shares = share_limit(waiting, limit)
    total = sum(waiting.values())
    assert sum(shares.values()) == min(limit, total)
    assert all(0 <= shares[name] <= rows for name, rows in waiting.items())
    if total > limit:
        slack = len(waiting) + 1
        assert all(abs(shares[name] - rows * limit / total) <= slack for name, rows in waiting.items())
    if limit >= len(waiting):
        assert all(shares[name] for name, rows in waiting.items() if rows), "nobody is starved"
