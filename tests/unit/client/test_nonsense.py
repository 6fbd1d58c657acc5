"""Servers that answer nonsense: each call of the client ends with a `NatslogError` that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import ClientOptions, NatslogClient, asking
from natslog.client.appending import PartUploader
from natslog.client.client import SplitRange
from natslog.errors import BrokerUnavailable, ConfigError, InvalidRequest, NatslogError
from natslog.model import PartReceipt
from tests.unit.client.answering import ID, Answers, empty_table, leader, serving

CALLS: dict[str, Callable[[NatslogClient], Any]] = {
    "cluster": lambda client: client.cluster(),
    "streams": lambda client: client.streams(current=True),
    "stream": lambda client: client.stream("orders"),
    "positions": lambda client: client.positions(names=["orders"]),
    "splits of several": lambda client: client.splits_of_several([SplitRange("orders", ID, 0, 10)]),
    "position": lambda client: client.position("orders"),
    "newest": lambda client: client.newest_position("orders"),
    "create": lambda client: client.create_stream("orders", "orders.>"),
    "edit": lambda client: client.edit_stream("orders", paused=True),
    "offset_at": lambda client: client.offset_at("orders", 0),
    "splits": lambda client: client.splits("orders", 0, 10),
    "extent": lambda client: client.extent("orders", 0, 10),
    "fetch": lambda client: client.fetch("orders", 0, 10, expected_id=ID),
    "read": lambda client: list(client.read("orders")),
    "cursors": lambda client: client.cursors(),
    "cursor": lambda client: client.cursor("job", "orders"),
    "set_cursor": lambda client: client.set_cursor("job", "orders", 1),
    "lag": lambda client: client.lag("orders", 1),
    "lags": lambda client: client.lags({"orders": 1}),
    "last_append": lambda client: client.last_append("orders", "job"),
    "stage_part": lambda client: client.stage_part("orders", "job", 1, "0", b"rows"),
    "commit": lambda client: client.commit_append("orders", "job", 1, [PartReceipt("0", 0, 1, "")]),
}

DEEP = b"[" * 200_000
HEADERS = {
    "Natslog-Next-Offset": "10",
    "Natslog-High-Watermark": "10",
    "Natslog-Log-Start-Offset": "0",
    "Natslog-Stream-Id": ID,
}
NONSENSE: dict[str, tuple[int, Any, dict[str, str]]] = {
    "html": (200, b"<html>It works!</html>", {}),
    "empty": (200, b"", {}),
    "no text": (200, b"\xff\xfe", {}),
    "a number": (200, 7, {}),
    "null": (200, None, {}),
    "a list": (200, [1, "a"], {}),
    "a list of lists": (200, [[]], {}),
    "deep": (200, DEEP, {}),
    "long number": (200, b"9" * 10_000, {}),
    "wrong types": (
        200,
        {"id": 7, "name": [], "offset": "x", "end": None, "bytes": {}, "batch": "y", "orders": 5, "brokers": 1},
        {},
    ),
    "one bound": (200, {"id": ID, "name": "orders", "high_watermark": 5, "orders": [], "batch": []}, {}),
    "gzip that is none": (200, b"abc", {"Content-Encoding": "gzip"}),
    "cut short": (200, b"{", {"Content-Length": "100"}),
    "500 without JSON": (500, b"<html>", {}),
    "503 without JSON": (503, b"<html>", {}),
    "500 with a list": (500, [1], {}),
    "500 with text as error": (500, {"error": "broken"}, {}),
    "500 with wrong error": (500, {"error": {"code": [], "self": 1, "message": {}, "kind": 1}}, {}),
    "500, deep": (500, DEEP, {}),
    "301": (301, b"", {"Location": "http://127.0.0.1:1/"}),
    "304": (304, b"", {}),
    "307 without Location": (307, b"", {}),
    "307 to no URL": (307, b"", {"Location": "ftp://[x"}),
    "307 to no host": (307, b"", {"Location": "http://"}),
    "header that is no number": (200, b"", HEADERS | {"Natslog-Next-Offset": "ten"}),
    "header too long": (200, b"", HEADERS | {"Natslog-Next-Offset": "9" * 5000, "Natslog-Leader-Epoch": "9" * 5000}),
    "negative header": (200, empty_table(), HEADERS | {"Natslog-Next-Offset": "-1"}),
    "no headers but one": (200, empty_table(), {"Natslog-Next-Offset": "10", "Natslog-Stream-Id": ID}),
    "no rows": (200, empty_table(), HEADERS),
    "Arrow cut short": (200, empty_table()[:100], HEADERS),
    "no Arrow": (200, b"\xff\xff\xff\xff\x10\x00\x00\x00aaaaaaaaaaaaaaaa", HEADERS),
}


class Same(dict[str, Any]):
    """The same answer to each call."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def get(self, call: str, default: Any = None) -> Any:
        return self.answer


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LEADER_WITHIN_S", 0.05)


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    with serving() as start:
        yield start


def client_of(url: str, **options: Any) -> NatslogClient:
    return NatslogClient(url, ClientOptions(retries=0, timeout_s=2, retry_interval_s=0.01, **options))


ACCEPTED = {
    ("cluster", "wrong types"), ("cluster", "one bound"), ("create", "wrong types"), ("create", "one bound"),
    ("edit", "wrong types"), ("edit", "one bound"), ("cursor", "wrong types"), ("cursor", "one bound"),
    ("set_cursor", "wrong types"), ("set_cursor", "one bound"), ("lag", "wrong types"), ("lag", "one bound"),
}  # fmt: skip
"""An object is handed on as it is."""


@pytest.mark.long
@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_is_a_natslog_error(serve: Callable[[Answers], str], nonsense: str) -> None:
    answers = Answers()
    answers.calls = Same(NONSENSE[nonsense])
    with client_of(serve(answers)) as client:
        for name, call in CALLS.items():
            if (name, nonsense) in ACCEPTED:
                continue
            with pytest.raises(NatslogError) as failed:
                call(client)
            assert failed.value.message, name


def test_endless_redirects_end_with_an_error(serve: Callable[[Answers], str]) -> None:
    answers = Answers()
    url = serve(answers)
    answers.calls = Same((307, b"", {"Location": f"{url}/v1/streams/orders"}))
    with client_of(url) as client, pytest.raises(BrokerUnavailable, match="redirected more than 3 times"):
        client.stream("orders")


def test_proxy_without_a_broker_behind_it_is_tried_again(serve: Callable[[Answers], str]) -> None:
    good = leader(1, 10)
    urls = f"{serve(Answers(orders=(502, b'<html>', {})))},{serve(good)}"
    with client_of(urls) as client:
        assert client.position("orders")["high_watermark"] == 10


@pytest.mark.parametrize("token", ["two\nlines", "näh", "a\rb", "\x00"])
def test_token_that_cannot_be_sent_is_a_config_error(token: str, tmp_path: Any) -> None:
    file = tmp_path / "token"
    file.write_bytes(token.encode("latin-1") + b"x")
    for options in ({"token": token}, {"token_file": str(file)}):
        with client_of("http://127.0.0.1:1", **options) as client, pytest.raises(ConfigError, match="token"):
            client.stream("orders")


def test_request_that_cannot_be_written_is_an_invalid_request(serve: Callable[[Answers], str]) -> None:
    with client_of(serve(leader(1, 10))) as client:
        for call in (
            lambda: client.stream("\ud800"),
            lambda: client.cursor("\ud800", "orders"),
            lambda: client.streams(pattern="\ud800"),
            lambda: client.create_stream("orders", "orders.>", max_age=object()),
            lambda: client.last_append("orders", "\ud800"),
        ):
            with pytest.raises(InvalidRequest, match="correct"):
                call()


def test_rows_of_another_schema_in_one_part_are_an_invalid_request(serve: Callable[[Answers], str]) -> None:
    with client_of(serve(leader(1, 10))) as client:
        uploader = PartUploader(client, "orders", "job", 1)
        uploader.add(pa.record_batch({"value": [b"a"]}))
        with pytest.raises(InvalidRequest, match="columns"):
            uploader.add(pa.record_batch({"value": [1]}))
