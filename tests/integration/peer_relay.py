"""An attacker without the secret: relays what a broker sends him to another one, and adds a Raft message of his own.

Run as `peer_relay.py PORT VICTIM_URL FORGED_SENDER VICTIM_ID`; says what happened on standard output.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import msgspec
from aiohttp import web

HIGHEST = 2**64 - 1


def forged(sender: int, to: int) -> bytes:
    """A frame without a MAC: an append of the highest term, as the leader would send it."""
    append = {
        "type": "append?",
        "sender": sender,
        "to": to,
        "term": HIGHEST,
        "prev_index": 0,
        "prev_term": 0,
        "entries": [],
        "commit": 0,
        "round": 0,
    }
    header = msgspec.msgpack.encode(["raft", [append]])
    return len(header).to_bytes(4, "big") + header


async def main(port: int, victim: str, sender: int, victim_id: int) -> None:
    async def relay_request(request: web.Request) -> web.StreamResponse:
        print(f"dialled: {request.method} {request.path}", flush=True)
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await relay_link(request)
        headers = {name: value for name, value in request.headers.items() if name.lower().startswith("natslog")}
        async with aiohttp.ClientSession() as session:
            body = await request.read()
            async with session.request(request.method, victim + request.path, data=body, headers=headers) as answer:
                passed = {name: value for name, value in answer.headers.items() if name.lower().startswith("natslog")}
                print(f"the victim answered {answer.status}", flush=True)
                return web.Response(status=answer.status, body=await answer.read(), headers=passed)

    async def relay_link(request: web.Request) -> web.WebSocketResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower().startswith("natslog")}
        near = web.WebSocketResponse(max_msg_size=0)
        await near.prepare(request)
        async with aiohttp.ClientSession() as session:
            async with session.ws_connect(victim + request.path, headers=headers, max_msg_size=0) as far:
                backward = asyncio.create_task(pump(far, near))
                await pump_some(near, far)
                await far.send_bytes(forged(sender, victim_id))
                print("link opened, and a frame of the attacker's was sent on it", flush=True)
                await pump(near, far)
                backward.cancel()
        return near

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", relay_request)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("listening", flush=True)
    await asyncio.sleep(300)


async def pump_some(source: web.WebSocketResponse, target: aiohttp.ClientWebSocketResponse) -> None:
    """The handshake of protocol 1: one message; of a later one: whatever comes within a second."""
    message = await source.receive(5)
    if message.type is aiohttp.WSMsgType.BINARY:
        await target.send_bytes(message.data)
    await asyncio.sleep(1)


async def pump(
    source: aiohttp.ClientWebSocketResponse | web.WebSocketResponse,
    target: aiohttp.ClientWebSocketResponse | web.WebSocketResponse,
) -> None:
    async for message in source:
        if message.type is aiohttp.WSMsgType.BINARY:
            await target.send_bytes(message.data)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
