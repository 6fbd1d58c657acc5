"""The function around each kernel that Python calls; see `build`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from natslog.wire.native import Array, Group, Kernel

_TYPE, _DATA, _DIMENSIONS, _SHAPE, _TYPE_OF_ITEMS, _FLAGS = 1, 2, 3, 4, 7, 8
"""Fields of an array object, as 64-bit words from its start (numpy: `PyArrayObject_fields`)."""
_FIELDS = 9
_ITEM_CODE = 3  # the upper half of this word of a `PyArray_Descr`: `type_num`; its third byte: `byteorder`
_BIG_ENDIAN = ord(">")
_LOW = 0xFFFFFFFF
_FAILED = 0  # for a Python exception, instead of an object's address
_C_CONTIGUOUS, _WRITEABLE = 0x1, 0x400


def _of_python(name: str, returned: Any, *arguments: Any) -> Any:
    """A function of Python's C API."""
    return types.ExternalFunction(name, returned(*arguments))


_bad_argument = _of_python("PyErr_BadArgument", types.int32)
_has_failed = _of_python("PyErr_Occurred", types.uintp)
_to_integer = _of_python("PyLong_AsLongLong", types.int64, types.uintp)
_from_integer = _of_python("PyLong_FromLongLong", types.uintp, types.int64)
_release_lock = _of_python("PyEval_SaveThread", types.uintp)
_take_lock = _of_python("PyEval_RestoreThread", types.void, types.uintp)


def _pointer_to(element: Any) -> Any:
    kind = types.CPointer(element)

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return kind(types.uintp), generate

    return pointer


_words = _pointer_to(types.int64)


@njit
def _is_other(address: Any, array_type: Any, item_code: Any, columns: Any, flags: Any) -> bool:
    """Whether the object is not an array of such items, one after another, of this shape (see `Array`)."""
    fields = carray(_words(address), _FIELDS)
    if np.uintp(fields[_TYPE]) != array_type:
        return True
    described = carray(_words(np.uintp(fields[_TYPE_OF_ITEMS])), _ITEM_CODE + 1)
    if (
        (fields[_DIMENSIONS] & _LOW) != (1 if columns == 0 else 2)
        or (fields[_FLAGS] & flags) != flags
        or (described[_ITEM_CODE] >> 32) != item_code
        or (described[_ITEM_CODE] >> 16) & 0xFF == _BIG_ENDIAN
    ):
        return True
    return bool(columns > 0 and carray(_words(np.uintp(fields[_SHAPE])), 2)[1] != columns)


def _array_maker(kind: Array) -> Any:
    """What makes numba's array of an array object."""
    pointer = _pointer_to(types.boolean if kind.kind == "bool" else getattr(types, kind.kind))

    @njit
    def one(address: Any) -> Any:
        fields = carray(_words(address), _FIELDS)
        shape = carray(_words(np.uintp(fields[_SHAPE])), 1)
        return carray(pointer(np.uintp(fields[_DATA])), (shape[0],))

    @njit
    def two(address: Any) -> Any:
        fields = carray(_words(address), _FIELDS)
        shape = carray(_words(np.uintp(fields[_SHAPE])), 2)
        return carray(pointer(np.uintp(fields[_DATA])), (shape[0], shape[1]))

    return one if kind.columns == 0 else two


_RESULTS = Array("int64").out
_maker_of = functools.cache(_array_maker)
_NAMES: dict[str, Any] = {
    "is_other": _is_other,
    "carray": carray,
    "words": _words,
    "uintp": np.uintp,
    "bad_argument": _bad_argument,
    "has_failed": _has_failed,
    "to_integer": _to_integer,
    "from_integer": _from_integer,
    "release_lock": _release_lock,
    "take_lock": _take_lock,
}


def around(kernel: Kernel) -> Any:
    """The function around a kernel, compiled."""
    names, source = _NAMES | {"kernel": kernel.python()}, _Source()
    taken = []
    for at, kind in enumerate(kernel.arguments):
        match kind:
            case Array():
                taken.append(source.array(kind, names))
            case Group(members=members, type=made):
                names[f"group{at}"] = made
                inner = "".join(f"{source.array(member, names)}, " for member in members)
                taken.append(f"({inner})" if made is None else f"group{at}({inner})")
            case _:
                taken.append(source.integer())
    results = source.array(_RESULTS, names) if kernel.results > 1 else ""
    source.lines += ["thread = release_lock()", f"done = kernel({', '.join(taken)})"]
    if results:
        source.lines.append(f"results = {results}")
        source.lines += [f"results[{at}] = done[{at}]" for at in range(kernel.results)]
    source.lines += ["take_lock(thread)", f"return from_integer({'done' if kernel.results == 1 else '0'})"]
    exec(source.text(kernel.name), names)  # numba compiles functions of a fixed number of arguments only
    signature = types.uintp(types.uintp, types.uintp, types.intp)
    return cfunc(signature)(names[f"call_{kernel.name}"])


class _Source:
    """Of such a function: each argument is checked in a line of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def array(self, kind: Array, names: dict[str, Any]) -> str:
        """The expression of the next argument, an array."""
        at = self._next()
        names[f"make{at}"] = _maker_of(kind)
        flags = _C_CONTIGUOUS | (_WRITEABLE if kind.is_written else 0)
        self.lines.append(f"if is_other(a{at}, array_type, {np.dtype(kind.kind).num}, {kind.columns}, {flags}):")
        self.lines += ["  bad_argument()", f"  return uintp({_FAILED})"]
        return f"make{at}(a{at})"

    def integer(self) -> str:
        at = self._next()
        self.lines += [f"i{at} = to_integer(a{at})", f"if i{at} == -1 and has_failed() != 0:"]
        self.lines.append(f"  return uintp({_FAILED})")
        return f"i{at}"

    def _next(self) -> int:
        at, self._count = self._count, self._count + 1
        self.lines.append(f"a{at} = uintp(addresses[{at}])")
        return at

    def text(self, name: str) -> str:
        begin = [
            f"if count != {self._count}:",
            "  bad_argument()",
            f"  return uintp({_FAILED})",
            f"addresses = carray(words(given), {self._count})",
        ]
        return "\n  ".join([f"def call_{name}(array_type, given, count):", *begin, *self.lines])
