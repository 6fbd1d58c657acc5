"""Offsets and admission arithmetic of the connector, without Spark."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.errors import ConfigError
from pyspark_natslog.admission import share_limit
from pyspark_natslog.offsets import StreamOffset, from_json, to_json


def test_json_is_the_same_text_for_the_same_positions() -> None:
    one = {"b": StreamOffset("y", 2), "a": StreamOffset("x", 1)}
    two = dict(reversed(list(one.items())))
    assert json.dumps(to_json(one)) == json.dumps(to_json(two))
    assert json.dumps(to_json(one)) == '{"a": {"id": "x", "offset": 1}, "b": {"id": "y", "offset": 2}}'
    assert from_json(json.loads(json.dumps(to_json(one)))) == one


@pytest.mark.parametrize("body", [{"a": 5}, {"a": {"offset": 1}}, {"a": {"id": "x", "offset": "z"}}])
def test_another_sources_checkpoint_is_refused(body: dict) -> None:
    with pytest.raises(ConfigError, match="another checkpointLocation"):
        from_json(body)


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
