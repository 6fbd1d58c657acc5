"""Decoding JSON alone, on one core, without Spark: the kernel for usual JSON against the reference.

Figures are rows per second of processor time, so that other processes disturb them less.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from random import Random

import pyarrow as pa

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.json_paths import JsonPaths
from pyspark_natslog.payload.json_rows import JsonDecoder
from pyspark_natslog.payload.rows import Decoder
from tests.bench.pairs import Comparison, compare

FLAT = "id LONG, user STRING, price DOUBLE, quantity INT, paid BOOLEAN, city STRING, tags ARRAY<STRING>"
NESTED = (
    "id LONG, at TIMESTAMP, customer STRUCT<id: LONG, name: STRING, address: STRUCT<city: STRING, geo: STRUCT<"
    "lat: DOUBLE, lon: DOUBLE>>>, items ARRAY<STRUCT<sku: STRING, price: DOUBLE, quantity: INT, tags: ARRAY<STRING>>>"
)
_CITIES = ["Zürich", "Lyon", "Porto", "Graz"]
_CHUNKS, _CHUNK_BYTES = 24, 2 * 1024 * 1024
_MALFORMED_SHARE = 0.01
_UNIT = "rows/CPU-s"
_LEAST_RATIO, _LEAST_OF_MALFORMED = 1.3, 1 / 1.5  # what the second kernel is for; what malformed payloads may cost


def flat_order(random: Random, number: int) -> bytes:
    """One message of some 140 bytes, and two members that are not read."""
    body = {
        "id": number,
        "user": f"user-{random.randrange(10_000)}",
        "price": round(random.uniform(1, 500), 2),
        "quantity": random.randrange(1, 20),
        "paid": random.random() < 0.5,
        "city": random.choice(_CITIES),
        "tags": ["web", "new"][: random.randrange(3)],
        "agent": {"name": "curl", "version": 8},
        "note": None,
    }
    return json.dumps(body, ensure_ascii=False).encode()


def nested_order(random: Random, number: int) -> bytes:
    """One message of some 460 bytes: structs within structs, and a list of structs that have lists."""
    geo = {"lat": random.uniform(-90, 90), "lon": random.uniform(-180, 180)}
    body = {
        "id": number,
        "at": f"2026-11-23T01:02:03.{random.randrange(10**6):06}Z",
        "customer": {"id": number, "name": f"user-{number % 997}", "address": {"city": "Porto", "geo": geo}},
        "items": [
            {
                "sku": f"sku-{random.randrange(10**5)}",
                "price": round(random.uniform(1, 500), 2),
                "quantity": random.randrange(1, 9),
                "tags": ["web", "new"][: random.randrange(3)],
            }
            for _ in range(random.randrange(1, 6))
        ],
        "agent": {"name": "curl", "version": 8},
    }
    return json.dumps(body, ensure_ascii=False).encode()


def decoding(pairs: int) -> list[Comparison]:
    """Usual JSON by both kernels; and what malformed payloads cost, of each shape."""
    found = []
    for name, ddl, order in (("flat", FLAT, flat_order), ("nested", NESTED, nested_order)):
        schema, payloads = parse_ddl(ddl), _chunk(order)
        reference = _rate(partial(JsonDecoder, schema), payloads)
        if name == "flat":
            ours = _rate(partial(JsonPaths, schema), payloads)
            title, peer = "JSON, decoding alone, flat", "the reference kernel"
            found.append(compare(title, _UNIT, _LEAST_RATIO, ours=ours, peer=peer, theirs=reference, pairs=pairs))
        for kind, spoil in (("truncated", _truncated), ("of a wrong type", _of_a_wrong_type)):
            some = _rate(partial(JsonPaths, schema), _chunk(order, spoil))
            title = f"JSON, {name}, 1 % of payloads {kind}"
            peer = "the reference kernel, no payload malformed"
            found.append(
                compare(title, _UNIT, _LEAST_OF_MALFORMED, ours=some, peer=peer, theirs=reference, pairs=pairs)
            )
    return found


def _chunk(order: Callable[[Random, int], bytes], spoil: Callable[[bytes], bytes] | None = None) -> Payloads:
    random, texts, length = Random(7), [], 0
    while length < _CHUNK_BYTES:
        texts.append(order(random, len(texts)))
        if spoil is not None and random.random() < _MALFORMED_SHARE:
            texts[-1] = spoil(texts[-1])
        length += len(texts[-1])
    return Payloads.of(pa.array(texts, pa.binary()))


def _truncated(text: bytes) -> bytes:
    return text[: len(text) // 2]


def _of_a_wrong_type(text: bytes) -> bytes:
    return text.replace(b'"id": ', b'"id": 0.5', 1)  # found late: when the whole chunk has been parsed


def _rate(make: Callable[[], Decoder], payloads: Payloads) -> Callable[[], float]:
    """Measures a task of `_CHUNKS` chunks, whose decoder is new."""

    def measured() -> float:
        decoder = make()
        began = time.process_time()
        for _ in range(_CHUNKS):
            decoder.decode(payloads)
        return _CHUNKS * len(payloads) / (time.process_time() - began)

    measured()
    return measured
