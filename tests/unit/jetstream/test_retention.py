"""Messages that consumers have acked are removed, also if recording that fails or is cancelled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap64

from natslog.jetstream.consumers.retention import Retention


class Machine:
    """Of a consumer that has acked these sequences since the last call."""

    def __init__(self, *acked: int) -> None:
        self._acked = list(acked)

    def take_acked(self) -> Any:
        found, self._acked = np.array(self._acked, np.int64), []
        return found


def retention(policy: str, *, first: int = 0, end: int = 10, known: Any = None) -> tuple[Retention, Any]:
    """Args: `known`: the consumers of the stream, by name; none of them is served."""
    visibility = SimpleNamespace(removed=SimpleNamespace(all=BitMap64()))
    log = SimpleNamespace(first_readable_offset=first, high_watermark=end, visibility=visibility)
    led: Any = SimpleNamespace(
        stream=SimpleNamespace(
            usable_log=lambda: log, name="A", record=object(), consumers=SimpleNamespace(consumers=known or {})
        ),
        stream_config=lambda: SimpleNamespace(retention=policy),
        store_soon=lambda: None,
        consumers={},
    )
    return Retention(led), log


def removable(found: Retention, *acked: int) -> list[int]:
    served: Any = SimpleNamespace(machine=Machine(*acked))
    return list(asyncio.run(found.removable([served])))


def test_acks_are_kept_until_they_are_recorded() -> None:
    found, log = retention("workqueue")
    assert removable(found, 3, 1) == [0, 2]
    found.not_recorded()
    assert not found.is_complete
    assert removable(found, 5) == [0, 2, 4], "with later ones"
    found.recorded()
    assert found.is_complete
    log.visibility.removed.all |= BitMap64([0, 2, 4])
    assert removable(found, 7) == [6]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_acks_of_a_deleted_consumer_count(is_recorded: bool) -> None:
    found, _ = retention("workqueue")
    served: Any = SimpleNamespace(machine=Machine(2))
    found.take_acked(served)
    assert not found.is_complete
    assert removable(found) == [1]
    if is_recorded:
        found.recorded()
    else:
        found.not_recorded()
    assert removable(found) == ([] if is_recorded else [1])


def test_acks_of_a_consumer_that_is_deleted_while_others_are_recorded_count() -> None:
    found, log = retention("workqueue")
    assert removable(found, 3) == [2]
    found.take_acked(SimpleNamespace(machine=Machine(5)))  # type: ignore[arg-type]
    found.recorded()
    assert not found.is_complete
    log.visibility.removed.all |= BitMap64([2])
    assert removable(found) == [4]


@pytest.mark.parametrize(
    ("first", "end", "is_complete"), [(0, 0, True), (10, 10, True), (0, 10, False), (9, 10, False)]
)
def test_messages_before_the_start_need_not_be_looked_at(first: int, end: int, is_complete: bool) -> None:
    found, _ = retention("interest", first=first, end=end)
    found.begin_again()
    assert found.is_complete == is_complete


def test_nothing_is_removed_for_lack_of_interest_while_a_consumer_is_not_served() -> None:
    """Its record may be damaged: every message of such a stream was removed then."""
    found, _ = retention("interest", known={"damaged": object()})
    found.begin_again()
    assert removable(found, 3) == []
    found.recorded()
    assert found.is_complete, "otherwise requests would wait for it, and block the event loop"
    found._led.stream.consumers.consumers.clear()
    assert not found.is_complete, "now there is something to do"


def test_messages_are_looked_at_again_if_that_was_not_recorded() -> None:
    found, _ = retention("interest", first=2)
    found._led.readers = None  # the executor of the event loop
    found._read = lambda rows, log, *which: _rows(*which)  # type: ignore[method-assign, assignment]
    assert removable(found) == list(range(2, 10)), "no consumer reads them"
    assert found.is_complete
    found.not_recorded()
    assert not found.is_complete


async def _rows(start: int, end: int) -> list[Any]:
    return [(np.arange(start, end) + 1, ["a"] * (end - start))]
