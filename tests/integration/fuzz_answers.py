"""The child of `test_damaged_answers`: reads damaged copies of one answer, in a process that may crash.

python -m tests.integration.fuzz_answers FILE SEED TIMES
"""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from natslog.client.answers import RequestedRows, rows_of
from natslog.errors import NatslogError


@dataclass(frozen=True)
class Sample:
    """A real answer, and what it was asked for."""

    data: bytes
    headers: dict[str, str]
    asked: RequestedRows

    @property
    def is_whole(self) -> bool:
        return self.headers["Natslog-Batches"] == "whole"

    def read(self, data: bytes) -> list[dict[str, Any]]:
        answer: Any = SimpleNamespace(data=data, headers=self.headers)
        fetched = rows_of(answer, self.asked)
        return pa.Table.from_batches(fetched.batches, schema=self.asked.schema).to_pylist()


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A copy with some bytes changed, inserted, removed, or without its end."""
    copy = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        if not copy:
            break
        at = chance.randrange(len(copy))
        match chance.randrange(8):
            case 0:
                copy[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 1:
                copy[at : at + 4] = chance.choice(
                    (b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff\xff\xff\xff", b"\0\0\0\0")
                )
            case 2:
                copy[at : at + 8] = chance.randbytes(8)
            case 3:
                del copy[at : at + chance.choice((1, 8, 64))]
            case 4:
                copy[at:at] = chance.randbytes(chance.choice((1, 8)))
            case 5 if len(copy) > 1:
                del copy[max(1, at) :]
            case _:
                copy[at] ^= 1 << chance.randrange(8)
    return bytes(copy)


def check(sample: Sample, rows: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    """What a CRC proves is right; of other answers number, order and offsets are."""
    if sample.is_whole:
        assert rows == right, "a damaged whole answer was read as other rows"
        return
    offsets = [row["offset"] for row in rows if "offset" in row]
    assert offsets == sorted(set(offsets)), "offsets do not ascend"
    assert sample.asked.is_filtered or len(rows) == len(right), "rows are missing"


def main(file: str, seed: str, times: str) -> None:
    sample = pickle.loads(Path(file).read_bytes())
    right, refused, chance = sample.read(sample.data), 0, random.Random(int(seed))
    for _ in range(int(times)):
        try:
            rows = sample.read(damaged(sample.data, chance))
        except NatslogError:
            refused += 1
        else:
            check(sample, rows, right)
    print(refused)


if __name__ == "__main__":
    main(*sys.argv[1:])
