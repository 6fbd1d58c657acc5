"""`stream_to_parquet.py` and `compact_parquet.py`; and a backfill that a stream takes over from."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from natslog.client import NatslogClient
from natslog.errors import NatslogError
from tests.harness import BrokerProcess, publish_acked
from tests.readme import Block
from tests.spark.jobs_as_modules import checkpoints, compact_parquet, job_support, stream_to_parquet
from tests.spark.page import Reader, runs

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def table_offsets(spark: SparkSession, path: Path) -> list[int]:
    return sorted(row["offset"] for row in spark.read.parquet(str(path)).select("offset").collect())


# ---- stream_to_parquet ----


@pytest.mark.long
def test_stream_to_parquet_writes_files_of_the_wished_size_once_and_goes_on_where_it_was(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    name: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.create_stream(name, f"{name}.>")
    values = [b"%06d" % row + bytes((row * 7 + at * 13) % 251 for at in range(1000)) for row in range(1000)]
    for low in range(0, 1000, 100):
        publish_acked(nats_url, f"{name}.x", values[low : low + 100])
    out, checkpoint = folder / "table", folder / "checkpoint"
    given = ["--stream", name, "--output", str(out), "--checkpoint", str(checkpoint), "--available-now"]

    def to_table(*more: str, file_bytes: int) -> str:
        """What the job does, in this session, on two cores."""
        arguments = stream_to_parquet.parser().parse_args([*given, "--servers", broker.url, *more])
        checkpoints.check_table(checkpoints.Folder(spark, str(checkpoint)), checkpoints.Folder(spark, str(out)))
        sizes = stream_to_parquet.sizing(file_bytes, 2)
        options = job_support.source_options(arguments, stream_to_parquet.COLUMNS) | sizes
        messages = spark.readStream.format("natslog").options(**options).load()
        query = stream_to_parquet.started(messages, arguments)
        job_support.follow(query, job_support.StopRequest(), stream_to_parquet.report)
        return capsys.readouterr().out

    said = to_table(file_bytes=250_000)
    assert sum(int(line.split()[2]) for line in said.splitlines() if line.startswith("batch ")) == 1000
    assert table_offsets(spark, out) == list(range(1000))
    stored_bytes = client.extent(name, 0, 1000)[1]
    rows_of_files = sorted(pq.read_metadata(path).num_rows for path in out.glob("day=*/*.parquet"))
    assert stored_bytes / 250_000 <= len(rows_of_files) <= 2 * stored_bytes / 250_000, rows_of_files
    largest = max(rows_of_files) * stored_bytes / 1000
    assert 100_000 < largest < 400_000, f"rows of files {rows_of_files}"
    day = datetime.datetime.now(datetime.UTC).date()
    assert [path.name for path in out.glob("day=*")] in ([f"day={day}"], [f"day={day - datetime.timedelta(1)}"])

    publish_acked(nats_url, f"{name}.x", [b"later"] * 10)
    assert to_table(file_bytes=10**6) == "batch 3: 10 messages written\n"
    assert table_offsets(spark, out) == list(range(1010))

    for missing, reason in [(checkpoint, "drop new batches without an error"), (out, "that are not in --output")]:
        away = missing.rename(folder / "away")
        with pytest.raises(NatslogError, match=reason):
            checkpoints.check_table(checkpoints.Folder(spark, str(checkpoint)), checkpoints.Folder(spark, str(out)))
        away.rename(missing)


# ---- compact_parquet ----

DAYS = [datetime.date(2026, 11, day) for day in (18, 19, 20)]


def streaming_table(spark: SparkSession, folder: Path) -> Path:
    """A table as the job writes it, over three days, eight files each; beside it a file of a batch that was killed."""
    rows = spark.range(240).selectExpr(
        "'orders' as stream", "id as offset", "timestamp_seconds(1795000000 + id) as timestamp",
        "cast(id as string) as value", "date_add(date'2026-11-18', cast(id div 80 as int)) as day",
    )  # fmt: skip
    raw, out = folder / "raw", folder / "lake" / "orders"
    rows.coalesce(1).sortWithinPartitions("offset").write.option("maxRecordsPerFile", 10).parquet(str(raw))
    source = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1).parquet(str(raw))
    writer = source.writeStream.format("parquet").partitionBy("day").option("path", str(out))
    writer.option("checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start().awaitTermination()
    stray = next((out / "day=2026-11-18").glob("*.parquet"))
    shutil.copy(stray, stray.with_name(f"part-99999-{stray.name}"))
    return out


def compact(spark: SparkSession, source: Path, output: Path, *more: str) -> None:
    given = compact_parquet.parser().parse_args(["--input", str(source), "--output", str(output), *more])
    compact_parquet.compact(spark, given)


@pytest.mark.long
@runs(block="Stream to Parquet, in files of a wished size (3)")
def test_compaction_copies_finished_days_once_into_few_sorted_files(
    spark: SparkSession, reader: Reader, block: Block, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = streaming_table(spark, folder), folder / "lake" / "orders-days"
    before = sorted(source.rglob("*.parquet"))
    compact(spark, source, output)
    said = capsys.readouterr().out
    assert "day 2026-11-18: copied 80 rows from 8 files into 1" in said
    assert "2 days compacted" in said
    assert sorted(path.name for path in output.iterdir()) == ["day=2026-11-18", "day=2026-11-19"]
    assert table_offsets(spark, output) == list(range(160)), "and not the rows of the batch that was killed"
    (file,) = (output / "day=2026-11-19").glob("*.parquet")
    assert pq.read_table(file).column("offset").to_pylist() == list(range(80, 160))
    assert sorted(source.rglob("*.parquet")) == before, "the streaming table is left as it is"

    both = reader.run(block).names["rows"]
    assert sorted(row["offset"] for row in both.select("offset").collect()) == list(range(240))
    tables = {Path(file).parents[1].name for file in both.inputFiles()}
    assert tables == {"orders-days", "orders"}

    kept = {path: path.stat().st_mtime_ns for path in output.rglob("*.parquet")}
    (output / "_staging").mkdir()  # of a run that was killed
    compact(spark, source, output)
    assert "0 days compacted" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*.parquet")} == kept
    shutil.rmtree(output / "day=2026-11-18")
    compact(spark, source, output, "--file-bytes", "4KB")
    assert table_offsets(spark, output) == list(range(160))
    assert len(list((output / "day=2026-11-18").glob("*.parquet"))) > 1


@pytest.mark.long
def test_a_copy_that_differs_is_not_put_in_place(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = streaming_table(spark, folder), folder / "days"
    facts, calls = compact_parquet.facts, []

    def one_row_less(rows: Any) -> Any:
        calls.append(1)
        return facts(rows.where("offset > 0") if len(calls) == 2 else rows)

    monkeypatch.setattr(compact_parquet, "facts", one_row_less)
    with pytest.raises(NatslogError, match=r"day 2026-11-18: the copy has"):
        compact(spark, source, output)
    assert not (output / "day=2026-11-18").exists()


def test_compaction_refuses_what_is_no_streaming_table(spark: SparkSession, folder: Path) -> None:
    spark.range(3).write.parquet(str(folder / "plain"))
    with pytest.raises(NatslogError, match="not a table of a streaming query"):
        compact(spark, folder / "plain", folder / "days")


# ---- from batch to stream ----


@pytest.mark.long
def test_a_stream_takes_over_where_a_backfill_ended_without_a_gap_or_a_row_twice(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    """The recipe of docs/SPARK.md, on a stream that grows all the time and whose beginning is gone."""
    client.create_stream(name, f"{name}.>")
    source = {"servers": broker.url, "stream": name}
    publish_acked(nats_url, f"{name}.x", [b"%d" % row for row in range(50)])

    end = client.position(name)["high_watermark"]
    publish_acked(nats_url, f"{name}.x", [b"%d" % row for row in range(50, 80)])
    past = spark.read.format("natslog").options(**source, endingOffsets=f'{{"{name}": {end}}}').load()
    past.select("offset", "value").write.parquet(str(folder / "past"))
    publish_acked(nats_url, f"{name}.x", [b"%d" % row for row in range(80, 90)])

    def take_over() -> None:
        live = spark.readStream.format("natslog").options(**source, startingOffsets=f'{{"{name}": {end}}}').load()
        writer = live.select("offset", "value").writeStream.format("parquet").option("path", str(folder / "live"))
        query = writer.option("checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start()
        query.awaitTermination()

    take_over()
    publish_acked(nats_url, f"{name}.x", [b"%d" % row for row in range(90, 100)])
    take_over()  # the checkpoint says where now, whatever startingOffsets says
    rows = [spark.read.parquet(str(folder / part)).toArrow() for part in ("past", "live")]
    assert [table.num_rows for table in rows] == [50, 50]
    whole = pa.concat_tables(rows).sort_by("offset")
    assert whole.column("offset").to_pylist() == list(range(100))
    assert whole.column("value").to_pylist() == [b"%d" % row for row in range(100)]


@pytest.mark.long
def test_time_travel_by_timestamps_in_a_batch_and_in_a_stream(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    client.create_stream(name, f"{name}.>")
    for part in range(3):
        publish_acked(nats_url, f"{name}.x", [b"%d" % part] * 10)
    times = [row["ms"] for row in _times(spark, broker, name)]
    source = {"servers": broker.url, "stream": name, "columns": "offset,timestamp"}
    span = {"startingTimestamp": str(times[10]), "endingTimestamp": str(times[20])}
    batch = spark.read.format("natslog").options(**source, **span).load().collect()
    assert sorted(row["offset"] for row in batch) == [at for at in range(30) if times[10] <= times[at] < times[20]]

    live = spark.readStream.format("natslog").options(**source, startingTimestamp=str(times[20])).load()
    writer = live.writeStream.format("parquet").option("path", str(folder / "live"))
    query = writer.option("checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start()
    query.awaitTermination()
    assert table_offsets(spark, folder / "live") == [at for at in range(30) if times[at] >= times[20]]


def _times(spark: SparkSession, broker: BrokerProcess, name: str) -> list[Any]:
    rows = spark.read.format("natslog").options(servers=broker.url, stream=name).load()
    ms = f.floor(f.col("timestamp").cast("double") * 1000).alias("ms")  # what is compared is cut to milliseconds, too
    return rows.orderBy("offset").select(ms).collect()
