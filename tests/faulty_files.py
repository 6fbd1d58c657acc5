"""`python -m tests.faulty_files …` is natslog, whose operations on files fail at a place and with an error of the
test's choice. A place is an operation and the function of natslog that asks for it:
`pwrite natslog.log.segment:append`.

The folder NATSLOG_FAULTS has the file `fail` (a place and an errno, while there is one), and gets the file `places`.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_READS, _WRITES = ("read", "pread", "preadv"), ("write", "pwrite", "pwritev", "ftruncate", "truncate")
_SYNCS, _NAMES = ("fsync", "fdatasync", "posix_fallocate"), ("replace", "rename", "unlink", "remove", "link")
_FOLDERS = ("mkdir", "rmdir", "scandir", "listdir", "stat", "statvfs")
OPERATIONS: dict[Any, tuple[str, ...]] = {
    os: ("open", *_READS, *_WRITES, *_SYNCS, *_NAMES, *_FOLDERS),
    io: ("open",),
    builtins: ("open",),
}
_DEPTH = 16
_LOOKS_EVERY_S = 0.02


class Faults:
    """Attributes: fail: the place at which operations fail now, and with which errno."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fail = folder, ("", 0)
        self._seen: set[str] = set()
        self._open, self._read = builtins.open, Path.read_text
        self._places = self._open(folder / "places", "a", buffering=1)
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            try:
                with self._open(self.folder / "fail") as file:
                    place, number = file.read().rsplit(" ", 1)
                self.fail = place, int(number)
            except (FileNotFoundError, ValueError):
                self.fail = "", 0
            time.sleep(_LOOKS_EVERY_S)

    def wrap(self, where: Any, name: str) -> None:
        really = getattr(where, name)

        def operation(*arguments: Any, **named: Any) -> Any:
            self._check(name, arguments)
            return really(*arguments, **named)

        setattr(where, name, operation)

    def _check(self, name: str, arguments: tuple[Any, ...]) -> None:
        frame = sys._getframe(2)
        for _ in range(_DEPTH):
            module = frame.f_globals.get("__name__", "")
            if module.startswith("natslog."):
                place = f"{name} {module}:{frame.f_code.co_name}"
                if place not in self._seen:
                    self._seen.add(place)
                    self._places.write(place + "\n")
                if self.fail[0] == place:
                    raise OSError(self.fail[1], os.strerror(self.fail[1]), *(arguments[:1] if name == "open" else ()))
                return
            if frame.f_back is None or module.startswith("importlib"):
                return
            frame = frame.f_back


def _install() -> None:
    faults = Faults(Path(os.environ["NATSLOG_FAULTS"]))
    wrap: Callable[[Any, str], None] = faults.wrap
    for where, names in OPERATIONS.items():
        for name in names:
            wrap(where, name)


if __name__ == "__main__":
    _install()
    from natslog.cli import main

    main()
