"""`natslog dev` with several brokers: how it is stopped."""

from __future__ import annotations

import subprocess
import sys

_WAITS = """
import os, signal, sys
from pathlib import Path
from natslog.cli.dev_cluster import DevCluster

left = 100

def send_another(frame, event, argument):
    global left
    if event == "call" and left:
        left -= 1
        os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, lambda *_: None)
cluster = DevCluster(Path("unused"), "nats://127.0.0.1:1", None, 1, 1, {})
sys.setprofile(send_another)
cluster.wait(print)
"""


def test_a_signal_within_the_handler_of_another_one_stops_it() -> None:
    """A supervisor, a terminal and a wrapper may each send one: a signal comes with each call of a function."""
    assert subprocess.run([sys.executable, "-c", _WAITS], timeout=20).returncode == 0
