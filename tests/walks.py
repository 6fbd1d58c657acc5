"""How many functions of a broker one request passes, in how many files: `python -m tests.walks [--calls WALK]`.

A broker of its own counts its calls with `sys.setprofile` while one request is made; each walk is made several times,
and the shortest counts, because timers call functions meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import nats
from nats.aio.client import Client

from tests.harness import BrokerProcess, eventually, running

_TIMES = 15
_Calls = list[tuple[str, str]]


def _fetch(broker: BrokerProcess, path: str) -> Callable[[], Awaitable[object]]:
    request = urllib.request.Request(f"{broker.url}{path}", headers={"Accept": "application/vnd.apache.arrow.stream"})
    return lambda: asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=30).read())


def _walks(broker: BrokerProcess, connection: Client) -> dict[str, Callable[[int], Awaitable[object]]]:
    created = b'{"name": "W%d", "subjects": ["w%d"]}'
    return {
        "publish one message, to its ack": lambda _: connection.request("orders.new", b"{}", timeout=30),
        "fetch 20 rows": lambda _: _fetch(broker, "/v1/streams/orders/messages?start=0&end=20")(),
        "create a stream": lambda at: connection.request(
            f"$JS.API.STREAM.CREATE.W{at}", created % (at, at), timeout=30
        ),
    }


def _written(path: Path) -> _Calls:
    eventually(path.exists)
    calls = msgspec.json.decode(path.read_bytes(), type=_Calls)
    path.unlink()
    return calls


async def _walked(broker: BrokerProcess, url: str, path: Path) -> dict[str, _Calls]:
    connection, found = await nats.connect(url), dict[str, _Calls]()
    for name, walk in _walks(broker, connection).items():
        for at in range(_TIMES):
            await walk(at)
        for at in range(_TIMES, 2 * _TIMES):
            os.kill(broker.pid, signal.SIGUSR1)
            await walk(at)
            os.kill(broker.pid, signal.SIGUSR2)
            calls = await asyncio.to_thread(_written, path)
            if name not in found or len(calls) < len(found[name]):
                found[name] = calls
    await connection.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.walks", description=__doc__.partition(":")[0])
    parser.add_argument("--calls", metavar="WALK", help="Print the calls of the walks whose names contain this.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.json"
        with running(Path(folder) / "broker", environment={"NATSLOG_WALK": str(path)}) as (server, broker):
            broker.terminate()
            broker.module = "tests.walked"
            broker.start()
            broker.client().create_stream("orders", "orders.>")
            found = asyncio.run(_walked(broker, server.url, path))
    for name, calls in found.items():
        print(f"{name}: {len(calls)} calls in {len({file for file, _ in calls})} files")
        if arguments.calls is not None and arguments.calls in name:
            for (file, function), count in Counter(calls).most_common():
                print(f"  {count:3} {file}: {function}")


if __name__ == "__main__":
    main()
