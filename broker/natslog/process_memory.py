"""What a broker's process does to keep its memory small. Linux with glibc; elsewhere most of it does nothing."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

logger = logging.getLogger("natslog")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def keep_memory_small() -> None:
    """Large buffers (sealing, answers) go back to the system when they are done with, instead of staying with whichever
    of many arenas had them: without this a broker at full load grows by some 100 MiB. Smaller ones do not, as those of
    frames between brokers: their pages would be mapped again for each commit.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    _keep_pandas_out()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every libc; then memory is only less tidy
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1024 * 1024)
        mallopt(_M_TRIM_THRESHOLD, 2 * 1024 * 1024)
        mallopt(_M_ARENA_MAX, 2)


class _WithoutPandas:
    """An import of pandas fails."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("a broker does not use pandas", name=name)


def _keep_pandas_out() -> None:
    """The first array that pyarrow makes of Python values has it import pandas, where that is installed, to recognise
    its types: 30 MiB, and half a second. pyarrow tries that once. That of an array of numpy has it import another part
    of numpy: better now than when a first client waits for an answer.
    """
    finder: Any = _WithoutPandas
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
        pa.array(np.zeros(1))
    finally:
        sys.meta_path.remove(finder)


def release_what_only_the_start_needed() -> None:
    """Returns free memory to the system, and unmaps the pages of libraries: a start reads far more of them than a
    running broker does. A page that is needed again is mapped again, from the file or from the system's cache of it.
    """
    gc.collect()
    gc.freeze()  # what is there now stays: collections need not look at it again
    process = ctypes.CDLL(None, use_errno=True)
    trim = getattr(process, "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        ranges = list(_unchanged_code())
    except OSError as error:
        logger.debug("the mappings of this process cannot be read: %s", error)
        return
    for start, end in ranges:
        process.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _unchanged_code() -> Iterator[tuple[int, int]]:
    """Start and end of mappings of code from files (readable, executable, never writable): none of their pages differs
    from the file, so unmapping them loses nothing.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, _, _, inode, *_ = line.split()
            if permissions == "r-xp" and inode != "0":
                start, _, end = addresses.partition("-")
                yield int(start, 16), int(end, 16)
