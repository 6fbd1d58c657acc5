"""Background work: how much of a core it takes, and what a start may have to read."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from natslog.cluster.commands import BuryStream, Tombstone
from natslog.cluster.metadata import Metadata
from natslog.config import BrokerConfig
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from natslog.node.broker import Broker
from natslog.node.replicas import stream as stream_module
from natslog.node.replicas import upkeep as upkeep_module
from natslog.node.replicas.stream import HostedStream, Pacer
from natslog.node.replicas.upkeep import Upkeep, rolled_and_due
from tests.conftest import open_log, rows
from tests.harness import eventually
from tests.machine import Machine


def test_pauses_are_as_long_as_the_share_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], []
    monkeypatch.setattr(stream_module.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(stream_module.time, "sleep", slept.append)
    stopping = [False]
    pacer = Pacer(lambda: stopping[0])
    for share, worked in ((0.25, 0.02), (1.0, 0.02), (0.25, 5.0)):
        pacer.share = share
        clock[0] += worked
        pacer.pause()
    assert slept == [pytest.approx(0.06), 0.0, 0.25], "three times the work, none, and never long"
    stopping[0] = True
    clock[0] += 1
    pacer.pause()
    assert len(slept) == 3, "nobody who stops waits for it"


class _Ingest:
    """What upkeep asks of it: stream time, and a roll."""

    def __init__(self, now_us: int = 1_000_001) -> None:
        self.rolls = 0
        self.stream_time = self
        self.time_us = now_us

    def now_us(self) -> int:
        return self.time_us

    def behind_s(self) -> float:
        return 0.0

    def roll(self) -> None:
        self.rolls += 1


def hosted(folder: Path, batches: int) -> HostedStream:
    log = open_log(folder)
    for _ in range(batches):
        log.append(rows([b"x" * 1000]), 1_000_000)
    log.checkpoint()
    record = StreamRecord(
        name=folder.name,
        id=StreamId("0" * 32),
        settings=StreamSettings(subject="orders.>"),
        created_us=0,
        leader=BrokerId(1),
        leader_epoch=Epoch(1),
        replicas=(BrokerId(1),),
        isr=(BrokerId(1),),
    )
    stream = HostedStream(record, BrokerId(1), log)
    stream.ingest = _Ingest()  # type: ignore[assignment]
    return stream


def test_the_costliest_logs_are_rolled_when_a_start_would_have_too_much_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [hosted(tmp_path / name, batches) for name, batches in (("a", 1), ("b", 50), ("c", 20))]
    for at, stream in enumerate(streams):
        assert stream.usable_log().recovery_bytes > (1, 50, 20)[at] * 20 * 1024, "a batch costs more than its bytes"
    total = sum(stream.usable_log().recovery_bytes for stream in streams)
    monkeypatch.setattr(upkeep_module, "_RECOVERY_BYTES", total)
    assert rolled_and_due(streams) == []
    assert [stream.ingest.rolls for stream in streams] == [0, 0, 0]  # type: ignore[union-attr]
    monkeypatch.setattr(upkeep_module, "_RECOVERY_BYTES", total - 1)
    rolled_and_due(streams)
    assert [stream.ingest.rolls for stream in streams] == [0, 1, 0]  # type: ignore[union-attr]
    streams[1].usable_log().roll(1_000_002)
    assert rolled_and_due([streams[1]]) == [streams[1]], "what was rolled is due to be sealed"
    assert streams[1].usable_log().seal_next()
    assert not streams[1].usable_log().needs_upkeep()
    for stream in streams:
        stream.usable_log().close()


class _Overtaken(Pacer):
    """A pacer in whose first pause, amid the sealing of a segment, the stream is let go of by another thread."""

    def __init__(self, stream: HostedStream) -> None:
        super().__init__(lambda: False)
        self.stream = stream
        self.closing: threading.Thread | None = None

    def pause(self) -> None:
        if self.closing is None:
            log = self.stream.usable_log()
            self.stream.log = None
            self.closing = threading.Thread(target=log.close)
            self.closing.start()
            eventually(lambda: log._is_closed, 5, "it is being closed")


def test_a_stream_let_go_of_while_it_is_sealed_ends_the_sealing_and_nothing_else(tmp_path: Path) -> None:
    stream = hosted(tmp_path / "orders", 20)
    log = stream.usable_log()
    for _ in range(2):
        log.roll(1_000_002)
        log.append(rows([b"x" * 1000]), 1_000_000)
    pacer = _Overtaken(stream)
    stream.maintain(pacer)
    assert pacer.closing is not None, "it was sealing"
    pacer.closing.join(5)
    assert not pacer.closing.is_alive()
    stream.maintain(pacer)
    assert not log.seal_next(), "nothing is sealed behind the back of whoever opens the folder now"
    assert list((tmp_path / "orders").glob("*.arrow")) == []
    again = open_log(tmp_path / "orders")
    assert again.failure is None
    assert again.log_end_offset == 22
    again.close()


def test_a_stream_deleted_before_its_log_is_open_does_not_hold_up_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        broker = Broker(BrokerConfig(data_dir=str(tmp_path / "data"), broker_id=1))
        stream = hosted(tmp_path / "orders", 0)
        stream.usable_log().close()
        stream.log = None
        broker.streams["orders"] = stream
        waiting = asyncio.create_task(broker._wait_for_own_streams())
        await asyncio.sleep(0.05)
        assert not waiting.done(), "its log is not open yet"
        del broker.streams["orders"]
        await asyncio.wait_for(waiting, 5)
        broker._data_dir.release()

    asyncio.run(run())


class _Hosting:
    """What burying asks of it: whether a stream is here, and to remove its files."""

    me = BrokerId(1)

    def __init__(self) -> None:
        self.buried: list[str] = []

    def find(self, stream_id: StreamId) -> None:
        return None

    async def bury(self, stream_id: StreamId) -> None:
        self.buried.append(stream_id)


class _Group:
    def __init__(self, *tombstones: Tombstone) -> None:
        self.state = Metadata(cluster_id="c", tombstones={one.key: one for one in tombstones})

    async def propose(self, command: BuryStream) -> bool:
        return self.state.tombstones.pop(f"{command.id}/{command.broker}", None) is not None


@pytest.mark.parametrize(
    ("others", "steady_s", "jump_s", "deleted_before_s", "seen_s", "is_buried"),
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
    is_buried: bool,
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
        await upkeep._bury_tombstones()
        assert hosting.buried == []
        machine.ahead_s = jump_s
        broker.after(seen_s)
        await upkeep._bury_tombstones()

    asyncio.run(run())
    assert hosting.buried == ([mine.id] if is_buried else [])


class _Leading:
    """What makes a stream's replica its leader here."""

    is_exposed = True


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leader_decides_what_expires_and_by_stream_time(
    tmp_path: Path, leads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = hosted(tmp_path / "orders", 1)
    log = stream.usable_log()
    log.settings = msgspec.structs.replace(log.settings, max_age_s=40.0)
    log.roll(2_000_000)
    assert log.seal_next()
    pacer = Pacer(lambda: False)
    stream.leading, stream.is_ready = (_Leading() if leads else None), leads  # type: ignore[assignment]
    ingest = cast(_Ingest, stream.ingest)
    ingest.time_us = 41_000_000
    stream.maintain(pacer)
    assert log.log_start_offset == 0, "the message is 40 s old; the wall clock says decades"
    ingest.time_us += 1
    with caplog.at_level(logging.INFO, "natslog.node"):
        stream.maintain(pacer)
    assert log.log_start_offset == (1 if leads else 0)
    assert ("stream time is 1970-01-01T00:00:41.000001Z" in caplog.text) == leads
    log.close()
