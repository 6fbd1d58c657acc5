"""natslog as it was released: its code, kept in `tests/golden`, runs as processes of its own.

`natslog-0.2.0.tar.xz` holds broker, connector and jar, and the packages that were installed with it
(`tests.golden.make_release`). They are installed into an environment of its own, once on a machine, since the present
version may need others. `natslog-0.1.0.tar.xz` (`git archive v0.1.0 broker/natslog`) needs no other packages than
0.2.0, and runs in that environment. No tags are needed, so that a shallow clone proves upgrades and downgrades too.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.harness import BrokerProcess

GOLDEN = Path(__file__).parent / "golden"
V0_1_0, V0_2_0 = "0.1.0", "0.2.0"
_WITHOUT_PACKAGES = {V0_1_0: V0_2_0}
"""Archives without a list of packages, and the version whose packages they run with."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "natslog-tests"
_INSTALLED_WITHIN_S = 600.0
_COMPILE = "from natslog.ingest import warmup; getattr(warmup, 'compile_aside', warmup.warm_up)()"


class Release(NamedTuple):
    """What runs it: an interpreter with its packages, and the variables with which that finds its code."""

    python: Path
    environment: dict[str, str]
    folder: Path


@functools.cache
def release(version: str) -> Release:
    """It is unpacked, its packages are installed, and its kernels are compiled, where that was not done before."""
    place, packages = _unpacked(version), _unpacked(_WITHOUT_PACKAGES.get(version, version))
    python = packages / "venv" / "bin" / "python"
    code = os.pathsep.join(str(place / "code" / folder) for folder in ("broker", "connector"))
    kernels = place / "kernels"
    found = Release(python, {"PYTHONPATH": code, "NUMBA_CACHE_DIR": str(kernels)}, place / "code")
    with _locked(packages):
        _install(packages)
    with _locked(place):
        if not (kernels / "compiled").exists():
            command = [python, "-c", _COMPILE]
            subprocess.run(command, env=os.environ | found.environment, check=True, timeout=_INSTALLED_WITHIN_S)
            (kernels / "compiled").touch()
    return found


def _unpacked(version: str) -> Path:
    archive = GOLDEN / f"natslog-{version}.tar.xz"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = _CACHE / f"natslog-{version}-python{python}-{zlib.crc32(archive.read_bytes()):08x}"
    place.mkdir(parents=True, exist_ok=True)
    code = place / "code"
    with _locked(place):
        if not code.exists():
            shutil.rmtree(place / "new", ignore_errors=True)
            with tarfile.open(archive) as files:
                files.extractall(place / "new", filter="data")
            (place / "new").rename(code)
    return place


def _install(place: Path) -> None:
    """PySpark is the large one: 1.2 GB on the disk, a minute."""
    venv, complete = place / "venv", place / "venv" / "complete"
    if complete.exists():
        return
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=_INSTALLED_WITHIN_S)
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run(
        [*pip, "--requirement", place / "code" / "requirements.txt"], check=True, timeout=_INSTALLED_WITHIN_S
    )
    complete.touch()


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Several test processes need it at the same time."""
    with (place / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def use_release(broker: BrokerProcess, version: str | None) -> BrokerProcess:
    """From its next start on it runs that version; None: this one."""
    for name in ("PYTHONPATH", "NUMBA_CACHE_DIR"):
        broker.environment.pop(name, None)
    broker.python = sys.executable
    if version is not None:
        found = release(version)
        broker.python = str(found.python)
        broker.environment |= found.environment
    return broker
