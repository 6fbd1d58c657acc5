"""Findings that follow from what brokers state of themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from natslog.http import findings


@pytest.mark.parametrize(
    ("free_bytes", "has_room", "is_full"), [(2000, True, False), (1010, False, True), (990, True, True)]
)
def test_a_disk_that_refused_a_message_is_full(free_bytes: int, has_room: bool, is_full: bool) -> None:
    cluster: Any = SimpleNamespace(brokers=[SimpleNamespace(id=1, alive=True, role="voter", clock_apart_s=0.0)])
    stats: Any = SimpleNamespace(
        id=1, problem=None, disk_free_bytes=free_bytes, has_disk_room=has_room, disk_full_s=None
    )
    found = [one.code for one in findings._of_brokers(cluster, [stats], 1000)]
    assert found == (["disk_full"] if is_full else [])
