"""A stream of JetStream is copied, followed, and replaced by the natslog stream.

Theory of operation. The natslog stream is one that is imported (`backup.importing`): it takes no message of its own,
and each message gets the offset of its sequence. Its log shows how far the copy is, so the same command continues after
any interruption. The last entry of its lineage names the JetStream stream by its time of creation: a stream that was
created again is another one.

A switch-over waits until JetStream does not record the subjects any more, copies the rest, removes what JetStream has
removed meanwhile, transfers the consumers, looks once more whether a message has come, and resumes the stream in one
command of the metadata.

Invariant. The stream is resumed only if it has every message that JetStream had then, at the offset of its sequence.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow import ipc
from natslog.arrow.covered import covered
from natslog.client import NatslogClient
from natslog.errors import MigrationFailed, NatsUnavailable, OffsetOutOfRange, StreamConflict, StreamNotFound
from natslog.log.removed import offset_range, offset_set, to_bytes
from natslog.migration.receiving import Piece, Receiving, gap
from natslog.migration.settings import settings_from
from natslog.migration.source import JetStreamSource, SourceInfo
from natslog.model import Fork, Offset, StreamId
from natslog.subjects import overlap
from natslog.wire.credentials import NatsCredentials
from natslog.wire.link import NatsLink

Result = TypeVar("Result")

_CONNECT_S = 10.0
_RECONNECT_S = 60.0
_AT_ONCE_BYTES = 8 * 1024 * 1024
_CHECK_EVERY_S = 0.5
_AGAIN_S = 0.25
_MOST_FAILURES = 40  # one after the other, without a message
WAITING = "waiting until JetStream records its subjects no more"
_MOST_SUBJECTS = 16  # of those that the stream does not record any more, before they are combined

Until = Literal["copied", "switched", "resumed"]
"""When an import ends: when everything that there was at its start is copied, when it has switched over, or when
another command has done that."""


class Migrated(msgspec.Struct, frozen=True, kw_only=True):
    """The stream after an import. `messages`: that this command has copied. `removed`: offsets without a message; None:
    another command has completed the import. `refused`: consumers that natslog does not support, and why. `others`:
    consumers without a durable name.
    """

    stream: str
    id: str
    origin_id: str
    first_offset: int
    end_offset: int
    messages: int
    skipped: int
    removed: int | None
    consumers: list[str]
    refused: list[dict[str, str]]
    others: list[str]
    resumed: bool


@dataclass(slots=True)
class Progress:
    """`done` of `total` messages of this command, as far as known; `behind`: how many follow. `line`: what happens."""

    done: int = 0
    total: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationOptions:
    """`name`: of the natslog stream. `domain`: of JetStream. `ignored`: fields of the configuration that are left out.
    `skips_unstorable`: messages that natslog cannot store as well.
    """

    url: str
    stream: str
    name: str
    credentials: NatsCredentials = field(default_factory=NatsCredentials)
    domain: str | None = None
    until: Until = "copied"
    ignored: Sequence[str] = ()
    replicas: int | None = None
    with_consumers: bool = True
    skips_unstorable: bool = False
    progress: Callable[[Progress], None] = field(default=lambda progress: None)


async def migrate(client: NatslogClient, options: MigrationOptions) -> Migrated:
    """Copies a stream as far as the options say; continues where an earlier call has ended.

    Raises:
        StreamNotFound: JetStream has no such stream. InvalidRequest: natslog does not support it. StreamConflict: a
        stream of that name exists, and is no copy of it. MigrationFailed, NatsUnavailable; as `append_import`.
    """
    link = NatsLink(options.url, name="natslog import", credentials=options.credentials)
    await link.open()
    try:
        await link.wait_until_up(_CONNECT_S)
        prefix = "$JS.API" if options.domain is None else f"$JS.{options.domain}.API"
        source = JetStreamSource(link, options.stream, prefix)
        await source.open()
        with ThreadPoolExecutor(1, thread_name_prefix="import") as thread:
            return await _Migration(client, source, options, thread).run()
    finally:
        await link.close()


class _Switched(Exception):
    """Another command has resumed the stream."""


class _Migration:
    def __init__(
        self, client: NatslogClient, source: JetStreamSource, options: MigrationOptions, thread: ThreadPoolExecutor
    ) -> None:
        self._client, self._source, self._options, self._thread = client, source, options, thread
        self._progress = Progress()
        self._receiving: Receiving | None = None
        self._origin_id = StreamId("")
        self._id = ""
        self._first = self._next = self._newest_us = 0
        self._recorded: tuple[str, ...] = ()
        self._subjects: tuple[str, ...] = ()
        self._looked_s = 0.0
        self._skipped = self._failures = 0

    async def _call(self, work: Callable[[], Result]) -> Result:
        """A request to the cluster."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _show(self, line: str) -> None:
        self._progress.line = line
        self._options.progress(self._progress)

    # ---- the whole ----

    async def run(self) -> Migrated:
        info = await self._source.info()
        self._origin_id = StreamId(info.id)
        if (there := await self._there()) is not None and there["state"] == "resumed":
            return self._result(there, messages=0, removed=None)
        await self._begin(info, is_new=there is None)
        self._progress.total = max(0, info.state.messages)
        try:
            await self._copy(info)
            match self._options.until:
                case "copied":
                    await self._whole()
                    return await self._finish(resume=False)
                case "switched":
                    return await self._switch_over()
                case "resumed":
                    while True:
                        self._show("following")
                        await self._step()
        except _Switched:
            return self._result(await self._require_there(), messages=self._progress.done, removed=None)
        finally:
            if self._receiving is not None:
                await self._receiving.end()

    async def _there(self) -> dict[str, Any] | None:
        """The stream as far as it is copied. Raises StreamConflict: it is no copy of this one."""
        name = self._options.name
        try:
            there = await self._call(lambda: self._client.import_state(name))
        except StreamNotFound:
            return None
        known = there["lineage"][-1]["id"] if there["lineage"] else None
        if known != self._origin_id:
            what = "it was not imported" if known is None else f"it was imported from {known}"
            raise StreamConflict(
                f"stream {name!r} exists in this cluster, and is no copy of {self._origin_id}: {what}. Delete it, or "
                "import under another name (--as)",
                stream=name,
            )
        return there

    async def _require_there(self) -> dict[str, Any]:
        there = await self._there()
        if there is None:
            raise StreamNotFound(f"stream {self._options.name!r} was deleted during the import: repeat it")
        return there

    async def _begin(self, info: SourceInfo, *, is_new: bool) -> None:
        options = self._options
        if is_new:
            settings, jetstream = settings_from(
                info.config, name=options.name, ignored=options.ignored, replicas=options.replicas
            )
            subjects = list(settings["subjects"])
        else:
            settings, jetstream = {"subject": options.name}, None
            shown = await self._call(lambda: self._client.stream(options.name))
            subjects = [*shown["subjects"], *shown.get("former_subjects", ())]
        await self._begin_import(settings, jetstream, info.first_offset, subjects)
        there = await self._require_there()
        self._id, self._first, self._next = there["id"], there["first_offset"], there["next_offset"]
        self._newest_us = int(there.get("newest_timestamp_us", 0))
        shown = await self._call(lambda: self._client.stream(options.name))
        self._subjects = tuple(shown["subjects"])
        self._recorded = (*self._subjects, *shown.get("former_subjects", ()))
        last = info.state.last_seq
        if self._next > last:  # another command may have copied more since then
            last = (await self._source.info()).state.last_seq
        if self._next > last:
            raise StreamConflict(
                f"stream {options.name!r} was copied up to sequence {self._next}, but JetStream has only {last}: it "
                "has lost messages, or was restored from an older backup. Import it under another name (--as)",
                stream=options.name,
            )

    async def _begin_import(
        self, settings: dict[str, Any], jetstream: dict[str, Any] | None, first: int, subjects: Sequence[str]
    ) -> None:
        lineage = [Fork(id=self._origin_id, offset=Offset(first))]
        begin = partial(self._client.begin_import, lineage=lineage, first_offset=first, subjects=subjects)
        await self._call(lambda: begin(self._options.name, settings=settings, jetstream=jetstream))

    # ---- copying ----

    async def _copy(self, info: SourceInfo) -> None:
        """Up to where the stream was at this time."""
        while self._next < info.state.last_seq:
            self._show("copying")
            if not await self._step() and await self._has_all():
                return

    async def _has_all(self) -> bool:
        """Whether the rest, if there is one, are sequences without a message."""
        return self._receiving is not None and not self._receiving.failed and await self._receiving.has_all()

    async def _step(self) -> bool:
        """Appends what has come, or waits for it a while. Returns whether there was something.

        Raises:
            _Switched.
        """
        if self._receiving is None:
            await self._receive_again()
        receiving = self._receiving
        assert receiving is not None, "it was just begun"
        pieces = await receiving.take(_AT_ONCE_BYTES, _CHECK_EVERY_S)
        if receiving.problem is not None and not pieces:
            raise receiving.problem
        if pieces:
            await self._append(pieces)
        elif receiving.failed:
            self._show(f"receiving again: {receiving.failed}")
            await self._receive_again()
        if time.monotonic() - self._looked_s > 2 * _CHECK_EVERY_S:
            self._looked_s = time.monotonic()
            there = await self._require_there()
            if there["state"] == "resumed":
                raise _Switched
        return bool(pieces)

    async def _receive_again(self) -> None:
        """From the end of the log on."""
        if self._receiving is not None:
            self._skipped += self._receiving.skipped
            await self._receiving.end()
            why, self._receiving = self._receiving.failed, None
            self._failures += 1
            if self._failures > _MOST_FAILURES:
                where = self._source.link.shown_url
                raise NatsUnavailable(f"messages of JetStream at {where} cannot be received: {why}", url=where)
            await asyncio.sleep(_AGAIN_S)
        await self._source.link.wait_until_up(_RECONNECT_S)
        await self._info()
        receiving = Receiving(
            self._source, self._next, self._newest_us, skips_unstorable=self._options.skips_unstorable
        )
        await receiving.begin()
        self._receiving = receiving
        await self._info()  # again: if it was created again meanwhile, this consumer is one of the new stream
        self._progress.total = self._progress.done + receiving.left

    async def _append(self, pieces: Sequence[Piece]) -> None:
        receiving = self._receiving
        assert receiving is not None, "the batches are from it"
        await self._record_subjects(pieces)
        if not await self._append_batches([(piece.message, piece.base_offset, piece.end_offset) for piece in pieces]):
            return
        self._newest_us = receiving.newest_us
        self._progress.done += sum(piece.rows for piece in pieces)
        self._progress.total = max(self._progress.total, self._progress.done)
        self._options.progress(self._progress)

    async def _append_batches(self, batches: Sequence[tuple[bytes, int, int]]) -> bool:
        """Batches that follow one another, with base and end offset. What another import has appended meanwhile is
        left out of them: it is the same. False: the log ends before them, and receiving begins again from there.

        Raises:
            _Switched.
        """
        end = batches[-1][2]
        while batches:
            body = b"".join(message for message, _, _ in batches)
            try:
                await self._call(partial(self._client.append_import, self._options.name, self._id, body))
                break
            except OffsetOutOfRange as error:
                at = int(error.facts.get("next_offset", 0))
                if at <= batches[0][1]:  # another leader has less
                    await self._set_back(at)
                    return False
                batches = [_from(at, *one) for one in batches if one[2] > at]
            except StreamConflict:
                if (await self._require_there())["state"] == "resumed":
                    raise _Switched from None
                raise
        self._next, self._failures = end, 0
        return True

    async def _set_back(self, at: int) -> None:
        self._next = at
        self._newest_us = int((await self._require_there()).get("newest_timestamp_us", 0))
        if self._receiving is not None:
            self._receiving.failed = "the stream ends elsewhere"
            await self._receive_again()

    async def _record_subjects(self, pieces: Sequence[Piece]) -> None:
        """Subjects that JetStream has recorded before its stream was edited are named before their messages come."""
        found = pa.concat_arrays([piece.subjects for piece in pieces])
        others = found.filter(pc.invert(covered(found, self._recorded))).unique().to_pylist()
        if others:
            self._recorded = (*self._recorded, *_combined(others))
            await self._begin_import({"subject": self._options.name}, None, self._first, self._recorded)

    # ---- the end ----

    async def _whole(self) -> None:
        """Copies all that there is now, also the sequences at its end that have no message. Raises MigrationFailed."""
        while True:
            info = await self._info()
            await self._copy(info)
            end = info.state.last_seq
            if self._next < end:
                await self._append_batches([(gap(self._next, end, self._newest_us), self._next, end)])
            if self._next >= end:
                return

    async def _info(self, *, deleted: bool = False) -> SourceInfo:
        info = await self._source.info(deleted=deleted)
        if info.id != self._origin_id:
            raise MigrationFailed(
                f"stream {self._options.stream!r} of JetStream was deleted and created again during the import"
            )
        return info

    async def _switch_over(self) -> Migrated:
        """Waits until JetStream does not record the subjects any more, and finishes."""
        while True:
            while self._is_recording(await self._info()):
                self._show(WAITING)
                await self._step()
            self._show("switching over")
            await self._whole()
            consumers = await self._transfer_consumers()
            again = await self._info()
            if again.state.last_seq == self._next and not self._is_recording(again):
                return await self._finish(resume=True, consumers=consumers)

    def _is_recording(self, info: SourceInfo) -> bool:
        """Whether its stream may take a message that the natslog stream would record."""
        return not info.is_sealed and any(overlap(one, own) for one in info.subjects for own in self._subjects)

    async def _transfer_consumers(self) -> tuple[list[str], list[dict[str, str]], list[str]]:
        """Names of those that were transferred, of those that were refused, and of those that have no durable name."""
        if not self._options.with_consumers:
            return [], [], []
        durable, others = await self._source.consumers()
        done = await self._call(lambda: self._client.import_consumers(self._options.name, self._id, durable))
        return done["imported"], done["refused"], others

    async def _finish(
        self,
        *,
        resume: bool,
        consumers: tuple[list[str], list[dict[str, str]], list[str]] = ([], [], []),
    ) -> Migrated:
        removed = await self._remove(await self._info(deleted=True))
        lineage = [Fork(id=self._origin_id, offset=Offset(self._next))]
        finish = partial(self._client.finish_import, lineage=lineage, resume=resume)
        there = await self._call(lambda: finish(self._options.name, self._id))
        return self._result(there, messages=self._progress.done, removed=removed, consumers=consumers)

    async def _remove(self, info: SourceInfo) -> int:
        """What JetStream has removed since it was copied. Returns how many offsets have no message."""
        deleted = np.array(info.state.deleted or (), np.int64) - 1
        removed = (offset_range(0, info.first_offset) | offset_set(deleted)) & offset_range(self._first, self._next)
        if removed:
            removals = {"removed": base64.b64encode(to_bytes(removed)).decode()}
            await self._call(lambda: self._client.remove_imported(self._options.name, self._id, removals))
        return len(removed)

    def _result(
        self,
        there: dict[str, Any],
        *,
        messages: int,
        removed: int | None,
        consumers: tuple[list[str], list[dict[str, str]], list[str]] = ([], [], []),
    ) -> Migrated:
        skipped = self._skipped + (self._receiving.skipped if self._receiving is not None else 0)
        return Migrated(
            stream=there["name"],
            id=there["id"],
            origin_id=self._origin_id,
            first_offset=there["first_offset"],
            end_offset=self._next or there["lineage"][-1]["offset"],
            messages=messages,
            skipped=skipped,
            removed=removed,
            consumers=consumers[0],
            refused=consumers[1],
            others=consumers[2],
            resumed=there["state"] == "resumed",
        )


def _from(offset: int, message: bytes, base: int, end: int) -> tuple[bytes, int, int]:
    """The part of a batch from an offset on, below its end."""
    return (message, base, end) if base >= offset else (bytes(ipc.clip_batch(message, offset, end)), offset, end)


def _combined(subjects: list[str]) -> list[str]:
    """Wildcards that cover these subjects, a few of them."""
    if len(subjects) <= _MOST_SUBJECTS:
        return subjects
    first = sorted({subject.partition(".")[0] for subject in subjects})
    patterns = [pattern for token in first for pattern in (token, f"{token}.>")]
    return patterns if len(patterns) <= _MOST_SUBJECTS else [">"]


__all__ = ["WAITING", "Migrated", "MigrationOptions", "Progress", "migrate"]
