"""Small pieces of a part are sent together, in order; pieces that cannot be read are named."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from natslog.http.part import QUICK_BYTES, Sendable, _grouped, _read_together, _UnreadablePiece
from natslog.log import FilePiece


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    path = tmp_path / "file"
    path.write_bytes(random.Random(3).randbytes(1_000_000))
    fd = os.open(path, os.O_RDONLY)
    yield fd, path
    os.close(fd)


def test_all_bytes_are_sent_in_order_and_few_at_once(file: tuple[int, Path]) -> None:
    fd, path = file
    chance, content = random.Random(5), path.read_bytes()
    for _ in range(50):
        pieces: list[Sendable] = []
        expected = b""
        for _ in range(chance.randrange(1, 60)):
            if chance.random() < 0.5:
                pieces.append(chance.randbytes(chance.randrange(2000)))
                expected += pieces[-1]  # type: ignore[operator]
            else:
                length = chance.choice((1, 500, 60_000, 64 * 1024, 64 * 1024 + 1, 200_000))
                position = chance.randrange(len(content) - length)
                pieces.append(FilePiece(fd, path, position, length))
                expected += content[position : position + length]
        sent = b""
        for group in _grouped(pieces):
            first = group[0]
            if isinstance(first, FilePiece) and first.length > 64 * 1024:
                assert len(group) == 1, "sent by sendfile"
                sent += os.pread(fd, first.length, first.position)
            else:
                together = _read_together(group)
                assert len(together) <= QUICK_BYTES + 64 * 1024
                sent += together
        assert sent == expected


def test_piece_that_cannot_be_read_is_named(file: tuple[int, Path]) -> None:
    fd, path = file
    beyond = FilePiece(fd, path, 999_990, 11)
    with pytest.raises(_UnreadablePiece, match="11 bytes at byte 999990 cannot be read") as raised:
        _read_together([b"header", FilePiece(fd, path, 0, 10), beyond])
    assert raised.value.piece is beyond
