"""What is logged of failed TLS handshakes, with a clock that is advanced by hand; and their limits."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from natslog.http import tls_port
from natslog.http.tls_port import FailedHandshakes, TlsPort
from natslog.security.certificates import make_certificates
from natslog.security.tls import BrokerTls, TlsFiles


class Clock:
    """The part of an event loop that calls later."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        self.later.append((delay_s, call))
        return self

    def cancel(self) -> None:
        self.later.clear()

    def minute(self) -> None:
        ((delay_s, call),) = self.later
        assert delay_s == 60
        self.later.clear()
        call()


def _error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, "text")
    error.reason = reason
    return error


def test_one_line_a_minute_with_a_count_and_the_last_reason(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    failed = FailedHandshakes(clock)
    with caplog.at_level(logging.INFO):
        failed.note("10.0.0.1", _error("TLSV1_ALERT_UNKNOWN_CA"))
        for number in range(1000):
            failed.note(f"10.0.1.{number}", _error("HTTP_REQUEST"))
        assert len(caplog.records) == 1
        assert "1 TLS handshakes" in caplog.text
        assert "10.0.0.1: the client ended the handshake, tlsv1 alert unknown ca" in caplog.text
        clock.minute()
        assert len(caplog.records) == 2
        assert "1000 TLS handshakes" in caplog.text
        assert "10.0.1.999: the client sent HTTP without TLS" in caplog.text
        clock.minute()
        assert len(caplog.records) == 2
        assert not clock.later, "after a minute without one, the next one is logged at once"
        failed.note("::1", ConnectionAbortedError("SSL handshake is taking longer than 5.0 seconds"))
        assert "::1: it was not completed within 5 s" in caplog.text
        failed.note("::1", _error("HTTP_REQUEST"))
        failed.close()
        assert len(caplog.records) == 4, "what was counted is logged at the end"
        assert not clock.later


def test_clients_that_only_disconnect_are_logged_for_debugging_only(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    failed = FailedHandshakes(clock)
    with caplog.at_level(logging.DEBUG):
        failed.note("10.0.0.1", ConnectionResetError())
        failed.note("10.0.0.1", BrokenPipeError())
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 2
    assert not clock.later


def test_text_of_a_client_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        FailedHandshakes(Clock()).note("fe80::1%eth0\nERROR forged", _error("A\r\nB\x1b[31m" + "x" * 1000))
    (record,) = [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 400


# ---- the port ----


class _Protocol(asyncio.Protocol):
    def __init__(self, opened: list[asyncio.BaseTransport]) -> None:
        self._opened = opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened.append(transport)


class _Listening(socket.socket):
    """Fails once for lack of files."""

    has_failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


@asynccontextmanager
async def _served(
    folder: Path, opened: list[asyncio.BaseTransport], kind: type[socket.socket] = socket.socket
) -> AsyncIterator[tuple[int, ssl.SSLContext]]:
    """The port, and the context of a client."""
    make_certificates(folder, None, [], 30)
    tls = BrokerTls(TlsFiles(str(folder / "broker.pem"), str(folder / "broker-key.pem"), str(folder / "ca.pem")))
    listening = kind(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind(("127.0.0.1", 0))
    port = TlsPort(tls, [listening], lambda: _Protocol(opened))
    number = int(listening.getsockname()[1])
    port.start()
    try:
        yield number, ssl.create_default_context(cafile=str(folder / "ca.pem"))
    finally:
        port.close()
        for transport in opened:
            transport.close()
        await asyncio.sleep(0.05)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)  # the task of the handshake ends after the connection is made


async def _connect(port: int, context: ssl.SSLContext) -> asyncio.StreamWriter:
    return (await asyncio.open_connection("127.0.0.1", port, ssl=context))[1]


@pytest.mark.parametrize(("most", "most_of_one"), [(9, 3), (3, 9)])
def test_clients_that_begin_no_handshake_lose_their_places_to_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: int, most_of_one: int
) -> None:
    monkeypatch.setattr(tls_port, "MOST_HANDSHAKES", most)
    monkeypatch.setattr(tls_port, "MOST_OF_ONE_ADDRESS", most_of_one)
    opened: list[asyncio.BaseTransport] = []

    async def main() -> None:
        async with _served(tmp_path, opened) as (port, context):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            async with asyncio.timeout(30):
                for reader, _ in silent[:-3]:
                    assert await reader.read() == b"", "the oldest are ended"
            writers = []
            for count in range(1, 6):
                writers.append(await _connect(port, context))
                await _until(lambda count=count: len(opened) == count)
            for writer in [*writers, *(writer for _, writer in silent)]:
                writer.close()

    asyncio.run(main())
    (full,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "of 127.0.0.1 has reached a limit" in full, "once a minute"
