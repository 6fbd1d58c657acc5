"""Loads the kernels (or compiles them, the first time on a machine), so that the first message does not wait for
this.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from natslog.ingest import acks
from natslog.ingest.ack_rules import AckRules
from natslog.ingest.batches import BatchBuilder, split_by_expectation, split_by_subject, split_by_text
from natslog.ingest.dedupe import DedupeWindow
from natslog.wire import compiled, kernels
from natslog.wire.frames import FrameParser, Frames

logger = logging.getLogger("natslog.ingest")

_ACK_RULES = [AckRules.of(setting, ">", ["_INBOX."]) for setting in ("reply", "header", "never")]
_COMPILE_WITHIN_S = 120
_PLAIN = b"MSG a 1 b 1\r\nx\r\n"
_HEADED = b"HMSG a 1 b 48 49\r\nNATS/1.0\r\nNatslog-Key: k\r\nNats-Msg-Id: 12345\r\n\r\nx\r\n"


def compile_aside() -> None:
    """A child process compiles the kernels if this has not been done on this machine: a compiler leaves some 150 MiB of
    memory allocated. Where it cannot, `warm_up` compiles in this process.
    """
    if not compiled.HAVE_NUMBA:
        return
    scan: Any = kernels.scan
    if scan.stats.cache_path is None:
        return
    kept = Path(scan.stats.cache_path).glob("kernels.scan-*.nbi")  # those of other versions stay beside it
    source = Path(str(kernels.__file__))  # numba, too, goes by the file that a kernel stands in
    if max((index.stat().st_mtime for index in kept), default=0.0) < source.stat().st_mtime:
        program = "from natslog.ingest.warmup import warm_up; warm_up()"
        command = [sys.executable, "-c", program]
        try:
            subprocess.run(command, check=True, timeout=_COMPILE_WITHIN_S, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("the kernels could not be compiled in a child process: %s", error)


def warm_up() -> None:
    """Processes messages completely except for the disk, so that every kernel is compiled for the types that it is used
    with.
    """
    parser, window = FrameParser(), DedupeWindow(60.0)
    for sample in (_PLAIN, _HEADED):
        builder = BatchBuilder()
        parser.receive_data(sample)
        for frames in parser.frames():
            for rules in _ACK_RULES:
                rules.applied(Frames(frames.buffer, frames.rows.copy()))
            for part in (*split_by_text(frames), *split_by_subject(frames), *split_by_expectation(frames)):
                builder.add(part)
        batch = builder.taken()
        offsets = np.arange(batch.rows.rows, dtype=np.int64)
        assert batch.replies is not None, "the samples ask for acks"
        acks.stored(batch.replies, offsets, stream="warm-up", epoch=1)
        acks.stored(batch.replies, offsets, stream="warm-up", epoch=1, duplicate=np.ones(len(offsets), np.bool_))
        if batch.ids is not None:
            window.remember(batch.ids, offsets, 0)
            window.find(batch.ids, 0)
