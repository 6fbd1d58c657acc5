"""The metadata state machine: brokers, streams, tombstones. `apply(command)` is all that ever changes it.

Deterministic: the same commands in the same order give the same state everywhere; ids, times and placements are decided
by the proposer and ride in the command. A refused command raises and changes nothing. One broker applies its own
commands; in a cluster they come out of the Raft log.

Invariants. A stream's id is never used twice. Files belong to a stream or to a tombstone; what has neither is left
alone.
"""

from __future__ import annotations

from typing import Any, TypeAlias, assert_never

import msgspec

from natslog.errors import InvalidRequest, StreamConflict, StreamNotFound
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings

FIRST_EPOCH = Epoch(1)
_FIXED = ("group", "replicas", "min_isr")
"""Settings that cannot be edited: a group decided who got which message; replicas are moved, not declared."""


class BrokerRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: BrokerId
    url: str
    rack: str = ""


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """A deleted stream whose files are still there."""

    id: StreamId
    name: str
    deleted_us: int


class RegisterBroker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    broker: BrokerRecord


class CreateStream(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`placement` names the brokers to hold it; the first leads."""

    name: str
    id: StreamId
    settings: StreamSettings
    created_us: int
    placement: tuple[BrokerId, ...]


class EditStream(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    name: str
    settings: StreamSettings


class PauseStream(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    name: str
    paused: bool


class DeleteStream(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    name: str
    deleted_us: int


class BuryStream(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The files of a deleted stream are gone: its tombstone may go too."""

    id: StreamId


Command: TypeAlias = RegisterBroker | CreateStream | EditStream | PauseStream | DeleteStream | BuryStream


class Metadata(msgspec.Struct, kw_only=True):
    """The state. `version` counts applied commands."""

    cluster_id: str
    version: int = 0
    brokers: dict[BrokerId, BrokerRecord] = {}
    streams: dict[str, StreamRecord] = {}
    tombstones: dict[StreamId, Tombstone] = {}

    def stream(self, name: str) -> StreamRecord:
        """Raises StreamNotFound."""
        if name not in self.streams:
            raise StreamNotFound(f"there is no stream {name!r}", stream=name)
        return self.streams[name]

    def apply(self, command: Command) -> bool:
        """Changes the state as the command says.

        Returns:
            Whether anything changed (a command applied before changes nothing).

        Raises:
            StreamNotFound, StreamConflict, InvalidRequest: the command is refused; nothing changed.
        """
        changed = self._apply(command)
        self.version += changed
        return changed

    def _apply(self, command: Command) -> bool:
        match command:
            case RegisterBroker(broker=broker):
                changed = self.brokers.get(broker.id) != broker
                self.brokers[broker.id] = broker
                return changed
            case CreateStream():
                return self._create(command)
            case EditStream(name=name, settings=settings):
                return self._replace(_edited(self.stream(name), settings))
            case PauseStream(name=name, paused=paused):
                return self._replace(msgspec.structs.replace(self.stream(name), paused=paused))
            case DeleteStream(name=name, deleted_us=deleted_us):
                record = self.stream(name)
                self.tombstones[record.id] = Tombstone(id=record.id, name=name, deleted_us=deleted_us)
                del self.streams[name]
                return True
            case BuryStream(id=stream_id):
                return self.tombstones.pop(stream_id, None) is not None
            case _:
                assert_never(command)

    def _create(self, command: CreateStream) -> bool:
        existing = self.streams.get(command.name)
        if existing is not None:
            differing = differences(existing.settings, command.settings)
            if differing:
                raise StreamConflict(
                    f"stream {command.name!r} exists with other settings: "
                    + ", ".join(f"{name} is {was!r}, not {asked!r}" for name, (was, asked) in differing.items()),
                    stream=command.name,
                    settings=sorted(differing),
                )
            return False
        used = {record.id for record in self.streams.values()} | set(self.tombstones)
        if command.id in used:
            raise InvalidRequest(f"the id {command.id} was used before")
        self.streams[command.name] = StreamRecord(
            name=command.name,
            id=command.id,
            settings=command.settings,
            created_us=command.created_us,
            leader=command.placement[0],
            leader_epoch=FIRST_EPOCH,
            replicas=command.placement,
            isr=command.placement,
        )
        return True

    def _replace(self, record: StreamRecord) -> bool:
        changed = self.streams[record.name] != record
        self.streams[record.name] = record
        return changed


def _edited(record: StreamRecord, settings: StreamSettings) -> StreamRecord:
    for name in _FIXED:
        if getattr(settings, name) != getattr(record.settings, name):
            raise InvalidRequest(f"the {name} of a stream cannot be edited: create another stream", setting=name)
    return msgspec.structs.replace(record, settings=settings)


def differences(existing: StreamSettings, asked: StreamSettings) -> dict[str, tuple[Any, Any]]:
    """Setting → (as it is, as asked), of those that differ."""
    was, wanted = existing.to_json(), asked.to_json()
    return {name: (was[name], wanted[name]) for name in was if was[name] != wanted[name]}
