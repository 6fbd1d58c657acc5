"""What background work deletes, and by whose clock: messages past their age, files of deleted streams."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from natslog.cluster.commands import DropTombstone, Tombstone
from natslog.cluster.metadata import Metadata
from natslog.config import BrokerConfig
from natslog.model import BrokerId, StreamId
from natslog.node.replicas import upkeep as upkeep_module
from natslog.node.replicas.upkeep import Pacer, Upkeep, maintain
from tests.machine import Machine
from tests.unit.node.replicas.upkeep_stage import expire, hosted


class _Hosting:
    """What deleting asks of it: whether a stream is here, and to remove its files."""

    me = BrokerId(1)

    def __init__(self) -> None:
        self.deleted: list[str] = []

    def find(self, stream_id: StreamId) -> None:
        return None

    async def delete_files(self, stream_id: StreamId) -> None:
        self.deleted.append(stream_id)


class _Group:
    def __init__(self, *tombstones: Tombstone) -> None:
        self.state = Metadata(cluster_id="c", tombstones={one.key: one for one in tombstones})

    async def propose(self, command: DropTombstone) -> bool:
        return self.state.tombstones.pop(f"{command.id}/{command.broker}", None) is not None


@pytest.mark.parametrize(
    ("others", "steady_s", "jump_s", "deleted_before_s", "seen_s", "is_deleted"),
    [
        ((), 0, 0, 0, 3599, False),
        ((), 0, 0, 0, 3600, True),
        ((), 0, 7200, 0, 3600, True),
        ((), 4000, 0, 7200, 599, False),
        ((), 4000, 0, 7200, 600, True),
        ((), 0, 0, 7200, 600, False),  # its clock was steady for ten minutes only
        ((), 4000, 7200, 0, 600, False),
        ((2, 3), 0, 0, 7200, 600, True),
        ((2, 3), 0, 7200, 0, 600, False),
        ((2, 3), 0, -7200, 7200, 600, True),
    ],
)
def test_files_of_a_deleted_stream_go_after_the_grace_period_and_not_because_the_clock_jumped(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    others: tuple[int, ...],
    steady_s: float,
    jump_s: float,
    deleted_before_s: float,
    seen_s: float,
    is_deleted: bool,
) -> None:
    machine = Machine(monkeypatch)
    broker = machine.broker(tmp_path, *others)
    broker.after(steady_s)
    deleted_us = int((machine.true_s - deleted_before_s) * 1e6)
    mine = Tombstone(id=StreamId("a" * 32), name="orders", deleted_us=deleted_us, broker=BrokerId(1))
    theirs = Tombstone(id=StreamId("b" * 32), name="returns", deleted_us=0, broker=BrokerId(2))
    hosting = _Hosting()
    monkeypatch.setattr(upkeep_module.time, "monotonic", lambda: machine.elapsed_s)

    async def run() -> None:
        config = BrokerConfig(data_dir="unused", broker_id=1, tombstone_grace_s=3600.0)
        group: Any = _Group(mine, theirs)
        upkeep = Upkeep(config, group, broker.clock, hosting, None, None)  # type: ignore[arg-type]
        await upkeep._delete_expired_streams()
        assert hosting.deleted == []
        machine.ahead_s = jump_s
        broker.after(seen_s)
        await upkeep._delete_expired_streams()

    asyncio.run(run())
    assert hosting.deleted == ([mine.id] if is_deleted else [])


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leader_decides_what_expires_and_by_stream_time(
    tmp_path: Path, leads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = hosted(tmp_path / "orders", 1)
    log = stream.usable_log()
    log.settings = msgspec.structs.replace(log.settings, max_age_s=40.0)
    stream.record = msgspec.structs.replace(stream.record, settings=log.settings)
    log.roll()
    assert log.upkeep.seal_next()
    pacer = Pacer(lambda: False)
    stream.is_leading = leads

    expire(stream, 41_000_000)
    assert log.first_readable_offset == 0, "the message is 40 s old; the wall clock says decades"
    expire(stream, 41_000_001)
    assert log.first_readable_offset == (1 if leads else 0)
    with caplog.at_level(logging.INFO, "natslog.node"):
        maintain([stream], pacer)
    assert log.log_start_offset == (1 if leads else 0)
    assert ("stream time is 1970-01-01T00:00:41.000001Z" in caplog.text) == leads
    log.close()
