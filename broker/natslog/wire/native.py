"""The kernels, as everybody calls them: functions of the compiled library (`library`), or else what Python has.

Each is resolved at its first call. The results are the same.

Arrays are passed as they are. The library compares type, dimensions and layout (C-contiguous) with what is stated here,
and raises TypeError for others.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from natslog.wire import library


class Array(NamedTuple):
    """An argument: a C-contiguous array."""

    kind: str
    dimensions: int = 1


class _Integer(NamedTuple):
    """An argument: an integer of at most 64 bits, with sign."""


class Group(NamedTuple):
    """An argument: a tuple of arrays.

    Attributes:
        type: of NamedTuple, that the kernel takes; None: a plain tuple.
    """

    members: tuple[Array, ...]
    type: Any = None


Argument: TypeAlias = Array | _Integer | Group

INTEGER = _Integer()
BYTES, MARKS, LONGS, OFFSETS = Array("uint8"), Array("bool"), Array("int64"), Array("int32")
WORDS, REALS = Array("uint64"), Array("float64")
ROWS, HASHES, PACKED, MARK_ROWS = Array("int64", 2), Array("uint64", 2), Array("uint8", 2), Array("bool", 2)

KERNELS: list[Kernel] = []


class Kernel:
    """A function `name` of `module`.

    Args:
        results: how many integers it returns: none (0 is returned, or None), one, or a sequence of several.

    Attributes:
        symbol: its name in the library, which depends on what it takes: one that takes something else is not found.
    """

    __slots__ = ("_call", "_is_native", "arguments", "module", "name", "results", "symbol")

    def __init__(self, module: str, name: str, *arguments: Argument, results: int = 0) -> None:
        self.module, self.name, self.arguments, self.results = module, name, arguments, results
        taken = [tuple(one.members) if isinstance(one, Group) else tuple(one) for one in arguments]
        self.symbol = f"{name}_{zlib.crc32(repr((taken, results)).encode()):08x}"
        self._call: Callable[..., Any] = self._resolve
        self._is_native = False
        KERNELS.append(self)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    @property
    def is_native(self) -> bool:
        """Whether it runs machine code of the library."""
        return self._is_native

    def python(self) -> Any:
        """The function in its module."""
        return getattr(importlib.import_module(self.module), self.name)

    def _resolve(self, *arguments: Any) -> Any:
        found = library.library()
        function = None if found is None else found.function(self.symbol)
        self._is_native = function is not None
        self._call = self._of_python() if function is None else self._native(function)
        if globals().get(self.name) is self:
            globals()[self.name] = self._call  # calls of `native.name` go there without the way through this object
        return self._call(*arguments)

    def _of_python(self) -> Callable[..., Any]:
        """Its results may be integers of numpy, which overflow: they become those of Python, as the library returns."""
        function, results = self.python(), self.results

        def of_python(*arguments: Any) -> Any:
            done = function(*arguments)
            return [int(one) for one in done] if results > 1 else int(done or 0)

        return of_python

    def _native(self, function: Callable[..., Any]) -> Callable[..., Any]:
        results = self.results
        if any(isinstance(kind, Group) for kind in self.arguments):
            return self._with_groups(function)
        if results < 2:
            return function

        def with_results(*arguments: Any) -> list[int]:
            several = np.empty(results, np.int64)
            function(*arguments, several)
            found: list[int] = several.tolist()
            return found

        return with_results

    def _with_groups(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The arrays of a tuple are arguments of their own."""
        assert self.results < 2, "no such kernel has several results"

        def with_groups(*arguments: Any) -> Any:
            flat: list[Any] = []
            for kind, given in zip(self.arguments, arguments, strict=True):
                flat += given if isinstance(kind, Group) else (given,)
            return function(*flat)

        return with_groups


_kernels, _acks = "natslog.wire.kernels", "natslog.wire.kernels_acks"
_ids, _out = "natslog.wire.kernels_ids", "natslog.wire.kernels_out"
_hash, _envelopes = "natslog.wire.kernels_hash", "natslog.wire.kernels_envelopes"
_newest, _deliveries = "natslog.wire.kernels_newest", "natslog.wire.kernels_deliveries"
_direct = "natslog.wire.kernels_direct"

scan_with = Kernel(_kernels, "scan_with", BYTES, INTEGER, INTEGER, ROWS, ROWS, results=4)
survey = Kernel(_kernels, "survey", BYTES, ROWS, results=7)
gather_messages = Kernel(
    _kernels, "gather_messages", BYTES, ROWS, BYTES, OFFSETS, BYTES, OFFSETS, BYTES, OFFSETS, INTEGER
)
gather = Kernel(_kernels, "gather", BYTES, LONGS, LONGS, BYTES, OFFSETS, INTEGER)
split_headers = Kernel(
    _kernels, "split_headers", BYTES, ROWS, BYTES, BYTES, ROWS, LONGS, ROWS, ROWS, BYTES, PACKED, BYTES, ROWS, BYTES,
    MARKS, BYTES, MARKS, results=1,
)  # fmt: skip
mark_openings = Kernel(_envelopes, "mark_openings", BYTES, ROWS, BYTES, MARKS, results=1)
open_messages = Kernel(_envelopes, "open_messages", BYTES, ROWS, BYTES, BYTES, MARKS, results=1)
mark_high_bytes = Kernel(_kernels, "mark_high_bytes", BYTES, ROWS, MARKS)
mark_not_plain = Kernel(_kernels, "mark_not_plain", BYTES, ROWS, INTEGER, MARKS, results=1)
mark_header_prefix = Kernel(_kernels, "mark_header_prefix", BYTES, ROWS, BYTES, MARKS)
mark_header_prefixes = Kernel(_kernels, "mark_header_prefixes", BYTES, ROWS, BYTES, BYTES, BYTES, MARKS)
keep_replies = Kernel(_acks, "keep_replies", BYTES, ROWS, BYTES, LONGS)
no_replies = Kernel(_acks, "no_replies", ROWS)
replies_from_header = Kernel(_acks, "replies_from_header", BYTES, ROWS, BYTES)
mark_deliveries = Kernel(_acks, "mark_deliveries", BYTES, ROWS, MARKS, results=1)
mark_internal = Kernel(_acks, "mark_internal", BYTES, ROWS, BYTES, LONGS, MARKS)
hash_ids = Kernel(_ids, "hash_ids", BYTES, LONGS, LONGS, HASHES)
find_ids = Kernel(_ids, "find_ids", HASHES, LONGS, LONGS, INTEGER, HASHES, LONGS)
mark_repeated = Kernel(_ids, "mark_repeated", HASHES, LONGS, LONGS, INTEGER, INTEGER)
insert_ids = Kernel(_ids, "insert_ids", HASHES, LONGS, LONGS, INTEGER, HASHES, LONGS, LONGS, results=1)
unpack_ids = Kernel(_ids, "unpack_ids", PACKED, BYTES, BYTES)
mix_texts = Kernel(_hash, "mix_texts", OFFSETS, BYTES, MARKS, WORDS, BYTES, HASHES)
mix_items = Kernel(_hash, "mix_items", LONGS, MARKS, HASHES, HASHES)
finish_hashes = Kernel(_hash, "finish_hashes", HASHES)
hashes_as_texts = Kernel(_hash, "hashes_as_texts", HASHES, BYTES, BYTES)
note_rows = Kernel(
    _newest, "note_rows", OFFSETS, BYTES, MARKS, LONGS, INTEGER, HASHES, ROWS, BYTES, LONGS, OFFSETS, LONGS, WORDS,
    BYTES, LONGS, results=1,
)  # fmt: skip
shorten_queues = Kernel(_newest, "shorten_queues", INTEGER, ROWS, LONGS, OFFSETS, LONGS, LONGS, results=1)
make_queues = Kernel(_newest, "make_queues", ROWS, LONGS, OFFSETS, LONGS)
place_texts = Kernel(_newest, "place_texts", BYTES, ROWS, INTEGER, HASHES, WORDS, BYTES)
look_up_texts = Kernel(_newest, "look_up_texts", OFFSETS, BYTES, HASHES, ROWS, BYTES, WORDS, BYTES, LONGS)
newest_of_texts = Kernel(_newest, "newest_of_texts", OFFSETS, BYTES, HASHES, ROWS, BYTES, WORDS, BYTES, LONGS)
stored_acks = Kernel(_out, "stored_acks", *[BYTES, OFFSETS] * 2, LONGS, MARKS, MARKS, LONGS, *[BYTES] * 6, results=1)
publish_frames = Kernel(
    _out, "publish_frames", *[OFFSETS, BYTES] * 4, MARKS, BYTES, LONGS, INTEGER, BYTES, results=1
)  # fmt: skip
mark_unlike_a_line = Kernel(_out, "mark_unlike_a_line", OFFSETS, BYTES, MARKS)
mark_acks = Kernel(
    _out, "mark_acks", BYTES, ROWS, INTEGER, BYTES, LONGS, INTEGER, INTEGER, MARK_ROWS, LONGS, LONGS, LONGS, results=6
)  # fmt: skip
delivery_frames = Kernel(
    _deliveries, "delivery_frames", *[OFFSETS, BYTES] * 3, MARKS, OFFSETS, BYTES, LONGS, BYTES, BYTES, ROWS, INTEGER,
    BYTES, results=1,
)  # fmt: skip
parse_acks = Kernel(_deliveries, "parse_acks", BYTES, ROWS, BYTES, ROWS, ROWS, results=1)
find_rows = Kernel(_deliveries, "find_rows", LONGS, ROWS, MARKS, INTEGER, INTEGER, LONGS, results=2)
take_rows = Kernel(
    _deliveries, "take_rows", LONGS, ROWS, MARKS, MARKS, INTEGER, INTEGER, INTEGER, LONGS, results=2
)  # fmt: skip
group_rows = Kernel(_kernels, "group_rows", ROWS, LONGS, results=1)
take_requests = Kernel(
    _direct, "take_requests", BYTES, ROWS, INTEGER, INTEGER, LONGS, *[OFFSETS, BYTES] * 2, LONGS, results=2
)
find_sorted = Kernel(_direct, "find_sorted", *[OFFSETS, BYTES] * 2, LONGS)
kept_places = Kernel(_direct, "kept_places", LONGS, ROWS, ROWS, results=2)
keep_places = Kernel(_direct, "keep_places", LONGS, ROWS, ROWS, results=1)
direct_answers = Kernel(_direct, "direct_answers", *[OFFSETS, BYTES] * 3, LONGS, LONGS, BYTES, BYTES, ROWS, results=1)
answer_frames = Kernel(_direct, "answer_frames", OFFSETS, BYTES, LONGS, ROWS, BYTES, INTEGER, *[BYTES] * 3, results=1)

_WORDS_OF_A_LINE = (6, 2)


def scan(
    buffer: npt.NDArray[np.uint8], start: int, length: int, out: npt.NDArray[np.int64]
) -> tuple[int, int, int, bool]:
    """As `kernels.scan`."""
    words = np.empty(_WORDS_OF_A_LINE, np.int64)
    found: tuple[int, int, int, bool] = scan_with(buffer, start, length, out, words)
    return found
