"""Images of a folder as a crash would leave it: before each change of a name and each sync of a piece of work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

_CALLS = ("replace", "rename", "unlink", "fsync", "fdatasync")


@dataclass(frozen=True, slots=True)
class Image:
    """A copy of the folder. `moment`: the call before which it was made."""

    folder: Path
    moment: str


class Images:
    """Of `folder`, made in `target`.

    Args:
        only: the number of the one call before which an image is made; None: before each.
        tears: a file that is being synced has only a part of its bytes in the image.
    """

    def __init__(self, folder: Path, target: Path, only: int | None = None, *, tears: bool = False) -> None:
        self.made: list[Image] = []
        self._folder, self._target, self._only, self._tears = folder, target, only, tears
        self._calls = 0

    def before(self, call: str, argument: Any) -> None:
        is_sync = isinstance(argument, int)
        path = Path(os.readlink(f"/proc/self/fd/{argument}") if is_sync else os.fspath(argument))
        if not path.is_relative_to(self._folder):
            return
        number, self._calls = self._calls, self._calls + 1
        if self._only in (None, number):
            image = self._target / f"image{number}"
            shutil.copytree(self._folder, image)
            if self._tears and is_sync and path.is_file():
                copied = image / path.relative_to(self._folder)
                os.truncate(copied, copied.stat().st_size // 2)
            self.made.append(Image(image, f"{number}: {call} {path.name}"))


@contextmanager
def images_of(images: Images) -> Iterator[None]:
    """Of the work within."""
    is_copying = False

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(argument: Any, *others: Any, **named: Any) -> Any:
            nonlocal is_copying
            if not is_copying:
                is_copying = True
                try:
                    images.before(name, argument)
                finally:
                    is_copying = False
            return real(argument, *others, **named)

        return call

    with patch.multiple(os, **{name: noted(name, getattr(os, name)) for name in _CALLS}):
        yield
