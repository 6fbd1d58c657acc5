"""Metrics in the format of Prometheus: read when they are requested, so that they cause no work per message.

Theory of operation. What belongs to the event loop is gathered there, for one request at a time; counters are then
read, and the text is written, in a thread. Series belong to the broker, to a stream that it holds, to a cursor on a
stream that it leads, or to one of at most `MOST_CONSUMERS` JetStream consumers: so their number is bounded.
docs/OPERATIONS.md lists them and states how many there are; a test compares both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector

from natslog.errors import NatslogError, natslog_version
from natslog.http.endpoint import PlainCall
from natslog.http.findings import CODES, of_streams
from natslog.log import StreamLog, fullest_disk
from natslog.model import BrokerId
from natslog.node.broker import Broker
from natslog.node.replicas.consumer_cursors import cursor_of
from natslog.node.replicas.consumer_records import ConsumerPosition
from natslog.node.replicas.lags import CursorLag
from natslog.node.replicas.stream import HostedStream
from natslog.node.threads import in_thread
from natslog.security.limits import Limits
from natslog.subjects import is_internal
from natslog.wire import library

logger = logging.getLogger("natslog.http")

MOST_CONSUMERS = 200
"""JetStream consumers of a broker that have series of their own."""


@dataclass(frozen=True, slots=True)
class ConsumerLags:
    """JetStream consumers: how many each stream has, `single` durable ones, and the `last` one of each stream."""

    counts: Mapping[str, int] = field(default_factory=dict)
    single: Sequence[CursorLag] = ()
    last: Sequence[CursorLag] = ()


def shown_singly(durable: Mapping[str, Sequence[ConsumerPosition]]) -> list[str]:
    """The streams whose durable consumers have series of their own: those with the fewest, as long as they are at
    most `MOST_CONSUMERS` together. So a stream with thousands of consumers displaces no other one, and none of its
    consumers comes and goes with its lag.
    """
    shown, count = [], 0
    for name in sorted(durable, key=lambda name: (len(durable[name]), name)):
        count += len(durable[name])
        if count > MOST_CONSUMERS:
            break
        shown.append(name)
    return shown


def _offset(position: ConsumerPosition) -> int:
    return position.offset


def _gauges(numbers: Mapping[str, tuple[str, float]]) -> Iterator[Metric]:
    """One of each name, with its text and value."""
    for name, (text, value) in numbers.items():
        yield GaugeMetricFamily(name, text, value=value)


class _BrokerCollector:
    """Made in the event loop, and read in a thread.

    Args: `cursors`: those on streams led here, looked up before, as that may read files. `consumers`: JetStream
        consumers of these streams. `requests`: by path. `refused`: how many of them were.
    """

    def __init__(
        self,
        broker: Broker,
        cursors: Sequence[CursorLag],
        consumers: ConsumerLags,
        requests: Mapping[str, int],
        refused: int,
    ) -> None:
        self._broker, self._cursor_lags, self._consumers = broker, cursors, consumers
        self._requests, self._refused = requests, refused
        leaf = broker.leaf
        self._leaf_unsent_bytes = 0 if leaf is None else leaf.unsent_bytes  # here: its buffer belongs to the event loop
        self._is_ready = not broker.stopping and broker.not_ready_because() is None
        self._not_voting = sum(not _votes(broker, number) for number in broker.operations.brokers)
        self._problems: Counter[str] = Counter()
        for found in of_streams(broker, broker.history.dedupe_short):
            self._problems[found.code] += found.count

    def collect(self) -> Iterator[Metric]:
        broker, streams = self._broker, list(self._broker.streams.items())
        info = GaugeMetricFamily(
            "natslog_broker_info", "1; the number of the broker and its version", labels=["broker", "version"]
        )
        info.add_metric([str(broker.config.broker_id), natslog_version()], 1.0)
        yield info
        yield from self._state()
        yield from self._leaf()
        yield from self._disk()
        yield from self._requests_and_events()
        yield from self._cluster()
        yield from self._problems_of_streams()
        yield from self._of_all(streams)
        yield from self._replicas(streams)
        yield from self._gauges(streams)
        yield from self._counters(streams)
        refused = CounterMetricFamily(
            "natslog_messages_refused", "Messages not stored, by reason", labels=["stream", "reason"]
        )
        for name, stream in streams:
            for reason, count in list(stream.stats.refused.items()):
                refused.add_metric([name, reason], count)
        yield refused
        yield from self._cursors()

    def _state(self) -> Iterator[Metric]:
        broker = self._broker
        yield from _gauges(
            {
                "natslog_ready": (
                    "1 while messages are accepted and served; /readyz states the reason if not",
                    float(self._is_ready),
                ),
                "natslog_nats_connected": (
                    "1 while the broker is connected to NATS and the NATS server responds",
                    float(broker.link.is_reachable),
                ),
                "natslog_uncommitted_bytes": (
                    "Bytes of messages that were received and are not committed yet",
                    broker.memory.used_bytes,
                ),
                "natslog_staged_bytes": (
                    "Bytes of staged direct appends that are not committed yet",
                    broker.staging.staged_bytes,
                ),
            }
        )
        yield CounterMetricFamily(
            "natslog_nats_connections_lost",
            "Connections to NATS that were lost; each loss may lose messages that were published without acks",
            value=broker.link.lost,
        )
        if (tls := broker.cluster.tls) is not None:
            text = "When the TLS certificate expires, in seconds since 1970"
            yield GaugeMetricFamily("natslog_tls_certificate_expires_seconds", text, value=tls.expires_s)

    def _disk(self) -> Iterator[Metric]:
        broker = self._broker
        disk, store = fullest_disk(broker.data_path), broker.hosting.services.store
        numbers: dict[str, tuple[str, float]] = {
            "natslog_disk_free_bytes": (
                "Free bytes on the disk of the data folder; where it is on several disks, on the fullest one",
                disk.free_bytes,
            ),
            "natslog_disk_size_bytes": ("Size of that disk", disk.size_bytes),
            "natslog_disk_min_free_bytes": (
                "Free bytes below which messages are refused",
                broker.config.min_free_bytes,
            ),
            "natslog_disk_full": (
                "1 from a refusal because of a full disk on, until there is room again",
                float(not broker.hosting.around.has_disk_room),
            ),
            "natslog_store_bytes": (
                "Bytes of all streams on this broker, deleted ones included",
                store.used_bytes,
            ),
        }
        if store.max_bytes is not None:
            numbers["natslog_store_max_bytes"] = ("Most bytes that all streams may take", store.max_bytes)
        yield from _gauges(numbers)

    def _requests_and_events(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("natslog_http_requests", "HTTP requests, by path of the API", labels=["path"])
        for path, count in self._requests.items():
            requests.add_metric([path], count)
        yield requests
        yield CounterMetricFamily(
            "natslog_http_requests_refused",
            "HTTP requests that were refused because of their credentials, the access rules or a quota",
            value=self._refused,
        )
        yield CounterMetricFamily(
            "natslog_activity_dropped",
            "Events that are missing in __activity, because too many waited to be stored there",
            value=self._broker.activity.dropped,
        )
        text = "Events of this broker that wait to be stored"
        yield GaugeMetricFamily("natslog_activity_waiting", text, value=self._broker.activity.waiting)

    def _cursors(self) -> Iterator[Metric]:
        """There are at most `MOST_CURSORS` in a cluster, and `MOST_CONSUMERS` of a broker: so many series at most."""
        gauges = {
            "rows": "Messages between a cursor and the high watermark",
            "bytes": "Stored bytes between a cursor and the high watermark",
            "seconds": "Age of the oldest message at or after a cursor",
        }
        for unit, text in gauges.items():
            family = GaugeMetricFamily(f"natslog_cursor_lag_{unit}", text, labels=["consumer", "stream"])
            for cursor, lag in (*self._cursor_lags, *self._consumers.single):
                family.add_metric([cursor.consumer, cursor.stream], lag[unit])
            yield family
            last = GaugeMetricFamily(
                f"natslog_stream_consumer_lag_{unit}",
                f"{text}: of the durable JetStream consumer of a stream that is furthest behind",
                labels=["stream"],
            )
            for cursor, lag in self._consumers.last:
                last.add_metric([cursor.stream], lag[unit])
            yield last
        counts = GaugeMetricFamily("natslog_stream_consumers", "JetStream consumers of a stream", labels=["stream"])
        for name, count in self._consumers.counts.items():
            counts.add_metric([name], count)
        yield counts

    def _leaf(self) -> Iterator[Metric]:
        leaf = self._broker.leaf
        if leaf is None:
            return
        yield GaugeMetricFamily(
            "natslog_nats_leaf_connected",
            "1 while the leafnode connection to NATS is up and the NATS server responds",
            value=float(leaf.is_reachable),
        )
        yield CounterMetricFamily(
            "natslog_nats_leaf_connections",
            "Leafnode connections to NATS that were made: each one after the first replaces one that was lost",
            value=leaf.connections,
        )
        yield GaugeMetricFamily(
            "natslog_nats_leaf_unsent_bytes",
            "Bytes for JetStream consumers that wait because the NATS server accepts less than is sent",
            value=self._leaf_unsent_bytes,
        )

    def _cluster(self) -> Iterator[Metric]:
        group, hosting = self._broker.cluster.group, self._broker.hosting
        numbers: dict[str, tuple[str, float]] = {
            "natslog_kernels_compiled": (
                "1 where compiled kernels process messages; 0: slow",
                float(library.library() is not None),
            ),
            "natslog_metadata_term": ("Raft term", group.raft.term),
            "natslog_metadata_leader": ("1 on the metadata leader", float(group.is_leader)),
            "natslog_metadata_commit_index": ("Committed metadata entries", group.raft.commit),
            "natslog_metadata_applied_index": ("Applied metadata entries", group.raft.applied),
            "natslog_metadata_session": ("1 while a metadata leader is reachable", float(self._broker.has_session())),
            "natslog_brokers": ("Brokers of the cluster", len(group.state.brokers)),
            "natslog_brokers_not_voting": ("Brokers that do not vote in the metadata yet", self._not_voting),
            "natslog_jetstream_conflict": (
                "1 while another cluster serves the JetStream API in the same NATS account",
                float(self._broker.jetstream == "conflict"),
            ),
            "natslog_links_up": (
                "Brokers to which this broker has a link",
                sum(link.is_up for link in self._broker.cluster.links.all),
            ),
        }
        yield from _gauges(numbers)
        yield CounterMetricFamily(
            "natslog_metadata_elections", "Times this broker became metadata leader", value=group.elections
        )
        yield CounterMetricFamily(
            "natslog_leaderships", "Times this broker began to lead a stream", value=hosting.leaders_appointed
        )
        fetched = CounterMetricFamily("natslog_fetched_bytes", "Bytes copied from a leader", labels=["leader"])
        apart = GaugeMetricFamily(
            "natslog_clock_apart_seconds", "Seconds by which another broker's wall clock is ahead", labels=["broker"]
        )
        for number, seconds in list(self._broker.cluster.clock.apart_s.items()):
            apart.add_metric([str(number)], seconds)
        yield apart
        for leader, fetcher in list(hosting.fetchers.items()):
            fetched.add_metric([str(leader)], fetcher.fetched_bytes)
        yield fetched

    def _problems_of_streams(self) -> Iterator[Metric]:
        records = list(self._broker.state.streams.values())
        yield GaugeMetricFamily(
            "natslog_streams",
            "Streams of the cluster, without internal ones",
            value=sum(not is_internal(record.name) for record in records),
        )
        family = GaugeMetricFamily(
            "natslog_streams_with_problem",
            "Streams of the cluster with this problem, as far as this broker can state it",
            labels=["code"],
        )
        for code in CODES:
            if code.startswith("stream_"):
                family.add_metric([code], self._problems[code])
        yield family

    def _of_all(self, streams: Sequence[tuple[str, HostedStream]]) -> Iterator[Metric]:
        me = self._broker.cluster.me
        yield GaugeMetricFamily("natslog_replicas", "Replicas on this broker", value=len(streams))
        yield GaugeMetricFamily(
            "natslog_replicas_not_in_sync",
            "Replicas on this broker that are not in sync with their leader",
            value=sum(me not in stream.record.isr for _, stream in streams),
        )
        latency = self._broker.hosting.services.commit_latency
        yield HistogramMetricFamily(
            "natslog_commit_latency_seconds",
            "From the first message of a commit until all in-sync replicas have stored it, and it is acked",
            buckets=latency.buckets(),
            sum_value=latency.sum_s,
        )

    @staticmethod
    def _replicas(streams: list[tuple[str, HostedStream]]) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[HostedStream], float]]] = {
            "leader": ("1 if this broker leads the stream", lambda stream: float(stream.is_leading)),
            "leader_epoch": ("Leader epoch", lambda stream: stream.record.leader_epoch),
            "time_behind_seconds": (
                "Seconds by which stream time is behind the wall clock of this machine; 0 if another broker "
                "leads the stream",
                lambda stream: stream.ingest.stream_time.behind_s() if stream.ingest is not None else 0.0,
            ),
            "dedupe_window_seconds": (
                "Seconds for which message ids are recognised now, which is less than the deduplication window if too "
                "many come; 0 if another broker leads the stream",
                lambda stream: stream.ingest.dedupe_window_s if stream.ingest is not None else 0.0,
            ),
            "isr_size": ("Replicas in sync", lambda stream: len(stream.record.isr)),
            "under_replicated": (
                "1 if a replica is not in the ISR",
                lambda stream: float(len(stream.record.isr) < len(stream.record.replicas)),
            ),
            "below_min_isr": (
                "1 if writes are refused because fewer than min_isr replicas are in sync",
                lambda stream: float(len(stream.record.isr) < stream.record.settings.min_isr),
            ),
            "standing_by": (
                "1 while this follower receives the messages of the stream, too (standby)",
                lambda stream: float(stream.driver.steps.standby.is_subscribed),
            ),
            "damaged": (
                "1 while a part of this replica is damaged and not yet repaired",
                lambda stream: float(stream.damage is not None),
            ),
            "high_watermark_lag": (
                "Messages on the disk of this broker that are not confirmed as committed",
                lambda stream: stream.log.log_end_offset - stream.log.high_watermark if stream.log else 0,
            ),
        }
        for name, (text, read) in gauges.items():
            family = GaugeMetricFamily(f"natslog_stream_{name}", text, labels=["stream"])
            for stream_name, stream in streams:
                family.add_metric([stream_name], read(stream))
            yield family

    @staticmethod
    def _gauges(streams: list[tuple[str, HostedStream]]) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[StreamLog], float]]] = {
            "log_start_offset": ("First offset of the log", lambda log: log.first_readable_offset),
            "high_watermark": ("Offset after the last committed message", lambda log: log.high_watermark),
            "log_bytes": ("Bytes on disk", lambda log: log.chain.size_bytes),
            "segments": ("Files on disk", lambda log: len(log.chain.segments)),
            "failed": ("1 if the stream does not accept writes", lambda log: float(log.failure is not None)),
            "quarantined_ranges": ("Damaged ranges found", lambda log: len(log.chain.damages)),
            "scrubbed_seconds": (
                "When the last pass of scrubbing was completed, in seconds since 1970; 0: never",
                lambda log: log.scrub.completed_us / 1e6,
            ),
        }
        for name, (text, read) in gauges.items():
            family = GaugeMetricFamily(f"natslog_stream_{name}", text, labels=["stream"])
            for stream_name, stream in streams:
                if stream.log is not None:
                    family.add_metric([stream_name], read(stream.log))
                elif name == "failed":
                    family.add_metric([stream_name], 1.0)
            yield family

    @staticmethod
    def _counters(streams: list[tuple[str, HostedStream]]) -> Iterator[Metric]:
        counters = {
            "messages_received": ("Messages received from NATS", "received"),
            "received_bytes": ("Bytes received from NATS", "received_bytes"),
            "messages_committed": ("Messages on stable storage", "committed"),
            "messages_duplicate": ("Duplicate messages, which were already stored", "duplicates"),
            "commits": ("Group commits (one fsync each)", "commits"),
            "commit_seconds": ("Time spent in commits", "commit_seconds"),
            "runs": ("Direct appends stored", "runs"),
            "runs_duplicate": ("Duplicate direct appends, which were already stored", "run_duplicates"),
            "run_seconds": ("Time spent in storing direct appends", "run_seconds"),
            "unread_envelopes": ("Messages that began as an envelope and were stored as they are", "unread_envelopes"),
            "standby_stored": ("Messages stored at a failover, which only followers had received", "standby_stored"),
            "standby_dropped": ("Messages for which followers that stand by had no memory", "standby_dropped"),
            "acks_unsent": ("Acks that could not be sent because NATS was not connected", "acks_unsent"),
        }
        for name, (text, attribute) in counters.items():
            family = CounterMetricFamily(f"natslog_{name}", text, labels=["stream"])
            for stream_name, stream in streams:
                family.add_metric([stream_name], getattr(stream.stats, attribute))
            yield family
        sent = CounterMetricFamily("natslog_sent_bytes", "Bytes of messages sent to readers", labels=["stream"])
        for stream_name, stream in streams:
            sent.add_metric([stream_name], stream.sent_bytes)
        yield sent
        scrubbed = CounterMetricFamily("natslog_scrub_bytes", "Stored bytes read back by scrubbing", labels=["stream"])
        damaged = CounterMetricFamily(
            "natslog_scrub_damaged", "Damaged ranges that scrubbing has found", labels=["stream"]
        )
        repaired = CounterMetricFamily(
            "natslog_scrub_repaired", "Damaged ranges that were repaired from another replica", labels=["stream"]
        )
        lost = CounterMetricFamily(
            "natslog_lost_offsets", "Offsets that were damaged, and accepted as lost", labels=["stream"]
        )
        for stream_name, stream in streams:
            lost.add_metric([stream_name], stream.losses.accepted)
            repaired.add_metric([stream_name], stream.scrub_repaired)
            scrubbed.add_metric([stream_name], stream.scrubbed_bytes)
            damaged.add_metric([stream_name], stream.scrub_damaged)
        yield scrubbed
        yield damaged
        yield repaired
        yield lost


def _votes(broker: Broker, number: BrokerId) -> bool:
    member = broker.operations.member(number)
    return member is not None and member.is_voter


class Scrapes:
    """The text of the metrics, made in a thread, once for all who ask while an earlier one is being made."""

    def __init__(self, broker: Broker, requests: Mapping[str, int], limits: Limits) -> None:
        self._broker, self._requests, self._limits = broker, requests, limits
        self._making = asyncio.Lock()
        self._begun_s, self._text = 0.0, b""

    async def text(self) -> bytes:
        """As of now."""
        asked_s, broker = time.monotonic(), self._broker
        async with self._making:
            if self._begun_s < asked_s:
                begun_s = time.monotonic()
                cursors = [] if broker.stopping else await self._cursors()
                registry = CollectorRegistry()
                consumers = ConsumerLags() if broker.stopping else await self._consumers()
                requests, refused = dict(self._requests), self._limits.refused
                registry.register(_BrokerCollector(broker, cursors, consumers, requests, refused))
                ProcessCollector(registry=registry)
                self._text = await in_thread(broker.readers, generate_latest, registry)
                self._begun_s = begun_s
            return self._text

    async def _cursors(self) -> list[CursorLag]:
        """None while the leader of the cursors does not answer."""
        broker = self._broker
        try:
            return await broker.lags.of_cursors_led_here(await broker.cursors.find(within_s=0.0))
        except NatslogError as error:
            logger.debug("the metrics do not include cursors: %s", error.message)
            return []

    async def _consumers(self) -> ConsumerLags:
        """Of the streams that are led here."""
        broker = self._broker
        records, found = broker.state.streams, broker.consumer_cursors.led_here()
        durable = {
            name: [one for one in positions if one.is_durable] for name, positions in found.items() if name in records
        }
        single = [cursor_of(records[name], one) for name in shown_singly(durable) for one in durable[name]]
        last = [cursor_of(records[name], min(ones, key=_offset)) for name, ones in durable.items() if ones]
        return ConsumerLags(
            {name: len(stream.consumers) for name in found if (stream := broker.streams.get(name)) is not None},
            await broker.lags.of_cursors_led_here(single),
            await broker.lags.of_cursors_led_here(last),
        )


SCRAPES = web.AppKey("scrapes", Scrapes)


async def metrics(call: PlainCall) -> web.Response:
    """Prometheus metrics"""
    return web.Response(body=await call.request.app[SCRAPES].text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
