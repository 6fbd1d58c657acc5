"""Requests: query parameters, headers, bodies in JSON. The server itself (aiohttp) is not fuzzed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import quote

from aiohttp import StreamReader, web
from aiohttp.test_utils import make_mocked_request
from msgspec import UNSET
from multidict import CIMultiDict

from natslog.arrow.schema import COLUMNS
from natslog.errors import InvalidRequest, OffsetOutOfRange, PayloadTooLarge
from natslog.http import context, messages
from natslog.http.access import RIGHTS
from natslog.http.bodies import BODIES, Bodies
from natslog.http.context import OWNER, REQUEST_ID
from natslog.http.endpoint import Call
from natslog.http.table import ENDPOINTS
from natslog.model import StreamSettings
from natslog.planning import MAX_OFFSET
from natslog.request_ids import HEADER, is_well_formed
from natslog.security.guard import Guard, Identity
from natslog.security.records import Rule, Security
from natslog.stream_settings import parse_settings
from natslog.subjects import includes
from natslog.units import parse_duration_s
from tests.fuzz.target import target

_LOG: Any = SimpleNamespace(first_readable_offset=3, high_watermark=9)
_RECORD = SimpleNamespace(id="ab", name="orders", recorded_subjects=("orders.>",))
_STREAM: Any = SimpleNamespace(name="orders", usable_log=lambda: _LOG, record=_RECORD, leader_epoch=1)
_RULE = Rule(id="r1", who="alice", action="read", stream="orders", subject="orders.eu.>")
_GUARD = Guard(lambda: Security(rules={"r1": _RULE}), lambda: 0)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@functools.cache
def _app() -> web.Application:
    app = web.Application()
    app[BODIES] = Bodies()
    return app


def request_of(query: str = "", headers: dict[str, str] | None = None, body: bytes = b"", part: str = "x") -> Any:
    """A request as handlers receive it."""
    payload = StreamReader(mock.Mock(_reading_paused=False), 1 << 20, loop=_loop())
    payload.feed_data(body)
    payload.feed_eof()
    request = make_mocked_request(
        "POST",
        f"/v1/x?{query}",
        CIMultiDict(headers or {}),
        app=_app(),
        payload=payload,
        match_info={"id": part, "producer": "p", "batch": "0"},
    )
    request[RIGHTS], request[OWNER] = _GUARD.rights(Identity("alice")), "alice"
    given = request.headers.get(HEADER, "")
    request[REQUEST_ID] = given if is_well_formed(given) else "0" * 32
    return request


def call_of(named: str, request: Any) -> Call[Any, Any]:
    """What the handler of a call receives for this request."""
    (endpoint,) = [one for one in ENDPOINTS if one.named == named]
    return _loop().run_until_complete(endpoint.call(request))


# ---- queries and headers ----


def _queries() -> Iterator[bytes]:
    yield b"start=3&end=9&max_bytes=100&wait_ms=5&subject=orders.*&columns=offset,value&exact=false\n*/*\nx"
    yield b"start=earliest&end=latest\napplication/x-ndjson\n12345678-abcd\n7"
    yield b"start=9&end=3&columns=value,value\ntext/html\n\xff"
    yield b"start=%C2%B2&max_bytes=0\napplication/vnd.apache.arrow.stream, */*\n\n\xd9\xa3"
    yield b"start=3&start=4&exact=maybe\n\n\n00000000000000000001" + b"9" * 30


_QUERY_WORDS = [
    b"start=", b"end=", b"max_bytes=", b"wait_ms=", b"subject=", b"columns=", b"exact=false", b"&", b"%C2%B2",
    b"latest",
    b"9999999999999999999", b"0" * 4400, b"\xd9\xa3", b"application/x-ndjson", b"*/*", b";q=0", b"\n",
    b"00000000000000000001",
]  # fmt: skip


@target("queries", _queries, _QUERY_WORDS)
def check_queries(data: bytes) -> None:
    """A request for messages is refused (InvalidRequest), or all that it asks for is within the limits, and within the
    subjects of its identity; a request id and the number of a broker in a path are refused, or are what was given.
    """
    texts = data.decode("utf-8", "surrogateescape").split("\n")
    query, accept, given, number, *_ = [*texts, "", "", "", ""]
    headers = {"Accept": accept, "Natslog-Request-Id": given}
    try:
        request = request_of(quote(query.encode("utf-8", "surrogateescape"), safe="=&+%,*>.:;"), headers, part=number)
    except ValueError:  # no URL for aiohttp
        return
    try:
        given = call_of("GET /v1/streams/{name}/messages", request).parameters
        asked = messages._question(request, given, _STREAM)
    except InvalidRequest:
        pass
    else:
        assert 0 <= asked.start <= 2**62
        assert asked.end is None or asked.start <= asked.end <= 2**62
        assert asked.max_bytes is None or 0 < asked.max_bytes <= 1 << 30
        assert 0 <= asked.wait_ms <= 60_000
        assert set(asked.columns or ()) <= set(COLUMNS)
        assert len(set(asked.columns or ())) == len(asked.columns or ())
        assert asked.allowed == ("orders.eu.>",) or includes("orders.eu.>", asked.subject or ">")
    with contextlib.suppress(InvalidRequest):
        change = context.request_id(request)
        assert len(change.id) == 32
        assert (change.id == "0" * 32) == (not given)
    with contextlib.suppress(InvalidRequest):
        drained = request_of(body=b'{"draining": true}', part=number)
        assert call_of("PATCH /v1/cluster/brokers/{id}", drained).parameters.id == int(number) <= 2**31


# ---- bodies ----


def _bodies() -> Iterator[bytes]:
    yield b'\0{"subject": "orders.>", "replicas": 3, "max_age": "7d", "max_bytes": "10GiB", "compression": "zstd"}'
    yield b'\1{"dedupe_window": null, "min_isr": 2, "acks": "header", "group": "g", "max_messages": 100}'
    yield b'\2{"below": 5}'
    part = b'{"part": "0", "attempt": 1, "rows": 3, "digest": "ab", "content": null}'
    yield b'\3{"parts": [' + part + b'], "on_conflict": "skip"}'
    yield b'\4{"streams": ["a"], "seen": {"a": ["id", 7]}, "wait_ms": 100}'
    yield b'\5{"positions": {"a": {"id": "x", "start": 7}}, "limits": {"max_rows": 10}, "tasks": {"cores": 4}}'
    yield b'\6{"ranges": [{"stream": "a", "id": "x", "start": 0, "end": 10, "min_splits": 2}], "max_rows": 3}'
    yield b'\0{"subject": "a", "max_age": 1e999, "max_bytes": -1, "dedupe_window": NaN}'


_BODY_WORDS = [
    b'"subject": "a"', b'"replicas": ', b'"max_age": ', b'"max_bytes": ', b'"below": ', b'"parts": [', b'"ranges": [',
    b'"content": ', b'"min_splits": ', b"Infinity", b"NaN", b"-1", b"1e999", b"true", b"null", b"[" * 3000,
    b'{"a":' * 3000,
    b'"\\ud800"', b"9" * 4400, b'"max_rows": ', b'"start": ', b'"7d"', b"9223372036854775808", b'"\xd9\xa3"',
]  # fmt: skip


@target("bodies", _bodies, _BODY_WORDS)
def check_bodies(data: bytes) -> None:
    """A body is refused (InvalidRequest, or the error that the handler documents), or its values are within their
    limits,
    and settings have a form in JSON that is read as the same settings.
    """
    kind, body = (data[0] if data else 0) % 7, data[1:]
    try:
        _check_handled(kind, request_of(body=body))
    except (InvalidRequest, OffsetOutOfRange, PayloadTooLarge) as error:
        error.to_json()


def _check_handled(kind: int, request: Any) -> None:
    match kind:
        case 0 | 1:
            base = StreamSettings(subject="orders.>", replicas=3, min_isr=2) if kind else None
            settings = parse_settings(call_of("POST /v1/streams", request).body, base)
            assert 1 <= settings.min_isr <= settings.replicas <= 9
            assert settings.max_bytes is None or 0 < settings.max_bytes < 2**63
            assert settings.dedupe_window_s >= 0
            shown = settings.to_json()
            for name in ("max_age", "dedupe_window"):
                assert shown[name] is None or shown[name] == "0ms" or parse_duration_s(shown[name]) > 0
        case 2:
            purge = call_of("POST /v1/streams/{name}/purge", request).body
            assert purge.below is UNSET or 0 <= purge.below <= 2**62
            assert not purge.keep or purge.below is UNSET
        case 3:
            commit = call_of("POST /v1/streams/{name}/appends/{producer}/{batch}", request).body
            assert len({receipt.part for receipt in commit.parts}) == len(commit.parts)
        case 4:
            asked = call_of("POST /v1/positions", request).body
            assert 0 <= asked.wait_ms <= 60_000
        case 5:
            plan = call_of("POST /v1/plans", request).body
            assert plan.tasks.cores >= 1
            assert all(0 <= one.start <= MAX_OFFSET for one in plan.positions.values())
        case _:
            ranges = call_of("POST /v1/splits", request).body
            assert all(one.min_splits >= 1 for one in ranges.ranges)
