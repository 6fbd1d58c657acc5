"""Bulk loads: rows appended straight to a stream (`path=http`) against the same rows over NATS (`ack=stored`)."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.bench.pairs import Comparison, compare
from tests.bench.sides import STREAM, SUBJECT, natslog_side, raw_publish
from tests.bench.spark_session import spark_session

_ROWS = 3_000_000


def appends(pairs: int) -> list[Comparison]:
    with natslog_side() as (server, broker), spark_session() as spark:
        frame = spark.range(_ROWS, numPartitions=2).selectExpr(
            "cast(rpad(cast(id AS string), 128, 'x') AS binary) AS value"
        )
        frame = frame.cache()
        assert frame.count() == _ROWS
        client = broker.client()

        def stored() -> int:
            return int(client.stream(STREAM)["high_watermark"])

        def timed(write: Callable[[], None]) -> float:
            before, started = stored(), time.perf_counter()
            write()
            taken = time.perf_counter() - started
            assert stored() - before == _ROWS, f"{stored() - before} rows are stored of {_ROWS}"
            return _ROWS / taken

        over_http = (
            frame.write.format("natslog")
            .mode("append")
            .options(path="http", servers=broker.url, stream=STREAM, subject=SUBJECT)
        )
        over_nats = (
            frame.write.format("natslog").mode("append").options(natsServers=server.url, subject=SUBJECT, ack="stored")
        )
        raw_publish(server, "acked", bytes=128, window=100, seconds=0.1, warm=0)
        timed(over_http.save)
        timed(over_nats.save)
        return [
            compare(
                "direct append, 128-byte rows",
                "rows/s",
                5.0,
                ours=lambda: timed(over_http.save),
                peer="the sink over NATS, ack=stored",
                theirs=lambda: timed(over_nats.save),
                pairs=pairs,
            )
        ]
