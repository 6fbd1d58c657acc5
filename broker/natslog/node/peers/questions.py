"""Requests of other brokers (`Ask`), each answered in a separate task, with a bounded number at once."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from natslog.errors import NatslogError, Overloaded, ShuttingDown
from natslog.log_events import event
from natslog.node.peers.messages import MAX_VALUE_BYTES, Answered, Ask, Frame, Payload, decode_value
from natslog.node.supervisor import Supervisor
from natslog.request_ids import handling

logger = logging.getLogger("natslog.cluster")

_MOST_QUESTIONS = 1024
_CANCELLED_WITHIN_S = 1.0

Reply = Callable[[Frame, Payload | None], None]
Answerer = Callable[..., Awaitable[Any]]


class Answering(Protocol):
    @property
    def answerers(self) -> Mapping[str, Answerer]:
        """The function that answers each kind of request, called with its arguments by name."""


class Questions:
    """Args: `broker`: what answers."""

    def __init__(self, broker: Answering) -> None:
        self._broker = broker
        self._tasks = Supervisor(_log_bug)
        self._is_stopping = False

    def received(self, ask: Ask, reply: Reply) -> None:
        """Answers on the link from which the request was received."""
        if self._is_stopping:
            reply(_failure(ask, ShuttingDown("this broker is shutting down")), None)
            return
        if len(self._tasks) >= _MOST_QUESTIONS:
            reply(_failure(ask, Overloaded("too many requests at once")), None)
            return
        self._tasks.start(self._answer(ask, reply), f"answering {ask.what}")

    async def _answer(self, ask: Ask, reply: Reply) -> None:
        with handling(ask.request_id):
            reply(await self._answer_to(ask), None)

    async def _answer_to(self, ask: Ask) -> Answered:
        try:
            result = await self._broker.answerers[ask.what](**decode_value(ask.arguments))
        except NatslogError as error:
            return _failure(ask, error)
        except (KeyError, TypeError, ValueError) as error:
            logger.exception(
                "the request %r of another broker could not be answered", ask.what, extra=event("peer.request_error")
            )
            return _failure(ask, NatslogError(f"{ask.what}: {error!r}"))
        return _answered(ask, msgspec.json.encode(result))

    async def stop(self) -> None:
        """No more requests are answered. Those that wait for a thread end with it."""
        self._is_stopping = True
        await self._tasks.stop(within_s=_CANCELLED_WITHIN_S)


def _log_bug(task: str, error: BaseException) -> None:
    """The other broker gets no answer; all else goes on."""
    logger.error("%s failed: %r", task, error, exc_info=error, extra=event("peer.request_error"))


def _answered(ask: Ask, result: bytes) -> Answered:
    if len(result) <= MAX_VALUE_BYTES:
        return Answered(ask.number, result)
    return _failure(ask, NatslogError(f"{ask.what}: the answer has {len(result)} bytes"))


def _failure(ask: Ask, error: NatslogError) -> Answered:
    return Answered(ask.number, error=msgspec.json.encode(error.to_json()["error"], enc_hook=str))
