"""Runs every kernel twice: as compiled code, and as the Python function that it is made of, on copies of the arrays.
Python comes first, and raises an exception where the function leaves an array, which compiled code does not notice.

    python -m tests.compared_kernels tests/unit/wire    pytest, with kernels compared in its process
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from natslog.wire import native

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
            copies: dict[int, Any] = {}
            copied = [_copy(one, copies) for one in arguments]
            expected = slow(*copied)
            found = fast(*arguments)
            compared_calls += 1
            assert _numbers(found) == _numbers(expected), f"{kernel.name} returns {found} and not {expected}"
            for at, (one, other) in enumerate(zip(_arrays(arguments), _arrays(copied), strict=True)):
                assert one.tobytes() == other.tobytes(), f"{kernel.name} leaves array {at} different"
            return found

        return call

    native.Kernel._native = both  # type: ignore[method-assign]


def _copy(given: Any, copies: dict[int, Any]) -> Any:
    """Args: copies: by the identity of the array, so that one that is passed twice stays one."""
    if isinstance(given, tuple):
        members = [_copy(one, copies) for one in given]
        return type(given)(*members) if hasattr(given, "_fields") else tuple(members)
    if isinstance(given, np.ndarray):
        return copies.setdefault(id(given), given.copy())
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
