"""The metadata state machine: brokers, streams, tombstones. `apply(command)` is all that ever changes it.

Deterministic: the same commands in the same order give the same state everywhere; ids, times and placements are decided
by the proposer and are part of the command. A refused command raises and changes nothing. The commands come out of the
Raft log; `decide` applies a proposal once, however often it was sent.

Invariants. A stream's id is never used twice. Files belong to a replica or to a tombstone; what has neither is left
alone. A leader is in the ISR, the ISR within the replicas; a new leader has a higher epoch. Whoever holds all that is
committed is in `isr` or `eligible`: a change of the ISR that leaves fewer than `min_isr` makes those who go eligible.
A broker that has announced its stop is appointed to no stream until its next life is registered.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import assert_never

import msgspec
from msgspec import UNSET

from natslog.cluster.commands import (
    AppointLeaders,
    Appointment,
    BeginImport,
    BrokerRecord,
    ChangeIsrs,
    Command,
    CreateCompanion,
    CreateStream,
    DeleteStream,
    DisableReplicas,
    DrainBroker,
    DropCursor,
    DropMovedCursors,
    DropTombstone,
    EditStream,
    FinalizeUpgrade,
    FinishImport,
    FinishMoves,
    ForgetBroker,
    HoldCompanions,
    HoldReplicas,
    IsrChange,
    LeaveReplicas,
    MoveReplicas,
    Outcome,
    PauseStream,
    Proposal,
    PurgeStream,
    RegisterBroker,
    ResizeReplicas,
    SealStream,
    SetCursor,
    StopBroker,
    Tombstone,
    tombstone_key,
)
from natslog.cluster.features import FIRST_LEVEL
from natslog.cluster.incarnations import check_follows
from natslog.cluster.outcomes import RecentOutcomes
from natslog.cluster.security_changes import changed_security
from natslog.cluster.security_commands import SecurityCommand
from natslog.cluster.storage_quotas import require_stream
from natslog.cluster.stream_changes import (
    check_target,
    created_by_import,
    differences,
    edited,
    finished,
    imported,
    importing_again,
    moving,
    next_version,
    no_longer_held,
    paused,
    purged,
    require_own_subjects,
    require_removable,
    require_version,
    resizing,
    wanted_replicas,
    with_isr,
    with_operators_settings,
    with_settings_version,
    without,
)
from natslog.cluster.stream_index import StreamIndex
from natslog.errors import InvalidRequest, NatslogError, NotReady, Overloaded, StreamConflict, StreamNotFound
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from natslog.security.records import Quota, Security, quota_of

FIRST_EPOCH = Epoch(1)


class Metadata(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, dict=True):
    """The state. `version` counts commands that changed something.

    Attributes:
        feature_level: what may be written, see `features`.
        answered: outcomes by age, so that a repeated request is applied once; None before the first one.
        security: None: it is not enabled, and every request is permitted.
        cursors_moved: always: cursors are in the stream `__cursors`.

    The level and `cursors_moved` are always written (a value with a factory never counts as the default): for natslog
    0.2.0 the absence of one means level 1.
    """

    cluster_id: str
    version: int = 0
    brokers: dict[BrokerId, BrokerRecord] = {}
    streams: dict[str, StreamRecord] = {}
    tombstones: dict[str, Tombstone] = {}
    feature_level: int = msgspec.field(default_factory=lambda: FIRST_LEVEL)
    answered: RecentOutcomes | None = None
    security: Security | None = None
    cursors_moved: bool = msgspec.field(default_factory=lambda: True)

    def stream(self, name: str) -> StreamRecord:
        """Raises StreamNotFound."""
        if name not in self.streams:
            raise StreamNotFound(f"there is no stream {name!r}", stream=name)
        return self.streams[name]

    @cached_property
    def index(self) -> StreamIndex:
        """Of `streams`; not part of the state."""
        return StreamIndex(self.streams.values())

    def _records(self, stream_ids: Iterable[StreamId]) -> dict[StreamId, StreamRecord]:
        """As they are before the command that names them changes one."""
        return {each: record for each in stream_ids if (record := self.index.by_id.get(each)) is not None}

    def _recording(self, settings: StreamSettings) -> list[StreamRecord]:
        """The streams whose subjects overlap those of the settings."""
        names = self.index.recording(settings.subjects)
        return [record for record in self.streams.values() if record.name in names] if names else []

    def outcome_of(self, proposal_id: str) -> Outcome | None:
        """The outcome of a proposal that was applied recently."""
        return None if self.answered is None else self.answered.find(proposal_id)

    def decide(self, proposal: Proposal) -> Outcome:
        """Applies it, unless it was applied before: a retry gets the outcome of the first time."""
        if self.answered is None:
            self.answered = RecentOutcomes()
        answered = self.answered
        answered.advance(proposal.elapsed_ms)
        if not proposal.id:
            return self._outcome(proposal.command)
        known = answered.find(proposal.id)
        if known is not None:
            return known
        try:
            is_reserved = isinstance(proposal.command, SecurityCommand)
            answered.window_of(proposal).require_room(proposal.client, is_reserved=is_reserved)
        except Overloaded as error:
            return Outcome(changed=False, error=error.to_json())
        outcome = self._outcome(proposal.command)
        answered.keep(proposal, outcome)
        return outcome

    def _outcome(self, command: Command) -> Outcome:
        try:
            return Outcome(changed=self.apply(command))
        except NatslogError as error:
            return Outcome(changed=False, error=error.to_json())

    def apply(self, command: Command) -> bool:
        """Changes the state as the command says.

        Returns:
            Whether anything changed (a command applied before changes nothing).

        Raises:
            StreamNotFound, StreamConflict, StreamRecreated, InvalidRequest, OutdatedFolder: the command is refused;
                nothing changed.
        """
        changed = self._apply(command)
        self.version += changed
        return changed

    def _apply(self, command: Command) -> bool:
        if isinstance(command, SecurityCommand):
            before = self.security
            self.security = changed_security(before, command)
            return self.security is not before
        match command:
            case RegisterBroker() | DrainBroker() | ForgetBroker() | StopBroker():
                return self._apply_to_broker(command)
            case CreateStream():
                return self._create(command)
            case EditStream() | PauseStream() | PurgeStream() | SealStream() | BeginImport() | FinishImport():
                return self._replace(self._changed_by(command))
            case DeleteStream(name=name, deleted_us=deleted_us):
                record = self.stream(name)
                _require_unchanged(record, command)
                require_removable(record)
                self._delete(record, deleted_us)
                return True
            case DropTombstone(id=stream_id, broker=broker):
                return self.tombstones.pop(tombstone_key(stream_id, broker), None) is not None
            case DisableReplicas() | HoldReplicas() | HoldCompanions() | LeaveReplicas():
                return self._apply_of_broker(command)
            case CreateCompanion():
                return self._create_companion(self.index.by_id.get(command.stream_id), command)
            case ChangeIsrs() | AppointLeaders() | MoveReplicas() | ResizeReplicas() | FinishMoves():
                return self._apply_to_replicas(command)
            case FinalizeUpgrade(level=level):
                is_raised = level > self.feature_level
                self.feature_level = max(level, self.feature_level)
                return is_raised
            case SetCursor() | DropCursor():  # natslog 0.2.0 may have proposed it while the upgrade was finalized
                raise NotReady("the cursors were moved to the stream __cursors meanwhile: repeat the request")
            case DropMovedCursors():
                return False
            case _:
                assert_never(command)

    # ---- brokers ----

    def _apply_to_broker(self, command: RegisterBroker | DrainBroker | ForgetBroker | StopBroker) -> bool:
        match command:
            case RegisterBroker(broker=broker, after=after, lives=lives):
                return self._register(broker, after, lives)
            case DrainBroker(broker=number, is_draining=is_draining):
                if number not in self.brokers:
                    raise InvalidRequest(f"there is no broker {number}", broker=number)
                known = self.brokers[number]
                self.brokers[number] = msgspec.structs.replace(known, is_draining=is_draining)
                return known.is_draining != is_draining
            case StopBroker(broker=number, incarnation=incarnation):
                if not self._is_registered(number, incarnation) or self.brokers[number].is_stopping:
                    return False
                self.brokers[number] = msgspec.structs.replace(self.brokers[number], is_stopping=True)
                return True
            case ForgetBroker(broker=number):
                keeping = sorted(name for name, record in self.streams.items() if number in record.replicas)
                if keeping:
                    raise InvalidRequest(
                        f"broker {number} holds replicas of {len(keeping)} streams ({', '.join(keeping[:3])} …): "
                        "drain it first",
                        broker=number,
                    )
                gone = [key for key, tombstone in self.tombstones.items() if tombstone.broker == number]
                for key in gone:
                    del self.tombstones[key]
                return self.brokers.pop(number, None) is not None

    def _register(self, broker: BrokerRecord, after: str, lives: tuple[str, ...]) -> bool:
        """Its former life leads nothing any more; unless that life ended gracefully, its logs must be validated first.
        (A life that is not known here may lie between the registered one and one that ended in order.)
        """
        known = self.brokers.get(broker.id)
        check_follows(known, broker, lives)
        if known is None:
            self.brokers[broker.id] = broker
            return True
        is_over = broker.directory == known.directory and broker.life < known.life
        if is_over or broker.directory in known.former_directories:
            return False  # late, from a life or a folder that is gone
        has_other_folder = known.directory not in ("", broker.directory)
        former = (*known.former_directories, known.directory) if has_other_folder else known.former_directories
        draining = known.is_draining and not has_other_folder
        stopping = known.is_stopping and broker.incarnation == known.incarnation
        broker = msgspec.structs.replace(broker, is_draining=draining, former_directories=former, is_stopping=stopping)
        if broker == known:
            return False
        self.brokers[broker.id] = broker
        if has_other_folder:
            self._forget_copies(broker.id)
        if broker.incarnation != known.incarnation:
            self._begin_life(broker.id, is_clean=known.incarnation == after)
        return True

    def _begin_life(self, broker: BrokerId, *, is_clean: bool) -> None:
        for record in list(self.streams.values()):
            leader = None if record.leader == broker else record.leader
            is_unproven = not is_clean and broker in record.candidates
            unproven = tuple(sorted({*record.unproven, broker})) if is_unproven else record.unproven
            if (
                is_unproven or leader != record.leader
            ):  # also if repeated: statements of its former life about its log are void
                self._replace(next_version(record, leader=leader, unproven=unproven))

    def _forget_copies(self, broker: BrokerId) -> None:
        """It returned with another data folder: all its replicas are lost. A stream with no other replica has no
        possible leader.
        """
        for record in list(self.streams.values()):
            if broker in record.candidates:
                record = without(record, broker)
            self._replace(no_longer_held(record, [broker]))

    # ---- streams ----

    def _create(self, command: CreateStream) -> bool:
        existing = self.streams.get(command.name)
        if existing is not None and command.is_import:
            raise StreamConflict(
                f"stream {command.name!r} was created meanwhile: repeat the import", stream=command.name
            )
        if existing is not None:
            differing = differences(existing.settings, with_operators_settings(command.settings, existing.settings))
            if differing:
                raise StreamConflict(
                    f"stream {command.name!r} exists with other settings: "
                    + ", ".join(f"{name} is {was!r}, not {asked!r}" for name, (was, asked) in differing.items()),
                    stream=command.name,
                    settings=sorted(differing),
                )
            return False
        require_own_subjects(command.name, command.settings, self._recording(command.settings))
        require_stream(self._quota_of(command.owner), command.owner, command.settings, self.streams.values())
        if command.id in self.index.by_id or any(one.id == command.id for one in self.tombstones.values()):
            raise InvalidRequest(f"the id {command.id} was used before")
        record = StreamRecord(
            name=command.name,
            id=command.id,
            settings=command.settings,
            created_us=command.created_us,
            leader=command.placement[0],
            leader_epoch=FIRST_EPOCH,
            replicas=command.placement,
            isr=command.placement,
            owner=command.owner,
            first_offset=command.first_offset,
        )
        if command.is_import:
            record = created_by_import(record, command)
        self.index.add(record)
        self.streams[command.name] = record
        return True

    def _quota_of(self, owner: str) -> Quota:
        return Quota() if self.security is None or not owner else quota_of(self.security, owner)

    def _changed_by(
        self, command: EditStream | PauseStream | PurgeStream | SealStream | BeginImport | FinishImport
    ) -> StreamRecord:
        record = self.stream(command.name)
        if isinstance(command, EditStream | PauseStream):
            _require_unchanged(record, command)
        match command:
            case EditStream(settings=settings, changed=changed):
                after = edited(record, settings, changed)
                if set(after.settings.subjects) - set(record.settings.subjects):
                    require_own_subjects(record.name, after.settings, self._recording(after.settings))
                if after.settings.max_bytes != record.settings.max_bytes:
                    others = [one for one in self.streams.values() if one.name != record.name]
                    quota, wanted = self._quota_of(record.owner), wanted_replicas(record)
                    asked = msgspec.structs.replace(after.settings, replicas=wanted)
                    require_stream(quota, record.owner, asked, others, is_new=False)
                return after
            case PauseStream(paused=is_paused):
                return paused(record, is_paused)
            case BeginImport():
                return importing_again(record, command)
            case FinishImport():
                return imported(record, command)
            case PurgeStream(id=stream_id, below=below):
                return purged(record, stream_id, below)
            case SealStream():
                return msgspec.structs.replace(record, sealed=True)

    def _delete(self, record: StreamRecord, deleted_us: int) -> None:
        self._entomb(record, record.replicas, deleted_us)
        self.index.remove(self.streams.pop(record.name))

    def _replace(self, record: StreamRecord) -> bool:
        before = self.streams[record.name]
        record = with_settings_version(before, record)
        self.index.replace(before, record)
        self.streams[record.name] = record
        return before != record

    def _entomb(self, record: StreamRecord, brokers: Iterable[BrokerId], deleted_us: int) -> None:
        for broker in brokers:
            tombstone = Tombstone(id=record.id, name=record.name, deleted_us=deleted_us, broker=broker)
            self.tombstones[tombstone.key] = tombstone

    # ---- replicas ----

    def _apply_of_broker(self, command: DisableReplicas | HoldReplicas | HoldCompanions | LeaveReplicas) -> bool:
        """A broker's statements about its own replicas: valid for the incarnation that is registered."""
        if not self._is_registered(command.broker, command.incarnation):
            return False
        records, changed = self._records(command.stream_ids), False
        for stream_id in command.stream_ids:
            record = records.get(stream_id)
            if record is None:
                continue
            match command:
                case DisableReplicas():
                    changed |= self._disable(record, command.broker)
                case HoldReplicas():
                    changed |= self._hold(record, command.broker)
                case HoldCompanions():
                    changed |= self._hold_companion(record, command.broker)
                case LeaveReplicas():
                    changed |= self._leave(record, command.broker)
        return changed

    def _apply_to_replicas(
        self, command: ChangeIsrs | AppointLeaders | MoveReplicas | ResizeReplicas | FinishMoves
    ) -> bool:
        if isinstance(command, MoveReplicas):
            return self._move(self.stream(command.name), command.target)
        if isinstance(command, ResizeReplicas):
            _require_unchanged(self.stream(command.name), command)
            return self._resize(self.stream(command.name), command.target, command.min_isr)
        changed = False
        match command:
            case ChangeIsrs(broker=broker, changes=changes):
                records = self._records(change.stream_id for change in changes)
                for change in changes:
                    changed |= self._change_isr(records.get(change.stream_id), broker, change)
            case AppointLeaders(appointments=appointments):
                records = self._records(appointment.stream_id for appointment in appointments)
                for appointment in appointments:
                    changed |= self._appoint(records.get(appointment.stream_id), appointment)
            case FinishMoves(moves=moves, moved_us=moved_us):
                records = self._records(stream_id for stream_id, _ in moves)
                for stream_id, version in moves:
                    changed |= self._finish_move(records.get(stream_id), version, moved_us)
        return changed

    def _change_isr(self, record: StreamRecord | None, broker: BrokerId, change: IsrChange) -> bool:
        if record is None or not self._is_current(record, broker, change):
            return False
        unproven = set(record.unproven) - set(change.proven) - {broker}
        return self._replace(with_isr(record, change.isr, unproven=unproven))

    def _is_current(self, record: StreamRecord, broker: BrokerId, change: IsrChange) -> bool:
        if (record.leader, record.leader_epoch, record.version) != (broker, change.epoch, change.version):
            return False
        if broker not in change.isr or not set(change.isr) <= set(record.replicas):
            return False
        lives = zip(change.isr, change.incarnations, strict=True)
        return all(not life or self._is_registered(member, life) for member, life in lives)

    def _is_registered(self, broker: BrokerId, incarnation: str) -> bool:
        return broker in self.brokers and self.brokers[broker].incarnation == incarnation

    def _appoint(self, record: StreamRecord | None, appointment: Appointment) -> bool:
        if record is None or record.version != appointment.version:
            return False
        if appointment.leader not in appointment.isr or not set(appointment.isr) <= set(record.candidates):
            return False  # only who holds everything is in sync, and a leader is
        if appointment.leader in self.brokers and self.brokers[appointment.leader].is_stopping:
            return False
        appointed = msgspec.structs.replace(
            record, leader=appointment.leader, leader_epoch=Epoch(record.leader_epoch + 1)
        )
        unproven = set(record.unproven) - {appointment.leader}
        return self._replace(with_isr(appointed, appointment.isr, unproven=unproven))

    def _hold(self, record: StreamRecord, broker: BrokerId) -> bool:
        if broker not in record.replicas or broker in record.holders:
            return False
        return self._replace(next_version(record, holders=tuple(sorted((*record.holders, broker)))))

    def _create_companion(self, record: StreamRecord | None, command: CreateCompanion) -> bool:
        """With another version: a change of the ISR that was decided without the companion log is void."""
        if record is None or record.has_companion:
            return False
        if (record.leader, record.leader_epoch) != (command.broker, command.epoch):
            return False
        return self._replace(next_version(record, has_companion=True))

    def _hold_companion(self, record: StreamRecord, broker: BrokerId) -> bool:
        if not record.has_companion or broker not in record.replicas or broker in record.companion_holders:
            return False
        return self._replace(next_version(record, companion_holders=tuple(sorted((*record.companion_holders, broker)))))

    def _leave(self, record: StreamRecord, broker: BrokerId) -> bool:
        """Never below `min_isr`, and not as the leader: the remaining replicas then have to handle the rest."""
        if broker not in record.isr or broker == record.leader or len(record.isr) <= record.settings.min_isr:
            return False
        left = [member for member in record.isr if member != broker]
        return self._replace(with_isr(record, left, unproven=record.unproven))

    def _disable(self, record: StreamRecord, broker: BrokerId) -> bool:
        """The last one that holds everything stays: no other replica could ever lead."""
        if broker not in record.candidates or set(record.candidates) == {broker}:
            return False
        return self._replace(without(record, broker))

    def _move(self, record: StreamRecord, target: tuple[BrokerId, ...]) -> bool:
        check_target(record, target, wanted_replicas(record), self.brokers)
        if target == (record.target or record.replicas):
            return False
        return self._replace(self._expected_on(target, moving(record, target)))

    def _resize(self, record: StreamRecord, target: tuple[BrokerId, ...], min_isr: int) -> bool:
        check_target(record, target, len(target), self.brokers)
        if len(target) > wanted_replicas(record):
            others = [one for one in self.streams.values() if one.name != record.name]
            wider = msgspec.structs.replace(record.settings, replicas=len(target))
            require_stream(self._quota_of(record.owner), record.owner, wider, others, is_new=False)
        return self._replace(self._expected_on(target, resizing(record, target, min_isr)))

    def _expected_on(self, target: tuple[BrokerId, ...], record: StreamRecord) -> StreamRecord:
        """What these brokers still have of an earlier replica of the stream is not deleted any more."""
        for broker in target:
            self.tombstones.pop(tombstone_key(record.id, broker), None)
        return record

    def _finish_move(self, record: StreamRecord | None, version: int, moved_us: int) -> bool:
        if record is None or record.version != version or not record.target:
            return False
        if not set(record.target) <= set(record.isr) or record.leader not in record.target:
            return False
        self._entomb(record, [broker for broker in record.replicas if broker not in record.target], moved_us)
        return self._replace(finished(record))


def _require_unchanged(record: StreamRecord, command: EditStream | PauseStream | ResizeReplicas | DeleteStream) -> None:
    """Raises StreamRecreated, SettingsConflict."""
    stream_id, if_version = command.id, command.if_version
    require_version(record, None if stream_id is UNSET else stream_id, None if if_version is UNSET else if_version)
