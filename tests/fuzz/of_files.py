"""Files: segments, the folder of a log, the stores of Raft, small checked files."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path

import msgspec

from natslog.arrow import ipc
from natslog.consensus import Entry, HardState, Index, Member, Membership, Snapshot, Term
from natslog.errors import CorruptLog, DataDirError, OffsetOutOfRange, UpgradeRequired
from natslog.log import LogOptions, ReplicaLog
from natslog.log.checked_file import checked_bytes, read_checked, read_record
from natslog.log.recovery import scan_segment
from natslog.log.segment import check_file_header
from natslog.model import BrokerId
from natslog.node.life import _Stored as StoredLife
from natslog.node.metadata.raft_store import RaftStore
from tests.conftest import STREAM_ID, open_log, rows
from tests.fuzz import edits
from tests.fuzz.scratch import SCRATCH, fresh
from tests.fuzz.target import target
from tests.unit.log.test_run_log import append_run

# ---- an unsealed segment ----


@functools.cache
def _segments() -> list[bytes]:
    found = []
    for batch_format in (1, 2):
        log = open_log(fresh("segment"))
        for at in range(3):
            log.append(rows([b"value %d" % at, b"x" * 50 * at]), at + 1, batch_format=batch_format)
        if batch_format == 2:
            append_run(log, "query-1", 7, [[b"a", b"b"], [b"c"]])
            log.append(rows([b"z" * 9000]), 9)
        found.append(log.chain.segments[0].path.read_bytes())
        log.close()
    return found


@functools.cache
def _batches_of(number: int) -> list[tuple[int, bytes]]:
    """Base offset and bytes of each batch of a segment."""
    data = _segments()[number]
    position = check_file_header(data[:8192], Path("seed"), STREAM_ID, 0)
    return [(header.base_offset, bytes(one)) for header, one in ipc.split_messages(data[position:], source="seed")]


@target("segment", lambda: edits.seeds(_segments()))
def check_segment(script: bytes) -> None:
    """Recovery keeps only batches that were written, at their offsets; without damage they are a prefix of what was
    written, and nothing that is known to be committed is removed without a report of damage.
    """
    number = edits.chosen(script, len(_segments()))
    data = edits.edited(script, _segments())
    path = SCRATCH / f"{0:020d}.active"
    path.write_bytes(data)
    try:
        position = check_file_header(data[:8192], path, STREAM_ID, 0)
    except (CorruptLog, DataDirError):
        return
    written = {batch: base for each in range(len(_segments())) for base, batch in _batches_of(each)}
    own = _batches_of(number)
    end_offset = own[-1][0] + 1
    for durable_offset, several_bytes in ((0, 0), (end_offset // 2, 0), (end_offset, 0), (0, 1 << 20)):
        scan = scan_segment(
            path, position=position, base_offset=0, durable_offset=durable_offset, several_bytes=several_bytes
        )
        kept, covered = [], 0
        for at in range(len(scan.index)):
            entry = scan.index[at]
            batch = data[entry.position : entry.position + entry.length]
            assert written.get(batch) == entry.base_offset, "a batch was kept that was not written"
            assert entry.base_offset >= covered, "offsets are stored twice"
            covered = entry.end_offset
            kept.append((entry.base_offset, batch))
        assert scan.end_position + scan.torn_bytes == len(data)
        is_own = all(one in own for one in kept)
        if not scan.damages:
            assert [base for base, _ in kept] == [base for base, _ in own[: len(kept)]] or not is_own
            is_cut = scan.torn_bytes > 0 and covered < durable_offset
            assert not (is_own and is_cut), "committed messages were removed"


# ---- the folder of a log ----


@functools.cache
def _folder() -> dict[str, bytes]:
    """A closed log: two sealed segments (merged and compressed), an unsealed one, and the files beside them."""
    folder = fresh("log")
    log = open_log(folder, LogOptions(min_free_bytes=0), compression="zstd")
    for at in range(2):
        log.append(rows([b"first %d" % at]), at + 1)
    append_run(log, "query-1", 7, [[b"a", b"b"], [b"c"]], now_us=5)
    log.roll()
    log.upkeep.seal_next()
    log.append(rows([b"second"] * 3), 6)
    log.roll()
    log.upkeep.seal_next()
    log.append(rows([b"third", b"y" * 5000]), 7)
    append_run(log, "write-x", 0, [[b"d"]], now_us=8)
    log.close()
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@functools.cache
def _values() -> list[bytes]:
    return [b"first 0", b"first 1", b"a", b"b", b"c", *[b"second"] * 3, b"third", b"y" * 5000, b"d"]


@target("log", lambda: edits.seeds(list(_folder().values())))
def check_log(script: bytes) -> None:
    """A log with one damaged file opens, or reports what is damaged. It serves no message that was not stored at that
    offset, what it serves is the same after it was opened again, and committed messages are only missing where damage
    is reported.
    """
    names, originals = list(_folder()), list(_folder().values())
    folder = fresh("log")
    for name, data in _folder().items():
        (folder / name).write_bytes(data)
    (folder / names[edits.chosen(script, len(names))]).write_bytes(edits.edited(script, originals))
    first = _served(folder)
    if first is not None:
        again = _served(folder)
        assert again is not None, "a log that was opened cannot be opened again"
        assert first == again, "another start serves other messages"


def _served(folder: Path) -> dict[int, bytes] | None:
    """The messages of the log by offset; None where it does not open."""
    try:
        log = open_log(folder, LogOptions(min_free_bytes=0), compression="zstd")
    except (CorruptLog, DataDirError):
        return None
    try:
        found, is_reported = _read(log)
        is_reported |= log.failure is not None
        assert is_reported or len(found) == len(_values()), "committed messages are missing without a report"
        for producer in ("query-1", "write-x"):
            with contextlib.suppress(CorruptLog):
                run = log.last_run(producer, is_committed=False)
                assert run is None or (run.producer, run.batch) in (("query-1", 7), ("write-x", 0))
        return found
    finally:
        log.close()


def _read(log: ReplicaLog) -> tuple[dict[int, bytes], bool]:
    """All that can be read, a batch at a time, as it was written; and whether damage was reported."""
    found, is_reported = dict[int, bytes](), False
    for start in range(len(_values())):
        if start in found:
            continue
        try:
            with log.reader.plan_read(start, max_bytes=1, uncommitted=True) as plan:
                for message in plan.messages():
                    found |= _messages(message)
        except CorruptLog:
            is_reported = True
        except OffsetOutOfRange:
            pass
    return found, is_reported


def _messages(message: bytes) -> dict[int, bytes]:
    header = ipc.proven_header(message)
    assert header is not None, "a batch is served whose header is damaged"
    assert ipc.body_holds(header, message), "a batch is served whose CRC does not hold"
    found = dict(enumerate(ipc.decode_batch(message).column("value").to_pylist(), header.base_offset))
    for offset, value in found.items():
        assert offset < len(_values()), "a message has an offset that was never assigned"
        assert value == _values()[offset], f"offset {offset} has another message"
    return found


# ---- Raft ----


@functools.cache
def _store() -> dict[str, bytes]:
    """The files of a store, by name."""
    members = Membership(members=(Member(id=BrokerId(1), directory="d", url="http://127.0.0.1:9292"),))
    snapshot = Snapshot(index=Index(1), term=Term(1), membership=members, data=b"state")
    folder = fresh("raft")
    store = RaftStore(folder, room_bytes=2048)
    store.save(HardState(term=Term(1), commit=Index(1)), None, (), snapshot)
    for index in range(2, 7):
        entry = Entry(Index(index), Term(index // 2), "command", b"do %d" % index * index)
        store.save(HardState(term=Term(3), commit=Index(index - 1)), None, [entry], None)
    store.save(None, Index(6), [Entry(Index(6), Term(3), "empty")], None)
    store.close()
    return _contents(folder)


def _laid_out() -> Path:
    folder = fresh("raft")
    for name, data in _store().items():
        (folder / name).write_bytes(data)
    return folder


@functools.cache
def _stored() -> tuple[HardState, Snapshot, tuple[Entry, ...]]:
    return _opened(_laid_out())


def _opened(folder: Path) -> tuple[HardState, Snapshot, tuple[Entry, ...]]:
    store = RaftStore(folder, room_bytes=2048)
    found = store.hard_state, store.snapshot, store.entries
    store.close()
    return found


@target("raft", lambda: edits.seeds(list(_store().values())))
def check_raft(script: bytes) -> None:
    """A store with one damaged file is refused, and none of its files is changed; or it has all that was saved, and
    nothing else.
    """
    names, originals = sorted(_store()), list(_store().values())
    damaged = names[edits.chosen(script, len(names))]
    expected, folder = _stored(), _laid_out()
    (folder / damaged).write_bytes(edits.edited(script, originals))
    before = _contents(folder)
    try:
        found = _opened(folder)
    except (CorruptLog, DataDirError, UpgradeRequired):
        assert _contents(folder) == before, "a store that is refused was changed"
        return
    assert found == expected, "a damaged store holds something else than what was saved"
    assert _opened(folder) == expected, "the second start finds something else"


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "reserve"}


# ---- checked files ----

_LIFE = StoredLife(number=7, directory="3f", nonce="a1", lives=("3f.6.9c", "3f.7.a1"))


def _checked() -> list[bytes]:
    return [checked_bytes("life", 2, _LIFE), checked_bytes("life", 1, {"number": 7}), checked_bytes("life", 9, _LIFE)]


@target("checked-file", lambda: edits.seeds(_checked()))
def check_checked_file(script: bytes) -> None:
    """A checked file has the content that was written, or it is refused."""
    path = SCRATCH / "life"
    path.write_bytes(edits.edited(script, _checked()))
    try:
        content = read_checked(path, "life", 2)
        record = read_record(path, "life", 2, StoredLife)
    except (CorruptLog, DataDirError):
        return
    written = json.loads(msgspec.json.encode(_LIFE))
    assert content in (written, {"number": 7}), "a content was read that was not written"
    assert record in (_LIFE, StoredLife(number=7))
