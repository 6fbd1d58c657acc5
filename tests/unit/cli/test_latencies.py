"""Percentiles in buckets against those of the sorted values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.cli.latencies import Latencies

seconds = st.lists(st.floats(min_value=2e-6, max_value=3600.0), min_size=1, max_size=200)


@given(seconds, st.sampled_from([50, 90, 99, 100]))
def test_percentiles_are_at_most_one_per_cent_above_the_true_ones(values: list[float], percent: int) -> None:
    found = Latencies()
    found.add_each(np.array(values[::2]))
    for value in values[1::2]:
        found.add(value)
    true = float(np.percentile(values, percent, method="inverted_cdf"))
    assert true * 0.999999 <= found.percentile_s(percent) <= min(true * 1.0101, max(values))
    assert found.count == len(values)


@given(seconds, seconds)
def test_merged_ones_are_those_of_both(one: list[float], other: list[float]) -> None:
    first, second, both = Latencies(), Latencies(), Latencies()
    first.add_each(np.array(one))
    second.add_each(np.array(other))
    both.add_each(np.array(one + other))
    first.merge(second)
    assert first.to_json() == both.to_json()


def test_many_of_one_latency_count_as_many() -> None:
    found = Latencies()
    found.add(0.001, 99)
    found.add(1.0)
    body = found.to_json()
    assert body is not None
    assert body["p50"] == body["p99"] == pytest.approx(1.0, rel=0.011)
    assert body["max"] == 1000.0


def test_none_and_negative_ones() -> None:
    found = Latencies()
    assert found.to_json() is None
    found.add_each(np.array([-1.0, -0.5]))
    assert found.to_json() == {"p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}
