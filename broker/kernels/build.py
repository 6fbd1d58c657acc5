"""Compiles all kernels into a shared library.

    python broker/kernels/build.py [--machine x86_64|aarch64] [--folder FOLDER]

Does nothing if it is there already. Needs numba and ziglang, which it installs into a temporary folder where they
are missing. Nothing of the result depends on the machine that compiles.

Theory of operation. numba turns each kernel into instructions of LLVM, with a function around it that Python calls as
it calls any function of an extension module (`METH_FASTCALL`): it takes the array type and the addresses of the
arguments, compares them with what the kernel takes, releases the interpreter's lock, calls the kernel, and returns an
integer. All of it becomes one module, which LLVM optimises as a whole, and lld links. Where an array's fields are is
part of numpy's ABI, and the same since numpy 1.0; the functions of Python that are called are part of its stable ABI.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import types as python_types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FOLDER = HERE.parent / "natslog" / "wire" / "libraries"
DEPENDENCIES = ["numba==0.68.1", "ziglang==0.17.1", "numpy>=1.26"]
PROCESSORS = {"x86_64": ("x86-64-v2", ""), "aarch64": ("generic", "+crc")}
"""By machine: the least processors, as LLVM names them, and what they have beyond it."""
_CRC = {
    "x86_64": """
declare i64 @llvm.x86.sse42.crc32.64.64(i64, i64)
declare i32 @llvm.x86.sse42.crc32.32.8(i32, i8)
define i64 @natslog_crc_of_word(i64 %crc, i64 %word) alwaysinline {
  %new = call i64 @llvm.x86.sse42.crc32.64.64(i64 %crc, i64 %word)
  ret i64 %new
}
define i64 @natslog_crc_of_byte(i64 %crc, i8 %byte) alwaysinline {
  %short = trunc i64 %crc to i32
  %made = call i32 @llvm.x86.sse42.crc32.32.8(i32 %short, i8 %byte)
  %new = zext i32 %made to i64
  ret i64 %new
}""",
    "aarch64": """
declare i32 @llvm.aarch64.crc32cx(i32, i64)
declare i32 @llvm.aarch64.crc32cb(i32, i32)
define i64 @natslog_crc_of_word(i64 %crc, i64 %word) alwaysinline {
  %short = trunc i64 %crc to i32
  %made = call i32 @llvm.aarch64.crc32cx(i32 %short, i64 %word)
  %new = zext i32 %made to i64
  ret i64 %new
}
define i64 @natslog_crc_of_byte(i64 %crc, i8 %byte) alwaysinline {
  %short = trunc i64 %crc to i32
  %wide = zext i8 %byte to i32
  %made = call i32 @llvm.aarch64.crc32cb(i32 %short, i32 %wide)
  %new = zext i32 %made to i64
  ret i64 %new
}""",
}
"""CRC32C by instructions of the processor: what `compiling` calls."""
_STATED = "made_of"
_NO_OWNER = "define void @NRT_MemInfo_call_dtor(ptr %owner) { unreachable }"
"""Arrays are made of addresses here, so none has an owner that numba would release."""
_MAY_CALL = {
    "PyErr_BadArgument", "PyErr_Occurred", "PyEval_RestoreThread", "PyEval_SaveThread", "PyLong_AsLongLong",
    "PyLong_FromLongLong", "memcpy", "memmove", "memset", "bcmp", "memcmp",
}  # fmt: skip


def _sources() -> bytes:
    """The digest that is compared before the library is loaded."""
    wire = HERE.parent / "natslog" / "wire"
    digest = runpy.run_path(str(wire / "kernel_sources.py"))["digest"]
    found: bytes = digest(wire, ROOT / "connector" / "pyspark_natslog" / "payload")
    return found


def wanted(machine: str) -> str:
    """What the folder states when it is current."""
    digest = hashlib.sha256(repr(DEPENDENCIES).encode() + _sources())
    for source in sorted(HERE.glob("*.py")):
        digest.update(source.read_bytes())
    return f"{machine} {digest.hexdigest()}\n"


def folder_of(machine: str) -> Path:
    """Where the library for this machine is made; for another one, for a wheel only."""
    return FOLDER if machine == platform.machine() else ROOT / "build" / "kernels" / machine


def is_current(machine: str = platform.machine(), folder: Path = FOLDER) -> bool:
    """Whether the library is there, whole, and made of the present sources."""
    stated, library = folder / _STATED, folder / f"{machine}.so"
    if not (stated.is_file() and library.is_file()):
        return False
    return stated.read_text() == wanted(machine) + hashlib.sha256(library.read_bytes()).hexdigest()


def build(machine: str = platform.machine(), folder: Path = FOLDER) -> None:
    """Args: machine: one of `PROCESSORS`. Raises SystemExit: what compiles cannot be installed."""
    if any(importlib.util.find_spec(name) is None for name in ("numba", "ziglang")):
        _build_elsewhere(machine, folder)
        return
    stated, sources = wanted(machine), _sources()  # before: a source may be changed meanwhile
    text, entries = _module()
    made = _linked(_object(text, entries, machine)) + sources
    made += hashlib.sha256(made).digest()  # compared before it is loaded: a file that is cut off would end the process
    folder.mkdir(parents=True, exist_ok=True)
    library, new = folder / f"{machine}.so", folder / f"{machine}.so.{os.getpid()}"
    new.write_bytes(made)
    new.replace(library)  # a process that has loaded the former file keeps that one
    (folder / _STATED).write_text(stated + hashlib.sha256(made).hexdigest())
    for other in {*folder.iterdir()} - {library, folder / _STATED}:  # of builds that were killed, or of former names
        shutil.rmtree(other) if other.is_dir() else other.unlink(missing_ok=True)


def _build_elsewhere(machine: str, folder: Path) -> None:
    """By another process, with what compiles in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="natslog-kernels-") as place:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", place]
        again = [sys.executable, __file__, "--machine", machine, "--folder", str(folder), "--quiet"]
        for command in ([*pip, *DEPENDENCIES], again):
            if subprocess.run(command, env=os.environ | {"PYTHONPATH": place}, check=False).returncode:
                raise SystemExit(f"natslog: the kernels cannot be compiled: {' '.join(command)} failed")


# ---- from Python to instructions of LLVM ----


def _import_kernels() -> list[Any]:
    """All kernels, by numba. The packages of the connector are entered without their own modules, which need Spark."""
    from numba import config

    config.OPT = config._OptLevel("0")  # all of it is optimised at once, later
    sys.path[:0] = [str(HERE), str(ROOT / "broker"), str(ROOT / "connector")]
    importlib.import_module("natslog.wire")
    sys.modules["natslog.wire.compiled"] = importlib.import_module("compiling")
    for package in ("pyspark_natslog", "pyspark_natslog.payload"):
        sys.modules[package] = module = python_types.ModuleType(package)
        module.__path__ = [str(ROOT / "connector" / package.replace(".", "/"))]
    importlib.import_module("pyspark_natslog.payload.native")
    kernels: list[Any] = importlib.import_module("natslog.wire.native").KERNELS
    return kernels


def _module() -> tuple[str, dict[str, str]]:
    """(one module of all kernels, the symbol of each by the name of its function there)."""
    import llvmlite.binding as llvm

    kernels = _import_kernels()
    calls = importlib.import_module("calls")
    for name in ("natslog_crc_of_word", "natslog_crc_of_byte"):
        llvm.add_symbol(name, llvm.address_of_symbol("memcpy"))  # never called: numba requires an address
    whole, entries = llvm.parse_assembly(_NO_OWNER), {}
    for kernel in kernels:
        function = calls.around(kernel)
        entries[function.native_name] = kernel.symbol
        part = llvm.parse_assembly(function.inspect_llvm())
        whole.triple, whole.data_layout = part.triple, part.data_layout
        whole.link_in(part)
    return str(whole), entries


# ---- from there to a library ----


def _object(text: str, entries: dict[str, str], name: str) -> bytes:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple, options = f"{name}-unknown-linux-gnu", {"opt": 3, "reloc": "pic", "codemodel": "default"}
    processor, features = PROCESSORS[name]
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, features=features, **options)
    text = re.sub(r"(?m)^target triple = .*$", f'target triple = "{triple}"', text)
    text = re.sub(r"(?m)^target datalayout = .*$", f'target datalayout = "{machine.target_data}"', text)
    module = llvm.parse_assembly(text)
    target = f'target triple = "{triple}"\ntarget datalayout = "{machine.target_data}"'
    module.link_in(llvm.parse_assembly(target + _CRC[name]))
    for one in (*module.functions, *module.global_variables):
        if one.name in entries:
            one.name = entries[one.name]
        elif not one.is_declaration:
            one.linkage = "internal"
    tuning = llvm.PipelineTuningOptions(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = True
    tuning.loop_unrolling = tuning.loop_interleaving = True
    for _ in range(2):  # the first time leaves branches to exceptions, which the second finds to be unreachable
        passes = llvm.create_pass_builder(machine, tuning)
        passes.getModulePassManager().run(module, passes)
    called = {one.name for one in module.functions if one.is_declaration and not one.name.startswith("llvm.")}
    assert called <= _MAY_CALL, f"kernels call {sorted(called - _MAY_CALL)}"
    made: bytes = machine.emit_object(module)
    return made


def _linked(code: bytes) -> bytes:
    with tempfile.TemporaryDirectory(prefix="natslog-kernels-") as folder:
        given, made = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        given.write_bytes(code)
        linker = [sys.executable, "-m", "ziglang", "ld.lld", "-shared", "--gc-sections", "--strip-all"]
        subprocess.run([*linker, "-z", "noexecstack", "--build-id=none", "-o", str(made), str(given)], check=True)
        return made.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python broker/kernels/build.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--machine", default=platform.machine(), help=" or ".join(sorted(PROCESSORS)))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    if arguments.machine not in PROCESSORS:
        print(f"kernels are not compiled for {arguments.machine}: they run as Python, slowly")
    elif not is_current(arguments.machine, arguments.folder):
        if not arguments.quiet:
            print("compiling the kernels (one to two minutes)", flush=True)
        build(arguments.machine, arguments.folder)


if __name__ == "__main__":
    main()
