"""An export as one tar stream: to standard output, and from standard input.

The manifest comes last, and an import checks everything before it begins. So the files of a stream that is read are
kept in a temporary folder until then; it needs as much space as the export.
"""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from natslog.backup.manifest import CLUSTER, MANIFEST, STREAMS
from natslog.errors import DamagedExport, ExportFailed
from natslog.subjects import NAME_PATTERN

_MOST_FILE_BYTES = 1024 * 1024 * 1024
_MEMBER = re.compile(
    rf"(?:{CLUSTER}|(?:{STREAMS}/{NAME_PATTERN}/)?(?:{re.escape(MANIFEST)}|\d{{20}}(?:-[1-9]\d{{0,8}})?\.arrow))"
)


class TarWriter:
    """Adds files of a folder, by the names that they have in it."""

    def __init__(self, sink: BinaryIO, folder: Path) -> None:
        self._tar = tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._folder = folder

    def add(self, path: Path) -> None:
        info = tarfile.TarInfo(str(path.relative_to(self._folder)))
        info.size, info.mode = path.stat().st_size, 0o600
        with open(path, "rb") as file:
            self._tar.addfile(info, file)

    def close(self) -> None:
        self._tar.close()


def extract(source: BinaryIO, folder: Path, on_file: Callable[[], None] = lambda: None) -> None:
    """Writes the files of an export in the tar stream into an empty folder.

    Raises:
        DamagedExport: it is cut short, or has anything else. ExportFailed: the folder has no space.
    """
    try:
        with tarfile.open(fileobj=source, mode="r|") as tar:
            for member in tar:
                target = _target(member, folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None, "it is a file"
                with open(target, "xb") as file:
                    shutil.copyfileobj(content, file, 1024 * 1024)
                if target.stat().st_size != member.size:
                    raise DamagedExport("the tar stream ends inside of a file: repeat the export")
                on_file()
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DamagedExport(f"the input is not a tar stream of an export, or is cut short: {error}") from error
    except FileExistsError as error:
        raise DamagedExport(f"the tar stream has two files {Path(error.filename).name!r}") from error
    except OSError as error:
        raise ExportFailed(
            f"the tar stream cannot be stored in {folder}: {error.strerror or error}. Set TMPDIR to a folder with space"
        ) from error


def _target(member: tarfile.TarInfo, folder: Path) -> Path:
    """Raises DamagedExport: it is no file of an export. A sparse one would take more space than the stream has."""
    if not member.isreg() or member.issparse() or not _MEMBER.fullmatch(member.name):
        raise DamagedExport(f"the tar stream has {member.name[:100]!r}, which is no file of an export")
    if not 0 <= member.size <= _MOST_FILE_BYTES:
        raise DamagedExport(f"the file {member.name!r} of the tar stream has {member.size} bytes")
    return folder / member.name
