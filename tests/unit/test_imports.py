"""What every command and every Spark task loads: a start takes half as long without the compiler and without NATS."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["natslog.cli", "natslog.client", "pyspark_natslog.source.reader"])
def test_compiler_and_nats_are_loaded_only_by_what_uses_them(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'numba', 'nats', 'aiohttp', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
