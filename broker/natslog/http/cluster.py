"""The cluster: its members and their state, changes by operators, and the endpoints for other brokers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeGuard

import msgspec
from aiohttp import web
from msgspec import UNSET

from natslog.cluster.features import LATEST_LEVEL, blocking, supported_by_all
from natslog.consensus import MAX_BROKER_ID
from natslog.errors import (
    BrokerUnavailable,
    ClusterMismatch,
    InvalidRequest,
    MetadataUnavailable,
    NotMetadataLeader,
    natslog_version,
)
from natslog.http import shapes
from natslog.http.access import access, rights_of
from natslog.http.bodies import json_body, read_body
from natslog.http.connections import connection_of
from natslog.http.context import BROKER, broker_of, leading, query, request_id
from natslog.http.shapes import shape_response
from natslog.model import BrokerId, StreamRecord
from natslog.node.broker import Broker
from natslog.node.log_levels import Levels
from natslog.node.peers.handshake import LINK_HEADER, LINK_PATH, PROOF_HEADER
from natslog.node.peers.link_socket import LinkSocket
from natslog.node.peers.links import serve_link
from natslog.node.peers.reception import HANDSHAKE_S
from natslog.request_ids import handling
from natslog.subjects import is_internal
from natslog.urls import normal_url

routes = web.RouteTableDef()

_MAX_REFUSED_BYTES = 4096
_MOST_DIGITS = 19


def _require_certificate(request: web.Request) -> None:
    """With a CA, other brokers present a certificate, as clients may. Raises ClusterMismatch."""
    tls, transport = request.app[BROKER].cluster.tls, request.transport
    if tls is not None and tls.verifies_clients and not (transport and transport.get_extra_info("peercert")):
        raise ClusterMismatch(
            "a broker must present a certificate of the CA in tls_ca_file: set tls_cert_file and tls_key_file there"
        )


@routes.post(LINK_PATH)
@access("peers")
async def introduce(request: web.Request) -> web.Response:
    """Another broker identifies itself: `handshake`, the first step."""
    _require_certificate(request)
    reception = request.app[BROKER].cluster.reception
    address = request.remote or ""
    try:
        async with reception.place(address):
            body = await read_body(request)
    except TimeoutError as error:
        raise BrokerUnavailable(f"the hello was not received within {HANDSHAKE_S:g} s") from error
    answer, proof = reception.introduced(body, request.headers.get(PROOF_HEADER, ""), address)
    return web.Response(body=answer, content_type="application/json", headers={PROOF_HEADER: proof})


@routes.get(LINK_PATH)
@access("peers")
async def link(request: web.Request) -> web.StreamResponse:
    """Another broker opens its link: `handshake`, the last step."""
    _require_certificate(request)
    cluster = request.app[BROKER].cluster
    peer, session = cluster.reception.admitted(request.headers.get(LINK_HEADER, ""))
    connection_of(request).proved()
    key, transport = request.headers.get("Sec-WebSocket-Key", ""), request.transport
    if transport is None or not key or request.headers.get("Upgrade", "").lower() != "websocket":
        raise ClusterMismatch("a link is a WebSocket: the request must open one")
    with handling(""):  # what arrives on the link belongs to other requests, or to none
        socket = LinkSocket(session, is_dialler=False)
        socket.take_over(transport, request.protocol, key)
        await serve_link(cluster, socket, peer)
    return web.Response()  # which is not sent: the connection is closed


@routes.get("/v1/cluster")
@access("credentials")
async def cluster(request: web.Request) -> web.Response:
    query(request)
    broker = broker_of(request)
    is_current, rights = await broker.up_to_date(), rights_of(request)
    records = broker.state.streams.values()
    if not rights.may("monitor"):  # counts of streams are of those that the identity may see
        records = [one for one in records if rights.may_see(one.name, one.recorded_subjects)]
    return shape_response(shown_cluster(broker, is_current=is_current, records=records))


def shown_cluster(
    broker: Broker, *, is_current: bool, records: Collection[StreamRecord] | None = None
) -> shapes.Cluster:
    """Args: `is_current`: whether a majority confirmed that this broker has all changes. `records`: the streams that
    are counted; None: all.
    """
    node, state = broker.cluster, broker.state
    level, levels = state.feature_level, None
    if level < LATEST_LEVEL:  # otherwise the level is known: every broker supports the level of its cluster
        levels = node.upgrade.supported_levels()
    records = state.streams.values() if records is None else records
    streams = [record for record in records if not is_internal(record.name)]
    return shapes.Cluster(
        cluster_id=node.cluster_id,
        metadata_leader=node.group.leader,
        metadata_term=node.group.raft.term,
        is_current=is_current,
        brokers=[_shown(broker, number, records) for number in broker.operations.brokers],
        streams=len(streams),
        under_replicated=sum(len(one.isr) < len(one.replicas) for one in streams),
        leaderless=sum(one.leader is None for one in streams),
        version=natslog_version(),
        feature_level=level,
        supported_level=level if levels is None else supported_by_all(levels, level),
        upgrade_waits=levels is not None,
        upgrade_waits_for=[] if levels is None else [*blocking(levels, LATEST_LEVEL)],
        jetstream=broker.jetstream or "off",
        nats_leaf=broker.leaf_state,
        nats_leaf_problem=broker.leaf_problem or UNSET,
    )


def _shown(broker: Broker, number: BrokerId, records: Collection[StreamRecord]) -> shapes.Broker:
    node, state = broker.cluster, broker.state
    member, known = broker.operations.member(number), state.brokers.get(number)
    url = known.url if known else member.url if member else None
    alive = number == node.me or node.link_to(number) is not None
    link = None if alive or url is None else node.links.to(url)
    return shapes.Broker(
        id=number,
        url=url,
        rack=known.rack if known else "",
        tags=list(known.tags) if known else [],
        alive=alive,
        role="none" if member is None else "voter" if member.is_voter else "learner",
        draining=known.is_draining if known else False,
        stopping=known.is_stopping if known else False,
        leads=sum(one.leader == number for one in records),
        replicas=sum(number in one.replicas for one in records),
        in_sync=sum(number in one.isr for one in records),
        clock_apart_s=round(node.clock.apart_s.get(number, 0.0), 1),
        problem=UNSET if link is None else link.failure.to_json()["error"],
    )


def _at_metadata_leader(request: web.Request) -> Broker:
    """Raises HTTPTemporaryRedirect: to the metadata leader. NotMetadataLeader, MetadataUnavailable: there is none."""
    broker = broker_of(request)
    group = broker.cluster.group
    if group.is_leader:
        return broker
    url = broker.url_of(group.leader) if group.leader is not None else None
    if url is None:
        raise group.unavailable()
    if request.headers.get("Natslog-Redirected") == "true":
        raise NotMetadataLeader(
            f"broker {group.leader} at {url} is metadata leader: send the request to it", leader=group.leader, url=url
        )
    raise web.HTTPTemporaryRedirect(url + request.path_qs)


def _number(body: dict[str, Any], name: str) -> BrokerId:
    value = body.get(name)
    if not _is_broker_number(value):
        raise InvalidRequest(f"{name} must be the number of a broker")
    return BrokerId(value)


def _is_broker_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_BROKER_ID


@routes.post("/v1/cluster/brokers")
@access("cluster", "admin")
async def add_broker(request: web.Request) -> web.Response:
    body = await json_body(request)
    url = body.get("url")
    if not isinstance(url, str):
        raise InvalidRequest('give the URL of the new broker: {"url": "http://host:9292"}')
    url = normal_url(url)
    broker = _at_metadata_leader(request)
    number = await broker.change_cluster(broker.operations.add(url))
    return shape_response(_shown(broker, number, broker.state.streams.values()), status=201)


@routes.patch("/v1/cluster/brokers/{id}")
@access("cluster", "admin")
async def drain_broker(request: web.Request) -> web.Response:
    """`{"draining": true}`: its replicas move to others, and its leaderships."""
    body = await json_body(request)
    draining = body.get("draining")
    if not isinstance(draining, bool):
        raise InvalidRequest("draining must be true or false")
    broker, number = _at_metadata_leader(request), _path_number(request)
    await broker.change_cluster(broker.operations.drain(number, draining, request_id(request)))
    return shape_response(_shown(broker, number, broker.state.streams.values()))


def _path_number(request: web.Request) -> BrokerId:
    text = request.match_info["id"]
    if not text.isdecimal() or len(text) > _MOST_DIGITS or not _is_broker_number(int(text)):
        raise InvalidRequest(f"{text[:40]!r} is not the number of a broker")
    return BrokerId(int(text))


@routes.delete("/v1/cluster/brokers/{id}")
@access("cluster", "admin")
async def remove_broker(request: web.Request) -> web.Response:
    """Removes the broker from the group. It must not hold any replica, unless `force=true`, for a permanently lost
    broker.
    """
    values = query(request, "force")
    broker, number = _at_metadata_leader(request), _path_number(request)
    is_forced = values.get("force") == "true"
    await broker.change_cluster(broker.operations.remove(number, force=is_forced, request=request_id(request)))
    return web.Response(status=204)


@routes.post("/v1/cluster/transfer")
@access("cluster", "admin")
async def transfer(request: web.Request) -> web.Response:
    """`{"metadata": true, "to": 2}`: the metadata leadership."""
    body = await json_body(request)
    broker = _at_metadata_leader(request)
    broker.operations.transfer_metadata(_number(body, "to"))
    return shape_response(shapes.Transfer(body["to"]), status=202)


@routes.get("/v1/cluster/log-level")
@access("cluster", "admin")
async def show_log_levels(request: web.Request) -> web.Response:
    """Of every broker."""
    query(request)
    return shape_response(_shown_levels(await broker_of(request).log_levels.everywhere()))


def _shown_levels(found: list[Levels]) -> shapes.LogLevels:
    return shapes.LogLevels([msgspec.convert(one, shapes.BrokerLogLevels) for one in found])


@routes.put("/v1/cluster/log-level")
@access("cluster", "admin")
async def set_log_level(request: web.Request) -> web.Response:
    """`{"level": "debug", "logger": "natslog.node", "broker": 2}`: until that broker, or each one, is started again."""
    query(request)
    body, broker = await json_body(request), broker_of(request)
    try:
        given = msgspec.convert(body, shapes.NewLogLevel)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"state a level, and optionally a logger and a broker: {error}") from error
    number = None if given.broker is None else BrokerId(given.broker)
    found = await broker.log_levels.everywhere(number, level=given.level, logger=given.logger)
    return shape_response(_shown_levels(found))


@routes.post("/v1/cluster/finalize-upgrade")
@access("cluster", "admin")
async def finalize_upgrade(request: web.Request) -> web.Response:
    """Raises the feature level permanently: afterwards no broker can be downgraded."""
    query(request)
    broker = _at_metadata_leader(request)
    was_lower = await broker.change_cluster(broker.cluster.upgrade.finalize())
    return shape_response(shapes.Upgraded(broker.state.feature_level, was_lower))


@routes.post("/v1/streams/{name}/leader")
@access("stream", "admin")
async def transfer_stream(request: web.Request) -> web.Response:
    """`{"to": 2}`: the preferred leader from now on. This broker stops accepting messages, waits until the other one
    has caught up, and proposes it.
    """
    body = await json_body(request)
    stream, broker = await leading(request), broker_of(request)
    to = _number(body, "to")
    record = stream.record
    if to not in record.isr:
        raise InvalidRequest(
            f"broker {to} is not an in-sync replica of stream {record.name!r}; the in-sync replicas are "
            f"{list(record.isr)}",
            broker=to,
        )
    preferred = (to, *(one for one in record.replicas if one != to))
    if not record.target:
        await broker.change_cluster(broker.operations.move(record.name, preferred, request_id(request)))
    if to != record.leader:
        await broker.change_cluster(stream.transfer_leadership(to))
        if broker.state.stream(record.name).leader != to:
            raise MetadataUnavailable(
                f"the leadership of stream {record.name!r} was not transferred to broker {to} in time: repeat the "
                "request"
            )
    return shape_response(shapes.Led(record.name, to))


@routes.put("/v1/streams/{name}/replicas")
@access("stream", "admin")
async def move_stream(request: web.Request) -> web.Response:
    """`{"brokers": [1, 2, 4]}`: the new brokers of its replicas, the preferred leader first."""
    body, broker = await json_body(request), broker_of(request)
    brokers = body.get("brokers")
    if not isinstance(brokers, list) or not all(map(_is_broker_number, brokers)):
        raise InvalidRequest("brokers must be a list of broker numbers")
    record = await broker.record(request.match_info["name"])
    target = [BrokerId(one) for one in brokers]
    await broker.change_cluster(broker.operations.move(record.name, target, request_id(request)))
    return shape_response(shapes.Moving(record.name, brokers), status=202)
