"""Lines of code are counted without comments, docstrings and blank lines."""

from __future__ import annotations

import pytest

from tests.phases import ROOT
from tests.size import other_lines, package_of, python_lines, sizes

PYTHON = '''"""Docstring
of two lines."""

# comment
x = [
    1,  # and code
]
text = """a

b"""


def f() -> None:
    """Docstring."""
'''


def test_lines_of_python() -> None:
    assert python_lines(PYTHON) == 3 + 2 + 1


def test_lines_of_other_languages() -> None:
    assert other_lines("/** Comment\n * more */\nclass A { // end\n\n  int x; /* y */\n}\n", "java") == 3
    assert other_lines("// comment\nconst a = `b\nc`; // d\n", "javascript") == 2


@pytest.mark.long
def test_all_that_ships_is_counted_by_package() -> None:
    found = sizes()
    assert package_of(ROOT / "broker/natslog/log/verify.py") == "broker/natslog/log"
    assert package_of(ROOT / "broker/natslog/urls.py") == "broker/natslog"
    for part in [
        ("broker/natslog/log", "python"),
        ("broker/natslog/console", "javascript"),
        ("connector/jvm", "java"),
        ("connector/pyspark_natslog", "python"),
        ("build scripts", "python"),
    ]:
        assert found[part] > 0, part
    assert found["broker/natslog/console", "javascript"] < 5000, "vendored files are not counted"
