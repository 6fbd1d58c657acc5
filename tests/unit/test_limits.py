"""Files, classes and functions of the packages stay small enough to be read: what is longer states the reason in its
docstring, in a sentence that begins with `Longer than`. Functions of kernels are excepted: each is a loop over bytes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("broker/natslog", "connector/pyspark_natslog")
_FILE_LINES, _METHODS, _FUNCTION_LINES = 600, 40, 80
_REASON = "Longer than "

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def function_lines(function: Definition) -> int:
    """From `def` to its last line, without the docstring."""
    assert function.end_lineno is not None
    lines, first = function.end_lineno - function.lineno + 1, function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def too_long(text: str, *, has_kernels: bool = False) -> Iterator[str]:
    """What in this module exceeds a limit, without a reason."""
    module = ast.parse(text)
    found: list[tuple[ast.Module | ast.ClassDef | Definition, str, int]] = []
    if (lines := len(text.splitlines())) > _FILE_LINES:
        found.append((module, "the file, lines", lines))
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(one, Definition) for one in node.body)
            found += [(node, f"class {node.name}, methods", methods)] if methods > _METHODS else []
        elif isinstance(node, Definition) and not has_kernels and (lines := function_lines(node)) > _FUNCTION_LINES:
            found.append((node, f"function {node.name}, lines", lines))
    for node, what, count in found:
        if _REASON not in (ast.get_docstring(node) or ""):
            yield f"{what}: {count}"


def test_files_classes_and_functions_are_short_or_state_why_not() -> None:
    paths = [path for package in _PACKAGES for path in sorted((_ROOT / package).rglob("*.py"))]
    assert len(paths) > 300
    names = {path: str(path.relative_to(_ROOT)) for path in paths}
    found = {
        names[path]: list(too_long(path.read_text(), has_kernels=path.name.startswith("kernels"))) for path in paths
    }
    assert not {name: problems for name, problems in found.items() if problems}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n" * 601, ["the file, lines: 601"]),
        ('"""Longer than 600 lines: a table."""\n' + "\n" * 601, []),
        ("class A:\n" + "    def a(self): ...\n" * 41, ["class A, methods: 41"]),
        ("async def a():\n" + "    a()\n" * 80, ["function a, lines: 81"]),
        ('def a():\n    """See\n    b.\n    """\n' + "    a()\n" * 79, []),
    ],
)
def test_what_exceeds_a_limit_is_named(text: str, expected: list[str]) -> None:
    assert list(too_long(text)) == expected
