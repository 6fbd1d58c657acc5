"""The kernels, as everybody calls them: functions of the compiled library (`library`), or else what Python has.

Each is resolved at its first call. The results are the same.

Arrays are passed as they are. The library compares type, shape and layout with what is stated here (see `Array`), and
raises TypeError for others.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from natslog.wire import library, newest_layout
from natslog.wire.layout import FRAME_COLUMNS
from natslog.wire.stored_layout import BATCH_COLUMNS


class Array(NamedTuple):
    """An argument: a C-contiguous array.

    Attributes:
        columns: of its second dimension; 0: it has one dimension, `ANY`: any number.
        is_written: by the kernel, so it must be writeable.
    """

    kind: str
    columns: int = 0
    is_written: bool = False

    @property
    def out(self) -> Array:
        """The same, written."""
        return self._replace(is_written=True)


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

ANY = -1
INTEGER = _Integer()
BYTES, MARKS, LONGS, OFFSETS = Array("uint8"), Array("bool"), Array("int64"), Array("int32")
WORDS, REALS = Array("uint64"), Array("float64")
FRAMES, HASHES, PACKED = Array("int64", FRAME_COLUMNS), Array("uint64", 2), Array("uint8", 12)
ENTRIES, PLACES, SLOTS = Array("int64", newest_layout.FIELDS), Array("int64", 3), Array("int64", 4)
COLUMNS, MARK_COLUMNS = Array("int64", ANY), Array("bool", ANY)
"""Shapes: one row a frame; two words a hash; 12 bytes an id; see `newest_layout`; see `kernels_direct.kept_places`; one
column an item.
"""

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
_direct, _stored = "natslog.wire.kernels_direct", "natslog.wire.kernels_stored"
_plain, _scalars = "natslog.wire.kernels_plain", "natslog.wire.kernels_scalars"
_subjects = "natslog.wire.kernels_subjects"

scan_with = Kernel(_kernels, "scan_with", BYTES, INTEGER, INTEGER, FRAMES.out, Array("int64", 2).out, results=4)
survey = Kernel(_kernels, "survey", BYTES, FRAMES, results=7)
gather_messages = Kernel(_kernels, "gather_messages", BYTES, FRAMES, *[BYTES.out, OFFSETS.out] * 3, INTEGER)
gather = Kernel(_kernels, "gather", BYTES, LONGS, LONGS, BYTES.out, OFFSETS.out, INTEGER)
split_headers = Kernel(
    _kernels, "split_headers", BYTES, FRAMES, BYTES, BYTES, COLUMNS.out, LONGS.out, COLUMNS.out, COLUMNS.out, BYTES,
    PACKED.out, BYTES, COLUMNS.out, BYTES, MARKS.out, BYTES, MARKS.out, results=1,
)  # fmt: skip
mark_openings = Kernel(_envelopes, "mark_openings", BYTES, FRAMES, BYTES, MARKS.out, results=1)
open_messages = Kernel(_envelopes, "open_messages", BYTES, FRAMES.out, BYTES, BYTES, MARKS.out, results=1)
mark_high_bytes = Kernel(_kernels, "mark_high_bytes", BYTES, FRAMES, MARKS.out)
mark_not_plain = Kernel(_kernels, "mark_not_plain", BYTES, FRAMES, INTEGER, MARKS.out, results=1)
mark_header_prefix = Kernel(_kernels, "mark_header_prefix", BYTES, FRAMES, BYTES, MARKS.out)
mark_header_prefixes = Kernel(_kernels, "mark_header_prefixes", BYTES, FRAMES, BYTES, BYTES, BYTES, MARKS.out)
keep_replies = Kernel(_acks, "keep_replies", BYTES, FRAMES.out, BYTES, LONGS)
no_replies = Kernel(_acks, "no_replies", FRAMES.out)
replies_from_header = Kernel(_acks, "replies_from_header", BYTES, FRAMES.out, BYTES)
mark_reply_ends = Kernel(_acks, "mark_reply_ends", BYTES, FRAMES, BYTES, MARKS.out, results=1)
mark_deliveries = Kernel(_acks, "mark_deliveries", BYTES, FRAMES, MARKS.out, results=1)
mark_internal = Kernel(_acks, "mark_internal", BYTES, FRAMES, BYTES, LONGS, MARKS.out)
hash_ids = Kernel(_ids, "hash_ids", BYTES, LONGS, LONGS, HASHES.out)
find_ids = Kernel(_ids, "find_ids", HASHES, LONGS, LONGS, INTEGER, HASHES, LONGS.out)
mark_repeated = Kernel(_ids, "mark_repeated", HASHES, LONGS.out, LONGS.out, INTEGER, INTEGER)
insert_ids = Kernel(_ids, "insert_ids", HASHES.out, LONGS.out, LONGS.out, INTEGER, HASHES, LONGS, LONGS, results=1)
unpack_ids = Kernel(_ids, "unpack_ids", PACKED, BYTES, BYTES.out)
mix_texts = Kernel(_hash, "mix_texts", OFFSETS, BYTES, MARKS, WORDS.out, BYTES.out, HASHES.out)
mix_items = Kernel(_hash, "mix_items", LONGS, MARKS, HASHES, HASHES.out)
finish_hashes = Kernel(_hash, "finish_hashes", HASHES.out)
hashes_as_texts = Kernel(_hash, "hashes_as_texts", HASHES, BYTES, BYTES.out)
note_rows = Kernel(
    _newest, "note_rows", OFFSETS, BYTES, MARKS, LONGS, INTEGER, HASHES.out, ENTRIES.out, BYTES.out, LONGS.out,
    OFFSETS.out, LONGS.out, WORDS.out, BYTES.out, LONGS.out, results=1,
)  # fmt: skip
shorten_queues = Kernel(
    _newest, "shorten_queues", INTEGER, ENTRIES.out, LONGS, OFFSETS.out, LONGS.out, LONGS.out, results=1
)
make_queues = Kernel(_newest, "make_queues", ENTRIES.out, LONGS.out, OFFSETS.out, LONGS.out)
place_texts = Kernel(_newest, "place_texts", BYTES, ENTRIES, INTEGER, HASHES.out, WORDS.out, BYTES.out)
look_up_texts = Kernel(
    _newest, "look_up_texts", OFFSETS, BYTES, HASHES, ENTRIES, BYTES, WORDS.out, BYTES.out, LONGS.out
)
newest_of_texts = Kernel(
    _newest, "newest_of_texts", OFFSETS, BYTES, HASHES, ENTRIES, BYTES, WORDS.out, BYTES.out, LONGS.out
)
stored_acks = Kernel(
    _out, "stored_acks", *[BYTES, OFFSETS] * 2, LONGS, MARKS, MARKS, LONGS, *[BYTES] * 5, BYTES.out, results=1
)
publish_frames = Kernel(
    _out, "publish_frames", *[OFFSETS, BYTES] * 4, MARKS, BYTES, LONGS, INTEGER, BYTES.out, results=1
)  # fmt: skip
mark_unlike_a_line = Kernel(_out, "mark_unlike_a_line", OFFSETS, BYTES, MARKS.out)
mark_acks = Kernel(
    _out, "mark_acks", BYTES, FRAMES, INTEGER, BYTES, LONGS, INTEGER, INTEGER, MARK_COLUMNS.out, LONGS.out, LONGS,
    LONGS.out, results=6,
)  # fmt: skip
delivery_frames = Kernel(
    _deliveries, "delivery_frames", *[OFFSETS, BYTES] * 3, MARKS, OFFSETS, BYTES, LONGS, BYTES, BYTES, COLUMNS, INTEGER,
    BYTES.out, results=1,
)  # fmt: skip
lines_of_pairs = Kernel(
    _deliveries, "lines_of_pairs", OFFSETS, MARKS, *[OFFSETS, BYTES] * 2, OFFSETS.out, BYTES.out, results=1
)
parse_acks = Kernel(
    _deliveries, "parse_acks", BYTES, FRAMES, BYTES, Array("int64", 4).out, Array("int64", 3).out, results=1
)
find_rows = Kernel(_deliveries, "find_rows", LONGS, COLUMNS, MARKS, INTEGER, INTEGER, LONGS.out, results=2)
take_rows = Kernel(
    _deliveries, "take_rows", LONGS, COLUMNS, MARKS.out, MARKS.out, INTEGER, INTEGER, INTEGER, LONGS.out, results=2
)  # fmt: skip
group_rows = Kernel(_kernels, "group_rows", FRAMES.out, LONGS, results=1)
take_requests = Kernel(
    _direct, "take_requests", BYTES, FRAMES, INTEGER, INTEGER, LONGS.out, *[OFFSETS.out, BYTES.out] * 2, LONGS.out,
    results=2,
)  # fmt: skip
find_sorted = Kernel(_direct, "find_sorted", *[OFFSETS, BYTES] * 2, LONGS.out)
kept_places = Kernel(_direct, "kept_places", LONGS, SLOTS, PLACES.out, results=2)
keep_places = Kernel(_direct, "keep_places", LONGS, PLACES, SLOTS.out, results=1)
direct_answers = Kernel(
    _direct, "direct_answers", *[OFFSETS, BYTES] * 3, LONGS, LONGS, BYTES, BYTES.out, PLACES.out, results=1
)
answer_frames = Kernel(
    _direct, "answer_frames", OFFSETS, BYTES, LONGS, PLACES, BYTES, INTEGER, BYTES, BYTES, BYTES.out, results=1
)
_BATCHES, _SPANS = Array("int64", BATCH_COLUMNS), Array("int64", 2)
survey_batches = Kernel(
    _stored, "survey_batches", BYTES, INTEGER, INTEGER, BYTES, _SPANS, _SPANS, LONGS, BYTES, INTEGER, INTEGER,
    _BATCHES.out, LONGS.out, results=2,
)  # fmt: skip
gather_batches = Kernel(
    _stored, "gather_batches", BYTES, _BATCHES, LONGS, LONGS.out, LONGS.out, OFFSETS.out, BYTES.out, BYTES.out,
    OFFSETS.out, BYTES.out, BYTES.out, OFFSETS.out, OFFSETS.out, BYTES.out, BYTES.out, OFFSETS.out, BYTES.out,
    OFFSETS.out, BYTES.out,
)  # fmt: skip
gather_ids = Kernel(_stored, "gather_ids", BYTES, _BATCHES, PACKED.out)
survey_plain = Kernel(_plain, "survey_plain", BYTES, FRAMES, *[INTEGER] * 3, BYTES, LONGS, results=2)
encode_plain = Kernel(
    _plain, "encode_plain", BYTES, FRAMES, COLUMNS, LONGS, COLUMNS, MARKS, PACKED, BYTES, LONGS, *[INTEGER] * 3,
    LONGS.out, LONGS.out, BYTES.out, results=1,
)  # fmt: skip
count_subjects = Kernel(_subjects, "count_subjects", OFFSETS, OFFSETS, LONGS.out)
place_rows = Kernel(_subjects, "place_rows", OFFSETS, OFFSETS, LONGS, INTEGER, LONGS.out, LONGS.out)
parse_texts = Kernel(_scalars, "parse_texts", BYTES, OFFSETS, *[INTEGER] * 3, LONGS.out, MARKS.out)
plain_acks = Kernel(_plain, "plain_acks", BYTES, FRAMES, INTEGER, BYTES, BYTES, BYTES.out, results=1)

_WORDS_OF_A_LINE = (6, 2)


def scan(
    buffer: npt.NDArray[np.uint8], start: int, length: int, out: npt.NDArray[np.int64]
) -> tuple[int, int, int, bool]:
    """As `kernels.scan`."""
    words = np.empty(_WORDS_OF_A_LINE, np.int64)
    found: tuple[int, int, int, bool] = scan_with(buffer, start, length, out, words)
    return found
