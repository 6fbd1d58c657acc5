"""How many bytes a range takes: against the plain sum over all batches."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from natslog.errors import InvalidRequest, OffsetOutOfRange
from natslog.log import LogOptions
from tests.conftest import open_log, rows

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory):
    log = open_log(tmp_path_factory.mktemp("extent") / "log", SMALL)
    for at in range(40):
        log.append(rows([b"." * (50 + 37 * at % 400)] * (1 + at % 7)), 1_000_000 + at)
    while log.upkeep.seal_next():
        pass
    yield log
    log.close()


def batches_of(log) -> list[tuple[int, int, int]]:
    return [
        (segment.index.base_offsets[at], segment.index.end_offsets[at], segment.index.lengths[at])
        for segment in log.chain.segments
        for at in range(len(segment.index))
    ]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=st.tuples(st.integers(0, 154), st.integers(0, 154)), max_bytes=st.none() | st.integers(1, 30_000))
def test_extent_agrees_with_the_sum_over_batches(log, ends: tuple[int, int], max_bytes: int | None) -> None:
    start, end = min(*ends, log.log_end_offset), min(max(ends), log.log_end_offset)
    found = log.reader.extent(start, end, max_bytes)
    assert found.start == start
    assert found.end <= end
    assert found.end > start or start == end
    pieces = [(max(start, low), min(found.end, high), size / (high - low)) for low, high, size in batches_of(log)]
    exact = sum((high - low) * row_bytes for low, high, row_bytes in pieces if low < high)
    framing = 2500 * len(log.chain.segments)  # magic, schema and footer count where whole segments are taken
    assert exact - 10 <= found.bytes <= exact + framing
    if max_bytes is None:
        assert found.end == end
    elif found.end < end:
        following = next(size / (high - low) for low, high, size in batches_of(log) if low <= found.end < high)
        assert found.bytes + following + framing >= max_bytes, "it stops only where no more fits"
        assert found.bytes <= max_bytes or found.end == start + 1


def test_extent_of_many_segments_reads_the_footers_of_the_outer_ones_only(log) -> None:
    sealed = [segment for segment in log.chain.segments if segment.path.suffix == ".arrow"]
    for segment in sealed:
        segment.forget()
    log.reader.extent(sealed[0].base_offset + 1, log.log_end_offset)
    assert [segment for segment in sealed if segment._index is not None] == sealed[:1]


def test_extent_outside_the_log_or_backwards_is_refused(log) -> None:
    with pytest.raises(OffsetOutOfRange):
        log.reader.extent(0, log.log_end_offset + 1)
    with pytest.raises(InvalidRequest):
        log.reader.extent(5, 4)
