"""The task that records what expires and what is hidden: whatever fails, it is tried again."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from natslog.errors import CorruptLog, NatslogError, NotEnoughReplicas
from natslog.log.removed import from_bytes, offset_set
from natslog.log.rules import Rule
from natslog.model import Epoch
from natslog.node import removing as removing_module
from natslog.node.removing import Removing
from natslog.node.supervisor import Supervisor
from tests.conftest import open_log
from tests.unit.node.replicas.upkeep_stage import hosted


class _Hosting:
    def __init__(self, stream: Any) -> None:
        self.streams = {stream.name: stream}


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (NotEnoughReplicas("not now"), False),
        (CorruptLog("a batch is damaged", start=0, end=1), True),
    ],
)
def test_a_stream_that_fails_is_tried_again_and_does_not_end_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_damage: bool
) -> None:
    monkeypatch.setattr(removing_module, "_EVERY_S", 0.01)
    stream = hosted(tmp_path / "s", 1)
    stream.removes_messages, stream.has_others_in_sync = True, True
    noted: list[NatslogError] = []
    stream.note_damage = noted.append
    stream.log.visibility.set_rules((Rule(Epoch(0), 1),), 0)
    ended: list[Any] = []

    async def run() -> None:
        applied = asyncio.Event()
        calls = iter([error])

        def apply_rules(really: Callable[[], None] = stream.log.upkeep.apply_rules) -> None:
            if (failure := next(calls, None)) is not None:
                raise failure
            really()
            loop.call_soon_threadsafe(applied.set)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(stream.log.upkeep, "apply_rules", apply_rules)
        with ThreadPoolExecutor(1) as executor:
            tasks = Supervisor(lambda *bug: ended.append(bug))
            tasks.start(Removing(_Hosting(stream), executor, tasks).run(), "removing")  # type: ignore[arg-type]
            try:
                async with asyncio.timeout(60):
                    await applied.wait()
            finally:
                await tasks.stop()

    asyncio.run(run())
    assert ended == []
    assert noted == ([error] if is_damage else [])


def test_a_snapshot_states_what_the_records_before_it_did(tmp_path: Path) -> None:
    """Which removals count for a rule depends on whether they were recorded before it was added."""
    stream, other = hosted(tmp_path / "s", 9), hosted(tmp_path / "other", 9)
    for log in (stream.log, other.log):
        log.visibility.set_rules((Rule(Epoch(0), 2),), 0)
    removed = stream.log.visibility.removed
    removed.record(offset_set(np.array([3, 8])))
    stream.log.visibility.count_anew(5, 0)
    removed.record(offset_set(np.array([7])))
    for kind, data in removing_module._snapshot(stream.log):
        if kind == "rules":
            other.log.visibility.count_anew(int(data), 0)
        else:
            other.log.visibility.removed.record(from_bytes(data, "snapshot"))
    for log in (stream.log, other.log):
        log.upkeep.apply_rules()
        assert log.visibility.rules_version == 5
        assert set(log.visibility.removed.uncounted) == {3, 8}
        assert sorted(log.visibility.removed.all) == [0, 1, 2, 3, 4, 5, 7, 8], "the newest two that count are 6 and 7"
    (newest,) = (batch for _, batch in stream.log.reader.stored_rows(8, 9))
    assert stream.log.visibility.droppable(np.array([8]), newest.column("subject")).tolist() == [8]
    stream.log.visibility.store(0, at_least=1)
    stream.log.close()

    reopened = open_log(stream.log.folder)
    reopened.visibility.removed.record(offset_set(np.array([3, 8])))
    reopened.visibility.count_anew(5, 0)
    assert reopened.visibility.applied == 9, "the rules are not applied to all of the log again"
    reopened.visibility.removed.record(offset_set(np.array([7])))
    assert sorted(reopened.visibility.removed_below(9).all) == [0, 1, 2, 3, 4, 5, 7, 8]


def test_a_rule_that_is_in_force_too_early_is_applied_again(tmp_path: Path) -> None:
    """A replica that is opened between the edit and its record has no former rule."""
    visibility = hosted(tmp_path / "s", 5).log.visibility
    visibility.removed.record(offset_set(np.array([4])))
    visibility.set_rules((Rule(Epoch(0), 2),), 0, version=3)
    assert sorted(visibility.removed_below(5).all) == [0, 1, 2, 4]
    visibility.count_anew(3, 0)
    assert sorted(visibility.removed_below(5).all) == [0, 1, 4]


@pytest.mark.parametrize("age_s", [0.1, 2.0])
def test_messages_past_the_age_limit_are_hidden_at_their_time_and_idle_streams_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    """Not once a second: the time of the oldest message is known."""
    monkeypatch.setattr(removing_module, "_EVERY_S", 60.0 if age_s > 1 else 1.0)
    stream = hosted(tmp_path / "s", 2)
    log, settings = stream.log, msgspec.structs.replace(stream.record.settings, max_age_s=age_s)
    stream.record, log.settings = msgspec.structs.replace(stream.record, settings=settings), settings
    stream.removes_messages = False
    moved: list[int] = []
    stream.driver.log_start_moved = lambda: moved.append(log.first_readable_offset)
    began_s, lookups = time.monotonic(), 0
    stream.ingest.expiry_us = lambda: int((time.monotonic() - began_s) * 1e6) + 1_000_000

    def expire_by_age(now_us: int, really: Callable[[int], Any] = log.limits.expire) -> Any:
        nonlocal lookups
        lookups += 1
        return really(now_us)

    monkeypatch.setattr(log.limits, "expire", expire_by_age)

    async def run() -> None:
        with ThreadPoolExecutor(1) as executor:
            tasks = Supervisor(lambda what, error: pytest.fail(f"{what}: {error}"))
            tasks.start(Removing(_Hosting(stream), executor, tasks).run(), "removing")  # type: ignore[arg-type]
            async with asyncio.timeout(30):
                while not moved:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await tasks.stop()

    asyncio.run(run())
    assert moved == [2]
    assert time.monotonic() - began_s >= age_s
    assert lookups <= 3, "once at first, and when it is due"
    log.close()


def test_a_stream_that_takes_long_does_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removing_module, "_EVERY_S", 0.01)
    monkeypatch.setattr(removing_module, "_OTHERS_WAIT_S", 0.01)

    class Stream:
        log: Any = object()
        removes_messages, is_leading, has_others_in_sync = True, False, False
        companion = SimpleNamespace(size_bytes=0)

        def __init__(self, name: str) -> None:
            self.name = name

    served: dict[str, int] = {"slow": 0, "quick": 0}

    async def run() -> None:
        hosting: Any = _Hosting(Stream("slow"))
        hosting.streams["quick"] = Stream("quick")
        tasks = Supervisor(lambda what, error: pytest.fail(f"{what}: {error}"))
        removing, held = Removing(hosting, None, tasks), asyncio.Event()  # type: ignore[arg-type]

        async def maintain(stream: Any, log: Any) -> None:
            served[stream.name] += 1
            if stream.name == "slow":
                await held.wait()

        monkeypatch.setattr(removing, "_maintain", maintain)
        tasks.start(removing.run(), "removing")
        async with asyncio.timeout(30):
            while served["quick"] < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert served["slow"] == 1, "it is not begun again meanwhile"
            held.set()
            while served["slow"] < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await tasks.stop()

    asyncio.run(run())
