"""A consumer that has nothing to do but to send: its frames are made beforehand, it reads no log and stores no ack.

    python -m tests.bench.jetstream.relaying PORT LEAF_URL --messages 400000 --batch 500

Answers each request for `$JS.API.CONSUMER.MSG.NEXT.…` with the next batch on a leafnode connection. With a batch of 0
it sends everything to the first subject that is requested. Prints `ready`, and `acked` when so many acks came, or all
was sent. A process of its own, as the broker is.
"""

from __future__ import annotations

import argparse
import asyncio

from natslog.wire.credentials import NatsCredentials
from natslog.wire.layout import REPLY, REPLY_LEN, SID
from natslog.wire.leaf import LeafLink
from tests.bench.jetstream.connection import Connection
from tests.bench.jetstream.consumer_load import CONSUMER
from tests.bench.jetstream.sides import MESSAGE_BYTES
from tests.bench.sides import STREAM, SUBJECT

NEXT = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}"
_PUSHED_AT_ONCE = 10_000


async def relay(port: int, leaf_url: str, messages: int, batch: int) -> None:
    at_once = batch or _PUSHED_AT_ONCE
    batches = [
        _pieces(first, min(at_once, messages + 1 - first), messages) for first in range(1, messages + 1, at_once)
    ]
    link = LeafLink(leaf_url, name="relay", credentials=NatsCredentials())
    await link.open()
    while not link.is_up:  # noqa: ASYNC110 (there is no event for it)
        await asyncio.sleep(0.01)
    connection, acked, asked = Connection(port), 0, asyncio.Queue[str]()
    for subject in (NEXT, f"$JS.ACK.{STREAM}.{CONSUMER}.>"):
        connection.subscribe(subject)
    has_all = asyncio.Event()

    def receive() -> None:
        nonlocal acked
        for frames in connection.received():
            is_request = frames.rows[:, SID] == 1
            for row in frames.rows[is_request].tolist():
                reply = frames.buffer[row[REPLY] : row[REPLY] + row[REPLY_LEN]].tobytes().decode()
                asked.put_nowait(reply)
            acked += len(frames.rows) - int(is_request.sum())
        if acked >= messages:
            has_all.set()

    asyncio.get_running_loop().add_reader(connection.socket.fileno(), receive)
    print("ready", flush=True)
    to = ""
    for pieces in batches:
        to = to if to and not batch else await asked.get()
        while not link.interest.has(to):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert link.send_now(f"LMSG {to} ".encode().join(pieces))
        await link.drain()
    if batch:
        await has_all.wait()
    print("acked", flush=True)
    await asyncio.Event().wait()  # what is not sent yet goes on


def _pieces(first: int, count: int, messages: int) -> list[bytes]:
    """What stands before and behind the subject of the subscriber, of each frame."""
    value = b"v" * MESSAGE_BYTES
    frames = (
        b"$JS.ACK.%b.%b.1.%d.%d.1795629019806377000.%d@%b %d\r\n%b\r\n"
        % (STREAM.encode(), CONSUMER.encode(), seq, seq, messages - seq, SUBJECT.encode(), len(value), value)
        for seq in range(first, first + count)
    )
    return [b"", *frames]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("leaf_url")
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--batch", type=int, default=500)
    given = parser.parse_args()
    asyncio.run(relay(given.port, given.leaf_url, given.messages, given.batch))


if __name__ == "__main__":
    main()
