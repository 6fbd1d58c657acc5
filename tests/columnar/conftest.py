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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They take minutes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    assert "PYTEST_XDIST_WORKER" in os.environ or SparkSession.getActiveSession() is None, "the JVM has no jar"
    strict = {"spark.unsafe.exceptionOnMemoryLeak": "true"}  # what a task holds at its end is an error
    with session(tmp_path_factory.mktemp("warehouse"), **{"spark.jars": str(jar_path())}, **strict) as found:
        yield found
