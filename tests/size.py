"""`make size`: lines of product code by package, without comments, docstrings and blank lines.

Counted is what ships and what builds it, in every language: Python, Java, JavaScript, CSS, HTML. Not counted are
vendored files, and what is generated.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

from pygments.lexers import get_lexer_by_name
from pygments.token import Token
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SHIPPED = ("broker", "connector", "console", "hatch_build.py")
LANGUAGES = {".py": "python", ".java": "java", ".js": "javascript", ".css": "css", ".html": "html"}
_LEFT_OUT = ("vendor", "jars", "node_modules", "__pycache__")
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def python_lines(text: str) -> int:
    """Lines with code, of a module."""
    written = text.split("\n")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(bool(written[line - 1].strip()) for line in lines)


def other_lines(text: str, language: str) -> int:
    """Lines with something other than comments and white space."""
    lines, at = set(), 1
    for kind, value in get_lexer_by_name(language).get_tokens(text):
        for number, part in enumerate(value.split("\n")):
            if part.strip() and kind not in Token.Comment:
                lines.add(at + number)
        at += value.count("\n")
    return len(lines)


def package_of(path: Path) -> str:
    """`broker/natslog/log`, `connector/jvm`, …; for a module beside packages: the folder it is in."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: min(3 if parts[0] == "broker" else 2, len(parts) - 1)]) or "build scripts"


def sizes() -> Counter[tuple[str, str]]:
    """Lines by package and language."""
    found: Counter[tuple[str, str]] = Counter()
    for start in SHIPPED:
        paths = [ROOT / start] if start.endswith(".py") else sorted((ROOT / start).rglob("*"))
        for path in paths:
            language = LANGUAGES.get(path.suffix)
            if language is None or not path.is_file() or set(path.parts) & set(_LEFT_OUT):
                continue
            text = path.read_text()
            count = python_lines(text) if language == "python" else other_lines(text, language)
            found[package_of(path), language] += count
    return found


def main() -> None:
    found = sizes()
    languages = [one for one in LANGUAGES.values() if any(language == one for _, language in found)]
    table = Table("package", *languages, "all")
    for package in sorted({package for package, _ in found}):
        counts = [found[package, language] for language in languages]
        table.add_row(package, *[f"{count:,}" if count else "" for count in counts], f"{sum(counts):,}")
    table.add_section()
    sums = [sum(count for (_, one), count in found.items() if one == language) for language in languages]
    table.add_row("all", *[f"{one:,}" for one in sums], f"{sum(sums):,}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)


if __name__ == "__main__":
    main()
