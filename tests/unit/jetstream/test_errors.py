"""The table of errors of the JetStream API, and the calls that name its rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from natslog.errors import NatslogError, RemovalDenied, StreamConflict, TableFailed
from natslog.jetstream import errors
from natslog.jetstream.errors import ERRORS, api_error, of_error

_BROKER = Path(errors.__file__).parents[1]
_IN_TABLE = "api_error", "consumer_error"


def _named() -> Iterator[str]:
    """Names of rows, as the source states them: in calls (of texts, also behind a condition), and in `errors`."""
    for path in (_BROKER / "jetstream").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in _IN_TABLE:
                continue
            prefix = "consumer_" if call.func.id == "consumer_error" else ""
            for one in ast.walk(call.args[0]):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield prefix + one.value
    yield from (name for _, name in errors._OF_ERRORS)


def test_rows_status_number_text_and_occasion() -> None:
    for name, (status, err_code, description, when) in ERRORS.items():
        assert 400 <= status < 600, name
        assert 10_000 < err_code < 10_500, name
        assert description, name
        assert when, name
        api_error(name, "one", "two")


def test_calls_name_all_rows_and_no_others() -> None:
    assert {*_named()} - {"consumer_"} == {*ERRORS}  # that one is of a name that is computed


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StreamConflict("x", overlaps="other"), (400, 10065, "subjects overlap with an existing stream: other")),
        (StreamConflict("x"), (400, 10058, "stream name already in use with a different configuration")),
        (RemovalDenied("{} is kept"), (500, 10050, "{} is kept")),
        (TableFailed("a {} failed"), (500, 10051, "a {} failed")),
    ],
)
def test_errors_of_natslog_have_answers(error: NatslogError, expected: tuple[int, int, str]) -> None:
    found = of_error(error)
    assert (found.code, found.err_code, found.description) == expected
