"""A test that waits gives a busy machine 30 s, unless the time itself is promised."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.harness import LEAST_WITHIN_S
from tests.phases import ROOT


def short_limits(text: str) -> Iterator[str]:
    """Calls of `eventually` with a shorter limit, a number or a constant of the module, that do not state a promise."""
    tree = ast.parse(text)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "eventually":
            named = {one.arg: one.value for one in node.keywords}
            for limit in (*node.args[1:2], *([named["within_s"]] if "within_s" in named else [])):
                value = constants.get(limit.id) if isinstance(limit, ast.Name) else getattr(limit, "value", None)
                if isinstance(value, int | float) and value < LEAST_WITHIN_S and "is_promise" not in named:
                    yield f"line {node.lineno}: {value} s"


def test_no_limit_is_short_without_a_promise() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert len(paths) > 400
    found = {str(path.relative_to(ROOT)): list(short_limits(path.read_text())) for path in paths}
    assert {path: limits for path, limits in found.items() if limits} == {}


def test_short_limits_are_found() -> None:
    text = "SHORT_S = 10.0\neventually(a, 5, 'x')\neventually(a, within_s=SHORT_S)\neventually(a, 60)\n"
    assert list(short_limits(text)) == ["line 2: 5 s", "line 3: 10.0 s"]
    assert list(short_limits("eventually(a, 5, is_promise=True)\neventually(a)\n")) == []
