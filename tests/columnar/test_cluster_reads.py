"""The tests of the Python source, with the jar."""

from tests.spark.test_cluster_reads import *  # noqa: F403
from tests.spark.test_cluster_reads import _in_sync  # noqa: F401
