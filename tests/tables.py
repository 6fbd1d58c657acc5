"""`python -m tests.tables`: writes the tables of docs/OPERATIONS.md that are generated. A test compares them.

A generated table stands between the lines `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = ROOT / "docs" / "OPERATIONS.md"
EVENTS = ROOT / "broker" / "natslog" / "log_events.toml"


def log_events() -> Mapping[str, tuple[str, str, str]]:
    """Level, meaning and remedy of each event of the log, by its code."""
    return {code: (level, means, remedy) for code, (level, means, remedy) in tomllib.loads(EVENTS.read_text()).items()}


def table_of_log_events() -> list[str]:
    """Codes of one area (`broker.…`; those of findings have none) with the same level and remedy share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for code, (level, means, remedy) in sorted(log_events().items()):
        area = code.partition(".")[0] if "." in code else ""
        rows.setdefault((area, level, remedy), []).append(f"`{code}`: {means}")
    return [
        "| code of a line: what it means | level | what to do |",
        "|---|---|---|",
        *(f"| {'<br>'.join(texts)} | {level} | {remedy} |" for (_, level, remedy), texts in rows.items()),
    ]


TABLES: Mapping[str, Callable[[], list[str]]] = {"log events": table_of_log_events}


def with_tables(page: str) -> str:
    """The page with all generated tables as they are now. Raises KeyError where it names one that is not known."""

    def written(found: re.Match[str]) -> str:
        return "\n".join([f"<!-- generated: {found[1]} -->", "", *TABLES[found[1]](), "", "<!-- end -->"])

    return re.sub(r"<!-- generated: ([\w ]+) -->\n.*?<!-- end -->", written, page, flags=re.DOTALL)


if __name__ == "__main__":
    OPERATIONS.write_text(with_tables(OPERATIONS.read_text()))
