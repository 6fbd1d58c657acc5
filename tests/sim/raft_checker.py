"""What must hold of a Raft group after every step of any node: see `raft_world`, which names the promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from natslog.consensus import Entry, Index, Ready, Snapshot, decode_membership

if TYPE_CHECKING:
    from tests.sim.raft_node import Node
    from tests.sim.raft_world import Group


class Violation(AssertionError):
    """Something that must never be."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Checker:
    """All that is known of the group, and what must hold of it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.leaders: dict[int, int] = {}
        self.seen: dict[tuple[int, int], tuple[Entry, int | None]] = {}
        self.committed: list[int] = [0]  # terms, by index
        self.committed_in: list[int] = [0]  # the term in which each was
        self.chains: list[bytes] = [bytes(16)]
        self.commands: set[bytes] = set()
        self.reads = 0
        self.snapshots = 0

    def watch(self, node: Node) -> None:
        """After every step."""
        raft = node.raft
        if raft.role == "leader" and self.leaders.get(raft.term) != node.id:
            other = self.leaders.setdefault(raft.term, node.id)
            require(other == node.id, f"{other} and {node.id} both lead term {raft.term}")
            node.world.note(f"{node.id} leads term {raft.term}")
            self.group.elected(node)
            self._complete(node, 1)
        known = len(self.committed) - 1
        if raft.commit > known:
            self._commit(node, known)

    def _commit(self, node: Node, known: int) -> None:
        """First word of new committed entries."""
        raft = node.raft
        for index in range(known + 1, raft.commit + 1):
            found = raft.log.term_at(Index(index))
            require(found is not None, f"{node.id} committed {index} and does not hold it")
            self.committed.append(int(found or 0))
        term = self.committed[raft.commit]  # a leader commits by an entry of its own term
        self.committed_in += [term] * (raft.commit - known)
        holders = [voter for voter in raft.membership.voters if self.group.nodes[voter].disk.holds(raft.commit, term)]
        majority = len(raft.membership.voters) // 2 + 1
        require(len(holders) >= majority, f"{raft.commit} of {term} committed, and only on the disks of {holders}")
        for other in self.group.nodes.values():
            if other.is_up and other.raft.role == "leader" and other.raft.term > term:
                self._complete(other, known + 1)

    def _complete(self, leader: Node, start: int) -> None:
        """Whoever learns late that it leads an earlier term need not have what was committed in later ones."""
        log = leader.raft.log
        for index in range(max(start, log.anchor_index), len(self.committed)):
            if self.committed_in[index] >= leader.raft.term:
                continue
            found = log.term_at(Index(index))
            require(found == self.committed[index], f"leader {leader.id} lacks {index} of {self.committed[index]}")

    def saved(self, node: Node, ready: Ready) -> None:
        """Log matching, by induction: content and the term before depend on (index, term) alone.

        Of what is on a disk: what was lost before it was saved never left the node, and may be written otherwise.
        """
        disk = node.disk
        for position in range(len(disk.entries) - len(ready.entries), len(disk.entries)):
            entry = disk.entries[position]
            before = disk.entries[position - 1].term if position else disk.snapshot.term
            found = self.seen.setdefault((entry.index, entry.term), (entry, before))
            require(found == (entry, before), f"two entries {entry.index} of term {entry.term}, {node.id} has one")

    def membership(self, node: Node, ready: Ready) -> None:
        """That of the last membership entry in the log, or else of the snapshot, also when an entry was cut off."""
        if ready.truncate_from is None or node.raft.log.has_unsaved:
            return
        found = [entry for entry in node.disk.entries if entry.kind == "membership"]
        wanted = decode_membership(found[-1].data) if found else node.disk.snapshot.membership
        require(node.raft.membership == wanted, f"{node.id} holds to a membership it lost")

    def applied(self, node: Node, entry: Entry) -> None:
        if entry.index == len(self.chains):
            self.chains.append(node.machine.chain)
            if entry.kind == "command":
                require(entry.data not in self.commands, f"{entry.data!r} applied twice")
                self.commands.add(entry.data)
        require(self.chains[entry.index] == node.machine.chain, f"{node.id} applied something else at {entry.index}")
        require(entry.term == self.committed[entry.index], f"{node.id} applied a lost entry at {entry.index}")

    def restored(self, node: Node, snapshot: Snapshot) -> None:
        self.snapshots += 1
        require(node.machine.chain == self.chains[snapshot.index], f"{node.id} installed a wrong snapshot")
        require(snapshot.data == node.machine.snapshot_data(), f"{node.id} installed a damaged snapshot")

    def read(self, node: Node, context: int, index: int) -> None:
        self.reads += 1
        require(index >= node.reads.pop(context), f"{node.id} confirmed a stale read at {index}")
