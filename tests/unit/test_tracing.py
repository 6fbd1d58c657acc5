"""Whether there is tracing, where spans go, and what a process without it loads."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult

from natslog import tracing
from natslog.errors import NatslogError, StreamNotFound
from natslog.tracing import failures
from natslog.tracing.exporting import Watched, flush, stopper
from natslog.tracing.variables import endpoint, requested_by, shown_text
from tests.harness import eventually

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
WITHOUT_EXTRA = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run(code: str, **variables: str) -> str:
    """What the program prints, its errors too."""
    environment = {"PYTHONPATH": ":".join(sys.path)} | variables
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# ---- variables ----


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, ()),
        ({ENDPOINT: "http://c:4318"}, ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/x"}, ("otlp",)),
        ({ENDPOINT: " "}, ()),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c"}, ()),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://c:4318"}, ()),
        ({"OTEL_TRACES_EXPORTER": "otlp, console,otlp"}, ("otlp", "console")),
        ({"OTEL_SDK_DISABLED": "TRUE", ENDPOINT: "http://c:4318"}, ()),
    ],
)
def test_variables_request_exporters(variables: dict[str, str], names: tuple[str, ...]) -> None:
    assert requested_by(variables) == names


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://localhost:4318/v1/traces"),
        ({ENDPOINT: "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}, "http://t/x"),
        ({ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://c:4317"),
    ],
)
def test_address_is_that_of_the_exporter(variables: dict[str, str], url: str) -> None:
    assert endpoint(variables) == url


# ---- without tracing ----


def test_process_without_tracing_loads_nothing_of_it() -> None:
    code = """
import sys, natslog.client.asking
from natslog import tracing
assert not tracing.is_on()
with tracing.span("x", "internal") as span:
    assert span.traceparent == "" and tracing.current_headers() == {}
    assert list(span.steps(iter([1, 2]))) == [1, 2]
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    assert run(code) == "[]\n"
    assert run(WITHOUT_EXTRA + code) == "[]\n"


def test_missing_extra_is_logged_once_with_the_remedy() -> None:
    code = """
from natslog import tracing
from natslog.log_events import write_log
write_log("info", "json", 1)
assert not tracing.begin("natslog-broker") and not tracing.begin("natslog-broker")
with tracing.span("x", "internal") as span:
    assert span.traceparent == ""
"""
    lines = run(WITHOUT_EXTRA + code, **{ENDPOINT: "http://127.0.0.1:1"}).splitlines()
    (line,) = map(json.loads, lines)
    assert (line["code"], line["level"]) == ("tracing.not_installed", "warning")
    assert "pip install 'natslog[otel]'" in line["message"]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"OTEL_TRACES_EXPORTER": "nosuch"}, "no installed package has the exporter nosuch"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "otlp with the protocol http/json"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "max_queue_size must be a positive integer"),
    ],
)
def test_variables_that_cannot_be_used_are_logged_and_stop_nothing(variables: dict[str, str], text: str) -> None:
    code = 'from natslog import tracing; print(tracing.begin("natslog-broker"))'
    said = run(code, **{ENDPOINT: "http://127.0.0.1:1"} | variables)
    assert text in said
    assert said.endswith("False\n") or "False\n" in said


# ---- where spans go ----


def test_spans_go_to_the_provider_of_the_application() -> None:
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from natslog import tracing
assert not tracing.is_on()
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with trace.get_tracer("app").start_as_current_span("order"):
    with tracing.span("publish", "producer"):
        pass
inner, outer = exporter.get_finished_spans()
print(inner.name, outer.name, inner.parent.span_id == outer.context.span_id)
"""
    assert run(code) == "publish order True\n"


def test_provider_has_name_and_sampler_of_the_variables() -> None:
    code = """
from natslog import tracing
tracing.begin("natslog-broker", instance="7")
from natslog.tracing import _own
facts = _own.resource.attributes
print(facts["service.name"], facts["service.instance.id"], facts["deployment.environment"])
span = tracing.start("x", "internal")
print(span.is_recording, repr(span.traceparent))
"""
    given = {ENDPOINT: "http://127.0.0.1:1", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test"}
    assert run(code, **given).startswith("natslog-broker 7 test\nTrue '00-")
    more = {"OTEL_SERVICE_NAME": "orders", "OTEL_TRACES_SAMPLER": "always_off"}
    assert run(code, **given | more) == "orders 7 test\nFalse ''\n"


# ---- spans ----


def test_parent_is_that_of_the_headers_or_none(spans: InMemorySpanExporter) -> None:
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with tracing.span("outer", "internal"):
        for parent in ({"traceparent": f"00-{trace_id}-{span_id}-01"}, {}, {"traceparent": "nonsense"}, None):
            tracing.start("inner", "server", parent=parent).end()
    *inner, outer = spans.get_finished_spans()
    assert outer.context is not None
    found = [None if span.parent is None else f"{span.parent.span_id:016x}" for span in inner]
    assert found == [span_id, None, None, f"{outer.context.span_id:016x}"]


def test_span_is_current_while_an_item_is_made_and_not_between(spans: InMemorySpanExporter) -> None:
    def items() -> Iterator[str]:
        yield tracing.current_headers()["traceparent"]
        yield tracing.current_headers()["traceparent"]

    span = tracing.start("fetch", "client")
    for traceparent in span.steps(items()):
        assert traceparent == span.traceparent
        assert tracing.current_headers() == {}


def test_failure_is_stated_by_its_code_and_a_redirect_is_none(spans: InMemorySpanExporter) -> None:
    class Moved(NatslogError):
        status = 307

    for error in (StreamNotFound("there is no stream x"), Moved("elsewhere"), OSError("disk")):
        with pytest.raises(type(error)), tracing.span("fetch", "server"):
            raise error
    found = spans.get_finished_spans()
    assert [(span.attributes or {}).get("error.type") for span in found] == [StreamNotFound.code, None, "OSError"]
    assert [span.status.is_ok for span in found] == [False, True, False]


# ---- a collector that is not available ----


class Failing(SpanExporter):
    """Fails while `is_down`, and logs each attempt as the SDK's exporters do; hangs until `released`."""

    def __init__(self) -> None:
        self.is_down, self.exported = True, 0
        self.released = threading.Event()
        self.released.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.released.wait(20)
        self.exported += len(spans)
        if self.is_down:
            logging.getLogger(__name__).error("Failed to export spans batch: connection refused")
        return SpanExportResult.FAILURE if self.is_down else SpanExportResult.SUCCESS


@pytest.fixture
def failing() -> Iterator[Failing]:
    yield Failing()
    own = logging.getLogger(__name__)
    own.propagate, own.handlers = True, []


def test_failed_exports_are_one_line_a_minute_and_one_when_it_works(
    failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    watched = Watched(failing, "http://c:4318/v1/traces", clock=lambda: now[0])
    batch: Any = [None] * 10
    with caplog.at_level("INFO"):
        for _ in range(120):  # two minutes, once a second
            watched.export(batch)
            now[0] += 1
        failing.is_down = False
        watched.export(batch)
        watched.export(batch)
    lines = [
        (record.levelname, record.__dict__["code"], record.__dict__["fields"]["count"]) for record in caplog.records
    ]
    assert lines == [
        ("WARNING", "tracing.export_failed", 10),
        ("WARNING", "tracing.export_failed", 610),
        ("INFO", "tracing.export_restored", 1200),
    ]
    assert "connection refused" in caplog.records[0].getMessage()


def test_collector_that_hangs_costs_bounded_memory_and_a_bounded_stop(failing: Failing) -> None:
    failing.released.clear()
    failing.is_down = False
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Watched(failing), max_queue_size=64, max_export_batch_size=16))
    tracing.use(provider)
    try:
        started = time.monotonic()
        for _ in range(2000):
            tracing.start("commit", "consumer").end()
        assert time.monotonic() - started < 2, "no span waits for the collector"
        started = time.monotonic()
        stopper(provider)(0.2)
        assert 0.2 <= time.monotonic() - started < 2
        failing.released.set()
        eventually(lambda: failing.exported, what="the thread continues")
        assert failing.exported <= 64 + 16, "the others were dropped"
    finally:
        tracing.use(None)


def flushing_threads() -> int:
    return sum(thread.name == "natslog-tracing" for thread in threading.enumerate())


def test_collector_that_hangs_costs_one_thread_however_often_spans_are_flushed(failing: Failing) -> None:
    failing.released.clear()
    failing.is_down = False
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Watched(failing)))
    before = flushing_threads()
    for _ in range(20):
        provider.get_tracer("test").start_span("micro-batch").end()
        flush(provider, 0.0)
    assert flushing_threads() == before + 1
    started = time.monotonic()
    flush(provider, 0.2)
    assert 0.2 <= time.monotonic() - started < 2, "it waits for the one that runs"
    failing.released.set()
    eventually(lambda: flushing_threads() == before, what="the thread ends")
    provider.get_tracer("test").start_span("micro-batch").end()
    flush(provider, 5)
    assert failing.exported == 21
    provider.shutdown()


def test_process_that_can_start_no_thread_flushes_nothing_and_says_so(
    failing: Failing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(failures, "_logged_s", None)
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(3):
        flush(provider, 1)
    assert [record.__dict__["code"] for record in caplog.records] == ["tracing.failed"]
    assert "can't start new thread" in caplog.text


# ---- secrets ----


def test_secrets_of_the_variables_are_in_no_line_of_the_log() -> None:
    code = """
from natslog import tracing
tracing.begin("natslog-broker")
tracing.start("x", "internal").end()
tracing.flush(10)
"""
    given = {
        ENDPOINT: "http://user:SECRET@127.0.0.1:1/path?api_key=SECRET#SECRET",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://user:SECRET@127.0.0.1:1/path?api_key=SECRET#SECRET",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key SECRET;x",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    logs = "from natslog.log_events import write_log; write_log('info', 'json', 1)"
    lines = [json.loads(line) for line in run(logs + code, **given).splitlines()]
    codes = [line.get("code") for line in lines]
    assert codes == ["tracing.header_ignored", "tracing.started", "tracing.export_failed"], lines
    assert "SECRET" not in str(lines)
    assert "OTEL_EXPORTER_OTLP_HEADERS" in lines[0]["message"]
    assert "127.0.0.1:1/path" in lines[1]["message"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("https://u:pa?s@c/x?api_key=a@b#c", "https://…@b#…"),
        ("https://c/x?api_key=k, y", "https://c/x?…, y"),
        ("(host='c', port=1): Max retries exceeded with url: /v1?k=v (Caused by x)",
         "(host='c', port=1): Max retries exceeded with url: /v1?… (Caused by x)"),
        ("Failed to parse: http://u:p@c:x/y#f", "Failed to parse: http://…@c:x/y#…"),
        ("no reason?", "no reason?"),
    ],
)  # fmt: skip
def test_texts_are_shown_without_users_and_queries(text: str, shown: str) -> None:
    assert shown_text(text) == shown


# ---- errors in code of others ----


class Raising(Sampler):
    """A sampler with an error."""

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        raise ZeroDivisionError("the sampler has an error")

    def get_description(self) -> str:
        return "raising"


class RaisingProcessor(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise ZeroDivisionError("the processor has an error")


@pytest.fixture
def failure_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Codes of what is logged meanwhile."""
    monkeypatch.setattr(failures, "_logged_s", None)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.__dict__["code"])  # type: ignore[method-assign]
    logging.getLogger("natslog.tracing").addHandler(handler)
    yield lines
    logging.getLogger("natslog.tracing").removeHandler(handler)
    tracing.use(None)


def test_sampler_with_an_error_stops_nothing_and_is_logged_once(failure_lines: list[str]) -> None:
    tracing.use(TracerProvider(sampler=Raising(), shutdown_on_exit=False))
    for _ in range(3):
        with tracing.span("fetch", "server", {"a": 1}) as span:
            assert span.traceparent == ""
            span.set({"b": 2})
    assert failure_lines == ["tracing.failed"]


def test_processor_with_an_error_stops_nothing(failure_lines: list[str]) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(RaisingProcessor())
    tracing.use(provider)
    tracing.start("commit", "consumer").end()
    assert failure_lines == ["tracing.failed"]


@pytest.mark.parametrize("name", ["set_attributes", "set_status"])
def test_span_with_an_error_stops_nothing(name: str, failure_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*args: Any) -> None:
        raise ZeroDivisionError("the span has an error")

    tracing.use(TracerProvider(shutdown_on_exit=False))
    monkeypatch.setattr(SdkSpan, name, raising)
    span = tracing.start("commit", "consumer")
    span.set({"a": 1})
    span.fail(OSError("disk"))
    span.end()
    assert failure_lines == ["tracing.failed"]


# ---- lines and threads of the SDK ----


@pytest.mark.long
def test_lines_that_the_sdk_repeats_are_not_logged() -> None:
    code = """
from natslog.log_events import write_log
write_log("info", "json", 1)
from natslog import tracing
tracing.begin("natslog-broker")
for tracestate in ("=,=", "a=b,a=b", "x" * 600, ",".join(f"k{n}=v" for n in range(40))):
    parent = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": tracestate}
    for _ in range(40):
        tracing.start("fetch", "server", parent=parent).end()
tracing.start("fetch", "server", parent={"traceparent": "0" * 2000}).end()
"""
    given = {ENDPOINT: "http://127.0.0.1:1", "OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}
    lines = [json.loads(line) for line in run(code, **given).splitlines()]
    assert {line["code"] for line in lines} <= {"tracing.started", "tracing.export_failed"}, lines


def test_process_exports_at_its_end_although_it_can_start_no_thread_then() -> None:
    """As from Python 3.12 on."""
    code = """
import atexit, threading
from natslog import tracing

def start(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

tracing.begin("natslog")
tracing.start("publish", "producer").end()
atexit.register(setattr, threading.Thread, "start", start)  # is called first
"""
    assert '"name": "publish"' in run(code, OTEL_TRACES_EXPORTER="console", OTEL_BSP_SCHEDULE_DELAY="60000")
