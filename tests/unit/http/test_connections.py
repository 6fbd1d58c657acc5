"""TLS handshakes in progress: how many there may be, and until when one counts."""

from __future__ import annotations

import asyncio

import pytest

from natslog.http import connections
from natslog.http.connections import TLS_HANDSHAKE_S, Connections


class Clock:
    """The time of an event loop that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s


class Opened:
    """As much of a connection as is needed to open it."""

    is_reserved = False

    def __init__(self, handshake: int) -> None:
        self.handshake = handshake


def test_handshakes_are_limited_and_those_that_failed_count_for_five_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, most = Clock(), connections._MOST_HANDSHAKES
    clock.now_s = 1000.0
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    ours = Connections(10)
    numbers = [ours.expect_handshake() for _ in range(most)]
    for _ in range(2):
        with pytest.raises(ConnectionAbortedError):
            ours.expect_handshake()
    assert [record.getMessage() for record in caplog.records] == [
        f"{most} TLS handshakes are in progress, which is the limit: others are refused"
    ]
    assert ours.opened(Opened(numbers[7]))  # type: ignore[arg-type]
    ours.expect_handshake()
    with pytest.raises(ConnectionAbortedError):
        ours.expect_handshake()
    clock.now_s += TLS_HANDSHAKE_S + 0.1  # asyncio has closed them
    assert len({ours.expect_handshake() for _ in range(most)}) == most
    with pytest.raises(ConnectionAbortedError):
        ours.expect_handshake()
