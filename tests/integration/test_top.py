"""`natslog top`."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, eventually, natslog


@pytest.mark.long
def test_one_table_without_a_terminal(client: NatslogClient, filled: str, broker: BrokerProcess) -> None:
    client.create_stream(f"{filled}-idle", f"{filled}-idle")
    shown = natslog("top", "--sort", "messages", "--lines", "500", url=broker.url).stdout
    head, *lines = shown.splitlines()
    assert "1 of 1 brokers" in head
    rows = [line.split() for line in lines]
    (busy,) = [row for row in rows if row and row[0] == filled]
    assert busy[4] == "100"  # a size is two words
    assert rows.index(busy) < next(at for at, row in enumerate(rows) if row and row[0] == f"{filled}-idle")
    assert natslog("top", "--sort", "name", "--lines", "0", url=broker.url).stdout.count(filled) == 0


@pytest.mark.long
def test_json_is_the_overview(filled: str, broker: BrokerProcess) -> None:
    found = json.loads(natslog("top", "--json", url=broker.url).stdout)
    assert filled in found["streams"]["name"]
    assert found["cluster"]["brokers"][0]["alive"]


def test_wrong_order_is_refused(broker: BrokerProcess) -> None:
    done = natslog("top", "--sort", "colour", url=broker.url, check=False)
    assert done.returncode == 2 or "must be one of rate, bytes" in done.stderr
    assert "must be one of" in done.stderr


@pytest.mark.long
def test_a_terminal_shows_it_until_ctrl_c(filled: str, broker: BrokerProcess) -> None:
    main, side = pty.openpty()
    command = [sys.executable, "-m", "natslog", "--server", broker.url, "top", "--interval", "500ms", "--lines", "500"]
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=os.environ | {"COLUMNS": "200"})
    os.close(side)
    text = b""

    def has_shown() -> bool:
        nonlocal text
        text += os.read(main, 65536)
        return text.count(b"of 1 brokers") >= 2

    try:
        eventually(has_shown, 30, "the second table")
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the end: the process has closed the other side, which it may be writing to until then
            while more := os.read(main, 65536):
                text += more
        process.wait(10)
        assert process.returncode in (0, 130)
        assert b"Traceback" not in text
    finally:
        process.kill()
        process.wait()
        os.close(main)
