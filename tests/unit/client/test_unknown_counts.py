"""Counts that a broker does not state to this reader: null instead of bytes and rows."""

from __future__ import annotations

from typing import Any

import pytest

from natslog.cli import cursor as cursor_commands
from natslog.cli import stream as stream_commands
from natslog.client import ClientOptions, NatslogClient
from natslog.client.client import SplitRange
from natslog.model import Split
from tests.unit.client.answering import ID, Answers, serving

LAG = {
    "offset": 3,
    "rows": None,
    "bytes": None,
    "seconds": None,
    "lost_rows": 0,
    "beyond_rows": 0,
    "log_start_offset": 0,
    "high_watermark": 10,
    "id": ID,
}


def asked(call: str, body: Any, work: Any) -> Any:
    with serving() as start:
        url = start(Answers(**{call: (200, body, {"Natslog-Leader-Epoch": "1", "Natslog-Stream-Id": ID})}))
        with NatslogClient(url, ClientOptions(timeout_s=5, retries=0, patience_s=0)) as client:
            return work(client)


def test_splits_and_extents_may_lack_counts() -> None:
    split = {"start": 0, "end": 10, "rows": None, "bytes": None, "urls": []}
    expected = [Split(start=0, end=10, rows=None, bytes=None)]
    assert asked("splits", [split], lambda client: client.splits("orders", 0, 10)) == expected
    several = {"splits": {"orders": [split]}, "elsewhere": {}}
    found = asked("splits", several, lambda client: client.splits_of_several([SplitRange("orders", ID, 0, 10)]))
    assert found == {"orders": expected}
    extent = {"start": 0, "end": 10, "bytes": None}
    assert asked("extent", extent, lambda client: client.extent("orders", 0, 10)) == (10, None)


def test_streams_and_lags_may_lack_counts() -> None:
    shown = {"name": "orders", "id": ID, "leader_epoch": 1, "log_start_offset": 0, "high_watermark": 10}
    shown |= {"bytes": None, "segments": None}
    assert asked("orders", shown, lambda client: client.stream("orders"))["bytes"] is None
    assert asked("lag", LAG, lambda client: client.lag("orders", 3)) == LAG
    assert asked("lags", {"orders": LAG}, lambda client: client.lags({"orders": 3})) == {"orders": LAG}


def test_tables_leave_unknown_counts_empty() -> None:
    shown = {"name": "orders", "subjects": ["orders.>"], "paused": False, "leader": 1, "bytes": None}
    row = stream_commands._row(shown | {"log_start_offset": 2, "high_watermark": 10})
    assert row == ["orders", "orders.>", 8, "", 2, 10, 1, "ok"]
    kept = {"consumer": "job", "stream": "orders", "offset": 3, "timestamp": "2026-11-20T10:30:00.000000Z"}
    kept |= {"rewound": None, "lag": LAG}
    assert cursor_commands._row(kept) == ["job", "orders", 3, "2026-11-20T10:30:00Z", "", "", "", "behind"]


@pytest.mark.parametrize(("offset", "state"), [(9, "behind"), (10, "ok")])
def test_state_of_a_cursor_follows_from_its_offset(offset: int, state: str) -> None:
    assert cursor_commands._state({"offset": offset, "lag": LAG, "rewound": None}) == state
