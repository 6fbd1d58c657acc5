"""The tests of the Python source, with the jar."""

from tests.spark.test_access import *  # noqa: F403
