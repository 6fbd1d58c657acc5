"""Kernels are compiled in another process, once per machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json
from natslog.ingest.warmup import compile_aside, warm_up
from natslog.wire import kernels, kernels_out
compile_aside()
warm_up()
stats = [kernel.stats for kernel in (kernels.scan, kernels.gather_messages, kernels_out.stored_acks)]
print(json.dumps([[sum(each.cache_hits.values()), sum(each.cache_misses.values())] for each in stats]))
"""


def test_a_process_that_warms_up_compiles_nothing_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        timeout=200,
    )
    hits_and_misses = json.loads(done.stdout)
    assert all(hits > 0 and misses == 0 for hits, misses in hits_and_misses), hits_and_misses
