"""`python -m tests.faults.hostile KIND URL STREAM COUNT [TOKEN_FILE]`: so many connections that do one kind of harm,
until killed; with the token, if there is one.

Each connection acts about once a second at the most, but for kinds "without a pause", which repeat a request as soon
as it is answered: what is measured is what a broker does for such clients, not how fast they can be.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa

_PAUSE_S = 1.0


async def _opened(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """With a small receive buffer, so that little is received of a response that is not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, port))
    return await asyncio.open_connection(sock=connection, limit=4096)


_credentials: list[str] = []


def _head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *_credentials, *headers, "", ""]).encode()


def _bomb() -> bytes:
    """Some kilobytes that claim 600 million rows."""
    rows = 15_000_000
    column = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(bytes(4 * rows + 4)), pa.py_buffer(b"")])
    batch, sink = pa.RecordBatch.from_arrays([column], ["value"]), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for _ in range(40):
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def requests(kind: str, stream: str) -> Callable[[int], bytes]:
    """What a connection of this kind sends the n-th time; empty: nothing."""
    messages = f"/v1/streams/{stream}/messages?start=0"
    packed = gzip.compress(random.Random(7).randbytes(200_000))
    match kind:
        case "idle":
            return lambda at: b""
        case "half requests":
            return lambda at: _head("GET", messages)[:30] if at == 0 else b""
        case "slow readers":
            return lambda at: _head("GET", messages, "Accept: application/x-ndjson") if at == 0 else b""
        case "slow readers of whole batches":
            return lambda at: _head("GET", messages) if at == 0 else b""
        case "long polls":
            poll = _head("GET", f"/v1/streams/{stream}/messages?start=latest&wait_ms=60000")
            return lambda at: poll if at == 0 else b""
        case "unfinished commits":
            commit = _head("POST", f"/v1/streams/{stream}/appends/p/0", "Content-Length: 16777216") + b" " * 1_000_000
            return lambda at: commit if at == 0 else b" " * 1000
        case "gzip bodies":
            head = _head("POST", "/v1/streams", "Content-Encoding: gzip", f"Content-Length: {len(packed)}")
            return lambda at: head + packed
        case "bombs":
            bomb = _bomb()
            head = _head("PUT", f"/v1/streams/{stream}/appends/p/0/parts/0", f"Content-Length: {len(bomb)}")
            return lambda at: head + bomb
        case "garbage":
            return lambda at: random.randbytes(500) + b"\r\n\r\n"
        case "scrapes":
            return lambda at: _head("GET", "/metrics")
        case "globs":
            return lambda at: _head("GET", "/v1/streams?pattern=" + "*a" * 7000)
        case "wrong tokens without a pause":
            wrong = f"Authorization: Bearer nlt_{'0' * 12}_{'A' * 43}"
            request = f"GET /v1/streams HTTP/1.1\r\nHost: x\r\n{wrong}\r\n\r\n".encode()
            return lambda at: request
        case "lists without a pause":
            return lambda at: _head("GET", "/v1/streams")
        case "reads without a pause":
            return lambda at: _head("GET", messages + "&max_bytes=100000&columns=value")
        case "changes without a pause":
            return lambda at: _head("DELETE", f"/v1/streams/{stream}")
        case _:
            raise ValueError(kind)


KINDS = (
    "idle",
    "half requests",
    "slow readers",
    "slow readers of whole batches",
    "long polls",
    "unfinished commits",
    "gzip bodies",
    "bombs",
    "garbage",
    "scrapes",
    "globs",
    "wrong tokens without a pause",
    "lists without a pause",
    "reads without a pause",
    "changes without a pause",
)


async def harm(kind: str, url: str, send: Callable[[int], bytes]) -> None:
    """One connection after another, each for as long as the broker lets it live."""
    address, reads, pauses = urlsplit(url), not kind.startswith("slow"), not kind.endswith("without a pause")
    while True:
        try:
            reader, writer = await _opened(address.hostname or "", address.port or 0)
        except OSError:
            await asyncio.sleep(_PAUSE_S)
            continue
        try:
            at = 0
            while True:
                if data := send(at):
                    writer.write(data)
                    await writer.drain()
                at += 1
                await (_rest(reader, reads) if pauses else _answer(reader))
        except (OSError, EOFError):
            pass
        finally:
            writer.close()
            await asyncio.sleep(_PAUSE_S)


async def _rest(reader: asyncio.StreamReader, reads: bool) -> None:
    """A second, in which whatever comes is read, or nothing is. Raises EOFError: the connection has ended."""
    if not reads:
        await asyncio.sleep(_PAUSE_S)
        if reader.at_eof():
            raise EOFError
        return
    try:
        async with asyncio.timeout(_PAUSE_S):
            while await reader.read(65536):
                pass
            raise EOFError
    except TimeoutError:
        return


async def _answer(reader: asyncio.StreamReader) -> None:
    """Of one request, to its end. Raises EOFError: the connection has ended."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"content-length:" in head:
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
    else:
        raise EOFError


async def main(kind: str, url: str, stream: str, count: int) -> None:
    send = requests(kind, stream)
    print("begun", flush=True)
    await asyncio.gather(*(harm(kind, url, send) for _ in range(count)))


if __name__ == "__main__":
    _credentials.extend(f"Authorization: Bearer {Path(file).read_text().strip()}" for file in sys.argv[5:6])
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
