"""The base install has no numba, and a broker does not import it: the whole way from bytes to columns and back must be
the same by machine code of the library, compiled by numba in this process, and uncompiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from natslog.ingest.warmup import compile_aside
from natslog.wire import machine_code, native

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    compile_aside()
    assert machine_code.found() is not None


def run(mode: str) -> list[Any]:
    """Which kernels were used, and what came of it."""
    environment = os.environ | ({"NATSLOG_KERNELS_FILE": ""} if mode == "numba" else {})
    command = [sys.executable, "-m", "tests.unit.wire.whole_way", mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.long
def test_columns_acks_hashes_and_duplicates_are_the_same_by_all_three() -> None:
    results = [run(mode) for mode in ("native", "numba", "plain")]
    assert [used for used, _ in results] == ["native", "numba", "plain"]
    assert results[0] == ["native", results[1][1]]
    assert results[1][1] == results[2][1]
    assert results[0][1][0] == [53, 1, 1, 1], "kept, not text, not plain, expecting; internal ones are left out"


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((1, 10), np.int32),
        np.zeros(10, np.int64),
        np.zeros((10, 4), np.int64).T,
        np.zeros((2, 10), np.int64)[:, ::2],
        memoryview(b"x"),
        None,
    ],
    ids=["type", "dimensions", "order", "gaps", "no array", "nothing"],
)
def test_machine_code_refuses_what_it_was_not_compiled_for(wrong: Any) -> None:
    survey = native.Kernel("natslog.wire.kernels", "survey", native.BYTES, native.ROWS, results=7)
    try:
        assert survey(np.zeros(4, np.uint8), np.zeros((0, 10), np.int64)) == [0] * 7
        assert survey.is_native
        with pytest.raises(TypeError):
            survey(np.zeros(4, np.uint8), wrong)
    finally:
        native.KERNELS.remove(survey)
