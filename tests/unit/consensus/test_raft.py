"""Raft by hand: small groups whose messages the test delivers, holds back, or turns a bit of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import pytest

from natslog.consensus import (
    AppendRequest,
    AppendResponse,
    ConfirmedRead,
    Entry,
    HardState,
    Index,
    Member,
    Membership,
    Message,
    Raft,
    Ready,
    Snapshot,
    SnapshotChunk,
    SnapshotResponse,
    Term,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
    decode_membership,
    require_sound,
)
from natslog.errors import InvalidRequest, MembershipChanging, NotMetadataLeader
from natslog.model import BrokerId

ELECTION_TICKS = 10


def member(id: int, *, is_voter: bool = True, directory: str = "") -> Member:
    return Member(id=BrokerId(id), directory=directory or f"d{id}", url=f"http://{id}", is_voter=is_voter)


def members(*ids: int) -> Membership:
    return Membership(members=tuple(member(id) for id in ids))


def entries_of(*terms: int) -> list[Entry]:
    return [Entry(Index(index), Term(term), "command", b"%d" % term) for index, term in enumerate(terms, 1)]


class Group:
    """Rafts with perfect disks; `cut` names those whose messages, to or from, are lost."""

    def __init__(self, *voters: int, blank: Iterable[int] = ()) -> None:
        self.rafts: dict[int, Raft] = {}
        self.applied: dict[int, list[bytes]] = {}
        self.installed: list[Snapshot] = []
        self.reads: list[ConfirmedRead] = []
        self.said: list[Message] = []
        self.waiting: list[Message] = []
        self.cut: set[int] = set()
        self.loses: Callable[[Message], bool] = lambda message: False
        self.alter: Callable[[Message], Message] = lambda message: message
        for id in voters:
            self.add(id, Snapshot(membership=members(*voters)))
        for id in blank:
            self.add(id, Snapshot())

    def add(
        self, id: int, snapshot: Snapshot, entries: Iterable[Entry] = (), hard_state: HardState = HardState()
    ) -> Raft:
        self.rafts[id] = Raft(
            me=BrokerId(id), hard_state=hard_state, snapshot=snapshot, entries=list(entries), seed=id, chunk_bytes=100
        )
        self.applied[id] = []
        return self.rafts[id]

    def __getitem__(self, id: int) -> Raft:
        return self.rafts[id]

    def pump(self) -> None:
        """Saves, applies, and collects what is to be sent."""
        for id, raft in self.rafts.items():
            while (ready := raft.ready()) is not None:
                self._take(id, ready)
                raft.advance(ready)

    def _take(self, id: int, ready: Ready) -> None:
        self.said += ready.messages
        self.waiting += ready.messages
        self.applied[id] += [one.data for one in ready.committed if one.kind == "command"]
        self.reads += ready.reads
        if ready.snapshot is not None:
            self.installed.append(ready.snapshot)

    def deliver_all(self) -> None:
        """Delivers until no member sends anything more."""
        self.pump()
        while self.waiting:
            message = self.alter(self.waiting.pop(0))
            if not {message.sender, message.to} & self.cut and not self.loses(message):
                require_sound(message)
                self.rafts[message.to].step(message)
            self.pump()

    def tick(self, ticks: int = 1, *, only: Iterable[int] | None = None) -> None:
        for _ in range(ticks):
            for id in self.rafts if only is None else only:
                self.rafts[id].tick()
            self.deliver_all()

    def elect(self, id: int) -> Raft:
        self.rafts[id].campaign()
        self.deliver_all()
        assert self.rafts[id].role == "leader"
        return self.rafts[id]

    def propose(self, id: int, *data: bytes) -> None:
        for one in data:
            self.rafts[id].propose(one)
        self.deliver_all()

    def change(self, id: int, membership: Membership) -> None:
        self.rafts[id].propose_membership(membership)
        self.deliver_all()


def roles(group: Group, *ids: int) -> list[str]:
    return [group[id].role for id in ids]


def vote_request(sender: int, to: int, term: int, *, is_pre: bool = False, by_transfer: bool = False) -> VoteRequest:
    return VoteRequest(
        sender=BrokerId(sender),
        to=BrokerId(to),
        term=Term(term),
        is_pre=is_pre,
        last_index=Index(99),
        last_term=Term(term),
        by_transfer=by_transfer,
    )


def messages_of(raft: Raft) -> list[Message]:
    """All of its messages; what they rest on counts as saved."""
    said: list[Message] = []
    while (ready := raft.ready()) is not None:
        said += ready.messages
        raft.advance(ready)
    return said


# -- elections


def test_single_voter_leads_and_commits_alone() -> None:
    group = Group(1)
    group.elect(1)
    group.propose(1, b"a", b"b")
    assert group.applied[1] == [b"a", b"b"]
    assert group[1].ticks_since_leader() == 0


def test_leader_is_elected_by_timeout_and_replicates() -> None:
    group = Group(1, 2, 3)
    group.tick(3 * ELECTION_TICKS)
    leaders = [id for id, raft in group.rafts.items() if raft.role == "leader"]
    assert len(leaders) == 1
    group.propose(leaders[0], b"a")
    assert all(applied == [b"a"] for applied in group.applied.values())
    assert {raft.leader for raft in group.rafts.values()} == set(leaders)


def test_messages_leave_only_with_the_vote_they_rest_on() -> None:
    raft = Group(1, 2, 3)[2]
    messages_of(raft)
    raft.step(vote_request(1, 2, 1))
    ready = raft.ready()
    assert ready is not None
    assert ready.must_sync
    assert ready.hard_state == HardState(term=Term(1), vote=BrokerId(1))
    assert [type(message) for message in ready.messages] == [VoteResponse]


def test_vote_is_not_forgotten_over_restart() -> None:
    group = Group(1, 2, 3)
    group[2].step(vote_request(1, 2, 1))
    ready = group[2].ready()
    assert ready is not None
    assert ready.hard_state is not None
    again = group.add(2, Snapshot(membership=members(1, 2, 3)), hard_state=ready.hard_state)
    again.step(vote_request(3, 2, 1))
    again.step(vote_request(1, 2, 1))
    answers = [(one.to, one.granted) for one in messages_of(again) if isinstance(one, VoteResponse)]
    assert answers == [(3, False), (1, True)]


def test_two_candidates_of_one_term_never_both_lead() -> None:
    group = Group(1, 2, 3)
    for id in (1, 2):
        group[id]._campaign_for_real()
    group.deliver_all()
    assert [group[1].role, group[2].role].count("leader") == 1
    assert group[1].term == group[2].term == 1


def test_second_leader_of_a_term_stops_the_node() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    other = AppendRequest(sender=BrokerId(3), to=BrokerId(1), term=Term(1), prev_index=Index(0), prev_term=Term(0))
    with pytest.raises(AssertionError, match="both lead in term 1"):
        group[1].step(other)


def test_vote_of_an_older_term_does_not_count() -> None:
    group = Group(1, 2, 3)
    for _ in range(2):
        group[1]._campaign_for_real()
    messages_of(group[1])
    vote = VoteResponse(sender=BrokerId(2), to=BrokerId(1), term=Term(1), is_pre=False, granted=True)
    group[1].step(vote)
    assert (group[1].role, group[1].term) == ("candidate", 2)
    group[1].step(msgspec.structs.replace(vote, term=Term(2)))
    assert group[1].role == "leader"


def test_vote_is_refused_to_a_shorter_log() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {3}
    group.propose(1, b"a")
    group.cut = {1}
    group.tick(ELECTION_TICKS, only=[2, 3])
    group[3].campaign()
    group.deliver_all()
    assert group[3].role != "leader"
    group.elect(2)


def test_pre_vote_keeps_the_term_of_one_cut_off() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {3}
    group.tick(20 * ELECTION_TICKS)
    assert (group[3].term, group[3].role, group[3].leader) == (1, "pre_candidate", None)
    group.cut = set()
    group.tick(ELECTION_TICKS)
    assert (group[1].role, group[1].term, group[3].leader) == ("leader", 1, 1)


def test_voter_with_a_leader_ignores_votes_unless_handed_over() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    for is_pre in (True, False):
        group[2].step(vote_request(3, 2, 2, is_pre=is_pre))
    assert messages_of(group[2]) == []
    assert group[2].term == 1
    group[2].step(vote_request(3, 2, 2, by_transfer=True))
    assert group[2].term == 2


def test_leader_whose_process_has_ended_is_succeeded_before_the_timeout() -> None:
    group = Group(1, 2, 3, 4, 5)
    group.elect(3)
    group.cut = {3}
    for id in (1, 2, 4, 5):
        group[id].member_ended(BrokerId(3))
    group.tick(1, only=(1, 2, 4, 5))
    assert roles(group, 1, 2, 4, 5) == ["leader", "follower", "follower", "follower"], "one campaigns at a time"
    assert group[1].term == group[3].term + 1


def test_second_voter_campaigns_where_the_first_one_does_not() -> None:
    group = Group(1, 2, 3)
    group.elect(3)
    group.cut = {3}
    group[2].member_ended(BrokerId(3))
    group.tick(3, only=(1, 2))
    assert roles(group, 1, 2) == ["follower", "pre_candidate"], "1 has not noticed it, and answers no request"
    group[1].member_ended(BrokerId(3))
    group.tick(1, only=(1, 2))
    assert roles(group, 1, 2) == ["leader", "follower"]


def test_leader_stays_that_only_one_voter_has_lost() -> None:
    group = Group(1, 2, 3)
    group.elect(3)
    term = group[3].term
    group[1].member_ended(BrokerId(3))
    group.tick(4 * ELECTION_TICKS)
    assert (roles(group, 1, 2, 3), group[3].term) == (["follower", "follower", "leader"], term)
    group[1].member_ended(BrokerId(2))
    assert group[1].leader == 3, "the end of a follower"
    group[3].member_ended(BrokerId(3))
    assert group[3].role == "leader"


def test_node_of_a_higher_term_rejoins_by_deposing_the_leader_once() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {3}
    group[3]._campaign_for_real()
    group.deliver_all()
    group.cut = set()
    group.tick(6 * ELECTION_TICKS)
    assert len({raft.term for raft in group.rafts.values()}) == 1
    assert group[1].term in (2, 3)
    assert [raft.role for raft in group.rafts.values()].count("leader") == 1


def test_leader_without_quorum_steps_down() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {1}
    group.tick(ELECTION_TICKS - 1)
    assert group[1].role == "leader"
    group.tick(2)
    assert (group[1].role, group[1].leader) == ("follower", None)
    assert group[1].ticks_since_leader() > 0
    with pytest.raises(NotMetadataLeader) as refused:
        group[1].propose(b"a")
    assert refused.value.facts == {"leader": None}


def test_one_way_cut_leader_that_hears_nothing_makes_room() -> None:
    """Its messages arrive, so the others would follow it without end; CheckQuorum ends that."""
    group = Group(1, 2, 3)
    group.elect(1)
    group.loses = lambda message: message.to == 1
    group.tick(4 * ELECTION_TICKS)
    assert group[1].role != "leader"
    assert [group[2].role, group[3].role].count("leader") == 1


def test_one_way_cut_follower_that_hears_nothing_disturbs_nobody() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.loses = lambda message: message.to == 3
    group.tick(10 * ELECTION_TICKS)
    assert (group[1].role, group[1].term) == ("leader", 1)


def test_active_within_tells_who_answered() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {3}
    group.tick(6)
    assert group[1].active_within(4) == {1, 2}
    assert group[1].active_within(20) == {1, 2, 3}
    assert group[2].active_within(20) == frozenset()


# -- the log


def test_figure_8_an_entry_of_an_older_term_is_not_committed_by_counting() -> None:
    """The paper's figure, step by step: S1 led term 2, S5 term 3; S1 leads term 4 and spreads its entry of term 2."""
    group = Group()
    everyone = Snapshot(membership=members(1, 2, 3, 4, 5))
    logs = {1: (1, 2), 2: (1, 2), 3: (1,), 4: (1,), 5: (1, 3)}
    for id, terms in logs.items():
        state = HardState(term=Term(3), vote=BrokerId(5 if id > 2 else id), commit=Index(1))
        group.add(id, everyone, entries_of(*terms), state)
    s1 = group[1]
    s1._max_append_bytes = 1  # one entry in each append: that of term 2 arrives, that of term 4 is taken out on its way
    group.alter = lambda message: (
        msgspec.structs.replace(message, entries=())
        if isinstance(message, AppendRequest) and any(one.term == 4 for one in message.entries)
        else message
    )
    group.cut = {4, 5}
    group.elect(1)
    group.tick(4)
    assert s1.term == 4
    assert s1.match_of(BrokerId(2)) == s1.match_of(BrokerId(3)) == 2, "a majority holds the entry of term 2"
    assert s1.commit == 1, "and yet it is not committed"

    group.cut = {1}
    for id in (2, 3, 4):
        group.rafts[id].leader = None  # their lease ran out
    group[5].campaign()  # in vain: it learns of term 4
    group.deliver_all()
    group.elect(5)
    group.tick(4)
    assert group[5].term == 5
    assert [one.term for one in group[3]._entries_after(Index(0))] == [1, 3, 5], "S5 replaced it: so it may"
    assert group[2].commit == 3


def test_own_entry_commits_those_of_older_terms_with_it() -> None:
    group = Group()
    for id in (1, 2, 3):
        group.add(id, Snapshot(membership=members(1, 2, 3)), entries_of(1, 1) if id == 1 else [])
    group.elect(1)
    assert group[1].commit == 3
    assert all(applied == [b"1", b"1"] for applied in group.applied.values())


def test_follower_that_is_far_off_is_found_in_few_rounds() -> None:
    group = Group()
    for id, terms in {1: [1] * 5 + [4] * 50, 2: [1] * 5 + [2] * 30 + [3] * 30, 3: [1] * 5 + [4] * 50}.items():
        group.add(id, Snapshot(membership=members(1, 2, 3)), entries_of(*terms))
    group.elect(1)
    refused = [one for one in group.said if isinstance(one, AppendResponse) and one.rejected]
    assert len(refused) <= 3
    assert group[2].last_index == group[1].last_index == group[2].commit


def test_late_append_does_not_cut_off_what_is_newer() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.propose(1, b"a")
    old = next(one for one in group.said if isinstance(one, AppendRequest) and one.to == 2 and one.entries)
    group.propose(1, b"b")
    last = group[2].last_index
    group[2].step(old)
    assert group[2].last_index == last


def test_own_entries_count_only_after_advance() -> None:
    raft = Group(1)[1]
    messages_of(raft)
    raft.campaign()
    vote = raft.ready()
    assert vote is not None
    assert raft.role == "candidate", "nor does its own vote"
    raft.advance(vote)
    entry = raft.ready()
    assert entry is not None
    assert (raft.role, raft.commit) == ("leader", 0)
    raft.advance(entry)
    assert raft.commit == 1


def test_step_between_ready_and_advance_keeps_the_order() -> None:
    """An entry handed to the store is replaced while it is saved: the next Ready says so."""
    raft = Group(1, 2, 3)[2]
    messages_of(raft)

    def append(sender: int, term: int) -> AppendRequest:
        entry = Entry(Index(1), Term(term), "command", b"%d" % term)
        return AppendRequest(
            sender=BrokerId(sender),
            to=BrokerId(2),
            term=Term(term),
            prev_index=Index(0),
            prev_term=Term(0),
            entries=(entry,),
        )

    raft.step(append(1, 1))
    first = raft.ready()
    raft.step(append(3, 2))
    assert first is not None
    raft.advance(first)
    second = raft.ready()
    assert second is not None
    assert (second.truncate_from, [one.term for one in second.entries]) == (1, [2])


def test_second_ready_before_advance_is_a_bug() -> None:
    raft = Group(1, 2, 3)[1]
    assert raft.ready() is not None
    with pytest.raises(AssertionError, match="advance"):
        raft.ready()


def test_doubled_answers_do_not_double_what_is_sent() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    answer = next(one for one in group.said if isinstance(one, AppendResponse) and one.sender == 2)
    rejected = msgspec.structs.replace(answer, rejected=True, index=Index(1), hint_term=Term(1))
    for _ in range(20):
        group[1].step(rejected)
        group[1].step(answer)
    assert len(messages_of(group[1])) <= 2


# -- snapshots


def compacted(blank: int = 4) -> Group:
    """A leader whose snapshot is some chunks long, and a blank node that needs it."""
    group = Group(1, 2, 3, blank=[blank])
    group.elect(1)
    group[1].trailing_entries = 0
    group.propose(1, b"a", b"b", b"c")
    group[1].compact(group[1].applied, bytes(range(250)))
    return group


def test_joiner_is_given_the_snapshot_in_chunks() -> None:
    group = compacted()
    group.change(1, group[1].membership.with_member(member(4, is_voter=False)))
    chunks = [one for one in group.said if isinstance(one, SnapshotChunk)]
    assert [one.position for one in chunks] == [0, 100, 200]
    assert group.installed == [
        Snapshot(index=Index(4), term=Term(1), membership=members(1, 2, 3), data=bytes(range(250)))
    ]
    assert group[4].commit == group[1].commit
    assert group[4].membership.find(BrokerId(4)) == member(4, is_voter=False)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_damaged_snapshot_is_never_installed_and_sent_again(chunk: int) -> None:
    group = compacted()
    damaged: list[int] = []

    def alter(message: Message) -> Message:
        if not damaged and isinstance(message, SnapshotChunk) and message.position == 100 * chunk:
            damaged.append(message.position)
            return msgspec.structs.replace(message, data=bytes([message.data[0] ^ 1]) + message.data[1:])
        return message

    group.alter = alter
    group.change(1, group[1].membership.with_member(member(4, is_voter=False)))
    assert damaged
    assert [one.data for one in group.installed] == [bytes(range(250))]
    restarts = [one for one in group.said if isinstance(one, SnapshotResponse) and one.position == 0]
    assert len(restarts) == 1


def test_lost_chunk_is_sent_again_after_a_while() -> None:
    group = compacted()
    lost: list[Message] = []

    def loses(message: Message) -> bool:
        if isinstance(message, SnapshotChunk) and len(lost) < 2:
            lost.append(message)
            return True
        return False

    group.loses = loses
    group.change(1, group[1].membership.with_member(member(4, is_voter=False)))
    assert not group.installed
    group.tick(16)
    assert len(group.installed) == 1


def test_leader_that_compacts_during_a_transfer_goes_on_with_the_newer_snapshot() -> None:
    group = compacted()
    group.loses = lambda message: isinstance(message, SnapshotResponse)
    group.change(1, group[1].membership.with_member(member(4, is_voter=False)))
    group.propose(1, b"d", b"e")
    group[1].compact(group[1].applied, bytes(150))
    group.loses = lambda message: False
    group.tick(10)
    assert group[4].commit == group[1].commit
    assert [len(one.data) for one in group.installed] == [250, 150]


def test_compact_keeps_trailing_entries_for_slow_followers() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {3}
    group.propose(1, b"a", b"b")
    group[1].compact(group[1].applied, b"state")
    group.cut = set()
    group.tick(8)
    assert group.applied[3] == [b"a", b"b"]
    assert not group.installed


def test_restart_from_snapshot_and_trailing_entries_applies_the_rest_only() -> None:
    again = Group().add(
        1,
        Snapshot(index=Index(2), term=Term(1), membership=members(1)),
        entries_of(1, 1, 2),
        HardState(term=Term(2), commit=Index(3)),
    )
    ready = again.ready()
    assert ready is not None
    assert [one.index for one in ready.committed] == [3]
    assert again.membership == members(1)


# -- members


def test_learner_receives_everything_and_counts_for_nothing() -> None:
    group = Group(1, blank=[2])
    group.elect(1)
    group.change(1, group[1].membership.with_member(member(2, is_voter=False)))
    group.cut = {2}
    group.propose(1, b"a")
    assert group.applied[1] == [b"a"]
    group.cut = set()
    group.tick(8)
    assert group.applied[2] == [b"a"]
    group.cut = {1}
    group.tick(5 * ELECTION_TICKS, only=[2])
    assert (group[2].role, group[2].term) == ("follower", 1)


def test_promoted_learner_counts_from_when_the_entry_is_appended() -> None:
    group = Group(1, blank=[2])
    group.elect(1)
    group.change(1, group[1].membership.with_member(member(2, is_voter=False)))
    group.cut = {2}
    group.change(1, members(1, 2))
    commit = group[1].commit
    group.propose(1, b"a")
    assert group[1].membership.voters == (1, 2)
    assert group[1].commit == commit
    group.cut = set()
    group.tick(8)
    assert group.applied == {1: [b"a"], 2: [b"a"]}


def test_blank_node_votes_and_follows_but_never_campaigns() -> None:
    group = Group(1, blank=[2])
    group.tick(5 * ELECTION_TICKS, only=[2])
    group[2].campaign()
    assert group[2].role == "follower"
    group[2].step(vote_request(1, 2, 3))
    assert [one.granted for one in messages_of(group[2]) if isinstance(one, VoteResponse)] == [True]


def test_one_change_at_a_time() -> None:
    group = Group(1, 2, 3)
    leader = group.elect(1)
    group.add(4, Snapshot())
    group.cut = {2, 3, 4}
    group.change(1, leader.membership.with_member(member(4, is_voter=False)))
    with pytest.raises(MembershipChanging):
        leader.propose_membership(leader.membership.with_member(member(5, is_voter=False)))
    group.cut = set()
    group.tick(8)
    leader.propose_membership(leader.membership.without(BrokerId(4)))


def test_no_change_before_the_leader_committed_in_its_term() -> None:
    group = Group(1, 2, 3)
    group.loses = lambda message: isinstance(message, AppendResponse)
    group.elect(1)
    with pytest.raises(MembershipChanging):
        group[1].propose_membership(members(1, 2))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Membership(), "last voter"),
        (Membership(members=(member(1, is_voter=False),)), "last voter"),
        (members(1), "one at a time"),
        (members(1, 2, 3, 4, 5), "one at a time"),
        (members(1, 2, 4), "one at a time"),
        (members(1, 2, 3).with_member(member(3, directory="new")), "one at a time"),
        (Membership(members=(*members(1, 2, 3).members, member(3))), "named twice"),
    ],
)
def test_unsafe_change_is_refused(wanted: Membership, words: str) -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    with pytest.raises(InvalidRequest, match=words):
        group[1].propose_membership(wanted)
    assert group[1].membership == members(1, 2, 3)


def test_membership_is_reverted_when_its_entry_is_replaced() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {1}
    group.change(1, members(1, 2))
    assert group[1].membership == members(1, 2)
    group.tick(ELECTION_TICKS + 1)
    group.elect(2)
    group.cut = set()
    group.tick(6)
    assert group[1].membership == group[2].membership == members(1, 2, 3)


def test_membership_entry_holds_the_membership() -> None:
    group = Group(1, 2, 3)
    leader = group.elect(1)
    _, index = leader.propose_membership(members(1, 2))
    entry = leader.log.slice(index, max_bytes=1)[0]
    assert (entry.kind, decode_membership(entry.data)) == ("membership", members(1, 2))


def test_removed_leader_steps_down_once_that_is_committed() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {2, 3}
    group.change(1, members(2, 3))
    assert roles(group, 1) == ["leader"]
    group.cut = set()
    group.tick(6)
    assert roles(group, 1) == ["follower"]
    group.tick(3 * ELECTION_TICKS)
    assert roles(group, 2, 3).count("leader") == 1
    assert (roles(group, 1), group[2].membership) == (["follower"], members(2, 3))


def test_leader_that_fell_while_removing_itself_is_elected_by_the_other_alone() -> None:
    """Broker 2 lacks the entry and cannot win; broker 1 is no voter any more in its own eyes, and must yet campaign."""
    group = Group(1, 2)
    group.elect(1)
    group.cut = {2}
    group.change(1, members(2))
    group.tick(ELECTION_TICKS + 1)
    assert group[1].role != "leader"
    group.cut = set()
    group.tick(8 * ELECTION_TICKS)
    assert (group[2].role, group[2].membership, group[2].commit) == ("leader", members(2), group[2].last_index)


def test_removed_node_disturbs_nobody() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {3}
    group.change(1, members(1, 2))
    group.cut = set()
    group.tick(10 * ELECTION_TICKS)
    assert (group[1].role, group[1].term) == ("leader", 1)


# -- handing over, reading


def test_transfer_hands_over_at_once() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group[1].transfer(BrokerId(3))
    group.deliver_all()
    assert (group[3].role, group[3].term, group[1].leader) == ("leader", 2, 3)


def test_transfer_waits_for_the_log_and_refuses_proposals_meanwhile() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {3}
    group.propose(1, b"a")
    group[1].transfer(BrokerId(3))
    with pytest.raises(NotMetadataLeader, match="transferring leadership") as refused:
        group[1].propose(b"b")
    assert refused.value.facts == {"leader": 3}
    group.cut = set()
    group.tick(8)
    assert group[3].role == "leader"
    assert group.applied[3] == [b"a"]


def test_transfer_is_given_up_after_an_election_timeout() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {3}
    group[1].transfer(BrokerId(3))
    group.tick(ELECTION_TICKS)
    group.propose(1, b"a")
    assert group.applied[1] == [b"a"]


def test_successor_is_the_voter_with_the_longest_log_of_those_that_answer() -> None:
    group = Group(1, 2, 3, 4)
    assert group[1].successor(()) is None, "it does not lead"
    group.elect(1)
    group.cut = {2}
    group.propose(1, b"a")
    assert group[1].successor(()) in (3, 4)
    assert group[1].successor({BrokerId(3)}) == 4
    group.tick(5)  # broker 2 answers no heartbeat
    assert group[1].successor({BrokerId(3), BrokerId(4)}) is None
    group.change(1, group[1].membership.with_member(member(4, is_voter=False)))
    assert group[1].successor({BrokerId(3)}) is None, "broker 4 is no voter"


def test_transfer_to_one_that_cannot_lead_is_refused() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    with pytest.raises(InvalidRequest, match="not a voter"):
        group[1].transfer(BrokerId(9))
    group[1].transfer(BrokerId(1))
    group.propose(1, b"a")


def test_campaign_order_of_an_older_term_is_ignored() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group[2].step(TimeoutNow(sender=BrokerId(3), to=BrokerId(2), term=Term(0)))
    assert (group[2].role, group[2].term) == ("follower", 1)


def test_read_is_confirmed_by_a_round_of_a_quorum() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.propose(1, b"a")
    group.cut = {2, 3}
    group[1].read_index(7)
    group.deliver_all()
    assert group.reads == []
    group.cut = {2}
    group.tick(2)
    assert group.reads == [ConfirmedRead(context=7, index=Index(2))]


def test_read_waits_for_an_entry_of_the_own_term() -> None:
    group = Group(1, 2, 3)
    group.loses = lambda message: isinstance(message, AppendRequest) and bool(message.entries)
    group.elect(1)
    group[1].read_index(7)
    group.tick(2)
    assert group.reads == []
    group.loses = lambda message: False
    group.tick(6)
    assert group.reads == [ConfirmedRead(context=7, index=Index(1))]


def test_read_of_a_leader_that_ceases_to_is_never_confirmed() -> None:
    group = Group(1, 2, 3)
    group.elect(1)
    group.cut = {1}
    group[1].read_index(7)
    group.tick(ELECTION_TICKS + 1)
    group.cut = set()
    group.tick(4 * ELECTION_TICKS)
    assert group.reads == []
    follower = next(raft for raft in group.rafts.values() if raft.role == "follower")
    with pytest.raises(NotMetadataLeader):
        follower.read_index(8)


def test_answer_to_an_older_term_confirms_no_read() -> None:
    """Broker 2 answers an append of term 1 in term 2, which broker 1 leads by then."""
    group = Group(1, 2, 3)
    group.elect(1)
    old = AppendRequest(
        sender=BrokerId(1), to=BrokerId(2), term=Term(0), prev_index=Index(0), prev_term=Term(0), round=5
    )
    group[2].step(old)
    answers = [one for one in messages_of(group[2]) if isinstance(one, AppendResponse)]
    assert [(one.term, one.rejected, one.round) for one in answers] == [(1, True, 0)]
