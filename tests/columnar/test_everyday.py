"""The tests of the Python source, with the jar."""

from tests.spark.test_everyday import *  # noqa: F403
