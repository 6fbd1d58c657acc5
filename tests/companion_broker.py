"""A broker with a control port, by which a test writes to companion logs and shows what was delivered:
`python -m tests.companion_broker server …`. The port is in the file `<data folder>.control`.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

from natslog.cli import main
from natslog.errors import NatslogError
from natslog.node.broker import Broker
from natslog.node.replicas.stream import HostedStream

_start = Broker.start
_init = HostedStream.__init__
_given: dict[str, list[tuple[int, str, str]]] = {}


def _init_with_owner(self: HostedStream, record: Any, *rest: Any) -> None:
    _init(self, record, *rest)
    given = _given[record.name] = []
    self.companion.on_records = lambda records: given.extend(
        (offset, kind, value.decode()) for offset, kind, value in records
    )


async def _start_with_control(self: Broker) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        try:
            answer = await _answered(self, **asked)
        except NatslogError as error:
            answer = error.to_json()
        writer.write(json.dumps(answer).encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    folder = self.config.data_dir
    Path(f"{folder}.control").write_text(str(server.sockets[0].getsockname()[1]))  # noqa: ASYNC240
    await _start(self)


async def _answered(broker: Broker, do: str, stream: str, values: list[str]) -> dict[str, Any]:
    hosted = broker.streams[stream]
    match do:
        case "append":
            return {"end": await hosted.companion.append([("removed", value.encode()) for value in values])}
        case "shorten":
            await hosted.companion.shorten([("snapshot", value.encode()) for value in values])
            return {}
        case _:
            return {"given": _given[stream], "bytes": hosted.companion.size_bytes, "serves": hosted.may_serve}


def ask(folder: Path, do: str, stream: str, *values: str, timeout_s: float = 15.0) -> dict[str, Any]:
    """The answer of the broker on this data folder. Raises OSError: it does not run, or was killed."""
    port = int(Path(f"{folder}.control").read_text())
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        connection.sendall(json.dumps({"do": do, "stream": stream, "values": values}).encode() + b"\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    if not answer:
        raise ConnectionResetError("the broker ended before it answered")
    found: dict[str, Any] = json.loads(answer)
    return found


if __name__ == "__main__":
    HostedStream.__init__ = _init_with_owner  # type: ignore[method-assign]
    Broker.start = _start_with_control  # type: ignore[method-assign]
    main()
