"""The library of compiled kernels: all are in it, the results are those of Python, and what it was not compiled for is
refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from natslog.wire import library, native

ROOT = Path(__file__).parents[3]


def test_library_has_all_kernels() -> None:
    importlib.import_module("pyspark_natslog.payload.native")
    found = library.library()
    assert found is not None, library.reason()
    assert [kernel.name for kernel in native.KERNELS if found.function(kernel.symbol) is None] == []


def test_kernels_are_where_the_build_looks_for_them() -> None:
    """A module elsewhere would be left out of the library, and run as Python without a word."""
    folders = {ROOT / "broker" / "natslog" / "wire", ROOT / "connector" / "pyspark_natslog" / "payload"}
    sources = [path for place in ("broker/natslog", "connector") for path in (ROOT / place).rglob("*.py")]
    found = [one for one in sources if re.search(r"(?m)^@compiled\b|^\w+ = Kernel\(", one.read_text())]
    assert len(found) > 15
    assert {one.parent for one in found} == folders
    assert [one.name for one in found if not re.fullmatch(r"kernels.*|native|.*layout", one.stem)] == []


def run(**environment: str) -> list[Any]:
    """How many kernels of the library were used, and what came of it."""
    command = [sys.executable, "-m", "tests.unit.wire.whole_way"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_columns_acks_hashes_and_duplicates_are_the_same_by_both() -> None:
    (of_python, plain) = run(NATSLOG_KERNELS_FILE="")
    assert of_python == 0
    used, compiled = run()
    assert used > 40
    assert compiled == plain
    assert plain[0] == [53, 1, 1, 1], "kept, not text, not plain, expecting; internal ones are left out"


_V2 = {"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"}


@pytest.mark.parametrize(
    ("machine", "flags", "found"),
    [
        ("x86_64", _V2 | {"avx", "avx2"}, True),
        ("x86_64", _V2 - {"sse4_2"}, False),
        ("x86_64", set(), False),
        ("aarch64", {"fp", "asimd", "crc32"}, True),
        ("aarch64", {"fp", "asimd"}, False),
        ("riscv64", set(), False),
    ],
)
def test_library_is_loaded_where_the_processor_can_run_it(
    machine: str, flags: set[str], found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x86_64", "aarch64"):
        (tmp_path / f"{name}.so").touch()
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "_flags", lambda: flags)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert library.has_file() is found


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _with_zeros(content: bytes) -> bytes:
    return content[:4096] + bytes(len(content) - 4096)


@pytest.mark.parametrize("damage", [_cut, _with_zeros, lambda _: b"no library", lambda _: b""])
def test_library_that_is_damaged_is_not_loaded(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """To load one that was cut off, by a full disk for example, ended the process (SIGBUS)."""
    damaged = tmp_path / "kernels.so"
    damaged.write_bytes(damage((library.FOLDER / f"{platform.machine()}.so").read_bytes()))
    program = "from natslog.wire import library; print(library.library(), library.reason())"
    environment = os.environ | {"NATSLOG_KERNELS_FILE": str(damaged)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert done.stdout == f"None {damaged} is damaged, or no library of kernels\n"


def test_library_of_other_sources_is_not_loaded(tmp_path: Path) -> None:
    """As after `git pull` without `make`: kernels of both versions would work on the same arrays."""
    content = (library.FOLDER / f"{platform.machine()}.so").read_bytes()[:-64] + bytes(32)
    other = tmp_path / "kernels.so"
    other.write_bytes(content + hashlib.sha256(content).digest())
    program = "from natslog.wire import library; print(library.library(), library.reason())"
    environment = os.environ | {"NATSLOG_KERNELS_FILE": str(other)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert done.stdout == f"None {other} was compiled from other sources than those here: run `make kernels`\n"


def test_function_of_a_library_that_nobody_keeps_can_be_called() -> None:
    """Two threads that make their first calls at once may load two libraries, of which one is kept: a test process
    ended with a segmentation fault.
    """
    program = """
import gc
from pathlib import Path
import numpy as np
from natslog.wire import library, native
path = library.library().path
functions = [library.Library(path).function(native.mark_deliveries.symbol) for _ in range(50)]
gc.collect()
others = [bytes(number % 256 for number in range(size)) for size in range(16, 128) for _ in range(200)]
marks = np.ones(0, np.bool_)
print(sum(function(np.zeros(4, np.uint8), np.zeros((0, 10), np.int64), marks) for function in functions))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_library_that_was_deleted_or_cut_off_is_made_again(tmp_path: Path) -> None:
    spec = spec_from_file_location("build_kernels", ROOT / "broker" / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = module_from_spec(spec)
    spec.loader.exec_module(build)
    machine = platform.machine()
    shutil.copytree(library.FOLDER, tmp_path / "libraries")
    assert build.is_current(machine, tmp_path / "libraries")
    path = tmp_path / "libraries" / f"{machine}.so"
    path.write_bytes(_cut(path.read_bytes()))
    assert not build.is_current(machine, tmp_path / "libraries")
    path.unlink()
    assert not build.is_current(machine, tmp_path / "libraries")


def test_python_returns_plain_integers_as_the_library_does() -> None:
    """A broker without the library ended at the second growth of a table: its count had become an integer of numpy."""
    program = """
import numpy as np
from natslog.ingest.dedupe import DedupeWindow
from natslog.wire import native
window, offset = DedupeWindow(60.0), 0
for count in (10, 100, 5000):
    ids = np.arange(offset * 2, (offset + count) * 2, dtype=np.uint64).reshape(-1, 2) + np.uint64(1)
    window.remember(ids, np.arange(offset, offset + count), 1_000_000)
    offset += count
rows, words = np.zeros((4, 10), np.int64), np.zeros((6, 2), np.int64)
one = native.find_rows(np.arange(4), rows, np.ones(4, np.bool_), 0, 4, np.zeros(4, np.int64))
several = native.scan_with(np.frombuffer(b"PING\\r\\n", np.uint8), 0, 6, rows, words)
print({type(each).__name__ for each in (*one, *several)})
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NATSLOG_KERNELS_FILE": ""},
        timeout=60,
    )
    assert done.stdout == "{'int'}\n", done.stderr


def test_kernel_that_takes_something_else_is_not_found() -> None:
    other = native.Kernel("natslog.wire.kernels", "survey", native.BYTES, native.LONGS, results=7)
    native.KERNELS.remove(other)
    found = library.library()
    assert found is not None
    assert found.function(other.symbol) is None


_DIFFERENT = """
import numpy as np
from natslog.wire import kernels_acks, native
from tests.compared_kernels import compare_kernels
if "results" == {how!r}:
    kernels_acks.mark_deliveries = lambda *arguments: 1
else:
    kernels_acks.mark_deliveries = lambda buffer, rows, marks: marks.fill(True) or 0
compare_kernels()
native.mark_deliveries(np.zeros(4, np.uint8), np.zeros((2, 10), np.int64), np.zeros(2, np.bool_))
"""


@pytest.mark.parametrize(("how", "words"), [("results", "returns 0 and not 1"), ("arrays", "leaves array 2 different")])
def test_kernel_that_differs_from_python_is_noticed(how: str, words: str) -> None:
    program = [sys.executable, "-c", _DIFFERENT.format(how=how)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == f"AssertionError: mark_deliveries {words}"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", ["wire", "connector/payload"])
def test_every_call_of_a_kernel_has_the_result_of_python(folder: str, tmp_path: Path) -> None:
    """In what the tests of kernels do with them, random inputs included."""
    options = [
        "-q",
        "-m",
        "not long",
        "-p",
        "no:cacheprovider",
        "-k",
        "not test_library",
        f"--basetemp={tmp_path / 't'}",
    ]
    command = [sys.executable, "-m", "tests.compared_kernels", f"tests/unit/{folder}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.splitlines()[-1].split()[0]) > 1000


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((1, 10), np.int32),
        np.zeros((1, 10), ">i8"),
        np.zeros(10, np.int64),
        np.zeros((10, 4), np.int64).T,
        np.zeros((2, 10), np.int64)[:, ::2],
        np.zeros((2, 9), np.int64),
        np.zeros((0, 9), np.int64),
        memoryview(b"x"),
        None,
    ],
    ids=["type", "byte order", "dimensions", "order", "gaps", "columns", "columns of none", "no array", "nothing"],
)
def test_library_refuses_what_it_was_not_compiled_for(wrong: Any) -> None:
    survey = native.Kernel("natslog.wire.kernels", "survey", native.BYTES, native.FRAMES, results=7)
    try:
        assert survey(np.zeros(4, np.uint8), np.zeros((0, 10), np.int64)) == [0] * 7
        assert survey.is_native
        with pytest.raises(TypeError):
            survey(np.zeros(4, np.uint8), wrong)
    finally:
        native.KERNELS.remove(survey)


def test_library_refuses_to_write_what_is_read_only() -> None:
    """A buffer of Arrow may be a file in memory, and others read it."""
    rows, kept = np.ones((2, 10), np.int64), np.ones((2, 10), np.int64)
    rows.flags.writeable = False
    native.no_replies(kept)
    assert kept[:, 6].tolist() == [0, 0]
    with pytest.raises(TypeError):
        native.no_replies(rows)
    assert rows[:, 6].tolist() == [1, 1]
