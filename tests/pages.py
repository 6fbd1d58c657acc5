"""The pages of the documentation, and which test runs which of their blocks of code.

A block is named by the heading above it, and further blocks of a section as `heading (2)`, `heading (3)`. Tests get
blocks by decorators only, which also note that they are run: `runs` names blocks, `plays` takes all commands of a page
and the files that it has its reader save. `tests/unit/test_pages.py` fails if a block is neither run nor checked.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from site_hooks import as_markdown

from tests.readme import ROOT, Block, blocks

Test = TypeVar("Test", bound=Callable[..., object])

PAGES: dict[str, Path] = {
    **{f"{name}.md": ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")},
    **{str(path.relative_to(ROOT / "docs")): path for path in sorted((ROOT / "docs").rglob("*.md"))},
}
"""The pages of the site by their names in `docs/`, with those beside it."""

taken: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
"""The tests that run a block, by page and name."""


@cache
def page_blocks(page: str) -> dict[str, Block]:
    """Every fenced block of the page by its name, in the order of the page; those of docstrings by the name of what has
    them.
    """
    seen: Counter[str] = Counter()
    found: dict[str, Block] = {}
    for block in blocks(PAGES[page].read_text()):
        seen[block.heading] += 1
        number = seen[block.heading]
        found[block.heading if number == 1 else f"{block.heading} ({number})"] = block
    if page == "API.md":
        for name, text in shown_docstrings().items():
            for block in blocks(text):
                assert name not in found, f"{name} has several blocks: give them names"
                found[name] = replace(block, object=name)
    return found


@cache
def shown_docstrings() -> dict[str, str]:
    """The docstrings that API.md shows, as its Markdown has them, by the names of what they describe."""
    found: dict[str, str] = {}
    for name in re.findall(r"^::: (\S+)$", PAGES["API.md"].read_text(), re.MULTILINE):
        named = pkgutil.resolve_name(name)
        found[name] = as_markdown(inspect.getdoc(named) or "")
        for member in (one for one in dir(named) if not one.startswith("_")):
            value = getattr(named, member)
            if getattr(value, "__module__", "").startswith(("natslog.", "pyspark_natslog.")):
                found[f"{name}.{member}"] = as_markdown(inspect.getdoc(value) or "")
    return found


def runs(page: str, /, **names: str) -> Callable[[Test], Test]:
    """The test gets these blocks as arguments, and runs them: `@runs("SPARK.md", block="JSON")`."""
    values = tuple(page_blocks(page)[name] for name in names.values())

    def decorated(test: Test) -> Test:
        _take(test, page, names.values())
        return pytest.mark.parametrize(tuple(names), [pytest.param(*values, id="; ".join(names.values()))])(test)

    return decorated


def plays(*pages: str) -> Callable[[Test], Test]:
    """The test gets, once for each page, its blocks that are commands with their output or files, as `played`."""

    def decorated(test: Test) -> Test:
        parameters = []
        for page in pages:
            found = {name: block for name, block in page_blocks(page).items() if _is_played(block)}
            _take(test, page, found)
            parameters.append(pytest.param(list(found.values()), id=page))
        return pytest.mark.parametrize("played", parameters)(test)

    return decorated


def _is_played(block: Block) -> bool:
    return block.language == "console" or block.file_name is not None


def _take(test: Callable[..., object], page: str, names: Iterable[str]) -> None:
    assert test.__name__.startswith("test_"), f"pytest does not collect {test.__name__}"
    for name in names:
        taken[page, name].append(f"{test.__module__}.{test.__name__}")
