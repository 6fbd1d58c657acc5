"""One NATS server and broker for the tests that need nothing special of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, running

_numbers = count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    with running(tmp_path_factory.mktemp("shared")) as both:
        yield both


@pytest.fixture
def nats_url(shared: tuple[NatsServer, BrokerProcess]) -> str:
    return shared[0].url


@pytest.fixture
def broker(shared: tuple[NatsServer, BrokerProcess]) -> BrokerProcess:
    return shared[1]


@pytest.fixture
def client(broker: BrokerProcess) -> NatslogClient:
    return broker.client()


@pytest.fixture
def name() -> str:
    """A stream name of this test's own; its subject space is the same word."""
    return f"test{next(_numbers)}"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder for a broker of the test's own."""
    return tmp_path / "own"
