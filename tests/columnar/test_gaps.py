"""The tests of the Python source, with the jar."""

from tests.spark.test_gaps import *  # noqa: F403
