"""Damage in a replica that others can make good: what is damaged goes, and comes again from the leader.

Only once the metadata counts on this replica no more (`may_be_mended`): until then others might need it.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from pathlib import Path

from natslog.errors import NatslogError
from natslog.node.clock import now_us
from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.node")


def may_be_mended(stream: HostedStream) -> bool:
    """Whether others hold everything, one of them leads, and nobody counts on this replica."""
    record = stream.wanted
    is_counted = stream.me in record.candidates
    return record.settings.replicas > 1 and not is_counted and record.leader not in (None, stream.me)


async def mend(stream: HostedStream, executor: Executor) -> None:
    """Once the metadata counts on this replica no more: drops what is damaged; it comes again from the leader."""
    if not may_be_mended(stream):
        return
    record = stream.wanted
    loop, log = asyncio.get_running_loop(), stream.usable_log()
    start = await loop.run_in_executor(executor, log.first_damaged_offset)
    try:
        if start is not None:
            logger.warning("stream %s: damaged from offset %d on; it comes again from the leader", record.name, start)
            await loop.run_in_executor(executor, log.discard_from, start, now_us())
    except NatslogError as error:
        logger.error("stream %s: could not be mended yet: %s", record.name, error.message)
        return
    stream.damage = stream.problem = None


async def set_aside(stream: HostedStream, folder: Path, executor: Executor) -> None:
    """A log that cannot even be opened: its folder is kept under another name, and a new one begins."""
    if stream.log is not None or not may_be_mended(stream):
        return
    record = stream.wanted

    def rename() -> Path:
        number = 1
        while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
            number += 1
        folder.rename(aside)
        return aside

    aside = await asyncio.get_running_loop().run_in_executor(executor, rename)
    logger.warning("stream %s: its damaged folder is kept as %s; it comes again from the leader", record.name, aside)
    stream.damage = stream.problem = None
