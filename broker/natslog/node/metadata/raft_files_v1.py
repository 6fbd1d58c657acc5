"""The files of a Raft store up to feature level 1: those of natslog 0.1.0, which can read them.

    FOLDER/hard-state         checked file: term, vote, commit, and what the other files hold (`_Contents`)
    FOLDER/snapshot           checked file: the applied state up to an index
    FOLDER/log-<first index>  a header line, then a record for each entry from that index on; the newest file grows

Theory of operation. `hard-state` describes the other files and is replaced as a whole, and last: a save syncs the log,
then replaces `hard-state`, then returns. Everything up to the end that it names was therefore durable before, and a log
that ends before that, even between two records, is damage. Bytes after it belong to a save that never returned, or to
truncated entries: complete records with the next indexes are kept, the rest is a torn tail and is removed. In detail:
- To replace entries: name the lower end, remove and cut, append, name the new end.
- To compact: the snapshot, a new log file, `hard-state`; then the log files it covers are removed.
- A snapshot that the log disagrees with: the snapshot, a `hard-state` that names no log file; then all are removed.
- A snapshot newer than the one `hard-state` names is a crash between the two: opening completes the change.
- A log of `raft_wal` that `hard-state` does not name is a crash during the conversion: it is removed.
- Opening makes the names it found durable first (a kill may have left a rename that no fsync followed), and writes the
  records that it keeps beyond the end again: after a kill or a failed fsync such bytes may be in the page cache only.

Invariants. Nothing is changed before everything was read and validated. Once anything was saved there is a
`hard-state`, never alone. Terms never fall along the log, none is above the hard state's; snapshot index <= commit <=
last index. The first OSError is final: the state on disk is then known only after the folder is opened again.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from crc32c import crc32c

from natslog.cluster.encoding import written_by_newer
from natslog.consensus.types import Entry, HardState, Index, Snapshot, Term
from natslog.errors import DataDirError
from natslog.log.checked_file import sync_folder, write_all, write_checked
from natslog.log_events import event
from natslog.node.metadata.raft_stored import NO_SNAPSHOT, Stored, damage, read

logger = logging.getLogger("natslog.raft")

FORMAT_VERSION = 1
LOG_FILE_BYTES = 4 * 1024 * 1024
_HEADER = re.compile(rb"natslog raft-log v(\d+) first_index=(\d{20}) crc32c=([0-9a-f]{8})\n")


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`snapshot_index` is None before the first one; `log_file` is the newest's first index, 0: any found are void."""

    hard_state: HardState
    last_index: Index
    last_term: Term
    snapshot_index: Index | None
    log_file: Index


class RaftFilesV1:
    """Opens the store in `folder` and finishes what a crash interrupted.

    Raises:
        CorruptLog: what was stored is not all there, or not whole. Nothing was changed.
        DataDirError: a newer format. OSError.
    """

    def __init__(self, folder: Path, *, log_file_bytes: int = LOG_FILE_BYTES) -> None:
        self.hard_state, self.snapshot = HardState(), NO_SNAPSHOT
        self._folder, self._log_file_bytes = folder, log_file_bytes
        self._entries: list[Entry] = []
        self._files: list[Index] = []  # first index of each
        self._contents: _Contents | None = None  # of `hard-state`, on stable storage
        self._open()

    @property
    def stored(self) -> Stored:
        return Stored(self.hard_state, self.snapshot, tuple(self._entries))

    @property
    def last_index(self) -> Index:
        return Index(self.snapshot.index + len(self._entries))

    def save(
        self,
        hard_state: HardState | None,
        truncate_from: Index | None,
        entries: tuple[Entry, ...],
        snapshot: Snapshot | None,
    ) -> None:
        """On stable storage on return. Raises OSError: the folder must be opened again, and may or may not have
        this.
        """
        wanted = self.stored.after(hard_state, truncate_from, entries, snapshot)
        if self._contents is None:
            self._name_contents(self.hard_state)
        if snapshot is not None:
            write_checked(self._folder / "snapshot", "raft-snapshot", FORMAT_VERSION, snapshot)
            self._adopt(snapshot)
        if truncate_from is not None and truncate_from <= self.last_index:
            del self._entries[truncate_from - self.snapshot.index - 1 :]
            self._files = [first for first in self._files if first <= truncate_from]
            self._name_contents(self.hard_state)
            self._remove_unnamed()
        self._append(entries)
        self._name_contents(wanted.hard_state)

    # What follows changes the disk: between any two steps, and after the loss of what was not synced, the folder opens.

    def _name_contents(self, hard_state: HardState) -> None:
        """Replaces `hard-state`: with what is stored now, and no lower term or commit than log and snapshot prove."""
        is_behind = hard_state.term < self._last_term
        term, vote = (self._last_term, None) if is_behind else (hard_state.term, hard_state.vote)
        self.hard_state = HardState(term=term, vote=vote, commit=max(hard_state.commit, self.snapshot.index))
        snapshot_index = None if self.snapshot is NO_SNAPSHOT else self.snapshot.index
        newest = self._files[-1] if self._files else Index(0)
        contents = _Contents(self.hard_state, self.last_index, self._last_term, snapshot_index, newest)
        if contents != self._contents:
            write_checked(self._folder / "hard-state", "raft-hard-state", FORMAT_VERSION, contents)
            self._contents = contents

    def _append(self, entries: Sequence[Entry]) -> None:
        if not self._files or os.path.getsize(_log_path(self._folder, self._files[-1])) >= self._log_file_bytes:
            self._start_file()
        if entries:
            self._write(self._files[-1], "ab", [_record(msgspec.msgpack.encode(entry)) for entry in entries])
            self._entries += entries

    def _start_file(self) -> None:
        """A log file at the end, durable with its name before anything refers to it; none where one has just begun."""
        first = Index(self.last_index + 1)
        if first not in self._files:
            line = b"natslog raft-log v%d first_index=%020d crc32c=" % (FORMAT_VERSION, first)
            self._write(first, "xb", [line, b"%08x\n" % crc32c(line)])
            sync_folder(self._folder)
            self._files.append(first)

    def _write(self, first: Index, mode: Literal["ab", "xb"], pieces: list[bytes]) -> None:
        with open(_log_path(self._folder, first), mode, buffering=0) as file:
            write_all(file.fileno(), pieces)
            os.fdatasync(file.fileno())

    def _adopt(self, snapshot: Snapshot) -> None:
        """Continues from a snapshot that is on stable storage."""
        if not self._holds(snapshot):
            self._files, self._entries = [], []
        elif self._files:
            self._start_file()
            oldest = max(first for first in self._files if first <= snapshot.index + 1)
            self._files = [first for first in self._files if first >= oldest]
        del self._entries[: snapshot.index - self.snapshot.index]
        self.snapshot = snapshot
        self._name_contents(self.hard_state)
        self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        """Takes away the log files, and the bytes of the newest one, that `hard-state` does not name."""
        unnamed = [_log_path(self._folder, first) for first in _log_files(self._folder) if first not in self._files]
        for path in [*reversed(unnamed), *self._folder.glob("*.new"), *self._folder.glob("wal-*")]:
            os.unlink(path)
        sync_folder(self._folder)
        if not self._files:
            return
        path, records = _log_path(self._folder, self._files[-1]), self.last_index + 1 - self._files[-1]
        ends, _, problem = _read_file(path, self._files[-1], Term(0))
        if records >= len(ends):
            raise damage(path, problem)
        with open(path, "ab", buffering=0) as file:
            if extra_bytes := file.tell() - ends[records]:
                logger.info(
                    "%s: %d bytes after entry %d were removed",
                    path,
                    extra_bytes,
                    self.last_index,
                    extra=event("metadata.tail_recovered", path=path, bytes=extra_bytes),
                )
            os.ftruncate(file.fileno(), ends[records])
            os.fsync(file.fileno())  # also if there was nothing to remove: a killed process may not have synced it

    def _open(self) -> None:
        contents: _Contents | None = read(
            self._folder / "hard-state", "raft-hard-state", FORMAT_VERSION, _Contents | None
        )
        snapshot: Snapshot = (
            read(self._folder / "snapshot", "raft-snapshot", FORMAT_VERSION, Snapshot | None) or NO_SNAPSHOT
        )
        if contents is None:
            return
        named, found = contents.snapshot_index, None if snapshot is NO_SNAPSHOT else snapshot.index
        if named is not None and (found is None or found < named):
            raise damage(
                self._folder / "snapshot", f"the file is missing or outdated: the snapshot of index {named} was stored"
            )
        self.snapshot = snapshot if found == named else NO_SNAPSHOT if named is None else Snapshot(index=named)
        self._contents, self.hard_state = contents, contents.hard_state
        self._files, entries = _read_log(self._folder, contents, self.snapshot)
        beyond = [entry for entry in entries if entry.index > contents.last_index]
        self._entries = [entry for entry in entries if self.snapshot.index < entry.index <= contents.last_index]
        sync_folder(self._folder)
        self._remove_unnamed()
        if beyond:
            logger.info(
                "%s: %d complete entries after entry %d were kept",
                self._folder,
                len(beyond),
                self.last_index,
                extra=event("metadata.tail_recovered", path=self._folder),
            )
            self._append(beyond)
            self._name_contents(self.hard_state)
        if found != named:
            self._adopt(snapshot)

    def _holds(self, snapshot: Snapshot) -> bool:
        terms = [self.snapshot.term, *(entry.term for entry in self._entries)]
        return self.last_index >= snapshot.index and terms[snapshot.index - self.snapshot.index] == snapshot.term

    @property
    def _last_term(self) -> Term:
        return self._entries[-1].term if self._entries else self.snapshot.term


def _read_log(folder: Path, contents: _Contents, snapshot: Snapshot) -> tuple[list[Index], list[Entry]]:
    """The named log files; the entries in them, and those that follow the named end whole, in them or in newer ones."""
    newest, found_files, entries = contents.log_file, _log_files(folder), list[Entry]()
    if newest == 0:
        return [], []
    start = min(Index(snapshot.index + 1), newest)
    expected = max((first for first in found_files if first <= start), default=start)
    term = snapshot.term if expected > snapshot.index else Term(0)
    files = sorted(first for first in {expected, newest, *found_files} if first >= expected)
    for first in files:
        path = _log_path(folder, first)
        ends, found, problem = _read_file(path, first, term)
        if first != expected:
            ends, found, problem = [], [], f"the file begins with entry {first}, but entry {expected} is missing"
        expected = Index(expected + len(found))
        is_beyond = first > newest or (first == newest and ends and expected > contents.last_index)
        if not is_beyond and (problem or first == newest):
            ending = f"the file ends before entry {expected}, but entries up to {contents.last_index} were stored"
            raise damage(path, problem or ending)
        entries += found
        if problem:
            break
        term = found[-1].term if found else term
    known = {snapshot.index: snapshot.term, contents.last_index: contents.last_term}
    if wrong := [entry for entry in entries if entry.term != (known.get(entry.index) or entry.term)]:
        raise damage(folder, f"the log and hard-state or snapshot have different terms for entry {wrong[0].index}")
    return [first for first in files if first <= newest], entries


def _read_file(path: Path, first: Index, term: Term) -> tuple[list[int], list[Entry], str]:
    """Where the header and each whole record end (empty: no header), their entries, and what is wrong after them."""
    raw = path.read_bytes() if path.exists() else b""
    line = raw[: raw.find(b"\n") + 1]
    header = _HEADER.fullmatch(line)
    if header is None or int(header[3], 16) != crc32c(line[:-9]) or int(header[2]) != first:
        return [], [], "the file is missing, or its first line is damaged"
    if int(header[1]) > FORMAT_VERSION:
        known = f"this version of natslog supports versions up to {FORMAT_VERSION}: upgrade natslog"
        raise DataDirError(f"{path} is of format version {int(header[1])}; {known}", file=str(path))
    ends, entries = [len(line)], list[Entry]()
    while (start := ends[-1]) < len(raw):
        end = start + 8 + int.from_bytes(raw[start : start + 4], "little")
        where = f"the record at byte {start}, of entry {first + len(entries)},"
        if end > len(raw) or raw[start:end] != _record(raw[start + 8 : end]):
            return ends, entries, f"{where} is truncated, or its CRC32C does not match"
        try:
            entry = msgspec.msgpack.decode(raw[start + 8 : end], type=Entry)
        except msgspec.ValidationError as error:
            raise written_by_newer(path, error) from error
        if entry.index != first + len(entries) or entry.term < term:
            return ends, entries, f"{where} is entry {entry.index} of term {entry.term}, after one of term {term}"
        term = entry.term
        entries.append(entry)
        ends.append(end)
    return ends, entries, ""


def _record(payload: bytes) -> bytes:
    length = len(payload).to_bytes(4, "little")
    return length + crc32c(payload, crc32c(length)).to_bytes(4, "little") + payload


def _log_path(folder: Path, first: Index) -> Path:
    return folder / f"log-{first:020d}"


def _log_files(folder: Path) -> list[Index]:
    return sorted(Index(int(path.name[4:])) for path in folder.glob("log-" + "[0-9]" * 20))
