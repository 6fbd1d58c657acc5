"""Imports of exported streams, and what a backup of a cluster has besides streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from natslog.http.shapes.common import Count, Name, Offset, Subject
from natslog.model import MAX_LINEAGE, MAX_SUBJECTS, Fork, JetStreamSettings
from natslog.security.records import Security
from natslog.subjects import check_subject

_MAX_IMPORTED_CONSUMERS = 10_000


class NewImport(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The stream that an export is imported into. `settings`: as of a new stream. `lineage`: the streams whose
    positions will be valid in it, the exported one last, each up to an offset. `subjects`: wildcards that cover the
    subjects of all messages. `jetstream`: of a stream of JetStream, what its configuration has beside these settings.
    """

    settings: dict[str, Any]
    lineage: Annotated[tuple[Fork, ...], Meta(min_length=1, max_length=MAX_LINEAGE)]
    first_offset: Offset
    subjects: Annotated[list[Subject], Meta(min_length=1, max_length=4 * MAX_SUBJECTS)]
    jetstream: JetStreamSettings | UnsetType = UNSET

    def __post_init__(self) -> None:
        for subject in self.subjects:
            check_subject(subject, wildcards=True)


class ImportedConsumer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A durable consumer of a JetStream stream. `config`: as JetStream states it. `created_us`: microseconds since
    1970. `ack_floor`: consumer sequence and stream sequence up to which everything is acked; messages behind it will be
    delivered.
    """

    config: dict[str, Any]
    created_us: Offset
    ack_floor: tuple[Offset, Offset]


class ImportedConsumers(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`id`: of the stream that is imported into."""

    id: str
    consumers: Annotated[list[ImportedConsumer], Meta(max_length=_MAX_IMPORTED_CONSUMERS)]


class RefusedConsumer(msgspec.Struct):
    """Why a consumer was not imported."""

    name: str
    reason: str


class ConsumersOfImport(msgspec.Struct):
    """What became of the consumers of a request. Those of earlier requests that this one does not name are deleted."""

    imported: list[str]
    refused: list[RefusedConsumer]


class FinishedImport(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`id`: of the stream that was imported into. `resume`: it takes messages from now on."""

    id: str
    lineage: Annotated[tuple[Fork, ...], Meta(min_length=1, max_length=MAX_LINEAGE)]
    resume: bool = False


Bitmap = Annotated[str, Meta(pattern="^[A-Za-z0-9+/]*={0,2}$")]


class Removals(msgspec.Struct, forbid_unknown_fields=True):
    """Offsets that a stream does not have any more, as Roaring bitmaps of 64 bits (portable format) in base64; empty:
    none. `erased_subjects`, `erased_keys`: those of them that were erased.
    """

    removed: Bitmap = ""
    erased_subjects: Bitmap = ""
    erased_keys: Bitmap = ""


class RemovedImports(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`id`: of the stream that is imported into."""

    id: str
    removals: Removals


class Import(msgspec.Struct):
    """How far the import into a stream is: up to `next_offset`, as its leader states it, whose newest message is of
    `newest_timestamp_us`, microseconds since 1970.
    """

    name: Name
    id: str
    state: Literal["importing", "imported", "resumed"]
    first_offset: Offset
    lineage: list[Fork]
    next_offset: Offset | UnsetType = UNSET
    newest_timestamp_us: int | UnsetType = UNSET


class StoredSecurity(msgspec.Struct):
    """Tokens (digests of their secrets), roles, rules and quotas as they are stored."""

    enabled: bool
    security: Security


class RestoredSecurity(msgspec.Struct):
    """How many of each were added."""

    tokens: Count = 0
    roles: Count = 0
    rules: Count = 0
    quotas: Count = 0


# ---- parameters ----


class ImportedInto(msgspec.Struct, frozen=True):
    """The stream that is imported into."""

    id: Annotated[str, Meta(description="id of the stream that is imported into")]
