"""The library of compiled kernels: whether this processor runs it, and how its functions become functions of Python.

Theory of operation. The kernels are compiled when natslog is built (`broker/kernels/build.py`). The library is loaded
like any other, and contains plain functions, which take the addresses of Python's objects (`METH_FASTCALL`). Python
itself makes functions of them. A library that is damaged, or was compiled from other sources, is not loaded: all
kernels run as Python then.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from natslog.wire import kernel_sources

FILE_VARIABLE = "NATSLOG_KERNELS_FILE"
"""Names the file to load; empty: none is loaded."""

FOLDER = Path(__file__).parent / "libraries"
_NEEDED = {
    "x86_64": frozenset(["cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"]),
    "aarch64": frozenset(["crc32"]),
}
"""By machine: the flags of a processor that the library needs (of x86-64-v2; of ARMv8.1)."""
_FLAGS = ("flags", "features")  # of x86_64, of aarch64
_OBJECT_HEADER_BYTES = 16  # of every Python object, before an array's fields; not in special builds of Python
_METH_FASTCALL = 0x80
_DIGEST_BYTES = 32


class _MethodDef(ctypes.Structure):
    """Python's `PyMethodDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class Library:
    """Args: path: the file. Raises OSError: it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._functions = ctypes.CDLL(str(path))

    def function(self, symbol: str) -> Callable[..., Any] | None:
        """A function of Python. None: there is none of that name."""
        try:
            address = ctypes.cast(self._functions[symbol], ctypes.c_void_p).value
        except AttributeError:
            return None
        method = _MethodDef(symbol.encode(), address, _METH_FASTCALL, None)
        _METHODS.append(method)  # a function refers to it without owning it
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
        made: Callable[..., Any] = make(ctypes.addressof(method), np.ndarray, None)
        return made


_METHODS: list[_MethodDef] = []
_LOADING = threading.Lock()


def library() -> Library | None:
    """The library of this installation; None where there is none for this machine (`reason`)."""
    with _LOADING:
        return _loaded()[0]


def reason() -> str | None:
    """Why there is none."""
    with _LOADING:
        return _loaded()[1]


@functools.cache
def _loaded() -> tuple[Library | None, str | None]:
    named = os.environ.get(FILE_VARIABLE)
    if named == "":
        return None, f"{FILE_VARIABLE} is empty"
    if object.__basicsize__ != _OBJECT_HEADER_BYTES:
        return None, "this build of Python has other objects than usual (it has no global lock, or is a debug build)"
    path = Path(named).absolute() if named else FOLDER / f"{platform.machine()}.so"
    try:
        if not named and not has_file():
            return None, f"this installation has none for this processor ({platform.machine()})"
        content = path.read_bytes()
        if not _is_whole(content):
            return None, f"{path} is damaged, or no library of kernels"
        if content[-2 * _DIGEST_BYTES : -_DIGEST_BYTES] != _sources():
            return None, f"{path} was compiled from other sources than those here: run `make kernels`"
        return Library(path), None
    except OSError as error:
        return None, f"{path} cannot be loaded: {error}"


def _is_whole(content: bytes) -> bool:
    """Its end is the SHA-256 of the rest: to load a file that is cut off would end the process."""
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _sources() -> bytes:
    """The digest of the sources of all kernels. Raises OSError."""
    connector = importlib.util.find_spec("pyspark_natslog")
    folders = connector.submodule_search_locations if connector is not None else None
    payload = Path(folders[0] if folders else "pyspark_natslog", "payload")
    return kernel_sources.digest(Path(__file__).parent, payload)


def has_file() -> bool:
    """Whether there is a library that this processor can run."""
    machine = platform.machine()
    return (FOLDER / f"{machine}.so").is_file() and _NEEDED.get(machine, frozenset()) <= _flags()


def _flags() -> set[str]:
    """Of the processor, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.lower().startswith(_FLAGS)), "").partition(":")[2].split())
