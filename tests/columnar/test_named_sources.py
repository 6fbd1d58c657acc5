"""The tests of the Python source, with the jar."""

from tests.spark.test_named_sources import *  # noqa: F403
