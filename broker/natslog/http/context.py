"""What handlers share: the broker behind the request, and how query parameters are read."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from natslog.errors import InvalidRequest, NotReady, did_you_mean
from natslog.log import StreamLog
from natslog.node.broker import Broker

_WHOLE = re.compile(r"-?[0-9]{1,19}")

BROKER = web.AppKey("broker", Broker)


def broker_of(request: web.Request) -> Broker:
    """The broker, once it knows its streams. Raises NotReady before that."""
    broker = request.app[BROKER]
    if not broker.has_started:
        raise NotReady("the broker is starting: ask again in a moment")
    return broker


def log_of(request: web.Request) -> StreamLog:
    """The log of the stream in the path. Raises StreamNotFound, or why it cannot be served."""
    return broker_of(request).hosted(request.match_info["name"]).usable_log()


def query(request: web.Request, *known: str) -> dict[str, str]:
    """The query parameters, each known and given once.

    Raises:
        InvalidRequest: an unknown one (nearest known one named) or one given twice.
    """
    for name in request.query:
        if name not in known:
            raise InvalidRequest(f"unknown parameter {name!r}{did_you_mean(name, known)}", parameter=name)
        if len(request.query.getall(name)) > 1:
            raise InvalidRequest(f"parameter {name!r} is given twice", parameter=name)
    return dict(request.query)


def whole(values: dict[str, str], name: str, default: Any, *, low: int = 0, high: int = 2**62) -> Any:
    """A whole number from the query, or the default where it is not given.

    Raises:
        InvalidRequest: not a number, or out of range.
    """
    if name not in values:
        return default
    text = values[name].strip()
    if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
        raise InvalidRequest(f"{name} {values[name]!r} must be a whole number from {low} to {high}", parameter=name)
    return int(text)


def position(values: dict[str, str], name: str, default: int, log: StreamLog) -> int:
    """An offset from the query: a number, `earliest` or `latest`."""
    named = {"earliest": log.log_start_offset, "latest": log.high_watermark}
    text = values.get(name, "")
    return named[text] if text in named else int(whole(values, name, default))
