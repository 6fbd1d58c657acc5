"""A broker process: broker and HTTP server together, from start to a clean stop on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from natslog import tracing
from natslog.config import BrokerConfig
from natslog.http import HttpServer
from natslog.jetstream.api import JetStreamApi
from natslog.log_events import event
from natslog.node.broker import Broker
from natslog.process_memory import keep_memory_small, release_what_only_the_start_needed

logger = logging.getLogger("natslog")

_LONG_START_S, _AGAIN_S = 2.0, 10.0


def keep_files_private() -> None:
    """Files that are created from here on can be read by the user of this process only."""
    os.umask(0o077)


async def run_broker(config: BrokerConfig, on_ready: Callable[[BrokerConfig, str | None], None]) -> None:
    """Returns after a clean stop.

    Args:
        on_ready: called with the settings (with the port, and whether security applies) once requests are served, and
            with the token of the administrator, if this start has created it.

    Raises:
        NatslogError: it cannot start, with the remedy. The exception of a bug, if one stopped the broker.
    """
    keep_memory_small()
    keep_files_private()
    tracing.begin("natslog-broker", instance=str(config.broker_id))
    broker = Broker(config, JetStreamApi)
    server = HttpServer(broker, config)
    _stop_on_signals(broker)
    try:
        port = await server.start()
        config = msgspec.structs.replace(config, http_port=port)
        broker.use_config(config)
        async with _long_start_logged(broker):
            if has_started := await _has_started(broker):
                release_what_only_the_start_needed()
                config = msgspec.structs.replace(config, security=broker.guard.is_on)  # as it is in the cluster
                await broker.jetstream_api.start()
        if has_started:
            logger.info(
                f"ready at {config.url}", extra=event("broker.ready", address=config.url, path=broker.data_path)
            )
            on_ready(config, broker.take_admin_token())
            await broker.stopping_soon.wait()
        logger.info("stopping: committing and acking the received messages", extra=event("broker.stopping"))
    finally:
        try:
            await broker.jetstream_api.stop()
            await broker.stop()
        finally:
            await server.stop()
    if broker.failed is not None:
        raise broker.failed
    logger.info("stopped: everything that was acked is on disk", extra=event("broker.stopped"))


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


@asynccontextmanager
async def _long_start_logged(broker: Broker) -> AsyncIterator[None]:
    """Logs what a start that takes long waits for."""
    logging_it = asyncio.create_task(_log_long_start(broker))
    try:
        yield
    finally:
        logging_it.cancel()
        await asyncio.wait({logging_it})


async def _log_long_start(broker: Broker) -> None:
    """Until it is cancelled."""
    begun_s, pause_s = time.monotonic(), _LONG_START_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = _AGAIN_S
        if (reason := broker.not_ready_because()) is not None:
            logger.warning(
                f"not ready after {time.monotonic() - begun_s:.0f} s: {reason}",
                extra=event("broker.start_takes_long", reason=reason),
            )


def _stop_on_signals(broker: Broker) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, broker.stopping_soon.set)
