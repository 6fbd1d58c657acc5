"""Whose fault it is that a part of a file was not sent: the network's, unless the file itself cannot be read."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestServer

from natslog.http import answers, sending
from natslog.http.answers import Answers
from natslog.http.sending import Body, UnreadableFile, disconnecting_slow_client, send_file

SIZE = 4 * 1024 * 1024
NETWORK = ["ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EPIPE", "ECONNRESET", "ENOBUFS", "EIO"]


@pytest.fixture
def readers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(SIZE))
    return path


def failing_sendfile(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    async def sendfile(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "sendfile", sendfile)


def outcome_of(
    path: Path, length: int, readers: ThreadPoolExecutor, break_with: str | None = None
) -> tuple[str, bytes]:
    """What `send_file` raised on a real connection ("" for nothing), and what the client received."""
    raised: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = length
        await response.prepare(request)
        fd = os.open(path, os.O_RDONLY)
        try:
            await send_file(request, fd, 0, length, readers)
            await response.write_eof()
            raised.append("")
        except (ConnectionError, UnreadableFile) as error:
            raised.append(type(error).__name__)
            raise ConnectionResetError from error
        finally:
            os.close(fd)
        return response

    async def run() -> bytes:
        app = web.Application()
        app.router.add_get("/", handler)
        received = b""
        with pytest.MonkeyPatch.context() as patch:
            async with TestServer(app) as server, ClientSession() as session:
                if break_with is not None:
                    failing_sendfile(patch, getattr(errno, break_with))
                try:
                    async with session.get(server.make_url("/")) as answer:
                        async for chunk in answer.content.iter_any():
                            received += chunk
                except ClientError:
                    pass
        return received

    received = asyncio.run(run())
    return raised[0], received


def test_range_is_sent_whole(file: Path, readers: ThreadPoolExecutor) -> None:
    assert outcome_of(file, SIZE, readers) == ("", file.read_bytes())


@pytest.mark.parametrize("number", NETWORK)
def test_error_beside_a_readable_file_is_the_networks(file: Path, readers: ThreadPoolExecutor, number: str) -> None:
    assert outcome_of(file, SIZE, readers, number)[0] in ("ConnectionResetError", "BrokenPipeError")


def test_file_that_is_too_short_is_damaged(file: Path, readers: ThreadPoolExecutor) -> None:
    assert outcome_of(file, SIZE + 1, readers)[0] == "UnreadableFile"


def test_error_beside_a_file_that_is_too_short_is_the_files(file: Path, readers: ThreadPoolExecutor) -> None:
    os.truncate(file, SIZE - 1)
    assert outcome_of(file, SIZE, readers, "EIO")[0] == "UnreadableFile"


def test_answer_on_disk_whose_reader_vanishes_is_no_bug(
    tmp_path: Path, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler ends with a ConnectionError, which the application takes for a client that left."""
    monkeypatch.setattr(answers, "IN_MEMORY_BYTES", 0)
    raised: list[BaseException] = []

    async def run() -> None:
        waiting = Answers(tmp_path, min_free_bytes=0)

        async def handler(request: web.Request) -> web.StreamResponse:
            failing_sendfile(monkeypatch, errno.ETIMEDOUT)
            try:
                with await waiting.keep(memoryview(os.urandom(SIZE))) as answer:
                    body = await Body.begun(request, {}, "application/octet-stream", SIZE, readers)
                    await answer.send(body)
                    return await body.end()
            except BaseException as error:
                raised.append(error)
                raise

        app = web.Application()
        app.router.add_get("/", handler)
        async with TestServer(app) as server, ClientSession() as session:
            with pytest.raises(ClientError):
                async with session.get(server.make_url("/")) as answer:
                    await answer.read()

    asyncio.run(run())
    assert isinstance(raised[0], ConnectionError)


@pytest.mark.parametrize("form", ["memory", "file"])
def test_client_that_takes_nothing_is_disconnected(
    file: Path, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Otherwise it keeps an answer, in memory or as an open file, for as long as it likes."""
    monkeypatch.setattr(sending, "WITHIN_S", 0.2)
    os.truncate(file, 16 * SIZE)
    fd = os.open(file, os.O_RDONLY)
    raised: list[BaseException] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await Body.begun(request, {}, "application/octet-stream", 16 * SIZE, readers)
        try:
            with disconnecting_slow_client(request):
                await body.send_bytes(b"begin")
                if form == "memory":
                    await body.send_bytes(bytes(16 * SIZE - 5))
                await body.send_file(fd, 5, 16 * SIZE - 5)
        except BaseException as error:
            raised.append(error)
            raise
        return await body.end()

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/", handler)
        async with TestServer(app) as server, asyncio.timeout(20):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while not raised:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            writer.close()

    try:
        asyncio.run(run())
    finally:
        os.close(fd)
    assert isinstance(raised[0], ConnectionError | asyncio.CancelledError)
