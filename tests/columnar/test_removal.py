"""The tests of the Python source, with the jar."""

from tests.spark.test_removal import *  # noqa: F403
