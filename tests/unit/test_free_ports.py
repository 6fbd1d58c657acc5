"""Ports for processes that are started soon: each gets its own."""

from __future__ import annotations

import os
import socket

import pytest

from natslog.nats_server import free_port


def test_port_is_not_given_twice_although_nothing_listens_on_it_yet() -> None:
    assert len({free_port() for _ in range(100)}) == 100


def test_processes_that_look_for_ports_at_the_same_time_find_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {free_port() for _ in range(100)}
    monkeypatch.setattr(os, "getpid", lambda number=os.getpid() + 1: number)
    assert not ours & {free_port() for _ in range(100)}


def test_port_that_is_in_use_is_passed_over() -> None:
    first = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + 1))
        assert free_port() != first + 1


def test_connections_do_not_take_these_ports() -> None:
    """Where the kernel has its default range."""
    assert free_port() < 32_768
