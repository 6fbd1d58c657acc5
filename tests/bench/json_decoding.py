"""Decoding JSON alone, on one core, without Spark: Arrow's parser (the fast path) against the compiled kernel.

Figures are rows per second of processor time, so that other processes disturb them less.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

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
_LEAST_RATIO, _LEAST_OF_MALFORMED = 0.9, 1 / 1.5  # not slower; what malformed payloads may cost
_START = """
import resource
from pyspark_natslog.payload.{module} import {decoder}
from pyspark_natslog.payload.ddl import parse_ddl
from natslog.arrow.payloads import Payloads
import pyarrow as pa
found = {decoder}(parse_ddl("id LONG"), *{arguments}).decode(Payloads.of(pa.array([b'{{"id":1}}'])))
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


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
    """Each shape by both paths; what malformed payloads cost; and the processor time of a first row."""
    found = []
    for name, ddl, order in (("flat", FLAT, flat_order), ("nested", NESTED, nested_order)):
        schema, payloads = parse_ddl(ddl), _chunk(order)
        fast = _rate(partial(_paths, ddl), payloads)
        slow = _rate(partial(JsonDecoder, schema), payloads)
        title = f"JSON, decoding alone, {name}"
        peer = "the compiled kernel"
        found.append(compare(title, _UNIT, _LEAST_RATIO, ours=fast, peer=peer, theirs=slow, pairs=pairs))
        for kind, spoil in (("truncated", _truncated), ("of a wrong type", _of_a_wrong_type)):
            some = _rate(partial(_paths, ddl), _chunk(order, spoil))
            title = f"JSON, {name}, 1 % of payloads {kind}"
            peer = "no payload malformed"
            found.append(compare(title, _UNIT, _LEAST_OF_MALFORMED, ours=some, peer=peer, theirs=fast, pairs=pairs))
    found[0].notes |= _start_notes()
    return found


def _paths(ddl: str) -> Decoder:
    schema = parse_ddl(ddl)
    return JsonPaths(schema, lambda: JsonDecoder(schema))


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


def _start_notes() -> dict[str, Any]:
    """Processor seconds of a fresh Python that decodes one payload; the kernel comes from the cache on disk."""
    return {
        "first row, CPU-s, Arrow's parser": _start("json_arrow", "ArrowJson", "[str]"),
        "first row, CPU-s, the cached kernel": _start("json_rows", "JsonDecoder", "[]"),
    }


def _start(module: str, decoder: str, arguments: str) -> float:
    program = _START.format(module=module, decoder=decoder, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)
