"""A broker process: broker and HTTP server together, from start to a clean stop on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Callable

import msgspec
import pyarrow as pa

from natslog.config import BrokerConfig
from natslog.http import HttpServer
from natslog.node.broker import Broker

logger = logging.getLogger("natslog")


_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # glibc's malloc.h


def keep_memory_small() -> None:
    """Large buffers (sealing, responses) are returned to the system after use, instead of remaining in one of many
    arenas: without this a broker at full load grows by some 100 MiB.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every libc; it only saves memory
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1024 * 1024)
        mallopt(_M_ARENA_MAX, 2)


def keep_files_private() -> None:
    """Files that are created from here on can be read by the user of this process only."""
    os.umask(0o077)


async def run_broker(config: BrokerConfig, on_ready: Callable[[BrokerConfig], None]) -> None:
    """Returns after a clean stop.

    Args:
        on_ready: called with the settings (the port filled in) once requests are served.

    Raises:
        NatslogError: it cannot start, with the remedy. The exception of a bug, if one stopped the broker.
    """
    keep_memory_small()
    keep_files_private()
    broker = Broker(config)
    server = HttpServer(broker, config)
    _stop_on_signals(broker)
    try:
        port = await server.start()
        config = msgspec.structs.replace(config, http_port=port)
        broker.use_config(config)
        if await _has_started(broker):
            on_ready(config)
            await broker.stopping_soon.wait()
        logger.info("stopping: committing and acking the received messages")
    finally:
        try:
            await broker.stop()
        finally:
            await server.stop()
    if broker.failed is not None:
        raise broker.failed


async def _has_started(broker: Broker) -> bool:
    """False if it is to stop before it could start, for example while it waits for other brokers. Raises as `start`."""
    starting, stopping = asyncio.create_task(broker.start()), asyncio.create_task(broker.stopping_soon.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        await starting
        return True
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.wait({starting, stopping})


def _stop_on_signals(broker: Broker) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, broker.stopping_soon.set)
