"""docs/SPARK.md as its reader uses it: its blocks of code, each run as it stands in the page.

A test gets blocks by the decorator `runs` (`tests.pages`). Only what belongs to the reader's own machines is replaced:
addresses, ports, and the folders `/checkpoints`, `lake` and `state`.
"""

from __future__ import annotations

import ast
import datetime
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery

from natslog.client import NatslogClient
from tests import pages
from tests.clocks import WallClock
from tests.harness import BrokerProcess, eventually, publish_acked
from tests.readme import Block
from tests.spark.job_processes import job_environment

PAGE = pages.PAGES["SPARK.md"]
RUN_WITHIN_S = 120.0
"""Of commands and queries; the first ones in a new checkout compile kernels."""
_READ_WITHOUT_SERVERS = re.compile(r'(\.read(?:Stream)?\.format\("natslog"\))')


def runs(**names: str) -> Callable[[pages.Test], pages.Test]:
    """The test gets these blocks as arguments, and runs them: `@runs(block="JSON")`."""
    return pages.runs("SPARK.md", **names)


def section(heading: str) -> str:
    """What stands between this heading and the next one."""
    (text,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", _without_blocks(), re.DOTALL | re.MULTILINE)
    return str(text)


def table(heading: str) -> list[list[str]]:
    """The cells of a section's tables, by row, without their headers."""
    rows = re.findall(
        r"^\| (.*) \|$", re.sub(r"^\|.*\n\|---.*$", "", section(heading), flags=re.MULTILINE), re.MULTILINE
    )
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def _without_blocks() -> str:
    """A comment in Python begins as a heading does."""
    return re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


@dataclass(slots=True)
class Ran:
    """What a block left: its variables, and the values of its statements that are expressions."""

    names: dict[str, Any]
    values: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Reader:
    """Who follows the page: a Spark session, a broker and a NATS server, and a folder for all files."""

    spark: SparkSession
    broker: BrokerProcess
    nats_url: str
    folder: Path
    client: NatslogClient
    streams: list[str] = field(default_factory=list)

    def create(self, stream: str, subject: str) -> None:
        """A stream that is deleted at the end of the test."""
        self.client.create_stream(stream, subject)
        self.streams.append(stream)

    def publish(self, subject: str, values: list[bytes]) -> None:
        publish_acked(self.nats_url, subject, values)

    def code(self, block: Block, instead: Mapping[str, str] = {}) -> str:
        """The block for this machine. Where it leaves the address of the brokers to `NATSLOG_SERVER`, which only the
        JVM's environment could tell, that is given as an option.
        """
        text = re.sub(r"http://broker-\d:9292", self.broker.url, block.text).replace(
            "nats://nats-1:4222", self.nats_url
        )
        text = re.sub(r'"/?(checkpoints|lake|state)/', rf'"{self.folder}/\1/', text)
        if '.option("servers"' not in text:
            text = _READ_WITHOUT_SERVERS.sub(rf'\1.option("servers", "{self.broker.url}")', text)
        for printed, here in instead.items():
            assert printed in text, f"the block shows {printed}"
            text = text.replace(printed, here)
        return text

    def run(self, block: Block, instead: Mapping[str, str] = {}, **names: Any) -> Ran:
        """Runs a block of Python.

        Args:
            instead: what belongs to the reader's machine in this block, with what takes its place.
            names: variables that the page takes as given.
        """
        ran = Ran({"__name__": "__main__", "spark": self.spark, **names})
        module = ast.parse(self.code(block, instead), str(PAGE))
        ast.increment_lineno(module, block.line - 1)  # a traceback shows the line of the page
        for statement in module.body:
            if isinstance(statement, ast.Expr):
                compiled = compile(ast.Expression(statement.value), str(PAGE), "eval", dont_inherit=True)
                ran.values.append(eval(compiled, ran.names))
            else:
                exec(compile(ast.Module([statement], []), str(PAGE), "exec", dont_inherit=True), ran.names)
        return ran

    @property
    def terminal(self) -> dict[str, str]:
        """The environment of a terminal in which natslog's Python environment is activated."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return job_environment(self.broker.url, self.nats_url) | {"PATH": path}

    def shell(self, command: str) -> str:
        """What a command prints, which is run in the folder and must succeed."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.terminal,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_WITHIN_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def stop(self) -> None:
        """Ends queries and deletes streams."""
        for query in self.spark.streams.active:
            query.stop()
        for stream in self.streams:
            self.client.delete_stream(stream)


def rows_of(frame: DataFrame) -> list[Row]:
    """All rows that a frame has now; those of a stream by a query that ends there."""
    if not frame.isStreaming:
        return frame.collect()
    found: list[Row] = []
    writer = frame.writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect()))
    writer.trigger(availableNow=True).start().awaitTermination()
    return found


def wait_for_rows(query: StreamingQuery, count: int) -> None:
    """Until the query has completed batches with so many rows in total."""
    eventually(
        lambda: sum(progress.numInputRows for progress in query.recentProgress) >= count or _must_run(query),
        RUN_WITHIN_S,
        f"{count} rows are processed",
        every_s=0.1,
    )


def _must_run(query: StreamingQuery) -> bool:
    assert query.isActive, query.exception()
    return False


def recorded_around(moment: str, reader: Reader, clock: WallClock) -> tuple[list[int], list[int]]:
    """Offsets in a new stream `orders`: of messages that are recorded before this moment, and from it on."""
    at_s = datetime.datetime.fromisoformat(moment).timestamp()
    clock.set(round(at_s - time.time()) - 4)
    eventually(lambda: -6 < clock_of(reader.broker) - at_s < 0, what="the broker's clock is set")
    reader.client.create_stream("orders", "orders.>")  # only now, because a stream's time never goes back

    numbers = count()

    def has_passed() -> bool:
        reader.publish("orders.new", [b"%d" % next(numbers) for _ in range(3)])
        return times_s()[-1] > at_s

    def times_s() -> list[float]:
        return [
            moment.timestamp() for batch in reader.client.read("orders") for moment in batch["timestamp"].to_pylist()
        ]

    eventually(has_passed, every_s=0.2)
    before = [offset for offset, recorded_s in enumerate(times_s()) if recorded_s < at_s]
    after = [offset for offset, recorded_s in enumerate(times_s()) if recorded_s >= at_s]
    assert before
    return before, after


def clock_of(broker: BrokerProcess) -> float:
    """Seconds since 1970, by the broker's wall clock."""
    with urllib.request.urlopen(f"{broker.url}/readyz", timeout=30) as answer:
        return parsedate_to_datetime(answer.headers["Date"]).timestamp()
