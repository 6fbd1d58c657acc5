"""As tests/spark, with a Spark that has the jar. A process has one JVM, so both do not run in one pytest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pyspark_natslog.jar import jar_path
from tests.spark.conftest import folder, reader, session, shared

__all__ = ["folder", "reader", "shared", "spark"]


IN_MAKE_TEST = (
    "test_batch.py::test_source_is_found_without_registration_and_has_the_promised_columns",
    "test_batch.py::test_ranges",
    "test_stream.py::test_restart_from_the_checkpoint_goes_on_where_it_was",
    "test_real_time.py::test_a_query_goes_on_from_its_checkpoint_in_either_mode",
    "test_damage.py::test_response_that_is_damaged_every_time_is_an_error",
)
"""One short test of each kind. The others take minutes, and run in `make test-all`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not is_in_make_test(item.nodeid):
            item.add_marker(pytest.mark.long)


def is_in_make_test(nodeid: str) -> bool:
    return nodeid.partition("[")[0].rpartition("/")[2] in IN_MAKE_TEST


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    assert "PYTEST_XDIST_WORKER" in os.environ or SparkSession.getActiveSession() is None, "the JVM has no jar"
    strict = {"spark.unsafe.exceptionOnMemoryLeak": "true"}  # what a task holds at its end is an error
    with session(tmp_path_factory.mktemp("warehouse"), **{"spark.jars": str(jar_path())}, **strict) as found:
        yield found
