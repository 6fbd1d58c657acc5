"""What marks the functions of kernels. Here they stay Python: that is what runs where there is no compiled library
(`library`), and what tests compare it with. Compiled code checks no bounds: here, they are checked. The compiler gives
these names another meaning (`broker/kernels/compiling.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from crc32c import crc32c

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """A function of a kernel. Hashes wrap around in 64 bits, as they do compiled."""
    quiet: Function = np.errstate(over="ignore")(function)
    return quiet


inlined = compiled


def copy_bytes(source: Any, start: Any, length: Any, target: Any, at: Any) -> None:
    assert 0 <= start <= start + length <= len(source), "outside of the source"
    assert 0 <= at <= at + length <= len(target), "outside of the target"
    target[at : at + length] = source[start : start + length]


def move_bytes(buffer: Any, start: Any, length: Any, by: Any) -> None:
    assert 0 <= start <= start + length + by <= len(buffer), "outside of the buffer"
    buffer[start + by : start + by + length] = buffer[start : start + length].copy()


def long_at(buffer: Any, at: Any) -> int:
    """The 64-bit integer there, little-endian, aligned or not."""
    assert 0 <= at <= len(buffer) - 8, "outside of the buffer"
    return int.from_bytes(buffer[at : at + 8].tobytes(), "little", signed=True)


def offset_at(buffer: Any, at: Any) -> int:
    """The same, of 32 bits."""
    assert 0 <= at <= len(buffer) - 4, "outside of the buffer"
    return int.from_bytes(buffer[at : at + 4].tobytes(), "little", signed=True)


def crc_of(buffer: Any, start: Any, end: Any, crc: Any) -> int:
    """The CRC32C of the bytes, which continues `crc`."""
    assert 0 <= start <= end <= len(buffer), "outside of the buffer"
    return int(crc32c(buffer[start:end], int(crc)))
