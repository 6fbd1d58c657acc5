"""Ports for processes that are started soon: each gets its own."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from natslog.nats_server import free_port


def test_port_is_not_given_twice_although_nothing_listens_on_it_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may choose the same one again: here it does so for every other request."""

    class Repeating(socket.socket):
        asked, port = 0, 0

        def bind(self, address: Any) -> None:
            Repeating.asked += 1
            super().bind((address[0], 0 if Repeating.asked % 2 else Repeating.port))
            Repeating.port = self.getsockname()[1]

    monkeypatch.setattr("natslog.nats_server.socket.socket", Repeating)
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    assert Repeating.asked > 20
