"""What a bug does in work that goes on beside requests: the broker stops, rather than go on half alive."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from natslog.cluster.roles import FetchPosition
from natslog.config import BrokerConfig
from natslog.errors import StorageFull
from natslog.jetstream.api import JetStreamApi
from natslog.model import Epoch, StreamId
from natslog.node import broker as broker_module
from natslog.node.broker import Broker
from natslog.node.peers.messages import FetchRequest
from natslog.node.replicas.fetch_sessions import FetchSession


def served(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> Broker:
    """A broker that was asked by a follower, and met this error while it answered."""

    async def fail(session: FetchSession, request: FetchRequest) -> NoReturn:
        raise error

    monkeypatch.setattr(FetchSession, "_gathered", fail)

    async def story() -> Broker:
        broker = Broker(BrokerConfig(data_dir=str(folder)), JetStreamApi)
        peer: Any = SimpleNamespace(broker=2)
        changed = ((StreamId("orders"), FetchPosition(Epoch(1), 0, Epoch(0))),)
        broker.hosting.serve_fetch(peer, FetchRequest(1, "folder.1.n", changed), lambda response, payload: None)
        while broker._requested:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await broker.stop()
        return broker

    return asyncio.run(story())


def test_a_bug_while_serving_a_fetch_stops_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a debug line before, and the follower left the in-sync replicas silently."""
    broker = served(tmp_path, monkeypatch, KeyError("a bug"))
    assert isinstance(broker.failed, KeyError)
    assert broker.stopping_soon.is_set()


def test_an_error_in_operation_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = served(tmp_path, monkeypatch, StorageFull("no room"))
    assert broker.failed is None
    assert not broker.stopping_soon.is_set()


def test_every_request_that_brokers_send_has_an_answer(tmp_path: Path) -> None:
    """The table is compared with the names that stand in the code."""
    asking = re.compile(r'(?:ask\w*|_of_leaders?|_of_each)\((?:[\w.\[\]]+, )?"(\w+)"', re.DOTALL)
    package = Path(broker_module.__file__).parent.parent
    files = [*(package / "node").rglob("*.py"), *(package / "jetstream").rglob("*.py")]
    asked = {what for file in files for what in asking.findall(" ".join(file.read_text().split()).replace("( ", "("))}

    async def story() -> set[str]:
        broker = Broker(BrokerConfig(data_dir=str(tmp_path)), JetStreamApi)
        await broker.stop()
        return set(broker.answerers)

    answered = asyncio.run(story())
    assert len(asked) > 15
    assert asked <= answered
