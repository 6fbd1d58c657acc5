"""The log of natslog: the code and the fields of an event, and one line for each, as text or as JSON.

A call of a logger states what it logs by `extra`:

    logger.warning("%s: the disk is full", folder, extra=event("disk.full", path=folder))

Codes and fields are stable. `log_events.toml` declares the codes, each with its level, meaning and remedy;
docs/OPERATIONS.md lists them, and a test compares both with all calls. In both formats a line is one event: control
characters are escaped, so that text of others (subjects, names, headers) can neither begin a line that seems to be one
of the broker nor send commands to a terminal. As text, a traceback follows in lines that are indented, as no line of an
event is; as JSON, it is the field `error`.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, Literal, get_args

from natslog.request_ids import current_request_id
from natslog.times import format_timestamp_us

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)

AUDIT_LOGGER = "natslog.audit"
UNCODED = "other"
"""The code of lines of libraries, and of those at the level debug."""
_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, those that change the direction of text, and halves of surrogate pairs."""

logger = logging.getLogger("natslog")

_ESCAPES = "unicode_escape"
codecs.lookup(_ESCAPES)  # read from a file at its first use, for which there may be no descriptor then


def event(code: str, **fields: object) -> dict[str, object]:
    """What a log call states as `extra`.

    Args:
        code: of the event, as declared in `log_events.toml`. Each has one level.
        fields: of the event, without those that are None.
    """
    return {"code": code, "fields": {name: value for name, value in fields.items() if value is not None}}


def one_line(text: str) -> str:
    r"""The text without characters that end a line or control a terminal: these become escapes, as in `\n`."""
    return _UNSAFE.sub(lambda found: found[0].encode(_ESCAPES).decode(), text)


class TextLines(logging.Formatter):
    """As text for people, with local time and its distance from UTC."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record) + time.strftime("%z", time.localtime(record.created))
        line = one_line(self.formatMessage(record))
        if (request_id := _request_id_of(record)) and record.name != AUDIT_LOGGER:  # whose JSON has it
            line += f" (request {request_id})"
        shown = _traceback_of(record).splitlines()
        return "\n".join([line, *(f"    {one_line(part)}" for part in shown)])


class JsonLines(logging.Formatter):
    """One JSON object for each event, with the time in UTC. Args: `broker`: its number."""

    def __init__(self, broker: int | None) -> None:
        super().__init__()
        self._broker = {} if broker is None else {"broker": broker}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": format_timestamp_us(int(record.created * 1e6)),
            "level": record.levelname.lower(),
            "code": getattr(record, "code", UNCODED),
            "message": record.getMessage(),
            "logger": record.name,
        } | self._broker
        if request_id := _request_id_of(record):
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if shown := _traceback_of(record):
            line["error"] = shown
        return json.dumps(line, default=str)  # with all that is not ASCII escaped


def _request_id_of(record: logging.LogRecord) -> str:
    """As the call states it; by default that of the request which is being handled."""
    return str(getattr(record, "fields", {}).get("request_id") or current_request_id())


def _traceback_of(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return record.stack_info or ""
    return "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")


def write_log(level: str, form: Format, broker: int | None = None) -> None:
    """The log of this process goes to standard error, from now on.

    Args:
        level: of all loggers. That of the audit log stays when levels are changed later.
        broker: number of the broker, for JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(broker) if form == "json" else TextLines())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger(AUDIT_LOGGER).setLevel(level.upper())
    if form == "json":  # Python would print these as several lines
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("an error was not handled", exc_info=(kind, error, trace), extra=event("process.error"))
