"""A broker process: broker and HTTP server together, from start to a clean stop on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

import msgspec

from natslog.config import BrokerConfig
from natslog.http import HttpServer
from natslog.node.broker import Broker

logger = logging.getLogger("natslog")


async def run_broker(config: BrokerConfig, on_ready: Callable[[BrokerConfig], None]) -> None:
    """Returns after a clean stop.

    Args:
        on_ready: called with the settings (the port filled in) once requests are served.

    Raises:
        NatslogError: it cannot start, with the remedy. Whatever a bug raised, if one stopped the broker.
    """
    broker = Broker(config)
    server = HttpServer(broker, config)
    _stop_on_signals(broker)
    try:
        port = await server.start()
        config = msgspec.structs.replace(config, http_port=port)
        broker.config = config
        await broker.start()
        on_ready(config)
        await broker.stopping_soon.wait()
        logger.info("stopping: committing and acking what was received")
    finally:
        try:
            await broker.stop()
        finally:
            await server.stop()
    if broker.failed is not None:
        raise broker.failed


def _stop_on_signals(broker: Broker) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, broker.stopping_soon.set)
