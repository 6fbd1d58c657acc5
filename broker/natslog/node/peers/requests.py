"""Requests (`Ask`) of this broker: what another one answers, or this one by the same function (`questions`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from natslog.errors import BrokerUnavailable, NatslogError
from natslog.log_events import event
from natslog.model import BrokerId
from natslog.node.peers.links import DialledLink
from natslog.node.peers.questions import Answering

logger = logging.getLogger("natslog.cluster")


class Requests:
    """Args: `link_to`: the link to another broker, where it is up. `broker`: what this one answers."""

    def __init__(self, me: BrokerId, link_to: Callable[[BrokerId], DialledLink | None], broker: Answering) -> None:
        self._me, self._link_to, self._broker = me, link_to, broker

    async def ask(self, broker: BrokerId, what: str, within_s: float, **arguments: Any) -> Any:
        """One broker's answer; that of this one is not limited in time.

        Raises:
            BrokerUnavailable: there is no link to it, or it does not answer. Or the error of its refusal.
        """
        if broker == self._me:
            return await self._broker.answerers[what](**arguments)
        if (link := self._link_to(broker)) is None:
            raise BrokerUnavailable(f"broker {broker} is not connected: repeat the request when it is back")
        return await link.ask(what, within_s, **arguments)

    async def ask_if_up(self, broker: BrokerId | None, what: str, within_s: float, **arguments: Any) -> Any | None:
        """The same; None where another broker does not answer, or refuses: one of a version before has no such answer.
        Raises the errors of this broker.
        """
        if broker is None:
            return None
        if broker == self._me:
            return await self.ask(broker, what, within_s, **arguments)
        try:
            return await self.ask(broker, what, within_s, **arguments)
        except NatslogError as error:
            logger.debug("broker %d does not answer %s: %s", broker, what, error)
            return None

    async def ask_each(
        self, brokers: Iterable[BrokerId], what: str, within_s: float, **arguments: Any
    ) -> list[dict[str, Any]]:
        """The answers of these brokers, which are asked at once, in order: `broker` and `problem` where there is
        none.
        """

        async def one(broker: BrokerId) -> dict[str, Any]:
            try:
                found: dict[str, Any] = await self.ask(broker, what, within_s, **arguments)
            except NatslogError as error:
                return {"broker": broker, "problem": error.to_json()["error"]}
            return found

        return list(await asyncio.gather(*map(one, brokers)))

    async def ask_others(
        self, what: str, within_s: float, arguments: Mapping[BrokerId, Mapping[str, Any]]
    ) -> dict[BrokerId, dict[str, Any]]:
        """The answers of those of these brokers that answer. Args: arguments: of the request to each of them."""
        links = {broker: link for broker in arguments if (link := self._link_to(broker)) is not None}
        asks = [link.ask(what, within_s, **arguments[broker]) for broker, link in links.items()]
        found: dict[BrokerId, dict[str, Any]] = {}
        for broker, answer in zip(links, await asyncio.gather(*asks, return_exceptions=True), strict=True):
            if isinstance(answer, dict):
                found[broker] = answer
            elif not isinstance(answer, NatslogError):
                logger.error(
                    "the answer of broker %d to %s cannot be used: %s",
                    broker,
                    what,
                    answer,
                    extra=event("peer.answer_failed"),
                )
        return found
