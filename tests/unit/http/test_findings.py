"""Findings that follow from what brokers state of themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from natslog.http import findings
from natslog.model import StreamRecord, StreamSettings


@pytest.mark.parametrize(
    ("free_bytes", "has_room", "is_full"), [(2000, True, False), (1010, False, True), (990, True, True)]
)
def test_a_disk_that_refused_a_message_is_full(free_bytes: int, has_room: bool, is_full: bool) -> None:
    cluster: Any = SimpleNamespace(brokers=[SimpleNamespace(id=1, alive=True, role="voter", clock_apart_s=0.0)])
    stats: Any = SimpleNamespace(
        id=1, problem=None, disk_free_bytes=free_bytes, has_disk_room=has_room, disk_full_s=None, kernels_problem=None
    )
    found = [one.code for one in findings._of_brokers(cluster, [stats], 1000)]
    assert found == (["disk_full"] if is_full else [])


def test_window_of_message_ids_that_another_broker_states_is_a_finding() -> None:
    settings = StreamSettings(subject="orders", dedupe_window_s=120.0)
    record = StreamRecord(
        name="orders", id="1", settings=settings, created_us=0, leader=1, leader_epoch=1, replicas=(1,), isr=(1,)
    )
    node: Any = SimpleNamespace(me=2, is_connected=lambda _number: True)
    broker: Any = SimpleNamespace(
        cluster=node, state=SimpleNamespace(brokers=[1, 2], streams={"orders": record}), streams={}
    )
    assert not list(findings.of_streams(broker, {}))
    (found,) = findings.of_streams(broker, {"orders": 1.5})
    assert (found.code, found.where) == ("stream_dedupe_short", "stream orders")
    assert "recognised for 1.5 s instead of 120 s" in found.what
