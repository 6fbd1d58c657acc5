"""One NATS server and broker for the tests that need nothing special of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, publish_acked, running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    with running(tmp_path_factory.mktemp("shared")) as both:
        yield both


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder for a broker of the test's own."""
    return tmp_path / "own"


@pytest.fixture
def filled(client: NatslogClient, nats_url: str, name: str) -> str:
    """A stream of 100 messages on two subjects, in many commits."""
    client.create_stream(name, f"{name}.>")
    for at in range(20):
        publish_acked(
            nats_url, f"{name}.{'even' if at % 2 == 0 else 'odd'}.x", [b"%d" % (5 * at + row) for row in range(5)]
        )
    return name
