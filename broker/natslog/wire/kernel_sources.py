"""What the kernels are compiled of; imports nothing of natslog: the build reads it where nothing is installed."""

from __future__ import annotations

import hashlib
from pathlib import Path

_NAMES = ("kernels*.py", "native.py", "*layout.py")


def digest(wire: Path, payload: Path) -> bytes:
    """The SHA-256 of the sources in these two folders. Raises OSError."""
    found = hashlib.sha256()
    for folder in (wire, payload):
        for source in sorted({path for name in _NAMES for path in folder.glob(name)}):
            found.update(source.read_bytes())
    return found.digest()
