"""The cluster and its brokers: state, statistics, changes by operators, health."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from natslog.http.shapes.common import AnyProblem, BrokerNumber, Count, Name, NameText, Positive, Time
from natslog.log_events import LEVELS
from natslog.model import MAX_REPLICAS


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

    EXPECTED: ClassVar = 'give the URL of the new broker: {"url": "http://host:9292"}'

    url: str


class Draining(msgspec.Struct):
    """Whether replicas and leaderships of the broker move to others."""

    draining: bool


class Transfer(msgspec.Struct):
    """The number of the new leader."""

    to: BrokerNumber


class NewLogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """The level of a logger, or of all, of a broker or of all. `default`: what applied when the broker was started."""

    EXPECTED: ClassVar = "state a level, and optionally a logger and a broker"

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


# ---- parameters ----


class Events(msgspec.Struct, frozen=True):
    """Of `/v1/live`."""

    events: Annotated[Positive | None, Meta(description="end after so many")] = None


class HistoryOf(msgspec.Struct, frozen=True):
    """Whose last hour."""

    stream: Annotated[NameText | None, Meta(description="name of a stream; without it, of the brokers")] = None


class PlanFor(msgspec.Struct, frozen=True):
    """What a plan is for."""

    drain: Annotated[BrokerNumber | None, Meta(description="number of the broker")] = None


class BrokerPath(msgspec.Struct, frozen=True):
    """The number of a broker."""

    id: BrokerNumber


class RemovedBroker(BrokerPath, frozen=True):
    """A broker, and how it is removed."""

    force: Annotated[bool, Meta(description="true: the broker is permanently lost")] = False
