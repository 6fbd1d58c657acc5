"""Spans of OpenTelemetry, where they are requested; without that, no code of OpenTelemetry is loaded.

    with tracing.span("fetch", "server", {"messaging.destination.name": stream}, parent=request.headers) as span:
        ...
        span.set({"natslog.next_offset": 7})

Theory of operation. Spans go to the tracer provider of the application, if it has set one. Otherwise this process makes
a provider of its own when the first span is started, if the standard variables (`OTEL_TRACES_EXPORTER`,
`OTEL_EXPORTER_OTLP_ENDPOINT`) request traces. That provider is not set as the one of the application. If neither is the
case, all functions here return at once. Errors of samplers, processors and providers, which are code of others, are
logged and stop nothing. Contexts have the format of W3C (`traceparent`), in headers of messages and of HTTP requests.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from natslog.errors import natslog_version
from natslog.log_events import event
from natslog.tracing.failures import note_failure
from natslog.tracing.variables import requested_by, shown_text

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Link, Tracer
    from opentelemetry.trace import Span as OtelSpan

logger = logging.getLogger("natslog.tracing")

Kind: TypeAlias = Literal["producer", "consumer", "client", "server", "internal"]
Attributes: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str] | Sequence[int]]
Item = TypeVar("Item")

TRACEPARENT = "traceparent"
"""The header of messages and requests: `00-<32 hexadecimal digits>-<16>-<2>`."""
_API = "opentelemetry.trace"
_STOP_WITHIN_S = 2.0
_FIRST_FAILED = 400
_END: Any = object()


class Span:
    """One span, or none where there is no tracing: then its methods do nothing."""

    __slots__ = ("_span",)

    def __init__(self, span: OtelSpan | None = None) -> None:
        self._span = span

    @property
    def is_recording(self) -> bool:
        """Whether it will be exported: there is tracing, and the span is sampled."""
        return self._span is not None and self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """Its context for a header; "" if it will not be exported."""
        if self._span is None or not self._span.is_recording():
            return ""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, attributes: Attributes) -> None:
        """Adds attributes. Without effect once the span has ended."""
        try:
            if self._span is not None and self._span.is_recording():
                self._span.set_attributes(attributes)
        except Exception as failure:
            note_failure(failure)

    def fail(self, error: BaseException) -> None:
        """States that the work failed, and why."""
        try:
            if self._span is not None and self._span.is_recording():
                from opentelemetry.trace import Status, StatusCode

                self._span.set_status(Status(StatusCode.ERROR, str(error)))
                self._span.set_attribute("error.type", _type_of(error))
        except Exception as failure:
            note_failure(failure)

    def end(self, end_ns: int | None = None) -> None:
        """Args: `end_ns`: since 1970; None: now."""
        try:
            if self._span is not None:
                self._span.end(end_ns)
        except Exception as failure:
            note_failure(failure)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside, this is the current span of the thread or task: requests to brokers carry its context."""
        if self._span is None:
            yield
            return
        from opentelemetry.trace import use_span

        with use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield

    def steps(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items. While one is made, this is the current span; between them, that of the caller is."""
        if self._span is None:
            yield from items
            return
        with self.current():
            context = contextvars.copy_context()
        while (item := context.run(next, items, _END)) is not _END:
            yield item


NO_SPAN = Span()


def _type_of(error: BaseException) -> str:
    """The code of natslog's own errors."""
    return str(getattr(error, "code", type(error).__name__))


def start(
    name: str,
    kind: Kind,
    attributes: Attributes | None = None,
    *,
    parent: Mapping[str, str] | None = None,
    links: Sequence[Link] = (),
    start_ns: int | None = None,
) -> Span:
    """A span, which must be ended by `end`; none if the sampler or the provider has an error.

    Args:
        parent: headers, of which `traceparent` and `tracestate` name the parent; without them the span begins a trace.
            None: the parent is the current span, if there is one.
        start_ns: since 1970; None: now.
    """
    try:
        tracer = _tracer()
        if tracer is None:
            return NO_SPAN
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = None if parent is None else TraceContextTextMapPropagator().extract(parent)
        of_kind = SpanKind[kind.upper()]
        return Span(tracer.start_span(name, context, of_kind, attributes, links, start_ns, record_exception=False))
    except Exception as failure:
        note_failure(failure)
        return NO_SPAN


@contextmanager
def span(
    name: str, kind: Kind, attributes: Attributes | None = None, *, parent: Mapping[str, str] | None = None
) -> Iterator[Span]:
    """The current span inside; it fails with the exception that leaves the block. Args: as `start`."""
    started = start(name, kind, attributes, parent=parent)
    try:
        with started.current():
            yield started
    except BaseException as error:
        if getattr(error, "status", _FIRST_FAILED) >= _FIRST_FAILED:  # others are redirects
            started.fail(error)
        raise
    finally:
        started.end()


def messaging(operation: str, kind: str, destination: str | None = None, system: str = "natslog") -> dict[str, Any]:
    """Attributes by the semantic conventions for messaging. Args: `kind`: send, receive or process."""
    named = {} if destination is None else {"messaging.destination.name": destination}
    return named | {
        "messaging.system": system,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }


def offsets(of: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Attributes for the first and the last offset in each stream; lists where there are several streams."""
    streams, firsts, lasts = list(of), [first for first, _ in of.values()], [last for _, last in of.values()]
    if len(of) == 1:
        return {"natslog.stream": streams[0], "natslog.first_offset": firsts[0], "natslog.last_offset": lasts[0]}
    return {"natslog.streams": streams, "natslog.first_offsets": firsts, "natslog.last_offsets": lasts} if of else {}


def of_run(stream: str, start: int, end: int) -> dict[str, Any]:
    """Attributes of a direct append, `[start, end)`."""
    return offsets({stream: (start, end - 1)}) | {"messaging.batch.message_count": end - start}


def current_headers() -> dict[str, str]:
    """Headers with the context of the current span; none if there is no span."""
    if _API not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


# ---- where spans go ----


_lock = threading.Lock()
_own: TracerProvider | None = None
_stop: Callable[[float], None] | None = None
_is_decided = False


def begin(service: str, *, instance: str | None = None, delay_ms: int | None = None) -> bool:
    """Decides where spans of this process go, unless that is decided. Returns whether there is tracing.

    Args:
        service: `service.name`, where no variable states one. instance: `service.instance.id`.
        delay_ms: after which spans are exported at the latest, where no variable states it.
    """
    global _own, _stop, _is_decided
    with _lock:
        if not _is_decided:
            if (names := requested_by()) and not _application_provider():
                _own = _made(names, service, instance, delay_ms)
                if _own is not None:
                    from natslog.tracing.exporting import stopper

                    _stop = stopper(_own)
                    atexit.register(end)
            _is_decided = True
    return is_on()


def is_on() -> bool:
    """Whether spans that are started now are recorded (if they are sampled)."""
    return _tracer() is not None


def end(within_s: float = _STOP_WITHIN_S) -> None:
    """Exports what is left, for so long at most; called when the process ends. A provider that `begin` has made records
    no further spans.
    """
    global _own, _stop
    with _lock:
        stop, _own, _stop = _stop, None, None
    if stop is not None:
        stop(within_s)


def flush(within_s: float) -> None:
    """Exports what has been recorded until now by a provider that `begin` has made, for so long at most."""
    if (provider := _own) is not None:
        from natslog.tracing.exporting import flush as flush_provider

        flush_provider(provider, within_s)


def use(provider: TracerProvider | None) -> None:
    """Spans go to this provider from now on, unless the application has set one. None: they are not recorded."""
    global _own, _is_decided
    with _lock:
        _own, _is_decided = provider, True


def _tracer() -> Tracer | None:
    if (provider := _application_provider() or _own) is not None:
        return _tracer_of(provider)
    if _is_decided:
        return None
    return _tracer() if begin("natslog") else None


@functools.lru_cache(1)  # it reads the version of the package
def _tracer_of(provider: TracerProvider) -> Tracer:
    return provider.get_tracer("natslog", natslog_version())


def _application_provider() -> Any | None:
    """The provider that the application has set, if it has; OpenTelemetry is then loaded already."""
    api = sys.modules.get(_API)
    if api is None or not hasattr(api, "ProxyTracerProvider"):  # it is being imported
        return None
    provider = api.get_tracer_provider()
    return None if isinstance(provider, api.ProxyTracerProvider) else provider


def _made(names: Sequence[str], service: str, instance: str | None, delay_ms: int | None) -> TracerProvider | None:
    """A provider, or None and a warning."""
    try:
        from natslog.tracing.exporting import make_provider
    except ImportError as error:
        logger.warning(
            f"variables of OpenTelemetry request traces, but it is not installed ({error}): run pip install "
            "'natslog[otel]', or set OTEL_TRACES_EXPORTER=none",
            extra=event("tracing.not_installed"),
        )
        return None
    try:
        return make_provider(names, service, instance, delay_ms)
    except Exception as error:
        logger.warning(
            f"traces are not exported: the variables of OpenTelemetry cannot be used: {shown_text(str(error))}",
            extra=event("tracing.not_configured"),
        )
        return None
