"""Many small batches of a file are proven together: what is found is what reading each by itself finds."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from natslog.log.batch_index import BatchIndex
from natslog.log.recovery import Scan, scan_segment
from natslog.log.small_runs import SmallRuns
from tests.unit.wire.test_small_batches import singles, written

HEAD = b"a file header, 24 bytes!"


def batches() -> list[bytes]:
    """Small ones, with others between them."""
    found, base = singles(40), 40
    for kind in ("large", "plain", "plain", "run", "plain", "ids", "ids", "format 1", "epoch", "plain", "plain"):
        row = {"subject": "s", "key": b"k", "headers": [{"key": "a", "value": "b"}], "value": b"v" * 50}
        message, base = written(kind, [row], base, 4 if kind == "epoch" else 3)
        found.append(message)
    return [*found, *singles(30, base)]


def cut_out(parts: list[bytes], at: int) -> bytes:
    return b"".join(parts[:at] + parts[at + 1 :])


def twice(parts: list[bytes], at: int) -> bytes:
    return b"".join([*parts[: at + 1], *parts[at:]])


def flipped(parts: list[bytes], at: int) -> bytes:
    damaged = bytearray(parts[at])
    damaged[random.Random(at).randrange(len(damaged))] ^= 4
    return b"".join([*parts[:at], damaged, *parts[at + 1 :]])


def ends_early(parts: list[bytes], at: int) -> bytes:
    return b"".join(parts[:at]) + parts[at][: random.Random(at).randrange(len(parts[at]))]


def with_zeros(parts: list[bytes], at: int) -> bytes:
    return b"".join(parts[:at]) + bytes(9000)


def columns(scan: Scan) -> list[list[int]]:
    return [list(column) for column in scan.index._columns()]


@pytest.mark.parametrize("damage", [cut_out, twice, flipped, ends_early, with_zeros])
@pytest.mark.parametrize("next_base", [None, 17, 45, 60])
def test_recovery_finds_the_same(
    damage: Callable[[list[bytes], int], bytes],
    next_base: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts, path = batches(), tmp_path / "segment"
    for at in range(0, len(parts), 3):
        path.write_bytes(HEAD + damage(parts, at))
        for durable in (0, at + 1):
            found = [
                scan_segment(
                    path, position=len(HEAD), base_offset=0, next_base_offset=next_base, durable_offset=durable
                )
                for _ in range(2)
            ]
            with monkeypatch.context() as patch:
                patch.setattr(SmallRuns, "at", lambda *_: None)
                expected = scan_segment(
                    path, position=len(HEAD), base_offset=0, next_base_offset=next_base, durable_offset=durable
                )
            for one in found:
                assert columns(one) == columns(expected)
                assert (one.end_position, one.torn_bytes) == (expected.end_position, expected.torn_bytes)
                assert one.damages == expected.damages


def test_most_batches_are_proven_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, appended = tmp_path / "segment", list[int]()
    path.write_bytes(HEAD + b"".join(singles(5000)))
    append = BatchIndex.append
    monkeypatch.setattr(BatchIndex, "append", lambda index, entry: appended.append(1) or append(index, entry))
    scan = scan_segment(path, position=len(HEAD), base_offset=0)
    assert len(scan.index) == 5000
    assert len(appended) < 20


@pytest.mark.parametrize("kinds", [("format 1",), ("run",), ("plain", "large")])
def test_batches_that_are_not_read_together_are_not_read_ahead(
    kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MiB was read for each of them."""
    row = {"subject": "s", "key": None, "headers": None, "value": b"v"}
    parts = [written(kinds[number % len(kinds)], [row], number, 3)[0] for number in range(200)]
    path, ahead = tmp_path / "segment", list[int]()
    path.write_bytes(HEAD + b"".join(parts))
    monkeypatch.setattr(
        "natslog.log.small_runs.read_at", lambda fd, at, size: ahead.append(size) or os.pread(fd, size, at)
    )
    assert len(scan_segment(path, position=len(HEAD), base_offset=0).index) == 200
    assert sum(ahead) <= 2 * path.stat().st_size
