"""The line of text in the metadata of each batch that describes the batch and proves it.

    v2 base_offset=… end_offset=… rows=… epoch=… max_timestamp_us=… ids_bytes=… header_bytes=… body_bytes=… crcs=…
    v1 base_offset=… rows=… epoch=… max_timestamp_us=… header_bytes=… body_bytes=… header_crc32c=… crc32c=…

Batches of natslog 0.1.0 are of format 1, those that are written now of format 2. Its CRC32Cs are that of the header,
with itself as zeros, then those of the body: up to the end of each column, and of all. Each of these continues the one
before, so a column is proven by itself: its bytes lead from the CRC before it to its own. In format 1, the header's CRC
is taken with both CRCs as zeros, and the other one continues it over the body.

docs/FORMATS.md has every byte.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from crc32c import crc32c

from natslog.arrow.run_marks import RunMark, find_mark
from natslog.arrow.schema import COLUMNS

Bytes: TypeAlias = bytes | bytearray | memoryview

FIRST_FORMAT, LATEST_FORMAT = 1, 2
CONTINUATION = b"\xff\xff\xff\xff"
MAX_HEADER_BYTES = 8192
ALIGNMENT = 8
ID_BYTES = 12

_KEEP_GIL = 0  # 20 bytes per nanosecond: acquiring the lock again takes longer
CRCS = 1 + len(COLUMNS) + 1
BLANK_CRC = b"00000000"
_V1_FORM = (
    b"v1 base_offset=%019d rows=%010d epoch=%019d max_timestamp_us=%019d"
    b" header_bytes=%010d body_bytes=%012d header_crc32c=%08x crc32c=%08x"
)
_V2_FORM = (
    b"v2 base_offset=%019d end_offset=%019d rows=%010d epoch=%019d max_timestamp_us=%019d ids_bytes=%010d"
    b" header_bytes=%010d body_bytes=%012d crcs=" + b".".join([b"%08x"] * CRCS)
)
_V2_CRC_BYTES = 9 * CRCS - 1  # at the end of the line
_V1 = (
    rb"v1 base_offset=(\d{1,19}) rows=(\d{1,10}) epoch=(\d{1,19}) max_timestamp_us=(\d{1,19})"
    rb" header_bytes=(\d{10}) body_bytes=(\d{12}) header_crc32c=([0-9a-f]{8}) crc32c=([0-9a-f]{8})\0"
)
_V2 = (
    rb"v2 base_offset=(\d{19}) end_offset=(\d{19}) rows=(\d{10}) epoch=(\d{19}) max_timestamp_us=(\d{19})"
    rb" ids_bytes=(\d{10}) header_bytes=(\d{10}) body_bytes=(\d{12})"
    rb" crcs=([0-9a-f]{8})\.([0-9a-f]{8}(?:\.[0-9a-f]{8}){%d})\0"
) % (CRCS - 2)
_LINE = re.compile(_V1 + b"|" + _V2)
_V1_CRCS = (7, 8)
_V2_CRC, _V2_BODY_CRCS = 17, 18
_V2_NUMBERS = slice(8, 16)  # of all groups
_CRC_WORDS = struct.Struct(f">{CRCS}I")


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The header of a batch; its CRCs are the stored values, not yet checked.

    Attributes:
        rows: as many as offsets, unless some were removed since (which no version does yet).
        crcs: of the header; then of the body up to the end of each column, and of all of it (format 2), or of header
            and body (format 1).
        ids_bytes: of the packed message ids, which end the body; 0 if there are none.
        run: the run that the batch is a part of, as a validated header names it.
    """

    base_offset: int
    end_offset: int
    rows: int
    epoch: int
    max_timestamp_us: int
    header_bytes: int
    body_bytes: int
    crcs: tuple[int, ...]
    ids_bytes: int = 0
    run: RunMark | None = None

    @property
    def batch_format(self) -> int:
        return FIRST_FORMAT if len(self.crcs) == 2 else LATEST_FORMAT

    @property
    def header_crc(self) -> int:
        return self.crcs[0]

    @property
    def has_gaps(self) -> bool:
        """Whether messages of some of its offsets were removed."""
        return self.rows < self.end_offset - self.base_offset

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.body_bytes

    @property
    def body_crc(self) -> tuple[int, int]:
        """What the CRC of the body begins with, and what it is then."""
        return (self.crcs[0] if self.batch_format == FIRST_FORMAT else 0), self.crcs[-1]

    def line(self, crcs: tuple[int, ...] | None = None) -> bytes:
        """As it stands in the metadata; with these CRCs instead of its own, if they are given."""
        crcs = crcs or self.crcs
        times = (self.epoch, self.max_timestamp_us)
        sizes = (self.header_bytes, self.body_bytes)
        if self.batch_format == FIRST_FORMAT:
            assert not self.ids_bytes, "format 1 has no packed ids"
            return _V1_FORM % (self.base_offset, self.rows, *times, *sizes, *crcs)
        return _V2_FORM % (self.base_offset, self.end_offset, self.rows, *times, self.ids_bytes, *sizes, *crcs)

    @property
    def columns_bytes(self) -> int:
        """Of the body, without the packed ids and what pads them."""
        return self.body_bytes - self.ids_bytes - -self.ids_bytes % ALIGNMENT


def blank_line(batch_format: int) -> bytes:
    """A line of all zeros."""
    return BatchHeader(0, 0, 0, 0, 0, 0, 0, blank_crcs(batch_format)).line()


def blank_crcs(batch_format: int) -> tuple[int, ...]:
    return (0, 0) if batch_format == FIRST_FORMAT else (0,) * CRCS


def line_start(header: Bytes) -> int:
    """Where the line begins in a header that has one."""
    found = _LINE.search(header)
    assert found is not None, "the batch line must be in the header that was just written"
    return found.start()


def line_spans(header: Bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where the numbers of a line of format 2 begin and end in a header that has one, and its CRCs."""
    found = _LINE.search(header)
    assert found is not None, "the header has a line"
    assert found[_V2_CRC] is not None, "the line is of format 2"
    numbers = [found.span(group + 1) for group in range(_V2_NUMBERS.start, _V2_NUMBERS.stop)]
    return numbers, [found.span(_V2_CRC), found.span(_V2_BODY_CRCS)]


def fill_line(
    header: bytearray | memoryview, start: int, described: BatchHeader, parts: Iterable[Iterable[Any]]
) -> BatchHeader:
    """Writes the line into a header that has room for it, and returns what it then states.

    Args:
        start: of the line in the header. described: what the line states, but for the CRCs.
        parts: the body: pieces of each column, then of the rest; in format 1 of all of it.
    """
    if described.batch_format == FIRST_FORMAT:
        line = described.line()
        header[start : start + len(line)] = line
        header_crc = crc32c(header)
        stated = replace(described, crcs=(header_crc, *_running_crcs(parts, header_crc)))
        header[start : start + len(line)] = stated.line()
        return stated
    body_crcs = _running_crcs(parts, 0)
    line = described.line((0, *body_crcs))
    header[start : start + len(line)] = line
    header_crc = crc32c(header)
    end = start + len(line)
    header[end - _V2_CRC_BYTES : end - _V2_CRC_BYTES + len(BLANK_CRC)] = b"%08x" % header_crc
    return replace(described, crcs=(header_crc, *body_crcs))


def _running_crcs(parts: Iterable[Iterable[Any]], crc: int) -> list[int]:
    crcs = []
    for part in parts:
        for piece in part:
            crc = crc32c(piece, crc, gil_release_mode=_KEEP_GIL)
        crcs.append(crc)
    return crcs


def find_batch_line(window: Bytes) -> BatchHeader | None:
    """The first batch line in these bytes, not validated; None if there is none."""
    found = _LINE.search(window)
    return _header_of(found) if found else None


def _header_of(found: re.Match[bytes]) -> BatchHeader:
    """As the line states it: without the run, and not validated."""
    if found[_V2_CRC] is None:
        base, rows, epoch, newest, header_bytes, body_bytes = (int(found[group]) for group in range(1, 7))
        both = tuple(int(found[group], 16) for group in _V1_CRCS)
        return BatchHeader(base, base + rows, rows, epoch, newest, header_bytes, body_bytes, both)
    base, end, rows, epoch, newest, ids_bytes, header_bytes, body_bytes = map(int, found.groups()[_V2_NUMBERS])
    digits = (found[_V2_CRC] + found[_V2_BODY_CRCS]).replace(b".", b"").decode()
    crcs = _CRC_WORDS.unpack(bytes.fromhex(digits))
    return BatchHeader(base, end, rows, epoch, newest, header_bytes, body_bytes, crcs, ids_bytes)


def proven_header(window: Bytes) -> BatchHeader | None:
    """The header these bytes begin with, if it is whole and its own CRC holds."""
    if len(window) < 8 or bytes(window[:4]) != CONTINUATION:
        return None
    header_bytes = 8 + int.from_bytes(window[4:8], "little")
    if not 8 < header_bytes <= min(len(window), MAX_HEADER_BYTES):
        return None
    found = _LINE.search(window, 0, header_bytes) if isinstance(window, bytes) else _LINE.search(window[:header_bytes])
    if found is None:
        return None
    header = _header_of(found)
    if header.header_bytes != header_bytes or _blank_crc(window, found, header_bytes) != header.header_crc:
        return None
    if header.ids_bytes not in (0, ID_BYTES * header.rows) or header.columns_bytes < 0:
        return None
    if header.end_offset < header.base_offset + header.rows:
        return None
    run = find_mark(window[:header_bytes])  # of proven bytes only: a damaged mark may state anything
    return header if run is None else replace(header, run=run)


def _blank_crc(window: Bytes, found: re.Match[bytes], header_bytes: int) -> int:
    view, at, crc = memoryview(window), 0, 0
    for group in _V1_CRCS if found[_V2_CRC] is None else (_V2_CRC,):
        crc = crc32c(BLANK_CRC, crc32c(view[at : found.start(group)], crc))
        at = found.end(group)
    return int(crc32c(view[at:header_bytes], crc))
