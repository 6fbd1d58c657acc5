"""Links between real nodes over real sockets, with an attacker on the wire, in front of the door, or behind it."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from natslog.cluster.commands import BrokerRecord
from natslog.cluster.features import OWN_LEVELS
from natslog.cluster.roles import Matching
from natslog.consensus import AppendRequest, Index, Term
from natslog.errors import BrokerUnavailable, ClusterMismatch, InvalidRequest, NotReady
from natslog.model import BrokerId, Epoch, StreamId
from natslog.nats_server import free_port
from natslog.node.operations import Operations
from natslog.node.peers.handshake import LINK_HEADER, PROOF_HEADER, Dialling, Met
from natslog.node.peers.keys import KeyRing
from natslog.node.peers.links import Links
from natslog.node.peers.messages import (
    FetchAnswer,
    FetchRequest,
    FetchResponse,
    NatsReachability,
    RaftMessages,
    encode_frame,
)
from natslog.node.peers.reception import MAX_PLACES_OF_ONE_ADDRESS
from natslog.security.certificates import make_certificates
from tests.unit.node.peers.nodes import SECRET, Node, Wire, node, two, until


async def linked(one: Node, url: str) -> None:
    one.links.dial({url})
    link = one.links.to(url)
    assert link is not None
    await until(lambda: link.is_up)


def test_two_nodes_meet_and_frames_of_any_size_pass(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            big = bytes(8 * 1024 * 1024)
            whole = FetchAnswer(StreamId("s"), Epoch(1), Matching(), 0, 0, len(big))
            answers = {1: (whole,), 2: ()}
            other.replies = lambda frame: (
                (FetchResponse(frame.number, answers[frame.number]), [big]) if isinstance(frame, FetchRequest) else None
            )
            await linked(one, other.config.url)
            link = one.links.of(BrokerId(2))
            assert link is not None
            assert link.peer is not None
            assert (link.peer.min_level, link.peer.max_level) == OWN_LEVELS
            for number in range(100):
                assert link.send(NatsReachability(number % 2 == 0))
            await until(lambda: len(other.frames) == 100)
            assert other.frames[1] == (1, NatsReachability(False))
            fetched: list[int] = []
            link.begin_fetching(lambda response, payload: fetched.append(len(payload)))
            link.send(FetchRequest(1, "d.1"))
            await until(lambda: fetched == [len(big)])
            link.send(FetchRequest(2, "d.1"))  # the answer does not have the length that it announces
            await until(lambda: "does not have the length" in link.problem)
            assert fetched == [len(big)]

    asyncio.run(main())


def test_end_of_a_process_is_noticed_as_its_address_refuses_and_over_with_the_next_link(tmp_path: Path) -> None:
    async def main() -> None:
        port, ended = free_port(), list[int]()
        async with node(tmp_path, 1) as one:
            one.process_ended = lambda peer: ended.append(peer.broker)  # type: ignore[method-assign]
            for _ in range(2):
                async with node(tmp_path, 2, port=port) as other:
                    await linked(one, other.config.url)
                    assert one.links.ended == frozenset()
                await until(lambda: one.links.ended == {2})
            assert ended == [2, 2], "once for each end"
            one.admitted(other.hello())
            assert one.links.ended == frozenset(), "it has opened a link itself"

    asyncio.run(main())


def test_link_that_is_lost_ends_no_process_where_another_one_is_accepted(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            ended = list[int]()
            one.process_ended = lambda peer: ended.append(peer.broker)  # type: ignore[method-assign]
            await linked(one, other.config.url)
            link = one.links.of(BrokerId(2))
            assert link is not None
            for served in list(other.served):
                assert served._transport is not None
                served._transport.abort()
            await until(lambda: not link.is_up)
            assert link.problem == "the link was lost"
            await until(lambda: link.is_up)
            assert not ended
            assert one.links.ended == frozenset()

    asyncio.run(main())


def test_frames_are_received_in_order_while_the_socket_accepts_no_more_data(tmp_path: Path) -> None:
    """They wait in the transport."""

    async def main() -> None:
        async with two(tmp_path) as (one, other):
            sizes = [64 if number % 3 else 300_000 for number in range(200)]

            def answer(frame: Any) -> tuple[FetchResponse, list[bytes]] | None:
                if not isinstance(frame, FetchRequest):
                    return None
                size = sizes[frame.number]
                whole = FetchAnswer(StreamId("s"), Epoch(1), Matching(), frame.number, 0, size)
                return FetchResponse(frame.number, (whole,)), [bytes(size)]

            other.replies = answer
            await linked(one, other.config.url)
            link = one.links.of(BrokerId(2))
            assert link is not None
            fetched: list[tuple[int, int]] = []
            link.begin_fetching(lambda response, payload: fetched.append((response.number, len(payload))))
            for number in range(len(sizes)):
                assert link.send(FetchRequest(number, "d.1"))
            await until(lambda: len(fetched) == len(sizes))
            assert fetched == list(enumerate(sizes))

    asyncio.run(main())


@pytest.mark.parametrize("attack", ["bit", "repeated", "dropped"])
def test_frame_changed_on_the_wire_ends_the_link_and_is_not_received(
    tmp_path: Path, attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Masked WebSocket messages are changed as they are: the mask does not hide where the payload lies."""

    async def main() -> None:
        port = free_port()
        wire = Wire(port)
        async with wire.held():
            urls = (f"http://127.0.0.1:{wire.port}",)
            async with node(tmp_path, 1) as one, node(tmp_path, 2, port=port, peer_urls=urls) as other:
                await linked(one, urls[0])
                link = one.links.to(urls[0])
                assert link is not None
                link.send(NatsReachability(True))
                await until(lambda: other.frames == [(1, NatsReachability(True))])
                changes = {
                    "bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
                    "repeated": lambda data: data + data,
                    "dropped": lambda data: b"",
                }
                wire.changed = changes[attack]
                link.send(NatsReachability(False))
                if attack == "dropped":
                    await asyncio.sleep(0.3)
                    wire.changed = lambda data: data
                    link.send(NatsReachability(True))
                await until(lambda: "not authentic" in caplog.text)
                wire.changed = lambda data: data
                received = [frame for _, frame in other.frames]
                assert received == [
                    NatsReachability(True),
                    *([NatsReachability(False)] if attack == "repeated" else []),
                ]
                await until(lambda: wire.connections >= 2 and link.is_up)

    asyncio.run(main())


def test_broker_that_joins_while_it_says_hello_says_it_again(tmp_path: Path) -> None:
    """A link whose hello names no cluster would be of no use: nothing but a welcome passes on it."""

    async def main() -> None:
        port = free_port()
        wire = Wire(port)
        async with wire.held():
            urls = (f"http://127.0.0.1:{wire.port}",)
            async with node(tmp_path, 1) as one, node(tmp_path, 2, port=port, peer_urls=urls) as other:

                def join(data: bytes) -> bytes:
                    if data.startswith(b"POST") and not one.cluster_id:
                        one._data_dir.join("c")
                        one.links.redial()
                    return data

                wire.changed = join
                await linked(one, urls[0])
                link = one.links.to(urls[0])
                assert link is not None
                await until(lambda: link.send(NatsReachability(True)) and bool(other.frames))
                assert other.peer.cluster_id == "c"

    asyncio.run(main())


@pytest.mark.long
def test_address_that_is_not_the_brokers_is_refused_and_peer_urls_allow_it(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        alias = f"http://localhost:{port}"
        async with node(tmp_path / "a", 1) as one, node(tmp_path / "a", 2, port=port):
            with pytest.raises(BrokerUnavailable, match="connected to http://localhost.*advertise_url or peer_urls"):
                await one.links.meet(alias)
        async with node(tmp_path / "b", 1) as one, node(tmp_path / "b", 2, port=port, peer_urls=(alias,)):
            assert (await one.links.meet(alias)).broker == 2

    asyncio.run(main())


def test_folder_that_dials_itself_is_told_by_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, 1) as one:
            one.links.dial({one.config.url})
            link = one.links.to(one.config.url)
            assert link is not None
            await until(lambda: link.is_self)

    asyncio.run(main())


def test_nobody_but_a_broker_can_say_that_it_is_this_broker_itself(tmp_path: Path) -> None:
    async def refuse(request: web.Request) -> web.Response:
        error = {"code": "cluster_mismatch", "message": "forged\nline", "retriable": False, "itself": True}
        return web.json_response({"error": error}, status=403)

    async def main() -> None:
        async with node(tmp_path, 1) as one, answering(refuse) as url:
            one.links.dial({url})
            link = one.links.to(url)
            assert link is not None
            await until(lambda: "forged" in link.problem)
            assert not link.is_self
            assert "\n" not in link.problem

    asyncio.run(main())


class answering:  # noqa: N801
    """A web server that is no broker."""

    def __init__(self, handler: Any) -> None:
        self._app = web.Application()
        self._app.router.add_route("*", "/{path:.*}", handler)

    async def __aenter__(self) -> str:
        self._runner = web.AppRunner(self._app, access_log=None)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(64):
        await response.write(bytes(64 * 1024))
    return response


async def _elsewhere(request: web.Request) -> web.Response:
    raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{free_port()}/")


async def _not_allowed(request: web.Request) -> web.Response:
    raise web.HTTPMethodNotAllowed(request.method, ["GET"])


async def _page(request: web.Request) -> web.Response:
    return web.Response(text="<html>")


@pytest.mark.long
@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (_endless, "larger than 64 KiB"),
        pytest.param(_elsewhere, "HTTP 307", marks=pytest.mark.long),
        (_not_allowed, "HTTP 405"),
        pytest.param(_page, "did not prove", marks=pytest.mark.long),
    ],
)
def test_server_that_is_no_broker_is_not_added_and_the_reason_is_named(
    tmp_path: Path, handler: Any, problem: str
) -> None:
    async def main() -> None:
        async with node(tmp_path, 1) as one, answering(handler) as url:
            with pytest.raises(BrokerUnavailable, match=problem):
                await one.links.meet(url)
            assert url not in one.links._guests

    asyncio.run(main())


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "http://",
        "http://user:pass@host:1",
        "host:9292",
        "http://host:99999",
        "http://h/?q=1",
        "http://h h",
    ],
)
def test_url_that_cannot_be_a_brokers_is_not_dialled(tmp_path: Path, url: str) -> None:
    async def main() -> None:
        async with node(tmp_path, 1) as one:
            one.group.raft.role = "leader"
            with pytest.raises(InvalidRequest, match="URL") as refused:
                await Operations(one).add(url)
            assert "pass" not in refused.value.message
            assert one.links.all == []

    asyncio.run(main())


# ---- someone with the secret's key, up to a point ----


async def met_by_hand(session: aiohttp.ClientSession, one: Node, other: Node) -> Met:
    dialling = Dialling(one.keys, one.hello(other.config.url))
    async with session.post(
        other.config.url + "/internal/link", data=dialling.body, headers={PROOF_HEADER: dialling.proof}
    ) as answer:
        return dialling.met(await answer.read(), answer.headers[PROOF_HEADER])


async def opened(session: aiohttp.ClientSession, other: Node, link: str) -> aiohttp.ClientWebSocketResponse:
    return await session.ws_connect(other.config.url + "/internal/link", headers={LINK_HEADER: link})


def test_link_is_opened_once_and_only_by_who_saw_the_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other), aiohttp.ClientSession() as session:
            met = await met_by_hand(session, one, other)
            nonce, _, proof = met.link.partition(":")
            socket = await opened(session, other, met.link)
            for link in (met.link, f"{nonce}:", "", ":", f"{'0' * 32}:{proof}"):
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    await opened(session, other, link)
            second = await met_by_hand(session, one, other)
            with pytest.raises(aiohttp.WSServerHandshakeError):  # the first link's proof
                await opened(session, other, f"{second.peer.nonce}:{proof}")
            with pytest.raises(aiohttp.WSServerHandshakeError):  # and it was a try: this one is gone as well
                await opened(session, other, second.link)
            await socket.close()

    asyncio.run(main())


def test_frame_without_a_seal_ends_an_open_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other), aiohttp.ClientSession() as session:
            met = await met_by_hand(session, one, other)
            socket = await opened(session, other, met.link)
            append = AppendRequest(
                sender=BrokerId(1), to=BrokerId(2), term=Term(2**63), prev_index=Index(0), prev_term=Term(0)
            )
            await socket.send_bytes(b"".join(encode_frame(RaftMessages((append,)))))
            assert (await socket.receive(5)).type is aiohttp.WSMsgType.CLOSE
            assert "not authentic" in caplog.text
            met = await met_by_hand(session, one, other)
            socket = await opened(session, other, met.link)
            await socket.send_bytes(bytes(met.session.sealer.seal(encode_frame(RaftMessages((append,))))))
            assert (await socket.receive(5)).type is aiohttp.WSMsgType.CLOSE
            assert "numbers that no broker sends" in caplog.text
            assert other.frames == []

    asyncio.run(main())


# ---- secrets that are changed ----


def test_links_stay_when_the_secrets_change_and_new_ones_use_the_new_secret(tmp_path: Path) -> None:
    new = b"the secret of tomorrow"

    async def main() -> None:
        async with two(tmp_path) as (one, other):
            await linked(one, other.config.url)
            link = one.links.to(other.config.url)
            assert link is not None
            assert link.peer is not None
            for secrets in ((SECRET, new), (new, SECRET), (new,)):
                for each in (one, other):
                    each.keys.use(secrets)
                assert link.send(NatsReachability(True))
            await until(lambda: len(other.frames) == 3)
            assert link.peer.keys == KeyRing([SECRET]).ids, "it is the same link"
            link.hang_up()
            await until(lambda: link.is_up and link.peer is not None and link.peer.keys == KeyRing([new]).ids)
            one.keys.use([SECRET])
            link.hang_up()
            await until(lambda: "has another cluster secret" in link.problem)

    asyncio.run(main())


def test_authority_that_is_not_trusted_any_more_ends_no_link_and_begins_none(tmp_path: Path) -> None:
    """The context of the moment is used for each connection, also where one to that server is kept alive."""
    make_certificates(tmp_path / "ours", None, [], 30)
    make_certificates(tmp_path / "theirs", None, [], 30)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "theirs" / "broker.pem", tmp_path / "theirs" / "broker-key.pem")
    tls = SimpleNamespace(dialling=ssl.create_default_context(cafile=str(tmp_path / "theirs" / "ca.pem")))

    async def main() -> None:
        app, port = web.Application(), free_port()
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=server).start()
        async with node(tmp_path, 1) as one:
            links = Links(one, tls)  # type: ignore[arg-type]
            links.dial({f"https://127.0.0.1:{port}"})
            (link,) = links.all
            await until(lambda: "it answered HTTP 404" in link.problem)
            tls.dialling = ssl.create_default_context(cafile=str(tmp_path / "ours" / "ca.pem"))
            await until(lambda: "the TLS handshake failed" in link.problem)
            assert link.failure.message == link.problem
            await links.close()
        await runner.cleanup()

    asyncio.run(main())


# ---- who may not come in ----


@pytest.mark.long
def test_reasons_to_refuse_a_broker_are_named_on_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with node(tmp_path, 1) as one:
            async with node(tmp_path, 2, secrets=[b"not the cluster's secret"]) as other:
                with pytest.raises(BrokerUnavailable, match="has another cluster secret.*cluster_secret_file"):
                    await other.links.meet(one.config.url)
            async with node(tmp_path / "again", 1) as other:
                with pytest.raises(BrokerUnavailable, match="two brokers have the id 1"):
                    await other.links.meet(one.config.url)
            async with node(tmp_path, 3, secrets=()) as other:
                with pytest.raises(BrokerUnavailable, match="this broker has no cluster secret"):
                    await other.links.meet(one.config.url)
                with pytest.raises(BrokerUnavailable, match="accepts no links"):
                    await one.links.meet(other.config.url)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    refused = [
        record.message
        for record in caplog.records
        if record.message.startswith("the connection of a broker was refused")
    ]
    assert any("another cluster secret" in message for message in refused)
    assert any("two brokers have the id 1" in message for message in refused)


def test_refusal_as_an_older_copy_reaches_the_broker_it_is_about(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            hello = other.hello()
            one.group.state.brokers[BrokerId(2)] = BrokerRecord(
                id=BrokerId(2), url=hello.url, rack=None, directory=hello.directory, life=9, nonce="another"
            )
            other.links.dial({one.config.url})
            await until(lambda: other.registration.outdated is not None)
            assert other.registration.outdated is not None
            assert "is an older copy" in other.registration.outdated.message

    asyncio.run(main())


def test_that_a_broker_starts_is_no_error_of_its_links(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            one._stored_commit = Index(10)  # what a restart has to apply first
            other.links.dial({one.config.url})
            await until(lambda: isinstance(next(link.refusal for link in other.links.all), NotReady))

    with caplog.at_level(logging.ERROR, "natslog.links"):
        asyncio.run(main())
    assert caplog.records == []


@pytest.mark.parametrize(
    ("levels", "level", "remedy"),
    [
        ((1, 1), 2, "run natslog 0.2.0 or later on that broker"),
        ((3, 4), 2, "finalize-upgrade"),
        ((1, 2), 2, None),
        ((2, 3), 2, None),
    ],
)
def test_broker_without_the_clusters_feature_level_is_refused(
    tmp_path: Path, levels: tuple[int, int], level: int, remedy: str | None
) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            one._data_dir.join("c")
            one.group.state.feature_level = level
            hello = msgspec.structs.replace(other.hello(), min_level=levels[0], max_level=levels[1])
            if remedy is None:
                one.check_peer(hello)
                return
            with pytest.raises(ClusterMismatch, match=remedy) as refused:
                one.check_peer(hello)
            assert f"feature level {level}" in refused.value.message
            assert f"supports levels {levels[0]} to {levels[1]}" in refused.value.message

    asyncio.run(main())


def test_replayed_hello_does_not_change_what_is_known_of_a_clock(tmp_path: Path) -> None:
    """Only who opens the link has said its hello now."""

    async def main() -> None:
        async with two(tmp_path) as (one, other), aiohttp.ClientSession() as session:
            dialling = Dialling(one.keys, msgspec.structs.replace(one.hello(other.config.url), wall_us=0))
            url, headers = other.config.url + "/internal/link", {PROOF_HEADER: dialling.proof}
            async with session.post(url, data=dialling.body, headers=headers) as answer:
                assert answer.status == 200
                met = dialling.met(await answer.read(), answer.headers[PROOF_HEADER])
            assert other.clock.apart_s == {}
            socket = await opened(session, other, met.link)
            assert other.clock.apart_s[BrokerId(1)] < -1e6
            await socket.close()

    asyncio.run(main())


# ---- before anything is proven ----


def test_slow_strangers_do_not_keep_a_broker_out(tmp_path: Path) -> None:
    """More than there are places send no more than the head of a hello; the oldest lose theirs."""

    async def main() -> None:
        async with two(tmp_path) as (one, other):
            strangers = [await half_a_hello(other.config.http_port) for _ in range(3 * MAX_PLACES_OF_ONE_ADDRESS)]
            await until(lambda: len(other.reception._reading) == MAX_PLACES_OF_ONE_ADDRESS)
            began = time.monotonic()
            await linked(one, other.config.url)
            assert time.monotonic() - began < 3
            assert len(other.reception._reading) <= MAX_PLACES_OF_ONE_ADDRESS
            refused = await asyncio.wait_for(strangers[0][0].readline(), 2)
            assert b"503" in refused
            for _, writer in strangers:
                writer.close()

    asyncio.run(main())


async def half_a_hello(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /internal/link HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    return reader, writer


def test_refusals_of_many_kinds_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with node(tmp_path, 1) as one:
            for number in range(1000):
                one.refused(ClusterMismatch(f"reason {number}"))
                one.refused(ClusterMismatch("reason 0"))

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert 1 < len(caplog.records) <= 40
