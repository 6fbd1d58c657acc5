"""Background work: how much of a core it takes, and what a start may have to read."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from natslog.cluster.metadata import Metadata
from natslog.config import BrokerConfig
from natslog.jetstream.api import JetStreamApi
from natslog.log import StoreLimit
from natslog.model import BrokerId, StreamSettings
from natslog.node.broker import Broker
from natslog.node.cluster_clock import ClusterClock
from natslog.node.replicas import upkeep as upkeep_module
from natslog.node.replicas.stream import HostedStream
from natslog.node.replicas.upkeep import Pacer, Upkeep, maintain, rolled_and_due
from natslog.node.supervisor import Supervisor
from tests.conftest import open_log, rows
from tests.harness import eventually
from tests.unit.node.replicas.upkeep_stage import UpkeepStream, expire, hosted


def test_pauses_are_as_long_as_the_share_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], []
    monkeypatch.setattr(upkeep_module.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(upkeep_module.time, "sleep", slept.append)
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


def test_the_costliest_logs_are_rolled_when_a_start_would_have_too_much_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [hosted(tmp_path / name, batches) for name, batches in (("a", 1), ("b", 50), ("c", 20))]
    for at, stream in enumerate(streams):
        assert stream.usable_log().recovery_bytes > (1, 50, 20)[at] * 20 * 1024, "a batch costs more than its bytes"
    total = sum(stream.usable_log().recovery_bytes for stream in streams)
    monkeypatch.setattr(upkeep_module, "_RECOVERY_BYTES", total)
    assert rolled_and_due(streams) == []
    assert [stream.ingest.rolls for stream in streams] == [0, 0, 0]
    monkeypatch.setattr(upkeep_module, "_RECOVERY_BYTES", total - 1)
    rolled_and_due(streams)
    assert [stream.ingest.rolls for stream in streams] == [0, 1, 0]
    streams[1].usable_log().roll()
    assert rolled_and_due([streams[1]]) == [streams[1]], "what was rolled is due to be sealed"
    assert streams[1].usable_log().upkeep.seal_next()
    assert not streams[1].usable_log().upkeep.merge_next()
    assert not streams[1].usable_log().upkeep.is_needed()
    for stream in streams:
        stream.usable_log().close()


class _Overtaken(Pacer):
    """A pacer in whose first pause, amid the sealing of a segment, the stream is let go of by another thread."""

    def __init__(self, stream: UpkeepStream) -> None:
        super().__init__(lambda: False)
        self.stream = stream
        self.closing: threading.Thread | None = None

    def pause(self) -> None:
        if self.closing is None:
            log = self.stream.usable_log()
            self.stream.log = None
            self.closing = threading.Thread(target=log.close)
            self.closing.start()
            eventually(lambda: log.shared.is_closed, 30, "it is being closed")


def test_a_stream_let_go_of_while_it_is_sealed_ends_the_sealing_and_nothing_else(tmp_path: Path) -> None:
    stream = hosted(tmp_path / "orders", 20)
    log = stream.usable_log()
    for _ in range(2):
        log.roll()
        log.append(rows([b"x" * 1000]), 1_000_000)
    pacer = _Overtaken(stream)
    maintain([stream], pacer)
    assert pacer.closing is not None, "it was sealing"
    pacer.closing.join(5)
    assert not pacer.closing.is_alive()
    maintain([stream], pacer)
    assert not log.upkeep.seal_next(), "nothing is sealed behind the back of whoever opens the folder now"
    assert list((tmp_path / "orders").glob("*.arrow")) == []
    again = open_log(tmp_path / "orders")
    assert again.failure is None
    assert again.log_end_offset == 22
    again.close()


class _Overwhelmed(Pacer):
    """A pacer beside which a stream fills a segment whenever another one is sealed."""

    def __init__(self, stream: UpkeepStream) -> None:
        super().__init__(lambda: False)
        self.stream = stream
        self.pauses = 0

    def pause(self) -> None:
        self.pauses += 1
        assert self.pauses < 5000, "the round does not end"
        log = self.stream.usable_log()
        for _ in range(2):
            log.append(rows([b"x" * 1000]), 1_000_000)
        log.roll()


@pytest.mark.long
def test_one_stream_that_fills_segments_faster_than_they_are_sealed_holds_up_no_other(tmp_path: Path) -> None:
    flooded, quiet = hosted(tmp_path / "flooded", 1), hosted(tmp_path / "quiet", 1)
    for stream in (flooded, quiet):
        for at in range(30):
            stream.usable_log().append(rows([b"x" * 1000]), 1_000_000)
            if at % 3 == 0:
                stream.usable_log().roll()
    quiet.usable_log().settings = StreamSettings(subject="orders.>", max_messages=10)
    pacer = _Overwhelmed(flooded)
    assert maintain([flooded, quiet], pacer, sealing_s=2.0), "there is more to be sealed: the next round is due at once"
    assert quiet.usable_log().checkpointed == quiet.usable_log().high_watermark
    assert quiet.usable_log().log_start_offset > 10, "what is past retention need not be sealed first"
    assert not quiet.usable_log().chain.has_unsealed, "streams take turns"
    assert list((tmp_path / "flooded").glob("*.arrow"))
    checkpointed = flooded.usable_log().checkpointed
    maintain([flooded, quiet], pacer, sealing_s=0.1)
    assert flooded.usable_log().checkpointed > checkpointed
    for stream in (flooded, quiet):
        stream.usable_log().close()


@pytest.mark.long
def test_a_round_that_left_segments_is_followed_by_another_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[float] = []

    def behind(streams: list[HostedStream], pacer: Pacer) -> bool:
        pacer.pause()  # by the time of this thread
        rounds.append(time.monotonic())
        return len(rounds) < 5

    async def nothing() -> None:
        pass

    monkeypatch.setattr(upkeep_module, "maintain", behind)

    async def run() -> None:
        config = BrokerConfig(data_dir="unused", broker_id=1, retention_interval_s=1.0)
        group: Any = SimpleNamespace(state=Metadata(cluster_id="c"))
        hosting: Any = SimpleNamespace(me=BrokerId(1), streams={}, services=SimpleNamespace(store=StoreLimit(None)))
        clock, staging = ClusterClock(BrokerId(1), tmp_path / "clock"), SimpleNamespace(drop_forgotten=nothing)
        upkeep = Upkeep(config, group, clock, hosting, staging, None)  # type: ignore[arg-type]
        tasks = Supervisor(lambda what, error: pytest.fail(f"{what}: {error}"))
        tasks.start(upkeep.run(), "upkeep")
        async with asyncio.timeout(20):
            while len(rounds) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        upkeep.stop_soon()
        await tasks.ended()

    asyncio.run(run())
    assert rounds[4] - rounds[0] < 0.9, "while it is behind, it does not wait"
    assert rounds[5] - rounds[4] >= 0.9, "then it does"


def test_the_share_grows_with_the_backlog_and_shrinks_with_it() -> None:
    pacer, shares = Pacer(lambda: False), []
    for unsealed in (1, 8, 12, 16, 100, 12, 1):
        pacer.adapt(unsealed)
        shares.append(pacer.share)
    assert shares == [0.25, 0.25, 0.625, 1.0, 1.0, 0.625, 0.25]


def test_a_stream_deleted_before_its_log_is_open_does_not_hold_up_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        broker = Broker(BrokerConfig(data_dir=str(tmp_path / "data"), broker_id=1), JetStreamApi)
        stream = hosted(tmp_path / "orders", 0)
        stream.usable_log().close()
        stream.log, stream.is_ready, stream.reconciled = None, False, asyncio.Event()
        broker.streams["orders"] = stream
        waiting = asyncio.create_task(broker._wait_for_own_streams())
        await asyncio.sleep(0.05)
        assert not waiting.done(), "its log is not open yet"
        del broker.streams["orders"]
        await asyncio.wait_for(waiting, 5)
        broker._data_dir.release()

    asyncio.run(run())


@pytest.mark.parametrize(("import_state", "start"), [("importing", 0), ("imported", 0), ("", 2)])
def test_messages_of_an_imported_stream_expire_only_when_it_was_resumed(
    import_state: str, start: int, tmp_path: Path
) -> None:
    stream = hosted(tmp_path / "s", 2)
    log = stream.usable_log()
    log.roll()
    log.settings = msgspec.structs.replace(log.settings, max_age_s=1.0)
    stream.record = msgspec.structs.replace(stream.record, import_state=import_state, settings=log.settings)
    expire(stream, 10_000_000)
    maintain([stream], Pacer(lambda: False))
    assert log.log_start_offset == start
    log.close()
