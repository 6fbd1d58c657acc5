"""What operators change of streams: created, edited, paused, purged, sealed, deleted.

Each call names the request that it was asked for by, so that a retry is applied once. Any broker takes them: the
command is proposed to the metadata leader. They raise MetadataUnavailable where no majority of the brokers confirms it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from itertools import product
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET, UnsetType
from pyroaring import BitMap64

from natslog.cluster.commands import (
    BeginImport,
    Command,
    CreateStream,
    DeleteStream,
    EditStream,
    FinishImport,
    MoveReplicas,
    PauseStream,
    PurgeStream,
    ResizeReplicas,
    SealStream,
)
from natslog.cluster.features import STANDBY_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.cluster.placement import Loads
from natslog.cluster.stream_changes import require_deletable, require_purgeable, sealed_already, wanted_replicas
from natslog.config import BrokerConfig
from natslog.errors import InvalidRequest, NatslogError, NotReady, StreamConflict
from natslog.log_events import event
from natslog.model import BrokerId, Fork, Offset, StreamId, StreamRecord, StreamSettings, min_isr_after_resize
from natslog.node.clock import now_us, wait_for_at_most
from natslog.node.cluster_node import ClusterNode
from natslog.node.metadata.entries import Request
from natslog.node.removing import Erased, ErasureBegun, Removing, of_subject
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.jetstream import StreamChange
from natslog.node.replicas.stream import HostedStream
from natslog.node.replicas.upkeep import Upkeep
from natslog.stream_settings import parse_settings, setting_fields
from natslog.subjects import check_name, is_internal, is_wildcard, overlap

__all__ = ["StreamOperations", "require_deletable", "require_purgeable"]

logger = logging.getLogger("natslog.node")

_READY_WITHIN_S = 10.0
_LED_WITHIN_S = 2.0
_WRITTEN_WITHIN_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Origin:
    """What is imported: its first offset, the lineage that the restored stream gets (the exported stream last), and
    wildcards that cover the subjects of all its messages.
    """

    first_offset: Offset
    lineage: tuple[Fork, ...]
    subjects: tuple[str, ...]


class _Condition(TypedDict, total=False):
    """Fields of `EditStream`."""

    id: StreamId | UnsetType
    if_version: int | UnsetType


class StreamOperations:
    """See the module."""

    def __init__(
        self, config: BrokerConfig, cluster: ClusterNode, hosting: Hosting, upkeep: Upkeep, removing: Removing
    ) -> None:
        self._config, self._cluster, self._hosting, self._upkeep = config, cluster, hosting, upkeep
        self._removing = removing

    @property
    def _state(self) -> Metadata:
        return self._cluster.state

    async def _propose(self, command: Command, request: Request | None) -> bool:
        return await self._cluster.group.propose(command, request)

    def _publish(self, change: StreamChange, name: str) -> None:
        """An advisory that this was done here; for a repeated request perhaps again."""
        self._hosting.services.jetstream.advisories.changed(change, name)

    # ---- creating ----

    async def create(
        self,
        name: str,
        settings: StreamSettings,
        request: Request | None = None,
        *,
        owner: str = "",
        first_offset: Offset = Offset(0),
    ) -> bool:
        """Whether it is new (False: it was there with the same settings); by then its leader takes messages.

        Args:
            first_offset: of its first message.

        Raises:
            InvalidRequest, StreamConflict, NotEnoughBrokers, StorageQuotaExceeded.
        """
        command = self._creation(name, settings, owner)
        if first_offset:
            command = msgspec.structs.replace(command, first_offset=first_offset)
        created = await self._propose(command, request)
        await self._wait_until_ready(name, _READY_WITHIN_S if created else _LED_WITHIN_S)
        if created:
            self._publish("created", name)
        return created

    def _creation(self, name: str, settings: StreamSettings, owner: str) -> CreateStream:
        """Raises InvalidRequest, NotEnoughBrokers."""
        self._check(settings)
        check_name(name)
        if is_internal(name):
            raise InvalidRequest(f"stream name {name!r}: names that begin with '__' are reserved")
        existing = self._state.streams.get(name)
        placement = existing.replicas if existing else self._placed(settings)
        return CreateStream(
            name=name,
            id=StreamId(secrets.token_hex(16)),
            settings=settings,
            created_us=now_us(),
            placement=placement,
            owner=owner,
        )

    def _placed(self, settings: StreamSettings) -> tuple[BrokerId, ...]:
        return Loads(self._state).place(settings.replicas, self._cluster.usable(), settings.placement_tags)

    # ---- importing ----

    async def begin_import(
        self, name: str, origin: Origin, settings: StreamSettings, request: Request | None = None, *, owner: str = ""
    ) -> bool:
        """Whether the stream was created for it; otherwise the import continues, or adds what is new, where an export
        of the same stream was imported before. Its leader takes batches when this returns.

        Raises:
            InvalidRequest, NotEnoughBrokers, StorageQuotaExceeded. StreamConflict: a stream of that name exists, and is
            no import of this origin.
        """
        record, forks = self._state.streams.get(name), origin.lineage
        if record is None:
            command = msgspec.structs.replace(
                self._creation(name, settings, owner),
                is_import=True,
                first_offset=origin.first_offset,
                lineage=forks,
                former_subjects=tuple(one for one in origin.subjects if one not in settings.subjects),
            )
            created = await self._propose(command, request)
            await self._wait_until_ready(name, _READY_WITHIN_S)
            if created:
                self._publish("created", name)
            return created
        if not record.lineage or record.lineage[-1].id != forks[-1].id:
            raise StreamConflict(
                f"stream {name!r} exists, and was not imported from this export (stream {forks[-1].id}): delete it, or "
                "import the export under another name (--as)",
                stream=name,
            )
        await self._propose(BeginImport(name=name, id=record.id, subjects=origin.subjects), request)
        await self._wait_until_ready(name, _READY_WITHIN_S)
        return False

    async def finish_import(
        self, stream: HostedStream, lineage: tuple[Fork, ...], *, resumes: bool, request: Request | None = None
    ) -> None:
        """The stream, which is led here, has all of an export. Raises StreamConflict, StreamRecreated."""
        command = FinishImport(name=stream.name, id=stream.id, lineage=lineage, resumes=resumes)
        await self._propose(command, request)
        await self._wait_until_reconciled(stream.name)

    async def remove_imported(
        self, stream: HostedStream, removed: BitMap64, subjects: BitMap64, keys: BitMap64
    ) -> None:
        """Removes messages of a stream that is led here and being imported; `subjects` and `keys` of them are erased.

        Raises:
            As `Companion.append`.
        """
        await self._removing.remove_imported(stream, removed, subjects, keys, self._cluster.clock.latest_us())
        self._upkeep.begin_round()

    async def record_gaps(self, stream: HostedStream) -> None:
        """Offsets without a message of a stream that was imported are recorded as removed, on all replicas: so they
        are counted, and told from lost ones.

        Raises:
            CorruptLog; as `Companion.append`.
        """
        await self._removing.record_gaps(stream)

    def _check(self, settings: StreamSettings) -> None:
        """Raises InvalidRequest: what depends on this broker's settings, and on those of the cluster."""
        level = self._state.feature_level
        if settings.standby and level < STANDBY_LEVEL:
            raise InvalidRequest(
                f"standby requires feature level {STANDBY_LEVEL}, and the cluster is at level {level}: upgrade all "
                "brokers, then run natslog cluster finalize-upgrade",
                setting="standby",
            )
        plain = [subject for subject in settings.subjects if not is_wildcard(subject.split(".")[0])]
        for subject, prefix in product(plain, self._config.ack_reply_prefixes):
            if overlap(subject, f"{prefix}>"):
                raise InvalidRequest(
                    f"acks are sent to subjects that begin with {prefix!r} (ack_reply_prefixes), so a stream cannot "
                    f"record {subject!r}: choose another subject",
                    setting="subject",
                )

    async def _wait_until_ready(self, name: str, within_s: float) -> None:
        """Best effort: where its leader fails at once, another one comes."""
        record = self._state.streams.get(name)
        try:
            if record is None or record.leader is None:
                return
            if record.leader == self._cluster.me:
                async with asyncio.timeout(within_s):
                    await self.answer_ready(name)
            elif (link := self._cluster.link_to(record.leader)) is not None:
                await link.ask("ready", within_s, name=name)
        except (TimeoutError, NatslogError) as error:
            logger.warning(
                "stream %s was created but has no leader yet: %s",
                name,
                error,
                extra=event("stream.no_leader_yet", stream=name),
            )

    async def answer_ready(self, name: str) -> None:
        """Returns when the stream takes messages here."""
        give_up_at = time.monotonic() + _READY_WITHIN_S
        while (stream := self._hosting.streams.get(name)) is None or not stream.is_ready:
            if time.monotonic() > give_up_at:
                raise NotReady(
                    f"this broker is not yet the leader of stream {name!r}: repeat the request in a moment", stream=name
                )
            coming = self._cluster.group.changed() if stream is None else stream.reconciled.wait()
            await wait_for_at_most(_POLL_S, coming)

    # ---- changing ----

    async def edit(
        self,
        record: StreamRecord,
        body: dict[str, Any],
        request: Request | None = None,
        *,
        if_version: int | None = None,
    ) -> None:
        """Changes the settings that `body` names, as in the HTTP API. Another number of replicas is reached when they
        have been copied; until then the stream is as it was.

        Args:
            if_version: of the settings; nothing is changed if they are of another version by then.

        Raises:
            StreamNotFound, InvalidRequest, StreamSealed, NotEnoughBrokers, StreamRecreated, SettingsConflict.
        """
        require_not_internal(record.name)
        condition = self._condition(record, if_version)
        count = body.get("replicas", wanted_replicas(record))
        is_resized = count != wanted_replicas(record) or (record.target_min_isr > 0 and "min_isr" in body)
        if is_resized and body.get("min_isr") is None:
            valid = isinstance(count, int) and count > 0
            body = body | {"min_isr": min_isr_after_resize(record.settings, count) if valid else None}
        if is_resized:
            body = body | {"replicas": count}
        settings = parse_settings(body, record.settings)
        fields = set(setting_fields(body)) - {"replicas"}
        self._check(settings)
        if is_resized and fields - {"min_isr"} and if_version is not None:
            raise InvalidRequest(
                "with if_version, the number of replicas is changed by an edit of its own: only one change can be "
                "compared with the version",
                setting="replicas",
            )
        await self._change(record, settings, fields, is_resized=is_resized, request=request, condition=condition)

    async def replace_settings(self, record: StreamRecord, settings: StreamSettings) -> None:
        """All settings, of this version of the record; `min_isr` of `settings` is that of its number of replicas.

        Raises:
            As `edit`.
        """
        require_not_internal(record.name)
        self._check(settings)
        is_resized = settings.replicas != wanted_replicas(record)
        names = ("subject" if name == "more_subjects" else name for name in StreamSettings.__struct_fields__)
        was, fields = record.settings, set(names) - {"replicas"}
        fields = {name for name in fields if getattr(was, name) != getattr(settings, name) or name == "subject"}
        if was.subjects == settings.subjects:
            fields -= {"subject"}
        await self._change(record, settings, fields, is_resized=is_resized, condition={"id": record.id})

    async def _change(
        self,
        record: StreamRecord,
        settings: StreamSettings,
        fields: set[str],
        *,
        is_resized: bool,
        condition: _Condition,
        request: Request | None = None,
    ) -> None:
        """These fields, and the number of replicas. Replicas leave brokers without the tags of the stream."""
        target: tuple[BrokerId, ...] = ()
        if is_resized or "placement_tags" in fields:
            target = Loads(self._state).resize(
                record, settings.replicas, self._cluster.usable(), settings.placement_tags
            )
        if is_resized:
            command = ResizeReplicas(name=record.name, target=target, min_isr=settings.min_isr, **condition)
            await self._propose(command, request if not fields - {"min_isr"} else None)
            fields -= {"min_isr"}
        if fields:
            changed = tuple(sorted(fields))
            edit = EditStream(name=record.name, settings=settings, changed=changed, **condition)
            await self._propose(edit, request)
        if target and not is_resized and set(target) != set(record.target or record.replicas):
            await self._propose(MoveReplicas(name=record.name, target=target), None)
        await self._wait_until_reconciled(record.name)
        self._publish("updated", record.name)

    async def pause(
        self, record: StreamRecord, paused: bool, request: Request | None = None, *, if_version: int | None = None
    ) -> None:
        """Raises StreamNotFound, StreamRecreated, SettingsConflict, InvalidRequest."""
        require_not_internal(record.name)
        condition = self._condition(record, if_version)
        await self._propose(PauseStream(name=record.name, paused=paused, **condition), request)
        await self._wait_until_reconciled(record.name)

    def _condition(self, record: StreamRecord, if_version: int | None) -> _Condition:
        """What a command compares with the stream when it is applied."""
        return {"id": record.id, "if_version": UNSET if if_version is None else if_version}

    async def purge(self, stream: HostedStream, below: Offset, request: Request | None = None) -> None:
        """Messages of a stream that is led here are no longer served below an offset, and their files removed soon.

        Args:
            below: at most the high watermark.

        Raises:
            StreamNotFound, StreamRecreated, StreamSealed, RemovalDenied, InvalidRequest.
        """
        require_not_internal(stream.name)
        require_purgeable(stream.record)
        await self._propose(PurgeStream(name=stream.name, id=stream.id, below=below), request)
        await self._wait_until_reconciled(stream.name)
        self._upkeep.begin_round()

    async def purge_subject(self, stream: HostedStream, subject: str, below: int, keep: int) -> int:
        """Removes the messages of a stream that is led here whose subject `subject` covers, below an offset, but for
        the newest `keep` of them. Returns how many.

        Raises:
            StreamSealed, InvalidRequest, CorruptLog; as `Companion.append`.
        """
        self._require_removable(stream)
        require_purgeable(stream.record)
        return await self._removing.remove_where(stream, of_subject(subject), below, keep=keep)

    async def delete_message(self, stream: HostedStream, offset: int, *, erase: bool = False) -> None:
        """Removes one message of a stream that is led here; with `erase` its bytes are removed from all replicas soon.

        Raises:
            MessageNotFound, StreamSealed, InvalidRequest; as `Companion.append`.
        """
        self._require_removable(stream)
        require_deletable(stream.record)
        if not erase:
            await self._removing.delete(stream, offset)
            return
        await self._removing.delete(stream, offset, erased_us=self._cluster.clock.latest_us())
        self._upkeep.begin_round()

    async def erase(self, stream: HostedStream, what: Erased) -> ErasureBegun | None:
        """Hides messages of a stream that is led here, and begins to remove their bytes from all replicas. None: the
        stream has nothing of them.

        Raises:
            StreamSealed, RemovalDenied, InvalidRequest, CorruptLog; as `Companion.append`.
        """
        self._require_removable(stream)
        require_purgeable(stream.record)
        require_deletable(stream.record)
        begun = await self._removing.erase(stream, what, self._cluster.clock.latest_us())
        self._upkeep.begin_round()
        return begun

    def _require_removable(self, stream: HostedStream) -> None:
        """Raises StreamSealed, InvalidRequest."""
        require_not_internal(stream.name)
        if stream.record.sealed:
            raise sealed_already(stream.record)

    async def seal(
        self, stream: HostedStream, request: Request | None = None, *, is_part_of_update: bool = False
    ) -> None:
        """Seals a stream that is led here. When this returns, nothing is appended to it any more.

        Args:
            is_part_of_update: an advisory was published for it already.

        Raises:
            StreamNotFound, InvalidRequest.
        """
        require_not_internal(stream.name)
        await self._propose(SealStream(name=stream.name), request)
        await self._wait_until_reconciled(stream.name)
        if not is_part_of_update:
            self._publish("updated", stream.name)
        try:
            async with asyncio.timeout(_WRITTEN_WITHIN_S):
                await stream.written()
        except TimeoutError:  # replicas are missing: what was received before is committed when they are back
            logger.warning(
                "stream %s is sealed, and its last messages are not committed yet",
                stream.name,
                extra=event("stream.sealed_not_committed", stream=stream.name),
            )
        self._upkeep.begin_round()

    async def delete(
        self,
        name: str,
        request: Request | None = None,
        *,
        stream_id: StreamId | None = None,
        if_version: int | None = None,
    ) -> None:
        """The stream is gone at once; its files after a grace period.

        Args:
            stream_id, if_version: nothing is deleted if it is another stream by then, or has other settings.

        Raises:
            StreamNotFound, InvalidRequest, RemovalDenied, StreamRecreated, SettingsConflict.
        """
        require_not_internal(name)
        command = DeleteStream(
            name=name,
            deleted_us=self._cluster.clock.latest_us(),
            id=UNSET if stream_id is None else stream_id,
            if_version=UNSET if if_version is None else if_version,
        )
        await self._propose(command, request)
        self._publish("deleted", name)

    async def _wait_until_reconciled(self, name: str) -> None:
        """Until the replica here, if there is one, is as its record says."""
        stream = self._hosting.streams.get(name)
        if stream is not None:
            await self._hosting.reconciled(stream)


def require_not_internal(name: str) -> None:
    """Raises InvalidRequest: users cannot change what natslog itself writes."""
    if is_internal(name):
        raise InvalidRequest(
            f"stream {name!r} is written by natslog itself: it can be read, but not changed, published to or deleted",
            stream=name,
        )
