"""The mark in each batch of a run: its producer, the offsets of the whole run, and a digest of its rows.

A run consists of the rows of one direct append; a log has all of it or nothing. The mark stands in a batch's custom
metadata, under the key `natslog.run`, as one line:

    v2 digest=… start=… end=… batch=… producer=…
    v1 start=… end=… batch=… producer=…

Data of a publisher cannot imitate it: subjects have no spaces, and a header contains no other data of publishers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MARK_KEY = b"natslog.run"
_MARK = re.compile(
    rb"(?:v1|v2 digest=([0-9a-f]{32})) start=(\d{19}) end=(\d{19}) batch=(\d{19}) producer=([A-Za-z0-9_.-]{1,128})"
)


@dataclass(frozen=True, slots=True)
class RunMark:
    """Offsets `[start, end)` are the rows of this batch of this producer; `batch` is the producer's own count.

    `digest`: of the rows, in any order (`wire.row_hashes.content_digest`); None for runs of natslog 0.1.0.
    """

    producer: str
    batch: int
    start: int
    end: int
    digest: int | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.end, "a run has rows"
        assert self.batch >= 0, "batches are counted from 0"

    def to_line(self) -> bytes:
        version = b"v1" if self.digest is None else b"v2 digest=%032x" % self.digest
        return b"%s start=%019d end=%019d batch=%019d producer=%s" % (
            version,
            self.start,
            self.end,
            self.batch,
            self.producer.encode(),
        )


def find_mark(header: bytes | bytearray | memoryview) -> RunMark | None:
    """The mark in a proven batch header; None where the batch belongs to no run."""
    found = _MARK.search(header)
    if found is None:
        return None
    digest = None if found[1] is None else int(found[1], 16)
    return RunMark(found[5].decode(), int(found[4]), int(found[2]), int(found[3]), digest)
