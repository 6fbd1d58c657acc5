"""How much compressed segments hold uncompressed: measured at sealing, found again at a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from natslog.log import LogOptions
from natslog.log.verify import check_file
from tests.conftest import open_log, rows

NOW_US = 1_790_000_000_000_000


def sealed(folder: Path, compression: str, segments: int = 2) -> None:
    log = open_log(folder, compression=compression)
    for _ in range(segments):
        log.append(rows([b"a" * 10_000] * 10), NOW_US)
        log.roll()
        assert log.seal_next()
    log.append(rows([b"open"]), NOW_US)
    log.close()


def test_sizes_are_known_again_after_a_start(tmp_path: Path) -> None:
    sealed(tmp_path, "zstd")
    log = open_log(tmp_path)
    totals = log.compression.totals(log.chain)
    assert totals is not None
    stored, uncompressed = totals
    assert stored == sum(one.size_bytes for one in log.chain.segments[:2])
    assert 200_000 < uncompressed < 210_000
    assert uncompressed / stored > 10
    log.drop_before(10)
    assert log.compression.totals(log.chain) == (log.chain.segments[0].size_bytes, uncompressed // 2)
    log.close()
    assert not check_file(tmp_path / "compression").problems


def test_uncompressed_segments_have_no_ratio(tmp_path: Path) -> None:
    sealed(tmp_path, "none")
    assert not (tmp_path / "compression").exists()
    log = open_log(tmp_path)
    assert log.compression.totals(log.chain) is None
    log.close()


def test_without_its_file_nothing_is_known_and_the_log_opens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sealed(tmp_path, "zstd")
    (tmp_path / "compression").write_bytes(b"damaged")
    log = open_log(tmp_path)
    assert "is ignored" in caplog.text
    assert (log.failure, log.compression.totals(log.chain)) == (None, None)
    log.close()


def test_where_it_is_not_stored_there_is_no_file(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogOptions(min_free_bytes=0, stores_scrub=False), compression="zstd")
    log.append(rows([b"a" * 10_000] * 10), NOW_US)
    log.roll()
    assert log.seal_next()
    assert log.compression.totals(log.chain) is not None
    assert not (tmp_path / "compression").exists()
    log.close()
