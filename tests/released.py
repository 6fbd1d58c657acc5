"""natslog as it was released: its code, kept in `tests/golden`, runs as processes of its own.

`natslog-<version>.tar.xz` is `git archive v<version> broker/natslog`; it needs no tag, so a shallow clone proves
upgrades and downgrades too.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.harness import BrokerProcess

GOLDEN = Path(__file__).parent / "golden"
V0_1_0 = "0.1.0"


@functools.cache
def _unpacked(version: str) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix=f"natslog-{version}-")
    with tarfile.open(GOLDEN / f"natslog-{version}.tar.xz") as archive:
        archive.extractall(folder.name, filter="data")
    return folder


def environment_of(version: str) -> dict[str, str]:
    """For a Python that is to import natslog as it was released."""
    return {"PYTHONPATH": str(Path(_unpacked(version).name) / "broker")}


def run_released(version: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A few lines of Python against the released code."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | environment_of(version),
    )


def use_release(broker: BrokerProcess, version: str | None) -> BrokerProcess:
    """From its next start on it runs that version; None: this one."""
    broker.environment.pop("PYTHONPATH", None)
    if version is not None:
        broker.environment |= environment_of(version)
    return broker
