"""What a work queue removes: each message that was acked, also if the first try fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from pyroaring import BitMap64

from natslog.jetstream.consumers.retention import Retention


class Machine:
    """Of a consumer that has acked some messages since the last call."""

    def __init__(self) -> None:
        self.acked: list[int] = []

    def take_acked(self) -> Any:
        found, self.acked = self.acked, []
        return np.array(found, np.int64)


def test_acked_messages_that_could_not_be_removed_are_removed_later() -> None:
    machine, removed = Machine(), BitMap64()
    log = SimpleNamespace(visibility=SimpleNamespace(removed=SimpleNamespace(all=removed)))
    led: Any = SimpleNamespace(
        stream_config=lambda: SimpleNamespace(retention="workqueue"), stream=SimpleNamespace(usable_log=lambda: log)
    )
    retention, served = Retention(led), SimpleNamespace(machine=machine)

    def removable() -> list[int]:
        changed: Any = [served]
        return list(asyncio.run(retention.removable(changed)))

    machine.acked = [1, 3]
    assert removable() == [0, 2]
    retention.not_removed(BitMap64([0, 2]))
    machine.acked = [4]
    assert removable() == [0, 2, 3]
    assert removable() == []
