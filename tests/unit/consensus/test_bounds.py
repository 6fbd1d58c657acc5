"""Numbers that no correct member sends: refused before they change anything."""

from __future__ import annotations

import msgspec
import pytest

from natslog.consensus import (
    MAX_COUNT,
    MAX_TERM_JUMP,
    AppendRequest,
    AppendResponse,
    Entry,
    HardState,
    Index,
    Member,
    Membership,
    Message,
    Raft,
    Snapshot,
    SnapshotChunk,
    SnapshotResponse,
    Term,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
    encode_membership,
    require_sound,
)
from natslog.errors import ClusterMismatch
from natslog.model import BrokerId

HIGHEST = 2**64 - 1
ONE, TWO = BrokerId(1), BrokerId(2)
MEMBERSHIP = Membership(members=tuple(Member(id=BrokerId(n), directory=f"d{n}", url=f"http://{n}") for n in (1, 2, 3)))
BEGINNING = Snapshot(index=Index(1), term=Term(1), membership=MEMBERSHIP)


def at(number: int) -> tuple[Index, Term]:
    return Index(number), Term(number)


INDEX, TERM = at(7)
MESSAGES: list[Message] = [
    VoteRequest(sender=ONE, to=TWO, term=TERM, is_pre=False, last_index=INDEX, last_term=TERM),
    VoteResponse(sender=ONE, to=TWO, term=TERM, is_pre=False, granted=True),
    AppendRequest(
        sender=ONE,
        to=TWO,
        term=TERM,
        prev_index=INDEX,
        prev_term=TERM,
        entries=(Entry(Index(8), TERM, "empty"), Entry(Index(9), TERM, "empty")),
        commit=INDEX,
        round=1,
    ),
    AppendResponse(sender=ONE, to=TWO, term=TERM, rejected=False, index=INDEX, hint_term=TERM, round=1),
    SnapshotChunk(
        sender=ONE,
        to=TWO,
        term=TERM,
        index=INDEX,
        index_term=TERM,
        membership=MEMBERSHIP,
        position=0,
        total_bytes=4,
        crc=1,
        data=b"data",
    ),
    SnapshotResponse(sender=ONE, to=TWO, term=TERM, index=INDEX, position=1, done=False),
    TimeoutNow(sender=ONE, to=TWO, term=TERM),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_with_an_absurd_number_anywhere_is_refused(message: Message) -> None:
    require_sound(message)
    numbers = [name for name in message.__struct_fields__ if type(getattr(message, name)) is int]
    assert "term" in numbers
    for name in numbers:
        for absurd in (HIGHEST, MAX_COUNT + 1, -1):
            with pytest.raises(ClusterMismatch, match="no broker sends"):
                require_sound(msgspec.structs.replace(message, **{name: absurd}))


@pytest.mark.parametrize(
    "entries",
    [
        (Entry(Index(9), TERM, "empty"),),
        (Entry(Index(8), TERM, "empty"), Entry(Index(8), TERM, "empty")),
        (Entry(Index(8), Term(6), "empty"),),
        (Entry(Index(8), Term(8), "empty"),),
        (Entry(Index(8), Term(HIGHEST), "empty"),),
    ],
    ids=["gap", "twice", "falling term", "term after the leader's", "highest term"],
)
def test_append_whose_entries_do_not_follow_is_refused(entries: tuple[Entry, ...]) -> None:
    append = AppendRequest(sender=ONE, to=TWO, term=TERM, prev_index=INDEX, prev_term=TERM, entries=entries)
    with pytest.raises(ClusterMismatch, match="entries"):
        require_sound(append)


def test_snapshot_chunk_beyond_its_size_is_refused() -> None:
    chunk = next(message for message in MESSAGES if isinstance(message, SnapshotChunk))
    for changed in ({"total_bytes": 3}, {"position": 1}, {"total_bytes": 2**40}):
        with pytest.raises(ClusterMismatch, match="size"):
            require_sound(msgspec.structs.replace(chunk, **changed))


def test_membership_of_impossible_brokers_is_refused() -> None:
    chunk = next(message for message in MESSAGES if isinstance(message, SnapshotChunk))
    (one, two, three) = MEMBERSHIP.members
    impossible = [(one, one), *((msgspec.structs.replace(two, id=id), three) for id in (0, HIGHEST))]
    for members in impossible:
        wrong = Membership(members=members)
        for data in (encode_membership(wrong), b"nonsense"):
            entries = (Entry(Index(8), TERM, "membership", data),)
            append = AppendRequest(sender=ONE, to=TWO, term=TERM, prev_index=INDEX, prev_term=TERM, entries=entries)
            with pytest.raises(ClusterMismatch, match="members"):
                require_sound(append)
        with pytest.raises(ClusterMismatch, match="members"):
            require_sound(msgspec.structs.replace(chunk, membership=wrong))
    entries = (Entry(Index(8), TERM, "membership", encode_membership(MEMBERSHIP)),)
    require_sound(AppendRequest(sender=ONE, to=TWO, term=TERM, prev_index=INDEX, prev_term=TERM, entries=entries))


def raft(term: int = 5, snapshot: Snapshot = BEGINNING) -> Raft:
    return Raft(me=TWO, hard_state=HardState(term=Term(term)), snapshot=snapshot, entries=(), seed=1)


def append_of(term: int) -> AppendRequest:
    return AppendRequest(sender=ONE, to=TWO, term=Term(term), prev_index=Index(1), prev_term=Term(1))


def test_term_too_far_ahead_changes_nothing() -> None:
    one = raft()
    for message in (
        append_of(5 + MAX_TERM_JUMP + 1),
        VoteRequest(
            sender=ONE, to=TWO, term=Term(5 + MAX_TERM_JUMP + 1), is_pre=False, last_index=Index(9), last_term=Term(9)
        ),
    ):
        with pytest.raises(ClusterMismatch, match="too large to be valid"):
            one.step(message)
    assert (one.term, one.vote, one.leader) == (5, None, None)
    one.step(append_of(5 + MAX_TERM_JUMP))
    assert (one.term, one.leader) == (5 + MAX_TERM_JUMP, ONE)


def test_blank_member_takes_any_term_of_its_cluster() -> None:
    one = raft(0, Snapshot())
    one.step(append_of(10 * MAX_TERM_JUMP))
    assert one.term == 10 * MAX_TERM_JUMP


def leader() -> Raft:
    one = raft()
    one.campaign()
    for is_pre in (True, False):
        ready = one.ready()
        assert ready is not None
        one.advance(ready)
        one.step(VoteResponse(sender=ONE, to=TWO, term=Term(6), is_pre=is_pre, granted=True))
    assert one.role == "leader"
    return one


@pytest.mark.parametrize(("index", "round"), [(3, 0), (HIGHEST, 0), (2, 1)])
def test_answer_to_what_was_never_sent_commits_nothing(index: int, round: int) -> None:
    one = leader()
    assert one.last_index == 2
    response = AppendResponse(
        sender=ONE, to=TWO, term=one.term, rejected=False, index=Index(index), hint_term=Term(0), round=round
    )
    with pytest.raises(ClusterMismatch, match="confirms entry"):
        one.step(response)
    assert one.commit == 1
