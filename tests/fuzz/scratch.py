"""A folder in memory for targets that read files; one for each process, removed at its end."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
SCRATCH = Path(tempfile.mkdtemp(prefix="natslog-fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


def fresh(name: str) -> Path:
    """An empty folder."""
    folder = SCRATCH / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
