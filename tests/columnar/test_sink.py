"""The tests of the Python sink, with the jar. Retried tasks need a Spark of their own."""

from tests.spark.test_sink import *  # noqa: F403

del test_retried_task_is_stored_once_and_twice_where_nothing_deduplicates  # noqa: F821
