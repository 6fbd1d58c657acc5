"""The requests of the JetStream API: their subjects, and the call that answers each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from natslog.jetstream.stream_state import NO_TIME
from natslog.jetstream.streams import StreamCalls
from natslog.node.replicas.stream import HostedStream
from natslog.wire.api_probe import PROBE_HEADER


@dataclass(frozen=True, slots=True)
class ApiCall:
    """`names`: the tokens of the subject behind those of the endpoint. `is_known`: there was such a stream when the
    request arrived. `stream`: None if there is none.
    """

    names: list[str]
    reply: bytes
    headers: bytes
    payload: bytes
    is_known: bool = False
    stream: HostedStream | None = None


class Endpoint(NamedTuple):
    """`kind`: of its answers. `at_stream`: the leader of the stream answers, not the metadata leader. `is_change`: of
    the configuration; a few are made at once. `beside_error`: what an answer with an error has as well.
    """

    subject: str
    kind: str
    call: Callable[[StreamCalls, ApiCall], Awaitable[dict[str, Any]]]
    at_stream: bool = True
    is_change: bool = False
    beside_error: Mapping[str, Any] = MappingProxyType({})


async def _account(calls: StreamCalls, request: ApiCall) -> dict[str, Any]:
    return {} if PROBE_HEADER in request.headers else await calls.account()


def _create_consumer(
    calls: StreamCalls, request: ApiCall, *, is_durable: bool = False
) -> Coroutine[Any, Any, dict[str, Any]]:
    return calls.consumers.create(request.stream, request.names, request.payload, is_durable=is_durable)


_NO_PAGE = {"total": 0, "offset": 0, "limit": 0}
ENDPOINTS = (
    Endpoint("INFO", "account_info", _account, at_stream=False),
    Endpoint(
        "STREAM.CREATE.*",
        "stream_create",
        lambda calls, request: calls.create(request.names[0], request.payload),
        at_stream=False,
        is_change=True,
    ),
    Endpoint(
        "STREAM.NAMES",
        "stream_names",
        lambda calls, request: calls.names(request.payload),
        at_stream=False,
        beside_error=_NO_PAGE | {"streams": None},
    ),
    Endpoint(
        "STREAM.LIST",
        "stream_list",
        lambda calls, request: calls.infos(request.payload),
        at_stream=False,
        beside_error=_NO_PAGE | {"streams": []},
    ),
    Endpoint(
        "STREAM.INFO.*",
        "stream_info",
        lambda calls, request: calls.info(request.stream, request.payload),
        beside_error=_NO_PAGE,
    ),
    Endpoint(
        "STREAM.UPDATE.*",
        "stream_update",
        lambda calls, request: calls.update(request.names[0], request.stream, request.payload),
        is_change=True,
    ),
    Endpoint("STREAM.DELETE.*", "stream_delete", lambda calls, request: calls.delete(request.stream, request.payload)),
    Endpoint(
        "STREAM.PURGE.*",
        "stream_purge",
        lambda calls, request: calls.purge(request.stream, request.payload),
        beside_error={"purged": 0},
    ),
    Endpoint("STREAM.SNAPSHOT.*", "stream_snapshot", lambda calls, request: calls.snapshot(request.stream)),
    Endpoint("STREAM.RESTORE.*", "stream_restore", lambda calls, request: calls.restore(), at_stream=False),
    Endpoint(
        "STREAM.MSG.GET.*", "stream_msg_get", lambda calls, request: calls.message(request.stream, request.payload)
    ),
    Endpoint(
        "STREAM.MSG.DELETE.*",
        "stream_msg_delete",
        lambda calls, request: calls.delete_message(request.stream, request.payload),
    ),
    Endpoint(
        "CONSUMER.NAMES.*",
        "consumer_names",
        lambda calls, request: calls.consumers.names(request.stream, request.payload),
        beside_error=_NO_PAGE | {"consumers": []},
    ),
    Endpoint(
        "CONSUMER.LIST.*",
        "consumer_list",
        lambda calls, request: calls.consumers.infos(request.stream, request.payload),
        beside_error=_NO_PAGE | {"consumers": []},
    ),
    Endpoint("CONSUMER.CREATE.*", "consumer_create", lambda calls, request: _create_consumer(calls, request)),
    Endpoint("CONSUMER.CREATE.*.>", "consumer_create", lambda calls, request: _create_consumer(calls, request)),
    Endpoint(
        "CONSUMER.DURABLE.CREATE.*.*",
        "consumer_create",
        lambda calls, request: _create_consumer(calls, request, is_durable=True),
    ),
    Endpoint(
        "CONSUMER.INFO.*.*",
        "consumer_info",
        lambda calls, request: calls.consumers.info(request.stream, request.names[1], request.payload),
    ),
    Endpoint(
        "CONSUMER.PAUSE.*.*",
        "consumer_pause",
        lambda calls, request: calls.consumers.pause(request.stream, request.names[1], request.payload),
        beside_error={"paused": False, "pause_until": NO_TIME},
    ),
    Endpoint(
        "CONSUMER.DELETE.*.*",
        "consumer_delete",
        lambda calls, request: calls.consumers.delete(request.stream, request.names[1], request.payload),
    ),
)
BY_VERBS = {tuple(one.subject.removesuffix(".>").replace(".*", "").split(".")): one for one in ENDPOINTS}
MOST_VERBS = max(map(len, BY_VERBS))
