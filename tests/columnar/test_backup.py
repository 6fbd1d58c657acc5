"""The tests of the Python source, with the jar."""

from tests.spark.test_backup import *  # noqa: F403
