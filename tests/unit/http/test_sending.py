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

from natslog.http import answers
from natslog.http.answers import Answers
from natslog.http.sending import Body, UnreadableFile, send_file

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
