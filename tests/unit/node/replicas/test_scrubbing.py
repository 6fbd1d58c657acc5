"""Scrubbing in the background: its rate, what it reports, when it begins and continues, and what idle streams cost."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from natslog.cluster.commands import DisableReplicas
from natslog.cluster.damage import Losses
from natslog.config import BrokerConfig, load_config
from natslog.errors import BrokerUnavailable, ConfigError, CorruptLog
from natslog.log import ReplicaLog
from natslog.log.repairing import FetchedBatches
from natslog.model import BrokerId
from natslog.node.cluster_clock import ClusterClock
from natslog.node.replicas import scrubbing
from natslog.node.replicas.range_repair import _piece
from natslog.node.replicas.scrubbing import Scrubber, pause_s
from natslog.node.replicas.stream import HostedStream
from natslog.node.supervisor import Supervisor
from tests.conftest import open_log, rows, stored_values
from tests.unit.log.test_scrub import flip, segment_at
from tests.unit.node.replicas.replica_stage import ME, OTHER, ReplicaStage, append, new_record, run
from tests.unit.node.replicas.upkeep_stage import UpkeepStream, hosted

_FAST = 1 << 30


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing, "_CHECK_EVERY_S", 0.02)


class ScrubbedStream(UpkeepStream):
    """With sealed segments of three messages each."""

    def __init__(self, folder: Path, segments: int) -> None:
        stream = hosted(folder, 0)
        super().__init__(stream.record, stream.log)
        self.me, self.is_to_be_repaired, self.has_others_in_sync = BrokerId(1), False, True
        self.scrubbed_bytes = self.scrub_damaged = self.scrub_repaired = 0
        self.losses = Losses()
        self.damage: list[Any] = []
        self.reported: list[str] = []
        for _ in range(segments):
            log = self.usable_log()
            log.append(rows([os.urandom(1000) for _ in range(3)]), 1_000_000)
            log.roll()
            assert log.upkeep.seal_next()

    def report(self, kind: str, message: str) -> None:
        self.reported.append(kind)

    @property
    def scrub_problem(self) -> Any:
        return self.usable_log().scrub.problem

    def note_damage(self, error: Any) -> None:
        if not self.damage:  # as a replica, until it is repaired
            self.damage.append(error)


def scrubber_of(tmp_path: Path, streams: dict[str, Any], executor: ThreadPoolExecutor, **settings: Any) -> Scrubber:
    settings = {"scrub_max_bytes_per_s": _FAST} | settings
    clock = ClusterClock(ME, tmp_path / "clock")
    clock.refresh([ME])
    cluster: Any = SimpleNamespace(me=ME, clock=clock, link_to=lambda broker: None)
    hosting: Any = SimpleNamespace(streams=streams, require=streams.__getitem__)

    async def record_gaps(stream: Any) -> None:
        """There are none."""

    removing: Any = SimpleNamespace(record_gaps=record_gaps)
    return Scrubber(BrokerConfig(data_dir="unused", **settings), cluster, hosting, executor, removing)


Story = Callable[[Scrubber], Awaitable[None]]


def scrubbing_of(tmp_path: Path, streams: dict[str, Any], story: Story, **settings: Any) -> None:
    """Runs the story beside a scrubber."""

    async def run() -> None:
        with ThreadPoolExecutor(1) as executor:
            scrubber = scrubber_of(tmp_path, streams, executor, **settings)
            tasks = Supervisor(lambda what, error: pytest.fail(f"{what}: {error!r}"))
            tasks.start(scrubber.run(), "scrubbing")
            try:
                async with asyncio.timeout(20):
                    await story(scrubber)
            finally:
                scrubber.stop_soon()
                await tasks.ended()

    asyncio.run(run())
    for stream in streams.values():
        stream.usable_log().close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_a_pause_keeps_to_the_rate_and_to_a_twentieth_of_the_time() -> None:
    assert pause_s(1 << 20, 0.001, 8 << 20) == pytest.approx(0.125), "the configured rate"
    assert pause_s(1 << 20, 0.1, 8 << 20) == pytest.approx(1.9), "a slow or busy disk: nineteen times as long"
    assert pause_s(1 << 20, 60.0, 8 << 20) == 10.0


def test_streams_are_read_once_an_interval(tmp_path: Path) -> None:
    streams = {name: ScrubbedStream(tmp_path / name, 3) for name in ("a", "b")}

    async def story(scrubber: Scrubber) -> None:
        await until(lambda: all(one.usable_log().scrub.completed_us for one in streams.values()))
        read = [one.scrubbed_bytes for one in streams.values()]
        for stream, count in zip(streams.values(), read, strict=True):
            log = stream.usable_log()
            assert count == sum(sum(segment_at(log, at).index.lengths) for at in range(3))
        await asyncio.sleep(0.3)  # several rounds
        assert [one.scrubbed_bytes for one in streams.values()] == read
        state = await scrubber.on_this_broker("a")
        assert (state["broker"], state["progress"], state["damaged"]) == (ME, None, [])
        assert abs(state["completed_us"] / 1e6 - time.time()) < 30

    scrubbing_of(tmp_path, streams, story)
    again = open_log(tmp_path / "a")
    assert again.scrub.completed_us > 0, "it is known after a restart"
    again.close()


def test_a_single_replica_names_the_offsets_once_and_reads_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = ScrubbedStream(tmp_path / "orders", 4)
    log = stream.usable_log()
    for at in (1, 2):
        path = segment_at(log, at).path
        flip(path, path.stat().st_size // 3)
    caplog.set_level(logging.ERROR)

    async def story(scrubber: Scrubber) -> None:
        await until(lambda: log.scrub.passes >= 3 and not log.scrub.is_running)
        assert (await scrubber.on_this_broker("orders"))["damaged"] == [(3, 6), (6, 9)]

    scrubbing_of(tmp_path, {"orders": stream}, story, scrub_interval_s=0.001)
    errors = [one.getMessage() for one in caplog.records if "scrubbing found damage" in one.getMessage()]
    assert ["offsets 3 to 5" in errors[0], "offsets 6 to 8" in errors[1], len(errors)] == [True, True, 2]
    assert stream.scrub_damaged == 2
    assert "offsets 3 to 5, 6 to 8 are damaged" in str(log.scrub.problem)


def test_a_requested_pass_begins_at_once_even_if_scrubbing_is_off(tmp_path: Path) -> None:
    stream = ScrubbedStream(tmp_path / "orders", 2)

    async def story(scrubber: Scrubber) -> None:
        await asyncio.sleep(0.05)
        assert stream.scrubbed_bytes == 0
        state = await scrubber.on_this_broker("orders", begin=True)
        assert state["progress"] == 0.0
        await until(lambda: not stream.usable_log().scrub.is_running)
        assert stream.scrubbed_bytes > 6000

    scrubbing_of(tmp_path, {"orders": stream}, story, scrub_interval_s=0.0)


def test_a_stop_ends_a_pass_soon_and_it_continues_after_a_restart(tmp_path: Path) -> None:
    stream = ScrubbedStream(tmp_path / "orders", 4)
    log = stream.usable_log()

    async def story(scrubber: Scrubber) -> None:
        await until(lambda: log.scrub._known.next_offset >= 3)

    started_s = time.monotonic()
    scrubbing_of(tmp_path, {"orders": stream}, story, scrub_max_bytes_per_s=8000)
    assert time.monotonic() - started_s < 5, "it does not wait for the end of a pause"
    again = open_log(tmp_path / "orders")
    assert again.scrub.is_running
    assert again.scrub._known.next_offset >= 3
    again.close()


def test_a_replica_that_is_the_only_one_in_sync_goes_on_until_another_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubbing, "_CHECK_EVERY_S", 0.02)
    stream = ScrubbedStream(tmp_path / "orders", 3)
    stream.has_others_in_sync = False
    log = stream.usable_log()
    first = segment_at(log, 0)
    flip(first.path, first.size_bytes // 3)

    async def story(scrubber: Scrubber) -> None:
        await until(lambda: log.scrub.completed_us)
        assert (len(log.scrub.damaged), stream.damage) == (1, [])
        asked: list[BrokerId] = []
        scrubber.repairs._cluster.link_to = asked.append  # type: ignore[assignment, method-assign]
        stream.record = msgspec.structs.replace(stream.record, replicas=(ME, OTHER), isr=(ME, OTHER))
        stream.has_others_in_sync = True
        await until(lambda: asked)
        assert set(asked) == {OTHER}

    scrubbing_of(tmp_path, {"orders": stream}, story)


def test_a_pass_waits_while_the_process_has_too_few_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing, "_REPAIR_POLL_S", 0.02)
    stream = ScrubbedStream(tmp_path / "orders", 3)
    log, failures = stream.usable_log(), [OSError(errno.EMFILE, "too many open files")]
    read_some = scrubbing._read_some

    def failing(reading: Any) -> Any:
        if failures:
            raise failures.pop()
        return read_some(reading)

    monkeypatch.setattr(scrubbing, "_read_some", failing)

    async def story(scrubber: Scrubber) -> None:
        await until(lambda: log.scrub.completed_us)

    scrubbing_of(tmp_path, {"orders": stream}, story)
    assert (failures, log.scrub.damaged) == ([], ())


def test_a_segment_removed_while_it_is_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ScrubbedStream(tmp_path / "orders", 3)
    log = stream.usable_log()
    first = segment_at(log, 0)
    flip(first.path, first.size_bytes // 3)
    read_some = scrubbing._read_some

    def removing(reading: Any) -> Any:
        taken = read_some(reading)
        log.upkeep.drop_before(3)
        return taken

    monkeypatch.setattr(scrubbing, "_read_some", removing)

    async def story(scrubber: Scrubber) -> None:
        await until(lambda: log.scrub.completed_us)

    scrubbing_of(tmp_path, {"orders": stream}, story)
    assert (stream.damage, stream.scrub_damaged, log.scrub.damaged) == ([], 0, ())


def test_idle_streams_touch_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ScrubbedStream(tmp_path / "orders", 1)
    log = stream.usable_log()
    scrubber = scrubber_of(tmp_path, {f"s{at}": stream for at in range(5000)}, ThreadPoolExecutor(1))
    log.scrub.begin(log.chain, scrubber._now_us())
    log.scrub.complete(scrubber._now_us(), 0)

    def fail(*arguments: Any, **named: Any) -> Any:
        pytest.fail(f"a file is touched: {arguments}")

    with monkeypatch.context() as patch:
        for name in ("open", "stat", "pread"):
            patch.setattr(os, name, fail)
        started_s = time.thread_time()
        assert scrubber._due() == []
        assert time.thread_time() - started_s < 0.25
    log.close()


class Peer:
    """Another broker with a replica of the stream; asked as over a link."""

    def __init__(self, log: ReplicaLog) -> None:
        self.log, self.is_connected = log, True
        self.asked: list[tuple[int, int]] = []

    async def ask(self, what: str, timeout_s: float, **asked: Any) -> Any:
        assert what == "stored_batches"
        if not self.is_connected:
            raise BrokerUnavailable("not connected")
        self.asked.append((asked["start"], asked["end"]))
        return json.loads(json.dumps(_piece(self.log, asked["start"], asked["end"], asked["at"])))


async def damaged_stream(stage: ReplicaStage, at: int = 1) -> tuple[HostedStream, Peer, list[bytes]]:
    """A leader with a damaged segment, and a follower that is in sync."""
    stream = await stage.host(new_record())
    await stage.change(stream, holders=stream.record.replicas)
    log = stream.usable_log()
    for _ in range(3):
        append(stream, os.urandom(5000))
        log.chain.committed = log.log_end_offset
        log.roll()
        assert log.upkeep.seal_next()
    values = stored_values(log)
    shutil.copytree(stream.folder, stage.folder / "other")
    path = segment_at(log, at).path
    flip(path, path.stat().st_size // 3)
    return stream, Peer(open_log(stage.folder / "other")), values


def scrubber_with(tmp_path: Path, stream: HostedStream, peer: Peer, executor: ThreadPoolExecutor) -> Scrubber:
    scrubber = scrubber_of(tmp_path, {"orders": stream}, executor)
    scrubber.repairs._cluster.link_to = lambda broker: peer  # type: ignore[assignment, return-value, method-assign]
    return scrubber


def test_damage_found_by_scrubbing_is_repaired_in_place_while_the_replica_leads(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream, peer, values = await damaged_stream(stage)
        log = stream.usable_log()
        stage.proposed.clear()
        with ThreadPoolExecutor(1) as executor:
            scrubber = scrubber_with(tmp_path, stream, peer, executor)
            await scrubber._take_turn(stream)
        assert (peer.asked, stored_values(log), log.scrub.damaged) == ([(1, 2)], values, ())
        assert (stream.scrub_damaged, stream.scrub_repaired) == (1, 1)
        stream.driver.tick({})
        assert (stream.damage, stream.is_leading) == (None, True)
        assert DisableReplicas not in [type(one) for one in stage.proposed]
        await stream.driver.stop()

    run(tmp_path, story)


@pytest.mark.parametrize("is_alone", [False, True])
def test_damage_that_a_reader_finds_is_repaired_in_place(tmp_path: Path, is_alone: bool) -> None:
    """Also where it was found while no other replica was in sync: the repair waits for one."""

    async def story(stage: ReplicaStage) -> None:
        stream, peer, values = await damaged_stream(stage)
        if is_alone:
            await stage.change(stream, isr=(ME,))
        log, woken = stream.usable_log(), list[bool]()
        stage.damage_found = lambda: woken.append(True)  # type: ignore[method-assign]
        log.reader.forget_proofs(segment_at(log, 1).path)
        with pytest.raises(CorruptLog) as found:
            log.reader.plan_read(1, max_bytes=1)
        for _ in range(2):
            stream.note_damage(found.value)
            await asyncio.sleep(0)
        assert (stream.damage, log.scrub.damaged, woken) == (None, ((1, 2),), [True])
        with ThreadPoolExecutor(1) as executor:
            scrubber = scrubber_with(tmp_path, stream, peer, executor)
            if is_alone:
                await scrubber._repair_damaged()
                assert (log.scrub.damaged, peer.asked) == (((1, 2),), [])
                await stage.change(stream, isr=(ME, OTHER))
            await scrubber._repair_damaged()
        assert (stream.usable_log(), stored_values(log), stream.scrub_repaired) == (log, values, 1)
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_repair_waits_for_the_other_replica_also_after_a_restart(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream, peer, values = await damaged_stream(stage)
        peer.is_connected = False
        with ThreadPoolExecutor(1) as executor:
            scrubber = scrubber_with(tmp_path, stream, peer, executor)
            await scrubber._take_turn(stream)
            assert stream.usable_log().scrub.damaged == ((1, 2),)
            await stream.driver.stop()
            stream = await stage.host(stream.record)
            assert (stream.damage, stream.usable_log().scrub.damaged) == (None, ((1, 2),))
            peer.is_connected = True
            await scrubber_with(tmp_path, stream, peer, executor)._repair_damaged()
        stream.usable_log().chain.committed = len(values)
        assert stored_values(stream.usable_log()) == values
        await stream.driver.stop()
        stream = await stage.host(stream.record)
        assert stream.usable_log().scrub.damaged == (), "the repair was stored"
        await stream.driver.stop()

    run(tmp_path, story)


def test_damage_at_the_same_place_drops_nothing_and_names_the_offsets_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream, peer, values = await damaged_stream(stage)
        log = stream.usable_log()
        path = segment_at(peer.log, 1).path
        flip(path, path.stat().st_size // 3)
        with ThreadPoolExecutor(1) as executor:
            scrubber = scrubber_with(tmp_path, stream, peer, executor)
            await scrubber._take_turn(stream)
            await scrubber._repair_damaged()
        assert (stream.damage, log.scrub.damaged, log.log_end_offset) == (None, ((1, 2),), 3)
        assert stored_values(log, 2) == values[2:]
        log.reader.forget_proofs(segment_at(log, 1).path)
        with pytest.raises(CorruptLog) as found:
            log.reader.plan_read(1, max_bytes=1)
        assert stream.error_for_clients(found.value) is found.value, "no other broker has it"
        await stream.driver.stop()

    run(tmp_path, story)
    reported = [one.getMessage() for one in caplog.records if "damaged on every replica" in one.getMessage()]
    assert len(reported) == 1
    assert "offsets 1 to 1 are damaged on every replica" in reported[0]


@pytest.mark.parametrize("has_peer", [False, True])
def test_accepted_loss_becomes_removed_offsets_that_are_the_same_on_all_replicas(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_peer: bool
) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream, peer, values = await damaged_stream(stage)
        log = stream.usable_log()
        if has_peer:
            path = segment_at(peer.log, 1).path
            flip(path, path.stat().st_size // 2)
        else:
            stream.driver.record = msgspec.structs.replace(stream.record, replicas=(ME,), isr=(ME,))
        with ThreadPoolExecutor(1) as executor:
            scrubber = scrubber_with(tmp_path, stream, peer, executor)
            await scrubber._take_turn(stream)
            assert log.scrub.damaged == ((1, 2),)
            peer.is_connected = False
            if has_peer:  # it may have what is damaged here
                with pytest.raises(BrokerUnavailable):
                    await scrubber.repairs.accept_loss("orders")
                assert log.scrub.damaged == ((1, 2),)
                peer.is_connected = True
            assert await scrubber.repairs.accept_loss("orders") == {"broker": ME, "lost": [(1, 2)]}
            assert await scrubber.repairs.accept_loss("orders") == {"broker": ME, "lost": []}
        assert (log.scrub.damaged, log.scrub.lost, stream.losses.accepted) == ((), ((1, 2),), 1)
        with log.reader.plan_read(0, max_bytes=1 << 30) as plan:
            assert (plan.next_offset, plan.removed_rows) == (3, 1)
            assert b"".join(plan.messages()).count(values[0]) == 1
        append(stream, b"more")
        await stream.driver.stop()
        stream = await stage.host(stream.record)
        log = stream.usable_log()
        assert (log.failure, log.scrub.lost, log.log_end_offset) == (None, ((1, 2),), 4)
        log.chain.committed = log.log_end_offset
        answer = _piece(log, 1, 2, 0)
        with FetchedBatches(tmp_path) as fetched:  # the other replica fetches it as any batch
            assert fetched.add(b64decode(answer["data"]), 1, 2) == 2
            assert fetched.entries[0].rows == 0
        await stream.driver.stop()

    run(tmp_path, story)
    assert "the loss of offsets 1 to 1 was accepted" in caplog.text


def test_settings_of_scrubbing(tmp_path: Path) -> None:
    config = BrokerConfig()
    assert (config.scrub_interval_s, config.scrub_max_bytes_per_s) == (7 * 86400.0, 8 << 20)
    for off in ("0", "none", 0):
        assert load_config(None, {"scrub_interval": off}, {}).scrub_interval_s == 0.0
    given = load_config(None, {"scrub_interval": "12h", "scrub_max_bytes_per_s": "1MiB"}, {})
    assert (given.scrub_interval_s, given.scrub_max_bytes_per_s) == (43200.0, 1 << 20)
    for setting, bad in (("scrub_interval", "often"), ("scrub_max_bytes_per_s", "1KiB"), ("segment_age", "0")):
        with pytest.raises(ConfigError, match=setting):
            load_config(None, {setting: bad}, {})
