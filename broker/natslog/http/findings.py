"""What is wrong in a cluster, where, and what to do: a list for people. Empty if the cluster is healthy.

The codes are those of the table in docs/OPERATIONS.md; a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from natslog.http.shapes import cluster as shapes
from natslog.http.streams import problem_of
from natslog.model import BrokerId, StreamRecord
from natslog.node.broker import Broker
from natslog.subjects import is_internal
from natslog.wire.message_ids import MAX_IDS

_NAMED = 10
_SOON_S = 24 * 3600.0
_CLOCK_S = 30.0

Level = Literal["error", "warning"]

CODES: dict[str, Level] = {
    "metadata_unavailable": "error",
    "broker_down": "error",
    "broker_not_ready": "error",
    "broker_not_voter": "warning",
    "broker_not_compiled": "warning",
    "broker_silent": "warning",
    "broker_clock": "warning",
    "disk_full": "error",
    "disk_full_soon": "warning",
    "jetstream_conflict": "warning",
    "nats_leaf_down": "error",
    "consumer_stopped": "warning",
    "stream_dedupe_short": "warning",
    "stream_unavailable": "error",
    "stream_refuses_writes": "error",
    "stream_under_replicated": "warning",
}


def _finding(code: str, where: str, what: str, remedy: str) -> shapes.Finding:
    return shapes.Finding(code, CODES[code], where, what, remedy)


def findings(
    broker: Broker,
    cluster: shapes.Cluster,
    stated: Sequence[shapes.BrokerStats],
    dedupe_short: Mapping[str, float],
    stopped: Mapping[str, Sequence[str]],
) -> list[shapes.Finding]:
    """Errors first. Args: `dedupe_short`, `stopped`: as `History.stats` has them, of all brokers."""
    found = [
        *_of_cluster(cluster),
        *_of_brokers(cluster, stated, broker.config.min_free_bytes),
        *of_streams(broker, dedupe_short),
        *_of_consumers(stopped),
    ]
    return sorted(found, key=lambda one: one.level)


def _of_cluster(cluster: shapes.Cluster) -> Iterator[shapes.Finding]:
    if not cluster.is_current:
        yield _finding(
            "metadata_unavailable",
            "cluster",
            "The metadata is unavailable, because no majority of the brokers is connected. Streams cannot be changed, "
            "and no new leaders are chosen.",
            "Start the missing brokers.",
        )
    if cluster.jetstream == "conflict":
        yield _finding(
            "jetstream_conflict",
            "cluster",
            "Another natslog cluster serves the JetStream API in the same NATS account, so this one does not.",
            'Use another NATS account, or set jetstream = "off" in one of the clusters.',
        )
    if cluster.nats_leaf == "down":
        yield _finding(
            "nats_leaf_down",
            "cluster",
            f"The leafnode connection to NATS is down, so JetStream consumers get no messages: "
            f"{cluster.nats_leaf_problem or 'it is being connected'}",
            "Check the leafnodes block of the NATS server and the setting nats_leaf_url.",
        )


def _of_brokers(
    cluster: shapes.Cluster, stated: Sequence[shapes.BrokerStats], min_free_bytes: int
) -> Iterator[shapes.Finding]:
    stats_of = {stats.id: stats for stats in stated}
    for one in cluster.brokers:
        where = f"broker {one.id}"
        if not one.alive:
            why = f": {one.problem['message']}" if isinstance(one.problem, dict) else "."
            yield _finding(
                "broker_down",
                where,
                f"Broker {one.id} at {one.url} is down{why}",
                f"Start broker {one.id}, or correct what the reason names. If its disk is lost: natslog cluster remove "
                f"{one.id} --force, and add a new broker.",
            )
            continue
        if one.role != "voter":
            yield _finding(
                "broker_not_voter",
                where,
                f"Broker {one.id} does not vote yet: its role is {one.role}.",
                "Wait until it has received the metadata; its log states why if it does not.",
            )
        if abs(one.clock_apart_s) > _CLOCK_S:
            yield _finding(
                "broker_clock",
                where,
                f"The clock of broker {one.id} differs by {one.clock_apart_s:.0f} s from that of this broker.",
                "Synchronise the clocks of the machines (NTP).",
            )
        if (stats := stats_of.get(one.id)) is None:
            yield _finding(
                "broker_silent",
                where,
                f"Broker {one.id} is connected, and does not state its numbers: they are missing here.",
                "Upgrade it if it runs a version before; otherwise look at its log, and at the load of its machine.",
            )
            continue
        yield from _of_stats(where, one.id, stats, min_free_bytes)


def _of_stats(where: str, number: int, stats: shapes.BrokerStats, min_free_bytes: int) -> Iterator[shapes.Finding]:
    """What a broker states of itself."""
    if stats.problem is not None:
        yield _finding(
            "broker_not_ready",
            where,
            f"Broker {number} is not ready: {stats.problem}",
            "Correct what the reason names; the log of the broker has more.",
        )
    if stats.kernels_problem is not None:
        yield _finding(
            "broker_not_compiled",
            where,
            f"Broker {number} processes messages slowly, because it uses no compiled kernels: {stats.kernels_problem}.",
            "Unset NATSLOG_KERNELS_FILE where it is set. Otherwise install a wheel of natslog for its machine "
            "(in a checkout: make install), and restart the broker.",
        )
    if stats.disk_free_bytes < min_free_bytes or not stats.has_disk_room:
        yield _finding(
            "disk_full",
            where,
            f"The disk of broker {number} is full: {stats.disk_free_bytes / 2**20:.1f} MiB are free, and it keeps "
            f"{min_free_bytes / 2**20:.1f} MiB. It accepts no messages; streams have other leaders where others "
            "are in sync.",
            "Free space on that disk, delete streams, or lower retention limits; it continues automatically.",
        )
    elif stats.disk_full_s is not None and stats.disk_full_s < _SOON_S:
        yield _finding(
            "disk_full_soon",
            where,
            f"The disk of broker {number} is full in {_spoken(stats.disk_full_s)}, if it is filled as in the last "
            "hour.",
            "Free space on that disk, lower the retention limits of large streams, or move replicas to another broker.",
        )


def _spoken(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{max(1, round(seconds / 60))} minutes"


def _of_consumers(stopped: Mapping[str, Sequence[str]]) -> Iterator[shapes.Finding]:
    if names := [f"{consumer} on {stream}" for stream in sorted(stopped) for consumer in sorted(stopped[stream])]:
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        found = _finding(
            "consumer_stopped",
            f"consumer {names[0]}" if len(names) == 1 else f"{len(names):,} consumers",
            "It has messages to read, and has not moved for a minute."
            if len(names) == 1
            else f"They have messages to read, and have not moved for a minute: {', '.join(names[:_NAMED])}{more}.",
            "Check that their programs are running, what they log, and whether they are paused. Positions that are no "
            "longer used are deleted with natslog cursor rm CONSUMER STREAM; jetstream:CONSUMER with nats consumer rm.",
        )
        found.count, found.streams = len(names), sorted(stopped)[:_NAMED]
        yield found


@dataclass
class _Same:
    """Streams with the same problem."""

    code: str
    what: Callable[[int], str]
    remedy: str
    names: list[str] = field(default_factory=list)

    def shown(self) -> shapes.Finding:
        count = len(self.names)
        found = _finding(self.code, f"stream {self.names[0]}" if count == 1 else f"{count:,} streams", "", self.remedy)
        found.what, found.count, found.streams = self.what(count), count, sorted(self.names)[:_NAMED]
        return found


def of_streams(broker: Broker, dedupe_short: Mapping[str, float]) -> Iterator[shapes.Finding]:
    """Of all streams that are not internal, as far as this broker and what others stated can tell."""
    same: dict[tuple[str, str], _Same] = {}
    node = broker.cluster
    alive = {one for one in broker.state.brokers if node.is_connected(one)}
    for record in broker.state.streams.values():
        if is_internal(record.name):
            continue
        problem = _problem(broker, record, alive) or _short_window(record, dedupe_short.get(record.name))
        if problem is not None:
            same.setdefault((problem.code, problem.remedy), problem).names.append(record.name)
    for one in same.values():
        yield one.shown()


def _problem(broker: Broker, record: StreamRecord, alive: Set[BrokerId]) -> _Same | None:
    in_sync, replicas, min_isr = len(record.isr), len(record.replicas), record.settings.min_isr
    hosted = broker.streams.get(record.name)
    has_no_leader = record.leader is None or not any(one in alive for one in record.isr)
    if has_no_leader or (hosted is not None and hosted.problem is not None):
        if record.import_state == "importing":  # which may follow the original for days
            return None
        problem: dict[str, Any] = problem_of(broker, record)
        return _Same(
            "stream_unavailable",
            lambda count: str(problem["message"]) if count == 1 else f"{count:,} streams have no available leader.",
            "Start the brokers that hold its replicas; natslog cluster status names them."
            if has_no_leader
            else "Correct what the reason names; natslog stream info shows it.",
        )
    if in_sync < min_isr:
        return _Same(
            "stream_refuses_writes",
            lambda count: (
                f"{in_sync} of {replicas} replicas are in sync, and min_isr is {min_isr}: writes are refused."
                if count == 1
                else f"{count:,} streams have fewer replicas in sync than min_isr: writes are refused."
            ),
            "Start the missing brokers; writes resume by themselves.",
        )
    if in_sync < replicas:
        return _Same(
            "stream_under_replicated",
            lambda count: (
                f"{in_sync} of {replicas} replicas are in sync."
                if count == 1
                else f"{count:,} streams have replicas that are not in sync."
            ),
            "Start the missing brokers, or wait until they have caught up.",
        )
    return None


def _short_window(record: StreamRecord, known_s: float | None) -> _Same | None:
    """Args: `known_s`: for how long message ids are recognised, if that is less than configured."""
    if known_s is None:
        return None
    return _Same(
        "stream_dedupe_short",
        lambda count: (
            f"Message ids are recognised for {known_s:.1f} s instead of {record.settings.dedupe_window_s:g} s: more "
            f"than {MAX_IDS:,} came within that time, or some cannot be read."
            if count == 1
            else f"{count:,} streams recognise message ids for less time than configured."
        ),
        "Repeat messages sooner than that, publish rows in envelopes (one id for many rows), or divide the "
        "subjects among several streams.",
    )
