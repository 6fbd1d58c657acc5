"""README and docs/COMPARISON.md: the convention of README's commands, and that tests named as proof exist.

`tests/spark/test_newcomer.py` runs the commands.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.readme import README, ROOT, Block, Command, blocks

COMPARISON = ROOT / "docs" / "COMPARISON.md"
PAGES = [README, COMPARISON]


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ([], ""),
        (["ready"], "ready\n"),
        (["sent 1 in … s (…/s)"], "sent 1 in 0.1 s (12/s)\n"),
        (["…", "+---+", "| 1 |", "…"], "WARN one\nWARN two\n+---+\n| 1 |  \n\n"),
        (["…", "+---+", "…"], "+---+"),
    ],
)
def test_output_as_printed_in_readme_is_accepted(expected: list[str], output: str) -> None:
    assert Command("x", expected).is_answered_by(output)


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ([], "something"),
        (["ready"], ""),
        (["ready"], "not ready"),
        (["ready"], "ready\nand more"),
        (["sent 1 in … s"], "sent 2 in 0.1 s"),
        (["a…b"], "a\nb"),
        (["…", "+---+", "…"], "WARN one"),
        (["a.c"], "abc"),
    ],
)
def test_output_that_differs_from_readme_is_refused(expected: list[str], output: str) -> None:
    assert not Command("x", expected).is_answered_by(output)


def test_blocks_are_files_commands_and_commands_left_running() -> None:
    text = (
        "In a second\nterminal:\n\n```console\n$ serve\nready\n```\n"
        "Save this as `a.py`:\n\n```python\nprint()\n```\n\nRun it:\n\n```console\n$ one\n$ two\n2\n```\n"
    )
    serve, file, run = blocks(text)
    assert serve.is_left_running
    assert (file.file_name, file.lines, file.is_left_running) == ("a.py", ("print()",), False)
    assert run.before == "Run it:"
    assert [(command.text, command.output) for command in run.commands] == [("one", []), ("two", ["2"])]


def quickstart() -> dict[str, list[Block]]:
    """The number of each step, with its blocks."""
    section = README.read_text().split("\n## Quickstart\n")[1].split("\n## ")[0]
    steps = re.split(r"^### (\d)\. ", section, flags=re.MULTILINE)[1:]
    return {number: blocks(text) for number, text in zip(steps[::2], steps[1::2], strict=True)}


def test_quickstart_has_five_steps_each_with_a_command_and_its_output() -> None:
    steps = quickstart()
    assert list(steps) == ["1", "2", "3", "4", "5"]
    for number, found in steps.items():
        commands = [command for block in found if block.language == "console" for command in block.commands]
        assert commands, f"step {number} has no command"
        assert any(command.output for command in commands), f"step {number} shows no output"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_at_most_120_characters(page: Path) -> None:
    wide = [line for line in page.read_text().splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not wide


def test_tests_that_are_named_as_proof_exist() -> None:
    named = re.findall(r"`tests/([\w/]+\.py)(?:::(\w+))?`", COMPARISON.read_text())
    assert named
    for path, name in named:
        text = (ROOT / "tests" / path).read_text()
        assert not name or re.search(rf"def {name}\(", text), f"{path}::{name}"


def test_wheel_that_readme_installs_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"natslog-([\d.]+(?:dev\d+)?)-py3-none-manylinux_2_17_x86_64\.whl\[(\w+)\]", README.read_text())
    assert named
    for version, extra in named:
        assert version == project["version"]
        assert extra in project["optional-dependencies"]
