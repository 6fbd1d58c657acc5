"""A broker that may open no more files stays up, says why it refuses, and goes on when it may again."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StreamConfig

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess

_EXHAUSTED_S = 6.0


def limit_files(pid: int, most: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.long
@pytest.mark.parametrize("retention", [RetentionPolicy.INTEREST, RetentionPolicy.WORK_QUEUE])
def test_exhausted_descriptors_stop_no_broker(tmp_path: Path, retention: RetentionPolicy) -> None:
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = BrokerProcess(tmp_path / "broker", server.url, nats_leaf_url=server.leaf_url).start()
    try:
        asyncio.run(_publish_and_consume(server.url, broker, retention))
        assert "Traceback" not in broker.output()
        assert broker.terminate() < 10
    finally:
        broker.kill()
        server.stop()


async def _has_stream(js: Any, retention: RetentionPolicy) -> bool:
    """Once the JetStream API is served."""
    try:
        await js.add_stream(StreamConfig(name="JOBS", subjects=["jobs.>"], retention=retention))
    except (nats.errors.Error, nats.js.errors.Error):
        return False
    return True


async def _publish_and_consume(url: str, broker: BrokerProcess, retention: RetentionPolicy) -> None:
    connection = await nats.connect(url)
    js = connection.jetstream(timeout=10)
    async with asyncio.timeout(60):
        while not await _has_stream(js, retention):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await js.add_consumer("JOBS", ConsumerConfig(durable_name="worker", ack_policy=AckPolicy.EXPLICIT, ack_wait=2))
    pulled = await js.pull_subscribe_bind(consumer="worker", stream="JOBS")
    acked: set[int] = set()
    done: set[int] = set()
    soft = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)[0]

    async def step(number: int) -> None:
        try:
            await js.publish(f"jobs.{number % 7}", b"%d" % number, headers={"Nats-Msg-Id": str(number)}, timeout=2)
            acked.add(number)
            for message in await pulled.fetch(5, timeout=0.5):
                done.add(int(message.data))
                await message.ack_sync(timeout=2)
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError):
            await asyncio.sleep(0.05)

    for number in range(50):
        await step(number)
    number, until_s = 50, time.monotonic() + _EXHAUSTED_S
    while time.monotonic() < until_s:
        limit_files(broker.pid, open_files(broker.pid) + number % 3)
        await step(number)
        number += 1
    limit_files(broker.pid, soft)

    async def consumed() -> bool:
        nonlocal number
        await step(number)
        number += 1
        return acked <= done

    async with asyncio.timeout(60):
        while not await consumed():
            pass
    state: Any = (await js.stream_info("JOBS")).state
    async with asyncio.timeout(30):
        while state.messages:
            await asyncio.sleep(0.1)
            await step(number)
            state = (await js.stream_info("JOBS")).state
    await connection.close()
