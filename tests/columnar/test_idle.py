"""The tests of the Python source, with the jar."""

from tests.spark.test_idle import *  # noqa: F403
