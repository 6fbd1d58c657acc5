"""Offsets and admission arithmetic of the connector, without Spark."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.errors import ConfigError
from natslog.planning import Waiting, shares_of
from pyspark_natslog.source.admission import Admitter
from pyspark_natslog.source.offsets import StreamOffset, from_json, to_json
from pyspark_natslog.source.options import Admission


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
    waited = {name for name, rows in waiting.items() if rows}
    for _ in range(-(-len(waiting) // limit)):
        in_turn = {
            name: Waiting(0, waiting[name], waiting[name], waiting[name] * 100) for name in admitter.in_turn(waiting)
        }
        shares = shares_of(in_turn, admitter.limits(drains=False))
        taken = {name: min(one.rows or 0, max(1, (one.bytes or 2**62) // 100)) for name, one in shares.items()}
        assert sum(taken.values()) <= limit
        admitter.note(waiting.keys(), taken.keys())
        waited -= taken.keys()
        waiting = {name: rows - taken.get(name, 0) + chance.choice((0, 0, 1, 40)) for name, rows in waiting.items()}
    assert not waited, "rows of these were never taken"
