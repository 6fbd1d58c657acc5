"""`natslog` as a process that counts calls: SIGUSR1 begins, SIGUSR2 writes what was called since to the file that
NATSLOG_WALK names. Of the event loop's thread, and of natslog's own functions.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import natslog
from natslog.cli.main import main

_ROOT = str(Path(natslog.__file__).parent)
_called: list[tuple[str, str]] = []


def _note(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and (file := frame.f_code.co_filename).startswith(_ROOT):
        _called.append((file[len(_ROOT) + 1 :], frame.f_code.co_qualname))


def _begin(*_: object) -> None:
    _called.clear()
    sys.setprofile(_note)


def _end(*_: object) -> None:
    sys.setprofile(None)
    path = Path(os.environ["NATSLOG_WALK"])
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(_called))
    beside.rename(path)


signal.signal(signal.SIGUSR1, _begin)
signal.signal(signal.SIGUSR2, _end)
sys.exit(main())
