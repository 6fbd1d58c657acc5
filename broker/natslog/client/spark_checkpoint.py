"""Reads which positions a Spark query has committed, from the files of its checkpoint. Spark is not needed.

    checkpoint/metadata      {"id": "d7352eb9-…"}
    checkpoint/offsets/7     v1, then JSON of Spark, then the position of each source at the end of batch 7
    checkpoint/commits/7     exists when the sink has confirmed batch 7

Theory of operation. Spark writes `offsets/N` before batch N, and `commits/N` after it. So the newest batch with a
`commits` file is the last one that the query has committed, and a newer `offsets` file is a batch that was planned: it
may be in the sink in part or as a whole. Spark makes both kinds of files by renaming, so that the name is enough to
know that a batch is committed, also where a power failure has left the file empty. Lines of sources stand in the order
of the sources in the query (`v1`), or begin with the number or the name of the source (`v2`, from Spark 4.2 on).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from pyarrow import fs

from natslog.errors import ConfigError

_VERSIONS = ("v1", "v2")
_NO_OFFSET = "-"
_MOST_BYTES = 256 * 1024 * 1024
_KNOWN_FIELDS = frozenset(("id", "offset", "epoch", "start", "tasks"))


class StreamPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The next offset to read of the stream with this id; `epoch` of the leader that stated it, 0 where unknown."""

    id: str
    offset: Annotated[int, msgspec.Meta(ge=0)]
    epoch: int = 0


class SourcePositions(msgspec.Struct, frozen=True, kw_only=True):
    """Of one source of the query; `streams` None where it is not a source of natslog, or has no position yet."""

    source: str
    streams: dict[str, StreamPosition] | None

    @property
    def starting_offsets(self) -> str:
        """For the option `startingOffsets`."""
        return msgspec.json.encode({name: at.offset for name, at in sorted((self.streams or {}).items())}).decode()


class SparkCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`batch` is the last one that was committed, or the one that was asked for. `planned`: positions at the end of the
    batch that Spark planned after it, and has not committed; None where there is no such batch, or it cannot be read.
    """

    query_id: str | None
    batch: int
    sources: list[SourcePositions]
    planned: list[SourcePositions] | None
    warnings: list[str]


def read_spark_checkpoint(location: str, batch: int | None = None) -> SparkCheckpoint:
    """The positions at the end of the last batch that the query has committed.

    Args:
        location: a folder, or a URL that pyarrow can open (`file:`, `s3:`, `gs:`, `hdfs:`, `abfs:`).
        batch: another batch, of those that Spark keeps (100, by default).

    Raises:
        ConfigError: it is not a checkpoint, nothing is committed, or the positions of the batch cannot be read.
    """
    files = _Files(location)
    commits, offsets = files.numbers("commits"), files.numbers("offsets")
    if not commits and not offsets:
        raise ConfigError(
            f"{location} is not the checkpoint of a streaming query: it has no folders offsets and commits with files. "
            "Give the folder that the option checkpointLocation names"
        )
    if not commits:
        raise ConfigError(
            f"the query of {location} has committed no batch: begin its new checkpoint with the same startingOffsets "
            "as before",
            planned=max(offsets),
        )
    chosen = max(commits) if batch is None else batch
    if chosen not in commits:
        raise ConfigError(
            f"batch {chosen} of {location} is not committed; these are: {_ranges(commits)}", committed=sorted(commits)
        )
    try:
        sources = _positions(files, chosen)
    except ConfigError as error:
        raise ConfigError(_without(location, chosen, commits & offsets, error)) from error
    planned, warnings = _planned_after(files, chosen, offsets - commits)
    return SparkCheckpoint(query_id=files.query_id(), batch=chosen, sources=sources, planned=planned, warnings=warnings)


def _without(location: str, batch: int, readable: set[int], error: ConfigError) -> str:
    """What to do where the positions of the last batch are damaged: no exact answer exists then."""
    before = max((one for one in readable if one < batch), default=None)
    remedy = (
        "no earlier batch is kept: choose startingOffsets or startingTimestamp by what the sink contains"
        if before is None
        else f"--batch {before} shows where batch {before} ended: from there, the query repeats what followed"
    )
    return f"the last batch of {location} that is committed is {batch}, and {error.message}; {remedy}"


def _planned_after(files: _Files, batch: int, begun: set[int]) -> tuple[list[SourcePositions] | None, list[str]]:
    if batch + 1 not in begun:
        return None, []
    try:
        planned = _positions(files, batch + 1)
    except ConfigError as error:
        return None, [f"batch {batch + 1} was begun, and {error.message}: its rows may be in the sink already"]
    return planned, []


def _positions(files: _Files, batch: int) -> list[SourcePositions]:
    """Of all sources at the end of a batch. Raises ConfigError."""
    name = f"offsets/{batch}"
    text = files.text(name)
    lines = text.rstrip("\n").split("\n")  # Spark ends lines so; others end lines within the JSON of other sources
    if not text:
        raise ConfigError(f"its file {name} is missing or empty")
    if lines[0] not in _VERSIONS:
        raise ConfigError(
            f"its file {name} has the format {lines[0][:20]!r}, and this natslog reads v1 and v2: use a newer natslog"
        )
    if len(lines) < 3:
        raise ConfigError(f"its file {name} is incomplete")
    sources = []
    for at, line in enumerate(lines[2:]):
        source, _, offset = line.partition(":") if lines[0] == "v2" else (str(at), "", line)
        sources.append(SourcePositions(source=source, streams=_streams(name, offset)))
    return sources


def _streams(file: str, line: str) -> dict[str, StreamPosition] | None:
    """None where it is the position of another kind of source. Raises ConfigError."""
    if line.strip() == _NO_OFFSET:
        return None
    try:
        body = msgspec.json.decode(line)
    except RecursionError:  # too deep for one of natslog
        return None
    except msgspec.DecodeError as error:
        if line.lstrip().startswith("{"):
            raise ConfigError(f"its file {file} is damaged: a position is not JSON") from error
        return None  # sources may write any text
    if not isinstance(body, dict) or not body or not all(_is_position(at) for at in body.values()):
        return None
    return {name: _position(file, name, at) for name, at in body.items()}


def _is_position(at: Any) -> bool:
    return isinstance(at, dict) and isinstance(at.get("id"), str) and "offset" in at


def _position(file: str, stream: str, at: Mapping[str, Any]) -> StreamPosition:
    if unknown := sorted(at.keys() - _KNOWN_FIELDS):
        raise ConfigError(
            f"its file {file} was written by a newer natslog: the position of stream {stream!r} has "
            f"{', '.join(unknown)}; use that natslog"
        )
    try:
        return msgspec.convert({name: at[name] for name in ("id", "offset", "epoch") if name in at}, StreamPosition)
    except msgspec.ValidationError as error:
        raise ConfigError(f"its file {file} is damaged: stream {stream!r}: {error}") from error


def _ranges(numbers: set[int]) -> str:
    """`0 to 3, 7`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in found)


class _Files:
    """The files of a checkpoint, wherever it is."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._system: fs.FileSystem
        self._folder: str
        try:
            if "://" in location or location.startswith("file:"):
                url = re.sub("^s3[an]://", "s3://", location)  # as Hadoop has it
                self._system, self._folder = fs.FileSystem.from_uri(url)
            else:
                self._system, self._folder = fs.LocalFileSystem(), location.rstrip("/") or "/"
            kind = self._system.get_file_info(self._folder).type
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ConfigError(f"{location} cannot be opened: {error}") from error
        if kind is not fs.FileType.Directory:
            raise ConfigError(f"{location} is not a folder: give what the option checkpointLocation names")

    def numbers(self, folder: str) -> set[int]:
        """The batches that have a file there."""
        selector = fs.FileSelector(f"{self._folder}/{folder}", allow_not_found=True)
        try:
            found = self._system.get_file_info(selector)
        except OSError as error:
            raise ConfigError(f"{self._location}/{folder} cannot be read: {error}") from error
        names = [one.base_name for one in found if one.type is fs.FileType.File]
        return {int(name) for name in names if name.isascii() and name.isdecimal() and len(name) <= 18}

    def text(self, name: str) -> str:
        """Of a file; empty where it is missing. Raises ConfigError."""
        try:
            with self._system.open_input_stream(f"{self._folder}/{name}") as file:
                body = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise ConfigError(f"its file {name} cannot be read: {error}") from error
        if len(body) > _MOST_BYTES:
            raise ConfigError(f"its file {name} is larger than any that Spark writes")
        try:
            return bytes(body).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"its file {name} is damaged: it is not UTF-8") from error

    def query_id(self) -> str | None:
        """None where the file is missing or damaged: positions do not depend on it."""
        try:
            found = msgspec.json.decode(self.text("metadata"))
        except (ConfigError, msgspec.DecodeError):
            return None
        found = found.get("id") if isinstance(found, dict) else None
        return found if isinstance(found, str) else None
