"""A tracer provider as the variables of OpenTelemetry describe it. Imports the SDK: only where traces are requested.

Theory of operation. The SDK's `BatchSpanProcessor` holds at most `OTEL_BSP_MAX_QUEUE_SIZE` spans (2,048) and sends them
in a thread of its own; if the queue is full, the oldest ones are dropped. The exporter is wrapped: failures become one
line of the log in a minute, instead of one for each attempt.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from natslog.errors import ConfigError, natslog_version
from natslog.log_events import event
from natslog.tracing.failures import note_failure
from natslog.tracing.variables import endpoint, header_variables, protocol, shown_text

logger = logging.getLogger("natslog.tracing")

_LOG_EVERY_S = 60.0
_UNKNOWN_SERVICE = "unknown_service"
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


def make_provider(
    names: Sequence[str], service: str, instance: str | None = None, delay_ms: int | None = None
) -> TracerProvider:
    """Args: `names`: of exporters, as entry points of packages name them, or `otlp`. The others: as `tracing.begin`.

    Raises:
        ConfigError: an exporter is not installed. What the SDK raises for wrong variables.
    """
    _limit_logs()
    exporters = [Watched(_exporter(name)(), _shown_target(name)) for name in names]
    provider = TracerProvider(resource=_resource(service, instance), shutdown_on_exit=False)
    given_delay_ms = None if "OTEL_BSP_SCHEDULE_DELAY" in os.environ else delay_ms
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=given_delay_ms))
        logger.info(
            f"traces are exported to {exporter.target}", extra=event("tracing.started", address=exporter.target)
        )
    return provider


def stopper(provider: TracerProvider) -> Callable[[float], None]:
    """A function that exports what is left, for so many seconds at most, and stops the provider.

    Its thread begins now and waits for the call: from Python 3.12 on, a process that ends can start none.
    """
    is_due = threading.Event()

    def shut_down() -> None:
        is_due.wait()
        provider.shutdown()

    thread = _begun(shut_down)

    def stop(within_s: float) -> None:
        is_due.set()
        running = thread if thread is not None and thread.is_alive() else _begun(provider.shutdown)  # after a fork
        if running is not None:
            running.join(within_s)

    return stop


_flush_lock = threading.Lock()
_flushing: threading.Thread | None = None


def flush(provider: TracerProvider, within_s: float) -> None:
    """Exports what has been recorded until now, for so long at most. While an earlier call still waits for the
    collector, this one waits for it and begins nothing.
    """
    global _flushing
    with _flush_lock:
        if _flushing is None or not _flushing.is_alive():
            _flushing = _begun(provider.force_flush)
        thread = _flushing
    if thread is not None:
        thread.join(within_s)


def _begun(work: Callable[[], object]) -> threading.Thread | None:
    """A thread for work of the SDK that has no limit of its own; it ends with the process at the latest. None: the
    process can start no thread.
    """
    thread = threading.Thread(target=work, name="natslog-tracing", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        note_failure(error)
        return None
    return thread


def _resource(service: str, instance: str | None) -> Resource:
    """As the variables describe it; what they leave open as this process states it."""
    stated = Resource.create()
    own: dict[str, str] = {SERVICE_VERSION: natslog_version()}
    if str(stated.attributes.get(SERVICE_NAME, _UNKNOWN_SERVICE)).startswith(_UNKNOWN_SERVICE):
        own[SERVICE_NAME] = service
    if instance is not None:
        own[SERVICE_INSTANCE_ID] = instance
    return stated.merge(Resource(own))


def _exporter(name: str) -> Callable[[], SpanExporter]:
    known = _OTLP.get(protocol(), protocol()) if name == "otlp" else name
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=known)), None)
    if found is None:
        what = f"{name} with the protocol {protocol()}" if name == "otlp" else name
        raise ConfigError(
            f"no installed package has the exporter {what}: install one, or use otlp with http/protobuf (pip install "
            "'natslog[otel]')"
        )
    loaded: Callable[[], SpanExporter] = found.load()
    return loaded


def _shown_target(name: str) -> str:
    return shown_text(endpoint()) if name == "otlp" else name


class Watched(SpanExporter):
    """Exports by another exporter, and logs when that fails and when it works again."""

    def __init__(self, exporter: SpanExporter, target: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.target = target
        self._exporter, self._clock = exporter, clock
        self._reason = _LastLines()
        self._lost = 0
        self._logged_s: float | None = None
        own_logger = logging.getLogger(type(exporter).__module__)  # says the reason, at each attempt
        own_logger.propagate = False
        own_logger.addHandler(self._reason)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._note_success()
        else:
            self._note_failure(len(spans))
        return result

    def _note_success(self) -> None:
        if self._logged_s is not None:
            self._logged_s = None
            logger.info(
                f"traces are exported to {self.target} again; {self._lost} spans were lost",
                extra=event("tracing.export_restored", address=self.target, count=self._lost),
            )
        self._lost = 0

    def _note_failure(self, spans: int) -> None:
        self._lost += spans
        now_s = self._clock()
        if self._logged_s is None or now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            logger.warning(
                "traces cannot be exported to %s: %d spans are lost so far: %s",
                self.target,
                self._lost,
                shown_text(self._reason.text) or "the exporter states no reason",
                extra=event("tracing.export_failed", address=self.target, count=self._lost),
            )

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _LastLines(logging.Handler):
    """Stores what a library logged last, from the level warning on: the second last line often has the reason."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[str] = deque(maxlen=2)

    @property
    def text(self) -> str:
        return " ".join(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


class _Headers(logging.Filter):
    """The SDK logs a header that it cannot read with its value, which may be a secret."""

    def filter(self, record: logging.LogRecord) -> bool:
        logger.warning(
            "a header in %s is not NAME=VALUE, with the value URL-encoded: spans are exported without it",
            " or ".join(header_variables()) or "OTEL_EXPORTER_OTLP_…_HEADERS",
            extra=event("tracing.header_ignored"),
        )
        return False


_REPEATING = (
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.trace.span",
    "opentelemetry.trace.propagation.tracecontext",
)
"""Loggers that warn of each span beyond the queue, and of each context of a request that cannot be read."""


def _limit_logs() -> None:
    """Of the SDK, from now on. Levels that the application has set stay."""
    of_headers = logging.getLogger("opentelemetry.util.re")
    if not any(isinstance(one, _Headers) for one in of_headers.filters):
        of_headers.addFilter(_Headers())
    for repeating in map(logging.getLogger, _REPEATING):
        if repeating.level == logging.NOTSET:
            repeating.setLevel(logging.ERROR)
