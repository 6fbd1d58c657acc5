"""The wheel, installed as users install it: bare, with the broker, with Spark, and with all extras that are libraries
only, into environments that have nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
_SECONDS = 1500  # PySpark alone is 0.4 GB to download

pytestmark = [pytest.mark.long, pytest.mark.timeout(_SECONDS)]


_LARGE = ("broker", "spark", "connect")


def _libraries() -> str:
    """The extras that add libraries to a command or to the client; the others are for a checkout."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return ",".join(sorted(set(project["optional-dependencies"]) - {"demo", "test", "dev", *_LARGE}))


def _run(*command: str | Path, folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Without what makes this checkout importable."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PIP_NO_COMPILE"] = "1"  # most of what is installed is not imported
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, PROJECT, folder=folder)
    (built,) = folder.glob("natslog-*.whl")
    names = set(zipfile.ZipFile(built).namelist())
    assert {
        f"natslog/console/{name}" for name in ("index.html", "app.js", "vendor/preact.js", "vendor/versions.json")
    } <= names
    return built


@pytest.mark.parametrize(
    "extras",
    [
        [""],
        ["broker"],
        pytest.param(["spark", "connect"], marks=pytest.mark.extended),
        pytest.param([_libraries()], marks=pytest.mark.extended),
    ],
)
def test_wheel_works_bare_and_with_extras(wheel: Path, tmp_path: Path, extras: list[str]) -> None:
    """Extras of a list are installed one after another: each of Spark's has 0.4 GB."""
    _run(sys.executable, "-m", "venv", tmp_path / "env", folder=tmp_path)
    python = tmp_path / "env/bin/python"
    for extra in extras:
        _run(python, "-m", "pip", "install", f"{wheel}[{extra}]" if extra else wheel, folder=tmp_path)
        _check(python, tmp_path, extra)


def _check(python: Path, tmp_path: Path, extra: str) -> None:
    natslog = python.with_name("natslog")
    assert "Usage:" in _run(natslog, "--help", folder=tmp_path).stdout
    assert _run(natslog, "--version", folder=tmp_path).stdout == f"natslog {version('natslog')}\n"
    _run(python, "-c", "import natslog.client, natslog.client.publisher", folder=tmp_path)
    kernels = "from natslog.wire import library; assert library.library() is not None, library.reason()"
    _run(python, "-c", kernels, folder=tmp_path)
    unreachable = _run(natslog, "--server", "http://127.0.0.1:1", "stream", "ls", folder=tmp_path, check=False)
    assert "Check that `natslog dev` or `natslog server` is running there" in unreachable.stderr
    unreachable = _run(natslog, "pub", "x", "y", "--nats-url", "nats://127.0.0.1:1", folder=tmp_path, check=False)
    assert "no NATS server responds at nats://127.0.0.1:1" in unreachable.stderr
    _check_broker(python, natslog, tmp_path, has_broker=extra == "broker")
    _check_connector(python, tmp_path, has_spark=extra in ("spark", "connect"))


def _check_broker(python: Path, natslog: Path, folder: Path, *, has_broker: bool) -> None:
    verified = _run(natslog, "verify", "env/include", folder=folder, check=False)
    assert verified.stderr == "error: env/include contains no natslog files\n"
    if has_broker:
        _run(python, "-c", "import natslog.runner, natslog.node.metadata.recover", folder=folder)
        return
    served = _run(natslog, "server", folder=folder, check=False)
    assert "running a broker needs natslog[broker]: pip install 'natslog[broker]'" in served.stderr


def _check_connector(python: Path, folder: Path, *, has_spark: bool) -> None:
    jar = Path(_run(python, "-m", "pyspark_natslog", "jar", folder=folder).stdout.strip())
    assert jar.is_relative_to(folder)
    assert "natslog/DefaultSource.class" in zipfile.ZipFile(jar).namelist()
    imported = _run(python, "-c", "import pyspark_natslog", folder=folder, check=has_spark)
    if not has_spark:
        remedy = "ModuleNotFoundError: pyspark_natslog needs pyspark: pip install 'natslog[spark]'"
        assert imported.stderr.splitlines()[-1] == remedy
