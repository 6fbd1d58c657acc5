"""A Raft group in a bad world: 3 to 5 nodes and those that join, cuts, crashes, forgetful disks, under one seed.

A node has a `Disk` that holds what was saved and nothing else; a crash between `ready()` and the end of the save leaves
some first part of it. After every step of a node `Checker` asks what must always hold:

- election safety: one leader in a term
- membership: that of the last entry that brings one, also after truncation
- log matching: an entry's (index, term) tells its content and the term before it, everywhere
- leader completeness: a leader holds what was committed before
- committed is durable: on the disks of a majority of the voters when it is committed first
- state-machine safety: what is applied at an index is the same everywhere, without a gap, no command twice
- reads: a confirmed index is not below what was committed anywhere when the read began

And when everything is healed: a leader exists, what is proposed is committed, and every member has applied it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from natslog.consensus import Member, Membership, Message, Raft, Snapshot, SnapshotChunk
from natslog.errors import InvalidRequest, MembershipChanging, NotMetadataLeader
from natslog.model import BrokerId
from tests.sim.raft_checker import Checker, Violation, require
from tests.sim.raft_node import Node
from tests.sim.world import World

MAX_NODES = 7


@dataclass(frozen=True, slots=True)
class Rules:
    """What the simulation runs: the classes are replaced by mutations, the numbers by special tests."""

    raft: type[Raft] = Raft
    node: type[Node] = Node
    chaos_ms: float = 20_000
    heal_ms: float = 12_000
    fault_every_ms: tuple[float, float] = (50.0, 500.0)
    damage_share: float = 0.1


@dataclass(frozen=True, slots=True)
class Result:
    digest: str
    events: int
    terms: int
    committed: int
    commands: int
    reads: int
    snapshots: int
    memberships: int


class Group:
    """The nodes, their clients, and what is done to them."""

    def __init__(self, world: World, rules: Rules) -> None:
        self.world, self.rules, self.checker = world, rules, Checker(self)
        self.nodes: dict[int, Node] = {}
        self.is_healed = False
        self.next_payload = self.memberships = 0
        founders = world.random.choice((1, 3, 3, 3, 4, 5))
        membership = Membership(members=tuple(member(id) for id in range(1, founders + 1)))
        for id in range(1, founders + 1):
            self.nodes[id] = rules.node(self, id, Snapshot(membership=membership))
        world.drop_share, world.double_share, world.late_share = (world.random.choice((0, 0.02, 0.1)) for _ in "123")
        world.after(50, self.client)
        world.after(1500, self.chaos)

    def send(self, message: Message) -> None:
        chance = self.world.random
        if isinstance(message, SnapshotChunk) and not self.is_healed and chance.random() < self.rules.damage_share:
            message = msgspec.structs.replace(message, data=flipped(message.data, chance.randrange(1 << 16)))
        self.world.send(message.sender, message.to, self.nodes[message.to].receive, message)

    @property
    def up(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_up]

    @property
    def leader(self) -> Node | None:
        """The newest, if there is one."""
        leaders = [node for node in self.up if node.raft.role == "leader"]
        return max(leaders, key=lambda node: node.raft.term, default=None)

    def client(self) -> None:
        """Proposes to and reads from all brokers in the role of leader, outdated ones too."""
        chance = self.world.random
        self.world.after(chance.uniform(20, 200), self.client)
        for node in self.up:
            if node.raft.role == "leader":
                try:
                    for _ in range(chance.choice((1, 1, 1, 6))):
                        self.next_payload += 1
                        node.raft.propose(b"%d" % self.next_payload)
                except NotMetadataLeader:
                    pass
                self.read(node)
                node.pump()

    def read(self, node: Node) -> None:
        self.next_payload += 1
        node.reads[self.next_payload] = len(self.checker.committed) - 1
        node.raft.read_index(self.next_payload)

    # -- faults

    def chaos(self) -> None:
        chance = self.world.random
        if self.is_healed:
            return
        self.world.after(chance.uniform(*self.rules.fault_every_ms), self.chaos)
        faults = (self.cut, self.cut_one_way, self.cut_bridge, self.isolate_leader, self.mend, self.contest)
        deeds = (self.crash_one, self.crash_one, self.crash_many, self.slow, self.compact, self.compact)
        changes = (self.change_members, self.change_members, self.change_members, self.transfer, self.campaign)
        fault = chance.choice((*faults, *deeds, *changes))
        self.world.note(fault.__name__)
        fault()

    def _cut(self, some: set[int], others: set[int], *, both: bool = True) -> None:
        self.world.cut |= {(one, other) for one in sorted(some) for other in sorted(others) if one != other}
        if both:
            self._cut(others, some, both=False)
            self.world.after(self.world.random.uniform(200, 3000), self.mend)

    def cut(self) -> None:
        ids = list(self.nodes)
        self.world.random.shuffle(ids)
        size = self.world.random.randint(1, max(1, len(ids) // 2))
        self._cut(set(ids[:size]), set(ids[size:]))

    def cut_one_way(self) -> None:
        one = self.world.random.choice(list(self.nodes))
        others = set(self.nodes) - {one}
        if self.world.random.random() < 0.5:
            self._cut({one}, others, both=False)
        else:
            self._cut(others, {one}, both=False)

    def cut_bridge(self) -> None:
        """Two sides that see each other through one node only."""
        ids = list(self.nodes)
        self.world.random.shuffle(ids)
        middle = len(ids) // 2
        self._cut(set(ids[:middle]), set(ids[middle + 1 :]))

    def isolate_leader(self) -> None:
        if (leader := self.leader) is not None:
            self._isolate(leader)

    def _isolate(self, node: Node) -> None:
        if not self.is_healed:
            self._cut({node.id}, set(self.nodes) - {node.id})

    def mend(self) -> None:
        self.world.cut.clear()

    def crash_one(self) -> None:
        if self.up:
            self.crash(self.world.random.choice(self.up))

    def crash_many(self) -> None:
        for node in self.up:
            if self.world.random.random() < 0.7:
                self.crash(node)

    def crash(self, node: Node, back_ms: tuple[float, float] = (5, 1500)) -> None:
        if node.is_up and not self.is_healed:
            node.crash()
            self.world.after(self.world.random.uniform(*back_ms), lambda: None if node.is_up else node.start())

    def contest(self) -> None:
        """All restart at once, so that no lease holds; two campaign; voters restart before the other asks."""
        chance, ids = self.world.random, list(self.nodes)
        chance.shuffle(ids)
        for node in self.nodes.values():
            if node.is_up:
                self.crash(node, back_ms=(1, 10))
            if node.id not in ids[:2]:
                self.crash_soon(node)
        for id in ids[:2]:
            self.world.after(chance.uniform(12, 20), self.nodes[id].campaign)

    def crash_soon(self, node: Node) -> None:
        for _ in range(3):
            self.world.after(self.world.random.uniform(30, 75), lambda: self.crash(node, back_ms=(0, 1)))

    def elected(self, node: Node) -> None:
        """Some leaders fall before anyone knows of them, or while they bring others up to date."""
        chance = self.world.random
        if self.is_healed or chance.random() < 0.5:
            return
        deed = chance.choice((lambda: self.crash(node), lambda: self._isolate(node)))
        self.world.after(chance.choice((chance.uniform(0, 8), chance.uniform(8, 60))), deed)

    def slow(self) -> None:
        node = self.world.random.choice(list(self.nodes.values()))
        node.save_ms = self.world.random.choice(((0.1, 4.0), (20.0, 200.0)))

    def compact(self) -> None:
        for node in self.nodes.values():
            if self.world.random.random() < 0.6:
                node.compact()

    def transfer(self) -> None:
        if (leader := self.leader) is not None:
            try:
                chosen = BrokerId(self.world.random.choice(list(self.nodes)))
                if chosen == leader.id:  # as before it stops
                    chosen = leader.raft.successor(()) or chosen
                leader.raft.transfer(chosen)
            except (NotMetadataLeader, InvalidRequest):
                return
            leader.pump()

    def campaign(self) -> None:
        if self.up:
            node = self.world.random.choice(self.up)
            node.campaign()

    def change_members(self) -> None:
        """Proposed to all that believe to lead: to join, promote, remove; sometimes while cut off, or in haste."""
        if self.world.random.random() < 0.3:
            self.isolate_leader()
        for _ in range(self.world.random.choice((1, 1, 3))):
            for node in self.up:
                if node.raft.role == "leader":
                    self.change_one(node)

    def change_one(self, node: Node) -> None:
        try:
            node.raft.propose_membership(self.other_membership(node.raft.membership))
            self.memberships += 1
        except (NotMetadataLeader, InvalidRequest, MembershipChanging):
            return
        node.pump()

    def other_membership(self, now: Membership) -> Membership:
        chance = self.world.random
        outside = [id for id in range(1, MAX_NODES + 1) if now.find(BrokerId(id)) is None]
        if outside and chance.random() < 0.5:
            id = chance.choice(outside)
            if id not in self.nodes:
                self.nodes[id] = self.rules.node(self, id, Snapshot())
            return now.with_member(member(id, is_voter=chance.random() < 0.5))
        one = chance.choice(now.members)
        if not one.is_voter:
            return now.with_member(member(one.id))
        return now.without(one.id) if len(now.voters) > 1 else now

    # -- the end

    def heal(self) -> None:
        self.is_healed = True
        self.world.note("healed")
        world = self.world
        world.cut.clear()
        world.drop_share = world.double_share = world.late_share = 0
        for node in self.nodes.values():
            node.save_ms = (0.1, 4.0)
            if not node.is_up:
                node.start()

    def has_recovered(self, from_index: int) -> bool:
        """Whether there is a leader, what is new is committed, and every member has applied it."""
        leader = self.leader
        if leader is None or leader.raft.commit <= from_index:
            return False
        members = leader.raft.membership.members
        return all(self.nodes[one.id].machine.index > from_index for one in members)


def member(id: int, *, is_voter: bool = True) -> Member:
    return Member(id=BrokerId(id), directory=f"d{id}", url=f"http://{id}", is_voter=is_voter)


def flipped(data: bytes, where: int) -> bytes:
    """With one bit turned."""
    if not data:
        return data
    position = where % len(data)
    return data[:position] + bytes([data[position] ^ 1 << where % 8]) + data[position + 1 :]


def run_seed(seed: int, rules: Rules = Rules(), trace: list[str] | None = None) -> Result:
    """One life of a group. Raises Violation, or an AssertionError of the core itself."""
    world = World(seed)
    world.trace = trace
    group = Group(world, rules)
    world.run_until(rules.chaos_ms)
    group.heal()
    last = max(len(group.checker.committed), *(node.raft.last_index for node in group.nodes.values()))
    end_ms = rules.chaos_ms + rules.heal_ms
    while not group.has_recovered(last):
        require(world.now_ms < end_ms, f"no progress within {rules.heal_ms} ms: {standing(group)}")
        world.run_until(world.now_ms + 250)
    checker = group.checker
    return Result(
        digest=world.digest,
        events=world.events,
        terms=len(checker.leaders),
        committed=len(checker.committed) - 1,
        commands=len(checker.commands),
        reads=checker.reads,
        snapshots=checker.snapshots,
        memberships=group.memberships,
    )


def standing(group: Group) -> Any:
    return [
        (node.id, node.raft.role, node.raft.term, node.raft.commit, node.raft.last_index, node.raft.membership.voters)
        for node in group.nodes.values()
    ]


def first_red(rules: Rules, seeds: range) -> tuple[int, str] | None:
    """The first seed that fails, and how."""
    for seed in seeds:
        try:
            run_seed(seed, rules)
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
    return None


__all__ = ["Group", "Node", "Result", "Rules", "Violation", "first_red", "run_seed"]
