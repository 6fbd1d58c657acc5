"""Compiles all kernels, once on a machine: `python -m tests.kernels`. Otherwise several processes of tests compile the
same one, while other tests wait for these.
"""

from __future__ import annotations

import multiprocessing
import sys

import pyarrow as pa

from natslog.arrow.payloads import Payloads

_WITHIN_S = 600.0


def main() -> int:
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=one, daemon=True) for one in (_of_brokers, _of_payloads)]
    for one in both:
        one.start()
    for one in both:
        one.join(_WITHIN_S)
    return int(any(one.exitcode != 0 for one in both))


def _of_brokers() -> None:
    from natslog.ingest.warmup import compile_aside

    compile_aside()


def _of_payloads() -> None:
    """The decoders are compiled when they are first used."""
    from pyspark_natslog.payload.avro_rows import AvroDecoder
    from pyspark_natslog.payload.avro_schema import parse_avro
    from pyspark_natslog.payload.ddl import parse_ddl
    from pyspark_natslog.payload.json_flat import FlatJson
    from pyspark_natslog.payload.json_rows import JsonDecoder
    from pyspark_natslog.payload.rescued import Rescuer
    from pyspark_natslog.payload.variant_rows import VariantDecoder

    schema, documents = parse_ddl("id LONG, at TIMESTAMP, names ARRAY<STRING>"), _binary(b'{"id":1,"other":1.5e-7}')
    for decoder in (JsonDecoder(schema), FlatJson(parse_ddl("id LONG")), VariantDecoder()):
        decoder.decode(documents)
    Rescuer(schema).rescued(documents)
    avro = parse_avro('{"type":"record","name":"r","fields":[{"name":"id","type":"long"}]}')
    AvroDecoder(avro, None, avro.names).decode(_binary(b"\x02"))


def _binary(payload: bytes) -> Payloads:
    return Payloads.of(pa.array([payload], pa.binary()))


if __name__ == "__main__":
    sys.exit(main())
