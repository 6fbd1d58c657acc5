"""Raft without I/O: its inputs are messages and ticks; its outputs are the data to save, send and apply.

`raft` is the entry point; `state`, `following`, `leading` and `elections` are its parts, one concern each, on
`raft_log`, `progress` and `membership`. No module uses files, sockets, clocks or external randomness.
"""

from natslog.consensus.bounds import MAX_BROKER_ID, MAX_COUNT, MAX_TERM_JUMP, require_sound, require_storable
from natslog.consensus.membership import decode_membership, encode_membership, require_safe_change
from natslog.consensus.raft import Raft, Ready
from natslog.consensus.state import ConfirmedRead, Role
from natslog.consensus.types import (
    AppendRequest,
    AppendResponse,
    Entry,
    HardState,
    Index,
    Member,
    Membership,
    Message,
    Snapshot,
    SnapshotChunk,
    SnapshotResponse,
    Term,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)

__all__ = [
    "AppendRequest",
    "AppendResponse",
    "ConfirmedRead",
    "Entry",
    "HardState",
    "Index",
    "MAX_BROKER_ID",
    "MAX_COUNT",
    "MAX_TERM_JUMP",
    "Member",
    "Membership",
    "Message",
    "Raft",
    "Ready",
    "Role",
    "Snapshot",
    "SnapshotChunk",
    "SnapshotResponse",
    "Term",
    "TimeoutNow",
    "VoteRequest",
    "VoteResponse",
    "decode_membership",
    "encode_membership",
    "require_safe_change",
    "require_sound",
    "require_storable",
]
