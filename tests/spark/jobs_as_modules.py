"""What jobs are made of, as modules: their folder is no package, for `spark-submit` takes single files."""

from __future__ import annotations

import sys

from tests.spark.job_processes import JOBS

sys.path.insert(0, str(JOBS))

import checkpoints
import compact_parquet
import demo_plot
import enrich_stream
import job_credentials
import job_support
import replay_range
import stream_to_parquet
import subject_mapping

__all__ = [
    "checkpoints",
    "compact_parquet",
    "demo_plot",
    "enrich_stream",
    "job_credentials",
    "job_support",
    "replay_range",
    "stream_to_parquet",
    "subject_mapping",
]
