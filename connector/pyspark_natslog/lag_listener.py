"""Reports how far queries are behind, in the log and to Prometheus, as a listener of the Spark session.

    listener = LagListener()
    spark.streams.addListener(listener)
    listener.start_http_server(9400)

Theory of operation. The source reports its lag in each query's progress (`latestOffset`). Spark sends every progress to
the listener, which stores the newest of each query. Gauges are made from these at each scrape by Prometheus. A query's
series end with the query. Progress of other sources is ignored.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from natslog.errors import ConfigError
from pyspark_natslog.source.lag import StreamLag

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryProgress,
    )

logger = logging.getLogger("pyspark_natslog.lag")

_LAGS = {
    "rows": "Messages committed and not in the query's last batch, or one before it",
    "bytes": "Stored bytes of these messages",
    "seconds": "Age of the oldest of them",
}
_LOST = "Messages that were removed or lost before the query read them, since it was started"
_RATES = {
    "input_rows_per_second": "Rows that arrive, as Spark reports them",
    "processed_rows_per_second": "Rows that are processed, as Spark reports them",
    "batch_duration_seconds": "How long the last micro-batch took",
}


@dataclass(frozen=True, slots=True)
class QueryLag:
    """The newest progress of a query. `name` is its id where it has no name."""

    name: str
    run_id: str
    batch: int
    streams: Mapping[str, StreamLag]
    input_rows_per_second: float
    processed_rows_per_second: float
    batch_duration_seconds: float


class LagListener(StreamingQueryListener):
    """For `spark.streams.addListener`, in Spark classic and Spark Connect.

    Args:
        log_every_s: a query's lag is logged at most so often (and first at once), at level INFO on the logger
            `pyspark_natslog.lag`; None: never. Each record has `query`, `stream`, `rows_behind`, `bytes_behind` and
            `seconds_behind` as attributes too.
        registry: of prometheus_client, to be registered with; without one, `start_http_server` makes its own.
        clock: seconds of a monotonic clock.

    Raises:
        ConfigError: a registry is given, and prometheus_client is not installed.
    """

    def __init__(
        self,
        *,
        log_every_s: float | None = 30.0,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_every_s, self._clock = log_every_s, clock
        self._lock = threading.Lock()
        self._queries: dict[str, QueryLag] = {}
        self._logged_s: dict[str, float] = {}
        self._server: Any = None
        self._registry = registry
        if registry is not None:
            _prometheus()
            registry.register(_Collector(self))

    def queries(self) -> list[QueryLag]:
        """The newest progress of every running query."""
        with self._lock:
            return list(self._queries.values())

    # ---- Spark calls these on a thread of its own ----

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """There is no progress yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        lag = query_lag(event.progress)
        if lag is None:
            return
        with self._lock:
            before = self._queries.get(lag.run_id)
            self._queries[lag.run_id] = lag
        self._warn_of_losses(before, lag)
        self._log(lag)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """No messages arrived: the lag is unchanged, and the rates are 0."""
        with self._lock:
            known = self._queries.get(str(event.runId))
            if known is not None:
                self._queries[known.run_id] = replace(known, input_rows_per_second=0.0, processed_rows_per_second=0.0)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with self._lock:
            self._queries.pop(str(event.runId), None)
            self._logged_s.pop(str(event.runId), None)

    def _warn_of_losses(self, before: QueryLag | None, lag: QueryLag) -> None:
        for stream, behind in lag.streams.items():
            known = before.streams.get(stream) if before is not None else None
            if behind.lost != (0 if known is None else known.lost):
                shown = "an unknown number of" if behind.lost is None else f"{behind.lost:,}"
                logger.warning("query %s has lost %s rows of stream %s", lag.name, shown, stream)

    def _log(self, lag: QueryLag) -> None:
        now_s, last_s = self._clock(), self._logged_s.get(lag.run_id)
        if self._log_every_s is None or (last_s is not None and now_s - last_s < self._log_every_s):
            return
        self._logged_s[lag.run_id] = now_s
        for stream, behind in lag.streams.items():
            facts = {
                "query": lag.name,
                "stream": stream,
                "rows_behind": behind.rows,
                "bytes_behind": behind.bytes,
                "seconds_behind": behind.seconds,
            }
            text = " ".join(f"{name}={'unknown' if value is None else value}" for name, value in facts.items())
            logger.info("%s batch=%d", text, lag.batch, extra=facts)

    # ---- Prometheus ----

    def start_http_server(self, port: int, host: str = "127.0.0.1") -> int:
        """Serves `/metrics` until `close`; returns the port (useful where 0 asked for any free one).

        Raises:
            ConfigError: the port is taken, or prometheus_client is not installed.
        """
        prometheus = _prometheus()
        if self._registry is None:
            self._registry = prometheus.CollectorRegistry()
            self._registry.register(_Collector(self))
        if self._server is not None:
            raise ConfigError("this listener already serves metrics: call close() first", port=port)
        try:
            self._server, _ = prometheus.start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "another program uses it: choose another port" if taken else str(error)
            raise ConfigError(f"cannot serve lag metrics on {host}, port {port}: {why}", port=port) from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Stops the HTTP server, if there is one."""
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()


def query_lag(progress: StreamingQueryProgress) -> QueryLag | None:
    """The lag of natslog streams in a progress; None if the query reads none, or does not report its lag."""
    streams: dict[str, StreamLag] = {}
    for source in progress.sources:
        streams |= _stream_lags(source.latestOffset)
    if not streams:
        return None
    return QueryLag(
        name=progress.name or str(progress.id),
        run_id=str(progress.runId),
        batch=progress.batchId,
        streams=streams,
        input_rows_per_second=_finite(progress.inputRowsPerSecond),
        processed_rows_per_second=_finite(progress.processedRowsPerSecond),
        batch_duration_seconds=progress.batchDuration / 1000,
    )


def _stream_lags(latest_offset: str) -> dict[str, StreamLag]:
    """Of one source; other sources have offsets of other shapes."""
    try:
        latest = json.loads(latest_offset)
    except ValueError:
        return {}
    if not isinstance(latest, dict):
        return {}
    return {
        name: StreamLag(at["rows_behind"], at.get("bytes_behind"), at.get("seconds_behind"), at.get("rows_lost", 0))
        for name, at in latest.items()
        if isinstance(at, dict) and "rows_behind" in at
    }


def _finite(rate: float) -> float:
    """Spark divides by zero where a batch is the first one."""
    return rate if rate == rate and abs(rate) != float("inf") else 0.0


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigError(
            "lag metrics require prometheus_client, which is not installed: run pip install 'natslog[spark]'"
        ) from error
    return prometheus_client


class _Collector:
    """Makes gauges of the newest progresses at each scrape. Of two queries with one name the later one counts."""

    def __init__(self, listener: LagListener) -> None:
        self._listener = listener

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        queries = {lag.name: lag for lag in self._listener.queries()}.values()
        for unit, text in _LAGS.items():
            family = GaugeMetricFamily(f"natslog_query_{unit}_behind", text, labels=["query", "stream"])
            for query in queries:
                for stream, behind in query.streams.items():
                    if (value := getattr(behind, unit)) is not None:
                        family.add_metric([query.name, stream], value)
            yield family
        lost = CounterMetricFamily("natslog_query_rows_lost", _LOST, labels=["query", "stream"])
        for query in queries:
            for stream, behind in query.streams.items():
                if behind.lost is not None:
                    lost.add_metric([query.name, stream], behind.lost)
        yield lost
        for name, text in _RATES.items():
            family = GaugeMetricFamily(f"natslog_query_{name}", text, labels=["query"])
            for query in queries:
                family.add_metric([query.name], getattr(query, name))
            yield family
