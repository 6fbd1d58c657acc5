"""The tests of the Python source, with the jar."""

from tests.spark.test_older_brokers import *  # noqa: F403
