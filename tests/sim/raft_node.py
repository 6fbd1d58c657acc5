"""A node of the simulation: the thin shell around `Raft`, a disk that holds what was saved, a state machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from natslog.consensus import Entry, HardState, Index, Message, Ready, Snapshot, require_sound
from natslog.model import BrokerId
from tests.sim.raft_checker import require

if TYPE_CHECKING:
    from tests.sim.raft_world import Group

TICK_MS = 100.0


@dataclass(slots=True)
class Disk:
    """What survives a crash."""

    snapshot: Snapshot
    entries: list[Entry] = field(default_factory=list)
    hard_state: HardState = field(default_factory=HardState)

    def save(self, ready: Ready, steps: int = 3, share: float = 1.0) -> None:
        """The first `steps` of snapshot, entries (a share of them), hard state."""
        if ready.snapshot is not None and steps >= 1:
            self.snapshot, self.entries = ready.snapshot, []
        if steps >= 2:
            self._replace(ready, share)
        if ready.hard_state is not None and steps >= 3:
            self.hard_state = ready.hard_state

    def _replace(self, ready: Ready, share: float) -> None:
        if ready.truncate_from is not None:
            self.entries = [entry for entry in self.entries if entry.index < ready.truncate_from]
        new = ready.entries[: int(len(ready.entries) * share)]
        if self.entries and new:
            require(new[0].index == self.entries[-1].index + 1, "a gap in a store")
        self.entries.extend(new)

    def compact(self, snapshot: Snapshot, anchor_index: int) -> None:
        """Keeps the entry at `anchor_index`, so that the term there is known."""
        self.snapshot = snapshot
        self.entries = [entry for entry in self.entries if entry.index >= anchor_index]

    def holds(self, index: int, term: int) -> bool:
        if index <= self.snapshot.index:
            return True
        position = index - self.entries[0].index if self.entries else -1
        return 0 <= position < len(self.entries) and self.entries[position].term == term


class Machine:
    """The state machine: a hash over all it applied."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.restore(snapshot)

    def restore(self, snapshot: Snapshot) -> None:
        self.index = int(snapshot.index)
        self.chain = snapshot.data[:16] if snapshot.data else bytes(16)

    def apply(self, entry: Entry) -> None:
        require(entry.index == self.index + 1, f"entry {entry.index} applied after {self.index}")
        self.index = int(entry.index)
        self.chain = hashlib.blake2b(self.chain + entry.data, digest_size=16).digest()

    def snapshot_data(self) -> bytes:
        """Some chunks long."""
        return self.chain * 20


class Node:
    """The thin shell around `Raft` that the broker will have too: save, send, apply, advance."""

    def __init__(self, group: Group, id: int, snapshot: Snapshot) -> None:
        self.group, self.world, self.id = group, group.world, id
        self.disk = Disk(snapshot)
        self.life = 0
        self.is_up = False
        self.saving: Ready | None = None
        self.save_ms = (0.1, 4.0)
        self.tick_ms = TICK_MS * self.world.random.uniform(0.93, 1.07)
        self.reads: dict[int, int] = {}
        self.start()

    def start(self) -> None:
        self.is_up, self.saving, self.reads = True, None, {}
        self.life += 1
        disk = self.disk
        self.raft = self.group.rules.raft(
            me=BrokerId(self.id),
            hard_state=disk.hard_state,
            snapshot=disk.snapshot,
            entries=tuple(disk.entries),
            seed=self.world.seed * 101 + self.life,
            election_ticks=6,
            heartbeat_ticks=2,
            max_append_bytes=120,
            chunk_bytes=120,
        )
        self.raft.trailing_entries = 4
        self.machine = Machine(disk.snapshot)
        self.later(self.world.random.uniform(0, self.tick_ms), self.tick)
        self.pump()

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Unless it crashes before."""
        life = self.life
        self.world.after(delay_ms, lambda: action() if self.is_up and self.life == life else None)

    def crash(self) -> None:
        """Of a save under way some first part is on disk."""
        chance = self.world.random
        if self.saving is not None:
            self.disk.save(self.saving, chance.randrange(4), chance.choice((0.0, 0.5, 1.0)))
        self.is_up, self.saving = False, None

    def tick(self) -> None:
        self.later(self.tick_ms, self.tick)
        self.raft.tick()
        self.pump()

    def receive(self, message: Message) -> None:
        if not self.is_up:
            return
        self.world.note(f"{self.id} < {message.sender} {type(message).__name__} term {message.term}")
        require_sound(message)
        self.raft.step(message)
        self.pump()

    def pump(self) -> None:
        """One Ready at a time; what needs no sync is done at once."""
        self.group.checker.watch(self)
        while self.saving is None and (ready := self.raft.ready()) is not None:
            self.saving = ready
            if ready.must_sync:
                self.before_save(ready)
                self.later(self.world.random.uniform(*self.save_ms), self.saved)
                return
            self.finish()

    def before_save(self, ready: Ready) -> None:
        """Nothing leaves before the save."""

    def saved(self) -> None:
        self.finish()
        self.pump()

    def finish(self) -> None:
        ready = self.saving
        assert ready is not None
        self.saving = None
        self.disk.save(ready)
        self.group.checker.saved(self, ready)
        self.send(ready)
        if ready.snapshot is not None:
            self.machine.restore(ready.snapshot)
            self.group.checker.restored(self, ready.snapshot)
        for entry in ready.committed:
            self.machine.apply(entry)
            self.group.checker.applied(self, entry)
        self.raft.advance(ready)
        self.group.checker.membership(self, ready)
        for read in ready.reads:
            self.group.checker.read(self, read.context, read.index)
        self.group.checker.watch(self)

    def send(self, ready: Ready) -> None:
        for message in ready.messages:
            self.group.send(message)

    def campaign(self) -> None:
        if self.is_up:
            self.raft.campaign()
            self.pump()

    def compact(self) -> None:
        if self.is_up and self.saving is None and self.machine.index > self.raft.log.snapshot.index:
            snapshot = self.raft.compact(Index(self.machine.index), self.machine.snapshot_data())
            self.disk.compact(snapshot, self.raft.log.anchor_index)
