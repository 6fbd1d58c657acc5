"""The tests of the Python source, with the jar. Drivers are killed in `test_switching`."""

from tests.spark.test_stream import *  # noqa: F403

del test_driver_killed_in_mid_run_and_restarted_writes_every_offset_exactly_once  # noqa: F821
