"""A NATS server that answers too late: the connection must go on whole, and its end be noticed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from natslog.errors import NatsUnavailable
from natslog.nats_server import NatsServer
from natslog.wire.link import NatsLink
from tests.harness import eventually

_NOTICED_WITHIN_S = 30.0


def _is_stopped(pid: int) -> bool:
    """Whether all of its threads are: the signal takes effect a moment later."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in stats)


@pytest.mark.timeout(60)
def test_connection_whose_server_was_stopped_for_a_moment_still_notices_its_end(tmp_path: Path) -> None:
    """A PONG comes for a question whose time is up."""

    async def story() -> None:
        server = NatsServer(0, tmp_path / "nats.log").start()
        is_up, is_lost = asyncio.Event(), asyncio.Event()
        link = NatsLink(server.url, name="late", on_state=lambda up: (is_up if up else is_lost).set())
        try:
            await link.open()
            await is_up.wait()
            await link.flush()
            os.kill(server.pid, signal.SIGSTOP)
            eventually(lambda: _is_stopped(server.pid), what="the server is stopped")
            with pytest.raises(NatsUnavailable):
                await link.flush(1.0)
            os.kill(server.pid, signal.SIGCONT)
            await link.flush()
            server.stop()
            async with asyncio.timeout(_NOTICED_WITHIN_S):
                await is_lost.wait()
        finally:
            await link.close()
            server.stop()

    asyncio.run(story())
