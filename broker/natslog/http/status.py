"""Is it alive, can it serve, how is it doing: health, readiness, cluster, Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector

from natslog.http.context import BROKER, broker_of, query
from natslog.log import StreamLog, free_bytes
from natslog.node.broker import Broker
from natslog.node.stream import HostedStream

routes = web.RouteTableDef()


def natslog_version() -> str:
    try:
        return version("natslog")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


@routes.get("/healthz")
async def healthz(request: web.Request) -> web.Response:
    """200 while the process runs its event loop."""
    return web.json_response({"status": "alive", "version": natslog_version()})


@routes.get("/readyz")
async def readyz(request: web.Request) -> web.Response:
    """200 when messages are taken and served; 503 with the reason otherwise. Streams with problems are named."""
    broker = request.app[BROKER]
    reason = broker.not_ready_because()
    troubled = {
        name: problem.message
        for name, stream in broker.streams.items()
        if (problem := stream.problem or (stream.log.failure if stream.log else None)) is not None
    }
    body = {"status": "ready" if reason is None else "not ready", "reason": reason, "streams_with_problems": troubled}
    return web.json_response(body, status=200 if reason is None else 503)


@routes.get("/v1/cluster")
async def cluster(request: web.Request) -> web.Response:
    query(request)
    broker = broker_of(request)
    state = broker.metadata.state
    brokers = [
        {"id": known.id, "url": known.url, "rack": known.rack, "alive": True} for known in state.brokers.values()
    ]
    body = {
        "cluster_id": state.cluster_id,
        "metadata_leader": broker.config.broker_id,
        "brokers": brokers,
        "version": natslog_version(),
    }
    return web.json_response(body)


class _BrokerCollector:
    """Reads the broker's own counters when asked: nothing is done per message for a metric."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        broker = self._broker
        yield GaugeMetricFamily("natslog_nats_connected", "1 while connected to NATS", value=float(broker.link.is_up))
        yield GaugeMetricFamily(
            "natslog_uncommitted_bytes", "Bytes of messages received and not committed", value=broker.memory.used_bytes
        )
        yield GaugeMetricFamily(
            "natslog_disk_free_bytes", "Room left on the data folder's disk", value=free_bytes(broker.data_path)
        )
        streams = list(broker.streams.items())
        yield from self._gauges(streams)
        yield from self._counters(streams)
        refused = CounterMetricFamily(
            "natslog_messages_refused", "Messages not stored, by reason", labels=["stream", "reason"]
        )
        for name, stream in streams:
            for reason, count in stream.ingest.stats.refused.items() if stream.ingest else ():
                refused.add_metric([name, reason], count)
        yield refused

    @staticmethod
    def _gauges(streams: list[tuple[str, HostedStream]]) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[StreamLog], float]]] = {
            "log_start_offset": ("First offset kept", lambda log: log.log_start_offset),
            "high_watermark": ("Offset after the last committed message", lambda log: log.high_watermark),
            "log_bytes": ("Bytes on disk", lambda log: log.chain.size_bytes),
            "segments": ("Files on disk", lambda log: len(log.chain.segments)),
            "failed": ("1 where the stream takes no writes", lambda log: float(log.failure is not None)),
            "quarantined_ranges": ("Damaged ranges found", lambda log: len(log.chain.damages)),
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
            "messages_duplicate": ("Messages that were stored before", "duplicates"),
            "commits": ("Group commits (one fsync each)", "commits"),
            "commit_seconds": ("Time spent in commits", "commit_seconds"),
            "acks_unsent": ("Acks that could not be sent because NATS was gone", "acks_unsent"),
        }
        for name, (text, attribute) in counters.items():
            family = CounterMetricFamily(f"natslog_{name}", text, labels=["stream"])
            for stream_name, stream in streams:
                if stream.ingest is not None:
                    family.add_metric([stream_name], getattr(stream.ingest.stats, attribute))
            yield family


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    registry = CollectorRegistry()
    registry.register(_BrokerCollector(request.app[BROKER]))
    ProcessCollector(registry=registry)
    return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
