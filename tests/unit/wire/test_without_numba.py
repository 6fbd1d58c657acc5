"""The base install has no numba: the whole way from bytes to columns must be the same without it, only slower."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error")
if sys.argv[1] == "without":
    sys.modules["numba"] = None  # an import of it fails
import numpy as np
from natslog.ingest.batches import BatchBuilder, split_by_expectation, split_by_text
from natslog.ingest.dedupe import DedupeWindow
from natslog.wire import compiled
from natslog.wire.frames import FrameParser
from natslog.ingest.warmup import warm_up
warm_up()
block = b"NATS/1.0\\r\\nNats-Msg-Id: id-%d\\r\\nNatslog-Key: k\\r\\n\\r\\n"
data = b"PING\\r\\nMSG a.b 1 reply 5\\r\\nhello\\r\\n"
for at in range(50):
    head = block % (at % 20)
    data += b"HMSG a.c 1 %d %d\\r\\n" % (len(head), len(head) + 3) + head + b"abc\\r\\n"
parser, builder = FrameParser(), BatchBuilder()
parser.receive_data(data)
for frames in parser.frames():
    good, bad = split_by_text(frames.select(frames.rows[:, 0] == 1))
    good, expecting = split_by_expectation(good)
    builder.add(good)
batch = builder.taken()
window = DedupeWindow(60)
window.remember(batch.ids[:10], np.arange(10), 0)
rows = [[str(value) for value in row.values()] for row in batch.rows.to_arrow().to_pylist()]
print(json.dumps([compiled.HAVE_NUMBA, rows, batch.ids.tolist(), window.find(batch.ids, 0).tolist()]))
"""


def run(mode: str) -> list:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_columns_hashes_and_duplicates_are_the_same_without_numba() -> None:
    compiled, plain = run("with"), run("without")
    assert (compiled.pop(0), plain.pop(0)) == (True, False)
    assert compiled == plain
    assert len(compiled[0]) == 51
