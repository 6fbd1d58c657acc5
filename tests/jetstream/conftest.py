"""Both servers, for a module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, eventually
from tests.jetstream.both import Api, Both


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("jetstream")
    store = ("--jetstream", "--store_dir", str(folder / "store"))
    jetstream = NatsServer(0, folder / "jetstream.log", arguments=store).start()
    plain = NatsServer(0, folder / "nats.log").start()
    broker = BrokerProcess(folder / "broker", plain.url, nats_leaf_url=plain.leaf_url).start()
    found = Both(jetstream.url, plain.url)
    eventually(lambda: found.answers([Api("INFO")])[1] != ["no answer"], what="natslog serves the JetStream API")
    yield found
    broker.terminate()
    plain.stop()
    jetstream.stop()


@pytest.fixture
def both(servers: Both) -> Both:
    """Without streams."""
    servers.delete_all()
    return servers
