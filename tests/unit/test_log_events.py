"""The lines of the log in both formats, and the codes of all log calls beside their declarations and the page."""

from __future__ import annotations

import ast
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.log_events import AUDIT_LOGGER, JsonLines, TextLines, event
from natslog.times import parse_timestamp_us
from tests.tables import OPERATIONS, log_events, with_tables

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "broker" / "natslog"
METHODS = {
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "critical",
    "warn": "warning",
    "log": "of an argument",
    "fatal": "critical",
}
FORGED = "2026-11-27 06:31:39,123 CRITICAL natslog: forged"
HOSTILE = [
    "orders\n" + FORGED,
    "orders\r\n" + FORGED,
    "orders\r" + FORGED,
    "orders\x0b" + FORGED,
    "orders\x85" + FORGED,
    "orders\u2028" + FORGED,
    "\x1b[2J\x1b[1;1Horders",
    "\u202eorders",
    "\udcff",
    '","code":"forged","x":"',
]


def record(message: str, *arguments: object, error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    return logging.getLogger("natslog.node").makeRecord(
        "natslog.node", logging.WARNING, "file.py", 1, message, arguments, exc_info, extra=extra
    )


def raised(text: str) -> BaseException:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


# ---- lines ----


def test_text_states_the_distance_of_its_time_from_utc() -> None:
    line = TextLines().format(record("stream %s: refused %d messages", "grün", 3, **event("x.y", stream="grün")))
    assert re.fullmatch(
        r"[-\d]{10} [:\d]{8},\d{3}[+-]\d{4} WARNING natslog\.node: stream grün: refused 3 messages", line
    )


def test_text_states_the_request_once() -> None:
    """Lines of the audit log stay JSON behind the name of their logger."""
    from natslog.request_ids import handling

    with handling("request-0001"):
        assert TextLines().format(record("x")).endswith(": x (request request-0001)")
        audited = logging.makeLogRecord({"name": AUDIT_LOGGER, "msg": '{"request_id": "request-0001"}'})
        assert TextLines().format(audited).endswith(': {"request_id": "request-0001"}')


def test_json_has_the_facts_and_the_fields_of_the_event() -> None:
    written = record("stream %s ends", "s", **event("stream.x", stream="s", offset=7, path=Path("/d/x"), epoch=None))
    line = json.loads(JsonLines(3).format(written))
    moment = line.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", moment)
    assert abs(parse_timestamp_us(moment) - written.created * 1e6) <= 1
    assert line == {
        "level": "warning",
        "code": "stream.x",
        "message": "stream s ends",
        "logger": "natslog.node",
        "broker": 3,
        "stream": "s",
        "offset": 7,
        "path": "/d/x",
    }


def test_lines_of_libraries_have_the_code_other() -> None:
    assert json.loads(JsonLines(None).format(record("%s", "x")))["code"] == "other"


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_others_forges_no_line(text: str) -> None:
    written = record("refused: %s", text, error=raised(text), **event("stream.x", stream=text))
    lines = TextLines().format(written).splitlines()
    assert all(line.startswith("    ") for line in lines[1:]), lines
    assert all(character.isprintable() for line in lines for character in line), lines
    found = JsonLines(1).format(written)
    assert len(found.splitlines()) == 1
    assert found.isascii()
    body = json.loads(found)
    assert (body["code"], body["stream"], body["message"]) == ("stream.x", text, f"refused: {text}")
    assert "Traceback" in body["error"]
    assert text in body["error"]


@given(st.text(st.characters(categories=["Cc", "Zl", "Zp", "Lu", "Cs"])), st.text())
def test_any_text_is_one_line(text: str, other: str) -> None:
    written = record("%s %s", text, other, **event("x.y", stream=other))
    assert len(TextLines().format(written).splitlines()) == 1
    assert len(JsonLines(1).format(written).splitlines()) == 1


# ---- codes ----


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Place, level and node of each log call of the level info or above."""
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text())
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (method := logging_method(node.func)) is not None:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", METHODS[method], node
            elif isinstance(node, ast.Attribute) and id(node) not in called:
                assert logging_method(node) is None, f"{path}:{node.lineno}: call the logger where it is named"


def logging_method(node: ast.expr) -> str | None:
    """`info` of `logger.info`, `self._logger.info` and `logging.info`."""
    if not isinstance(node, ast.Attribute) or node.attr not in METHODS:
        return None
    owner = node.value
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "getLogger":
        return node.attr
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return node.attr if name.lstrip("_") in ("logger", "logging", "log_") else None


def stated(place: str, call: ast.Call) -> ast.Call:
    extra = next((given.value for given in call.keywords if given.arg == "extra"), None)
    is_event = isinstance(extra, ast.Call) and isinstance(extra.func, ast.Name) and extra.func.id == "event"
    assert is_event, f'{place}: state the code of the event: extra=event("…")'
    assert isinstance(extra, ast.Call)
    return extra


def codes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for place, level, call in calls():
        code = stated(place, call).args[0]
        assert isinstance(code, ast.Constant), f"{place}: the code must be a text, so that it can be found"
        assert re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", code.value), f"{place}: {code.value!r} is no code"
        found.setdefault(code.value, set()).add(level)
    return found


def table(heading: str) -> list[list[str]]:
    """The rows of the table of OPERATIONS.md whose first column is headed so."""
    _, _, rest = OPERATIONS.read_text().partition(f"\n| {heading} |")
    rows = rest.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]


def test_every_log_call_has_a_code_of_one_level() -> None:
    found = codes()
    assert len(found) > 100, "the walk finds the calls"
    assert {code: levels for code, levels in found.items() if len(levels) > 1} == {}


@pytest.mark.long
def test_exactly_the_codes_that_calls_use_are_declared_with_their_level() -> None:
    assert {code: level for code, (level, _, _) in log_events().items()} == {
        code: next(iter(levels)) for code, levels in codes().items()
    }
    assert all(means and remedy for _, means, remedy in log_events().values())


def test_the_page_has_the_declared_events() -> None:
    page = OPERATIONS.read_text()
    assert with_tables(page) == page, "write them: python -m tests.tables"
    assert all(f"`{code}`: {means}" in page for code, (_, means, _) in log_events().items())


def test_the_table_lists_exactly_the_fields_that_calls_use() -> None:
    used = {given.arg for place, _, call in calls() for given in stated(place, call).keywords}
    listed = {name for row in table("field") for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == used | {"time", "level", "code", "message", "logger", "broker", "error"}


def test_codes_are_those_of_findings_where_the_event_is_the_same() -> None:
    """Codes of logs have a dot, unless they are those of findings."""
    from natslog.http.findings import CODES

    assert {code for code in codes() if "." not in code} <= set(CODES)


# ---- request ids ----


def test_no_id_of_a_request_that_is_over_is_carried() -> None:
    from natslog.request_ids import carried, current_request_id, handling

    seen: list[str] = []
    with handling("request-0001"):
        assert current_request_id() == "request-0001"
        work = carried(lambda: seen.append(current_request_id()))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with handling("request-0002"):
            assert current_request_id() == "request-0002"
        assert current_request_id() == "request-0001"
        late = carried(lambda: seen.append(current_request_id()))
    late()
    assert seen == ["request-0001", ""]
    assert current_request_id() == ""


@pytest.mark.parametrize("hostile", ["short", "x" * 65, "request-1\n" + FORGED, "request 0001", "grün-grün", ""])
def test_hostile_ids_are_not_used(hostile: str) -> None:
    from natslog.request_ids import current_request_id, handling

    with handling(hostile):
        assert current_request_id() == ""
        assert "request" not in TextLines().format(record("x"))
        assert "request_id" not in json.loads(JsonLines(1).format(record("x")))


def test_threads_log_the_request_that_they_work_for() -> None:
    from natslog.node.threads import Threads
    from natslog.request_ids import current_request_id, handling

    own, shared = Threads(1, "own"), Threads(1, "shared", are_shared=True)
    with handling("request-0001"):
        assert own.submit(current_request_id).result() == "request-0001"
        assert shared.submit(current_request_id).result() == ""
    with handling("request-0002"):
        assert own.submit(current_request_id).result() == "request-0002", "the same thread"
    assert own.submit(current_request_id).result() == ""
    for threads in (own, shared):
        threads.shutdown()
