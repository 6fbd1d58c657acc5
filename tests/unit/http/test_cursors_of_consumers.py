"""GET /v1/cursors: what leaders are asked about JetStream consumers, of streams that the identity may see and read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from yarl import URL

from natslog.errors import BrokerUnavailable, NatslogError
from natslog.http import cursors
from natslog.http.access import RIGHTS
from natslog.http.context import BROKER
from natslog.http.table import ENDPOINTS
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from natslog.node.peers.requests import Requests
from natslog.node.replicas.consumer_cursors import ConsumerCursors
from natslog.node.replicas.consumer_records import ConsumerNumbers, ConsumerPosition
from natslog.security.guard import Guard, Identity
from natslog.security.records import Rule, Security

ME, OTHER = BrokerId(1), BrokerId(2)
NUMBERS = ConsumerNumbers((1, 1), (1, 1), 7, 0, 0, 0)


class Link:
    """To a leader that has a consumer `C` on each stream."""

    def __init__(self, *, version_before: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self.is_slow_with_numbers, self.version_before = False, version_before

    async def ask(self, what: str, timeout_s: float, *, names: list[str], **further: Any) -> Any:
        assert what == "consumer_positions"
        self.asked.append({"names": names} | further)
        if self.is_slow_with_numbers and further.get("count_within_s"):
            raise BrokerUnavailable("no answer in time")
        if self.version_before and further:
            raise NatslogError("here() got an unexpected keyword argument")
        found = {name: [ConsumerPosition(one, 3, 0, True, NUMBERS) for one in "BC"] for name in names}
        return msgspec.json.decode(msgspec.json.encode(found))


def record(name: str) -> StreamRecord:
    return StreamRecord(
        name=name,
        id=StreamId(f"{name}-id"),
        settings=StreamSettings(subject=f"{name}.>"),
        created_us=0,
        leader=OTHER,
        leader_epoch=Epoch(1),
        replicas=(OTHER,),
        isr=(OTHER,),
        has_companion=True,
    )


class Api:
    """Of a broker that leads nothing."""

    def __init__(self, link: Link, *rules: Rule) -> None:
        async def nothing(**_: Any) -> list[Any]:
            return []

        async def lags_of(found: list[Any]) -> list[None]:
            return [None] * len(found)

        async def up_to_date() -> None:
            return None

        async def record_of(name: str) -> StreamRecord:
            return streams[name]

        streams = {name: record(name) for name in ("hidden", "partly", "wholly")}
        state = SimpleNamespace(streams=streams)
        broker: Any = SimpleNamespace(answerers={})
        cluster: Any = SimpleNamespace(me=ME, state=state, requests=Requests(ME, lambda leader: link, broker))
        security = Security(rules={rule.id: rule for rule in rules}) if rules else None
        self.rights = Guard(lambda: security, lambda: 0).rights(Identity("alice"))
        self.app = web.Application()
        self.app[BROKER] = SimpleNamespace(  # type: ignore[assignment]
            has_started=True,
            state=state,
            require_up_to_date=up_to_date,
            record=record_of,
            cursors=SimpleNamespace(find=nothing),
            consumer_cursors=ConsumerCursors(cluster, SimpleNamespace(), SimpleNamespace()),  # type: ignore[arg-type]
            lags=SimpleNamespace(of_cursors=lags_of),
        )

    def get(self, handler: Any, path: str, **match: str) -> Any:
        request = make_mocked_request("GET", path, app=self.app, match_info=match)
        assert request.rel_url == URL(path)
        request[RIGHTS] = self.rights
        (endpoint,) = [one for one in ENDPOINTS if one.handler is handler]
        response: Any = asyncio.run(endpoint.serve(request))
        return msgspec.json.decode(response.body)

    def listed(self) -> dict[tuple[str, str], int | None]:
        return {
            (one["stream"], one["consumer"]): one["jetstream"] and one["jetstream"]["num_pending"]
            for one in self.get(cursors.list_cursors, "/v1/cursors")
        }

    def shown(self, stream: str) -> Any:
        path = f"/v1/cursors/jetstream:C/{stream}"
        return self.get(cursors.show_cursor, path, consumer="jetstream:C", stream=stream)


def may_read(stream: str, subject: str) -> Rule:
    return Rule(id=stream, who="alice", action="read", stream=stream, subject=subject)


def test_leaders_count_only_for_those_who_may_read_the_whole_stream() -> None:
    link = Link()
    api = Api(link, may_read("partly", "partly.a"), may_read("wholly", "wholly.>"))
    assert api.listed() == {("partly", f"jetstream:{one}"): None for one in "BC"} | {
        ("wholly", f"jetstream:{one}"): 7 for one in "BC"
    }
    asked = {name: one.get("count_within_s", 0) for one in link.asked for name in one["names"]}
    assert asked == {"partly": 0, "wholly": 0.5}
    link.asked.clear()
    assert api.shown("partly")["jetstream"] is None
    assert api.shown("wholly")["jetstream"]["num_pending"] == 7
    assert [one["count_within_s"] for one in link.asked] == [0, 0.5]


@pytest.mark.parametrize("version_before", [False, True])
def test_positions_are_asked_for_alone_if_the_leader_does_not_answer_with_numbers(version_before: bool) -> None:
    link = Link(version_before=version_before)
    link.is_slow_with_numbers = True
    api = Api(link)
    assert sorted(api.listed()) == [
        (name, f"jetstream:{one}") for name in ("hidden", "partly", "wholly") for one in "BC"
    ]
    shown = api.shown("wholly")
    assert (shown["consumer"], shown["offset"]) == ("jetstream:C", 3)
