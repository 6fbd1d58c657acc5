"""Fences, links and named tests of all pages, and the settings that they show."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from natslog.config import load_config
from tests.pages import runs
from tests.readme import Block
from tests.settings_page import PAGE, with_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fences_of_code_stand_on_lines_of_their_own_and_are_closed(page: Path) -> None:
    fences = [line.strip() for line in page.read_text().splitlines() if "```" in line]
    assert not [line for line in fences if not re.fullmatch(r"```\w*", line)]
    assert all(line == "```" for line in fences[1::2])
    assert len(fences) % 2 == 0


def anchors(page: str) -> set[str]:
    """Of the headings, as GitHub makes them, and of anchors that the page sets itself."""
    counted: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE):
        counted[re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")] += 1
    again = {f"{name}-{number}" for name, count in counted.items() for number in range(1, count)}
    return {*counted, *again, *re.findall(r'<a id="([^"]+)">', page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(without_code(target)), link


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_tests_that_guarantees_name_exist() -> None:
    page = (ROOT / "docs" / "GUARANTEES.md").read_text()
    named = re.findall(r"`((?:unit|integration|faults|spark|jetstream)/[\w/]+(?:\.py)?)`", page)
    assert len(named) > 60
    assert [path for path in named if not (ROOT / "tests" / path).exists()] == []


@runs("OPERATIONS.md", one="Set up (2)", three="Three brokers")
def test_settings_of_operations_are_those_of_a_broker(tmp_path: Path, one: Block, three: Block) -> None:
    """Also those that are comments, because they have no effect without further ones."""
    for number, block in enumerate((one, three)):
        path = tmp_path / f"{number}.toml"
        path.write_text(block.text)
        load_config(path, {"advertise_url": "http://log1:9292", "insecure": True} if number else {}, {})
    names = set(re.findall(r"^(?:# )?(\w+) = ", one.text + three.text, re.MULTILINE))
    shown = tomllib.loads(one.text + three.text)
    assert {"nats_leaf_url", "scrub_interval", "max_store_bytes", "seeds", "cluster_secret_file"} <= names
    assert {"nats_leaf_url", "scrub_interval", "seeds", "rack"} <= set(shown)


def test_tables_of_settings_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "python -m tests.settings_page"
