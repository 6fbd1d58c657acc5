"""Events for the stream `__activity`: what happens in a cluster, who changed what, and from where.

Theory of operation. Most events follow from the metadata: `Before` keeps the records that a command may change, and
compares them with the records after it. Every broker that applies the command derives the same events, so a new
metadata leader continues where the former one stopped. Damage, disk space and requests are events of one broker, which
reports them itself.

The form of a message: its subject is the kind of event, its key the name of the stream, the id of the broker or the
identity that the event is about, and its value an `Activity` as JSON. See docs/ACTIVITY.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args

import msgspec

from natslog.cluster.commands import (
    AppointLeaders,
    BrokerRecord,
    ChangeIsrs,
    Command,
    CreateStream,
    DeleteStream,
    DisableReplicas,
    DropCursor,
    DropMovedCursors,
    DropTombstone,
    EditStream,
    FinishMoves,
    HoldReplicas,
    LeaveReplicas,
    MoveReplicas,
    PauseStream,
    Proposal,
    PurgeStream,
    RegisterBroker,
    ResizeReplicas,
    SealStream,
    SetCursor,
)
from natslog.cluster.metadata import Metadata
from natslog.cluster.security_commands import SecurityCommand
from natslog.model import BrokerId, StreamRecord
from natslog.subjects import is_internal

STREAM = "__activity"
SUBJECT = "activity.>"

Kind = Literal[
    "activity.stream.created",
    "activity.stream.edited",
    "activity.stream.deleted",
    "activity.stream.paused",
    "activity.stream.resumed",
    "activity.stream.sealed",
    "activity.stream.purged",
    "activity.stream.leader",
    "activity.stream.isr",
    "activity.stream.replicas",
    "activity.replica.damaged",
    "activity.replica.lost",
    "activity.replica.repaired",
    "activity.broker.joined",
    "activity.broker.left",
    "activity.broker.started",
    "activity.broker.stopped",
    "activity.broker.returned",
    "activity.broker.draining",
    "activity.broker.disk_low",
    "activity.broker.disk_writable",
    "activity.cluster.upgraded",
    "activity.security.changed",
    "activity.operator.request",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Activity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. Fields that do not apply are absent.

    Attributes:
        id: the same where an event is reported twice. time: when the reporting broker applied or noticed it, RFC 3339.
        cluster: id of the cluster.
        stream: name of the stream. stream_id: its id. broker: id of the broker that the event is about.
        identity: who requested it; absent without security. address: where the request came from. request: its id.
            All three are absent where natslog decided.
        before: the former values of what changed. after: the present ones. message: an explanation for people.
    """

    id: str
    event: Kind
    time: str
    cluster: str
    stream: str | None = None
    stream_id: str | None = None
    broker: int | None = None
    identity: str | None = None
    address: str | None = None
    request: str | None = None
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    message: str | None = None

    @property
    def key(self) -> str:
        """The key of the message."""
        if self.stream is not None:
            return self.stream
        return self.cluster if self.broker is None else str(self.broker)


def schema() -> dict[str, Any]:
    """The JSON schema of the value of a message."""
    described = msgspec.json.schema(Activity)
    for definition in described["$defs"].values():
        definition["description"] = inspect.cleandoc(definition["description"])  # msgspec before 0.23 does not
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


class Before:
    """The records that a command may change, before it is applied.

    Args:
        state: as it is before the command.
    """

    __slots__ = ("_brokers", "_level", "_names", "_proposal", "_streams")

    def __init__(self, state: Metadata, proposal: Proposal) -> None:
        self._proposal, self._level = proposal, state.feature_level
        self._names = _touched(state, proposal.command)
        self._streams = {name: state.streams[name] for name in self._names if name in state.streams}
        self._brokers = dict(state.brokers)

    def compare(self, state: Metadata) -> list[dict[str, Any]]:
        """The events of the command, which has been applied to `state`: fields of `Activity` without id and time."""
        found: list[dict[str, Any]] = []
        for name in self._names:
            found += _of_stream(self._streams.get(name), state.streams.get(name), self._proposal.command)
        for broker in sorted({*self._brokers, *state.brokers}):
            found += _of_broker(broker, self._brokers.get(broker), state.brokers.get(broker))
        if state.feature_level != self._level:
            found.append(_changed("activity.cluster.upgraded", {"level": self._level}, {"level": state.feature_level}))
        if isinstance(self._proposal.command, SecurityCommand):
            found.append({"event": "activity.security.changed", "after": _security_facts(self._proposal.command)})
        origin = _origin(self._proposal)
        return [one | origin | {"cluster": state.cluster_id} for one in found]


def is_silent(command: Command) -> bool:
    """Whether the command never is an event: those that are made all the time."""
    return isinstance(command, SetCursor | DropCursor | DropMovedCursors | DropTombstone | HoldReplicas)


def _touched(state: Metadata, command: Command) -> list[str]:
    """The names of the streams that the command may change."""
    match command:
        case CreateStream() | EditStream() | PauseStream() | PurgeStream() | SealStream() | DeleteStream():
            return [command.name]
        case MoveReplicas() | ResizeReplicas():
            return [command.name]
        case DisableReplicas(stream_ids=ids) | LeaveReplicas(stream_ids=ids):
            return _named(state, set(ids))
        case ChangeIsrs(changes=changes):
            return _named(state, {one.stream_id for one in changes})
        case AppointLeaders(appointments=appointments):
            return _named(state, {one.stream_id for one in appointments})
        case FinishMoves(moves=moves):
            return _named(state, {stream_id for stream_id, _ in moves})
        case RegisterBroker():
            return list(state.streams)
        case _:
            return []


def _named(state: Metadata, ids: set[Any]) -> list[str]:
    return [name for name, record in state.streams.items() if record.id in ids]


def _origin(proposal: Proposal) -> dict[str, Any]:
    """Who requested it, and from where. A client without an identity is named by its address."""
    if not proposal.address:
        return {}
    identity = {"identity": proposal.client} if proposal.client not in ("", proposal.address) else {}
    return identity | {"address": proposal.address, "request": proposal.id}


def _changed(event: Kind, before: dict[str, Any], after: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {"event": event, "before": before, "after": after, **about}


# ---- streams ----


def _of_stream(before: StreamRecord | None, after: StreamRecord | None, command: Command) -> Iterator[dict[str, Any]]:
    known = after or before
    if known is None or before is after:
        return
    about: dict[str, Any] = {"stream": known.name, "stream_id": known.id}
    if before is None or after is None:
        event: Kind = "activity.stream.created" if before is None else "activity.stream.deleted"
        shown = {"after" if before is None else "before": _shown(known)}
        yield {"event": event, **shown, **about}
        return
    if isinstance(command, EditStream) and before.settings != after.settings:
        yield _changed(
            "activity.stream.edited", *_differing(before.settings.to_json(), after.settings.to_json()), **about
        )
    if before.paused != after.paused:
        yield {"event": "activity.stream.paused" if after.paused else "activity.stream.resumed", **about}
    if before.sealed != after.sealed:
        yield {"event": "activity.stream.sealed", **about}
    parts: dict[Kind, tuple[str, ...]] = {
        "activity.stream.purged": ("purged_below",),
        "activity.stream.leader": ("leader", "leader_epoch"),
        "activity.stream.isr": ("isr",),
        "activity.stream.replicas": ("replicas", "target"),
    }
    for event, fields in parts.items():
        if event == "activity.stream.purged" and is_internal(known.name):
            continue  # natslog itself has replaced what it wrote
        was, now = ({field: getattr(record, field) for field in fields} for record in (before, after))
        if was != now:
            yield _changed(event, was, now, **about)


def _shown(record: StreamRecord) -> dict[str, Any]:
    return {"settings": record.settings.to_json(), "replicas": record.replicas}


def _differing(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [name for name in after if before.get(name) != after[name]]
    return {name: before.get(name) for name in names}, {name: after[name] for name in names}


# ---- brokers, security ----


def _of_broker(broker: BrokerId, before: BrokerRecord | None, after: BrokerRecord | None) -> Iterator[dict[str, Any]]:
    if before is after:
        return
    if after is None:
        yield {"event": "activity.broker.left", "broker": broker}
        return
    if before is None:
        yield {"event": "activity.broker.joined", "broker": broker, "after": {"url": after.url, "rack": after.rack}}
    if before is None or before.incarnation != after.incarnation:
        started = {"url": after.url, "rack": after.rack, "incarnation": after.incarnation}
        yield {"event": "activity.broker.started", "broker": broker, "after": started}
    if (before is not None and before.is_draining) != after.is_draining:
        draining = {"draining": after.is_draining}
        yield {"event": "activity.broker.draining", "broker": broker, "after": draining}


def _security_facts(command: SecurityCommand) -> dict[str, Any]:
    """What was changed, without what proves a token."""
    facts: dict[str, Any] = msgspec.to_builtins(command)
    if isinstance(facts.get("token"), dict):
        del facts["token"]["digest"]
    facts["change"] = facts.pop("type")
    return facts
