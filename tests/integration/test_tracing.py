"""Traces from a publisher through a broker to a reader, received over OTLP/HTTP as by a collector."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from natslog import tracing
from natslog.client import NatslogClient
from natslog.client.appending import PartUploader
from natslog.client.publisher import Publisher, Rows
from natslog.errors import PublishFailed
from natslog.nats_server import NatsServer, free_port
from tests.harness import BrokerProcess, eventually, natslog, publish_acked, running, with_nats
from tests.otlp import Collector, Received, collecting

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
Traced = tuple[Collector, NatsServer, BrokerProcess]


def variables(url: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "100"}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with collecting() as collector:
        folder = tmp_path_factory.mktemp("traced")
        with running(folder, environment=variables(collector.url), log_level="info") as (nats, broker):
            yield collector, nats, broker


def commits(collector: Collector, stream: str, rows: int) -> list[Received]:
    """The spans of all commits of a stream, when they have so many rows together."""

    def found() -> list[Received]:
        spans = collector.named(f"commit {stream}")
        return spans if sum(span.attributes["natslog.stored_rows"] for span in spans) >= rows else []

    return eventually(found, what="the spans of the commits are exported")


def context_of(span: ReadableSpan) -> str:
    context = span.context
    assert context is not None
    assert context.trace_flags.sampled
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def headers_of(client: NatslogClient, stream: str) -> list[list[tuple[str, str]]]:
    columns = [batch.column("headers").to_pylist() for batch in client.read(stream)]
    return [[(one["key"], one["value"]) for one in row or ()] for column in columns for row in column]


@pytest.mark.long
def test_trace_of_a_plain_nats_client_reaches_row_commit_and_fetch(traced: Traced) -> None:
    collector, nats, broker = traced

    async def publish(connection: Any) -> None:
        for context in (CONTEXT, CONTEXT[:-2] + "00", "nonsense"):
            await connection.request("plain", b"x", headers={"traceparent": context}, timeout=30)

    with broker.client() as client:
        client.create_stream("plain", "plain")
        with_nats(nats.url, publish)
        spans = commits(collector, "plain", 3)
        assert [link for span in spans for link in span.links] == [tuple(CONTEXT.split("-")[1:3])], "sampled ones only"
        assert {span.service for span in spans} == {"natslog-broker"}
        assert {(span.kind, span.parent, span.is_failed) for span in spans} == {(5, "", False)}
        first = min(spans, key=lambda span: span.attributes["natslog.first_offset"]).attributes
        assert first["messaging.destination.name"] == "plain"
        assert first["messaging.operation.name"] == "commit"
        assert first["natslog.bytes"] > len(CONTEXT)
        assert max(span.attributes["natslog.last_offset"] for span in spans) == 2
        assert all(0 < span.seconds < 10 for span in spans)
        assert headers_of(client, "plain")[0] == [("traceparent", CONTEXT)]


@pytest.mark.long
def test_published_rows_carry_the_span_that_ends_with_their_ack(traced: Traced, spans: InMemorySpanExporter) -> None:
    collector, nats, broker = traced
    rows = Rows(
        pa.array(["sent"] * 3),
        pa.array([b"a", b"b", b"c"]),
        headers=pa.array([None, [{"key": "Traceparent", "value": CONTEXT}], [{"key": "k", "value": "v"}]]),
    )
    with broker.client() as client, Publisher(nats.url) as publisher:
        client.create_stream("sent", "sent")
        publish_acked(nats.url, "sent", [b"before"])
        publisher.publish(rows, "stored")
        (span,) = spans.get_finished_spans()
        context = context_of(span)
        added = ("traceparent", context)
        assert headers_of(client, "sent") == [[], [added], [("Traceparent", CONTEXT)], [("k", "v"), added]]
        links = {link for commit in commits(collector, "sent", 4) for link in commit.links}
        assert links == {tuple(one.split("-")[1:3]) for one in (context, CONTEXT)}
    assert (span.name, span.kind.name, span.status.is_ok) == ("publish", "PRODUCER", True)
    assert dict(span.attributes or {}) == {
        "messaging.system": "nats",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "sent",
        "messaging.batch.message_count": 3,
        "natslog.bytes": rows.values.nbytes,
        "natslog.ack": "stored",
        "natslog.stream": "sent",
        "natslog.first_offset": 1,
        "natslog.last_offset": 3,
    }


def test_rows_get_no_header_where_it_leads_to_nothing_or_does_not_fit(
    traced: Traced, spans: InMemorySpanExporter
) -> None:
    _, nats, broker = traced
    with broker.client() as client, Publisher(nats.url) as publisher:
        client.create_stream("bare", "bare")
        largest = Rows(pa.array(["bare"] * 2), pa.array([b"x" * publisher.max_payload_bytes, b"x"]))
        publisher.publish(largest, "flush")
        eventually(lambda: client.position("bare")["high_watermark"] == 2, what="both are stored")
        tracing.use(TracerProvider(sampler=ALWAYS_OFF))
        publisher.publish(Rows(pa.array(["bare"]), pa.array([b"x"])), "stored")
        assert [[name for name, _ in row] for row in headers_of(client, "bare")] == [[], ["traceparent"], []]


def test_span_of_a_publisher_that_fails_says_why(traced: Traced, spans: InMemorySpanExporter) -> None:
    _, nats, _ = traced
    with Publisher(nats.url, ack_timeout_s=0.5) as publisher, pytest.raises(PublishFailed):
        publisher.publish(Rows(pa.array(["nobody"]), pa.array([b"x"])), "stored")
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert (span.attributes or {})["error.type"] == PublishFailed.code
    assert "natslog.first_offset" not in (span.attributes or {})


@pytest.mark.long
def test_command_exports_its_span_before_it_ends(traced: Traced) -> None:
    collector, nats, broker = traced
    with broker.client() as client:
        client.create_stream("commanded", "commanded")
        given = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "shop"}
        natslog("pub", "commanded", "x", "--ack", "--nats-url", nats.url, url=broker.url, env=given)
        (span,) = collector.named("publish")
        assert (span.service, span.attributes["natslog.stream"]) == ("shop", "commanded")
        context = dict(headers_of(client, "commanded")[0])["traceparent"]
        assert context.split("-")[1:3] == [span.trace_id, span.span_id]


def test_rows_of_an_envelope_carry_its_context(traced: Traced, spans: InMemorySpanExporter) -> None:
    collector, nats, broker = traced
    headers = [None] * 99 + [[{"key": "traceparent", "value": CONTEXT}]]
    rows = Rows(pa.array(["sealed"] * 100), pa.array([b"x"] * 100), headers=pa.array(headers))
    with broker.client() as client, Publisher(nats.url, envelope=True) as publisher:
        client.create_stream("sealed", "sealed")
        publisher.publish(rows, "stored")
        (span,) = spans.get_finished_spans()
        own = context_of(span)
        expected = [[("traceparent", context)] for context in [own] * 99 + [CONTEXT]]
        assert headers_of(client, "sealed") == expected
        (commit,) = commits(collector, "sealed", 100)
        assert set(commit.links) == {tuple(one.split("-")[1:3]) for one in (own, CONTEXT)}
    attributes = span.attributes or {}
    assert (attributes["natslog.first_offset"], attributes["natslog.last_offset"]) == (0, 99)


def test_fetch_of_a_broker_continues_the_trace_of_the_reader(traced: Traced, spans: InMemorySpanExporter) -> None:
    collector, nats, broker = traced
    with broker.client() as client:
        client.create_stream("read", "read")
        publish_acked(nats.url, "read", [b"a", b"b"])
        list(client.read("read"))
        with tracing.span("report", "internal") as span:
            assert [row for batch in client.read("read") for row in batch["value"].to_pylist()] == [b"a", b"b"]
            reader = span.traceparent.split("-")[1:3]
        spans = eventually(lambda: len(found := collector.named("fetch read")) >= 2 and found, what="both are exported")
    assert [[one.trace_id, one.parent] for one in spans if one.parent] == [reader]
    assert {(one.kind, one.is_failed) for one in spans} == {(2, False)}
    attributes = spans[-1].attributes
    assert (attributes["natslog.first_offset"], attributes["natslog.next_offset"]) == (0, 2)
    assert attributes["natslog.bytes"] > 0


def test_direct_append_is_one_trace(traced: Traced, spans: InMemorySpanExporter) -> None:
    collector, _, broker = traced
    with broker.client() as client:
        client.create_stream("appended", "appended")
        uploader = PartUploader(client, "appended", "job", 1)
        uploader.add(pa.RecordBatch.from_pydict({"value": pa.array([b"a", b"b"])}))
        client.commit_append("appended", "job", 1, uploader.finish())
    (span,) = spans.get_finished_spans()
    assert span.context is not None
    (commit,) = eventually(lambda: collector.named("commit appended"), what="the span is exported")
    assert [commit.trace_id, commit.parent] == context_of(span).split("-")[1:3]
    for attributes in (commit.attributes, span.attributes or {}):
        assert (attributes["natslog.first_offset"], attributes["natslog.last_offset"]) == (0, 1)


def test_message_published_over_http_has_the_context_of_the_request(traced: Traced) -> None:
    _, _, broker = traced
    with broker.client() as client:
        client.create_stream("posted", "posted")
        for headers in ([], [{"key": "traceparent", "value": CONTEXT[:-2] + "00"}]):
            body = json.dumps({"value": "x", "headers": headers}).encode()
            given = {"traceparent": CONTEXT, "Content-Type": "application/json"}
            request = urllib.request.Request(f"{broker.url}/v1/streams/posted/publish", body, given)
            assert urllib.request.urlopen(request, timeout=30).status == 201
        assert headers_of(client, "posted") == [[("traceparent", CONTEXT)], [("traceparent", CONTEXT[:-2] + "00")]]


@pytest.mark.parametrize(("size", "context"), [(900, CONTEXT), (3, "\xff")], ids=["no room", "not a context"])
def test_message_published_over_http_is_not_refused_for_its_context(traced: Traced, size: int, context: str) -> None:
    _, _, broker = traced
    name = f"limited-{size}"
    with broker.client() as client:
        client.create_stream(name, name, max_message_bytes=1024)
        given = {"traceparent": context, "Content-Type": "application/json"}
        body = json.dumps({"value": "x" * size}).encode()
        request = urllib.request.Request(f"{broker.url}/v1/streams/{name}/publish", body, given)
        assert urllib.request.urlopen(request, timeout=30).status == 201
        assert headers_of(client, name) == [[]]


@pytest.mark.long
@pytest.mark.parametrize("is_there", [pytest.param(False, marks=pytest.mark.long), True], ids=["nothing", "no answer"])
def test_broker_works_and_stops_without_a_collector(is_there: bool, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1] if is_there else free_port()}"
        given = variables(url) | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
        with running(tmp_path, environment=given, log_level="info", log_format="json") as (nats, broker):
            with broker.client() as client:
                client.create_stream("s", "s")
                for at in range(50):
                    assert publish_acked(nats.url, "s", [b"x"])[0]["offset"] == at

            def lines() -> list[dict[str, Any]]:
                found = [json.loads(line) for line in broker.output().splitlines()]
                return [line for line in found if line["code"].startswith("tracing.")]

            eventually(lambda: len(lines()) > 1, what="the failure is logged")
            publish_acked(nats.url, "s", [b"y"] * 1000)
            assert broker.terminate() < 8
            assert [(line["code"], line["address"]) for line in lines()] == [
                ("tracing.started", f"{url}/v1/traces"),
                ("tracing.export_failed", f"{url}/v1/traces"),
            ]


@pytest.mark.long
def test_stopping_broker_exports_what_is_left(tmp_path: Path) -> None:
    with collecting() as collector:
        given = variables(collector.url) | {"OTEL_BSP_SCHEDULE_DELAY": "60000"}
        with running(tmp_path, environment=given) as (nats, broker), broker.client() as client:
            client.create_stream("s", "s")
            publish_acked(nats.url, "s", [b"x"])
            assert collector.spans == []
            broker.terminate()
        (commit,) = collector.named("commit s")
        assert commit.attributes["natslog.stored_rows"] == 1
