"""The Raft store against a dumb model: crashes and power loss between any two steps, cuts, flips, missing files.

How power loss is played: `Disk` stands between the store and its folder and remembers what an fsync made durable, of
every file and of the folder's names. Before each step it asks for *images* of what may be found afterwards: everything
(a killed process), nothing but the durable (all caches lost), and random mixtures of the two. Every image must open.
"""

from __future__ import annotations

import errno
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c
from msgspec.structs import replace

from natslog.consensus.types import Entry, HardState, Index, Member, Membership, Snapshot, Term
from natslog.errors import CorruptLog, DataDirError, StorageFailed
from natslog.model import BrokerId
from natslog.node.metadata import raft_store
from natslog.node.metadata.raft_store import RaftStore

Files = dict[str, bytes]
MEMBERSHIP = Membership(members=(Member(id=BrokerId(1), directory="d1", url="http://one"),))
SMALL_FILE_BYTES = 150
SECTOR_BYTES = 512


# What is wanted: the model.


class State(msgspec.Struct, frozen=True):
    """What a store holds, and how a save changes it: the dumb version of all of `RaftStore`."""

    hard: HardState = HardState()
    snapshot: Snapshot = Snapshot()
    entries: tuple[Entry, ...] = ()

    @property
    def last(self) -> int:
        return self.snapshot.index + len(self.entries)

    def term_at(self, index: int) -> int | None:
        terms = {self.snapshot.index: self.snapshot.term, **{entry.index: entry.term for entry in self.entries}}
        return terms.get(Index(index))

    def after(self, change: Change) -> State:
        entries, snapshot, hard = self.entries, self.snapshot, change.hard or self.hard
        if change.snapshot is not None:
            snapshot = change.snapshot
            if self.term_at(snapshot.index) != snapshot.term:
                entries = ()
            hard = HardState(term=hard.term, vote=hard.vote, commit=max(hard.commit, snapshot.index))
        if change.cut is not None:
            entries = tuple(entry for entry in entries if entry.index < change.cut)
        entries = tuple(entry for entry in entries if entry.index > snapshot.index)
        return State(hard, snapshot, entries + change.entries)


class Change(msgspec.Struct, frozen=True):
    """The arguments of a call."""

    hard: HardState | None = None
    cut: Index | None = None
    entries: tuple[Entry, ...] = ()
    snapshot: Snapshot | None = None
    compacts: bool = False

    def apply_to(self, store: RaftStore) -> None:
        if self.compacts:
            assert self.snapshot is not None
            store.compact(self.snapshot)
        else:
            store.save(self.hard, self.cut, self.entries, self.snapshot)


def state_of(store: RaftStore) -> State:
    return State(store.hard_state, store.snapshot, store.entries)


def may_be_found(found: State, old: State, change: Change | None) -> bool:
    """Whether a crash during `change` (None: between two) may leave this."""
    if change is None:
        return found == old
    return found in (old, old.after(change))


def random_change(chance: random.Random, now: State, wide: int = 40) -> Change:
    """Something a Raft core may ask for, in `now`."""
    term = Term(now.hard.term + (chance.random() < 0.3))
    vote = now.hard.vote if term == now.hard.term and now.hard.vote else chance.choice([None, BrokerId(1), BrokerId(2)])
    kind = chance.choices(["append", "replace", "vote", "compact", "install"], [6, 3, 1, 3, 1])[0]
    if kind == "compact" and now.hard.commit > now.snapshot.index:
        index = chance.randint(now.snapshot.index + 1, now.hard.commit)
        return Change(snapshot=some_snapshot(chance, index, now.term_at(index) or 0), compacts=True)
    if kind == "install":
        index = chance.randint(now.hard.commit + 1, now.last + 3)
        hard = HardState(term=Term(now.hard.term + 1), vote=None, commit=Index(index))
        more = some_entries(chance, index, hard.term, wide) if chance.random() < 0.3 else ()
        return Change(hard=hard, entries=more, snapshot=some_snapshot(chance, index, now.hard.term + 1))
    cut, last = None, now.last
    if kind == "replace" and now.hard.commit < now.last:
        cut = Index(chance.randint(now.hard.commit + 1, now.last))
        last, term = cut - 1, Term(now.hard.term + 1)
    entries = () if kind == "vote" else some_entries(chance, last, term, wide)
    commit = Index(chance.randint(now.hard.commit, last + len(entries)))
    hard = HardState(term=term, vote=vote, commit=commit)
    is_same = hard.term == now.hard.term and chance.random() < 0.5
    return Change(hard=None if is_same else hard, cut=cut, entries=entries)


def some_entries(chance: random.Random, last: int, term: Term, wide: int = 40) -> tuple[Entry, ...]:
    return tuple(
        Entry(Index(last + 1 + at), term, "command", chance.randbytes(chance.randint(0, wide)))
        for at in range(chance.randint(1, 4))
    )


def some_snapshot(chance: random.Random, index: int, term: int) -> Snapshot:
    return Snapshot(index=Index(index), term=Term(term), membership=MEMBERSHIP, data=chance.randbytes(20))


# What may happen: the disk.


@dataclass
class FileOnDisk:
    """Known by its identity, not by its name."""

    durable: bytes = b""


class Disk:
    """Notes, of one folder, what is durable; calls `before_step` between any two steps. Nothing is really synced.

    Args:
        killed: the disk as a killed process left it, of which the folder is a copy; else all that is there is durable.
    """

    def __init__(self, folder: Path, before_step: Callable[[str], None], killed: Disk | None = None) -> None:
        self.folder, self.before_step = folder, before_step
        self.is_quiet = False
        self.names: dict[str, FileOnDisk] = {}  # as a process sees them
        self.durable_names: dict[str, FileOnDisk] = {}
        self.pending: list[tuple[str, str, str | None]] = []  # what was done to names since the folder's last fsync
        self.notice()
        self.sync_all()
        if killed is not None:  # the process is gone, the machine is not: what was unsynced still is
            self.names = {name: FileOnDisk(file.durable) for name, file in killed.names.items()}
            self.durable_names = {name: self.heir_of(file, killed) for name, file in killed.durable_names.items()}
            self.pending = list(killed.pending)

    def heir_of(self, file: FileOnDisk, killed: Disk) -> FileOnDisk:
        """The same file under the name it has now; one of its own where it has none any more."""
        return next((self.names[name] for name, one in killed.names.items() if one is file), FileOnDisk(file.durable))

    def sync_all(self) -> None:
        for name, file in self.names.items():
            file.durable = (self.folder / name).read_bytes()
        self.durable_names, self.pending = dict(self.names), []

    def notice(self) -> None:
        """Files made since (by `open`, which is not watched)."""
        for path in sorted(self.folder.iterdir()) if self.folder.exists() else []:
            if path.name not in self.names:
                self.names[path.name] = FileOnDisk()
                self.pending.append(("make", path.name, None))

    def step(self, what: str) -> None:
        if not self.is_quiet:
            self.notice()
            self.is_quiet = True
            try:
                self.before_step(what)
            finally:
                self.is_quiet = False

    def sync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self.folder in (path, path.parent):
            self.step("fsync")
        if self.is_quiet:
            return
        if path == self.folder:
            self.durable_names, self.pending = dict(self.names), []
        elif path.parent == self.folder:
            self.names[path.name].durable = path.read_bytes()

    def images(self, chance: random.Random, count: int) -> Iterator[Files]:
        """What a reboot may find: as it is, as it was synced, and mixtures."""
        self.notice()
        now = {name: (self.folder / name).read_bytes() for name in self.names}
        yield now
        yield {name: file.durable for name, file in self.durable_names.items()}
        for _ in range(count):
            content = {id(file): mixture(chance, file.durable, now[name]) for name, file in self.names.items()}
            names = dict(self.durable_names)
            for kind, name, to in self.pending:
                if chance.random() < 0.5:
                    continue
                if kind == "make" and name in self.names:
                    names[name] = self.names[name]
                elif kind == "remove":
                    names.pop(name, None)
                elif kind == "rename" and to is not None:
                    names.pop(name, None)
                    names[to] = self.names[to] if to in self.names else names[to]
            yield {name: content.get(id(file), file.durable) for name, file in names.items()}

    def renamed(self, source: str, target: str) -> None:
        self.names[target] = self.names.pop(source)
        self.pending.append(("rename", source, target))

    def removed(self, name: str) -> None:
        self.names.pop(name)
        self.pending.append(("remove", name, None))


def mixture(chance: random.Random, durable: bytes, now: bytes) -> bytes:
    """Unsynced bytes arrive in any length, some of them as zeros; unsynced cuts happen or not."""
    if chance.random() < 0.2:
        return durable
    if len(now) < len(durable):
        return durable[: chance.randint(len(now), len(durable))]
    same = len(durable)
    cut = chance.randint(same, len(now))
    zeros_from = chance.randint(same, cut) if chance.random() < 0.3 else cut
    return overwritten(chance, durable, now[:same]) + now[same:zeros_from] + bytes(cut - zeros_from)


def overwritten(chance: random.Random, durable: bytes, now: bytes) -> bytes:
    """Of bytes written in place any sectors arrive, and but for the first one (a head) also parts of one."""
    found = b""
    for start in range(0, len(now), SECTOR_BYTES):
        old, new = (one[start : start + SECTOR_BYTES] for one in (durable, now))
        part = chance.choice([0, len(new)] if start == 0 else [0, len(new), chance.randint(0, len(new))])
        found += new[:part] + old[part:]
    return found


@contextmanager
def watched(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every step the store takes goes by `disk` first."""
    real = {name: getattr(os, name) for name in ("writev", "pwrite", "ftruncate", "replace", "unlink")}

    def writev(fd: int, pieces: list[memoryview]) -> int:
        """In two halves, so that a crash falls between them, too."""
        disk.step("write")
        data = b"".join(pieces)
        half = data[: (len(data) + 1) // 2]
        return int(os.write(fd, half))

    def pwrite(fd: int, data: bytes, position: int) -> int:
        """Within one sector: whole or not at all."""
        assert position % SECTOR_BYTES + len(data) <= SECTOR_BYTES
        disk.step("write")
        return int(real["pwrite"](fd, data, position))

    def ftruncate(fd: int, length: int) -> None:
        disk.step("ftruncate")
        real["ftruncate"](fd, length)

    def replace(source: Path, target: Path) -> None:
        disk.step("replace")
        real["replace"](source, target)
        if not disk.is_quiet:
            disk.renamed(Path(source).name, Path(target).name)

    def unlink(path: Path) -> None:
        disk.step("unlink")
        real["unlink"](path)
        if not disk.is_quiet:
            disk.removed(Path(path).name)

    with monkeypatch.context() as patch:
        for name, fake in (
            ("fsync", disk.sync),
            ("fdatasync", disk.sync),
            ("writev", writev),
            ("pwrite", pwrite),
            ("ftruncate", ftruncate),
        ):
            patch.setattr(os, name, fake)
        patch.setattr(os, "replace", replace)
        patch.setattr(os, "unlink", unlink)
        yield


def lay_out(folder: Path, files: Files) -> Path:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def files_of(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def open_small(folder: Path) -> RaftStore:
    return RaftStore(folder, room_bytes=SMALL_FILE_BYTES)


@pytest.fixture(autouse=True)
def _no_real_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durability is played here; real fsyncs would take minutes."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of images are laid out."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


# Crashes.


@pytest.mark.parametrize("seed", [0, *(pytest.param(one, marks=pytest.mark.long) for one in range(1, 10))])
def test_crash_between_any_two_steps_leaves_all_that_was_returned(
    memory: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    folder, copy = memory / "store", memory / "copy"
    folder.mkdir()
    now, change = State(), Change()
    is_within = False
    steps: set[str] = set()
    examined: set[object] = set()

    def examine(what: str) -> None:
        steps.add(what)
        within = change if is_within else None
        for number, files in enumerate(disk.images(chance, 2)):
            image = (frozenset(files.items()), now, within, number == 0)
            if image not in examined:
                examined.add(image)
                killed = disk if number == 0 else None
                check_image(monkeypatch, chance, lay_out(copy, files), now, within, depth=1, killed=killed)

    disk = Disk(folder, examine)
    with watched(disk, monkeypatch):
        store = open_small(folder)
        for _ in range(12):
            is_within, change = True, random_change(chance, now)
            change.apply_to(store)
            now, is_within = now.after(change), False
            assert state_of(store) == now
            disk.step("returned")
    store.close()
    assert state_of(open_small(folder)) == now
    assert steps >= {"write", "fsync", "replace", "returned"}


def check_image(
    monkeypatch: pytest.MonkeyPatch,
    chance: random.Random,
    image: Path,
    old: State,
    change: Change | None,
    *,
    depth: int,
    killed: Disk | None = None,
) -> None:
    """The image opens with what may be found, also after a crash while it opens; and the store goes on from there."""
    files = files_of(image)
    within = f"{change} of {old}: {files}"

    def examine(what: str) -> None:
        for again in disk.images(chance, 1):
            nested = lay_out(image.with_name("nested"), again)
            check_image(monkeypatch, chance, nested, old, change, depth=0)

    disk = Disk(image, examine, killed)
    if depth and chance.random() < (0.2 if killed else 0.04):
        with watched(disk, monkeypatch):
            store = open_small(image)
        for again in disk.images(chance, 1):
            reopened = open_small(lay_out(image.with_name("nested"), again))
            assert state_of(reopened) == state_of(store), f"power was lost after it had opened within {within}"
    else:
        store = open_small(image)
    found = state_of(store)
    assert may_be_found(found, old, change), f"found {found} within {within}"
    assert store.is_blank == (found == State())
    if chance.random() < 0.3:
        assert state_of(open_small(image)) == found, "opening again changes nothing"
        following = random_change(chance, found)
        following.apply_to(store)
        assert state_of(open_small(image)) == found.after(following), "and it goes on from there"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_error_in_any_step_is_final_and_loses_nothing_that_was_returned(
    memory: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for failing_step in range(1_000):
        chance, folder = random.Random(seed), memory / f"store{failing_step}"
        folder.mkdir()
        now, change, steps_left, failure = State(), Change(), failing_step, None

        def fail_once(what: str) -> None:
            nonlocal steps_left
            steps_left -= 1
            if steps_left == -1:
                raise OSError(errno.EIO, f"Input/output error in {what}")

        with watched(Disk(folder, fail_once), monkeypatch):
            store = open_small(folder)
            try:
                for _ in range(8):
                    change = random_change(chance, now)
                    change.apply_to(store)
                    now = now.after(change)
            except StorageFailed as error:
                failure = error
                with pytest.raises(StorageFailed, match="accepts no more writes"):
                    store.save(None, None, (), None)
        if failure is None:
            assert failing_step > 30, "every step of a whole run had its turn"
            return
        assert "Input/output error" in failure.message
        assert may_be_found(state_of(open_small(folder)), now, change)
    pytest.fail("no run went through")


@pytest.mark.parametrize("has_more_later", [True, False])
def test_too_many_open_files_are_waited_for_and_lose_nothing(
    memory: Path, monkeypatch: pytest.MonkeyPatch, has_more_later: bool
) -> None:
    monkeypatch.setattr(raft_store, "_DESCRIPTORS_POLL_S", 0.001)
    monkeypatch.setattr(raft_store, "_DESCRIPTORS_WITHIN_S", 30.0 if has_more_later else 0.01)
    for failing_step in range(0, 1_000, 1 if has_more_later else 7):
        chance, folder = random.Random(1), memory / f"store{failing_step}"
        folder.mkdir()
        now, steps_left, failures = State(), failing_step, 3 if has_more_later else 10**9

        def fail(what: str) -> None:
            nonlocal steps_left, failures
            steps_left -= 1
            if steps_left < 0 < failures:
                failures -= 1
                raise OSError(errno.EMFILE, f"Too many open files in {what}")

        with watched(Disk(folder, fail), monkeypatch):
            store = open_small(folder)
            try:
                for _ in range(8):
                    change = random_change(chance, now)
                    change.apply_to(store)
                    now = now.after(change)
            except StorageFailed:
                assert not has_more_later
                continue
        assert state_of(open_small(folder)) == now
        if steps_left >= 0:
            assert failing_step > 30, "every step of a whole run had its turn"
            return
    pytest.fail("no run went through")


# Damage.

ENTRIES = tuple(Entry(Index(at), Term(1 + at // 5), "command", b"%d" % at * 9) for at in range(1, 12))


@pytest.fixture
def written(memory: Path) -> tuple[Path, State]:
    """A store with a snapshot, and entries that were saved before it and after it."""
    folder = memory / "written"
    store = open_small(folder)
    store.save(HardState(term=Term(3), vote=BrokerId(2)), None, ENTRIES[:5], None)
    store.save(HardState(term=Term(3), vote=BrokerId(2), commit=Index(4)), None, ENTRIES[5:9], None)
    store.compact(Snapshot(index=Index(3), term=Term(1), membership=MEMBERSHIP, data=b"state"))
    store.save(None, None, ENTRIES[9:], None)
    return folder, state_of(store)


def assert_refused(folder: Path, where: str) -> CorruptLog:
    """It does not open, says what to do, and nothing was changed."""
    before = files_of(folder)
    with pytest.raises(CorruptLog, match="natslog cluster remove ID") as refused:
        pytest.fail(f"{where}: opened with {state_of(open_small(folder))}")
    assert refused.value.facts["file"].startswith(str(folder)), where
    assert files_of(folder) == before, f"{where}: a damaged store is not touched"
    return refused.value


def used_bytes(name: str, data: bytes) -> int:
    """Of a write-ahead log: where its room begins."""
    found = re.search(rb" durable=(\d+) ", data[:512])
    return int(found[1]) if name.startswith("wal-") and found is not None else len(data)


def test_flip_of_any_bit_of_any_file_is_refused(written: tuple[Path, State]) -> None:
    folder, state = written
    for name, data in files_of(folder).items():
        for position in range(used_bytes(name, data)):
            for bit in range(8):
                damaged = bytearray(data)
                damaged[position] ^= 1 << bit
                (folder / name).write_bytes(damaged)
                error = assert_refused(folder, f"{name}, byte {position}, bit {bit}")
                assert error.facts["file"] == str(folder / name)
        (folder / name).write_bytes(data)
    assert state_of(open_small(folder)) == state


def test_flip_of_any_bit_of_the_room_of_a_log_changes_nothing(written: tuple[Path, State]) -> None:
    folder, state = written
    files = files_of(folder)
    name = next(name for name in files if name.startswith("wal-"))
    for position in range(used_bytes(name, files[name]), len(files[name])):
        for bit in range(8):
            damaged = bytearray(files[name])
            damaged[position] ^= 1 << bit
            lay_out(folder, {**files, name: bytes(damaged)})
            assert state_of(open_small(folder)) == state, f"byte {position}, bit {bit}"
            assert name not in files_of(folder), "another log was begun"
            assert state_of(open_small(folder)) == state


def test_log_that_was_durable_and_is_zeros_from_any_byte_on_is_refused(written: tuple[Path, State]) -> None:
    folder, state = written
    files = files_of(folder)
    name = next(name for name in files if name.startswith("wal-"))
    for position in range(used_bytes(name, files[name])):
        lay_out(folder, {**files, name: files[name][:position].ljust(len(files[name]), b"\0")})
        if files_of(folder) != files:
            assert_refused(folder, f"zeros from byte {position} on")
    assert state_of(open_small(lay_out(folder, files))) == state


def test_cut_of_any_file_at_any_byte_is_refused(written: tuple[Path, State]) -> None:
    folder, state = written
    for name, data in files_of(folder).items():
        for size in range(len(data)):
            (folder / name).write_bytes(data[:size])
            assert_refused(folder, f"{name} cut to {size}")
        (folder / name).write_bytes(data)
    assert state_of(open_small(folder)) == state


def test_any_missing_file_is_refused(written: tuple[Path, State]) -> None:
    folder, state = written
    for name, data in files_of(folder).items():
        (folder / name).unlink()
        error = assert_refused(folder, f"without {name}")
        assert "missing" in error.message
        (folder / name).write_bytes(data)
    assert state_of(open_small(folder)) == state


def test_missing_file_of_the_smallest_store_is_refused(tmp_path: Path) -> None:
    """A vote and nothing else: to forget it would be to vote twice."""
    open_small(tmp_path).save(HardState(term=Term(1), vote=BrokerId(3)), None, (), None)
    files = files_of(tmp_path)
    (tmp_path / "snapshot.new").write_bytes(b"unfinished, and not touched either")
    for name, data in files.items():
        (tmp_path / name).unlink()
        assert_refused(tmp_path, f"without {name}")
        (tmp_path / name).write_bytes(data)


def test_older_log_in_place_of_the_stored_one_is_refused(written: tuple[Path, State]) -> None:
    folder, _ = written
    (older,) = (data for name, data in files_of(folder).items() if name.startswith("wal-"))
    store = open_small(folder)
    store.compact(Snapshot(index=Index(4), term=Term(1)))
    (path,) = folder.glob("wal-*")
    newer = path.read_bytes()
    path.write_bytes(older)
    assert "another log" in assert_refused(folder, "older log").message
    path.write_bytes(newer)
    assert open_small(folder).last_index == 11


def test_saves_beyond_the_end_in_the_head_are_kept_if_whole_and_never_trusted(written: tuple[Path, State]) -> None:
    """The power was lost before the head was: then any cut (the rest is zeros) and any flip in what is beyond."""
    folder, state = written
    store = RaftStore(folder, room_bytes=600)
    store.compact(Snapshot(index=Index(4), term=Term(1)))
    store.save(HardState(term=Term(5), vote=BrokerId(1), commit=Index(4)), None, (), None)
    (path,) = folder.glob("wal-*")
    files, name = files_of(folder), path.name
    head, start = files[name][:512], used_bytes(name, files[name])
    store.save(HardState(term=Term(6), vote=BrokerId(2), commit=Index(4)), None, (), None)
    middle = used_bytes(name, path.read_bytes())
    store.save(None, Index(11), (Entry(Index(11), Term(6), "command", b"more"),), None)
    grown = head + path.read_bytes()[512:]
    end = used_bytes(name, path.read_bytes())
    hard = HardState(term=Term(5), vote=BrokerId(1), commit=Index(4))
    state = State(hard, Snapshot(index=Index(4), term=Term(1)), state.entries[1:])
    voted = replace(state, hard=HardState(term=Term(6), vote=BrokerId(2), commit=Index(4)))
    saved = replace(voted, entries=(*state.entries[:-1], Entry(Index(11), Term(6), "command", b"more")))

    def check(data: bytes, first_wrong: int, what: str) -> None:
        found = state_of(open_small(lay_out(folder, {**files, name: data})))
        assert found == (state if first_wrong < middle else voted if first_wrong < end else saved), what
        assert state_of(open_small(folder)) == found
        assert (data == files[name]) == (name in files_of(folder)), "what is kept is written anew"

    for size in range(start, end + 1):
        cut = grown[:size].ljust(len(grown), b"\0")
        same = next((at for at in range(start, end) if cut[at] != grown[at]), end)
        check(cut, same, f"cut to {size}")
    for position in range(start, end):
        for bit in range(8):
            damaged = bytearray(grown)
            damaged[position] ^= 1 << bit
            check(bytes(damaged), position, f"byte {position}")


def test_newer_format_of_the_log_is_refused(written: tuple[Path, State]) -> None:
    folder, _ = written
    (path,) = folder.glob("wal-*")
    line = path.read_bytes().partition(b"crc32c=")[0].replace(b"raft-wal v1", b"raft-wal v2") + b"crc32c="
    path.write_bytes((line + b"%08x\n" % crc32c(line)).ljust(4096, b"x"))
    before = files_of(folder)
    with pytest.raises(DataDirError, match=r"format version 2.*upgrade natslog"):
        open_small(folder)
    assert files_of(folder) == before


# The plain way.


def test_blank_store_is_blank_until_something_is_saved(tmp_path: Path) -> None:
    store = open_small(tmp_path / "new" / "raft")
    assert store.is_blank
    assert state_of(store) == State()
    assert open_small(tmp_path / "new" / "raft").is_blank
    store.save(HardState(term=Term(1)), None, (), None)
    assert not store.is_blank
    assert not open_small(tmp_path / "new" / "raft").is_blank


def test_blank_store_that_was_begun_is_there(tmp_path: Path) -> None:
    """Of a broker that was welcomed and saved nothing yet: when its files are gone later, that is damage."""
    store = open_small(tmp_path)
    assert store.is_missing
    store.begin()
    files = files_of(tmp_path)
    store.begin()
    assert files_of(tmp_path) == files
    store = open_small(tmp_path)
    assert store.is_blank
    assert not store.is_missing
    store.save(HardState(term=Term(1)), None, (), None)
    assert state_of(open_small(tmp_path)) == State(HardState(term=Term(1)))


def test_first_snapshot_may_be_of_index_0(tmp_path: Path) -> None:
    """How a group may begin: its first members, and nothing else."""
    first = Snapshot(membership=MEMBERSHIP)
    open_small(tmp_path).save(HardState(), None, (), first)
    store = open_small(tmp_path)
    assert store.snapshot == first
    assert not store.is_blank


def test_snapshot_of_several_mib_and_entries_of_all_kinds_come_back(tmp_path: Path) -> None:
    store = RaftStore(tmp_path)
    entries = (Entry(Index(1), Term(1), "empty"), Entry(Index(2), Term(1), "membership", bytes(range(256)) * 4000))
    store.save(HardState(term=Term(1), commit=Index(1)), None, entries, None)
    store.compact(Snapshot(index=Index(1), term=Term(1), data=os.urandom(5 << 20)))
    assert state_of(RaftStore(tmp_path)) == state_of(store)
    assert store.entries == entries[1:]


def test_save_costs_one_write_and_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the head, which nothing waits for."""
    store = RaftStore(tmp_path)
    store.save(HardState(term=Term(1)), None, ENTRIES[:1], None)
    steps: list[str] = []
    with watched(Disk(tmp_path, steps.append), monkeypatch):
        store.save(HardState(term=Term(2), commit=Index(1)), Index(2), ENTRIES[1:2], None)
    assert "".join(step[0] for step in steps).lstrip("w") == "fw", steps
    assert RaftStore(tmp_path).hard_state == HardState(term=Term(2), commit=Index(1))


def test_full_log_and_a_snapshot_begin_another_one(tmp_path: Path) -> None:
    store, names = open_small(tmp_path), set()
    for at in range(1, 51):
        entry = Entry(Index(at), Term(1), "command", b"x" * 30)
        store.save(HardState(term=Term(1), commit=Index(at)), None, (entry,), None)
        (name,) = (name for name in files_of(tmp_path) if name != "hard-state")
        names.add(name)
    assert len(names) > 10
    store.compact(Snapshot(index=Index(45), term=Term(1)))
    assert not names & set(files_of(tmp_path))
    assert [entry.index for entry in store.entries] == list(range(46, 51))
    assert state_of(open_small(tmp_path)) == state_of(store)
    store.compact(Snapshot(index=Index(40), term=Term(1)))
    assert store.snapshot.index == 45, "an older one changes nothing"


def test_closed_store_takes_nothing(tmp_path: Path) -> None:
    store = open_small(tmp_path)
    store.close()
    with pytest.raises(StorageFailed, match="closed"):
        store.save(HardState(term=Term(1)), None, (), None)


@pytest.mark.parametrize(
    "wrong",
    [
        Change(entries=(Entry(Index(6), Term(2), "empty"),)),
        Change(entries=(Entry(Index(5), Term(1), "empty"),)),
        Change(entries=(Entry(Index(5), Term(9), "empty"),)),
        Change(cut=Index(2)),
        Change(hard=HardState(term=Term(1), commit=Index(2))),
        Change(hard=HardState(term=Term(2), commit=Index(1))),
        Change(hard=HardState(term=Term(2), commit=Index(5))),
        Change(snapshot=Snapshot(index=Index(1), term=Term(2))),
    ],
    ids=["gap", "entry's term falls", "entry's term unknown", "commit cut", "term", "commit", "beyond", "snapshot"],
)
def test_what_raft_never_does_is_a_bug_that_ends_the_store_and_harms_nothing(memory: Path, wrong: Change) -> None:
    store = open_small(memory)
    entries = (*ENTRIES[:3], Entry(Index(4), Term(2), "empty"))
    store.save(HardState(term=Term(2), commit=Index(2)), None, entries, None)
    before = state_of(store)
    with pytest.raises(AssertionError):
        wrong.apply_to(store)
    if wrong.hard is None:
        with pytest.raises(StorageFailed, match="did not complete"):
            store.save(None, None, (), None)
    found = state_of(open_small(memory))
    assert (found.snapshot, found.entries[:4]) == (before.snapshot, before.entries)
