"""What every command and every Spark task loads: a start takes half as long without the compiler and without NATS."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import natslog


@pytest.mark.parametrize("module", ["natslog.cli", "natslog.client", "pyspark_natslog.source.reader"])
def test_compiler_and_nats_are_loaded_only_by_what_uses_them(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'numba', 'nats', 'aiohttp', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


_HEAVY = {"pyarrow", "numba", "nats", "aiohttp", "numpy", "urllib3", "asyncio"}
_RUN = """
import json, sys
from natslog.cli import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("stream", "ls", "--help"), ("pub", "--help"), ("server", "--help"), ("--version",), ()],
)
def test_help_and_version_import_no_library_of_data_or_network(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", _RUN, *arguments], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    assert _HEAVY & set(json.loads(done.stderr.splitlines()[-1])) == set()


def _modules_of(*arguments: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", _RUN, *arguments], capture_output=True, text=True, check=False)
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("command", ["stream", "cluster", "cursor"])
def test_command_that_shows_no_rows_imports_no_library_of_rows(command: str) -> None:
    loaded = _modules_of("--server", "http://127.0.0.1:1", command, "status" if command == "cluster" else "ls")
    assert "natslog.client.client" in loaded
    assert {"pyarrow", "numpy", "asyncio"} & loaded == set()
    others = {"pub", "bench", "sql", "doctor", "serve"}
    assert {f"natslog.cli.{name}" for name in others} & loaded == set()


def test_version_is_that_of_the_installed_package() -> None:
    done = subprocess.run([sys.executable, "-m", "natslog", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"natslog {version('natslog')}\n")
    assert natslog.__version__ == version("natslog")
    with pytest.raises(AttributeError, match="nosuch"):
        natslog.nosuch  # noqa: B018


_WITHOUT_EXTRAS = """
import sys
class Extras:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Extras())
"""
GOLDEN = Path(__file__).parent.parent / "golden"
_EXTRAS = "aiohttp,numba,cryptography,prometheus_client,nkeys,nats_server,pyspark,pandas,duckdb"


def _without_extras(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT_EXTRAS + code, _EXTRAS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_base_install_has_client_publisher_and_help() -> None:
    done = _without_extras(
        "import natslog.client, natslog.client.publisher; from natslog.cli import main; main(['-h'])"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["server"], ["dev", "--nats-url", "nats://127.0.0.1:1"]])
def test_command_without_its_extra_names_the_extra(arguments: list[str], tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}); from natslog.cli import main; main(sys.argv[2:])"
    done = _without_extras(code, *arguments)
    assert done.returncode == 1
    assert "needs natslog[broker]: pip install 'natslog[broker]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_sql_without_its_extra_names_the_extra() -> None:
    done = _without_extras("from natslog.cli import main; main(sys.argv[2:])", "sql", "SELECT 1")
    assert done.returncode == 1
    assert "needs natslog[sql]: pip install 'natslog[sql]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_base_install_verifies_files(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "segment-v2-none.arrow", tmp_path / f"{0:020d}.arrow")
    done = _without_extras("from natslog.cli import main; main(sys.argv[2:])", "verify", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["pyspark_natslog", "pyspark_natslog.data_source"])
def test_connector_without_pyspark_is_one_error_with_the_remedy(module: str) -> None:
    done = _without_extras(f"import {module}")
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: pyspark_natslog needs pyspark: pip install 'natslog[spark]'"
    )
    assert "During handling" not in done.stderr
    assert "direct cause" not in done.stderr
