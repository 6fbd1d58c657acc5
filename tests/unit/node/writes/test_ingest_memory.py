"""The histogram of commit latency: buckets as Prometheus defines them."""

from __future__ import annotations

from natslog.node.writes.ingest_memory import BOUNDS_S, LatencyHistogram


def test_buckets_are_cumulative_and_include_their_bound() -> None:
    latency = LatencyHistogram()
    for seconds in (0.0, 0.001, 0.0011, 3.0, 60.0):
        latency.observe(seconds)
    counts = dict(latency.buckets())
    assert (counts["0.001"], counts["0.0025"], counts["2.5"], counts["5.0"], counts["+Inf"]) == (2, 3, 3, 4, 5)
    assert [float(bound) for bound in counts] == [*BOUNDS_S, float("inf")]
    assert latency.sum_s == 63.0021
