"""Scenarios of a JetStream client, in Python: what nats-py receives from a server, one line of JSON per step.

    python -m tests.jetstream.clients.program nats://127.0.0.1:4222 [SCENARIO ...]

The lines state nothing that differs from run to run (times, generated names), so that two servers can be compared. A
scenario that fails prints the error and the next one runs; the exit code is then 1. Scenarios use streams of their own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import nats

from tests.jetstream.clients import acks, consumers, stores
from tests.jetstream.clients.seen import Seen, error_of

SCENARIO_WITHIN_S = 45.0

SCENARIOS: tuple[Callable[[Seen], Awaitable[None]], ...] = (
    stores.key_value,
    stores.key_value_watch,
    stores.objects,
    consumers.consumers,
    consumers.ordered,
    consumers.pull,
    consumers.pull_requests,
    consumers.push,
    consumers.queue_group,
    acks.acks,
    acks.ack_all,
    acks.redelivery,
    acks.in_progress,
    acks.work_queue,
    acks.interest,
    acks.purge,
)


async def play(url: str, chosen: list[str]) -> bool:
    """Whether every scenario ran to its end."""
    has_failed = False
    for scenario in SCENARIOS:
        if chosen and scenario.__name__ not in chosen:
            continue
        connection = await nats.connect(url)
        seen = Seen(connection.jetstream(), scenario.__name__)
        try:
            await asyncio.wait_for(scenario(seen), SCENARIO_WITHIN_S)
        except Exception as error:  # the next scenario shows more
            seen.saw("failed", error_of(error))
            has_failed = True
        finally:
            await connection.close()
    return not has_failed


if __name__ == "__main__":
    sys.exit(not asyncio.run(play(sys.argv[1], sys.argv[2:])))
