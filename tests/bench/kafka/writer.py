"""Writing to Kafka from a Spark session of its own: `python -m tests.bench.kafka.writer SERVERS`.

Once one JVM has run Kafka's sink and a sink in Python, HotSpot runs the path to the one in Python three times slower
for the rest of its life (a sink that drops its rows: 1.2 before, 0.37 million rows/s afterwards; not so with sinks in
Python only). Jobs use one of them.

It reads lines of JSON: {"rows": …, "topic": …, "producer": {…}}, and answers each with a line that begins with `@`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.bench.kafka.sides import connector_jars, different_rows
from tests.bench.sides import ROOT
from tests.bench.spark_session import spark_session

_READY, _DONE = "@ready", "@done"
_ENDS_WITHIN_S = 60.0


class KafkaWriter:
    """Attributes: `pid`, of the process with its JVM as a child."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self.pid = process, process.pid
        self._wait_for(_READY)

    def write(self, rows: int, topic: str, producer: Mapping[str, str]) -> None:
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.write(json.dumps({"rows": rows, "topic": topic, "producer": dict(producer)}) + "\n")
        self._process.stdin.flush()
        self._wait_for(_DONE)

    def _wait_for(self, answer: str) -> None:
        assert self._process.stdout is not None, "opened as a pipe"
        for line in self._process.stdout:  # Spark writes lines, too
            if line.strip() == answer:
                return
        raise RuntimeError("the process that writes to Kafka has ended: its error is above")


@contextmanager
def kafka_writer(servers: str) -> Iterator[KafkaWriter]:
    command = [sys.executable, "-m", "tests.bench.kafka.writer", servers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield KafkaWriter(process)
            assert process.stdin is not None, "opened as a pipe"
            process.stdin.close()
            process.wait(_ENDS_WITHIN_S)
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers")
    servers = parser.parse_args().servers
    with spark_session(connector_jars()) as spark:
        print(_READY, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            options = {"kafka.bootstrap.servers": servers, "topic": asked["topic"], **asked["producer"]}
            different_rows(spark, asked["rows"]).write.format("kafka").options(**options).save()
            print(_DONE, flush=True)


if __name__ == "__main__":
    main()
