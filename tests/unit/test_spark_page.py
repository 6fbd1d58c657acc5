"""docs/SPARK.md: every option that it shows exists, and every option is in its tables."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pyspark_natslog.sink.http_options import HTTP_OPTIONS
from pyspark_natslog.sink.options import JVM_ONLY, SINK_OPTIONS
from pyspark_natslog.source.options import SOURCE_OPTIONS
from tests.spark.page import PAGE, table

OPTIONS = {*SOURCE_OPTIONS, *SINK_OPTIONS, *HTTP_OPTIONS, *JVM_ONLY}
SPARKS_OWN = {"checkpointLocation", "asyncProgressTrackingEnabled"}


def documented(heading: str, known: Iterable[str]) -> set[str]:
    """Names in the first column of a section's tables; `fetch…` and `tls…File` stand for all that begin and end so."""
    names: set[str] = set()
    for first, *_ in table(heading):
        names.update(re.findall(r"`(\w+)`", first))
        for start, end in re.findall(r"`(\w+)…(\w*)`", first):
            names.update(name for name in known if name.startswith(start) and name.endswith(end))
    return names


def test_options_that_the_page_sets_exist() -> None:
    shown = set(re.findall(r'\.option\(\s*"(\w+)"', PAGE.read_text()))
    assert {"servers", "stream", "checkpointLocation"} <= shown
    assert shown <= OPTIONS | SPARKS_OWN


def test_options_that_kafkas_are_compared_with_exist() -> None:
    named = {name for row in table("Coming from Kafka") for name in re.findall(r"`([a-z]+[A-Z]\w*)`", row[1])}
    assert {"natsServers", "fetchRetries", "payloadSchema"} <= named
    assert named <= OPTIONS


def test_every_option_of_the_source_is_documented_and_no_other() -> None:
    sections = ("Options of the source", "Typed payloads", "Lag and cursors")
    found = set.union(*(documented(heading, SOURCE_OPTIONS) for heading in sections))
    assert '`load("orders")`' in str(table("Options of the source")), "which Spark passes on as the option path"
    assert found | {"path"} == set(SOURCE_OPTIONS)


def test_every_option_of_the_sink_is_documented_and_no_other() -> None:
    assert documented("Options of the sink", SINK_OPTIONS) | {"path"} == set(SINK_OPTIONS)


def test_every_option_of_direct_append_is_documented_and_no_other() -> None:
    assert documented("Direct append (`path=http`)", HTTP_OPTIONS) == set(HTTP_OPTIONS)
