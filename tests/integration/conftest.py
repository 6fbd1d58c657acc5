"""One NATS server and broker for the tests that need nothing special of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    with running(tmp_path_factory.mktemp("shared")) as both:
        yield both


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder for a broker of the test's own."""
    return tmp_path / "own"
