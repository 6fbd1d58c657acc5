"""Records shared by all layers: streams as the metadata stores them, and positions and ranges in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NewType

import msgspec

from natslog.errors import StreamRecreated
from natslog.model.stream_settings import StreamSettings

Ack = Literal["none", "flush", "stored"]
"""The confirmation that a publisher waits for: none, that of the server, or that of a stream for each row."""

MAX_IN_FLIGHT = 20_000
"""Default limit of rows that a publisher has sent and no stream has acked."""

Offset = NewType("Offset", int)
Epoch = NewType("Epoch", int)
StreamId = NewType("StreamId", str)
BrokerId = NewType("BrokerId", int)


class FormerRule(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How messages hid older ones until an edit. `until_epoch`: the first leader epoch to which it does not apply."""

    until_epoch: Epoch
    max_messages_per_subject: int | None = None
    compact: bool = False
    allow_rollup: bool = False


_COMPANION = ".companion"


def companion_id(stream_id: StreamId) -> StreamId:
    """Names the companion log of a stream between brokers."""
    return StreamId(stream_id + _COMPANION)


def stream_of_companion(log_id: StreamId) -> StreamId | None:
    """The stream whose companion log has this id; None if it is a stream's own id."""
    stream_id, found, _ = log_id.partition(_COMPANION)
    return StreamId(stream_id) if found else None


ImportState = Literal["", "importing", "imported"]
"""`importing`: batches of an export are being appended, and the stream is not served. `imported`: that is complete, and
the stream was not resumed since: it has taken no message, and does not subscribe.
"""
TOMBSTONE_HEADER = "Natslog-Tombstone"
"""A message with it deletes its key in a compacted stream, whatever its value is."""
MAX_LINEAGE = 64


class Fork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stream that was exported, from which another one was restored: all below `offset` is equal in both, so that its
    positions up to `offset` are valid in the restored stream.
    """

    id: StreamId
    offset: Offset


def fork_offset(lineage: Iterable[Fork], stream_id: str) -> Offset | None:
    """Up to which offset positions in that stream are valid; None where the lineage does not name it."""
    return next((fork.offset for fork in lineage if fork.id == stream_id), None)


def beyond_fork(stream: str, was: str, is_now: str, offset: int, fork: int) -> StreamRecreated:
    """A position in a stream that was exported before it had reached this offset."""
    return StreamRecreated(
        f"stream {stream!r} was restored from an export that ends at offset {fork} (its id is {is_now}, that of the "
        f"original is {was}). The position {offset} is beyond it: messages {fork} to {offset} of the original are not "
        f"in the restored stream, and those that it has from {fork} on are others. Restore a newer export, or set the "
        f"position to {fork}, where the restored stream differs from the original",
        stream=stream,
        id=is_now,
        fork=fork,
    )


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A stream as the metadata knows it. `id` is never used again after the stream is deleted.

    Attributes:
        leader: None while there is none. `leader_epoch`: of the present leader, or of the last one. replicas: the
        brokers that hold it; the first is the preferred leader. `isr`: the replicas that have everything committed, and
        are counted. version: increases with every change of the fields after `created_us`; an ISR change names the one
        it was made for. eligible: not in the ISR, yet holding all that is committed, because they left when it fell
        below `min_isr`. unproven: of ISR and eligible, those that have restarted uncleanly and not yet caught up with a
        leader. target: the replicas wanted, while the stream is being moved. holders: replicas whose log was created on
        their disk, so that a log that is missing there is damage. target_min_isr: `min_isr` once `target` is reached,
        where the number of replicas changes too; else 0. purged_below: messages below this offset were purged: they are
        no longer served, and their files are removed. sealed: nothing is added to the stream any more, and nothing
        removed from it. former_subjects: subjects that the stream recorded before it was edited. owner: the identity
        that created it; "" without security. former_rules: rules that hid more messages than the present settings do,
        oldest first. has_companion: the stream has a companion log (`node.replicas.companion`). companion_holders: as
        `holders`, of the companion log. lineage: the streams whose positions are valid in this one, because it was
        restored from an export, oldest first. first_offset: where a log without files begins. import_state: see
        `ImportState`. settings_version: increases with every edit (`settings`, `paused`, another number of replicas); 0
        at level 1. rules_version: the settings version by which a rule was added that hides messages, after messages
        were removed; the removals of before do not count for rules (ADR 25).
    """

    name: str
    id: StreamId
    settings: StreamSettings
    created_us: int
    leader: BrokerId | None
    leader_epoch: Epoch
    replicas: tuple[BrokerId, ...]
    isr: tuple[BrokerId, ...]
    version: int = 0
    eligible: tuple[BrokerId, ...] = ()
    unproven: tuple[BrokerId, ...] = ()
    target: tuple[BrokerId, ...] = ()
    paused: bool = False
    holders: tuple[BrokerId, ...] = ()
    target_min_isr: int = 0
    purged_below: Offset = Offset(0)
    sealed: bool = False
    former_subjects: tuple[str, ...] = ()
    owner: str = ""
    former_rules: tuple[FormerRule, ...] = ()
    has_companion: bool = False
    companion_holders: tuple[BrokerId, ...] = ()
    lineage: tuple[Fork, ...] = ()
    first_offset: Offset = Offset(0)
    import_state: ImportState = ""
    settings_version: int = 0
    rules_version: int = 0

    @property
    def recorded_subjects(self) -> tuple[str, ...]:
        """Wildcards that cover the subjects of all messages of the stream."""
        return (*self.settings.subjects, *self.former_subjects)

    @property
    def candidates(self) -> tuple[BrokerId, ...]:
        """The replicas that have everything that was committed, as far as their disks kept it."""
        return self.isr + self.eligible


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A part `[start, end)` of a stream that one task reads; `urls` nearest first.

    `rows`, `bytes`: None if they are unknown to this reader.
    """

    start: int
    end: int
    rows: int | None
    bytes: int | None
    urls: tuple[str, ...] = ()


ONE_OFF_PRODUCERS = "write-"
"""Names of producers that append one batch begin so."""

OnConflict = Literal["fail", "skip", "append"]
"""What becomes of a batch of a direct append that is not the next one of its producer: see `BatchConflict`."""


class PartReceipt(msgspec.Struct, frozen=True):
    """The response to the upload of a part of a direct append, by which the commit names the part.

    Attributes:
        digest: CRC32C of the upload. `content`: digest of the rows, the same in any order, 32 hexadecimal digits.
        broker: where the part is staged. Both are None from natslog 0.1.0.
    """

    part: str
    attempt: int
    rows: int
    digest: str
    content: str | None = None
    broker: int | None = None

    def names(self, staged: PartReceipt) -> bool:
        """Whether this is the receipt of that part, as a client may have sent it back; or of a copy of it."""
        content = staged.content if self.content is None else self.content
        return msgspec.structs.replace(self, content=content, broker=staged.broker) == staged


class Appended(msgspec.Struct, frozen=True):
    """Offsets `[start, end)` hold the batch's rows; natslog 0.1.0 answers None for both, and `duplicate`, for any batch
    before the producer's last one.

    `duplicate`: it had been committed before.
    """

    start: int | None
    end: int | None
    duplicate: bool
