"""Requests that no client sends by mistake: each gets a clear error, and costs the broker little."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

from natslog.client import NatslogClient
from tests.harness import BrokerProcess
from tests.integration.asking import ask, error


def raw(broker: BrokerProcess, data: bytes, within_s: float = 10) -> http.client.HTTPResponse:
    """The answer to these bytes."""
    address = urlsplit(broker.url)
    with socket.create_connection((address.hostname, address.port), within_s) as connection:
        connection.sendall(data)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        answer.body = answer.read()  # type: ignore[attr-defined]
    return answer


def test_column_that_is_named_twice_is_refused(broker: BrokerProcess, filled: str) -> None:
    path = f"/v1/streams/{filled}/messages?start=0&end=100&columns="
    for columns in ("value,value", ",".join(["value"] * 150), "offset,value,offset"):
        answer = ask(broker, "GET", path + columns)
        assert answer.status == 400, answer.data
        assert "twice" in error(answer)["message"]
    assert ask(broker, "GET", path + "offset,value").status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip", "x-unknown"])
def test_encoded_request_body_is_refused(broker: BrokerProcess, name: str, encoding: str) -> None:
    body = gzip.compress(json.dumps({"name": name, "subject": name}).encode())
    for data in (body, body[:-5], b"no gzip at all"):
        answer = ask(broker, "POST", "/v1/streams", data, Content_Encoding=encoding)
        assert answer.status == 415, answer.data
        assert error(answer)["code"] == "invalid_request"
        assert "Content-Encoding" in error(answer)["message"]
    plain = json.dumps({"name": name, "subject": name}).encode()
    assert ask(broker, "POST", "/v1/streams", plain, Content_Encoding="identity").status == 201


def test_pattern_that_no_name_can_need_is_refused(broker: BrokerProcess, filled: str) -> None:
    for pattern in ("*a" * 7500, "[" * 300, "?" * 1000):
        answer = ask(broker, "GET", f"/v1/streams?pattern={pattern}")
        assert answer.status == 400, answer.data
        assert error(answer)["parameter"] == "pattern"
    assert [one["name"] for one in ask(broker, "GET", f"/v1/streams?pattern={filled}*").json()] == [filled]


HUGE = 10**3999
"""JSON takes integers of up to 4,300 digits."""


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    ["9" * 5000, str(HUGE), "٣", "3.0", "1e3", "0x10", "３", "-1", "+3", "1_000"],
    ids=lambda one: ascii(one)[:8],
)
def test_what_is_no_number_is_refused_wherever_one_is_asked_for(
    broker: BrokerProcess, filled: str, number: str
) -> None:
    sent = quote(number)
    for path in (
        f"/v1/streams/{filled}/messages?start={sent}&end=5",
        f"/v1/streams/{filled}/messages?start=0&end={sent}",
        f"/v1/streams/{filled}/messages?start=0&max_bytes={sent}",
        f"/v1/streams/{filled}/messages?start=0&wait_ms={sent}",
        f"/v1/streams/{filled}/splits?start=0&end={sent}&max_rows=1",
        f"/v1/streams/{filled}/lag?offset={sent}",
        f"/v1/streams/{filled}/offsets?timestamp={sent if number != '-1' else 'x'}",  # a millisecond before 1970
    ):
        answer = ask(broker, "GET", path)
        assert 400 <= answer.status < 500, (path[:80], answer.status, answer.data[:200])
    for method, path in (("PUT", f"appends/p/{sent}/parts/a"), ("POST", f"appends/p/{sent}")):
        answer = ask(broker, method, f"/v1/streams/{filled}/{path}", b"")
        assert 400 <= answer.status < 500, (path[:80], answer.status, answer.data[:200])


@pytest.mark.parametrize("field", ["max_bytes", "max_age", "max_messages", "replicas", "min_isr", "dedupe_window"])
@pytest.mark.parametrize("value", [HUGE, -HUGE, "9" * 5000, "٣", 1e308, True, [], {}], ids=lambda one: str(one)[:8])
def test_settings_that_are_no_numbers_are_refused(broker: BrokerProcess, name: str, field: str, value: Any) -> None:
    answer = ask(broker, "POST", "/v1/streams", {"name": name, "subject": name, field: value})
    assert answer.status == 400, (answer.status, answer.data[:200])


def test_cursor_at_an_offset_that_is_no_number_is_refused(broker: BrokerProcess, filled: str) -> None:
    for value in (HUGE, -1, "3", 1.5, True, None):
        answer = ask(broker, "PUT", f"/v1/consumers/c/cursors/{filled}", {"offset": value})
        assert 400 <= answer.status < 500, (value, answer.status, answer.data[:200])


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PATCH", "/healthz", {"GET", "HEAD"}), ("DELETE", "/v1/streams", {"GET", "HEAD", "POST"})],
)
def test_wrong_method_names_those_that_are_allowed(
    broker: BrokerProcess, method: str, path: str, allowed: set[str]
) -> None:
    answer = ask(broker, method, path)
    assert answer.status == 405
    assert set(answer.headers["Allow"].split(",")) == allowed
    assert error(answer)["code"] == "invalid_request"


@pytest.mark.parametrize(
    "data",
    [
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/streams HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/streams HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/streams HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=range(9),
)
def test_what_is_no_http_is_answered_as_every_other_error(broker: BrokerProcess, data: bytes) -> None:
    answer = raw(broker, data)
    assert answer.status == 400
    assert answer.headers["Content-Type"].startswith("application/json")
    body = json.loads(answer.body)["error"]  # type: ignore[attr-defined]
    assert body["code"] == "invalid_request"
    assert len(body["message"]) < 300


def test_client_that_leaves_costs_no_line_of_log(broker: BrokerProcess, filled: str, client: NatslogClient) -> None:
    address = urlsplit(broker.url)
    before = len(broker.output())
    head = f"GET /v1/streams/{filled}/messages?start=0 HTTP/1.1\r\nHost: x\r\nAccept: application/x-ndjson\r\n\r\n"
    upload = b"POST /v1/streams HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    chunked = (
        f"PUT /v1/streams/{filled}/appends/p/0/parts/a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"
    )
    for data in (head.encode(), head.encode()[:30], upload, chunked.encode()):
        for _ in range(3):
            connection = socket.create_connection((address.hostname, address.port), 10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes with a reset
            connection.sendall(data)
            connection.close()
    assert client.stream(filled)["high_watermark"] == 100
    assert "Traceback" not in broker.output()[before:]


@pytest.mark.parametrize("text", [rb"\ud800", rb"\udfff\ud800", b"\xed\xa0\x80"])
def test_text_that_is_not_unicode_is_refused(broker: BrokerProcess, filled: str, text: bytes) -> None:
    """It would reach the metadata, where it cannot be stored: the broker would stop."""
    for method, path, body in (
        ("PUT", f"/v1/cursors/job/{filled}", b'{"offset": 1, "id": "%s"}'),
        ("PUT", f"/v1/cursors/job/{filled}", b'{"offset": 1, "lag": {"%s": 1}}'),
        ("PATCH", f"/v1/streams/{filled}", b'{"max_age": "%s"}'),
        ("POST", "/v1/cluster/brokers", b'{"url": "http://%s:9"}'),
        ("POST", "/v1/lags", b'{"%s": 1}'),
        ("POST", "/v1/positions", b'{"pattern": "%s"}'),
    ):
        answer = ask(broker, method, path, body % text)
        assert answer.status == 400, (method, path, answer.data)
        assert error(answer)["code"] == "invalid_request"
    assert ask(broker, "GET", "/readyz").status == 200


def test_unknown_expectation_is_ignored(broker: BrokerProcess, filled: str) -> None:
    """As RFC 9110 permits; aiohttp would refuse it with a text that is no error of this API."""
    for expectation in ("nonsense", "100-continue, nonsense", ""):
        assert ask(broker, "GET", f"/v1/streams/{filled}", Expect=expectation).status == 200
    head = f"PUT /v1/cursors/job/{filled} HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\nExpect: 100-Continue\r\n"
    with socket.create_connection((urlsplit(broker.url).hostname, urlsplit(broker.url).port), 10) as connection:
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b'{"offset": 7}')
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.long
@pytest.mark.parametrize(
    "odd",
    [
        "..%2F..%2Fescaped",
        "%2e%2e%2fescaped",
        "..%5Cescaped",
        "%2Ftmp%2Fescaped",
        "a%00b",
        "a%2Fb",
        "..",
        "%2e",
        "a..b",
        "con%0d%0aX:%20y",
        "%e2%80%ae",
        "ｏrders",
        "оrders",  # the first letter is Cyrillic
        "orders%20",
    ],
)
def test_names_in_paths_do_not_leave_the_data_folder_and_look_alikes_are_refused(
    broker: BrokerProcess, filled: str, odd: str
) -> None:
    parent = broker.folder.parent

    def outside() -> set[str]:
        return {one.name for one in parent.iterdir()}

    before, sent = outside(), quote(odd, safe="%.")
    for method, path in (
        ("GET", f"/v1/streams/{sent}"),
        ("DELETE", f"/v1/streams/{sent}"),
        ("GET", f"/v1/streams/{sent}/messages"),
        ("PUT", f"/v1/streams/{filled}/appends/{sent}/0/parts/0"),
        ("PUT", f"/v1/streams/{filled}/appends/p/0/parts/{sent}"),
        ("POST", f"/v1/streams/{filled}/appends/{sent}/0"),
        ("PUT", f"/v1/cursors/{sent}/{filled}"),
        ("DELETE", f"/v1/tokens/{sent}"),
    ):
        answer = ask(broker, method, path, b"{}" if method in ("PUT", "POST") else None)
        assert 400 <= answer.status < 500, (method, path, answer.data)
    decoded = unquote(odd)
    answer = ask(broker, "POST", "/v1/streams", json.dumps({"name": decoded, "subject": "x"}).encode())
    assert answer.status == 400, answer.data
    assert outside() == before
    assert not any("escaped" in one.name for one in broker.folder.rglob("*"))
