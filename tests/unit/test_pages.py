"""Every block of code on every page of the documentation is run by a test, or at least checked by its language's tool.

Blocks with the languages `python` and `console` must be run: a test has taken them by a decorator of `tests.pages`.
Blocks of other languages are run, or checked here; only `text` (output, diagrams, formats of files) is neither.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
import typer
import yaml
from markdown_it import MarkdownIt

from natslog.cli.main import application
from natslog.client.profiles import load_profile
from natslog.config import load_config
from natslog.declared.reading import read_files
from natslog.nats_server import find_binary
from tests.pages import PAGES, page_blocks, shown_docstrings, taken
from tests.readme import ROOT, Block

COMMAND = typer.main.get_command(application())
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
MUST_BE_RUN = {"python", "console"}


@cache
def runners() -> Mapping[tuple[str, str], list[str]]:
    """The tests that run a block, after all of them were imported."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(r"^@(runs|plays)\(", file.read_text(), re.MULTILINE):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return taken


# ---- every block ----


EVERY_BLOCK = [
    pytest.param(page, name, block, id=f"{page}: {name}") for page in PAGES for name, block in page_blocks(page).items()
]


@pytest.mark.parametrize(("page", "name", "block"), EVERY_BLOCK)
def test_block_is_run_or_checked(page: str, name: str, block: Block, tmp_path: Path) -> None:
    tests = runners().get((page, name), [])
    if block.language in MUST_BE_RUN:
        assert tests, "no test runs it: take it by @runs or @plays (tests/pages.py)"
    if block.language == "console":
        for command in block.commands:
            check_shell(command.text)
    elif not tests or block.language == "sh":
        assert block.language in CHECKS, f"no test runs it, and {block.language!r} has no check here"
        CHECKS[block.language](block, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_fenced_at_the_beginning_of_a_line(page: str) -> None:
    """Others are shown as code, too, but have no language, and tests do not find them."""
    found = [one for one in parsed(PAGES[page].read_text()) if one.type in ("fence", "code_block")]
    assert [one.map[0] + 1 for one in found if one.type == "code_block"] == []
    assert [one.info for one in found] == [block.language for block in page_blocks(page).values() if not block.object]


def test_docstrings_on_the_site_have_fenced_blocks_only() -> None:
    assert shown_docstrings()
    for name, text in shown_docstrings().items():
        found = [one for one in parsed(text) if one.type in ("fence", "code_block")]
        assert [one.info for one in found] == [
            block.language for block in page_blocks("API.md").values() if block.object == name
        ], name


@cache
def parsed(text: str) -> list:  # type: ignore[type-arg]
    """The tokens of Markdown, by a parser that has nothing to do with `tests.readme`."""
    return MarkdownIt("commonmark").enable("table").parse(text)


# ---- by language ----


def of_text(block: Block, _: Path) -> None:
    ours = f"(natslog|make) ({'|'.join({*COMMAND.commands, *TARGETS})})"
    command = re.compile(rf"\$ |({ours}|curl|pip|python|nats|docker|helm|export|journalctl)\b")
    assert [line for line in block.lines if command.match(line)] == [], "commands are `sh` or `console`"


def of_sh(block: Block, _: Path) -> None:
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    for line in block.shell_lines:
        check_shell(line)


def of_toml(block: Block, folder: Path) -> None:
    """Settings of a broker, streams, or profiles: by the reader of such files."""
    path = folder / "config.toml"
    path.write_text(block.text)
    given = tomllib.loads(block.text)
    if "profiles" in given:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NATSLOG_CONFIG", str(path))
            assert load_profile(None).servers
    elif "streams" in given:
        assert read_files([str(path)]).streams
    else:
        load_config(path, {}, {})


def of_json(block: Block, _: Path) -> None:
    json.loads(block.text)


def of_yaml(block: Block, _: Path) -> None:
    assert yaml.safe_load(block.text)


def of_conf(block: Block, folder: Path) -> None:
    """Of a NATS server: by the server itself."""
    path = folder / "nats.conf"
    path.write_text(block.text)
    variables = dict.fromkeys(re.findall(r"\$([A-Z_]+)", block.text), "secret")
    command = [str(find_binary()), "-t", "--config", str(path)]
    checked = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


CHECKS: dict[str, Callable[[Block, Path], None]] = {
    "text": of_text,
    "sh": of_sh,
    "toml": of_toml,
    "json": of_json,
    "yaml": of_yaml,
    "conf": of_conf,
}


# ---- commands ----

_OPERATOR = re.compile(r"[();<>|&]+")
_KEYWORDS = {"do", "then", "else"}


def simple_commands(line: str) -> Iterator[list[str]]:
    """Words of each command in a line of the shell, without assignments and redirections."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    is_file = False
    for is_operator, group in groupby(words, lambda word: _OPERATOR.fullmatch(word) is not None):
        found = list(group)
        if is_operator:
            is_file = "<" in found[-1] or ">" in found[-1]
            continue
        found = found[1:] if is_file else found
        while found and (found[0] in _KEYWORDS or re.match(r"\w+=", found[0])):
            found = found[1:]
        if found:
            yield found


def check_shell(line: str) -> None:
    """Fails where a command of natslog, its options, or a file, target or extra of this repository does not exist."""
    for program, *arguments in simple_commands(line):
        match Path(program).name, arguments:
            case "natslog", _:
                check_natslog(arguments)
            case "make", [target, *_]:
                assert target in TARGETS, target
            case (("python" | "spark-submit"), _):
                check_job(arguments)
            case "pip", _:
                named = re.findall(r"natslog[^ \[]*\[(\w+)\]", " ".join(arguments))
                assert set(named) <= EXTRAS, named
        named_paths = [word for word in arguments if re.match(r"(deploy|docs|spark_jobs|notebooks)/", word)]
        assert [path for path in named_paths if not (ROOT / path).exists() and "secret" not in path] == []


def check_natslog(arguments: list[str]) -> None:
    """Parsed as the program does it. Raises an error of typer."""
    command = COMMAND
    context = command.make_context("natslog", arguments)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


def check_job(arguments: list[str]) -> None:
    """A program of spark_jobs, with its own parser."""
    found = [at for at, word in enumerate(arguments) if word.startswith("spark_jobs/")]
    for at in found:
        importlib.import_module(Path(arguments[at]).stem).parser().parse_args(arguments[at + 1 :])


@pytest.fixture(autouse=True)
def job_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "spark_jobs"))


NO_COMMANDS = {"link", "needs"}
"""Words after `natslog ` in what is printed or sent."""


@pytest.mark.parametrize("page", [*PAGES])
def test_commands_and_options_in_the_text_exist(page: str) -> None:
    """`natslog …` between backquotes, where values may be missing."""
    spans = [child for token in parsed(PAGES[page].read_text()) for child in token.children or []]
    for text in {one.content for one in spans if one.type == "code_inline" and one.content.startswith("natslog ")}:
        _, *words = shlex.split(text)
        if words[0] not in NO_COMMANDS:
            assert unknown(words) == [], text


def unknown(words: list[str]) -> list[str]:
    """Names of commands and options that do not exist."""
    command, options = COMMAND, set[str]()
    names = iter(words)
    while hasattr(command, "commands"):
        options |= {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        name = next((word for word in names if word in command.commands or re.fullmatch("[a-z-]+", word)), None)
        if name is None or name.startswith("-"):
            break
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    options |= {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return [word for word in words if re.match("--?[a-z]", word) and word.partition("=")[0] not in options]


# ---- that these checks find what is wrong ----


@pytest.mark.parametrize(
    "words",
    ["statu", "cluster statu", "cluster status --until 5", "--serve x stream ls", "stream create x --subjekt=y"],
)
def test_names_in_the_text_that_do_not_exist_are_found(words: str) -> None:
    assert len(unknown(words.split())) == 1


@pytest.mark.parametrize(
    "line",
    [
        "natslog cluster statu",
        "natslog cluster status --until 5",
        "x=1 natslog stream create",
        "true | .venv/bin/natslog cat a --fro 5 > file",
        "for a in 1 2; do natslog stream creat $a; done",
        "make tests",
        "pip install 'natslog[brokers]'",
        "python spark_jobs/replay_range.py --stream orders --form x",
        "cp deploy/systemd/natslog.conf /etc/",
    ],
)
def test_commands_that_do_not_exist_are_found(line: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check_shell(line)
