"""A job that is redeployed in another version, with other rows and other reference data, in the middle of its batches.

    python changing_job.py --folder FOLDER --version FILE --stream orders --published changed --appended appended

It sends every message of the stream to `published` over NATS, with the sink's defaults, and appends it over HTTP to
`appended-<generation>`. The number in FILE changes how many other rows stand between the messages, and what the
reference data say. Where the HTTP query ends because a batch is not what was stored, the job notes why and ends. When
it is started again, it begins with a new checkpoint and a new stream, the next generation.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast
from pyspark.sql.streaming import StreamingQuery

from natslog.client import NatslogClient

CONFLICTS = "conflicts"
_CONFLICT_WORDS = ("but now has other rows", "the checkpoint was set back")
_KEYS = 16
_SEPARATOR = "|"


def original(value: bytes) -> bytes | None:
    """The message that a row of this job holds; None where it is one of the rows between them."""
    message, row, _ = value.rsplit(_SEPARATOR.encode(), 2)
    return message if row == b"0" else None


def rows(spark: SparkSession, stream: str, version: int) -> DataFrame:
    source = spark.readStream.format("natslog").options(stream=stream, maxOffsetsPerTrigger=4000).load()
    messages = source.selectExpr("value", f"cast(offset % {_KEYS} as int) as key")
    several = messages.selectExpr("value", "key", f"explode(sequence(0, {version % 3})) as row")
    filtered = several.where(f"row = 0 or (key + {version}) % 2 = 0")
    texts = [(key, f"{key} in version {version}") for key in range(_KEYS)]
    reference = spark.createDataFrame(texts, "key int, text string")
    text = f"cast(concat('{_SEPARATOR}', row, '{_SEPARATOR}', text) as binary)"
    return filtered.join(broadcast(reference), "key").selectExpr(f"concat(value, {text}) as value")


def started(frame: DataFrame, checkpoint: Path, **options: str) -> StreamingQuery:
    writer = frame.writeStream.format("natslog").options(**options).option("checkpointLocation", str(checkpoint))
    return writer.trigger(processingTime="500 milliseconds").start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--folder", "--version"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--stream", "--published", "--appended"):
        parser.add_argument(name, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True, help="of the query over NATS")
    arguments = parser.parse_args()
    conflicts = arguments.folder / CONFLICTS
    generation = len(conflicts.read_text().splitlines()) if conflicts.exists() else 0
    target = f"{arguments.appended}-{generation}"
    with NatslogClient() as client:
        like = client.stream(arguments.stream)
        client.create_stream(target, target, replicas=like["replicas"], min_isr=like["min_isr"])
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    frame = rows(spark, arguments.stream, int(arguments.version.read_text()))
    started(frame, arguments.checkpoint, subject=f"{arguments.published}.all", ackTimeout="15s")
    appending = started(frame, arguments.folder / target, path="http", stream=target)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        while not stopping.is_set() and not spark.streams.awaitAnyTermination(1):
            pass
    except StreamingQueryException as error:
        said = [line for line in str(error).splitlines() if any(words in line for words in _CONFLICT_WORDS)]
        if appending.exception() is not None and said:
            with open(conflicts, "a") as file:
                file.write(f"{generation}: {said[0]}\n")
        print(error, file=sys.stderr)
        return 1
    for query in spark.streams.active:
        query.stop()
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
