"""Runs every kernel twice: as compiled code, and as the Python function that it is made of, on copies of the arrays.
Python comes first, and raises an exception where the function leaves an array, which compiled code does not notice.
Calls with more than `MOST_BYTES` of arrays, for which Python takes long, are as usual.

    python -m tests.compared_kernels tests/unit/wire    pytest, with kernels compared in its process
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from natslog.wire import native
from natslog.wire.native import Array, Group

MOST_BYTES = 256 * 1024
compared_calls = 0


def compare_kernels() -> None:
    """From now on, in this process, for kernels that were not called before. A call raises AssertionError where the
    results, or the arrays afterwards, differ.
    """
    compiled = native.Kernel._native

    def both(kernel: native.Kernel, function: Callable[..., Any]) -> Callable[..., Any]:
        fast, slow = compiled(kernel, function), kernel.python()

        def call(*arguments: Any) -> Any:
            global compared_calls
            if sum(one.nbytes for one in _arrays(arguments)) > MOST_BYTES:
                return fast(*arguments)
            copies: dict[tuple[int, int], Any] = {}
            copied = [_copy(one, copies) for one in arguments]
            kinds = [one for kind in kernel.arguments for one in (kind.members if isinstance(kind, Group) else [kind])]
            kinds = [kind for kind in kinds if isinstance(kind, Array)]
            for kind, one in zip(kinds, _arrays(copied), strict=True):
                one.flags.writeable = kind.is_written  # a kernel that writes into another array raises ValueError
            expected = slow(*copied)
            found = fast(*arguments)
            compared_calls += 1
            assert _numbers(found) == _numbers(expected), f"{kernel.name} returns {found} and not {expected}"
            for at, (one, other) in enumerate(zip(_arrays(arguments), _arrays(copied), strict=True)):
                assert one.tobytes() == other.tobytes(), f"{kernel.name} leaves array {at} different"
            return found

        return call

    native.Kernel._native = both  # type: ignore[method-assign]


def _copy(given: Any, copies: dict[tuple[int, int], Any]) -> Any:
    """Args: copies: by the place of the bytes, so that two arrays of the same ones stay so."""
    if isinstance(given, tuple):
        members = [_copy(one, copies) for one in given]
        return type(given)(*members) if hasattr(given, "_fields") else tuple(members)
    if isinstance(given, np.ndarray):
        if not given.size:
            return given.copy()
        place = given.__array_interface__["data"][0], given.nbytes
        copied = copies.setdefault(place, given.copy())
        return copied.view(given.dtype).reshape(given.shape)
    return given


def _arrays(arguments: Sequence[Any]) -> Iterator[Any]:
    for one in arguments:
        if isinstance(one, tuple):
            yield from _arrays(one)
        elif isinstance(one, np.ndarray):
            yield one


def _numbers(result: Any) -> list[int]:
    if result is None:
        return [0]
    return [int(one) for one in result] if isinstance(result, tuple | list) else [int(result)]


def main() -> int:
    compare_kernels()
    code = pytest.main(sys.argv[1:])
    print(f"{compared_calls} calls of kernels were compared")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
