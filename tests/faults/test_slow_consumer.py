"""A flood that a NATS server gives up on: what it costs is counted, and the other streams keep their connection."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from natslog.nats_server import NatsServer
from natslog.wire.lanes import LANES, lane_of
from tests.harness import BrokerProcess, eventually, flushed, with_nats

MIB = 2**20


@pytest.mark.long
def test_flood_on_one_stream_is_counted_and_leaves_the_others_connected(tmp_path: Path) -> None:
    settings = tmp_path / "nats.conf"
    settings.write_text("max_payload: 1MB, max_pending: 4MB, write_deadline: 1s")
    nats = NatsServer(0, tmp_path / "nats.log", arguments=("--config", str(settings))).start()
    broker = BrokerProcess(tmp_path / "data", nats.url).start()
    try:
        client = broker.client()
        ids = [str(client.create_stream(f"s{at}", f"s{at}")["id"]) for at in range(2 * LANES)]
        while len({lane_of(one) for one in ids}) == 1:  # ids are random, and with them the connections
            ids.append(str(client.create_stream(f"s{len(ids)}", f"s{len(ids)}")["id"]))
        elsewhere = {f"s{at}" for at, one in enumerate(ids) if lane_of(one) != lane_of(ids[0])}

        async def flood(connection: Any) -> set[str]:
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                asks = [
                    asyncio.create_task(connection.request(f"s{at}", b"x", timeout=30)) for at in range(1, len(ids))
                ]
                for _ in range(64):
                    await connection.publish("s0", bytes(MIB - 1000))
                await flushed(connection)
                await asyncio.sleep(2)
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            answers = await asyncio.gather(*asks, return_exceptions=True)
            return {json.loads(one.data)["stream"] for one in answers if not isinstance(one, BaseException)}

        acked = with_nats(nats.url, flood)
        assert "Slow Consumer" in (tmp_path / "nats.log").read_text(), "the server has given up on a connection"
        assert broker.metrics()["natslog_nats_connections_lost_total"] == 1
        assert elsewhere <= acked, "streams on other connections have lost nothing"
        eventually(broker.ready, 30, "it is connected again")
        assert "slow consumer" in broker.output()
        stored = client.position("s0")["high_watermark"]
        assert stored < 64

    finally:
        broker.kill()
        nats.stop()
