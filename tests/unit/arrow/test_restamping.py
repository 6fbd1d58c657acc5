"""Batches get another epoch, and everything else of them stays; what natslog does not write is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from natslog.arrow import ipc
from natslog.arrow.restamping import checked_batches, restamped
from natslog.errors import InvalidRequest
from natslog.log.sealed import split_footer
from natslog.log.segment import check_file_header

GOLDEN = Path(__file__).parents[2] / "golden"
SEGMENTS = [f"segment-v{at}.active" for at in (1, 2)] + ["segment-v2-gaps.active"]
SEALED = [f"segment-v{at}-{how}.arrow" for at in (1, 2) for how in ("none", "zstd")]


def batches_in(name: str) -> bytes:
    path = GOLDEN / name
    end = split_footer(path)[0] if path.suffix == ".arrow" else path.stat().st_size
    data = path.read_bytes()[:end]
    return data[check_file_header(data[:8192], path, None, 0) :]


@pytest.mark.parametrize("name", SEGMENTS + SEALED)
def test_every_format_gets_another_epoch_and_nothing_else(name: str) -> None:
    data = batches_in(name)
    batches = checked_batches(data, (">",))
    assert sum(header.rows for header, _ in batches) in (2, 4)
    for header, message in batches:
        stated, pieces = restamped(header, message, 77)
        again = b"".join(pieces)
        ((proven, _),) = ipc.split_messages(again, source="restamped")
        assert proven == stated
        assert (stated.epoch, stated.base_offset, stated.end_offset) == (77, header.base_offset, header.end_offset)
        assert (stated.run, stated.max_timestamp_us) == (header.run, header.max_timestamp_us)
        assert ipc.decode_batch(again).equals(ipc.decode_batch(message))
        was, is_now = ipc.packed_ids_of(header, message), ipc.packed_ids_of(stated, again)
        assert (None if was is None else was.tolist()) == (None if is_now is None else is_now.tolist())


@pytest.mark.parametrize("name", SEGMENTS + SEALED)
def test_change_of_any_byte_is_refused(name: str) -> None:
    data = batches_in(name)
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(InvalidRequest):
            checked_batches(bytes(damaged), (">",))
    for length in range(0, len(data), 97):
        try:
            found = checked_batches(data[:length], (">",))
        except InvalidRequest:
            continue
        assert found[-1][0].end_offset < 4 or "zstd" in name, "whole batches of it are there"


def test_subject_that_the_stream_does_not_record_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="has a subject that is none of orders.new"):
        checked_batches(batches_in("segment-v2.active"), ("orders.new",))
