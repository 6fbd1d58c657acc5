"""The JSON bodies of the API, requests and responses, as types: `/openapi.json` derives its schemas from them.

Responses are encoded from these types, so a field that is not declared here cannot be sent. A field that is `UNSET` is
left out. Counts that are None are unknown to the reader: clients then use offsets.

Bodies of requests with constraints that JSON Schema cannot express, and settings of streams, are checked by their
handlers, which name the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from natslog.cluster.cursors import CONSUMER_PREFIX
from natslog.consensus import MAX_BROKER_ID
from natslog.errors import KINDS
from natslog.log_events import LEVELS
from natslog.model import (
    MAX_LINEAGE,
    MAX_REPLICAS,
    MAX_SUBJECTS,
    SETTINGS,
    Acks,
    Compression,
    Discard,
    Fork,
    ImportState,
    JetStreamSettings,
    OnConflict,
    PartReceipt,
)
from natslog.security.records import IDENTITY_PATTERN, MAX_IDENTITY_CHARS, Action, Security
from natslog.subjects import MAX_NAME_CHARS, MAX_SUBJECT_BYTES, NAME_PATTERN

MAX_OFFSET = 2**62
MAX_CURSORS_AT_ONCE = 10_000
MAX_IMPORTED_CONSUMERS = 10_000
MAX_SPLITS = 100_000
MAX_WAIT_MS = 60_000
FOUND_OF_A_PAGE, MAX_FOUND_OF_A_PAGE = 100, 1_000
PREVIEW_BYTES, MAX_PREVIEW_BYTES = 4_096, 1024 * 1024
SEARCHED_BYTES, MAX_SEARCHED_BYTES = 256 * 1024 * 1024, 4 * 1024**3
SEARCHED_MS, MAX_SEARCHED_MS = 2_000, 20_000
MAX_MESSAGE_CHARS, MAX_MESSAGE_HEADERS = 12 * 1024 * 1024, 100
MAX_REDRIVEN = 1_000
SUBJECTS_OF_A_PAGE, MAX_SUBJECTS_OF_A_PAGE = 1_000, 10_000

Name = Annotated[str, Meta(pattern=f"^{NAME_PATTERN}$", max_length=MAX_NAME_CHARS)]
CURSOR_PATTERN = rf"({NAME_PATTERN}|{CONSUMER_PREFIX}[^\s.*>/]+)"
MAX_CURSOR_CHARS = MAX_NAME_CHARS + len(CONSUMER_PREFIX)
CursorName = Annotated[str, Meta(pattern=f"^{CURSOR_PATTERN}$", max_length=MAX_CURSOR_CHARS)]
Subject = Annotated[str, Meta(min_length=1, max_length=MAX_SUBJECT_BYTES)]
Subjects = Annotated[list[Subject], Meta(min_length=1, max_length=MAX_SUBJECTS)]
Offset = Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
Count = Annotated[int, Meta(ge=0)]
BrokerNumber = Annotated[int, Meta(ge=1, le=MAX_BROKER_ID)]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
ReadFrom = Literal["nearest", "leader", "any"]
AnyProblem = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Problem"})]
"""A `Problem` with its facts."""


def shape_response(body: object, *, status: int = 200, headers: Mapping[str, str] = {}) -> web.Response:
    """A response with this JSON body: one of the types below, or a list or dict of them."""
    try:
        text = msgspec.json.encode(body)
    except UnicodeEncodeError:  # a path that is not valid Unicode
        text = json.dumps(msgspec.to_builtins(body)).encode()
    return web.Response(
        body=text, status=status, headers={**headers, "Content-Type": "application/json; charset=utf-8"}
    )


# ---- errors ----


class Problem(msgspec.Struct):
    """What is wrong and what to do. Further fields are facts for programs, such as `stream` or `high_watermark`."""

    code: Annotated[str, Meta(extra_json_schema={"enum": sorted(KINDS)})]
    message: str
    retriable: Annotated[bool, Meta(description="whether the same request may succeed later")]


class Error(msgspec.Struct):
    """The body of every response with a status of 400 or more."""

    error: Problem


# ---- the cluster ----


class Broker(msgspec.Struct):
    """A broker of the cluster. `url` is null until the broker has registered itself. `stopping`: it has announced a
    graceful stop, and has not started again since. `problem`: why there is no link to it.
    """

    id: BrokerNumber
    url: str | None
    rack: str
    tags: list[str]
    alive: bool
    role: Literal["voter", "learner", "none"]
    draining: bool
    stopping: bool
    leads: Count
    replicas: Count
    in_sync: Count
    clock_apart_s: float
    problem: AnyProblem | UnsetType = UNSET


class Cluster(msgspec.Struct):
    """The cluster as this broker sees it. `is_current`: a majority confirmed that the broker has all changes.
    `jetstream`: how this broker serves the JetStream API. `nats_leaf`: whether its leafnode connection to NATS is up;
    off without `nats_leaf_url`. `nats_leaf_problem`: why it is down.
    """

    cluster_id: str | None
    metadata_leader: BrokerNumber | None
    metadata_term: Count
    is_current: bool
    brokers: list[Broker]
    streams: Count
    under_replicated: Count
    leaderless: Count
    version: str
    feature_level: Count
    supported_level: Count
    upgrade_waits: bool
    upgrade_waits_for: list[BrokerNumber]
    jetstream: Literal["off", "on", "domain", "forbidden", "conflict"]
    nats_leaf: Literal["off", "up", "down"]
    nats_leaf_problem: str | UnsetType = UNSET


class Finding(msgspec.Struct):
    """Something that is wrong in the cluster. `code`: as in docs/OPERATIONS.md. `where`: a broker, a stream or the
    cluster; where many streams have the same problem, `streams` names the first ones, and `count` is of all.
    """

    code: str
    level: Literal["error", "warning"]
    where: str
    what: str
    remedy: str
    count: Count = 1
    streams: list[str] = []


class BrokerStats(msgspec.Struct):
    """A broker now, as it states itself. Rates are of the last seconds; `commit_ms`: mean time of a commit; `ack_ms`:
    mean time from the first message of a commit to its acks; both are 0 without a commit. `cpu_share`: of one core.
    `disk_full_s`: when its disk is full if it is filled as in the last hour. `has_disk_room`: false from a refusal
    because of a full disk on, until there is room again. `kernels_problem`: why it has no compiled kernels, so that it
    processes messages slowly. `nats_connections`: how many of its connections to NATS are
    up, and how many it has. `behind`: messages that its replicas lack which are not in sync, as the leaders state it.
    `problem`: why it is not ready.
    """

    id: BrokerNumber
    messages_per_s: float
    stored_bytes_per_s: float
    sent_bytes_per_s: float
    commits_per_s: float
    commit_ms: float
    ack_ms: float
    disk_free_bytes: float
    store_bytes: float
    memory_bytes: float
    cpu_share: float
    disk_full_s: float | None
    has_disk_room: bool
    kernels_problem: str | None
    nats_connections: tuple[int, int] | None
    behind: Count
    problem: str | None


class StreamTable(msgspec.Struct):
    """Streams as columns, a list for each. `subjects`: the first four. Counts are null without a leader."""

    name: list[str]
    subjects: list[list[str]]
    leader: list[BrokerNumber | None]
    replicas: list[int]
    in_sync: list[int]
    state: list[Literal["", "paused", "sealed", "importing"]]
    group: list[str | None]
    max_age: list[str | None]
    high_watermark: list[int | None]
    log_start_offset: list[int | None]
    messages: list[int | None]
    bytes: list[int | None]
    messages_per_s: list[float | None]
    bytes_per_s: list[float | None]


class Overview(msgspec.Struct):
    """The cluster at one moment. In `/v1/live`, `streams` are those that differ from the event before, and `removed`
    those that are no longer there, unless `is_whole`.
    """

    at: Time
    cluster: Cluster
    findings: list[Finding]
    broker_stats: list[BrokerStats]
    streams: StreamTable
    is_whole: bool = True
    removed: list[str] = []


class LagSeries(msgspec.Struct):
    """Of one consumer: messages, their stored bytes, and the age of the oldest of them in seconds."""

    rows: list[int | None]
    bytes: list[int | None]
    seconds: list[int | None]


class History(msgspec.Struct):
    """Up to one hour, a value every `every_s` seconds, the oldest first; the last one is of now. `brokers`: the series
    of each broker, by its id; `stream`: those of a stream, empty if it has not changed since its leader started.
    `lags`: how far each of its consumers was behind, a value every `lags_every_s` seconds, null where that is not
    known.
    """

    every_s: Count
    brokers: dict[str, dict[str, list[float]]] | UnsetType = UNSET
    stream: dict[str, list[float]] | UnsetType = UNSET
    lags_every_s: Count | UnsetType = UNSET
    lags: dict[str, LagSeries] | UnsetType = UNSET


class PlannedMove(msgspec.Struct):
    """Where the replicas of a stream are, and where they would be: the preferred leader first. `copied_bytes`: about
    how much would be copied; 0 if only the preferred leader changes.
    """

    stream: Name
    before: list[BrokerNumber]
    after: list[BrokerNumber]
    copied_bytes: Count


class PlannedLoad(msgspec.Struct):
    """Replicas, preferred leaders and bytes of a broker now, and after the moves."""

    id: BrokerNumber
    replicas: Count
    leaders: Count
    bytes: Count
    replicas_after: Count
    leaders_after: Count
    bytes_after: Count


class Plan(msgspec.Struct):
    """Moves that would be made. `under_way`: how many streams are being moved already. `problem`: why a stream could
    not leave a broker that is to be drained.
    """

    moves: list[PlannedMove]
    under_way: Count
    brokers: list[PlannedLoad]
    problem: str | None


class Newcomer(msgspec.Struct):
    """The URL of a blank broker."""

    url: str


class Draining(msgspec.Struct):
    """Whether replicas and leaderships of the broker move to others."""

    draining: bool


class Transfer(msgspec.Struct):
    """The number of the new leader."""

    to: BrokerNumber


class NewLogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """The level of a logger, or of all, of a broker or of all. `default`: what applied when the broker was started."""

    level: Annotated[str, Meta(extra_json_schema={"enum": [*LEVELS, "default"]})]
    logger: Annotated[str, Meta(max_length=64)] | None = None
    broker: BrokerNumber | None = None


class BrokerLogLevels(msgspec.Struct):
    """The level of the log of a broker, and of loggers with a level of their own. `problem`: why it states none, or has
    not made a change.
    """

    broker: BrokerNumber
    level: str | None = None
    loggers: dict[str, str] = {}
    problem: AnyProblem | UnsetType = UNSET


class LogLevels(msgspec.Struct):
    """The levels of the logs of all brokers, or of those that were changed."""

    brokers: list[BrokerLogLevels]


class Upgraded(msgspec.Struct):
    """The feature level of the cluster. `raised`: it was lower before this request."""

    feature_level: Count
    raised: bool


# ---- streams ----


def _body_with_settings(name: str, doc: str, *others: tuple[Any, ...]) -> type[msgspec.Struct]:
    """The body of a request that states settings of a stream, each of which may be left out, and has other fields."""
    types = {"subject": Subject, "subjects": Subjects}
    for one in SETTINGS:
        types[one.name] = one.setting.json_type | None if one.setting.is_nullable else one.setting.json_type
    fields = [(field, kind | UnsetType, UNSET) for field, kind in types.items()]
    return msgspec.defstruct(
        name, [*fields, *others], kw_only=True, forbid_unknown_fields=True, namespace={"__doc__": doc}
    )


ChangedStream = _body_with_settings(
    "ChangedStream",
    """Settings of a stream. Durations are seconds or text such as `7d`, sizes are bytes or text such as `10GiB`.
    `subjects`: all that are recorded from then on; `subject`: the only one. `if_version`: the `settings_version` that
    the stream had when it was read; `id`: its id. If one of them differs by then, nothing is changed (409).
    """,
    ("paused", bool | UnsetType | None, UNSET),
    ("if_version", Count | UnsetType | None, UNSET),
    ("id", str | UnsetType | None, UNSET),
)
NewStream = _body_with_settings(
    "NewStream",
    """Name, subject (or `subjects`) and settings of a stream. Durations and sizes as for `ChangedStream`.""",
    ("name", Name),
)


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


class ImportedConsumer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A durable consumer of a JetStream stream. `config`: as JetStream states it. `created_us`: microseconds since
    1970. `ack_floor`: consumer sequence and stream sequence up to which everything is acked; messages behind it will be
    delivered.
    """

    config: dict[str, Any]
    created_us: Annotated[int, Meta(ge=0, le=2**62)]
    ack_floor: tuple[Annotated[int, Meta(ge=0, le=2**62)], Annotated[int, Meta(ge=0, le=2**62)]]


class ImportedConsumers(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`id`: of the stream that is imported into."""

    id: str
    consumers: Annotated[list[ImportedConsumer], Meta(max_length=MAX_IMPORTED_CONSUMERS)]


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


class OffsetRange(msgspec.Struct):
    """Offsets from `start` to `end`, exclusive."""

    start: Offset
    end: Offset


class ReplicaScrub(msgspec.Struct, kw_only=True):
    """The state of the scrubbing of one replica.

    `scrubbed_at`: when its last pass was completed. `scrub_progress`: of the pass that is under way, from 0 to 1; null:
    none is. `damaged`: offsets that cannot be read; a range without offsets is a segment that begins there and has a
    damaged header or footer. `lost`: offsets that were damaged, and accepted as lost. `problem`: why the replica states
    nothing.
    """

    broker: BrokerNumber
    scrubbed_at: Time | None = None
    scrub_progress: Annotated[float, Meta(ge=0, le=1)] | None = None
    damaged: list[OffsetRange] = []
    lost: list[OffsetRange] = []
    problem: AnyProblem | UnsetType = UNSET


class Repair(msgspec.Struct, forbid_unknown_fields=True):
    """Offsets that are damaged on every replica become removed ones."""

    accept_loss: Literal[True]


class ReplicaLoss(msgspec.Struct):
    """The offsets that one replica has given up. `problem`: why it was not repaired."""

    broker: BrokerNumber
    lost: list[OffsetRange] = []
    problem: AnyProblem | UnsetType = UNSET


class Repaired(msgspec.Struct):
    """What was lost on each replica."""

    name: Name
    replicas: list[ReplicaLoss]


class Scrub(msgspec.Struct):
    """The state of the scrubbing of all replicas of a stream."""

    name: Name
    replicas: list[ReplicaScrub]


class Compressed(msgspec.Struct):
    """The compressed segments: stored bytes, bytes of their rows before compression, and the ratio of both."""

    bytes: Count
    uncompressed_bytes: Count
    ratio: Annotated[float, Meta(ge=0)]


class Stream(msgspec.Struct, kw_only=True):
    """A stream. Its leader alone states a position (`log_start_offset` to `segments`); without one there is a
    `problem`. `subject`: the first of `subjects`; `former_subjects`: wildcards of others that it recorded before.
    `settings_version`: increases with each edit. `scrub`, `compressed`: of the replica of the leader; `compressed` is
    missing where no segment is, or it is unknown. `lineage`: the streams from whose exports it was restored, and up to
    which offset their positions are valid in it. `jetstream`: of streams that were created or changed by the JetStream
    API, what their configuration has beside these settings, as far as it is not the default.
    """

    name: Name
    id: str
    subject: str
    subjects: list[str]
    replicas: Count
    min_isr: Count
    group: str | None
    max_bytes: int | None
    max_messages: int | None
    max_messages_per_subject: int | None
    compact: bool
    tombstone_retention: str
    allow_ttl: bool
    ttl: str | None
    discard: Discard
    compression: Compression
    acks: Acks
    max_message_bytes: int | None
    deny_delete: bool
    deny_purge: bool
    allow_rollup: bool
    placement_tags: list[str]
    prevent_delete: bool
    managed_by: str | None
    settings_version: Count
    max_age: str | None
    dedupe_window: str | None
    paused: bool
    sealed: bool
    envelopes: bool
    former_subjects: list[str]
    lineage: list[Fork]
    import_state: ImportState
    created: Time
    leader: BrokerNumber | None
    leader_epoch: Count
    replica_ids: list[BrokerNumber]
    isr: list[BrokerNumber]
    target_replica_ids: list[BrokerNumber] | UnsetType = UNSET
    log_start_offset: Offset | UnsetType = UNSET
    high_watermark: Offset | UnsetType = UNSET
    messages: Count | UnsetType | None = UNSET
    bytes: Count | UnsetType | None = UNSET
    segments: Count | UnsetType | None = UNSET
    compressed: Compressed | UnsetType | None = UNSET
    scrub: ReplicaScrub | UnsetType = UNSET
    jetstream: JetStreamSettings | UnsetType = UNSET
    problem: AnyProblem | UnsetType = UNSET


class Position(msgspec.Struct, kw_only=True):
    """The position of a stream as its leader states it; without one there is a `problem`."""

    name: Name
    id: str
    leader_epoch: Count
    lineage: list[Fork] | UnsetType = UNSET
    log_start_offset: Offset | UnsetType = UNSET
    high_watermark: Offset | UnsetType = UNSET
    messages: Count | UnsetType | None = UNSET
    bytes: Count | UnsetType | None = UNSET
    segments: Count | UnsetType | None = UNSET
    problem: AnyProblem | UnsetType = UNSET


class AskedPositions(msgspec.Struct, forbid_unknown_fields=True):
    """Which streams (all, if nothing is given); `seen`: id and high watermark of each, as the reader has them."""

    streams: frozenset[str] | None = None
    pattern: str | None = None
    group: str | None = None
    seen: dict[str, tuple[str, int]] = {}
    wait_ms: Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_WAIT_MS})] = 0


class Rolled(msgspec.Struct):
    """All messages below `sealed_end` are in Arrow files in this folder of the leader."""

    name: Name
    sealed_end: Offset
    folder: str


class Purge(msgspec.Struct, forbid_unknown_fields=True):
    """Messages below this offset; without it, all that are committed now. `subject`: only those whose subject it
    covers. `keep`: so many of the newest stay.
    """

    below: Offset | UnsetType = UNSET
    subject: Subject | UnsetType = UNSET
    keep: Count | UnsetType = UNSET


class Purged(msgspec.Struct):
    """The position of the stream afterwards. `purged`: how many messages were removed."""

    name: Name
    log_start_offset: Offset
    purged: Count
    high_watermark: Offset


class SubjectCount(msgspec.Struct):
    """A subject: how many visible messages it has, and the offsets of the first and the last of them."""

    subject: Subject
    count: Count
    first: Offset
    last: Offset


class SubjectPage(msgspec.Struct):
    """Subjects of the messages that were visible when `as_of` was the high watermark. `total`: of all pages."""

    name: Name
    as_of: Offset
    total: Count
    subjects: list[SubjectCount]


class Header(msgspec.Struct):
    """A header of a message. `key`: its name."""

    key: str
    value: str


class FoundMessage(msgspec.Struct, kw_only=True):
    """A message, and the first bytes of its value. Bytes that are not UTF-8 are in base64, under `key_base64` and
    `value_base64`. `value_bytes`: size of the whole value; `is_cut`: it is longer than what is shown.
    """

    offset: Offset
    timestamp: Time
    subject: str
    key: str | UnsetType | None = UNSET
    key_base64: str | UnsetType = UNSET
    headers: list[Header]
    value: str | UnsetType = UNSET
    value_base64: str | UnsetType = UNSET
    value_bytes: Count
    is_cut: bool


class Found(msgspec.Struct, kw_only=True):
    """A page of a search, in the order of offsets. All messages below `next_offset` were searched; with `is_complete`
    it is the end of the range, otherwise a request with it as `start` goes on. `bytes_searched`, `rows_searched`: what
    was read for this page; missing if the identity may not read all subjects.
    """

    messages: list[FoundMessage]
    next_offset: Offset
    high_watermark: Offset
    is_complete: bool
    bytes_searched: Count | UnsetType = UNSET
    rows_searched: Count | UnsetType = UNSET


MessageText = Annotated[str, Meta(max_length=MAX_MESSAGE_CHARS)]


class NewMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message to be published to NATS. `subject`: may be left out where the stream records only one plain subject.
    Either `value`, sent as UTF-8, or `value_base64`. `key`: sent as the header Natslog-Key; `message_id`: as
    Nats-Msg-Id.
    """

    subject: Subject | UnsetType = UNSET
    value: MessageText | UnsetType = UNSET
    value_base64: MessageText | UnsetType = UNSET
    key: MessageText | UnsetType = UNSET
    headers: Annotated[list[Header], Meta(max_length=MAX_MESSAGE_HEADERS)] = []
    message_id: MessageText | UnsetType = UNSET


class Published(msgspec.Struct):
    """A message that the stream has stored. `duplicate`: it was there already, by its message id."""

    name: Name
    subject: str
    offset: Offset
    duplicate: bool


class Redrive(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Offsets of dead letters, to be published to the subjects that they were meant for. `dry_run`: state only what
    would be done.
    """

    offsets: Annotated[list[Offset], Meta(min_length=1, max_length=MAX_REDRIVEN)]
    dry_run: bool = False


class RedrivenMessage(msgspec.Struct):
    """A dead letter. `subject`: where it is sent; `stream`: the one that records this. `stored_at`: its offset there,
    null if it was not sent; `duplicate`: it was there already. `problem`: why it was not sent, or not acked.
    """

    offset: Offset
    subject: str
    stream: str | None
    stored_at: Offset | None
    duplicate: bool
    problem: str | None


class Redriven(msgspec.Struct):
    """What became of each dead letter. `missing`: offsets without a message. `left`: offsets for a further request,
    because the values of this one would be too large together.
    """

    messages: list[RedrivenMessage]
    missing: list[Offset]
    left: list[Offset]


class MessageDeleted(msgspec.Struct):
    """A message that was removed."""

    name: Name
    offset: Offset


class Erase(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of them. `subject`: may have wildcards. `key`: as text; `key_base64`: of any bytes."""

    subject: Subject | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET


class ErasedFile(msgspec.Struct):
    """A file of a broker that was written again. `rows`: how many of its rows were erased."""

    name: str
    bytes_before: Count
    bytes_after: Count
    rows: Count
    at: Time


class ReplicaErasure(msgspec.Struct, kw_only=True):
    """What one replica has done. `completed_at`: since when no file of its log has the bytes; null: it has not
    finished. `remaining`: files and folders that were kept because they are damaged, and may have them. `problem`: why
    the replica states nothing.
    """

    broker: BrokerNumber
    completed_at: Time | None = None
    files: list[ErasedFile] = []
    remaining: list[str] = []
    problem: AnyProblem | UnsetType = UNSET


class Erasure(msgspec.Struct, kw_only=True):
    """The receipt of an erasure. The text that was named is not stored, and not in it.

    `id`: null: the stream had nothing to erase. `messages`: how many were stored. `complete`: all replicas have
    finished.
    """

    name: Name
    id: str | None
    erases: Literal["subject", "key"]
    messages: Count
    requested_at: Time | None
    complete: bool
    replicas: list[ReplicaErasure]


class Segment(msgspec.Struct):
    """A file of the log, which has offsets from `start` to `end`, exclusive. `sealed`: it is complete, and an Arrow IPC
    file. `newest`: time of its newest message; null: not known without reading the file.
    """

    start: Offset
    end: Offset
    bytes: Count
    sealed: bool
    newest: Time | None


class Segments(msgspec.Struct):
    """The files of the leader's log, the newest first. `total`: how many there are."""

    name: Name
    total: Count
    segments: list[Segment]


class ReplicaProgress(msgspec.Struct):
    """How far a replica has copied the log, as the leader states it. `end`: it has all messages below; null: it has
    stated nothing since this leader began. `behind`: how many messages it lacks.
    """

    broker: BrokerNumber
    leads: bool
    in_sync: bool
    end: Offset | None
    behind: Count


class Progress(msgspec.Struct):
    """The replicas of a stream. `end`: of the leader's log; `high_watermark`: what all of them in sync have."""

    name: Name
    end: Offset
    high_watermark: Offset
    replicas: list[ReplicaProgress]


class Led(msgspec.Struct):
    """A stream and its leader."""

    stream: Name
    leader: BrokerNumber


class Replicas(msgspec.Struct):
    """The brokers of the replicas of a stream, the preferred leader first."""

    brokers: Annotated[list[BrokerNumber], Meta(min_length=1, max_length=MAX_REPLICAS)]


class Moving(msgspec.Struct):
    """A stream and the brokers that its replicas move to."""

    stream: Name
    brokers: list[BrokerNumber]


# ---- ranges ----


class OffsetAt(msgspec.Struct):
    """An offset and the time of its message; the high watermark and null, if there is no such message."""

    offset: Offset
    timestamp: Time | None


class Extent(msgspec.Struct):
    """About how many bytes a range takes, and exactly how many messages it has."""

    start: Offset
    end: Offset
    bytes: Count | None
    rows: Count | None


class Split(msgspec.Struct):
    """A part of a range; `urls` of brokers that have it, nearest first."""

    start: Offset
    end: Offset
    rows: Count | None
    bytes: Count | None
    urls: tuple[str, ...]


class AskedRange(msgspec.Struct, forbid_unknown_fields=True):
    """Offsets `[start, end)` of the stream with this id."""

    stream: str
    id: str
    start: int
    end: int
    min_splits: Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_SPLITS})] = 1


class AskedSplits(msgspec.Struct, forbid_unknown_fields=True):
    """As the parameters of `/v1/streams/{name}/splits`, of several streams."""

    ranges: list[AskedRange]
    max_bytes: Annotated[int, Meta(extra_json_schema={"minimum": 1})] | None = None
    max_rows: Annotated[int, Meta(extra_json_schema={"minimum": 1})] | None = None
    read_from: Annotated[str, Meta(extra_json_schema={"enum": ["nearest", "leader", "any"]})] = "nearest"
    rack: str | None = None


class SplitsOfSeveral(msgspec.Struct):
    """Splits by stream. `elsewhere`: streams without a replica here, by the URL of their leader."""

    splits: dict[str, list[Split]]
    elsewhere: dict[str, list[str]]


# ---- cursors and lag ----


class Lag(msgspec.Struct):
    """The messages between an offset and the high watermark. `seconds`: the age of the oldest of them.

    `lost_rows` were deleted before the offset was reached; `beyond_rows`: the offset is so far beyond the end.
    """

    offset: Offset
    rows: Count | None
    bytes: Count | None
    seconds: Annotated[float, Meta(ge=0)] | None
    lost_rows: Count
    beyond_rows: Count
    log_start_offset: Offset
    high_watermark: Offset
    id: str


class Rewound(msgspec.Struct, rename={"from_": "from"}):
    """A cursor was moved back from this offset."""

    from_: Offset
    timestamp: Time


class Sequences(msgspec.Struct):
    """`consumer_seq` counts deliveries. `stream_seq`: of the message; its offset is one less."""

    consumer_seq: Count
    stream_seq: Count


class ConsumerNumbers(msgspec.Struct):
    """As `CONSUMER.INFO` of the JetStream API states them. `num_pending`: messages that are still to be delivered for
    the first time; null if they are not counted within half a second: the next request continues. `num_ack_pending`:
    delivered and not acked, of which `num_redelivered` more than once. `num_waiting`: pull requests that wait for
    messages.
    """

    delivered: Sequences
    ack_floor: Sequences
    num_pending: Count | None
    num_ack_pending: Count
    num_redelivered: Count
    num_waiting: Count


class Cursor(msgspec.Struct):
    """The position of a consumer. `lag` is null if the leader of the stream does not answer. If the name begins with
    `jetstream:`, it is a JetStream consumer, which can only be shown: `timestamp` is that of its last ack, or creation,
    and `jetstream` has its numbers; null if it is not served, or the identity may not read all subjects of the stream.
    `stopped`: it has had a message to read for a minute, and has not moved.
    """

    consumer: CursorName
    stream: Name
    id: str
    offset: Offset
    timestamp: Time
    rewound: Rewound | None
    lag: Lag | UnsetType | None = UNSET
    stopped: bool | UnsetType = UNSET
    jetstream: ConsumerNumbers | UnsetType | None = UNSET


class NewCursor(msgspec.Struct, forbid_unknown_fields=True):
    """The next offset that the consumer has not read. `timestamp`: the time of this position, by default the current
    time. `id`: of the stream. A response to GET may be sent back: its other fields are ignored.
    """

    offset: Offset
    timestamp: str | int | UnsetType = UNSET
    id: str | UnsetType | None = UNSET
    consumer: Name | UnsetType = UNSET
    stream: Name | UnsetType = UNSET
    rewound: Any = UNSET
    lag: Any = UNSET
    stopped: Any = UNSET


class OneOfCursors(msgspec.Struct, forbid_unknown_fields=True):
    """As `NewCursor`. JetStream consumers are refused, with an error that names the call that changes them."""

    consumer: CursorName
    stream: Name
    offset: Offset
    timestamp: str | int | UnsetType = UNSET
    id: str | None = None


class NewCursors(msgspec.Struct, forbid_unknown_fields=True):
    """All are set, or none where one is refused."""

    cursors: Annotated[list[OneOfCursors], Meta(max_length=MAX_CURSORS_AT_ONCE)]


class CursorsSet(msgspec.Struct):
    """`set`: how many."""

    set: Count


# ---- direct appends ----


class StagedPart(msgspec.Struct):
    """The receipt of a part, by which the commit names it; `bytes`: as a log stores its rows."""

    part: Name
    attempt: Count
    rows: Count
    digest: str
    content: str | None
    broker: BrokerNumber | None
    bytes: Count


class Commit(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts of the parts. `on_conflict`: if the batch is not the next one of its producer."""

    parts: list[PartReceipt]
    on_conflict: OnConflict = "fail"


class LastBatch(msgspec.Struct):
    """The batch that a producer committed last, or nulls. `urls`: where its uploads should go."""

    producer: Name
    urls: tuple[str, ...]
    batch: Count | None = None
    start: Offset | None = None
    end: Offset | None = None
    digest: str | None = None


# ---- health ----


class Health(msgspec.Struct):
    """The process is running."""

    status: Literal["alive"]
    version: str


class Readiness(msgspec.Struct):
    """Whether messages are accepted and served; `reason`: why not. With security, the other fields need `monitor`."""

    status: Literal["ready", "not ready"]
    reason: str | None
    streams_with_problems: dict[str, str] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    has_disk_room: bool | UnsetType = UNSET


# ---- security ----

Identity = Annotated[str, Meta(pattern=f"^{IDENTITY_PATTERN}$", max_length=MAX_IDENTITY_CHARS)]
Quota = Annotated[int, Meta(ge=0)] | None


class AccessRule(msgspec.Struct):
    """Permits an action to an identity, to `role:NAME`, or to every identity (`*`)."""

    id: str
    who: str
    action: Action
    stream: str
    subject: str


class NewRule(msgspec.Struct, forbid_unknown_fields=True):
    """`stream`: a pattern of names. `subject`: a NATS wildcard. Both are everything by default."""

    who: str
    action: Action
    stream: str = "*"
    subject: str = ">"


class Quotas(msgspec.Struct):
    """Limits of an identity; null: none. The last three are for the cluster, the others for each broker."""

    connections: Quota
    requests: Quota
    polls: Quota
    requests_per_s: Quota
    bytes_in_per_s: Quota
    bytes_out_per_s: Quota
    streams: Quota
    stored_bytes: Quota
    cursors: Quota


class NewQuotas(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of an identity; what is not given, or null, has its default."""

    connections: Quota = None
    requests: Quota = None
    polls: Quota = None
    requests_per_s: Quota = None
    bytes_in_per_s: Quota = None
    bytes_out_per_s: Quota = None
    streams: Quota = None
    stored_bytes: Quota = None
    cursors: Quota = None


class AllQuotas(msgspec.Struct):
    """Quotas by identity (`*`: of those without one of their own), and the defaults."""

    default: Quotas
    quotas: dict[str, NewQuotas]


class Whoami(msgspec.Struct):
    """The identity of a request, and what it may do. `security`: whether it is enabled in the cluster."""

    identity: str
    security: bool
    token: str | None
    expires: Time | None
    roles: tuple[str, ...]
    rules: list[AccessRule]
    quota: Quotas
    cluster_id: str | None


class NewSession(msgspec.Struct, forbid_unknown_fields=True):
    """A token to sign in with."""

    token: Annotated[str, Meta(max_length=200)]


class SignedIn(msgspec.Struct):
    """`csrf`: requests of the session that change something must have it in the header `Natslog-Csrf`."""

    identity: str
    csrf: str


class SessionState(msgspec.Struct):
    """`needs_token`: this broker needs credentials, and the request had none. `csrf`: empty without a session."""

    needs_token: bool
    identity: str
    csrf: str
    may_monitor: bool
    may_administer: bool


class Token(msgspec.Struct, kw_only=True):
    """A bearer token. `token`: the token itself, in the response to its creation only."""

    id: str
    identity: Identity
    created: Time
    expires: Time | None
    expired: bool
    note: str
    roles: tuple[str, ...]
    token: str | UnsetType = UNSET


class NewToken(msgspec.Struct, forbid_unknown_fields=True):
    """`roles`: the identity gets them, too. `expires`: a duration such as `90d`, or `never`."""

    identity: Identity
    roles: list[Name] = []
    expires: float | str = "365d"
    note: str = ""


class Verdict(msgspec.Struct):
    """Whether an identity may do something to the `subjects` of a stream, and the rule that decides, if one does."""

    identity: str
    roles: tuple[str, ...]
    action: Action
    stream: str
    subjects: tuple[str, ...]
    allowed: bool
    allowed_subjects: tuple[str, ...]
    rule: AccessRule | None


class Roles(msgspec.Struct):
    """The roles of an identity."""

    identity: Identity
    roles: tuple[str, ...]
