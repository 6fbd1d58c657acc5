"""The tests of the Python source, with the jar."""

from tests.spark.test_batch import *  # noqa: F403
