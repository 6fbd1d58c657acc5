"""A Spark program whose output `test_secrets.py` searches: reads, writes and failures with credentials of all kinds.

    python -m tests.spark.secrets_program SCENE OUT

`SCENE` is a JSON file: URLs, and names of files with credentials, and a token as text. Whatever Spark shows about the
program is written to files in `OUT`, one for each place.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pyspark_natslog.sink.http_options import HttpSinkOptions
from pyspark_natslog.sink.options import SinkOptions
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.reader import BatchReader

EXPLAIN_MODES = ("simple", "extended", "codegen", "cost", "formatted")
UI_PAGES = ("/jobs/", "/stages/", "/SQL/", "/StreamingQuery/", "/environment/")
REST = ("jobs", "stages", "environment", "sql?details=true&length=100")


class Program:
    """Args: `scene`: as above. `out`: a folder."""

    def __init__(self, scene: dict[str, Any], out: Path) -> None:
        self.scene, self.out = scene, out
        (out / "events").mkdir()
        builder = SparkSession.builder.master("local[2]").appName("natslog-secrets")
        settings = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": str(out / "events"),
            "spark.eventLog.compress": "false",
            "spark.ui.port": "0",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.shuffle.partitions": "1",
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        self.spark = builder.getOrCreate()
        self.source = {
            "servers": scene["servers"],
            "stream": "orders",
            "tokenFile": scene["token_file"],
            "tlsCaFile": scene["ca_file"],
        }
        self.sink = {
            "natsServers": scene["nats_url"],
            "natsUser": "spark",
            "natsPasswordFile": scene["password_file"],
            "natsTlsCaFile": scene["ca_file"],
            "subject": "alerts.a",
            "ack": "stored",
        }

    def save(self, place: str, content: str | bytes) -> None:
        (self.out / place).write_bytes(content.encode() if isinstance(content, str) else content)

    def explain(self, place: str, explained: DataFrame | StreamingQuery) -> None:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            if isinstance(explained, DataFrame):
                for mode in EXPLAIN_MODES:
                    explained.explain(mode=mode)
                print(explained._jdf.queryExecution().toString())  # type: ignore[operator]
            else:
                explained.explain(True)
        self.save(place, text.getvalue())

    def fails(self, place: str, action: Callable[[], object]) -> None:
        """Saves the error as a program shows it, with all its causes."""
        try:
            action()
        except Exception as error:
            self.save(place, f"{error}\n{error!r}\n{traceback.format_exc()}")
            return
        raise AssertionError(f"{place}: this must fail")

    # ---- what it does ----

    def read(self, place: str, options: dict[str, str]) -> None:
        rows = self.spark.read.format("natslog").options(**options).load()
        assert rows.count() == self.scene["rows"]
        self.explain(f"{place}-explain", rows)

    def stream(self, place: str, options: dict[str, str], sink: dict[str, str]) -> None:
        rows = self.spark.readStream.format("natslog").options(**options).load().select("value")
        writer = rows.writeStream.format("natslog").options(**sink).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.out / f"{place}-checkpoint")).start()
        query.awaitTermination()
        assert query.lastProgress is not None
        assert sum(progress["numInputRows"] for progress in query.recentProgress) == self.scene["rows"]
        self.save(f"{place}-progress", f"{query.lastProgress}\n{query.status}\n{query.recentProgress}")
        self.explain(f"{place}-explain", query)

    def running(self) -> None:
        """Arguments and variables of Spark's JVM and its Python workers, while a query runs."""
        rows = self.spark.readStream.format("natslog").options(**self.source).load()
        writer = rows.writeStream.format("noop").option("checkpointLocation", str(self.out / "running-checkpoint"))
        query = writer.start()
        while query.lastProgress is None:
            time.sleep(0.1)
        shown = []
        for process in psutil.Process().children(recursive=True):
            folder = Path(f"/proc/{process.pid}")
            with contextlib.suppress(OSError):
                shown += [(folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()]
        query.stop()
        self.save("running-processes", b"\n".join(shown))

    def pickled(self) -> None:
        """What Spark sends to executors, and what options look like in a debugger."""
        options = SourceOptions.parse(self.source)
        schema = self.spark.read.format("natslog").options(**self.source).load().schema
        reader = BatchReader(options, schema)
        self.save("pickled-reader", cloudpickle.dumps(reader))
        self.save("pickled-partitions", cloudpickle.dumps(list(reader.partitions())))
        self.save("pickled-sink", cloudpickle.dumps(SinkOptions.parse(self.sink)))
        as_text = SourceOptions.parse(self.with_text())
        over_http = HttpSinkOptions.parse(self.over_http(self.with_text()))
        self.save("shown-options", f"{options!r} {as_text!r} {as_text} {over_http!r} {SinkOptions.parse(self.sink)!r}")
        self.save("pickled-text-partitions", cloudpickle.dumps(list(BatchReader(as_text, schema).partitions())))

    def with_text(self) -> dict[str, str]:
        others = {name: value for name, value in self.source.items() if name != "tokenFile"}
        return others | {"token": self.scene["token_text"]}

    def over_http(self, options: dict[str, str]) -> dict[str, str]:
        return options | {"path": "http", "stream": "alerts", "subject": "alerts.b"}

    def failures(self) -> None:
        def read(**changed: str) -> Callable[[], object]:
            quick = {"fetchRetries": "0", "fetchTimeout": "2s"}
            return self.spark.read.format("natslog").options(**self.source, **quick).options(**changed).load().count

        for kind in ("wrong", "expired", "revoked"):
            self.fails(f"error-{kind}", read(tokenFile=self.scene[f"{kind}_file"]))
        self.fails("error-forbidden", read(stream="private"))
        self.fails("error-unreachable", read(servers="https://127.0.0.1:1"))
        self.fails("error-unknown-option", lambda: read(tokn=self.scene["token_text"])())
        self.fails("error-no-token-file", read(tokenFile="/nowhere/token"))
        with_text = self.with_text() | {"fetchRetries": "0"}
        self.fails(
            "error-text-forbidden",
            lambda: self.spark.read.format("natslog").options(**with_text).options(stream="private").load().count(),
        )
        rows = self.spark.createDataFrame([(b"x",)], "value binary")

        def write(**changed: str) -> Callable[[], object]:
            return rows.write.format("natslog").mode("append").options(**self.sink).options(**changed).save

        self.fails("error-nats-login", write(natsPasswordFile=self.scene["wrong_file"]))
        self.fails("error-nats-subject", write(subject="orders.a", ackTimeout="2s"))
        in_url = {name: value for name, value in self.sink.items() if name not in ("natsUser", "natsPasswordFile")}
        in_url["natsServers"] = self.scene["nats_url_with_wrong_password"]
        self.fails("error-nats-url", rows.write.format("natslog").mode("append").options(**in_url).save)
        self.fails("error-http-sink", write_http(rows, self.over_http(self.source) | {"stream": "private"}))

    def views(self) -> None:
        """A token in the options of SQL, and a NATS token."""
        options = ", ".join(f"{name} '{value}'" for name, value in self.with_text().items())
        self.spark.sql(f"CREATE TEMPORARY VIEW orders USING natslog OPTIONS ({options})")
        rows = self.spark.sql("SELECT subject, count(*) FROM orders GROUP BY subject")
        rows.collect()
        self.explain("sql-explain", rows)
        rows = self.spark.createDataFrame([(b"x",)], "value binary")
        sink = {"natsServers": self.scene["token_nats_url"], "natsTokenFile": self.scene["nats_token_file"]}
        rows.write.format("natslog").mode("append").options(**sink, subject="a", ack="flush").save()

    def ui(self) -> None:
        url, application = self.spark.sparkContext.uiWebUrl, self.spark.sparkContext.applicationId
        paths = [*UI_PAGES, *(f"/api/v1/applications/{application}/{name}" for name in REST)]
        self.save("ui", b"\n".join(urllib.request.urlopen(f"{url}{path}", timeout=30).read() for path in paths))


def write_http(rows: DataFrame, options: dict[str, str]) -> Callable[[], object]:
    return rows.write.format("natslog").mode("append").options(**options).save


def main(scene_file: str, folder: str) -> None:
    program = Program(json.loads(Path(scene_file).read_text()), Path(folder))
    program.read("batch", program.source)
    program.read("batch-text", program.with_text())
    program.stream("stream", program.source, program.sink)
    program.stream("stream-text", program.with_text(), program.over_http(program.with_text()))
    program.running()
    program.pickled()
    program.failures()
    program.views()
    program.ui()
    program.spark.stop()


if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    main(*sys.argv[1:])
