"""Limits for numbers from other members: no implausible number may reach a log or a hard state.

A counter that grows once a microsecond needs 285 years to reach `MAX_COUNT`; a larger number cannot be the result of
counting. What is well-formed (`require_sound`) does not depend on this member's state and is checked where messages are
decoded. What is plausible (`MAX_TERM_JUMP`) depends on it and is checked in `Raft.step`.
"""

from __future__ import annotations

from typing import Any

from natslog.consensus.membership import decode_membership
from natslog.consensus.types import (
    AppendRequest,
    AppendResponse,
    Membership,
    Message,
    SnapshotChunk,
    SnapshotResponse,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from natslog.errors import ClusterMismatch, InvalidRequest

MAX_COUNT = 2**53 - 1
MAX_BROKER_ID = 2**31
MAX_SNAPSHOT_BYTES = 1024 * 1024 * 1024
MAX_TERM_JUMP = 2**24
"""How many terms a member may be behind: with an election every second that is more than half a year."""


def require_sound(message: Message) -> None:
    """Raises ClusterMismatch: no broker sends such a message."""
    _require(0 < message.sender <= MAX_BROKER_ID and 0 < message.to <= MAX_BROKER_ID, message, "broker ids")
    match message:
        case VoteRequest(term=term, last_index=last_index, last_term=last_term):
            _require_counts(message, term, last_index, last_term)
            _require(last_term <= term, message, "last_term")
        case AppendRequest():
            _require_sound_append(message)
        case AppendResponse(term=term, index=index, hint_term=hint_term, round=round):
            _require_counts(message, term, index, hint_term, round)
        case SnapshotChunk(term=term, index=index, index_term=index_term, round=round):
            _require_counts(message, term, index, index_term, round, message.position, message.crc)
            _require(index_term <= term, message, "index_term")
            end = message.position + len(message.data)
            _require(end <= message.total_bytes <= MAX_SNAPSHOT_BYTES, message, "size")
            _require(_is_sound_membership(message.membership), message, "members")
        case SnapshotResponse(term=term, index=index, position=position, round=round):
            _require_counts(message, term, index, round)
            _require(0 <= position <= MAX_SNAPSHOT_BYTES, message, "position")
        case VoteResponse(term=term) | TimeoutNow(term=term):
            _require_counts(message, term)


def _require_sound_append(request: AppendRequest) -> None:
    """Entries follow on `prev_index` without a gap, and their terms never fall nor exceed the leader's."""
    _require_counts(request, request.term, request.prev_index, request.prev_term, request.commit, request.round)
    index, term = request.prev_index, request.prev_term
    for entry in request.entries:
        _require(entry.index == index + 1 and term <= entry.term <= request.term, request, "entries")
        if entry.kind == "membership":
            _require(_is_sound_encoded_membership(entry.data), request, "members")
        index, term = entry.index, entry.term
    _require(index <= MAX_COUNT and request.prev_term <= request.term, request, "indexes")


def _is_sound_encoded_membership(data: bytes) -> bool:
    try:
        return _is_sound_membership(decode_membership(data))
    except (ValueError, RecursionError):  # msgspec's errors, and texts that are not UTF-8
        return False


def _is_sound_membership(membership: Membership) -> bool:
    ids = [member.id for member in membership.members]
    return len(set(ids)) == len(ids) and all(0 < id <= MAX_BROKER_ID for id in ids)


def _require_counts(message: Message, *counts: int) -> None:
    _require(all(0 <= count <= MAX_COUNT for count in counts), message, "numbers")


def _require(is_sound: bool, message: Message, what: str) -> None:
    if not is_sound:
        raise ClusterMismatch(
            f"a {type(message).__name__} from broker {message.sender} has invalid {what} that no broker sends: the "
            "link is closed",
            broker=message.sender,
        )


def require_storable(value: Any) -> None:
    """Raises InvalidRequest: a number in these nested values does not fit into a signed integer of 64 bits."""
    match value:
        case dict():
            for each in value.values():
                require_storable(each)
        case list() | tuple():
            for each in value:
                require_storable(each)
        case int() if not -(2**63) <= value < 2**63:
            raise InvalidRequest(f"{value} is out of range: integers have 64 bits, including the sign")
        case _:
            pass
