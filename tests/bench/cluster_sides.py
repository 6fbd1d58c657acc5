"""Three of each: brokers with one NATS server, and NATS servers whose JetStream keeps three replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats
from nats.js.api import StreamConfig

from natslog.nats_server import NatsServer, free_port
from tests.bench.sides import STREAM, SUBJECT, scratch
from tests.harness import BrokerProcess, eventually, write_secret


@contextmanager
def three_brokers(folder: Path, *, count: int = 3, **settings: Any) -> Iterator[tuple[NatsServer, list[BrokerProcess]]]:
    """A NATS server and a cluster of three (or `count`) that use it; all are gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    secret = write_secret(folder / "secret", "0123456789abcdef" * 2)
    server = NatsServer(0, folder / "nats.log").start()
    brokers = [
        BrokerProcess(folder / f"broker-{number}", server.url, broker_id=number, cluster_secret_file=secret, **settings)
        for number in range(1, count + 1)
    ]
    try:
        for broker in brokers:
            broker.settings["seeds"] = ",".join(other.url for other in brokers)
            broker.spawn()
        for broker in brokers:
            eventually(broker.ready, 60, f"broker at {broker.url} is ready")
        yield server, brokers
    finally:
        for broker in brokers:
            broker.kill()
        server.stop()


@contextmanager
def natslog_cluster_side(**settings: Any) -> Iterator[tuple[NatsServer, list[BrokerProcess]]]:
    """Three brokers (or `count`) with one empty stream of three replicas."""
    with scratch() as folder, three_brokers(folder / "natslog", **settings) as (server, brokers):
        brokers[0].client().create_stream(STREAM, SUBJECT, replicas=3)
        yield server, brokers


@contextmanager
def jetstream_cluster_side(*, sync_always: bool = False) -> Iterator[NatsServer]:
    """Three servers, file storage, fsync every 2 minutes (default) or for each message, one empty stream R3; yields the
    one that leads.
    """
    with scratch() as folder:
        routes = [free_port() for _ in range(3)]
        servers = [_server(folder, at, routes, "sync_interval: always" if sync_always else "") for at in range(3)]
        try:
            for server in servers:
                server.start()
            leader = asyncio.run(_make_replicated_stream(servers[0].url))
            yield servers[int(leader.removeprefix("n"))]
        finally:
            for server in servers:
                server.stop()


def _server(folder: Path, at: int, routes: list[int], storage: str) -> NatsServer:
    config = folder / f"nats-{at}.conf"
    peers = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    config.write_text(
        f'server_name: n{at}\njetstream {{ store_dir: "{folder / f"js{at}"}", {storage} }}\n'
        f'cluster {{ name: bench, listen: "127.0.0.1:{routes[at]}", routes: [{peers}] }}\n'
    )
    return NatsServer(0, folder / f"nats-{at}.log", arguments=("-c", str(config)))


async def _make_replicated_stream(url: str) -> str:
    """Returns the name of the server that leads it; forming the cluster takes some seconds."""
    connection = await nats.connect(url)
    jetstream = connection.jetstream(timeout=5)
    for _ in range(60):
        try:
            await jetstream.add_stream(StreamConfig(name=STREAM, subjects=[SUBJECT], num_replicas=3))
            break
        except (nats.js.errors.Error, nats.errors.Error, TimeoutError):
            await asyncio.sleep(0.5)
    info = await jetstream.stream_info(STREAM)
    await connection.close()
    assert info.cluster is not None
    assert info.cluster.leader is not None
    return info.cluster.leader
