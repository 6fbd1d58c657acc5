"""When single messages expire: those with a time to live of their own, and tombstones.

Theory of operation. Offsets are kept in a few runs, each in the order of the milliseconds in which they expire. A run
is joined with the one before it unless that one is more than twice as long, so each offset is sorted a logarithmic
number of times, and what is due is the beginning of each run. The cost depends neither on the size of the stream nor on
the messages that expire later. Replicas note committed messages; the leader takes what is due by stream time and has it
recorded as removed, so that all replicas hide the same messages.

Source: JetStream's `Nats-TTL` (ADR-43 of NATS): a duration such as `1h30m`, or whole seconds, of at least a second;
`never` for messages that no age limit of the stream concerns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.schema import rows_of_items
from natslog.log.removed import Offsets
from natslog.model import TOMBSTONE_HEADER

__all__ = ["NEVER_S", "TOMBSTONE_HEADER", "TTL_HEADER", "Expiries", "header_values", "own_ttls_s", "ttl_s"]

TTL_HEADER = "Nats-TTL"
NEVER_S = 0.0
"""A message with this time to live does not expire."""

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_MOST_S = 2**53 / 1e6
_MS_US = 1000
_SECOND_MS = 1000


def ttl_s(text: str) -> float | None:
    """Seconds of the value of a header `Nats-TTL`; `NEVER_S`; None where it is not one."""
    if text.lower() == "never":
        return NEVER_S
    if text.isascii() and text.isdecimal():
        seconds = float(text)
    else:
        duration = text.removeprefix("+")
        parts = _PART.findall(duration)
        if not parts or "".join(number + unit for number, unit in parts) != duration:
            return None
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    return seconds if 1.0 <= seconds <= _MOST_S else None


def header_values(headers: pa.Array[Any], name: str) -> tuple[npt.NDArray[np.int64], pa.Array[Any]]:
    """The rows that have this header, and its first value in each."""
    if headers.null_count == len(headers):
        return np.empty(0, np.int64), pa.array([], pa.string())
    pairs = headers.flatten()
    found = np.flatnonzero(pc.equal(pairs.field("key"), name).to_numpy(zero_copy_only=False))
    if not len(found):
        return np.empty(0, np.int64), pa.array([], pa.string())
    rows, first = np.unique(rows_of_items(headers)[found], return_index=True)
    return rows, pairs.field("value").take(pa.array(found[first]))


def own_ttls_s(headers: pa.Array[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The rows with a time to live of their own, and how long in seconds. What is not one is passed over."""
    rows, values = header_values(headers, TTL_HEADER)
    if not len(rows):
        return rows, np.empty(0)
    distinct = values.dictionary_encode()
    by_text = np.array([np.nan if (one := ttl_s(text)) is None else one for text in distinct.dictionary.to_pylist()])
    seconds = by_text[distinct.indices.to_numpy()]
    known = ~np.isnan(seconds)
    return rows[known], seconds[known]


@dataclass(slots=True)
class _Run:
    """Offsets in the order of the milliseconds in which they expire; those below `taken` are gone."""

    at_ms: Offsets
    offsets: Offsets
    taken: int = 0

    def __len__(self) -> int:
        return len(self.at_ms) - self.taken


class Expiries:
    """See the module. Not thread-safe."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []  # each has more than twice as many offsets as the next one

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, offsets: Offsets, expire_us: npt.NDArray[np.int64]) -> None:
        """`expire_us`: the stream time at which each expires."""
        if len(offsets):
            self._add(-(-expire_us // _MS_US), offsets)

    def _add(self, at_ms: Offsets, offsets: Offsets) -> None:
        self._runs.append(_sorted(at_ms, offsets))
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs[-2:] = [_joined(self._runs[-2:])]

    def due(self, now_us: int) -> Offsets:
        """What has expired by this stream time; it is no longer here then."""
        found: list[Offsets] = [np.empty(0, np.int64)]
        for run in self._runs:
            end = int(np.searchsorted(run.at_ms, now_us // _MS_US, "right"))
            if end > run.taken:
                found.append(run.offsets[run.taken : end])
                run.taken = end
        if len(found) > 1:
            self._runs = [run for run in self._runs if len(run)]
        return np.sort(np.concatenate(found))

    def next_us(self) -> int | None:
        """When the next one expires; None if none does."""
        return min((int(run.at_ms[run.taken]) * _MS_US for run in self._runs), default=None)

    def copy(self) -> Expiries:
        """The arrays are the same: they are not changed."""
        made = Expiries()
        made._runs = [replace(run) for run in self._runs]
        return made

    def to_bytes(self) -> tuple[bytes, bytes]:
        """What natslog 0.2.0 reads: their number, and compressed the seconds and offsets in the order in which they
        expire, as differences. Then by how many milliseconds before each of these seconds, compressed.
        """
        whole = _joined(self._runs)
        count = len(whole)
        seconds = -(-whole.at_ms // _SECOND_MS)
        differences = np.diff(np.stack([seconds, whole.offsets]), prepend=0, axis=1).astype(np.int64)
        before_ms = (seconds * _SECOND_MS - whole.at_ms).astype(np.int16)
        packed = [_packed(differences), _packed(before_ms)] if count else [b"", b""]
        return count.to_bytes(8, "little") + packed[0], packed[1]

    @classmethod
    def from_bytes(cls, data: bytes, before_ms: bytes = b"") -> Expiries:
        """Raises ValueError: these are not such bytes."""
        made, count = cls(), int.from_bytes(data[:8], "little")
        if count:
            try:
                seconds, offsets = np.cumsum(_unpacked(data[8:], np.int64, 2 * count).reshape(2, count), axis=1)
                before = _unpacked(before_ms, np.int16, count) if before_ms else np.zeros(count, np.int16)
            except (OSError, MemoryError, OverflowError) as error:
                raise ValueError(f"the times at which messages expire cannot be read: {error}") from error
            made._add(seconds * _SECOND_MS - before, offsets)
        return made


def _packed(values: npt.NDArray[Any]) -> bytes:
    return bytes(pa.Codec("zstd", 1).compress(values.tobytes(), asbytes=True))


def _unpacked(data: bytes, kind: type[np.generic], count: int) -> npt.NDArray[Any]:
    size_bytes = count * np.dtype(kind).itemsize
    return np.frombuffer(pa.Codec("zstd").decompress(data, decompressed_size=size_bytes, asbytes=True), kind)


def _sorted(at_ms: Offsets, offsets: Offsets) -> _Run:
    order = np.argsort(at_ms, kind="stable")
    return _Run(at_ms[order], offsets[order])


def _joined(runs: list[_Run]) -> _Run:
    nothing = np.empty(0, np.int64)
    return _sorted(
        np.concatenate([nothing, *(run.at_ms[run.taken :] for run in runs)]),
        np.concatenate([nothing, *(run.offsets[run.taken :] for run in runs)]),
    )
