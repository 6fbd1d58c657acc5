"""Passwords in URLs are shown nowhere: not in errors or their facts, in logs, or in the `repr()` of their holders."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from natslog.client import ClientOptions, NatslogClient, asking, parse_servers
from natslog.client.publisher import Publisher
from natslog.config import BrokerConfig, load_config
from natslog.errors import NatslogError
from natslog.wire.link import NatsLink
from pyspark_natslog.sink.http_options import HttpSinkOptions
from pyspark_natslog.sink.options import SinkOptions
from pyspark_natslog.source.options import SourceOptions

NATS_URL = "nats://user:SEC/RET@127.0.0.1:1"
SERVER = "http://user:SECRET@127.0.0.1:1"


@pytest.mark.parametrize(
    "holder",
    [
        BrokerConfig(nats_url=NATS_URL, advertise_url=SERVER, seeds=(SERVER,), peer_urls=(SERVER,)),
        ClientOptions(token="SECRET"),
        NatslogClient(SERVER),
        NatsLink(NATS_URL, name="test"),
        SinkOptions.parse({"natsServers": NATS_URL}),
        HttpSinkOptions.parse({"servers": SERVER, "path": "http", "stream": "orders"}),
        SourceOptions.parse({"servers": SERVER, "stream": "orders", "token": "SECRET"}),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_repr_shows_no_password(holder: object) -> None:
    shown = f"{holder!r} {holder!s} {holder}"
    assert "SEC" not in shown
    assert "RET" not in shown


def test_repr_of_a_configuration_shows_the_rest() -> None:
    shown = repr(BrokerConfig(nats_url=NATS_URL, peer_urls=("http://a:1",), broker_id=3))
    assert "nats_url='nats://…@127.0.0.1:1'" in shown
    assert "peer_urls=('http://a:1',)" in shown
    assert "broker_id=3" in shown


def _publish(url: str) -> None:
    with Publisher(url, connect_timeout_s=0.3):
        pass


def _ask(server: str) -> None:
    with NatslogClient(server, ClientOptions(retries=0, timeout_s=0.3)) as client:
        client.stream("orders")


@pytest.mark.parametrize(
    "fail",
    [
        lambda: _ask(SERVER),
        lambda: _ask("http://user:SEC/RET@127.0.0.1:1"),
        lambda: parse_servers("ftp://user:SECRET@a"),
        lambda: parse_servers("http://user:SECRET@a:99999999"),
        lambda: parse_servers("http://user:SECRET@[a"),
        lambda: load_config(None, {"peer_urls": "ftp://user:SECRET@a"}, {}),
        lambda: load_config(None, {"peer_urls": SERVER}, {}),
        lambda: load_config(None, {"advertise_url": "http://user:SEC/RET@a:b"}, {}),
        lambda: load_config(None, {"advertise_url": "http://user:SEC RET@a"}, {}),
        lambda: _publish(NATS_URL),
        lambda: _publish("nats://user:SECRET@127.0.0.1:port"),
        lambda: _publish("nats://user:SEC RET@127.0.0.1:1"),
    ],
)
def test_errors_and_logs_show_no_password(
    fail: Callable[[], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "LEADER_WITHIN_S", 0.2)
    with caplog.at_level(logging.DEBUG), pytest.raises(NatslogError) as failed:
        fail()
    shown = f"{failed.value!r} {json.dumps(failed.value.to_json())} {caplog.text}"
    shown += "".join(traceback.format_exception(failed.value, limit=0))  # with the errors that caused it
    assert "SEC" not in shown
    assert "RET" not in shown


def test_settings_file_that_is_wrong_shows_no_password(tmp_path: Path) -> None:
    path = tmp_path / "natslog.toml"
    path.write_text('peer_urls = ["user:SECRET@a"]\n')
    with pytest.raises(NatslogError) as failed:
        load_config(path, {}, {})
    assert "SECRET" not in failed.value.message
