"""Loads the kernels (or compiles them, the first time on a machine), so that the first message does not wait for
this.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping

import numpy as np

from natslog.ingest import acks
from natslog.ingest.ack_rules import AckRules
from natslog.ingest.batches import BatchBuilder
from natslog.ingest.conditions import conditions_of
from natslog.ingest.dedupe import DedupeWindow
from natslog.ingest.envelopes import open_messages, split_envelopes
from natslog.ingest.unwanted import split_by_subject, split_by_text
from natslog.log_events import event
from natslog.wire import machine_code, own_ids
from natslog.wire.frames import FrameParser, Frames

logger = logging.getLogger("natslog.ingest")

_ACK_RULES = [AckRules.of(setting, [">"], ["_INBOX."]) for setting in ("reply", "header", "never")]
_COMPILE_WITHIN_S = 240
_PLAIN = b"MSG a 1 b 1\r\nx\r\n"
_HEADED = b"HMSG a 1 b 60 61\r\nNATS/1.0\r\nNatslog-Key: k\r\nNats-Msg-Id: ~abcdefghijklmnop\r\n\r\nx\r\n"


def compile_aside() -> None:
    """Has other processes compile the kernels, where that has not been done on this machine, and load them once: the
    compiler leaves some 100 MiB of memory behind. Where that fails, `warm_up` compiles them in this process.
    """
    if not machine_code.have_numba() or machine_code.found() is not None or machine_code.FILE_VARIABLE in os.environ:
        return
    path = machine_code.path_to_write()
    if path is None:
        return
    made = path.with_name(f"{path.name}.{os.getpid()}")
    logger.info(
        "the first start of this version on this machine compiles machine code, which takes half a minute of one "
        "processor core; the broker becomes ready after that",
        extra=event("kernels.compiling"),
    )
    try:
        _run("-m", "natslog.wire.native_build", str(made))
        proving = os.environ | {machine_code.FILE_VARIABLE: str(made)}
        _run("-c", "from natslog.ingest.warmup import warm_up; warm_up()", environment=proving)
        made.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or b""
        logger.warning(
            "the kernels could not be compiled in a process of their own, so this one compiles them, and needs some "
            "100 MiB more memory: %s %s",
            error,
            why.decode(errors="replace")[-500:],
            extra=event("kernels.compiled_here"),
        )
    finally:
        made.unlink(missing_ok=True)


def _run(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    subprocess.run(
        [sys.executable, *arguments], check=True, timeout=_COMPILE_WITHIN_S, capture_output=True, env=environment
    )


def warm_up() -> None:
    """Processes messages completely except for the disk, so that every kernel is compiled for the types that it is used
    with.
    """
    parser, window = FrameParser(), DedupeWindow(60.0)
    for sample in (_PLAIN, _HEADED):
        builder = BatchBuilder()
        parser.receive_data(sample)
        for frames in parser.frames():
            opened, _ = open_messages(frames)
            for rules in _ACK_RULES:
                rules.applied(Frames(frames.buffer, frames.rows.copy()), opened)
            for part in (*split_by_text(frames), *split_by_subject(frames)):
                builder.add_conditions(conditions_of(part))
                builder.add(part)
            list(split_envelopes(frames, reads=True))
        batch = builder.taken()
        offsets = np.arange(batch.rows.rows, dtype=np.int64)
        assert batch.replies is not None, "the samples ask for acks"
        acks.stored(batch.replies, offsets, stream="warm-up", epoch=1)
        acks.stored(batch.replies, offsets, stream="warm-up", epoch=1, duplicate=np.ones(len(offsets), np.bool_))
        if batch.ids is not None:
            window.remember(batch.ids, offsets, 0)
            window.find(batch.ids, 0)
        if batch.rows.packed_ids is not None:
            own_ids.hashed(batch.rows.packed_ids)
