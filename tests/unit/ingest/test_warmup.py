"""Kernels are compiled in another process, once per machine, and loaded without the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys
from natslog.ingest.warmup import compile_aside, warm_up
from natslog.wire import machine_code, native
compile_aside()
warm_up()
resolved = [kernel.name for kernel in native.KERNELS if kernel.is_native]
print(json.dumps([str(machine_code.found()), "numba" in sys.modules, resolved]))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which nothing was compiled before, and to which all users may write."""
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o777)
    return folder


def warmed_up(cache: Path) -> tuple[Path | None, bool, list[str]]:
    """The library of kernels, whether numba was imported, and which kernels run without it."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    environment.pop("NATSLOG_KERNELS_FILE", None)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=280)
    found: list[Any] = json.loads(done.stdout)
    return None if found[0] == "None" else Path(found[0]), found[1], found[2]


@pytest.mark.long
def test_process_that_warms_up_does_not_load_the_compiler(cache: Path) -> None:
    path, has_numba, resolved = warmed_up(cache)
    assert path is not None
    assert path.parent == cache / "natslog"
    assert not has_numba
    assert {"scan_with", "gather_messages", "split_headers", "stored_acks", "find_ids", "keep_replies"} <= set(resolved)
    assert list(path.parent.iterdir()) == [path], "nothing else is left there"


@pytest.mark.parametrize("mode", [0o620, 0o666])
@pytest.mark.long
def test_library_that_others_can_change_is_not_loaded(cache: Path, mode: int) -> None:
    path, _, _ = warmed_up(cache)
    assert path is not None
    path.chmod(mode)
    try:
        before = path.stat().st_ino
        again, _, _ = warmed_up(cache)
        assert again == path
        assert path.stat().st_ino != before, "it was compiled anew"
        assert path.stat().st_mode & 0o022 == 0
    finally:
        path.chmod(0o600)


@pytest.mark.long
def test_library_that_is_damaged_is_not_loaded(cache: Path) -> None:
    path, _, _ = warmed_up(cache)
    assert path is not None
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    _, has_numba, resolved = warmed_up(cache)
    assert (has_numba, resolved) == (True, [])
    assert not path.exists(), "the next start makes it again"
