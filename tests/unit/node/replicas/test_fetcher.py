"""The follower's end of replication: what is a bug stops the broker, what may fail in operation is tried again."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from natslog.cluster.roles import Matching
from natslog.errors import StorageFull
from natslog.model import BrokerId, Epoch, StreamId
from natslog.node.peers.messages import FetchAnswer
from natslog.node.replicas.fetcher import Fetcher
from natslog.node.writes.pace import DiskPace


class Link:
    """A link whose frames end in an exception, or nowhere."""

    def __init__(self, error: BaseException | None) -> None:
        self.peer, self.error, self.sent = "peer", error, 0

    def begin_fetching(self, on_fetched: Any) -> None:
        pass

    def send(self, frame: Any) -> bool:
        self.sent += 1
        if self.error is not None:
            raise self.error
        return False


def bugs_of(link: Link, seconds: float) -> list[BaseException]:
    """What the broker is told while a stream is followed over this link."""
    bugs: list[BaseException] = []

    async def story() -> None:
        with ThreadPoolExecutor(1) as executor:
            fetcher = Fetcher(
                BrokerId(2),
                link=lambda: link,  # type: ignore[arg-type, return-value]
                incarnation="life",
                executor=executor,
                pace=DiskPace(),
                on_bug=lambda what, error: bugs.append(error),
            )
            stream: Any = SimpleNamespace(id="aa", position=lambda: None)
            fetcher.follow(stream)
            try:
                async with asyncio.timeout(seconds):
                    while not bugs:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            except TimeoutError:
                pass
            await fetcher.close()

    asyncio.run(story())
    return bugs


def test_a_bug_while_fetching_stops_the_broker() -> None:
    """It went on before, and the replica left the in-sync replicas silently."""
    (error,) = bugs_of(Link(KeyError("a bug")), 10)
    assert isinstance(error, KeyError)


def test_a_follower_without_space_receives_the_log_start_that_its_leader_has_moved() -> None:
    """Its own files below that are what makes space."""
    starts: list[tuple[int, int]] = []

    async def refusing(*_: Any) -> bool:
        raise StorageFull("the disk is full")

    async def story() -> None:
        with ThreadPoolExecutor(1) as executor:
            fetcher = Fetcher(
                BrokerId(2),
                link=lambda: None,
                incarnation="life",
                executor=executor,
                pace=DiskPace(),
                on_bug=lambda what, error: None,
            )
            stream: Any = SimpleNamespace(
                id="aa",
                name="orders",
                answered=refusing,
                is_companion=False,
                lacks_ids=lambda *given: False,
                leader_starts_at=lambda *given: starts.append(given),
            )
            answer = FetchAnswer(StreamId("aa"), Epoch(3), Matching(), 100, 70, 4)
            await fetcher._apply(stream, answer, memoryview(b"rows"))
            await fetcher.close()

    asyncio.run(story())
    assert starts == [(3, 70)]


def test_a_link_that_takes_nothing_is_tried_again() -> None:
    link = Link(None)
    assert bugs_of(link, 0.6) == []
    assert link.sent > 2
