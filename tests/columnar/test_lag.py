"""The tests of the Python source, with the jar."""

from tests.spark.test_lag import *  # noqa: F403
