"""The names of `natslog.wire.compiled`, for the compiler: while kernels are compiled, this module takes its place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

_OPTIONS = {"_nrt": False, "error_model": "numpy"}
"""No kernel creates an array, so nothing counts references to arrays: that takes two atomics for each array and call.
None raises an exception, so nothing looks whether a divisor is zero.
"""


def compiled(function: Any) -> Any:
    return njit(**_OPTIONS)(function)


def inlined(function: Any) -> Any:
    """For functions that are called per message."""
    return njit(**_OPTIONS, inline="always")(function)


_memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_memmove = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))


@inlined
def copy_bytes(source: Any, start: Any, length: Any, target: Any, at: Any) -> None:
    """Assigning a slice costs five times as much: 50 ns instead of 11 for 128 bytes."""
    target_address = np.uintp(target.ctypes.data) + np.uintp(at)
    _memcpy(target_address, np.uintp(source.ctypes.data) + np.uintp(start), np.uintp(length))


@inlined
def move_bytes(buffer: Any, start: Any, length: Any, by: Any) -> None:
    """Within a buffer, by some bytes towards its end; both places may overlap."""
    source_address = np.uintp(buffer.ctypes.data) + np.uintp(start)
    _memmove(source_address + np.uintp(by), source_address, np.uintp(length))
