"""Offsets that the span of a publisher takes from acks, whatever comes to the ack subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from natslog import tracing
from natslog.client.publish_spans import begin_span
from natslog.client.publisher import Publisher
from tests.unit.client.test_in_flight import answers


def offsets_after(spans: InMemorySpanExporter, *chunks: list[bytes]) -> dict[str, Any]:
    span = begin_span({"spark.stage.id": 3})
    assert span is not None
    for payloads in chunks:
        span.note_acks(answers(list(enumerate(payloads))))
    span.end("stored", None)
    found = dict(spans.get_finished_spans()[-1].attributes or {})
    assert found["spark.stage.id"] == 3
    return {
        name.removeprefix("natslog."): value for name, value in found.items() if "offset" in name or "stream" in name
    }


def test_offsets_are_those_of_the_first_and_the_last_ack(spans: InMemorySpanExporter) -> None:
    found = offsets_after(
        spans,
        [b'{"stream":"a","seq":8,"messages":3}', b'{"stream":"a","seq":9}'],
        [b'{"stream":"a","seq":20,"count":9}'],
    )
    assert found == {"stream": "a", "first_offset": 5, "last_offset": 19}


def test_streams_that_ack_are_listed_with_their_offsets(spans: InMemorySpanExporter) -> None:
    found = offsets_after(spans, [b'{"stream":"a","seq":2}', b'{"stream":"b","seq":7,"count":2}'])
    assert found == {"streams": ("a", "b"), "first_offsets": (1, 5), "last_offsets": (1, 6)}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"[1]",
        b"7",
        b"{}",
        b'{"stream":"a","seq":0,"error":{"description":"the disk is full"}}',
        b'{"stream":"a","seq":"x"}',
        b'{"stream":"a","seq":3,"count":9}',
        b'{"stream":"a","seq":9223372036854775809}',
        b'{"stream":"a","seq":1e400}',
        b'{"stream":"a","seq":3,"count":[2]}',
        b'{"stream":"a","seq":' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_ack_changes_nothing(payload: bytes, spans: InMemorySpanExporter) -> None:
    assert offsets_after(spans, [payload]) == {}
    found = offsets_after(spans, [payload, b'{"stream":"a","seq":2}'])
    assert found == {"stream": "a", "first_offset": 1, "last_offset": 1}


@pytest.mark.parametrize("payload", [b"[" * 100_000, b'{"x":' + b"[" * 100_000, b'{"x":' * 100_000])
def test_ack_that_is_nested_too_deeply_changes_nothing(payload: bytes, spans: InMemorySpanExporter) -> None:
    assert offsets_after(spans, [payload, b'{"stream":"a","seq":2}']) == {
        "stream": "a",
        "first_offset": 1,
        "last_offset": 1,
    }
    publisher = Publisher("nats://127.0.0.1:1")
    publisher._note_refusal(payload, 0)
    assert publisher._refusal == repr(payload[:200])


def test_acks_that_come_while_the_span_ends_do_not_disturb_it(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = begin_span({})
    assert span is not None
    span.note_acks(answers([(0, b'{"stream":"a","seq":2}')]))
    known = tracing.offsets

    def offsets(of: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        for number, _ in enumerate(of):
            span.note_acks(answers([(0, b'{"stream":"b%d","seq":2}' % number)]))
        return known(of)

    monkeypatch.setattr(tracing, "offsets", offsets)
    span.end("stored", None)
    assert (spans.get_finished_spans()[-1].attributes or {})["natslog.stream"] == "a"


def test_no_offsets_are_stated_where_those_of_unread_acks_are_not_known(spans: InMemorySpanExporter) -> None:
    def ack(stream: str, seq: int, more: str = "") -> bytes:
        return f'{{"stream":"{stream}","seq":{seq}{more}}}'.encode()

    duplicate = ',"duplicate":true'
    assert offsets_after(spans, [ack("a", 1), ack("a", 2), ack("a", 3)])["last_offset"] == 2
    assert offsets_after(spans, [ack("a", 1), ack("a", 2), ack("b", 3)]) == {}
    assert offsets_after(spans, [ack("a", 1), ack("a", 2), ack("a", 3)], [ack("b", 3)]) == {}
    assert offsets_after(spans, [ack("a", 1), ack("a", 2), ack("a", 9, duplicate)]) == {}
    assert offsets_after(spans, [ack("a", 9, duplicate)], [ack("a", 2), ack("a", 3)])["first_offset"] == 1
    assert offsets_after(spans, [ack("a", 9, f',"messages":3{duplicate}')]) == {}
    assert offsets_after(spans, [ack("a", 1), ack("b", 3)])["streams"] == ("a", "b")
