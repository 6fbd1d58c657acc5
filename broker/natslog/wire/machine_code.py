"""Where compiled kernels are kept, and how they are loaded without the compiler.

Theory of operation. numba, with the Python objects of its compiler, takes some 100 MiB of memory, and none of it is
needed to run what it has compiled. So another process compiles all kernels into one object file (`native_build`), and
this one hands the file to llvmlite, which places it in memory and returns addresses. The name of the file states what
the code depends on: sources, versions, processor. A file of another name is never loaded.

Invariant: the file, and the folder it is in, can be changed by this user and root only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

import crc32c
import numpy as np

from natslog.log_events import event

logger = logging.getLogger("natslog.wire")

FILE_VARIABLE = "NATSLOG_KERNELS_FILE"
"""Names the file to load instead of the one in the cache; empty: none is loaded."""

_HERE = Path(__file__).parent
_SOURCES = (
    *(
        "compiled",
        "kernels",
        "kernels_acks",
        "kernels_deliveries",
        "kernels_direct",
        "kernels_envelopes",
        "kernels_hash",
        "kernels_ids",
        "kernels_newest",
        "kernels_out",
    ),
    *("layout", "newest_layout", "machine_code", "native", "native_build"),
)
_OBJECT_HEADER_BYTES = 16  # of every Python object, before an array's fields; not in special builds of Python
_lock = Lock()


@dataclass(frozen=True, slots=True)
class Library:
    """Kernels in memory; their code stays there as long as this object.

    Attributes:
        addresses: by the kernel's name.
    """

    addresses: Mapping[str, int]
    _engine: Any

    def function(self, name: str) -> Callable[..., Any]:
        """The kernel as a function of Python, as those of extension modules are. Both exist until the process ends."""
        method = _MethodDef(name.encode(), self.addresses[name], _METH_FASTCALL, None)
        _methods.append(method)
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
        made: Callable[..., Any] = make(ctypes.addressof(method), np.ndarray, None)
        return made


class _MethodDef(ctypes.Structure):
    """Python's `PyMethodDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METH_FASTCALL = 0x80
_methods: list[_MethodDef] = []


def have_numba() -> bool:
    """Whether it is installed; does not import it."""
    try:
        return importlib.util.find_spec("numba") is not None
    except ModuleNotFoundError:
        return False


def library() -> Library | None:
    """The kernels of this installation; None where they were not compiled yet, or cannot be used here."""
    path = found()
    if path is None:
        return None
    with _lock:
        return _loaded(path)


def found() -> Path | None:
    """The file that `library` loads; None where there is none."""
    if (named := os.environ.get(FILE_VARIABLE)) is not None:
        return Path(named) if named else None
    if not have_numba() or object.__basicsize__ != _OBJECT_HEADER_BYTES:
        return None
    return next((path for path in _places() if _is_private(path)), None)


def path_to_write() -> Path | None:
    """Where the file belongs on this machine; None where no folder can be written."""
    for path in _places():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(path.parent, os.W_OK) and _has_no_other_writer(path.parent):
            return path
    return None


def write(path: Path, symbols: Mapping[str, str], declared: list[str], code: bytes) -> None:
    """Args: `symbols`: by the kernel's name. `declared`: what the code may call. `code`: an object file."""
    head = json.dumps({"symbols": dict(symbols), "declared": declared}).encode()
    path.write_bytes(b"%08x" % crc32c.crc32c(head + b"\n" + code) + b"\n" + head + b"\n" + code)
    path.chmod(0o600)  # whatever the umask is: `_is_private`


def target_machine() -> Any:
    """llvmlite's view of this processor: what the code is compiled for, and loaded by."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = _processor()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True)


def _processor() -> tuple[str, str]:
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@functools.cache
def _file_name() -> str:
    digest = hashlib.sha256(repr(_processor()).encode())
    for package in ("numba", "llvmlite", "numpy"):
        digest.update(f"{package} {version(package)} ".encode())
    for source in _SOURCES:
        digest.update((_HERE / f"{source}.py").read_bytes())
    return f"natslog-kernels-{digest.hexdigest()[:24]}.o"


def _places() -> Iterator[Path]:
    """In the folders in which numba keeps compiled code: a given one, the one of the sources, or one of the user. Each
    has a folder of natslog's own in it, because other users may write to many of them.
    """
    if told := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(told) / "natslog" / _file_name()
    else:
        yield _HERE / "__pycache__" / "natslog" / _file_name()
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        yield Path(caches) / "natslog" / _file_name()


def _is_private(path: Path) -> bool:
    """Whether it exists, can be read, and cannot be changed by another user."""
    return os.access(path, os.R_OK) and _has_no_other_writer(path) and _has_no_other_writer(path.parent)


def _has_no_other_writer(path: Path) -> bool:
    try:
        state = path.stat()
    except OSError:
        return False
    return state.st_uid in (0, os.geteuid()) and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@functools.cache
def _loaded(path: Path) -> Library | None:
    import llvmlite.binding as llvm

    try:
        crc, _, proven = path.read_bytes().partition(b"\n")
    except OSError as error:
        logger.warning(
            "the compiled kernels in %s cannot be read (%s), so this process compiles them",
            path,
            error,
            extra=event("kernels.compiled_here", path=path),
        )
        return None
    if crc != b"%08x" % crc32c.crc32c(proven):
        logger.warning(
            "the compiled kernels in %s are damaged, so this process compiles them",
            path,
            extra=event("kernels.compiled_here", path=path),
        )
        if FILE_VARIABLE not in os.environ:  # the next start makes it again
            with contextlib.suppress(OSError):
                path.unlink()
        return None
    head, _, code = proven.partition(b"\n")
    described = json.loads(head)
    _resolve(described["declared"])
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    addresses = {name: engine.get_function_address(symbol) for name, symbol in described["symbols"].items()}
    return Library(addresses, engine)


def _resolve(declared: list[str]) -> None:
    """What the process does not have are numba's functions that report an exception of a kernel. No kernel raises one;
    a name without an address would end the process while the code is loaded.
    """
    import llvmlite.binding as llvm

    process = ctypes.CDLL(None)
    abort = ctypes.cast(process.abort, ctypes.c_void_p).value
    for name in declared:
        if not hasattr(process, name) and not llvm.address_of_symbol(name):
            llvm.add_symbol(name, abort)
