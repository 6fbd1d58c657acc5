"""What a scenario of `program` receives, and how it is printed: without what differs from run to run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import APIError
from nats.js.errors import Error as JetStreamError

WITHIN_S = 30.0
NOT_WITHIN_S = 0.3  # how long a message that must not arrive is waited for
_DIFFERS = ("created", "ts", "last_active", "cluster", "num_waiting")


class Seen:
    """What a scenario received: printed as lines."""

    def __init__(self, js: JetStreamContext, scenario: str) -> None:
        self.js = js
        self.nc = js._nc
        self._scenario = scenario

    def saw(self, step: str, value: Any) -> None:
        line = {"scenario": self._scenario, "step": step, "saw": value}
        print(json.dumps(line, default=_as_text, separators=(",", ":")), flush=True)

    async def saw_of(self, step: str, awaited: Awaitable[Any], show: Callable[[Any], Any] = lambda value: value) -> Any:
        """Prints the result as `show` states it, or the error."""
        try:
            result = await awaited
        except (JetStreamError, TimeoutError) as error:
            self.saw(step, error_of(error))
            return None
        self.saw(step, show(result))
        return result


def _as_text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes | bytearray) else str(value)


def error_of(error: BaseException) -> dict[str, Any]:
    found: dict[str, Any] = {"error": type(error).__name__}
    if isinstance(error, APIError):
        found |= {name: getattr(error, name, None) for name in ("code", "err_code", "description")}
    return found


def nothing(_value: Any) -> str:
    return "done"


def config_of(config: Any) -> dict[str, Any]:
    """Settings that are set; an inbox is a generated name."""
    found = {name: value for name, value in config.as_dict().items() if value is not None}
    if str(found.get("deliver_subject", "")).startswith("_INBOX"):
        found["deliver_subject"] = "an inbox"
    return dict(sorted(found.items()))


def info_of(info: api.ConsumerInfo, *, is_named: bool = True) -> dict[str, Any]:
    sequences = {
        name: [one.consumer_seq, one.stream_seq]
        for name, one in (("delivered", info.delivered), ("ack_floor", info.ack_floor))
        if one is not None
    }
    counts = {name: getattr(info, name) for name in ("num_ack_pending", "num_redelivered", "num_pending", "push_bound")}
    config = config_of(info.config)
    if not is_named:
        config.pop("name", None)
    return {"name": info.name if is_named else "generated", "config": config} | sequences | counts


def state_of(info: api.StreamInfo) -> dict[str, Any]:
    names = ("messages", "bytes", "first_seq", "last_seq", "consumer_count", "num_deleted")
    return {name: getattr(info.state, name) for name in names}


def delivery_of(message: Msg) -> dict[str, Any]:
    return live_of(message) | {"pending": message.metadata.num_pending}


def live_of(message: Msg) -> dict[str, Any]:
    """Of a message that was published while it was waited for: what is pending then depends on time."""
    meta = message.metadata
    return {
        "subject": message.subject,
        "data": message.data,
        "stream_seq": meta.sequence.stream,
        "consumer_seq": meta.sequence.consumer,
        "delivered": meta.num_delivered,
    } | ({"headers": dict(message.headers)} if message.headers else {})


def deliveries_of(messages: Iterable[Msg]) -> list[dict[str, Any]]:
    return [delivery_of(message) for message in messages]


def live_deliveries_of(messages: Iterable[Msg]) -> list[dict[str, Any]]:
    return [live_of(message) for message in messages]


async def until(condition: Callable[[], Awaitable[Any]], within_s: float = WITHIN_S) -> Any:
    """The first true result."""
    deadline_s = time.monotonic() + within_s
    while not (result := await condition()):
        if time.monotonic() > deadline_s:
            raise TimeoutError
        await asyncio.sleep(0.02)
    return result


async def stream_with(seen: Seen, name: str, messages: int, **config: Any) -> None:
    """A stream on `<name>.>`, and messages `<name>.<0..4>`."""
    await seen.js.add_stream(name=name, subjects=[f"{name}.>"], **config)
    for at in range(messages):
        await seen.js.publish(f"{name}.{at % 5}", b"%d" % at)


async def when_acked(seen: Seen, stream: str, consumer: str) -> dict[str, Any]:
    """The consumer's state when nothing is pending: acks are not acknowledged themselves."""

    async def acked() -> api.ConsumerInfo | None:
        info = await seen.js.consumer_info(stream, consumer)
        return None if info.num_ack_pending else info

    return info_of(await until(acked))


async def is_waiting(seen: Seen, stream: str, consumer: str) -> bool:
    return bool((await seen.js.consumer_info(stream, consumer)).num_waiting)


async def all_of(subscription: Any, messages: list[Msg], number: int) -> list[Msg]:
    """A fetch may end with fewer messages than it asked for."""
    while len(messages) < number:
        messages += await subscription.fetch(number - len(messages), timeout=WITHIN_S)
    return messages
