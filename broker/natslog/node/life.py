"""The lives of a data folder: the file `life`, which numbers and names its starts.

    {"number": 7, "has_ended": false, "directory": "3f…", "nonce": "a1…", "lives": ["3f….6.9c…", "3f….7.a1…"]}

Theory of operation. A start stores the next number and a new random nonce before any other change of the folder.
Before this life is proposed for registration, its name is stored in `lives` (`note`). The registered life is therefore
always listed in its folder, also after a crash at any point; and it is in no copy that was made before. Starts that
never connected to a metadata leader are not proposed, and are not listed: the list grows with registrations only. It
keeps the last 128, so that brokers whose metadata is behind by some lives recognise the folder too.

The file has format version 2, or 1 where natslog 0.2.0 has registered no life with a nonce yet. Lives that were
registered at feature level 1 are listed without a nonce.

Invariants. The file is replaced whole: a crash leaves the old content or the new one. A number is used with one nonce
only in what was proposed. `has_ended` is stored last in a life.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from natslog.errors import CorruptLog
from natslog.log.checked_file import read_record
from natslog.node.disk_reserve import write_checked

MAX_LIVES = 128
_VERSION = 2


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    number: int = 0
    has_ended: bool = False
    directory: str = ""
    nonce: str = ""
    lives: tuple[str, ...] = ()


def stored_directory(path: Path) -> str:
    """The folder that the file names; "" where there is no file. Raises CorruptLog."""
    return _read(path).directory


def _read(path: Path) -> _Stored:
    return read_record(path, "life", _VERSION, _Stored) or _Stored()


class Life:
    """Begins the next life of a folder.

    Args:
        path: of the file `life`.
        directory: the folder's id.
        must_exist: the folder was used before. Where the file is missing, nothing is stored until `follow` or `note`.

    Attributes:
        number: of this life. `nonce`: of this life.
        lives: the names of the lives that were proposed, the newest last.
        after: the name of the life that ended gracefully immediately before this one, or "". is_missing: the file does
        not exist, but must exist.

    Raises:
        CorruptLog: the file is damaged, or belongs to another folder. OSError: it cannot be written.
    """

    def __init__(self, path: Path, directory: str, *, must_exist: bool) -> None:
        last = _read(path)
        if last.directory not in ("", directory):
            raise CorruptLog(
                f"{path} belongs to another data folder ({last.directory}): the files of several folders were mixed",
                file=str(path),
            )
        self._path, self._directory = path, directory
        self.is_missing = last.number == 0 and must_exist
        self.lives = last.lives
        ended = [one for one in self.lives[-1:] if last.has_ended and _number(one) == last.number]
        self.after = ended[0] if ended else ""
        self.number, self.nonce = last.number + 1, secrets.token_hex(8)
        if not self.is_missing:
            self._store()

    @property
    def name(self) -> str:
        """By which this life is registered."""
        return f"{self._directory}.{self.number}.{self.nonce}"

    @property
    def shown(self) -> tuple[str, ...]:
        """The lives of this folder for other brokers: earlier lives, and this one last."""
        return (*(one for one in self.lives if one != self.name), self.name)

    def note(self) -> None:
        """Lists this life, durably: it is about to be proposed. Raises OSError."""
        if self.lives[-1:] != (self.name,):
            self._store(lives=(*self.lives, self.name)[-MAX_LIVES:])

    def follow(self, number: int, name: str) -> None:
        """Makes this the life after that one: the folder's own metadata proves it. Raises OSError."""
        lives = (*(one for one in self.lives if one != name), name)[-MAX_LIVES:]
        self._store(number=max(self.number, number + 1), lives=lives)
        self.after = ""

    def end(self) -> None:
        """Everything is on disk as the logs say: the next life need not prove it. Raises OSError."""
        self._store(has_ended=True)

    def _store(
        self, *, number: int | None = None, lives: tuple[str, ...] | None = None, has_ended: bool = False
    ) -> None:
        """On disk first, then in memory: data that is not durable is never sent to others."""
        stored = _Stored(
            number=self.number if number is None else number,
            has_ended=has_ended,
            directory=self._directory,
            nonce=self.nonce,
            lives=self.lives if lives is None else lives,
        )
        write_checked(self._path, "life", _VERSION, stored)
        self.number, self.lives, self.is_missing = stored.number, stored.lives, False


def _number(name: str) -> int:
    return int(name.split(".")[1])
