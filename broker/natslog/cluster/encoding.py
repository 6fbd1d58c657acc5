"""Metadata as it is stored and sent: MessagePack. Data that a newer natslog wrote is refused as a whole.

Invariant. No unknown field is dropped: brokers that drop different fields would hold different states. Every record,
command and state rejects them, and so do the checks here before anything is stored or applied.
"""

from __future__ import annotations

from typing import Any

import msgspec

from natslog.cluster.commands import FinalizeUpgrade, Proposal
from natslog.cluster.features import require_supported
from natslog.cluster.metadata import Metadata
from natslog.errors import UpgradeRequired

_encode = msgspec.msgpack.encode
_proposals = msgspec.msgpack.Decoder(Proposal)
_states = msgspec.msgpack.Decoder(Metadata)


class _FormerState(msgspec.Struct):
    """The fields of a state that are of level 1, and its level, which is absent there. Other fields are skipped.

    natslog 0.2.0 empties them when the upgrade is finalized: the outcomes with the next command, the cursors once they
    are copied.
    """

    feature_level: int = 1
    cursors: dict[str, Any] = {}
    outcomes: dict[str, Any] = {}
    cursor_outcomes: dict[str, Any] = {}


_former_states = msgspec.msgpack.Decoder(_FormerState)


def encode_state(state: Metadata) -> bytes:
    return _encode(state)


def decode_state(data: bytes) -> Metadata:
    """The state of a snapshot; an empty one for the snapshot before the first. Raises UpgradeRequired."""
    if not data:
        return Metadata(cluster_id="")
    what = "the state of the metadata"
    former: _FormerState = _decoded(_former_states, data, what)
    require_supported(former.feature_level, "the metadata")
    if former.cursors or former.outcomes or former.cursor_outcomes:
        raise UpgradeRequired(
            "the last snapshot of the metadata was stored before natslog 0.2.0 had completed the change to feature "
            "level 2. Start natslog 0.2.0 again, and make 1,024 changes of the metadata (docs/OPERATIONS.md, Upgrade "
            "from 0.1.0, has the commands), then start this version. The broker stops; nothing was changed"
        )
    state: Metadata = _decoded(_states, data, what)
    return state


def encode_proposal(proposal: Proposal) -> bytes:
    return _encode(proposal)


def decode_proposal(data: bytes) -> Proposal:
    """What an entry of the log holds. Raises UpgradeRequired: an unknown command or field."""
    proposal: Proposal = _decoded(_proposals, data, "a command in the metadata log")
    if isinstance(proposal.command, FinalizeUpgrade):
        require_supported(proposal.command.level, "the metadata")
    return proposal


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes, what: str) -> Any:
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's errors, and texts that are not UTF-8
        raise written_by_newer(what, error) from error


def written_by_newer(what: object, error: Exception) -> UpgradeRequired:
    """For intact bytes that this version does not write."""
    return UpgradeRequired(
        f"{what} was written by a newer version of natslog ({error}): upgrade this broker. The broker stops; "
        "nothing was changed"
    )
