"""Compiles all kernels into one file, which `machine_code` loads: `python -m natslog.wire.native_build FILE`.

Each kernel gets a C function around it (numba's `cfunc`) that Python calls as it calls any function of an extension
module (`METH_FASTCALL`): it takes the array type and the addresses of the arguments, compares them with what the kernel
takes, releases the interpreter's lock, calls the kernel, and returns an integer. Where an array's fields are is part of
numpy's ABI, and the same since numpy 1.0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from natslog.wire import machine_code, native
from natslog.wire.native import Array, Kernel

_TYPE, _DATA, _DIMENSIONS, _SHAPE, _TYPE_OF_ITEMS, _FLAGS = 1, 2, 3, 4, 7, 8
"""Fields of an array object, as 64-bit words from its start (numpy: `PyArrayObject_fields`)."""
_FIELDS = 9
_ITEM_CODE = 3  # the upper half of this word of a `PyArray_Descr`: `type_num`
_LOW = 0xFFFFFFFF
_FAILED = 0  # for a Python exception, instead of an object's address
_C_CONTIGUOUS = 1


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


@njit  # type: ignore[untyped-decorator]
def _is_other(address: Any, array_type: Any, dimensions: Any, item_code: Any) -> bool:
    """Whether the object is not an array of so many dimensions of such items, one after another."""
    fields = carray(_words(address), _FIELDS)
    if np.uintp(fields[_TYPE]) != array_type:
        return True
    described = carray(_words(np.uintp(fields[_TYPE_OF_ITEMS])), _ITEM_CODE + 1)
    return bool(
        (fields[_DIMENSIONS] & _LOW) != dimensions
        or (fields[_FLAGS] & _C_CONTIGUOUS) == 0
        or (described[_ITEM_CODE] >> 32) != item_code
    )


def _array_maker(kind: Array) -> Any:
    """What makes numba's array of an array object."""
    pointer = _pointer_to(types.boolean if kind.kind == "bool" else getattr(types, kind.kind))

    @njit  # type: ignore[untyped-decorator]
    def one(address: Any) -> Any:
        fields = carray(_words(address), _FIELDS)
        shape = carray(_words(np.uintp(fields[_SHAPE])), 1)
        return carray(pointer(np.uintp(fields[_DATA])), (shape[0],))

    @njit  # type: ignore[untyped-decorator]
    def two(address: Any) -> Any:
        fields = carray(_words(address), _FIELDS)
        shape = carray(_words(np.uintp(fields[_SHAPE])), 2)
        return carray(pointer(np.uintp(fields[_DATA])), (shape[0], shape[1]))

    return one if kind.dimensions == 1 else two


_RESULTS = Array("int64")
_makers = {
    kind: _array_maker(kind) for kernel in native.KERNELS for kind in kernel.arguments if isinstance(kind, Array)
}
_makers.setdefault(_RESULTS, _array_maker(_RESULTS))


def _source(kernel: Kernel) -> str:
    """Of the function around a kernel; `make<i>` makes the array of argument i."""
    arguments = [*kernel.arguments, *([_RESULTS] if kernel.results > 1 else [])]
    lines = [
        f"def call_{kernel.name}(array_type, given, count):",
        f"  if count != {len(arguments)}:",
        "    bad_argument()",
        f"    return uintp({_FAILED})",
        f"  addresses = carray(words(given), {len(arguments)})",
    ]
    for at, kind in enumerate(arguments):
        lines.append(f"  a{at} = uintp(addresses[{at}])")
        if isinstance(kind, Array):
            lines.append(f"  if is_other(a{at}, array_type, {kind.dimensions}, {np.dtype(kind.kind).num}):")
            lines += ["    bad_argument()", f"    return uintp({_FAILED})"]
        else:
            lines += [f"  i{at} = to_integer(a{at})", f"  if i{at} == -1 and has_failed() != 0:"]
            lines.append(f"    return uintp({_FAILED})")
    given = [f"make{at}(a{at})" if isinstance(kind, Array) else f"i{at}" for at, kind in enumerate(arguments)]
    taken = ", ".join(given[: len(kernel.arguments)])
    lines += ["  thread = release_lock()", f"  done = kernel({taken})"]
    if kernel.results > 1:
        lines.append(f"  results = {given[-1]}")
        lines += [f"  results[{at}] = done[{at}]" for at in range(kernel.results)]
    lines += ["  take_lock(thread)", f"  return from_integer({'done' if kernel.results == 1 else '0'})"]
    return "\n".join(lines)


def _compiled(kernel: Kernel) -> Any:
    arguments = [*kernel.arguments, *([_RESULTS] if kernel.results > 1 else [])]
    names: dict[str, Any] = {
        "is_other": _is_other,
        "kernel": kernel.python(),
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
    names |= {f"make{at}": _makers[kind] for at, kind in enumerate(arguments) if isinstance(kind, Array)}
    exec(_source(kernel), names)  # numba compiles functions of a fixed number of arguments only
    return cfunc(types.uintp(types.uintp, types.uintp, types.intp))(names[f"call_{kernel.name}"])


def build(path: Path) -> None:
    """Writes the file."""
    whole, symbols = llvm.parse_assembly(""), {}
    for kernel in native.KERNELS:
        function = _compiled(kernel)
        symbols[kernel.name] = function.native_name
        part = llvm.parse_assembly(function.inspect_llvm())
        whole.triple, whole.data_layout = part.triple, part.data_layout
        whole.link_in(part)
    declared = [each.name for each in whole.functions if each.is_declaration and not each.name.startswith("llvm.")]
    machine_code.write(path, symbols, declared, machine_code.target_machine().emit_object(whole))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
